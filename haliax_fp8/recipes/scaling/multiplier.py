"""From the amax of a block of elements to the multiplier that fills a format's range."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, UInt32

from ...formats import LARGEST_MULTIPLIER as LARGEST_MULTIPLIER


def multiplier_of(
    amax: Float32[Array, "*shape"], limit: float, *, power_of_two: bool = False
) -> Float32[Array, "*shape"]:
    """`limit / amax`, at most `2**126`; 1 where the amax is zero, NaN where it is NaN.

    With `power_of_two` it is rounded down to a power of two, so that nothing exceeds the limit: the scale, its
    reciprocal, goes up.

    Args:
        amax: The largest magnitudes.
        limit: The largest value of the format.
        power_of_two: Whether to clear the significand.

    References:
        TransformerEngine, `common/recipe/recipe_common.cuh::compute_scale_from_amax`; torchao's
        `round_scales_to_power_of_2`.
    """
    multiplier = _of_number(amax, limit)
    if power_of_two:
        multiplier = round_down_to_power_of_two(multiplier)
    return jnp.where(jnp.isnan(amax), amax, multiplier)


def scale_of(amax: Float32[Array, "*shape"], limit: float, bits: int) -> Float32[Array, "*shape"]:
    """`1 / multiplier_of(amax, limit)`, rounded up to so many significant bits; NaN where the amax is NaN.

    A larger scale clips nothing. It moves values down in the format's range, by at most a factor of
    `1 + 2**(1 - bits)`. Rounding keeps its relative precision, as the format is a floating-point one.

    Args:
        amax: The largest magnitudes.
        limit: The largest value of the format.
        bits: How many significant bits to keep, the leading one included; 24 keeps them all.
    """
    words = round_up_words(words_of(lax.div(np.float32(1.0), _of_number(amax, limit))), bits)
    # NaN last: rounding it gives another number, and a select before the rounding would be a launch of its own.
    return jnp.where(jnp.isnan(amax), amax, lax.bitcast_convert_type(words, jnp.float32))


def _of_number(amax: Float32[Array, "*shape"], limit: float) -> Float32[Array, "*shape"]:
    """`limit / amax`, at most `2**126`; 1 where the amax is zero or NaN."""
    multiplier = jnp.minimum(lax.div(np.float32(limit), amax), jnp.float32(LARGEST_MULTIPLIER))
    return jnp.where(amax > 0.0, multiplier, jnp.float32(1.0))


def round_down_to_power_of_two(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Clears the significand; infinities stay."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(bits & np.uint32(0xFF800000), jnp.float32)


def positive_or_one(scale: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Scales of 0 or `-inf` as 1: a trainer that overwrites state as it comes, where a layer was not reached."""
    return lax.select(lax.le(scale, np.float32(0.0)), lax.full_like(scale, 1.0), scale)


def words_of(x: Float32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """The bits of numbers. Those of positive numbers have the same order."""
    return lax.bitcast_convert_type(x, np.uint32)


def round_up_words(words: UInt32[Array, "*shape"], bits: int) -> UInt32[Array, "*shape"]:
    """The smallest numbers with so many significant bits that are not below the given ones; infinity stays.

    Args:
        words: The bits of positive numbers in float32. For those of a NaN the result is another number.
        bits: How many significant bits to keep; 24 keeps them all.
    """
    dropped = np.uint32((1 << (24 - bits)) - 1)
    return lax.bitwise_and(lax.add(words, dropped), ~dropped)


def amax_over(x: Float[Array, "*shape"], axes: tuple[int, ...], *, keepdims: bool = True) -> Float32[Array, "*blocks"]:
    """The largest magnitude along some axes; NaN if one of them is infinite or NaN.

    The scale is then NaN, and so is every value with it: code that skips overflowed steps has to notice them.

    Args:
        x: Values in any floating dtype.
        axes: Those that the maximum is taken over.
        keepdims: Whether they stay with size 1.
    """
    # As whole numbers magnitudes have the same order, with NaN on top: a maximum of float32 drops it on a CPU.
    bits = lax.bitcast_convert_type(lax.abs(x), jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    amax = lax.bitcast_convert_type(jnp.max(bits, axis=axes, keepdims=keepdims, initial=0), x.dtype)
    finite = lax.is_finite(amax)
    if x.dtype.itemsize > 4:
        # What float64 alone can hold is clipped.
        amax = jnp.minimum(amax, float(np.finfo(np.float32).max))
    return jnp.where(finite, lax.convert_element_type(amax, jnp.float32), jnp.float32(jnp.nan))
