"""The records of all layers at once, for a function that is about to be differentiated."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Array

from .._jax.max_grad import to_float32
from .._jax.mesh_axes import shared_axes
from .._jax.xla import computed_together, not_constant, not_merged_across_layers
from .op_state import OpState
from .record import records_of
from .together import concatenated, kinds


def record_states(states: Sequence[OpState]) -> list[OpState]:
    """The records of states; those of a kind in one launch.

    Args:
        states: This step's. Those with a shared input take the largest scale of their inputs, which is each one's own
            if they always read the same.

    Inside `shard_map` the records are marked as varying: their gradients are what each device measured, and
    `complete_states` takes the maximum over devices.
    """
    records: dict[int, Array] = {}
    joined: list[int] = []
    tables = [state.array for state in states]
    for members in kinds(states, tables).values():
        first = states[members[0]]
        records_of_kind = functools.partial(records_of, scalings=first.scalings, limits=first.limits)
        if tables[members[0]].ndim > 2 or len(members) == 1:
            # There are few stacked layers, and XLA compiles their identical slices only once.
            records |= {i: records_of_kind(tables[i]) for i in members}
            continue
        of_all = computed_together(records_of_kind(concatenated([tables[i] for i in members], 0)))
        records |= dict(zip(members, lax.split(of_all, [1] * len(members)), strict=True))
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
        i: (largest[members[0]], position)
        for members in sharers.values()
        if members[0] in largest
        for position, i in enumerate(members)
    }
    new = []
    for i, (state, table) in enumerate(zip(states, tables, strict=True)):
        scale, index = shared.get(i, (None, None))
        record = records[i] if scale is None else _without_first(records[i], state)
        new.append(state.as_record(record, scale, index, shared_axes(table)))
    return new


def _of_first(record: Array, state: OpState) -> Array:
    """Both scales of an op's first operand."""
    operands = len(state.limits)
    return lax.slice_in_dim(record, 0, operands + 1, stride=operands, axis=record.ndim - 1)


def _without_first(record: Array, state: OpState) -> Array:
    axis, operands = record.ndim - 1, len(state.limits)
    parts = [lax.slice_in_dim(record, *part, axis=axis) for part in ((1, operands), (operands + 1, None))]
    return lax.concatenate(parts, axis)


def records_of_part(states: Sequence[OpState], records: Sequence[OpState]) -> list[OpState]:
    """What one of several parts of a step recorded, in float32, to be combined with the others' by maximum.

    What is not finite becomes `-inf`, which no maximum sees: the amaxes of the other parts count. Inside `shard_map`
    each device's rows of a microbatch are a part.

    Args:
        states: Not looked at; `complete_states` takes them.
        records: The gradients of their records.
    """
    del states

    def finite(record: Array) -> Array:
        numbers = to_float32(record)
        return lax.select(lax.is_finite(numbers), numbers, lax.full_like(numbers, -np.inf))

    return [jax.tree.map(finite, record) for record in records]
