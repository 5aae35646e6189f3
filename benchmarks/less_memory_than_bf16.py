"""Claim: FP8 with rematerialization moves fewer bytes than bf16 in a scan, and needs less memory without checkpointing.

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
from lib.models import LLAMA_8B, RULES, STACKS, Stack, llama
from rich.progress import Progress

import haliax_fp8 as fp8
from haliax_fp8.memory import KernelResidual, default_rematerialization, rematerialize, share_input_scales


BF16, FP8 = LIBRARIES["bf16"], LIBRARIES["haliax_fp8"]


def then(library: Library, *changes: Callable[[Any], Any]) -> Library:
    """The library, with changes to what it converted."""

    def convert(model: Any) -> Any:
        model = library.convert(model)
        for change in changes:
            model = change(model)
        return model

    return dataclasses.replace(library, convert=convert)


KEPT = dataclasses.replace(
    FP8, convert=lambda model: fp8.fp8_linear_layers(model, fp8.Fp8Config(kernel_residual=KernelResidual.KEEP))
)
SHARED_KEPT = then(KEPT, share_input_scales)


def rematerialized(library: Library, device: str, rules: Any = RULES) -> Library:
    """Converted, then `rematerialize`d."""
    return then(library, lambda model: rematerialize(model, device=device, rules=rules))


def _saving(*names: str) -> Stack:
    return llama(checkpointing=hax.ScanCheckpointPolicy(save_block_internals=list(names)))


def options_for(device: str) -> dict[str, tuple[Stack, Library]]:
    """What is compiled, by name. "With a rule": one for the blocks' feed-forward layers, see `lib.models.RULES`."""
    shared = then(FP8, share_input_scales)
    libraries = {
        "bf16": BF16,
        "bf16, rematerialize with a rule": rematerialized(BF16, device),
        "FP8": FP8,
        "FP8, shared": shared,
        "FP8, rematerialize": rematerialized(FP8, device, default_rematerialization),
        "FP8, rematerialize, shared": rematerialized(shared, device, default_rematerialization),
        "FP8, rematerialize with a rule": rematerialized(FP8, device),
        "FP8, rematerialize with a rule, shared": rematerialized(shared, device),
    }
    kept = {
        "FP8, kernels kept": KEPT,
        "FP8, rematerialize with a rule, shared, kernels kept": rematerialized(SHARED_KEPT, device),
    }
    stacks = {"unrolled": libraries | kept, "scan": libraries, "scan + checkpointing": libraries}
    policies = {
        "scan, save_fp8_operands: FP8": (_saving("fp8_operand", "fp8_output"), FP8),
        "scan, save_nothing_but_fp8: FP8": (_saving("fp8_operand"), FP8),
    }
    return {
        f"{stack}: {name}": (STACKS[f"Llama-8B, {stack}"], library)
        for stack, chosen in stacks.items()
        for name, library in chosen.items()
    } | policies


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h100")
    parser.add_argument("--option", choices=list(options_for("h100")), action="append", help="default: all")
    output.add_arguments(parser)
    options = parser.parse_args()
    rows, cases = [], options_for(options.device)
    with Progress(transient=True) as progress:
        for name in progress.track(options.option or list(cases), description="compiling"):
            rows.append({"option": name, **held(*cases[name], options.device, LLAMA_8B)})
    title = f"Gradient of four blocks of Llama-8B, {LLAMA_8B.tokens} tokens, compiled for {options.device}"
    columns = {name: column for name, column in COLUMNS.items() if name not in ("stack", "library")}
    output.finish(title, {"option": lambda r: r["option"], **columns}, rows, options)


if __name__ == "__main__":
    main()
