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
from .._jax.xla import computed_together, not_constant, not_merged_across_layers
from .form import RecordForm
from .marker import OverwriteWithGradient
from .members import marks
from .op_state import OpState, as_state
from .table import measured_in_record, record_length, scales_in
from .together import concatenated, kinds, together


class OpRecord(OverwriteWithGradient):
    """The scales of an op, without its histories: it replaces the op's state in a differentiated function.

    Its gradient is what the step measured, one or a few numbers per operand, not a table with a whole history. So each
    layer computes, moves and keeps only what differs between layers, and the histories of all layers are updated at
    once afterwards (`complete_states`).

    Args:
        values: float32, `[*stack, record_length + 1]`: the operands' scales, the same rounded up to
            `SCALE_BITS`, then zeros, last a mark (`_state/members.py`); as a gradient, what was measured, an operand's
            numbers one after the other, then zeros and the mark, or zeros alone. Drawn in `_state/README.md`.
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

    def form(self, *, stacked: bool) -> RecordForm:
        """How it enters a product, of a layer that may be one of a stack."""
        return RecordForm(stacked, self.index_among_sharers)

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
    scales: dict[int, Array] = {}
    joined: list[int] = []
    tables = [state.array for state in states]
    for members in kinds(states, tables).values():
        of_members, limits = [tables[i] for i in members], states[members[0]].limits
        if of_members[0].ndim > 2:
            # There are few stacked layers, and XLA compiles their identical slices only once.
            scales |= {i: _scales_in(table, limits) for i, table in zip(members, of_members, strict=True)}
            continue
        of_all = computed_together(_scales_in(concatenated(of_members, 0), limits))
        sizes = [of_all.shape[0] // len(members)] * len(members)
        scales |= dict(zip(members, lax.split(of_all, sizes), strict=True))
        joined += members if len(members) > 1 else []
    sharers: dict[Any, list[int]] = {}
    for i, state in enumerate(states):
        if state.shared_input is not None:
            sharers.setdefault((state.shared_input, scales[i].shape), []).append(i)
    largest: dict[int, Array] = {}
    for members in sharers.values():
        if len(members) > 1:
            largest[members[0]] = functools.reduce(lax.max, [_of_first(scales[i], states[i]) for i in members])
    # XLA makes all parts in one launch where they are computed, however little; a mere slice is a launch of its own.
    one = not_constant(np.float32(1.0))
    scales |= {i: lax.mul(scales[i], one) for i in joined}
    apart = {i: scales[i] for i in joined}, {i: x for i, x in largest.items() if i in joined}
    for found, values in zip((scales, largest), not_merged_across_layers(apart), strict=True):
        found |= values
    shared = {
        i: (position, largest[members[0]])
        for members in sharers.values()
        if members[0] in largest
        for position, i in enumerate(members)
    }
    return [
        _record(state, scales[i], mark, *shared.get(i, (None, None)), inexact=inexact)
        for i, (state, mark) in enumerate(zip(states, of_states, strict=True))
    ]


@functools.partial(jax.jit, static_argnums=1)
def _scales_in(tables: Array, limits: tuple[float, ...]) -> Array:
    """The scales of each op. Jitted, so that layers share one trace."""
    return scales_in(tables, limits)


def _of_first(scales: Array, state: OpState) -> Array:
    """Both scales of an op's first operand, `[*stack, 2]`."""
    axis, operands = scales.ndim - 1, len(state.scalings)
    return lax.slice_in_dim(scales, 0, operands + 1, stride=operands, axis=axis)


def _record(
    state: OpState, scales: Array, mark: Array, index_among_sharers: int | None, shared: Array | None, *, inexact: bool
) -> OpRecord:
    """The record of scales `[*stack, 2 * operands]`; ops may share those of the first operand."""
    stack, axis, operands = state.table.axis_names[:-2], scales.ndim - 1, len(state.scalings)
    missing = record_length(state.scalings) - 2 * operands
    last = [jnp.zeros((*scales.shape[:-1], missing), jnp.float32), mark] if missing else [mark]

    def named(array: Array, name: str) -> hax.NamedArray:
        # As in `with_array`: the names may count axes that the array does not have.
        empty: Any = np.zeros((0,) * (len(stack) + 1))
        structure = jax.tree.structure(hax.NamedArray(empty, (*stack, name)))
        return jax.tree.unflatten(structure, [to_record(array, inexact=inexact)])

    if shared is None:
        return OpRecord(named(lax.concatenate([scales, *last], axis), "fp8_record"))
    others = [lax.slice_in_dim(scales, i + 1, i + operands, axis=axis) for i in (0, operands)]
    values = named(lax.concatenate([*others, *last], axis), "fp8_other_records")
    return OpRecord(values, named(shared, "fp8_shared_record"), index_among_sharers)


def complete_states(
    states: Sequence[OpState], records: Sequence[OpRecord], of_states: Sequence[Array]
) -> list[OpState]:
    """The states of the next step, as gradients, from what a step recorded; all of a kind at once.

    Args:
        states: This step's.
        records: The gradients of their records, in the same order.
        of_states: The marks that the records had.
    """
    return together(measured_in_record, states, records, of_states, otherwise=-np.inf)
