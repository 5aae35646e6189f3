"""Claim: for gradients, what XLA fuses moves fewer bytes than one Pallas kernel that casts, transposes, takes the amax.

    uv run benchmarks/fewer_bytes_than_one_pass.py [--json FILE] [--markdown] [--device h100]

The Pallas kernel reads an operand once and writes all three: two bytes read and two written per element. XLA needs
several launches. But it fuses the operations that compute the operand into its own launches, and not into the Pallas
kernel, for which the operand must first be written in bfloat16. Compiled for a device that this machine need not have,
with the sizes of Llama-8B and 8192 tokens: both gradients of SwiGLU, and the kernel of a linear layer, which is in
memory anyway. Bytes are read from the program; those of the Pallas kernel are known. Nothing runs.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array
from lib import output
from lib.models import LLAMA_8B, Sizes
from lib.output import Row
from rich.progress import Progress

from haliax_fp8.preflight import inspect_step


_TILE = 128
_LARGEST = 57344.0
_DTYPE = jnp.float8_e5m2


def with_pallas(x: Array, scale: Array, *, interpret: bool = False) -> tuple[Array, Array, Array]:
    """E5M2, its transposition, and the amax of each tile of 128 x 128, in one pass.

    Args:
        x: `[rows, columns]`, both multiples of 128.
        scale: What it is divided by, `[]`.
        interpret: Run it without a GPU.
    """

    def body(x_ref: Any, scale_ref: Any, data_ref: Any, transposed_ref: Any, amax_ref: Any) -> None:
        tile = x_ref[...].astype(jnp.float32)
        data = jnp.clip(tile / scale_ref[0], -_LARGEST, _LARGEST).astype(_DTYPE)
        data_ref[...] = data
        transposed_ref[...] = data.T
        amax_ref[0, 0] = jnp.max(jnp.abs(tile))

    rows, columns = x.shape
    tiles = rows // _TILE, columns // _TILE
    here, there = lambda i, j: (i, j), lambda i, j: (j, i)
    call = pl.pallas_call(
        body,
        grid=tiles,
        in_specs=[pl.BlockSpec((_TILE, _TILE), here), pl.BlockSpec((1,), lambda i, j: (0,))],
        out_specs=[pl.BlockSpec((_TILE, _TILE), here), pl.BlockSpec((_TILE, _TILE), there), pl.BlockSpec((1, 1), here)],
        out_shape=[
            jax.ShapeDtypeStruct((rows, columns), _DTYPE),
            jax.ShapeDtypeStruct((columns, rows), _DTYPE),
            jax.ShapeDtypeStruct(tiles, jnp.float32),
        ],
        interpret=interpret,
    )
    data, transposed, amax = call(x, lax.reshape(scale, (1,)))
    return data, transposed, amax


def with_xla(x: Array, scale: Array) -> tuple[Array, Array, Array]:
    """The same in plain JAX as our products write it, with the amaxes of rows."""
    data = jnp.clip(x.astype(jnp.float32) / scale, -_LARGEST, _LARGEST).astype(_DTYPE)
    return data, lax.optimization_barrier(data).T, jnp.max(jnp.abs(x), axis=1)


type Way = Callable[[Array, Array], tuple[Array, Array, Array]]

WAYS: dict[str, Way] = {"XLA": with_xla, "Pallas": with_pallas}


def gradients(way: Way, gate: Array, up: Array, grad: Array, scales: Sequence[Array]) -> Any:
    """Those of SwiGLU's inputs, quantized."""
    of_inputs = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)[1](grad)
    return [way(x, scale) for x, scale in zip(of_inputs, scales, strict=True)]


def gradients_in_float32(way: Way, *args: Any) -> Any:
    """The same, computed in float32 and rounded once: less work in the eyes of XLA's cost model."""
    *arrays, scales = args
    *wide, grad = (x.astype(jnp.float32) for x in arrays)
    of_inputs = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, *wide)[1](grad)
    return [way(x.astype(jnp.bfloat16), scale) for x, scale in zip(of_inputs, scales, strict=True)]


@dataclasses.dataclass(frozen=True)
class Case:
    """What is quantized.

    Args:
        function: Of a way and of arrays.
        arguments: The arrays.
        elements: How many elements a pass reads.
        passes: How many passes there are.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    elements: int
    passes: int


def cases(sizes: Sizes) -> dict[str, Case]:
    """By name."""
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    scale, activation = jax.ShapeDtypeStruct((), jnp.float32), of(sizes.tokens, sizes.llama.mlp)
    kernel = of(sizes.llama.mlp, sizes.llama.hidden)
    of_swiglu = (activation, activation, activation, (scale, scale)), sizes.tokens * sizes.llama.mlp, 2
    return {
        "both gradients of SwiGLU": Case(gradients, *of_swiglu),
        "the same, computed in float32": Case(gradients_in_float32, *of_swiglu),
        "a kernel": Case(lambda way, x, scale: way(x, scale), (kernel, scale), sizes.llama.mlp * sizes.llama.hidden, 1),
    }


def row(name: str, case: Case, way: str, device: str) -> Row:
    """What one program moves for one pass."""
    program = inspect_step(functools.partial(case.function, WAYS[way]), *case.arguments, device=device).step
    # The preflight counts apart what it cannot look into: two bytes read and two written, and a float32 for each tile.
    of_pallas = sum(call.executions for call in program.opaque) * 4 * (case.elements + case.elements // _TILE**2)
    moved = (program.others.bytes + of_pallas) / case.passes
    return {"case": name, "way": way, "mb": moved / 1e6, "bytes_per_element": moved / case.elements}


COLUMNS = {
    "quantized": lambda r: r["case"],
    "with": lambda r: r["way"],
    "MB moved for each": lambda r: f"{r['mb']:,.0f}",
    "bytes per element": lambda r: f"{r['bytes_per_element']:.2f}",
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h100")
    output.add_arguments(parser)
    options = parser.parse_args()
    found, rows = cases(LLAMA_8B), []
    with Progress(transient=True) as progress:
        for name, way in progress.track([(name, way) for name in found for way in WAYS], description="compiling"):
            rows.append(row(name, found[name], way, options.device))
    output.finish(f"Cast, transposition and amax, compiled for {options.device}", COLUMNS, rows, options)


if __name__ == "__main__":
    main()
