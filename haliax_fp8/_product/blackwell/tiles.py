"""What the kernels that quantize have in common: square tiles, codes and scales as cuDNN reads them, the launch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Shaped

from ...scopes import QUANTIZING
from .swizzle import TILE


_WARPS = 8


class Out(NamedTuple):
    """A result of a launch: its shape and dtype, and the part of it that each tile writes."""

    shape: jax.ShapeDtypeStruct
    spec: Any


def codes(shape: tuple[int, int], dtype: np.dtype, block: int, *, flipped: bool, packed: int = 1) -> tuple[Out, Out]:
    """The data and the bytes of scales of a matrix, or of its transpose.

    Args:
        shape: The shape of the matrix.
        dtype: The dtype of the data.
        block: How many elements along a row share a scale.
        flipped: Whether it is the transpose.
        packed: How many elements are in one of the data's.
    """
    rows, columns = reversed(shape) if flipped else shape
    at = (lambda i, j: (j, i)) if flipped else (lambda i, j: (i, j))
    pieces = TILE // block // 4
    data = Out(jax.ShapeDtypeStruct((rows, columns // packed), dtype), pl.BlockSpec((TILE, TILE // packed), at))
    scales = jax.ShapeDtypeStruct((rows // TILE, columns // block // 4, 4 * TILE), jnp.uint8)
    return data, Out(scales, pl.BlockSpec((1, pieces, 4 * TILE), lambda i, j: (*at(i, j), 0)))


def call(
    body: Callable[..., None],
    name: str,
    x: Shaped[Array, "rows columns"],
    outs: Sequence[tuple[Out, ...]],
    *others: Array,
    interpret: bool,
) -> list[tuple[Array, ...]]:
    """Runs a body once for each tile of a matrix.

    Args:
        body: Takes references to a tile, to the other arguments as a whole, and to the results.
        name: What it does.
        x: The matrix, of whole tiles.
        outs: Its results, in groups.
        *others: Further arguments.
        interpret: Whether Pallas evaluates it on any device.
    """
    # Triton's, which JAX deprecates. Mosaic GPU can express MXFP8, with a row or column of a tile in each thread, and
    # gives the same bits; but read so, shared memory has conflicts that may take longer than reading the operand.
    from jax.experimental.pallas import triton

    whole = [pl.BlockSpec(other.shape, lambda i, j, ndim=other.ndim: (0,) * ndim) for other in others]
    flat = [out for group in outs for out in group]
    results = pl.pallas_call(
        body,
        grid=(x.shape[0] // TILE, x.shape[1] // TILE),
        in_specs=[pl.BlockSpec((TILE, TILE), lambda i, j: (i, j)), *whole],
        out_specs=[out.spec for out in flat],
        out_shape=[out.shape for out in flat],
        interpret=interpret,
        name=QUANTIZING + name,
        compiler_params=None if interpret else triton.CompilerParams(num_warps=_WARPS, num_stages=1),
    )(x, *others)
    remaining = iter(results)
    return [tuple([next(remaining) for _ in group]) for group in outs]
