"""Observed scaling: high precision, while the state that another scaling needs is recorded."""

import dataclasses
import functools
from typing import ClassVar

from jax import lax
from jaxtyping import Array, Float, Float32

from ..._numerics.quantized_array import QuantizedArray
from .base import AbstractScaling, OperandUse
from .high_precision import unscaled
from .memory import AbstractMemory


@dataclasses.dataclass(frozen=True)
class ObservedScaling(AbstractScaling):
    """Does not quantize the operand, but records what the later scaling needs.

    Calibration runs a model with it: every product runs in high precision, so one bad scale does not spoil the amaxes
    of later layers.

    Args:
        scaling: The scaling whose state is recorded.
    """

    scaling: AbstractScaling

    quantizes: ClassVar[bool] = False
    directional: ClassVar[bool] = False

    @functools.cached_property
    def memory(self) -> AbstractMemory | None:
        """That of the scaling, which every step calibrates; None if it has none."""
        return None if self.scaling.memory is None else ObservedMemory(self.scaling.memory)

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """The operand itself, with scales of 1."""
        return unscaled(x, use.ensemble)


@dataclasses.dataclass(frozen=True)
class ObservedMemory(AbstractMemory):
    """Another memory, calibrated in every step.

    Args:
        memory: The other memory.
    """

    memory: AbstractMemory

    @property
    def numbers(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As many as the other memory measures; one where only calibration records it."""
        return max(self.memory.numbers, 1)

    @property
    def first_row(self) -> tuple[float, ...]:
        """The first row of the other memory."""
        return self.memory.first_row

    def measure(
        self, x: Float[Array, "*shape"], quantized: QuantizedArray, ensemble: int
    ) -> Float[Array, "*ensemble numbers parts"]:
        """Measures as the other memory does."""
        return self.memory.measure(x, quantized, ensemble)

    def head(
        self,
        rows: Float32[Array, "*ensemble operands columns"],
        measured: Float32[Array, "*ensemble operands numbers"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands columns"]:
        """Updates the row as the other memory does when it is calibrated."""
        return self.memory.calibrated(rows, measured, limits)

    def newest(
        self, rows: Float32[Array, "*ensemble operands columns"]
    ) -> Float32[Array, "*ensemble operands numbers"]:
        """Where the other memory has it; behind the scale if only calibration records it."""
        return self.memory.newest(rows) if self.memory.numbers else lax.slice_in_dim(rows, 1, 2, axis=rows.ndim - 1)
