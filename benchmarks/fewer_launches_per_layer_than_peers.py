"""Claim: a converted layer needs fewer launches besides its products than marin-haliax's or Flax's, and no more bytes.

    uv run benchmarks/fewer_launches_per_layer_than_peers.py [--json FILE] [--markdown] [--device h200]

The linear layers of `faster_on_hopper.py`, forward and backward, compiled for a device that this machine need not have,
as `fewer_launches_than_peers.py` does with models. "Other" launches are not matrix products: those that quantize.
Counts and bytes are read from the program; the time is an estimate from the device's data sheet. Nothing runs.
"""

import argparse

import equinox as eqx
import faster_on_hopper
from lib import output
from lib.libraries import LIBRARIES
from lib.output import Row
from rich.progress import Progress

from haliax_fp8.preflight import inspect_step


def row(library: str, size: tuple[int, int, int], device: str) -> Row:
    """What one program holds."""
    function, arguments = eqx.filter_eval_shape(faster_on_hopper.linear_layer, library, *size)
    report = inspect_step(function, *arguments, device=device)
    return {
        "size": " x ".join(map(str, size)),
        "library": library,
        "fp8_flops": report.fp8_share,
        "other_launches": report.step.others.count,
        "other_mb": report.step.others.bytes / 1e6,
        "temporaries_mb": report.step.memory.temporaries / 2**20,
        "compile_s": report.step.seconds,
        "estimate_ms": None if report.estimate is None else report.estimate.total * 1e3,
    }


COLUMNS = {
    "tokens x in x out": lambda r: r["size"],
    "library": lambda r: r["library"],
    "FLOPs in FP8": lambda r: f"{r['fp8_flops']:.1%}",
    "other launches": lambda r: str(r["other_launches"]),
    "other MB": lambda r: f"{r['other_mb']:,.0f}",
    "temporaries, MB": lambda r: f"{r['temporaries_mb']:,.0f}",
    "compiled in, s": lambda r: f"{r['compile_s']:.1f}",
    "estimate, ms": lambda r: "" if r["estimate_ms"] is None else f"{r['estimate_ms']:.3f}",
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h200")
    output.add_arguments(parser)
    options = parser.parse_args()
    plan, rows = faster_on_hopper.Plan(), []
    with Progress(transient=True) as progress:
        cases = [(library, size) for size in (plan.first, *plan.grid) for library in LIBRARIES]
        for library, size in progress.track(cases, description="compiling"):
            rows.append(row(library, size, options.device))
    title = f"Linear layer, forward and backward, compiled for {options.device}: counts, and an estimate of the time"
    output.finish(title, COLUMNS, rows, options)


if __name__ == "__main__":
    main()
