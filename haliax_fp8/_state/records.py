"""Records: they replace states in a differentiated function, and return as what a step measured."""

import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._jax.max_grad import to_float32, to_max_grad, to_record
from .._jax.opaque import opaque_constant
from .._jax.xla import computed_together, not_constant, not_merged_across_layers
from ..recipes.scaling.base import AbstractScaling
from .form import RecordForm, TableForm
from .marker import OverwriteWithGradient
from .members import marks
from .op_state import OpState, as_state
from .table import measured_in_record, numbers_of, record_length, scales_in
from .together import concatenated, kinds, together


class OpRecord(OverwriteWithGradient):
    """The scales of an op, without its histories: it replaces the op's state in a differentiated function.

    Its gradient is what the step measured, one or a few numbers per operand, not a table with a whole history. So each
    layer computes, moves and keeps only what differs between layers, and the histories of all layers are updated at
    once afterwards (`complete_states`).

    Args:
        values: float32, `[*stack, record_length + 1]`: the operands' scales, the same rounded up to `SCALE_BITS`, then
            zeros, and last a mark (`_state/members.py`), or 0 if something else changed the state. As a gradient: what
            was measured, operand by operand, and the mark; or only zeros. `_state/README.md` draws both.
        shared: Both scales of the first operand, `[*stack, 2]`, if other ops read the same input. `values` then lacks
            them, and all of these ops have the same array here.
        index_among_sharers: Which one of these ops this is, counted from 0; None if it shares nothing.
    """

    values: hax.NamedArray
    shared: hax.NamedArray | None = None
    index_among_sharers: int | None = eqx.field(static=True, default=None)

    @property
    def array(self) -> Array:
        """The record as the product takes it, with the scales of all operands."""
        others = as_state(self.values.array)
        if self.shared is None:
            return others
        shared, axis = as_state(self.shared.array), others.ndim - 1
        parts = lax.split(others, (2, 2, others.shape[-1] - 4), axis)
        first, second = lax.split(shared, (1, 1), axis)
        return lax.concatenate([first, parts[0], second, *parts[1:]], axis)

    @property
    def scale(self) -> Array:
        """The scales that the next use takes, `[*stack, operand]`."""
        return to_float32(self.array)[..., :3]

    def accumulate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, other: "OpRecord"
    ) -> "OpRecord":
        """The maximum of both."""
        return jax.tree.map(jnp.maximum, self, other)

    def overwritten_by(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, gradient: "OpRecord"
    ) -> "OpRecord":
        """Itself: it belongs to one evaluation, and has no next step."""
        del gradient
        return self

    def with_max_gradients(self) -> "OpRecord":
        """The record in `fp32_max_grad`."""
        return jax.tree.map(to_max_grad, self)


def form_of(state: OpState | OpRecord, *, stacked: bool) -> TableForm | RecordForm:
    """How a state or a record enters a product.

    Args:
        state: Of an op.
        stacked: Whether its layer is one of a stack.
    """
    return RecordForm(stacked, state.index_among_sharers) if isinstance(state, OpRecord) else TableForm(stacked)


def as_in_model(state: OpState | OpRecord | None) -> Array | None:
    """The array of a state or a record in the dtype that it has in the model; None if there is none."""
    return state.table.array if isinstance(state, OpState) else None if state is None else state.array


def marks_of(states: Sequence[OpState]) -> list[Array]:
    """The mark of each state's record, `[*stack, 1]`."""
    return marks([(*state.table.array.shape[:-2], 1) for state in states])


def record_states(states: Sequence[OpState], of_states: Sequence[Array], *, inexact: bool = False) -> list[OpRecord]:
    """The records of states, in `fp32_record`; all of a kind at once.

    Args:
        states: This step's. Those with a shared input take the largest scale of their inputs, which is each one's own
            if they always read the same.
        of_states: Their marks.
        inexact: Whether in `fp32_inexact_record`.
    """
    records: dict[int, Array] = {}
    joined: list[int] = []
    tables = [state.array for state in states]
    for members in kinds(states, tables).values():
        first = states[members[0]]
        numbers = functools.partial(_numbers, scalings=first.scalings, limits=first.limits)
        if tables[members[0]].ndim > 2 or len(members) == 1:
            # There are few stacked layers, and XLA compiles their identical slices only once.
            records |= {i: numbers(tables[i], of_states[i]) for i in members}
            continue
        of_all = concatenated([tables[i] for i in members], 0), concatenated([of_states[i] for i in members], 0)
        of_all = computed_together(numbers(*of_all))
        sizes = [of_all.shape[0] // len(members)] * len(members)
        records |= dict(zip(members, lax.split(of_all, sizes), strict=True))
        joined += members
    sharers: dict[Any, list[int]] = {}
    for i, state in enumerate(states):
        if state.shared_input is not None:
            sharers.setdefault((state.shared_input, records[i].shape[:-1]), []).append(i)
    largest: dict[int, Array] = {}
    for members in sharers.values():
        if len(members) > 1:
            largest[members[0]] = functools.reduce(lax.max, [_of_first(records[i], states[i]) for i in members])
    # XLA makes all parts in one launch where they are computed, however little; a mere slice is a launch of its own.
    one = not_constant(np.float32(1.0))
    records |= {i: lax.mul(records[i], one) for i in joined}
    apart = {i: records[i] for i in joined}, {i: x for i, x in largest.items() if i in joined}
    for found, values in zip((records, largest), not_merged_across_layers(apart), strict=True):
        found |= values
    shared = {
        i: (position, largest[members[0]])
        for members in sharers.values()
        if members[0] in largest
        for position, i in enumerate(members)
    }
    return [_record(state, records[i], *shared.get(i, (None, None)), inexact=inexact) for i, state in enumerate(states)]


# Opaque, so that layers share one trace.
@opaque_constant
def _numbers(tables: Array, marks: Array, *, scalings: tuple[AbstractScaling, ...], limits: tuple[float, ...]) -> Array:
    """The contents of records, from tables and marks: `[*stack, ops * (record_length + 1)]`."""
    scales, own = scales_in(tables, limits)
    scales = lax.reshape(scales, (*marks.shape, 2 * len(limits)))
    if numbers_of(scalings):
        # Without a mark, the step changes nothing.
        own = lax.reduce_and(own, (own.ndim - 2, own.ndim - 1))
        marks = lax.select(own, marks, lax.full_like(marks, 0.0))
    missing = record_length(scalings) - 2 * len(limits)
    zeros = [lax.full((*marks.shape, missing), 0.0, np.float32)] if missing else []
    numbers = lax.concatenate([scales, *zeros, lax.expand_dims(marks, (marks.ndim,))], marks.ndim)
    return lax.reshape(numbers, (*marks.shape[:-1], marks.shape[-1] * numbers.shape[-1]))


def _of_first(numbers: Array, state: OpState) -> Array:
    """Both scales of an op's first operand, `[*stack, 2]`."""
    axis, operands = numbers.ndim - 1, len(state.scalings)
    return lax.slice_in_dim(numbers, 0, operands + 1, stride=operands, axis=axis)


def _record(
    state: OpState, numbers: Array, index_among_sharers: int | None, shared: Array | None, *, inexact: bool
) -> OpRecord:
    """The record with these contents; ops may share the scales of the first operand."""
    stack, axis, operands = state.table.axis_names[:-2], numbers.ndim - 1, len(state.scalings)

    def named(array: Array, name: str) -> hax.NamedArray:
        # As in `with_array`: the names may count axes that the array does not have.
        empty: Any = np.zeros((0,) * (len(stack) + 1))
        structure = jax.tree.structure(hax.NamedArray(empty, (*stack, name)))
        return jax.tree.unflatten(structure, [to_record(array, inexact=inexact)])

    if shared is None:
        return OpRecord(named(numbers, "fp8_record"))
    others = [lax.slice_in_dim(numbers, *part, axis=axis) for part in ((1, operands), (operands + 1, None))]
    values = named(lax.concatenate(others, axis), "fp8_other_records")
    return OpRecord(values, named(shared, "fp8_shared_record"), index_among_sharers)


def records_of_part(states: Sequence[OpState], records: Sequence[OpRecord]) -> list[OpRecord]:
    """What one of several parts of a step recorded, in float32, to be combined with the others' by maximum.

    What is not finite becomes `-inf`, which no maximum sees: the amaxes of the other parts count.

    Args:
        states: Not looked at; `complete_states` takes them.
        records: The gradients of their records.
    """
    del states

    def finite(record: Array) -> Array:
        numbers = to_float32(record)
        return lax.select(lax.is_finite(numbers), numbers, lax.full_like(numbers, -np.inf))

    return [jax.tree.map(finite, record) for record in records]


def complete_states(states: Sequence[OpState], records: Sequence[OpRecord]) -> list[OpState]:
    """The states of the next step, as gradients, from what a step recorded; all of a kind at once.

    Args:
        states: This step's.
        records: The gradients of their records, in the same order.
    """
    # Tables need no check: if something else changed one, its record has no mark.
    measured_in = lambda table, record, scalings: measured_in_record(record, scalings)
    return together(measured_in, states, records, otherwise=-np.inf)
