"""Measured scaling: any scaling, with a record of what quantization does to the operand."""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from ..._jax.xla import made_before_it_is_measured
from ..._numerics.formats import Format
from ..._numerics.quantized_array import QuantizedArray
from ...devices.device import MatrixUnits
from .base import AbstractScaling, CastCost, OperandUse
from .memory import AbstractMemory
from .operand_statistics import STATISTICS as STATISTICS, Members as Members, statistics_of as statistics_of


@dataclasses.dataclass(frozen=True)
class MeasuredScaling(AbstractScaling):
    """Quantizes and records as another scaling does, and records what quantization does to the operand.

    Args:
        scaling: The scaling that quantizes.
        format: The format that it quantizes to.
    """

    scaling: AbstractScaling
    format: Format

    @property
    def quantizes(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the scaling that quantizes rounds its operand at all."""
        return self.scaling.quantizes

    @property
    def units(self) -> MatrixUnits:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The hardware that multiplies operands with the scales of that scaling."""
        return self.scaling.units

    @property
    def directional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether those scales depend on which axes are contracted."""
        return self.scaling.directional

    @property
    def cast_cost(self) -> CastCost:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The cost of that scaling; measuring is not a cast."""
        return self.scaling.cast_cost

    @functools.cached_property
    def stores_scale(self) -> bool:
        """Whether that scaling keeps its scale in the state; a stateless one does not."""
        return self.scaling.stores_scale

    @functools.cached_property
    def memory(self) -> "MeasuredMemory":
        """What that scaling remembers, and the statistics of the last step."""
        return MeasuredMemory(self.scaling, self.format)

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """Quantizes as the scaling does."""
        quantized = self.scaling.quantize(x, use)
        # Here, so that the products read it too; otherwise they would quantize the operand again.
        return dataclasses.replace(quantized, data=made_before_it_is_measured(quantized.data))


@dataclasses.dataclass(frozen=True)
class MeasuredMemory(AbstractMemory):
    """What a scaling remembers, and what it does to the operand.

    A row is that of the scaling, updated as by itself, followed by one number for each of `STATISTICS`.

    Args:
        scaling: The scaling that quantizes.
        format: The format that it quantizes to.
    """

    scaling: AbstractScaling
    format: Format

    @functools.cached_property
    def numbers(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the scaling's memory measures, then the statistics."""
        return self._inner_numbers + len(STATISTICS)

    @property
    def first_row(self) -> tuple[float, ...]:
        """The first row of the scaling's memory, then zeros."""
        return (*self._inner_row, *(0.0,) * len(STATISTICS))

    @property
    def _inner_row(self) -> tuple[float, ...]:
        return (1.0,) if self.scaling.memory is None else self.scaling.memory.first_row

    @property
    def _inner_numbers(self) -> int:
        return 0 if self.scaling.memory is None else self.scaling.memory.numbers

    def measure(
        self, x: Float[Array, "*shape"], quantized: QuantizedArray, ensemble: int
    ) -> Float32[Array, "*ensemble numbers 1"]:
        """What the scaling's memory measures, and the statistics of the operand."""
        return self.measure_members(x, quantized, Members(ensemble))

    def measure_members(
        self,
        x: Float[Array, "*shape"],
        quantized: QuantizedArray,
        members: Members,
        active: Float32[Array, "*members"] | None = None,
    ) -> Float32[Array, "*members numbers 1"]:
        """As `measure`, of members that are groups of rows or on several devices.

        Args:
            x: The operand.
            quantized: What the scaling made of it, with its scales.
            members: Which elements belong together.
            active: The share of a layer's experts that have rows; 1 by default.
        """
        statistics = statistics_of(made_before_it_is_measured(x), quantized, members, self.format, active)
        if self.scaling.memory is not None and self._inner_numbers:
            inner = self.scaling.memory.measure(x, quantized, members.ensemble)
            inner = members.largest_numbers(jnp.max(inner.astype(jnp.float32), axis=-1))
            statistics = lax.concatenate([inner, statistics], statistics.ndim - 1)
        return statistics[..., None]

    def head(
        self,
        rows: Float32[Array, "*ensemble operands columns"],
        measured: Float32[Array, "*ensemble operands numbers"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands columns"]:
        """The row of the scaling's memory after the step, and the statistics."""
        axis, count = rows.ndim - 1, self._inner_numbers
        inner = lax.slice_in_dim(rows, 0, len(self._inner_row), axis=axis)
        if self.scaling.memory is not None and count:
            inner = self.scaling.memory.update(inner, lax.slice_in_dim(measured, 0, count, axis=axis), limits)
        return lax.concatenate([inner, lax.slice_in_dim(measured, count, self.numbers, axis=axis)], axis)

    def newest(
        self, rows: Float32[Array, "*ensemble operands columns"]
    ) -> Float32[Array, "*ensemble operands numbers"]:
        """What the scaling's memory measured, and the statistics."""
        axis, width = rows.ndim - 1, len(self._inner_row)
        statistics = self.statistics(rows)
        if self.scaling.memory is None or not self._inner_numbers:
            return statistics
        inner = self.scaling.memory.newest(lax.slice_in_dim(rows, 0, width, axis=axis))
        return lax.concatenate([inner, statistics], axis)

    def statistics(
        self, rows: Float32[Array, "*ensemble operands columns"]
    ) -> Float32[Array, "*ensemble operands statistics"]:
        """The last columns: one for each of `STATISTICS`."""
        return lax.slice_in_dim(rows, len(self._inner_row), len(self.first_row), axis=rows.ndim - 1)
