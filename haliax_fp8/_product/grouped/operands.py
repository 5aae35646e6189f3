"""Operands and scales of grouped products as Pallas kernels take them: of one width, padded, a scale for each line."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from ..._numerics.quantized_array import QuantizedArray, expand


FP8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
"""The formats that Pallas kernels multiply."""

ROWS = 8
"""How many rows lie together in the shared memory of a GPU, and are copied there together: what the number of rows, and
the row where a copy begins, is a multiple of."""


def alike(a: Array, b: Array) -> tuple[Array, Array]:
    """Data of the same width: FP8 of either format, or both in the wider dtype."""
    wide = [x.dtype for x in (a, b) if x.dtype not in FP8]
    return (lax.convert_element_type(a, wide[0]), lax.convert_element_type(b, wide[0])) if wide else (a, b)


def lines(x: QuantizedArray, shape: tuple[int, ...]) -> Float32[Array, "..."]:
    """The scales of an operand, repeated to a shape that is the data's, but for the number of pieces of the sum."""
    scale = x.scale if x.scale.ndim else x.scale.reshape((1,) * len(shape))
    return expand(scale, shape, x.block)


def padded(x: Array, multiples: tuple[int, ...], least: int = 0) -> Array:
    """Padded with zeros to multiples of something along each of its axes, and to so many rows at least.

    Axes in front of those with a multiple stay as they are.
    """
    missing = [-size % multiple for size, multiple in zip(x.shape, multiples, strict=True)]
    missing[0] = max(missing[0], least - x.shape[0])
    return jnp.pad(x, [(0, count) for count in missing]) if any(missing) else x
