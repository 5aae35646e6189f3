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
from jaxtyping import Array, Bool, Float32, UInt32

from ..recipes.scaling.multiplier import round_up_words


# The significant bits of the scale that a guard is made of.
_BITS = 4


# What halving the bits of 1.0 leaves to be added, so that its guard is 1.0.
_HALF = np.uint32(np.float32(1.0).view(np.uint32) // 2)


# The bits that are zero in every guard.
_OFF_GRID = np.uint32((1 << (23 - _BITS)) - 1)

# A rounded scale is less than a step of the grid above the scale. State may have been rounded to bfloat16, with its
# model: by half of the last of its 16 bits.
_SLACK = 1 << 15
_WIDTH = np.uint32((1 << (24 - _BITS)) + 2 * _SLACK)
# What twice a guard has too much, less what may be missing; modulo 2**32.
_OFFSET = np.uint32((_SLACK - 2 * int(_HALF)) % 2**32)

_ZERO, _MINUS_INFINITY = np.uint32(0), np.float32(-np.inf).view(np.uint32)


def guard_of(scale: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The guard of positive scales."""
    words = round_up_words(words_of(scale), _BITS)
    return lax.bitcast_convert_type(lax.add(lax.shift_right_logical(words, np.uint32(1)), _HALF), jnp.float32)


def guard_on_host(scale: np.ndarray) -> np.ndarray:
    """`guard_of` in NumPy: an op may be made inside a step that is compiled for devices which are not here."""
    dropped = np.uint32((1 << (24 - _BITS)) - 1)
    words = (np.ascontiguousarray(scale, np.float32).view(np.uint32) + dropped) & ~dropped
    return ((words >> np.uint32(1)) + _HALF).view(np.float32)


def words_of(x: Float32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """The bits of numbers. Those of positive numbers have the same order."""
    return lax.bitcast_convert_type(x, np.uint32)


def fit(
    scale: UInt32[Array, "*shape"], guard: UInt32[Array, "*shape"]
) -> tuple[Bool[Array, "*shape"], Bool[Array, "*shape"]]:
    """Whether each guard is that of its scale; and whether both are 0 or both `-inf`.

    In the second case a step did not reach the layer, and a trainer copied its gradient into the state.

    Args:
        scale: The words of stored scales.
        guard: The words of what is stored beside them.
    """
    above = lax.sub(lax.shift_left(guard, np.uint32(1)), scale)
    near = lax.le(lax.add(above, _OFFSET), _WIDTH)
    on_grid = lax.eq(lax.bitwise_and(guard, _OFF_GRID), _ZERO)
    nothing = lax.bitwise_or(lax.eq(scale, _ZERO), lax.eq(scale, _MINUS_INFINITY))
    return lax.bitwise_and(near, on_grid), lax.bitwise_and(lax.eq(scale, guard), nothing)


def checked(
    scale: Float32[Array, "*shape"], consistent: Bool[Array, "*shape"], unreached: Bool[Array, "*shape"]
) -> Float32[Array, "*shape"]:
    """Scales as products take them: 1 where a step did not reach the layer, NaN where the guard does not fit.

    An infinite scale, which is not calibrated yet, stays.

    Args:
        scale: What follows from stored scales.
        consistent: From `fit`.
        unreached: From `fit`.
    """
    otherwise = lax.select(unreached, lax.full_like(scale, 1.0), lax.full_like(scale, np.nan))
    return lax.select(consistent, scale, otherwise)


def is_own(scale: Float32[Array, "*shape"], guard: Float32[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Whether only their own updates changed the scales."""
    return lax.bitwise_or(*fit(words_of(scale), words_of(guard)))


def is_changed(scale: np.ndarray, guard: np.ndarray) -> bool:
    """Whether any scale has a guard that is not its own, by the same rule on the host."""
    words, of_guard = (np.ascontiguousarray(x, np.float32).view(np.uint32) for x in (scale, guard))
    near = (of_guard << np.uint32(1)) - words + _OFFSET <= _WIDTH
    consistent = near & ((of_guard & _OFF_GRID) == 0)
    unreached = (words == of_guard) & ((words == _ZERO) | (words == _MINUS_INFINITY))
    return not bool((consistent | unreached).all())
