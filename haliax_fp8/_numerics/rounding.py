"""Rounding to FP8, stochastic rounding, and the rotation in front of it."""

import dataclasses
import enum
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float32, Key, UInt32

from .._jax.xla import keep_cast
from ..formats import Format
from ..scopes import ROTATION
from .casts import saturating_cast, spacing_of


class Rounding(enum.Enum):
    """How values are rounded to a format.

    References:
        arXiv:1502.02551; NVIDIA's NVFP4 recipe (arXiv:2509.25149, section 4.4) rounds output gradients stochastically.

    Example:
        >>> x = jnp.full(10_000, 1.01)
        >>> rounded = Rounding.STOCHASTIC.cast(x, E4M3, jax.random.key(0)).astype(jnp.float32)
        >>> sorted(set(rounded.tolist())), bool(abs(rounded.mean() - 1.01) < 0.002)
        ([1.0, 1.125], True)
    """

    TO_NEAREST = "to_nearest"
    """To the nearest value, ties to even: the smallest error per element."""

    STOCHASTIC = "stochastic"
    """Up or down at random, so that the mean over many draws is the value itself.

    Between neighbors `lo <= |x| < hi` it takes `hi` with probability `(|x| - lo) / (hi - lo)`: if
    `u ~ uniform[0, 1)` is below that probability. Each element's error is larger than with `TO_NEAREST`, but errors do
    not accumulate: sums over many elements stay unbiased, unless elements exceed the format's maximum and are clipped.
    """

    needs_key: bool
    """Whether `cast` draws random numbers."""

    def __init__(self, value: str) -> None:
        self.needs_key = value == "stochastic"

    def cast(
        self, x: Float[Array, "*shape"], format: Format, key: Key[Array, "*ensemble"] | None
    ) -> Float[Array, "*shape"]:
        """Rounds to a format; values beyond its maximum are clipped, infinities too, and NaN stays.

        Args:
            x: Values to round.
            format: The format to round to.
            key: Random keys, one for each element of the leading axes; not used by `TO_NEAREST`.

        Returns:
            An array of `format.storage`.

        Raises:
            ValueError: If `key` is None and the rounding is stochastic.
        """
        return _drawn(x, format, key) if self.needs_key else saturating_cast(x, format)

    def squared_error(self, x: Float32[Array, "*shape"], format: Format) -> Float32[Array, "*shape"]:
        """`(cast(x) - x)**2`, or its expected value if the rounding is random.

        Between two neighbors that is the variance, `(hi - |x|) (|x| - lo)`; beyond the maximum, the square of what is
        clipped.

        Args:
            x: Values to round.
            format: The format to round to.
        """
        if not self.needs_key:
            return (keep_cast(saturating_cast(x, format)).astype(jnp.float32) - x) ** 2
        limit = np.float32(format.max)
        magnitude = jnp.abs(x)
        spacing = spacing_of(jnp.minimum(magnitude, limit), format)
        steps = jnp.minimum(magnitude, limit) / spacing
        above = steps - jnp.floor(steps)
        return above * (np.float32(1.0) - above) * spacing**2 + jnp.maximum(magnitude - limit, 0.0) ** 2

    def __repr__(self) -> str:
        return str(self)


def _drawn(x: Float[Array, "*shape"], format: Format, key: Key[Array, "*ensemble"] | None) -> Float[Array, "*shape"]:
    """One of the two neighbors of each value, at random."""
    if key is None:
        raise ValueError(
            "key=None: stochastic rounding draws random numbers; pass a key, as in "
            "cast(x, format, jax.random.key(seed))"
        )
    x = lax.convert_element_type(x, jnp.float32)
    limit = np.float32(format.max)
    magnitude = lax.clamp(np.float32(0.0), jnp.abs(x), limit)
    spacing = spacing_of(magnitude, format)
    steps = magnitude / spacing  # exact: the spacing is a power of two
    lower = jnp.floor(steps)
    up = _uniform(key, x.shape) < steps - lower
    rounded = jnp.where(up, lower + np.float32(1.0), lower) * spacing
    # Every value is representable in the format by now, so this cast does not round.
    return saturating_cast(jnp.copysign(jnp.where(jnp.isnan(x), x, rounded), x), format)


def _uniform(key: Key[Array, "*ensemble"], shape: tuple[int, ...]) -> Float[Array, "*shape"]:
    """Multiples of 2**-24 in [0, 1)."""
    members = key.ndim

    def draw(key: Key[Array, ""]) -> Float[Array, "*member"]:
        bits = random_bits(shape[members:], jax.random.bits(key, (), jnp.uint32))
        return (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24)

    for _ in range(members):
        draw = jax.vmap(draw)
    return draw(key)


def stochastic_bfloat16(x: Float32[Array, "*shape"], seed: UInt32[Array, ""]) -> BFloat16[Array, "*shape"]:
    """One of the two neighbors of each value in bfloat16, at random, so that the mean over seeds is the value itself.

    A bfloat16 is the upper half of a float32. So adding 16 random bits to the lower half and cutting it off rounds up
    with the probability that the lower half stands for. Exact values, infinities and NaN stay. Above the largest finite
    bfloat16, 3.39e38, the upper neighbor is infinity.

    Args:
        x: Values to round.
        seed: Decides the random bits, with the position of each element.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32) + (random_bits(x.shape, seed) >> np.uint32(16))
    rounded = lax.bitcast_convert_type((bits >> np.uint32(16)).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def random_bits(shape: tuple[int, ...], seed: UInt32[Array, ""]) -> UInt32[Array, "*shape"]:
    """A hash of each element's index and of a seed, the same however devices divide the array.

    JAX's own generator takes ten times as many operations, more than reading and writing an optimizer's state takes
    time.

    Args:
        shape: Of the array.
        seed: Another one for each array and step.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis, stride in enumerate(math.prod(shape[axis + 1 :]) for axis in range(len(shape))):
        index += lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
    return hashed(index ^ seed)


def hashed(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Chris Wellons's `lowbias32`, in which each bit of the input changes half of the output's.

    Args:
        x: Numbers; different ones have different hashes.
    """
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


GROUP = 16
"""How many elements are rotated together."""

# The same signs everywhere, as in TransformerEngine: both operands of a product need the same signs.
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@functools.cache
def rotation_matrix() -> np.ndarray:
    """`R`: a Hadamard matrix with fixed signs for its rows, so scaled that it is orthogonal."""
    hadamard = np.ones((1, 1))
    while len(hadamard) < GROUP:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return (np.diag(_SIGNS) @ hadamard / np.sqrt(GROUP)).astype(np.float32)  # +-1/4: exact


@dataclasses.dataclass(frozen=True)
class Rotation:
    """`x R` for every 16 elements along an axis, with `R` orthogonal: `R R^T = 1`.

    Args:
        axis: The axis.
        length: Its length. If not a multiple of 16, the axis is padded with zeros, which `undo` removes.

    References:
        TransformerEngine, `get_wgrad_sign_vector` of its NVFP4 recipe (the signs).

    Example:
        >>> rotation, x = Rotation(axis=0, length=20), jnp.arange(20.0)
        >>> rotation.apply(x).shape, bool(jnp.allclose(rotation.undo(rotation.apply(x)), x, atol=1e-5))
        ((32,), True)
    """

    axis: int
    length: int

    @property
    def padding(self) -> int:
        """The number of zeros that pad the axis."""
        return -self.length % GROUP

    def apply(self, x: Float[Array, "*shape"]) -> Float[Array, "*padded"]:
        """The rotated array: of bfloat16 in bfloat16, to which TransformerEngine rounds it too; else in float32."""
        padding = [(0, self.padding if axis == self.axis else 0) for axis in range(x.ndim)]
        x = x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)
        return self._times(jnp.pad(x, padding), rotation_matrix())

    def undo(self, x: Float[Array, "*padded"]) -> Float32[Array, "*shape"]:
        """Reverses `apply`: rotates back and removes the padding."""
        return lax.slice_in_dim(self._times(x, rotation_matrix().T), 0, self.length, axis=self.axis)

    def _times(self, x: Array, matrix: np.ndarray) -> Array:
        front, length, back = x.shape[: self.axis], x.shape[self.axis], x.shape[self.axis + 1 :]
        factor = jnp.asarray(matrix, x.dtype)
        if not back:
            groups = x.reshape(*front, length // GROUP, GROUP)
            operands = groups, factor
            numbers = ((groups.ndim - 1,), (0,)), ((), ())
        else:
            # Each group of rows is multiplied from the left, so that the array keeps its layout in memory.
            groups = x.reshape(*front, length // GROUP, GROUP, math.prod(back))
            batch, summed = tuple(range(groups.ndim - 2)), groups.ndim - 2
            operands = jnp.broadcast_to(factor, (*groups.shape[:-1], GROUP)), groups
            numbers = ((summed,), (summed,)), (batch, batch)
        with jax.named_scope(ROTATION):
            rotated = lax.dot_general(
                *operands, numbers, precision=lax.Precision.HIGHEST, preferred_element_type=x.dtype
            )
        return rotated.reshape(x.shape)
