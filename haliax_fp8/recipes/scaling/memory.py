"""The interface of memories: what a scaling remembers from step to step, and how a step changes it."""

import abc
import dataclasses
from typing import ClassVar

from jax import lax
from jaxtyping import Array, Float, Float32

from ..._numerics.quantized_array import QuantizedArray
from .members import Members


@dataclasses.dataclass(frozen=True)
class AbstractMemory(abc.ABC):
    """What a scaling remembers of an operand from step to step, as the `memory` of that scaling.

    The numbers are in the state of the op, a table with a row for each operand: first the scale for the next use, then
    what the last step measured, then whatever else is remembered. A step measures each operand, and the memory computes
    the next row from that. Like a scaling it is a value: frozen, hashable, compared by its fields.

    A gradient carries a whole row, and `apply_updates` computes it again from what `newest` finds in it. So `newest`
    has to return what was measured, as it was measured; a memory that stores that elsewhere overrides it.

    Calibration measures with `measure_for_calibration` and updates with `calibrated`: by default as training does.

    Example:
        >>> memory = DelayedScaling(amax_history_length=3).memory
        >>> rows = jnp.array([memory.first_row])
        >>> for amax in (448.0, 896.0):
        ...     rows = memory.update(rows, jnp.array([[amax]]), (E4M3.max,))
        >>> rows
        Array([[  2., 896.,   0., 448.]], dtype=float32)
    """

    numbers: ClassVar[int]
    """How many numbers a step records of an operand; with 0 it records none, and the rows do not change."""

    @property
    @abc.abstractmethod
    def first_row(self) -> tuple[float, ...]:
        """The row before the first step."""

    @abc.abstractmethod
    def measure(
        self, x: Float[Array, "*shape"], quantized: QuantizedArray, ensemble: int
    ) -> Float[Array, "*ensemble numbers parts"]:
        """What a step measures of parts of an operand, in any dtype. It records their maximum, as several uses do.

        A maximum over all of a large operand takes two launches; of parts, operands share the second.

        Args:
            x: The operand; it may have no elements.
            quantized: What the scaling's `quantize` made of it.
            ensemble: How many leading axes number members.
        """

    def measure_for_calibration(
        self, x: Float[Array, "*shape"], quantized: QuantizedArray, ensemble: int
    ) -> Float[Array, "*ensemble numbers parts"]:
        """What a step of calibration measures: as `measure`, unless a memory needs more, or less, in training.

        Args:
            x: The operand.
            quantized: The operand in high precision, with scales of 1.
            ensemble: How many leading axes number members.
        """
        return self.measure(x, quantized, ensemble)

    def measure_members(
        self, x: Float[Array, "*shape"], quantized: QuantizedArray, members: Members
    ) -> Float[Array, "*members numbers parts"]:
        """As `measure`, of members that leading axes need not number; by default from what `measure` finds of those."""
        return members.measured(self.measure, x, quantized)

    @abc.abstractmethod
    def head(
        self,
        rows: Float32[Array, "*ensemble operands columns"],
        measured: Float32[Array, "*ensemble operands numbers"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands changed"]:
        """The first columns of the rows after a step: those that are computed from several others.

        Args:
            rows: The rows before it, of the operands with this memory.
            measured: What this step measured of them; where it is not finite, the scale must not come from it.
            limits: The largest value of each of these operands' formats.
        """

    def tail(
        self, rows: Float32[Array, "*ensemble operands columns"]
    ) -> list[Float32[Array, "*ensemble operands others"]]:
        """The other columns after a step, in parts: moved, or computed element by element. By default a row has none.

        Args:
            rows: The rows before it.
        """
        del rows
        return []

    def update(
        self,
        rows: Float32[Array, "*ensemble operands columns"],
        measured: Float32[Array, "*ensemble operands numbers"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands columns"]:
        """The rows after a step: `head`, then `tail`."""
        return lax.concatenate([self.head(rows, measured, limits), *self.tail(rows)], rows.ndim - 1)

    def calibrated(
        self,
        rows: Float32[Array, "*ensemble operands columns"],
        measured: Float32[Array, "*ensemble operands numbers"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands columns"]:
        """The rows after a step of calibration; as `update` for a memory that learns from every step."""
        return self.update(rows, measured, limits)

    def newest(
        self, rows: Float32[Array, "*ensemble operands columns"]
    ) -> Float32[Array, "*ensemble operands numbers"]:
        """What the last update entered into rows, which travel as a gradient: a sum or a maximum of several.

        By default the columns after the scale.

        Args:
            rows: The rows after a step.
        """
        return lax.slice_in_dim(rows, 1, 1 + self.numbers, axis=rows.ndim - 1)
