"""A second number next to each stored scale, which reveals state that anything but its own update modified.

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

from ..recipes.scaling.multiplier import round_up_words, words_of


# The significant bits of the scale that a guard is made of.
_BITS = 4
# What halving the bits of 1.0 leaves to be added, so that its guard is 1.0.
_HALF = np.uint32(np.float32(1.0).view(np.uint32) // 2)
# The bits that are zero in every guard, the sign's among them.
_OFF_GRID = np.uint32(1 << 31 | (1 << (23 - _BITS)) - 1)

# A rounded scale is less than a step of the grid above the scale. If state was rounded to bfloat16, with its model, the
# scale may be a whole step lower: on the grid, which bfloat16 holds, so that it crosses no step.
_WIDTH = np.uint32(1 << (24 - _BITS))
# `fit` tests `0 <= 2 * guard - (scale - 1) + _OFFSET <= _WIDTH`, modulo 2**32.
_OFFSET = np.uint32((-2 * int(_HALF) - 1) % 2**32)

_ZERO, _ONE = np.uint32(0), np.uint32(1)
_INFINITY, _MINUS_INFINITY = (np.float32(x).view(np.uint32) for x in (np.inf, -np.inf))
# Stands for numbers that have no guard. The words of NaN begin above infinity's; the guard that fits this one is
# not infinity's, nor that of the NaN that arithmetic gives (0x7FC00000), of zero, or of a negative number.
_NO_SCALE = np.uint32(0x7F808000)


def guard_of(scale: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The guard of positive scales."""
    words = round_up_words(words_of(scale), _BITS)
    return lax.bitcast_convert_type(lax.add(lax.shift_right_logical(words, np.uint32(1)), _HALF), jnp.float32)


def guard_on_host(scale: np.ndarray) -> np.ndarray:
    """`guard_of` in NumPy: an op may be made inside a step that is compiled for devices which are not here."""
    dropped = np.uint32((1 << (24 - _BITS)) - 1)
    words = (np.ascontiguousarray(scale, np.float32).view(np.uint32) + dropped) & ~dropped
    return ((words >> np.uint32(1)) + _HALF).view(np.float32)


def fit(scale: Float32[Array, "*shape"], guard: Float32[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Whether nothing but its own updates changed each scale.

    If a trainer copied the gradient of a layer that a step did not reach, both are 0 or both `-inf`. An infinite scale,
    which is not calibrated yet, has a guard as well; in float16 that is infinite too.

    Args:
        scale: Stored scales.
        guard: The guards stored beside them.
    """
    # As words: it takes fewer operations, and a CPU takes subnormal numbers for zero.
    words, guard_words = words_of(scale), words_of(guard)
    # NaN, zero and negative numbers, less one, are larger words than infinity's.
    above = lax.sub(lax.shift_left(guard_words, _ONE), lax.min(lax.sub(words, _ONE), _NO_SCALE))
    near = lax.le(lax.add(above, _OFFSET), _WIDTH)
    consistent = lax.bitwise_and(near, is_on_grid(guard))
    without_sign = lax.shift_left(words, _ONE)
    special = lax.bitwise_or(lax.eq(without_sign, _ZERO), lax.eq(without_sign, _INFINITY << _ONE))
    return lax.bitwise_or(consistent, lax.bitwise_and(special, lax.eq(words, guard_words)))


def is_on_grid(guard: Float32[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Whether numbers may be guards at all, whatever a scale was rounded to; sums and means of guards hardly are."""
    return lax.eq(lax.bitwise_and(words_of(guard), _OFF_GRID), _ZERO)


def is_scaled_down(scale: Float32[Array, "*shape"], guard: Float32[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Whether scales and guards of a gradient were multiplied by a number below one, such as `1 / loss_scale`.

    A guard is not less than the square root of its scale, so `(g1 + g2)**2 >= s1 + s2`: sums over several uses of a
    layer pass, and so do maxima. A common factor is squared on the left only. Factors between 0.78 and 1 may pass.

    Args:
        scale: The scales.
        guard: The guards stored beside them.
    """
    # Both may have been rounded: to bfloat16, or a scale to float16, where its last bit is 2**-24. A smaller scale is
    # not looked at; those of inputs and kernels, which were divided as well, are larger.
    least = lax.sub(lax.mul(scale, np.float32(1 - 2.0**-6)), np.float32(2.0**-25))
    return lax.lt(lax.mul(guard, guard), least)


def is_modified(scale: np.ndarray, guard: np.ndarray) -> bool:
    """Whether any scale has a guard that does not fit it, by the rule of `fit`, on the host.

    The guard of a scale that is not calibrated yet may be infinite too: float16 does not hold it, if a model was cast.
    """
    words, guard_words = (np.ascontiguousarray(x, np.float32).view(np.uint32) for x in (scale, guard))
    near = (guard_words << _ONE) - (words - _ONE) + _OFFSET <= _WIDTH
    consistent = near & ((guard_words & _OFF_GRID) == 0) & (words - _ONE < _INFINITY)
    consistent |= (words == _INFINITY) & (guard_words == _INFINITY)
    unreached = (words == guard_words) & ((words << _ONE == _ZERO) | (words == _MINUS_INFINITY))
    return not bool((consistent | unreached).all())
