"""Observed scaling: high precision, while the state that another scaling needs is recorded."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float, Float32

from ..._numerics.quantized_array import QuantizedArray
from .base import AbstractStatefulScaling, OperandUse
from .high_precision import unscaled


@dataclasses.dataclass(frozen=True)
class ObservedScaling(AbstractStatefulScaling):
    """Does not quantize the operand, but records what the later scaling needs.

    Calibration runs a model with it: every product runs in high precision, so one bad scale does not spoil the amaxes
    of later layers.

    Args:
        scaling: The scaling whose state is recorded.
    """

    scaling: AbstractStatefulScaling

    quantizes: ClassVar[bool] = False
    numbers: ClassVar[int] = 1

    @property
    def first_row(self) -> tuple[float, ...]:
        """The first row of the scaling."""
        return self.scaling.first_row

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """The operand itself, with scales of 1."""
        return unscaled(x, use.ensemble)

    def measure(
        self, x: Float[Array, "*shape"], quantized: QuantizedArray, ensemble: int
    ) -> Float[Array, "*ensemble 1 parts"]:
        """Measures as the scaling does."""
        return self.scaling.measure(x, quantized, ensemble)

    def head(
        self,
        rows: Float32[Array, "*ensemble operands columns"],
        measured: Float32[Array, "*ensemble operands 1"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands columns"]:
        """Updates the scale as the scaling does when it is calibrated."""
        return self.scaling.calibrated(rows, measured, limits)
