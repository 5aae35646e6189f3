"""Blocks of elements that share a scale: their shape, their amax, and scales that are powers of two."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .base import OperandUse
from .multiplier import amax_over


def block_shape(
    shape: tuple[int, ...], size: int, use: OperandUse, *, square: bool, padding: bool, scaling: object
) -> tuple[int, ...]:
    """The shape of a block: `size` along the last contracted axis, and if square along the last free one.

    Args:
        shape: The operand's shape.
        size: Elements of a block along an axis.
        use: What the product contracts.
        square: Whether a block spans the last free axis too.
        padding: Whether a block may be cut by the edge.
        scaling: Whose blocks these are, for the error.

    Raises:
        ValueError: If a block would be cut and `padding` is False.
    """
    axes = set(use.contracted[-1:])
    free = [axis for axis in range(use.ensemble, len(shape)) if axis not in use.contracted]
    if square and free:
        axes.add(free[-1])
    for axis in axes:
        if shape[axis] % size and not padding:
            raise ValueError(
                f"axis {axis} of an operand of shape {shape} is not a multiple of the {size} elements of a block of "
                f"{scaling}; make it one, or allow a partial last block with padding=True"
            )
    return tuple(size if axis in axes else 1 for axis in range(len(shape)))


def blockwise_amax(x: Float[Array, "*shape"], block: tuple[int, ...]) -> Float32[Array, "*blocks"]:
    """The largest magnitude of each block; NaN of a block that holds an infinity or NaN."""
    return amax_over(*_split(x, block), keepdims=False)


def blockwise_sum(x: Float32[Array, "*shape"], block: tuple[int, ...]) -> Float32[Array, "*blocks"]:
    """The sum of each block."""
    split, axes = _split(x, block)
    return jnp.sum(split, axis=axes)


def _split(x: Array, block: tuple[int, ...]) -> tuple[Array, tuple[int, ...]]:
    """Each axis split into blocks by elements, padded with zeros; and the axes of elements."""
    x = jnp.pad(x, [(0, -size % b) for size, b in zip(x.shape, block, strict=True)])
    shape = [part for size, b in zip(x.shape, block, strict=True) for part in (size // b, b)]
    return x.reshape(shape), tuple(range(1, 2 * len(block), 2))


def e8m0_exponent(x: Float32[Array, "*shape"]) -> Array:
    """The biased exponent of the smallest power of two that is not below `x`, as uint8: E8M0, rounded up.

    `2**(e - 127)`; 0 means `2**-127`, 254 is the largest, 255 is NaN.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    exponent, significand = bits >> np.uint32(23), bits & np.uint32(0x7FFFFF)
    fits = (exponent == 0) & (significand <= 0x400000)
    up = (significand > 0) & (exponent != 0xFE) & ~fits
    exponent = exponent + up.astype(jnp.uint32)
    exponent = jnp.where(jnp.isnan(x), jnp.uint32(255), jnp.where(jnp.isinf(x), jnp.uint32(254), exponent))
    return exponent.astype(jnp.uint8)


def power_of_two(exponent: Array) -> Float32[Array, "*shape"]:
    """`2**(exponent - 127)` for a biased exponent from 0 to 254; NaN for 255."""
    bits = jnp.where(exponent == 0, 0x400000, jnp.minimum(exponent, 254) << 23)
    value = lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.float32)
    return jnp.where(exponent > 254, jnp.float32(jnp.nan), value)
