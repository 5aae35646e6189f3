"""Random Hadamard transform: spreads outliers over their neighbours before an operand is quantized."""

import dataclasses
import functools
from typing import ClassVar

import numpy as np
from jaxtyping import Array, Float

from ..._arguments import require
from ..._numerics.quantized_array import QuantizedArray
from ..._numerics.rounding import GROUP, Rotation
from ...devices.device import MatrixUnits
from ...formats import Format
from .base import AbstractScaling, CastCost, OperandUse
from .memory import AbstractMemory


@dataclasses.dataclass(frozen=True)
class HadamardScaling(AbstractScaling):
    """Another scaling, applied after rotating every 16 elements along the contraction.

    Both operands of a product are rotated, `(a R) (b R)^T = a b^T`, so the product does not change. But an outlier is
    shared by the 16 elements of its group, and no longer sets their scale alone. `R` is a Hadamard matrix with fixed
    random signs. A grouped product, which sums over parts of an axis, is not rotated.

    Args:
        scaling: How the rotated operand is quantized. Its scales may not all come from a state, which knows the operand
            before it is rotated: a rotation makes an amax at most four times as large, which blocks with scales of
            their own can hold.
        padding: Whether to pad an axis with zeros if its length is not a multiple of 16.

    Raises:
        ValueError: If `scaling` has all its scales from a state; when used, if an axis would be padded and `padding` is
            False.

    References:
        QuaRot (arXiv:2404.00456); arXiv:2509.25149, section 4.2: on the operands of wgrad.
    """

    scaling: AbstractScaling
    padding: bool = True

    per_axis: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require("scaling", self.scaling, AbstractScaling, "CurrentScaling() or NVFP4Scaling()", of="HadamardScaling")
        if self.scaling.stores_scale:
            raise ValueError(
                f"scaling={self.scaling} of HadamardScaling has its scale from the state, which describes the operand "
                "before it is rotated; use a scaling that measures, such as CurrentScaling() or NVFP4Scaling()"
            )

    @functools.cached_property
    def memory(self) -> AbstractMemory | None:
        """That of the scaling, of the operand before it is rotated."""
        return self.scaling.memory

    @functools.cached_property
    def stores_scale(self) -> bool:
        """No."""
        return False

    @property
    def units(self) -> MatrixUnits:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The units of the scaling: rotations of both operands cancel."""
        return self.scaling.units

    @property
    def gradient_format(self) -> Format:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The gradient format of the scaling."""
        return self.scaling.gradient_format

    @property
    def cast_cost(self) -> CastCost:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The cost of the scaling, and of the rotation: a launch that reads and writes bfloat16."""
        bytes, launches = self.scaling.cast_cost
        return CastCost(bytes + 4.0, launches + 1)

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """Rotates, then quantizes."""
        if not (use.contiguous_sum and use.contracted):
            return self.scaling.quantize(x, use)
        rotation = Rotation(axis=use.contracted[-1], length=x.shape[use.contracted[-1]])
        if rotation.padding and not self.padding:
            raise ValueError(
                f"axis {rotation.axis} of an operand of shape {x.shape} is not a multiple of the {GROUP} elements that "
                f"{self} rotates; make it one, or let it be padded with zeros, padding=True"
            )
        if use.stored_scale is not None:
            # Elements are sums of 16, each times a quarter.
            use = use._replace(stored_scale=use.stored_scale * np.float32(GROUP**0.5))
        quantized = self.scaling.quantize(rotation.apply(x), use)
        return dataclasses.replace(quantized, rotation=rotation, amax=None)
