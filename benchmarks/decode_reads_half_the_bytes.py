"""Claim: in inference weights in FP8 are read as they are stored, half the bytes of bf16, and nothing copies them.

    uv run benchmarks/decode_reads_half_the_bytes.py [--json FILE] [--markdown] [--device h100]

Four blocks of Llama-8B with something elementwise instead of attention, one after the other, for 1, 16 and 256 rows.
`quantize_for_inference` makes them of a model in bf16, or of one that trains with delayed scaling. Compiled for a GPU
that this machine need not have, with XLA's defaults, where Triton kernels multiply too, and with cuBLASLt alone.
Arguments and temporaries are XLA's; what launches besides products move is read from the program. Nothing runs, so that
nothing is said about time.
"""

import argparse
import collections
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from lib import models, output
from lib.models import LLAMA_8B, Sizes
from lib.output import Row
from rich.progress import Progress

import haliax_fp8 as fp8
from haliax_fp8.preflight import inspect_step
from haliax_fp8.serving import quantize_for_inference


LAYOUTS = ("BF16", "FP8", "FP8_DYNAMIC", "W8A16", "MXFP8", "FP8_BLOCK")
ROWS = (1, 8, 64, 2048)
"""Three of decoding, and one of a prompt."""

FLAGS = {"XLA's defaults": {}, "cuBLASLt alone": {"xla_gpu_enable_triton_gemm": False}}


def served_blocks(layout: str, sizes: Sizes, *, stacked: bool = False, unstack: bool = True) -> Any:
    """The blocks.

    Args:
        layout: How they are quantized, or "BF16".
        sizes: Their sizes.
        stacked: Whether they begin as a stack.
        unstack: Whether the stack becomes one block after the other.
    """
    blocks = models.llama(stacked=stacked).model(sizes)
    if layout == "BF16":
        return blocks
    if layout == "FP8":
        blocks = fp8.fp8_linear_layers(blocks, recipe="delayed", emulate=True)
    return quantize_for_inference(blocks, layout, unstack=unstack)


def served(layout: str, sizes: Sizes, **stack: bool) -> Any:
    """The same, abstract."""
    return eqx.filter_eval_shape(lambda: served_blocks(layout, sizes, **stack))


def row(layout: str, rows: int, flags: str, device: str, sizes: Sizes = LLAMA_8B, **stack: bool) -> Row:
    """What one program takes and moves.

    Args:
        layout: How weights are quantized, or "BF16".
        rows: The rows of the input.
        flags: The compiler's, a key of `FLAGS`.
        device: The device.
        sizes: Of the blocks.
        **stack: As in `served_blocks`.
    """
    blocks = served(layout, sizes, **stack)
    axes = hax.Axis("token", rows), hax.Axis("hidden", sizes.llama.hidden)
    x = eqx.filter_eval_shape(lambda: hax.zeros(axes, jnp.bfloat16))
    call = lambda blocks, x: blocks.fold(x)
    options = FLAGS[flags]
    program = inspect_step(call, blocks, x, device=device, compiler_options=options).step
    verdicts = collections.Counter(product.verdict.name for product in program.products)
    return {
        "layout": layout,
        "rows": rows,
        "flags": flags,
        "arguments": program.memory.arguments,
        "temporaries": program.memory.temporaries,
        "others": program.others.bytes,
        "fp8": verdicts["FP8"],
        "products": len(program.products),
    }


def with_baseline(rows: list[Row]) -> list[Row]:
    """Rows with what bf16 takes beside them."""
    bf16 = {(r["rows"], r["flags"]): r for r in rows if r["layout"] == "BF16"}
    return [{**r, "bf16": bf16[r["rows"], r["flags"]]} for r in rows]


def traffic(r: Row) -> float:
    """The bytes of a call: each argument read once, and what other launches move."""
    return r["arguments"] + r["others"]


COLUMNS: dict[str, Callable[[Any], str]] = {
    "flags": lambda r: r["flags"],
    "rows": lambda r: str(r["rows"]),
    "weights": lambda r: r["layout"],
    "products in FP8": lambda r: f"{r['fp8']} of {r['products']}",
    "arguments, MB": lambda r: f"{r['arguments'] / 1e6:,.0f}",
    "of bf16's": lambda r: f"{r['arguments'] / r['bf16']['arguments']:.3f}",
    "temporaries, MB": lambda r: f"{r['temporaries'] / 1e6:,.1f}",
    "moved by other launches, MB": lambda r: f"{r['others'] / 1e6:,.0f}",
    "all that is read or moved, of bf16's": lambda r: f"{traffic(r) / traffic(r['bf16']):.3f}",
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="h100")
    output.add_arguments(parser)
    options = parser.parse_args()
    cases = [(flags, rows, layout) for flags in FLAGS for rows in ROWS for layout in LAYOUTS]
    table = []
    with Progress(transient=True) as progress:
        for flags, rows, layout in progress.track(cases, description="compiling"):
            table.append(row(layout, rows, flags, options.device))
    title = f"Four blocks of Llama-8B in inference, compiled for {options.device}"
    output.finish(title, COLUMNS, with_baseline(table), options, left=3)


if __name__ == "__main__":
    main()
