"""Claim: in a scan without checkpoints, FP8 needs a third of bf16's memory, and moves fewer bytes.

    uv run benchmarks/less_memory_than_bf16.py [--json FILE] [--markdown] [--device h100]

The options of `docs/performance.md` on four blocks of Llama-8B, compiled as `fewer_launches_than_peers.py` does: counts
and bytes are read from the program, and the time is an estimate from the device's data-sheet peaks. Nothing runs.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from fewer_launches_than_peers import COLUMNS, figures
from lib import output
from lib.libraries import LIBRARIES, Library
from lib.models import LLAMA_8B, STACKS, Stack, llama, mix
from rich.progress import Progress

import haliax_fp8 as fp8
from haliax_fp8.memory import KernelResidual, RecomputeElementwise, SaveFp8Operands, rematerialized, share_input_scales


BF16, FP8 = LIBRARIES["bf16"], LIBRARIES["haliax_fp8"]


def then(library: Library, *changes: Callable[[Any], Any]) -> Library:
    """The library, with changes to what it converted."""

    def convert(model: Any) -> Any:
        model = library.convert(model)
        for change in changes:
            model = change(model)
        return model

    return dataclasses.replace(library, convert=convert)


KEEP_KERNELS = dataclasses.replace(
    FP8, convert=lambda model: fp8.fp8_linear_layers(model, fp8.Fp8Config(kernel_residual=KernelResidual.KEEP))
)
SHARED_KEEP_KERNELS = then(KEEP_KERNELS, share_input_scales)


def swiglu_in_float32(function: Any) -> Any:
    """SwiGLU that keeps only its inputs; norms and the stand-in for attention stay as they are."""
    is_other = isinstance(function, eqx.Module) or function is mix
    return function if is_other else rematerialized(function, compute_dtype=jnp.float32)


def options() -> dict[str, tuple[Stack, Library]]:
    """What is compiled, by name. "In the code": the blocks wrap SwiGLU in `rematerialized`."""
    shared = then(FP8, share_input_scales)
    off = dataclasses.replace(FP8, gradient=functools.partial(fp8.filter_grad, recompute_in_scans=False))
    libraries = {"bf16": BF16, "FP8": FP8, "FP8, shared": shared}
    chosen = {
        "unrolled": libraries | {"FP8, kernels kept": KEEP_KERNELS},
        "scan": libraries | {"FP8, kernels kept": KEEP_KERNELS, "FP8, recompute_in_scans=False": off},
        "scan + checkpointing": libraries,
    }
    return {
        f"{stack}: {name}": (STACKS[f"Llama-8B, {stack}"], library)
        for stack, by_name in chosen.items()
        for name, library in by_name.items()
    } | {
        "unrolled: FP8, rematerialized in the code, shared": (
            llama(stacked=False, between=swiglu_in_float32),
            shared,
        ),
        "scan + checkpointing: FP8, rematerialized in the code, shared": (
            llama(checkpointing=True, between=swiglu_in_float32),
            shared,
        ),
        "scan: bf16, RecomputeElementwise": (llama(checkpointing=RecomputeElementwise()), BF16),
        "scan: FP8, SaveFp8Operands(outputs=False)": (llama(checkpointing=SaveFp8Operands(outputs=False)), FP8),
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h100")
    parser.add_argument("--option", choices=list(options()), action="append", help="default: all")
    output.add_arguments(parser)
    arguments = parser.parse_args()
    rows, cases = [], options()
    with Progress(transient=True) as progress:
        for name in progress.track(arguments.option or list(cases), description="compiling"):
            rows.append({"option": name, **figures(*cases[name], arguments.device, LLAMA_8B)})
    title = f"Gradient of four blocks of Llama-8B, {LLAMA_8B.tokens} tokens, compiled for {arguments.device}"
    columns = {name: column for name, column in COLUMNS.items() if name not in ("stack", "library")}
    output.finish(title, {"option": lambda r: r["option"], **columns}, rows, arguments)


if __name__ == "__main__":
    main()
