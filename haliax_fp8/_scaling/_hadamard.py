"""Random Hadamard transform: spreads outliers over their neighbours before an operand is quantized."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from .._formats import Format
from .._quantized_array import QuantizedArray
from .._rotation import Rotation
from ._base import AbstractScaling, OperandUse


@dataclasses.dataclass(frozen=True)
class HadamardScaling(AbstractScaling):
    """Another scaling, behind a rotation of every 16 elements along the contraction.

    Both operands of a product are rotated, `(a R) (b R)^T = a b^T`, so that the product stays what it was, while an
    outlier is shared by the 16 elements of its group and no longer sets their scale alone. `R` is a Hadamard matrix
    with signs flipped at random, once and for all. A grouped product, which sums over parts of an axis, is left
    unrotated.

    Args:
        scaling: How the rotated operand is quantized; a stateless scaling.

    References:
        QuaRot (arXiv:2404.00456); arXiv:2509.25149, section 4.2: on the operands of wgrad.
    """

    scaling: AbstractScaling

    directional: ClassVar[bool] = True

    @property
    def gradient_format(self) -> Format:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the scaling."""
        return self.scaling.gradient_format

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """Rotates, then quantizes."""
        if not (use.mixable and use.contracted):
            return self.scaling.quantize(x, use)
        rotation = Rotation(axis=use.contracted[-1], length=x.shape[use.contracted[-1]])
        quantized = self.scaling.quantize(rotation.apply(x), use)
        return dataclasses.replace(quantized, rotation=rotation)
