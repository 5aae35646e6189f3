"""A second number next to each stored scale, which reveals state that anything but its own update changed.

The guard is `sqrt(scale)`, coarsely: half of the bits of the scale rounded up to 4 significant bits. Three properties
make it work:

- It is monotone, so the maximum of several gradients' tables is as consistent as each of them.
- It is not linear. Optimizers, weight decay, averages and sums make a scale and its guard disagree.
- It lies on a coarse grid, of 8 values for each factor of 4. Hardly any arithmetic lands on it.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32

from ..recipes.scaling.multiplier import round_up_scale


# The significant bits of the scale that a guard is made of.
_BITS = 4


# What halving the bits of 1.0 leaves to be added, so that its guard is 1.0.
_HALF = np.uint32(np.float32(1.0).view(np.uint32) // 2)


# The bits that are zero in every guard.
_OFF_GRID = np.uint32((1 << (23 - _BITS)) - 1)

# A rounded scale is at most 9/8 of the scale. State may have been rounded to bfloat16, with its model.
_LOWEST, _HIGHEST = np.float32(8 / 9 * (1 - 2.0**-8)), np.float32(1 + 2.0**-8)


def guard_of(scale: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The guard of positive scales."""
    words = lax.bitcast_convert_type(round_up_scale(scale, _BITS), jnp.uint32)
    return lax.bitcast_convert_type(lax.add(lax.shift_right_logical(words, np.uint32(1)), _HALF), jnp.float32)


def guard_on_host(scale: np.ndarray) -> np.ndarray:
    """`guard_of` in NumPy: an op may be made inside a step that is compiled for devices which are not here."""
    dropped = np.uint32((1 << (24 - _BITS)) - 1)
    words = (np.ascontiguousarray(scale, np.float32).view(np.uint32) + dropped) & ~dropped
    return ((words >> np.uint32(1)) + _HALF).view(np.float32)


def checked(scale: Float32[Array, "*shape"], guard: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Scales as products take them; NaN where the guard is not that of the scale.

    If both are 0 or both `-inf`, the scale is 1: a step did not reach the layer, and a trainer copied its gradient into
    the state. An infinite scale, which is not calibrated yet, stays.

    Args:
        scale: Stored scales.
        guard: Stored beside them.
    """
    consistent, unreached = _fits(scale, guard)
    otherwise = lax.select(unreached, lax.full_like(scale, 1.0), lax.full_like(scale, np.nan))
    return lax.select(consistent, scale, otherwise)


def is_own(scale: Float32[Array, "*shape"], guard: Float32[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Whether only their own updates changed the scales."""
    return lax.bitwise_or(*_fits(scale, guard))


def _fits(scale: Array, guard: Array) -> tuple[Array, Array]:
    """Whether a guard is that of a scale; and whether a step did not reach the layer."""
    words = lax.bitcast_convert_type(guard, jnp.uint32)
    short = lax.bitcast_convert_type(lax.shift_left(lax.sub(words, _HALF), np.uint32(1)), jnp.float32)
    on_grid = lax.eq(lax.bitwise_and(words, _OFF_GRID), np.uint32(0))
    near = lax.bitwise_and(lax.ge(scale, lax.mul(short, _LOWEST)), lax.le(scale, lax.mul(short, _HIGHEST)))
    nothing = lax.bitwise_or(lax.eq(scale, np.float32(0.0)), lax.eq(scale, np.float32(-np.inf)))
    consistent = lax.bitwise_and(lax.bitwise_and(on_grid, near), lax.gt(short, np.float32(0.0)))
    return consistent, lax.bitwise_and(lax.eq(scale, guard), nothing)


def is_changed(scale: np.ndarray, guard: np.ndarray) -> bool:
    """Whether any scale has a guard that is not its own, by the same rule on the host."""
    scale, guard = np.asarray(scale, np.float32), np.ascontiguousarray(guard, np.float32)
    words = guard.view(np.uint32)
    short = ((words - _HALF) << np.uint32(1)).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        near = (scale >= short * _LOWEST) & (scale <= short * _HIGHEST)
    consistent = ((words & _OFF_GRID) == 0) & near & (short > 0.0)
    unreached = (scale == guard) & ((scale == 0.0) | (scale == -np.inf))
    return not bool((consistent | unreached).all())
