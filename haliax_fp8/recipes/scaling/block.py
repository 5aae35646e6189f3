"""Block scaling: a scale for each block of elements, as DeepSeek-V3 has it."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from ..._numerics.formats import E4M3, Format
from ..._numerics.quantized_array import QuantizedArray, quantize_by
from ..._numerics.require import require_bool, require_integer
from ...devices.device import MX_UNITS, NO_UNITS, MatrixUnits
from .base import AbstractScaling, CastCost, OperandUse
from .block_geometry import block_shape, blockwise_amax
from .multiplier import multiplier_of


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
    # An amax and two scales for each block of 32, in float32 and in E8M0: 16 bytes more.
    cast_cost: ClassVar[CastCost] = CastCost(bytes=5.5, launches=3)

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
    def directional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
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
