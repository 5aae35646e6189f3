"""The update of all layers' states at once."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array

from .._jax.max_grad import to_float32
from .._jax.mesh_axes import varying_axes
from ..recipes.scaling import AbstractScaling
from .members import measured_by_reached
from .table import measures, overwriting, overwritten


def overwrite_states(states: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """The result of `OpState.overwritten_by` for each state and its gradient; all of a kind at once.

    Args:
        states: This step's, each an `OpState`, which imports this file.
        gradients: Their gradients, in the same order.
    """
    return together(overwriting, overwritten, states, gradients)


def together(
    change_of: Callable[..., Array],
    changed: Callable[..., Array],
    states: Sequence[Any],
    others: Sequence[Any],
    of_ops: Sequence[Array] | None = None,
) -> list[Any]:
    """Computes the change of all states of a kind at once: a kernel or two for all layers, not for each."""
    new = list(states)
    for members in kinds(states, others).values():
        scalings, limits = states[members[0]].scalings, states[members[0]].limits
        if measures(scalings) == 0:
            continue
        tables = concatenated([states[i].array for i in members])
        of_others = [others[i].array for i in members]
        # Records have one axis where tables have rows and columns.
        axis = states[members[0]].array.ndim - 2
        of_others = to_float32(of_others[0] if len(of_others) == 1 else lax.concatenate(of_others, axis))
        if of_ops is not None:
            of_others = measured_by_reached(of_others, lax.concatenate([of_ops[i] for i in members], axis))
        # Apart from the tables: one kernel for the changes of all.
        changes = lax.optimization_barrier(change_of(tables, of_others, scalings, limits))
        rows = changes.shape[-2] // len(members)
        # Their places are not constants, or writing each table would be another program for XLA to compile.
        starts = lax.optimization_barrier([np.int32(rows * place) for place in range(len(members))])
        for i, start in zip(members, starts, strict=True):
            new[i] = states[i].with_array(_changed(states[i].array, changes, start, changed=changed, scalings=scalings))
    return new


@functools.partial(jax.jit, static_argnames=("changed", "scalings"))
def _changed(
    table: Array, changes: Array, start: Array, *, changed: Callable[..., Array], scalings: Sequence[AbstractScaling]
) -> Array:
    """The table with its part of the changes. Jitted, so that layers share one trace."""
    axis = table.ndim - 2
    return changed(table, lax.dynamic_slice_in_dim(changes, start, table.shape[axis], axis), scalings)


def kinds(states: Sequence[Any], others: Sequence[Any] | None = None) -> dict[Any, list[int]]:
    """The places of states that can become one array: same scalings, same stack, same devices."""
    kinds: dict[Any, list[int]] = {}
    for i, state in enumerate(states):
        place = _place(state.array), None if others is None else _place(others[i].array)
        kinds.setdefault((state.scalings, state.limits, place), []).append(i)
    return kinds


def concatenated(tables: list[Array]) -> Array:
    """One table with the rows of all."""
    return tables[0] if len(tables) == 1 else lax.concatenate(tables, tables[0].ndim - 2)


def _place(table: Array) -> tuple[Any, ...]:
    """What two tables must share to become one array: shape, devices, and the mesh axes along which they vary."""
    if isinstance(table, Tracer):
        return table.shape, varying_axes(table)
    return table.shape, getattr(table, "sharding", None)
