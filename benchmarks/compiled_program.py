"""Claim: converted blocks of Llama-8B need fewer other kernels and bytes than with Haliax's own FP8, and less memory.

    uv run --extra preflight benchmarks/compiled_program.py [--json FILE] [--target h100]

Compiles the gradient of four blocks' linear layers for a device that need not be here, in bf16, with `haliax_fp8` and
with `haliax.quantization`, and prints what the compiled programs hold: counts and bytes, no times but that of the
compiler. Set `JAX_PLATFORMS=cpu` where JAX finds a GPU's plugin without its driver.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import haliax.quantization as haxq
import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import haliax_fp8 as fp8
from haliax_fp8.preflight import preflight


Embed, Mlp, KvHeads, Group, Head = hax.make_axes(embed=4096, mlp=14336, kv_heads=8, group=4, head=128)
Blocks, Token = hax.Axis("block", 4), hax.Axis("token", 8192)


class Block(eqx.Module):
    """The linear layers of a block of Llama-8B, with RMSNorm and SwiGLU; attention's scores are left out."""

    norms: tuple[hnn.RmsNorm, hnn.RmsNorm]
    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    out: hnn.Linear
    gate: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key: jax.Array) -> "Block":
        """A block with random weights."""
        keys = iter(jax.random.split(key, 7))
        linear = lambda In, Out: hnn.Linear.init(In, Out, key=next(keys), use_bias=False)
        return Block(
            (hnn.RmsNorm.init(Embed, use_bias=False), hnn.RmsNorm.init(Embed, use_bias=False)),
            linear(Embed, (KvHeads, Group, Head)),
            linear(Embed, (KvHeads, Head)),
            linear(Embed, (KvHeads, Head)),
            linear((KvHeads, Group, Head), Embed),
            linear(Embed, Mlp),
            linear(Embed, Mlp),
            linear(Mlp, Embed),
        )

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        """Adds both halves' output."""
        h = self.norms[0](x)
        x = x + self.out(self.query(h) + self.key(h) * self.value(h))
        h = self.norms[1](x)
        return x + self.down(hnn.silu(self.gate(h)) * self.up(h))


STACKS: dict[str, Callable[[], Any]] = {
    "unrolled": lambda: hnn.BlockSeq.init(Blocks, Block)(key=jax.random.split(jax.random.key(0), Blocks.size)),
    "scan": lambda: hnn.Stacked.init(Blocks, Block)(key=jax.random.split(jax.random.key(0), Blocks.size)),
    "scan + checkpointing": lambda: hnn.Stacked.init(Blocks, Block, gradient_checkpointing=True)(
        key=jax.random.split(jax.random.key(0), Blocks.size)
    ),
}


def _in_bf16(model: Any) -> Any:
    cast = lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x
    return jax.tree.map(cast, model)


# Each with the gradient that its training step takes.
LIBRARIES: dict[str, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    "bf16": (lambda model: model, eqx.filter_grad),
    "haliax_fp8": (fp8.fp8_linear_layers, fp8.filter_grad),
    "haliax.quantization": (
        lambda model: haxq.quantize_linear_layers(model, haxq.QuantizationConfig(fp8=True)),
        eqx.filter_grad,
    ),
}


def loss(model: Any, x: hax.NamedArray) -> jax.Array:
    """The mean square of the output."""
    return (model.fold(x) ** 2).mean().scalar().astype(jnp.float32)


def row(stack: str, library: str, target: str) -> dict[str, Any]:
    """What one program holds."""
    convert, gradient_of = LIBRARIES[library]
    model = eqx.filter_eval_shape(lambda: convert(_in_bf16(STACKS[stack]())))
    x = eqx.filter_eval_shape(lambda: hax.zeros((Token, Embed), jnp.bfloat16))
    report = preflight(gradient_of(loss), model, x, target=target)
    program = report.step
    return {
        "stack": stack,
        "library": library,
        "products": sum(product.executions for product in program.products),
        "fp8_flops": report.fp8_share,
        "other_kernels": program.others.count,
        "other_gb": program.others.bytes / 1e9,
        "temporaries_mb": program.memory.temporaries / 2**20,
        "compile_s": program.seconds,
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h100")
    parser.add_argument("--stack", choices=STACKS, action="append", help="default: all")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    rows = []
    with Progress() as progress:
        cases = [(stack, library) for stack in options.stack or STACKS for library in LIBRARIES]
        for stack, library in progress.track(cases, description="compiling"):
            rows.append(row(stack, library, options.target))
    table = Table(title=f"Gradient of four blocks of Llama-8B, 8192 tokens, compiled for {options.target}")
    headings = ("stack", "library", "FLOPs in FP8", "other kernels", "other GB", "temporaries, MB", "compiled in, s")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i > 1 else "left")
    for r in rows:
        table.add_row(
            r["stack"],
            r["library"],
            f"{r['fp8_flops']:.1%}",
            str(r["other_kernels"]),
            f"{r['other_gb']:.1f}",
            f"{r['temporaries_mb']:,.0f}",
            f"{r['compile_s']:.1f}",
        )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
