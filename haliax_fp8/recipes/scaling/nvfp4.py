"""NVFP4: 4-bit data in blocks of 16, with a scale of 8 bits for each block and one of 32 bits for the tensor."""

import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from ..._arguments import require, require_bool
from ..._jax.meshes import largest_over_devices
from ..._jax.xla import force_cast
from ..._numerics.casts import saturating_cast, spacing_of
from ..._numerics.quantized_array import QuantizedArray, expand
from ...devices.device import FP4_UNITS, MatrixUnits
from ...formats import E2M1, E4M3, Format
from .base import AbstractScaling, CastCost, OperandUse
from .block import block_shape, blockwise_amax, blockwise_sum
from .delayed import DelayedScaling, stored_scale_of
from .memory import AbstractMemory
from .multiplier import multiplier_of, scale_of


# Twice the smallest scale that no device flushes to zero: rounded to E4M3, it may lose a third.
SMALLEST_SCALE = np.float32(2.0**-125)

_MARGIN = np.float32(2.0**-13)

# Of 448: a power of two, so that a scale keeps its few bits.
_LARGEST_BLOCK_SCALE = np.float32(256.0)


@dataclasses.dataclass(frozen=True)
class NVFP4Scaling(AbstractScaling):
    """Blocks of 16 along the contraction, with scales in E4M3 that one float32 scale brings into E4M3's range.

    `tensor_scale = amax(tensor) / (448 * 6)`, `block_scale = E4M3(amax(block) / 6 / tensor_scale)`, and
    `scale = block_scale * tensor_scale`; 6 is the maximum of E2M1. An operand has 4.5 bits per element.

    The block scale is rounded to nearest, which clips the largest elements of some blocks by up to 6 %. If the data are
    rounded stochastically, it is rounded up: nothing is clipped, and the mean over many draws is the value itself.

    Args:
        square: Blocks of 16x16, the same for both products that use an operand; kernels take them.
        padding: Whether the last block of an axis may be partial, as if padded with zeros.
        four_over_six: Whether a block may map its amax to 4 instead of 6 if that makes its squared error smaller: E2M1
            has no value between 4 and 6, but 3 below 4. With stochastic rounding, the expected error decides. The error
            of a block is never above that of `four_over_six=False`.
        per_device: Inside `jax.shard_map`, a tensor scale for each device's part, as in `CurrentScaling`.
        per_row: A scale for each row instead of one for the tensor, so that rows do not depend on each other. It
            multiplies the product's rows. Kernels keep one scale.
        delayed: Takes the tensor's scale from its amaxes in earlier steps, so that it need not be read before it is
            quantized: `tensor_scale = scale / 256` with the `scale` of that scaling. Blocks may grow to 1.75 times the
            largest of those amaxes before they are clipped. None takes it from the tensor itself.

    Raises:
        ValueError: If `per_device` or `per_row` is neither True nor False, `delayed` is another scaling, `per_row` is
            combined with `square`, or `delayed` with `per_row` or `per_device`; when used, if the last block is partial
            and `padding` is False.

    References:
        NVIDIA, Pretraining Large Language Models with NVFP4 (arXiv:2509.25149); TransformerEngine's
        `NVFP4BlockScaling`. Four Over Six (arXiv:2512.02010), which also lowers the tensor's 448 to 256, so that the
        blocks near the tensor's amax have the choice too; then some blocks are worse than without it.

    Example:
        >>> x = jnp.zeros((2, 16)).at[0, :4].set(jnp.array([10.0, 20.0, 30.0, 40.0]))
        >>> x = x.at[1, 0].set(2688.0)
        >>> for four_over_six in (False, True):
        ...     scaling = NVFP4Scaling(four_over_six=four_over_six)
        ...     q = scaling.quantize(x, OperandUse(E2M1, contracted=(1,)))
        ...     print(q.data[0, :4].astype(jnp.float32))
        [1.5 3.  4.  6. ]
        [1. 2. 3. 4.]
    """

    square: bool = False
    padding: bool = True
    four_over_six: bool = False
    per_device: bool = False
    per_row: bool = False
    delayed: DelayedScaling | None = None

    units: ClassVar[MatrixUnits] = FP4_UNITS
    rounds_scale: ClassVar[bool] = True
    gradient_format: ClassVar[Format] = E2M1
    # As XLA compiles it for a B200: the amaxes of blocks and of the tensor, the cast, its transposition, four bits.
    cast_cost: ClassVar[CastCost] = CastCost(bytes=13.0, launches=9)

    def __post_init__(self) -> None:
        for name in ("per_device", "per_row"):
            require_bool(name, getattr(self, name), of="NVFP4Scaling")
        if self.per_row and self.square:
            raise ValueError(
                "per_row=True and square=True of NVFP4Scaling: a block of 16x16 has one scale for its 16 rows; use "
                "per_row for inputs and gradients, and square for kernels"
            )
        if self.delayed is None:
            return
        require("delayed", self.delayed, DelayedScaling, "DelayedScaling(), or None", of="NVFP4Scaling")
        if self.per_row or self.per_device:
            name = "per_row" if self.per_row else "per_device"
            raise ValueError(
                f"{name}=True and delayed={self.delayed} of NVFP4Scaling: the state has one scale for all of a "
                "tensor; give one of the two"
            )

    @functools.cached_property
    def memory(self) -> AbstractMemory | None:
        """That of `delayed`."""
        return None if self.delayed is None else self.delayed.memory

    @functools.cached_property
    def stores_scale(self) -> bool:
        """No: blocks have scales too."""
        return False

    @property
    def per_axis(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Squares look the same from both sides."""
        return not self.square

    @property
    def for_kernel(self) -> AbstractScaling:
        """The same scaling with square blocks, so that fprop and dgrad share one quantized kernel."""
        return dataclasses.replace(self, square=True, per_row=False)

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """Quantizes with the amax of each block and that of the tensor."""
        block = block_shape(x.shape, 16, use, square=self.square, padding=self.padding, scaling=self)
        x = lax.convert_element_type(x, jnp.float32)
        amax = blockwise_amax(use.counted(x), block)
        # A block that holds an infinity or NaN has a scale of NaN, and leaves the others theirs.
        finite = jnp.isfinite(amax)
        unit, multiplier = self._tensor_scale(amax, finite, use)
        largest = None if self.delayed is None else _largest(amax, use.ensemble)
        exact_scale = amax * (multiplier / np.float32(use.format.max))
        if self.delayed is not None:
            exact_scale = jnp.minimum(exact_scale, np.float32(E4M3.max))
        # Else the scale, a product of the two, would be flushed to zero for tensors below 1e-34.
        exact_scale = jnp.where(amax > 0.0, jnp.maximum(exact_scale, SMALLEST_SCALE * multiplier), np.float32(0.0))
        scale = _block_scale(exact_scale, use) * unit
        if self.four_over_six:
            scale = self._better(x, scale, exact_scale, unit, use, block)
        scale = jnp.where(finite, scale, np.float32(np.nan))
        data = use.cast(_scaled(x, scale, block))
        return QuantizedArray(data, scale, block, tensor_scale=unit, tensor_scale_bits=use.scale_bits, amax=largest)

    def _tensor_scale(self, amax: Array, finite: Array, use: OperandUse) -> tuple[Array, Array]:
        """The tensor's scale, with the rank of the blocks, and its reciprocal."""
        if self.delayed is not None:
            stored = stored_scale_of(use)
            return unit_of_stored(stored.reshape(*stored.shape, *(1,) * (amax.ndim - stored.ndim)))
        axes = use.contracted if self.per_row else tuple(range(use.ensemble, amax.ndim))
        tensor_amax = jnp.max(jnp.where(finite, amax, 0.0), axis=axes, keepdims=True, initial=0.0)
        tensor_amax = largest_over_devices(tensor_amax, () if self.per_device or self.per_row else use.devices)
        return unit_of_amax(tensor_amax, use.format, use.scale_bits)

    def _better(
        self, x: Array, for_six: Array, exact_scale: Array, unit: Array, use: OperandUse, block: tuple[int, ...]
    ) -> Float32[Array, "*blocks"]:
        """The scale of each block with the smaller squared error: that for 6, or half as much again."""
        for_four = _block_scale(exact_scale * np.float32(1.5), use) * unit
        error_of_six, error_of_four = (
            blockwise_sum(use.rounding.squared_error(_scaled(x, scale, block), use.format), block)
            for scale in (for_six, for_four)
        )
        ratio = for_four / for_six
        # In units of the scale for 6. The margin is above what float32 rounds of up to 256 elements' errors.
        better = error_of_four * ratio * ratio + _MARGIN * (error_of_six + np.float32(1.0)) < error_of_six
        fits = exact_scale * np.float32(1.5) <= np.float32(E4M3.max)
        return jnp.where(better & fits, for_four, for_six)


def unit_of_amax(
    amax: Float32[Array, "*ones"], format: Format, bits: int
) -> tuple[Float32[Array, "*ones"], Float32[Array, "*ones"]]:
    """A tensor's scale from its amax, rounded up to so many significant bits, and its reciprocal."""
    limit = E4M3.max * format.max
    if bits < 24:
        unit = scale_of(amax, limit, bits)
        return unit, np.float32(1.0) / unit
    multiplier = multiplier_of(amax, limit)
    return np.float32(1.0) / multiplier, multiplier


def unit_of_stored(scale: Float32[Array, "*ones"]) -> tuple[Float32[Array, "*ones"], Float32[Array, "*ones"]]:
    """A tensor's scale from the one that the state holds, which has few significant bits already; its reciprocal."""
    unit = jnp.maximum(scale / _LARGEST_BLOCK_SCALE, np.finfo(np.float32).tiny)
    return unit, np.float32(1.0) / unit


def _largest(amax: Float32[Array, "*blocks"], ensemble: int) -> Float32[Array, "*ensemble 1 1"]:
    """The largest amax of each member's blocks; infinite instead of NaN, which a maximum may drop."""
    amax = jnp.where(jnp.isnan(amax), np.float32(np.inf), amax)
    return jnp.max(amax, axis=tuple(range(ensemble, amax.ndim)), initial=0.0)[..., None, None]


def _block_scale(exact_scale: Float32[Array, "*blocks"], use: OperandUse) -> Float32[Array, "*blocks"]:
    """Rounded to E4M3: up where data are rounded at random, since clipping has no mean of zero; else to nearest."""
    if use.rounding.needs_key:
        spacing = spacing_of(exact_scale, E4M3)
        # Exact: every value is one of E4M3's by now.
        rounded = saturating_cast(jnp.ceil(exact_scale / spacing) * spacing, E4M3)
    else:
        rounded = saturating_cast(exact_scale, E4M3)
    # This also keeps XLA's CPU compiler from evaluating a rotated operand that is a constant of the program, with
    # elements in the wrong order.
    return force_cast(rounded).astype(jnp.float32)


def _scaled(x: Float32[Array, "*shape"], scale: Float32[Array, "*blocks"], block: tuple[int, ...]) -> Array:
    """`x / scale`, by a multiplication; of blocks whose scale is 0 something finite."""
    inverse = jnp.minimum(np.float32(1.0) / scale, np.finfo(np.float32).max)
    return x * expand(inverse, x.shape, block)
