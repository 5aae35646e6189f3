"""Claim: with rematerialization between products, FP8 moves little more than bf16 and needs far less memory.

    uv run benchmarks/less_memory_than_bf16.py [--json FILE] [--markdown] [--device h100]

The options of `docs/performance.md` on four blocks of Llama-8B, compiled as `fewer_launches_than_peers.py` does: counts
and bytes are read from the program, and the time is an estimate from the device's data-sheet peaks. Nothing runs.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import haliax as hax
from fewer_launches_than_peers import COLUMNS, held
from lib import output
from lib.libraries import LIBRARIES, Library
from lib.models import COMPRESSED, LLAMA_8B, REMATERIALIZED, REMATERIALIZED_IN_FLOAT32, RULES, STACKS, Stack, llama
from rich.progress import Progress

import haliax_fp8 as fp8


def _saving(*names: str) -> hax.ScanCheckpointPolicy:
    return hax.ScanCheckpointPolicy(save_block_internals=list(names))


def _converted(change: Callable[[Any], Any] = lambda model: model, **options: Any) -> Library:
    convert = lambda model: change(fp8.fp8_linear_layers(model, fp8.Fp8Config(**options)))
    return dataclasses.replace(LIBRARIES["haliax_fp8"], convert=convert)


BF16, DEFAULT, HALIAX = (LIBRARIES[name] for name in ("bf16", "haliax_fp8", "haliax.quantization"))
SHARED = _converted(fp8.memory.share_input_scales)
SHARED_KEPT = _converted(fp8.memory.share_input_scales, kernel_residual=fp8.memory.KernelResidual.KEEP)
# Neither amaxes nor state.
STATIC = _converted(fp8.memory.share_input_scales, recipe="static")


def rematerialized(library: Library, device: str) -> Library:
    """Converted, then `rematerialize`d: the blocks' code does nothing for it."""
    change = lambda model: fp8.memory.rematerialize(library.convert(model), device=device, rules=RULES)
    return dataclasses.replace(library, convert=change)


def from_outside(device: str) -> dict[str, tuple[Stack, Library]]:
    """The rows with `rematerialize`, which depend on the device."""
    libraries = {"bf16": BF16, "FP8": DEFAULT, "FP8, shared": SHARED, "FP8, shared, kernels kept": SHARED_KEPT}
    return {
        f"{name}, rematerialize: {library}": (STACKS[f"Llama-8B, {name}"], rematerialized(how, device))
        for name in ("unrolled", "scan", "scan + checkpointing")
        for library, how in libraries.items()
        if name == "unrolled" or "kept" not in library
    }


ALL = {"bf16": BF16, "Haliax's op": HALIAX, "FP8, shared": SHARED}


def _rematerialized(name: str, libraries: dict[str, Library], **options: Any) -> dict[str, tuple[Stack, Library]]:
    """What lies between products keeps its inputs alone, in all libraries; computed in its own dtype, or in float32."""
    ours = {library: how for library, how in libraries.items() if library.startswith("FP8")}
    parts = {
        "rematerialized": (REMATERIALIZED, libraries),
        "rematerialized in float32": (REMATERIALIZED_IN_FLOAT32, libraries),
        "rematerialized in float32, q/k/v joined": ({**REMATERIALIZED_IN_FLOAT32, "joined": True}, ours),
    }
    return {
        f"{name}, {how}: {library}": (llama(**changed, **options), converted)
        for how, (changed, chosen) in parts.items()
        for library, converted in chosen.items()
    }


OPTIONS: dict[str, tuple[Stack, Library]] = {
    "unrolled: bf16": (STACKS["Llama-8B, unrolled"], BF16),
    "unrolled: FP8": (STACKS["Llama-8B, unrolled"], DEFAULT),
    "unrolled: FP8, kernels kept": (
        STACKS["Llama-8B, unrolled"],
        _converted(kernel_residual=fp8.memory.KernelResidual.KEEP),
    ),
    "unrolled: FP8, shared": (STACKS["Llama-8B, unrolled"], SHARED),
    "unrolled: FP8, shared, kernels kept": (STACKS["Llama-8B, unrolled"], SHARED_KEPT),
    "unrolled: FP8, shared, constant scales": (STACKS["Llama-8B, unrolled"], STATIC),
    **_rematerialized("unrolled", {**ALL, "FP8, shared, kernels kept": SHARED_KEPT}, stacked=False),
    "scan: bf16": (STACKS["Llama-8B, scan"], BF16),
    "scan: FP8": (STACKS["Llama-8B, scan"], DEFAULT),
    "scan: FP8, shared": (STACKS["Llama-8B, scan"], SHARED),
    "scan: FP8, shared, constant scales": (STACKS["Llama-8B, scan"], STATIC),
    "scan: FP8, shared, compressed": (llama(**COMPRESSED), SHARED),
    **_rematerialized("scan", ALL),
    "scan: FP8, shared, save_fp8_operands": (
        llama(checkpointing=_saving("fp8_operand", "fp8_output")),
        SHARED,
    ),
    "scan: FP8, shared, save_nothing_but_fp8": (
        llama(checkpointing=_saving("fp8_operand")),
        SHARED,
    ),
    "scan + checkpointing: bf16": (STACKS["Llama-8B, scan + checkpointing"], BF16),
    "scan + checkpointing: FP8": (STACKS["Llama-8B, scan + checkpointing"], DEFAULT),
    "scan + checkpointing: FP8, shared": (STACKS["Llama-8B, scan + checkpointing"], SHARED),
    "scan + checkpointing: FP8, shared, constant scales": (STACKS["Llama-8B, scan + checkpointing"], STATIC),
    **_rematerialized("scan + checkpointing", ALL, checkpointing=True),
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h100")
    parser.add_argument("--option", choices=[*OPTIONS, *from_outside("h100")], action="append", help="default: all")
    output.add_arguments(parser)
    options = parser.parse_args()
    rows, cases = [], OPTIONS | from_outside(options.device)
    with Progress(transient=True) as progress:
        for name in progress.track(options.option or list(cases), description="compiling"):
            rows.append({"option": name, **held(*cases[name], options.device, LLAMA_8B)})
    title = f"Gradient of four blocks of Llama-8B, {LLAMA_8B.tokens} tokens, compiled for {options.device}"
    columns = {name: column for name, column in COLUMNS.items() if name not in ("stack", "library")}
    output.finish(title, {"option": lambda r: r["option"], **columns}, rows, options)


if __name__ == "__main__":
    main()
