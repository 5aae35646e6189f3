"""From the amax of a block of elements to the multiplier that fills a format's range."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32


# Its reciprocal is float32's smallest normal number; a smaller scale is flushed to zero on a CPU.
LARGEST_MULTIPLIER = 2.0**126


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
    multiplier = lax.div(lax.full_like(amax, limit), amax)
    multiplier = jnp.minimum(multiplier, jnp.float32(LARGEST_MULTIPLIER))
    if power_of_two:
        multiplier = round_down_to_power_of_two(multiplier)
    multiplier = jnp.where(amax > 0.0, multiplier, jnp.float32(1.0))
    return jnp.where(jnp.isnan(amax), amax, multiplier)


def round_down_to_power_of_two(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Clears the significand; infinities stay."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(bits & np.uint32(0xFF800000), jnp.float32)


def amax_over(x: Float[Array, "*shape"], axes: tuple[int, ...]) -> Float32[Array, "*blocks"]:
    """The largest finite magnitude along some axes, which stay with size 1; 0 if there is none.

    Of the finite ones, so that an infinity or NaN spoils itself and not the scale of all others.
    """
    magnitude = jnp.where(lax.is_finite(x), lax.abs(x), jnp.zeros((), x.dtype))
    return within_float32(jnp.max(magnitude, axis=axes, keepdims=True, initial=0.0))


def within_float32(amax: Float[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """A magnitude in float32; what float64 alone can hold becomes float32's largest."""
    if amax.dtype.itemsize > 4:
        amax = jnp.minimum(amax, float(np.finfo(np.float32).max))
    return lax.convert_element_type(amax, jnp.float32)
