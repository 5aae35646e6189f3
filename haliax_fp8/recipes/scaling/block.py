"""Blocks of elements that share a scale: their shape, their amax, and scales that are powers of two."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from ..._arguments import require_bool, require_integer
from ..._numerics.quantized_array import QuantizedArray, quantize_by
from ...devices.device import MX_UNITS, NO_UNITS, MatrixUnits
from ...formats import E4M3, Format
from .base import AbstractScaling, CastCost, OperandUse
from .multiplier import amax_over, multiplier_of


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


_LARGEST_BLOCK = 2**16


@dataclasses.dataclass(frozen=True)
class BlockScaling(AbstractScaling):
    """One scale per block: `size` elements along the contraction, or a square of them.

    DeepSeek-V3 scales input and output gradient in blocks of 1x128 and the kernel in blocks of 128x128. Squares are
    the same for both products that use the kernel; 1-D blocks are quantized again for each.

    Args:
        size: Elements of a block along the contracted axis (the last one, if several are contracted).
        square: Whether a block also spans `size` elements of the last free axis.
        power_of_two: Round scales up to powers of two. Blocks of 128 then equal blocks of 32 with the same scale, which
            hardware multiplies.
        padding: Whether the last block of an axis may be partial, as if padded with zeros.

    Raises:
        ValueError: If `size` is below 1; when used, if the last block is partial and `padding` is False.

    References:
        DeepSeek-V3 (arXiv:2412.19437), section 3.3.2; TransformerEngine's `Float8BlockScaling`.
    """

    size: int = 128
    square: bool = False
    power_of_two: bool = True
    padding: bool = True

    gradient_format: ClassVar[Format] = E4M3
    # An amax and two scales for each block of 32, in float32 and in E8M0: 16 bytes more. And for every second product
    # a transposition in bytes.
    cast_cost: ClassVar[CastCost] = CastCost(bytes=6.5, launches=4)

    def __post_init__(self) -> None:
        require_integer("size", self.size, of="BlockScaling")
        for name in ("square", "power_of_two", "padding"):
            require_bool(name, getattr(self, name), of="BlockScaling")
        if self.size < 1:
            raise ValueError(f"size={self.size} of a block must be at least 1; DeepSeek-V3 uses 128")
        if self.size > _LARGEST_BLOCK:
            raise ValueError(
                f"size={self.size} of a block must be at most {_LARGEST_BLOCK}: operands are padded to whole blocks; "
                "DeepSeek-V3 uses 128, and RowwiseScaling() has one scale for a whole row"
            )

    @property
    def units(self) -> MatrixUnits:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Powers of two for whole blocks of 32 are MXFP8 with repeated scales; no hardware supports any other scale."""
        return MX_UNITS if self.power_of_two and self.size % 32 == 0 else NO_UNITS

    @property
    def per_axis(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Squares look the same from both sides."""
        return not self.square

    @property
    def for_kernel(self) -> AbstractScaling:
        """Squares, as in DeepSeek-V3."""
        return dataclasses.replace(self, square=True)

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """Quantizes with the amax of each block; blocks cut by the edge are smaller."""
        block = block_shape(x.shape, self.size, use, square=self.square, padding=self.padding, scaling=self)
        amax = blockwise_amax(use.counted(x), block)
        multiplier = multiplier_of(amax, use.format.max, power_of_two=self.power_of_two)
        return quantize_by(x, multiplier, use.cast, block, scale_bits=1 if self.power_of_two else 24)
