"""Claim: converted models need fewer launches besides their products than with marin-haliax's or Flax's own FP8.

    uv run benchmarks/fewer_launches_than_peers.py [--json FILE] [--markdown] [--device h100]

Compiles the gradient of four blocks' linear layers of Llama-8B, 8192 tokens, for a device that this machine need not
have: in bf16, with `haliax_fp8`, with `haliax.quantization`, and with Flax's op instead of Haliax's (see
`lib/libraries.py`). Prints what the compiled programs contain. "Other" launches
are all those that are not matrix products. Counts and bytes are read from the program. Time on the device is an
estimate from data-sheet peaks; the seconds are those of tracing and compiling on this machine; nothing runs. Set
`JAX_PLATFORMS=cpu` if JAX finds a GPU plugin without its driver.
"""

import argparse
from typing import Any

import equinox as eqx
from lib import output
from lib.libraries import LIBRARIES, Library
from lib.models import LLAMA_8B, STACKS, Sizes, Stack, loss
from rich.progress import Progress

from haliax_fp8.preflight import inspect_step


def row(stack: str, library: str, device: str, sizes: Sizes = LLAMA_8B) -> dict[str, Any]:
    """What one program holds."""
    return {"stack": stack, "library": library, **figures(STACKS[stack], LIBRARIES[library], device, sizes)}


def figures(stack: Stack, library: Library, device: str, sizes: Sizes) -> dict[str, Any]:
    """What the gradient of a stack compiles to."""
    model = eqx.filter_eval_shape(lambda: library.convert(stack.model(sizes)))
    x = eqx.filter_eval_shape(stack.batch, sizes)
    report = inspect_step(library.gradient(loss), model, x, device=device)
    program = report.step
    return {
        "products": sum(product.executions for product in program.products),
        "fp8_flops": report.fp8_share,
        "other_launches": program.others.count,
        "other_gb": program.others.bytes / 1e9,
        "temporaries_gb": program.memory.temporaries / 1e9,
        "compile_s": program.seconds,
        "estimate_ms": None if report.estimate is None else report.estimate.total * 1e3,
    }


COLUMNS = {
    "stack": lambda r: r["stack"],
    "library": lambda r: r["library"],
    "products": lambda r: str(r["products"]),
    "FLOPs in FP8": lambda r: f"{r['fp8_flops']:.1%}",
    "other launches": lambda r: str(r["other_launches"]),
    "other GB": lambda r: f"{r['other_gb']:.1f}",
    "temporaries, GB": lambda r: f"{r['temporaries_gb']:.2f}",
    "compiled in, s": lambda r: f"{r['compile_s']:.1f}",
    "estimate, ms": lambda r: "" if r["estimate_ms"] is None else f"{r['estimate_ms']:.1f}",
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h100")
    parser.add_argument("--stack", choices=STACKS, action="append", help="default: all")
    parser.add_argument("--library", choices=LIBRARIES, action="append", help="default: all")
    output.add_arguments(parser)
    options = parser.parse_args()
    rows = []
    with Progress(transient=True) as progress:
        cases = [(s, library) for s in options.stack or STACKS for library in options.library or LIBRARIES]
        for stack, library in progress.track(cases, description="compiling"):
            rows.append(row(stack, library, options.device))
    title = f"Gradient, {LLAMA_8B.tokens} tokens, compiled for {options.device}: counts, and an estimate of the time"
    output.finish(title, COLUMNS, rows, options)


if __name__ == "__main__":
    main()
