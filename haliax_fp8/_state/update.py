"""The states of all layers at once: their records before a step, and their next tables after it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array

from .._jax.max_grad import to_float32
from .._jax.meshes import largest_over_devices, marked_as_varying, shared_axes, varying_axes
from .._jax.opaque import opaque_constant
from .._jax.xla import computed_together, not_constant, not_merged_across_layers
from ..recipes.scaling import AbstractScaling
from .record import records_of
from .table import (
    Measured,
    apply_delta,
    measured_in_gradient,
    measured_in_record,
    numbers_of,
    table_delta,
    without_modified_rows,
)


def overwrite_states(states: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """The result of `OpState.overwritten_by` for each state and its gradient; all of a kind at once.

    Args:
        states: This step's, each an `OpState`, which imports this file.
        gradients: Their gradients, in the same order.
    """
    measured_in = lambda before, tables, scalings: measured_in_gradient(tables, scalings, before)
    return _update_all(measured_in, states, [gradient.array for gradient in gradients], fill_value=None)


def complete_states(states: Sequence[Any], records: Sequence[Any]) -> list[Any]:
    """The states of the next step, as gradients: `-inf` in rows that the step did not reach.

    Inside `shard_map`, devices that share a state record their maximum.

    Args:
        states: This step's.
        records: The gradients of their records, in the same order.
    """
    measured_in = lambda _, records, scalings: measured_in_record(records, scalings)
    of_devices: dict[tuple[str, ...], list[int]] = {}
    arrays = [record.array for record in records]
    for i, state in enumerate(states):
        if numbers_of(state.scalings) and (axes := shared_axes(state.array)):
            of_devices.setdefault(axes, []).append(i)
    for axes, indices in of_devices.items():
        for i, array in zip(indices, _largest([arrays[i] for i in indices], axes=axes), strict=True):
            arrays[i] = array
    return _update_all(measured_in, states, arrays, fill_value=-np.inf)


# Opaque, because JAX cannot differentiate a maximum over devices.
@opaque_constant
def _largest(arrays: list[Array], *, axes: tuple[str, ...]) -> list[Array]:
    """The largest numbers on any device along some mesh axes, in one collective."""
    flat = [marked_as_varying(lax.reshape(to_float32(x), (x.size,)), axes) for x in arrays]
    parts = lax.split(largest_over_devices(concatenate(flat, 0), axes), [x.size for x in arrays])
    return [lax.reshape(part, x.shape) for part, x in zip(parts, arrays, strict=True)]


def replace_states(states: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """The same for gradients that are exact maxima, whose tables are already those of the next step.

    Args:
        states: This step's.
        gradients: From `complete_states`.
    """
    return [
        state.with_array(_written(state.array, to_float32(gradient.array), scalings=state.scalings))
        for state, gradient in zip(states, gradients, strict=True)
    ]


@opaque_constant
def _written(table: Array, gradient: Array, *, scalings: tuple[AbstractScaling, ...]) -> Array:
    """The rows that a step reached, from the gradient; the others as they are. Opaque, so that layers share a trace."""
    if numbers_of(scalings) == 0:
        return table
    reached = measured_in_gradient(gradient, scalings).reached
    return lax.select(lax.broadcast_in_dim(reached, table.shape, range(table.ndim)), gradient, table)


def _update_all(
    measured_in: Callable[[Array, Array, tuple[AbstractScaling, ...]], Measured],
    states: Sequence[Any],
    gradients: Sequence[Array],
    *,
    fill_value: float | None,
) -> list[Any]:
    """The states of the next step; those of a kind at once, in a launch or two for all layers.

    Args:
        measured_in: What was measured, from this step's tables and the gradients.
        states: This step's.
        gradients: The arrays of their gradients, or of those of their records.
        fill_value: What stands in rows that do not change; None for what stands there now.
    """
    new = list(states)
    tables = [state.array for state in states]
    for members in group_by_shape(states, tables, gradients).values():
        scalings, limits = states[members[0]].scalings, states[members[0]].limits
        if numbers_of(scalings) == 0:
            continue
        axis = tables[members[0]].ndim - 2
        of_others = to_float32(concatenate([gradients[i] for i in members], axis))
        before = concatenate([tables[i] for i in members], axis)
        measured = without_modified_rows(before, measured_in(before, of_others, scalings))
        changes = computed_together(table_delta(before, measured, scalings, limits))
        rows = changes.shape[-2] // len(members)
        starts = not_constant([np.int32(rows * i) for i in range(len(members))])
        for i, start in zip(members, starts, strict=True):
            table = _changed(tables[i], changes, start, scalings=scalings, fill_value=fill_value)
            new[i] = states[i].with_array(table)
    return new


@opaque_constant
def _changed(
    table: Array, changes: Array, start: Any, *, scalings: tuple[AbstractScaling, ...], fill_value: float | None
) -> Array:
    """The table with its part of the changes. Opaque, so that layers share one trace."""
    axis = table.ndim - 2
    change = lax.dynamic_slice_in_dim(changes, start, table.shape[axis], axis, allow_negative_indices=False)
    return apply_delta(table, change, scalings, fill_value)


def group_by_shape(states: Sequence[Any], *arrays: Sequence[Array]) -> dict[Any, list[int]]:
    """The indices of states whose arrays can each become one: same scalings, same stack, same devices.

    Args:
        states: The states.
        *arrays: One array or several of each state.
    """
    group_by_shape: dict[Any, list[int]] = {}
    for i, state in enumerate(states):
        signatures = [_signature(of_states[i]) for of_states in arrays]
        group_by_shape.setdefault((state.scalings, state.limits, *signatures), []).append(i)
    return group_by_shape


def concatenate(arrays: list[Array], axis: int) -> Array:
    """One array for all ops of a kind."""
    return arrays[0] if len(arrays) == 1 else lax.concatenate(arrays, axis)


def _signature(table: Array) -> tuple[Any, ...]:
    """What two tables must share to become one array: shape, devices, and the mesh axes along which they vary."""
    if isinstance(table, Tracer):
        return table.shape, varying_axes(table)
    return table.shape, getattr(table, "sharding", None)


def record_states(states: Sequence[Any]) -> list[Any]:
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
    for members in group_by_shape(states, tables).values():
        first = states[members[0]]
        records_of_group = functools.partial(records_of, scalings=first.scalings, limits=first.limits)
        if tables[members[0]].ndim > 2 or len(members) == 1:
            # There are few stacked layers, and XLA compiles their identical slices only once.
            records |= {i: records_of_group(tables[i]) for i in members}
            continue
        of_all = computed_together(records_of_group(concatenate([tables[i] for i in members], 0)))
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


def _of_first(record: Array, state: Any) -> Array:
    """Both scales of an op's first operand."""
    operands = len(state.limits)
    return lax.slice_in_dim(record, 0, operands + 1, stride=operands, axis=record.ndim - 1)


def _without_first(record: Array, state: Any) -> Array:
    axis, operands = record.ndim - 1, len(state.limits)
    parts = [lax.slice_in_dim(record, *part, axis=axis) for part in ((1, operands), (operands + 1, None))]
    return lax.concatenate(parts, axis)


def records_of_part(states: Sequence[Any], records: Sequence[Any]) -> list[Any]:
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
