"""From the amax of a block of elements to the multiplier that fills a format's range."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32


def multiplier_of(
    amax: Float32[Array, "*shape"], limit: float, *, power_of_two: bool = False, largest: float | None = None
) -> Float32[Array, "*shape"]:
    """`limit / amax`, or 1 where the amax is zero, infinite or NaN.

    With `power_of_two` it is rounded down to a power of two, so that nothing exceeds the limit: the scale, its
    reciprocal, goes up.

    Args:
        amax: The largest magnitudes.
        limit: The largest value of the format.
        power_of_two: Whether to clear the significand.
        largest: What an overflowing multiplier becomes; by default the largest float32.

    References:
        TransformerEngine, `common/recipe/recipe_common.cuh::compute_scale_from_amax`; torchao's
        `round_scales_to_power_of_2`.
    """
    largest = float(jnp.finfo(jnp.float32).max) if largest is None else largest
    multiplier = lax.div(lax.full_like(amax, limit), amax)
    multiplier = jnp.where(jnp.isinf(multiplier), jnp.float32(largest), multiplier)
    if power_of_two:
        multiplier = round_down_to_power_of_two(multiplier)
    usable = jnp.isfinite(amax) & (amax > 0.0)
    return jnp.where(usable, multiplier, jnp.float32(1.0))


def round_down_to_power_of_two(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Clears the significand; infinities stay."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(bits & np.uint32(0xFF800000), jnp.float32)


def round_up_scale(scale: Float32[Array, "*shape"], bits: int) -> Float32[Array, "*shape"]:
    """The least number of so many significant bits that is not below a positive scale; infinity and NaN stay.

    A larger scale clips nothing. It moves values down in the format's range, by at most `2**(1 - bits)`: 12.5 % with
    4 bits. Rounding keeps its relative precision, as the format is a floating-point one.

    Args:
        scale: Scales.
        bits: How many significant bits to keep, the leading one included; 24 keeps them all.
    """
    if bits == 24:
        return scale
    dropped = np.uint32((1 << (24 - bits)) - 1)
    # Of all NaNs the first: adding to others would carry into the sign.
    words = lax.min(lax.bitcast_convert_type(scale, jnp.uint32), np.uint32(0x7FC00000))
    rounded = lax.bitcast_convert_type((words + dropped) & ~dropped, jnp.float32)
    return lax.select(lax.lt(rounded, scale), scale, rounded)


def amax_over(x: Float[Array, "*shape"], axes: tuple[int, ...]) -> Float32[Array, "*blocks"]:
    """The largest magnitude along some axes, which stay with size 1."""
    return jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0.0).astype(jnp.float32)
