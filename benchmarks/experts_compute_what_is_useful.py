"""Claim: experts in FP8 compute the useful products, where XLA multiplies every row by the kernels of all of them.

    uv run benchmarks/experts_compute_what_is_useful.py [--device h100] [--markdown] [--json FILE]

Compiles a layer of experts, its output and both gradients, for a GPU that need not be here, with XLA's default flags,
and counts FLOPs, bytes of other launches and temporaries. One device in a process: see `docs/experts-and-attention.md`.
"""

import argparse
from collections.abc import Callable
from typing import Any

import equinox as eqx
from lib import output
from lib.experts import GROUPED_BF16, gradients, layer_and_batch
from lib.output import Row
from rich.progress import Progress

from haliax_fp8.preflight import inspect_step
from haliax_fp8.recipes import Recipe


SIZES = {"8 experts": (8, 16384, 4096, 14336), "64 experts": (64, 16384, 2048, 1408)}
RECIPES = (None, GROUPED_BF16, "delayed", "rowwise", "deepseek")
COLUMNS: dict[str, Callable[[Any], str]] = {
    "experts": lambda row: row["size"],
    "recipe": lambda row: row["recipe"],
    "FLOPs useful": lambda row: f"{row['useful']:.3g}",
    "computed": lambda row: f"{row['computed']:.3g}",
    "in FP8": lambda row: f"{row['fp8']:.0%}",
    "other GB": lambda row: f"{row['gigabytes']:.2f}",
    "temporaries, GB": lambda row: f"{row['temporaries']:.2f}",
}


def figures(device: str, recipe: str | Recipe | None, size: str) -> Row:
    """What the compiled program does."""
    args = eqx.filter_eval_shape(layer_and_batch, recipe, *SIZES[size], use_gmm=False)
    program = inspect_step(gradients, *args, device=device).step
    return {
        "size": size,
        "recipe": {None: "bf16, all experts", GROUPED_BF16: "bf16, grouped"}.get(recipe, recipe),
        "useful": program.useful_flops,
        "computed": program.flops,
        "fp8": program.fp8_share,
        "gigabytes": program.others.bytes / 1e9,
        "temporaries": program.memory.temporaries / 1e9,
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="h100", help="the GPU to compile for; default: %(default)s")
    output.add_arguments(parser)
    options = parser.parse_args()
    recipes = [recipe for recipe in RECIPES if recipe != "deepseek" or options.device in ("h100", "h200")]
    cases, rows = [(recipe, size) for size in SIZES for recipe in recipes], []
    with Progress(transient=True) as progress:
        for case in progress.track(cases, description="compiling"):
            rows.append(figures(options.device, *case))
    output.finish(f"A layer of experts, compiled for {options.device}", COLUMNS, rows, options)


if __name__ == "__main__":
    main()
