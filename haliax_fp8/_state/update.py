"""The states of all layers at once: their records before a step, and their next tables after it.

A step calls `record_states`, differentiates the loss, and passes the gradients of the records to `complete_states`. If
it has several parts, such as microbatches, `records_of_part` comes in between. `replace_states` and `overwrite_states`
then write the state: the first from gradients of `complete_states`, the second from gradients of any origin.

Layers whose tables have the same shape, scalings and limits are updated in one launch or two.
"""

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


# --- Before a step ----------------------------------------------------------------------------------------------------


def record_states(states: Sequence[Any]) -> list[Any]:
    """The records of states.

    Inside `shard_map` the records are marked as varying: their gradients are what each device measured, and
    `complete_states` takes the maximum over devices.

    Args:
        states: This step's, each an `OpState`, which imports this file. Those with a shared input take the largest
            scale of their inputs; if they always read the same input, these scales are equal.
    """
    tables = [state.array for state in states]
    records: dict[int, Array] = {}
    from_groups: list[int] = []
    for indices in group_by_shape(states, tables).values():
        first = indices[0]
        group_records = functools.partial(records_of, scalings=states[first].scalings, limits=states[first].limits)
        if tables[first].ndim > 2 or len(indices) == 1:
            # There are few stacked layers, and XLA compiles their identical slices only once.
            records |= {i: group_records(tables[i]) for i in indices}
            continue
        joined = computed_together(group_records(concatenate([tables[i] for i in indices], 0)))
        records |= dict(zip(indices, lax.split(joined, [1] * len(indices)), strict=True))
        from_groups += indices
    sharers = _sharers(states, records)
    largest = {
        indices[0]: functools.reduce(lax.max, [_input_scales(records[i], states[i]) for i in indices])
        for indices in sharers
    }
    # XLA makes all parts in one launch where they are computed, however little; a mere slice is a launch of its own.
    one = not_constant(np.float32(1.0))
    records |= {i: lax.mul(records[i], one) for i in from_groups}
    separate_records, separate_largest = not_merged_across_layers(
        ({i: records[i] for i in from_groups}, {i: x for i, x in largest.items() if i in from_groups})
    )
    records |= separate_records
    largest |= separate_largest
    shared = {i: (largest[indices[0]], position) for indices in sharers for position, i in enumerate(indices)}
    new = []
    for i, (state, table) in enumerate(zip(states, tables, strict=True)):
        scales, index_among_sharers = shared.get(i, (None, None))
        record = records[i] if scales is None else _without_input_scales(records[i], state)
        new.append(state.as_record(record, scales, index_among_sharers, shared_axes(table)))
    return new


def _sharers(states: Sequence[Any], records: dict[int, Array]) -> list[list[int]]:
    """The indices of states that share the scale of an input, for each input of several states."""
    sharers: dict[Any, list[int]] = {}
    for i, state in enumerate(states):
        if state.shared_input is not None:
            sharers.setdefault((state.shared_input, records[i].shape[:-1]), []).append(i)
    return [indices for indices in sharers.values() if len(indices) > 1]


def _input_scales(record: Array, state: Any) -> Array:
    """Both scales of an op's first operand: the exact one and the rounded one."""
    operands = len(state.limits)
    return lax.slice_in_dim(record, 0, operands + 1, stride=operands, axis=record.ndim - 1)


def _without_input_scales(record: Array, state: Any) -> Array:
    axis, operands = record.ndim - 1, len(state.limits)
    parts = [lax.slice_in_dim(record, *part, axis=axis) for part in ((1, operands), (operands + 1, None))]
    return lax.concatenate(parts, axis)


# --- After it ---------------------------------------------------------------------------------------------------------


def records_of_part(states: Sequence[Any], records: Sequence[Any]) -> list[Any]:
    """What one of several parts of a step recorded, in float32, to be combined with the others' by maximum.

    What is not finite becomes `-inf`, which no maximum sees: the amaxes of the other parts count. Inside `shard_map`
    each device's rows of a microbatch are a part.

    Args:
        states: Unused. Callers pass this function or `complete_states`, which needs them.
        records: The gradients of their records.
    """
    del states

    def finite(record: Array) -> Array:
        numbers = to_float32(record)
        return lax.select(lax.is_finite(numbers), numbers, lax.full_like(numbers, -np.inf))

    return [jax.tree.map(finite, record) for record in records]


def complete_states(states: Sequence[Any], records: Sequence[Any]) -> list[Any]:
    """The states of the next step, as gradients: `-inf` in rows that the step did not reach.

    Inside `shard_map`, devices that share a state take the maximum of what they recorded.

    Args:
        states: This step's.
        records: The gradients of their records, in the same order.
    """
    measured_in = lambda _, records, scalings: measured_in_record(records, scalings)
    arrays = [record.array for record in records]
    indices_by_axes: dict[tuple[str, ...], list[int]] = {}
    for i, state in enumerate(states):
        if numbers_of(state.scalings) and (axes := shared_axes(state.array)):
            indices_by_axes.setdefault(axes, []).append(i)
    for axes, indices in indices_by_axes.items():
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
    """The states of the next step, from gradients that already are its tables.

    Args:
        states: This step's.
        gradients: From `complete_states`.
    """
    return [
        state.with_array(_replaced(state.array, to_float32(gradient.array), scalings=state.scalings))
        for state, gradient in zip(states, gradients, strict=True)
    ]


# Opaque, so that layers share one trace.
@opaque_constant
def _replaced(table: Array, gradient: Array, *, scalings: tuple[AbstractScaling, ...]) -> Array:
    """The gradient in rows that the step reached; the others as they are."""
    if numbers_of(scalings) == 0:
        return table
    reached = measured_in_gradient(gradient, scalings).reached
    return lax.select(lax.broadcast_in_dim(reached, table.shape, range(table.ndim)), gradient, table)


def overwrite_states(states: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """The states of the next step, from gradients of any origin, of which only the newest amaxes are read.

    This is `OpState.overwritten_by` for all states at once.

    Args:
        states: This step's.
        gradients: Their gradients, in the same order.
    """
    measured_in = lambda tables, gradients, scalings: measured_in_gradient(gradients, scalings, tables)
    return _update_all(measured_in, states, [gradient.array for gradient in gradients], fill_value=None)


def _update_all(
    measured_in: Callable[[Array, Array, tuple[AbstractScaling, ...]], Measured],
    states: Sequence[Any],
    gradients: Sequence[Array],
    *,
    fill_value: float | None,
) -> list[Any]:
    """The states of the next step, in one launch or two for each group of `group_by_shape`.

    Args:
        measured_in: What was measured, from this step's tables and the gradients.
        states: This step's.
        gradients: The arrays of their gradients, or of those of their records.
        fill_value: Value for rows that the step did not reach; None keeps them.
    """
    new = list(states)
    tables = [state.array for state in states]
    for indices in group_by_shape(states, tables, gradients).values():
        first = indices[0]
        scalings, limits = states[first].scalings, states[first].limits
        if numbers_of(scalings) == 0:
            continue
        axis = tables[first].ndim - 2
        group_gradients = to_float32(concatenate([gradients[i] for i in indices], axis))
        group_tables = concatenate([tables[i] for i in indices], axis)
        measured = without_modified_rows(group_tables, measured_in(group_tables, group_gradients, scalings))
        delta = computed_together(table_delta(group_tables, measured, scalings, limits))
        rows = delta.shape[-2] // len(indices)
        starts = not_constant([np.int32(rows * i) for i in range(len(indices))])
        for i, start in zip(indices, starts, strict=True):
            table = _apply_rows(tables[i], delta, start, scalings=scalings, fill_value=fill_value)
            new[i] = states[i].with_array(table)
    return new


# Opaque, so that layers share one trace.
@opaque_constant
def _apply_rows(
    table: Array, delta: Array, start: Any, *, scalings: tuple[AbstractScaling, ...], fill_value: float | None
) -> Array:
    """The table with its rows of the delta, which begin at `start`."""
    axis = table.ndim - 2
    rows = lax.dynamic_slice_in_dim(delta, start, table.shape[axis], axis, allow_negative_indices=False)
    return apply_delta(table, rows, scalings, fill_value)


# --- Several states as one array --------------------------------------------------------------------------------------


def group_by_shape(states: Sequence[Any], *arrays: Sequence[Array]) -> dict[Any, list[int]]:
    """The indices of states whose arrays can be concatenated: same scalings, limits, shapes and devices.

    Args:
        states: The states.
        *arrays: One or more sequences with an array of each state.
    """
    groups: dict[Any, list[int]] = {}
    for i, state in enumerate(states):
        signatures = [_signature(sequence[i]) for sequence in arrays]
        groups.setdefault((state.scalings, state.limits, *signatures), []).append(i)
    return groups


def _signature(table: Array) -> tuple[Any, ...]:
    """What two tables must share to become one array: shape, devices, and the mesh axes along which they vary."""
    if isinstance(table, Tracer):
        return table.shape, varying_axes(table)
    return table.shape, getattr(table, "sharding", None)


def concatenate(arrays: list[Array], axis: int) -> Array:
    """The arrays as one; a single array as it is."""
    return arrays[0] if len(arrays) == 1 else lax.concatenate(arrays, axis)
