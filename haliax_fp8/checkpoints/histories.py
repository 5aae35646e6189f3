"""The table of an op's state, from one of another recipe or history length."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from ..recipes import AbstractScaling, AmaxHistory, StaticScaling
from ..training import OpState
from .recipes import Operands, delayed_part, is_gradient


def refusal(table: Float32[np.ndarray, "*stack operands columns"]) -> str | None:
    """Why the numbers of a table cannot be a state; None if they can."""
    if not OpState.is_modified(table):
        return None
    return "the scales in the checkpoint were changed by something other than their own update, such as an optimizer"


class SavedRow(NamedTuple):
    """What a row of a checkpoint's table holds.

    Args:
        scaling: The name of its scaling's class; empty if the checkpoint does not say.
        length: How many amaxes follow the scale.
        columns: How many columns the row has, but for its guard.
        limit: The largest value of the operand's format.
        margin: The margin that is in its scale.
        is_same: Whether its columns mean what they mean in the state.
        factor: What its amaxes are multiplied by.
    """

    scaling: str
    length: int
    columns: int
    limit: float
    margin: int
    is_same: bool = False
    factor: float = 1.0


def rows_as_here(columns: int, state: OpState) -> list[SavedRow]:
    """The rows of a table of so many columns, from a checkpoint that does not say what they mean: as in a state.

    Whether it counts the steps between updates (`update_interval`) is not in it: taken to be as in the state.
    """
    rows = []
    for scaling, limit in zip(state.scalings, state.limits, strict=True):
        memory = scaling.memory if isinstance(scaling.memory, AmaxHistory) else None
        length = columns - (3 if memory is not None and memory.update_interval > 1 else 2)
        # A table of three columns may be that of static scaling, whose scale without an amax is nothing to go by.
        name = "DelayedScaling" if columns > 3 else ""
        rows.append(SavedRow(name, length, columns - 1, limit, 0 if memory is None else memory.margin))
    return rows


def recorded_rows(saved: Operands, here: Operands, names: Sequence[str], factor: float) -> list[SavedRow]:
    """The rows of a table, from a checkpoint that says what they mean.

    Args:
        saved: The op's operands in the checkpoint.
        here: Those of the model's op.
        names: The operands that have a row.
        factor: What amaxes of gradients are multiplied by.
    """
    rows = []
    for name in names:
        operand = saved.get(name, {"scaling": {}, "max": 1.0})
        scaling = delayed_part(operand["scaling"])
        length = scaling.get("amax_history_length", 1)
        of_row = factor if is_gradient(name) else 1.0
        meanings = [{key: x.get(name, {}).get(key) for key in ("max", "scaling")} for x in (saved, here)]
        is_same = meanings[0] == meanings[1] and of_row == 1.0
        columns = 1 + length + (scaling.get("update_interval", 1) > 1)
        margin = scaling.get("margin", 0)
        rows.append(SavedRow(scaling.get("type", ""), length, columns, operand["max"], margin, is_same, of_row))
    return rows


def fitted(
    table: Float32[np.ndarray, "*stack operands columns"], state: OpState, saved: Sequence[SavedRow]
) -> tuple[Float32[np.ndarray, "*stack operands own_columns"] | None, list[int]]:
    """A table as that of a state, and its rows that are as before the first step although their scaling remembers.

    It is None if no row of it remembers anything that the state has use for.

    A row `[scale, newest, oldest, ..., second newest, guard]` keeps its newest amaxes. If some have to go, the oldest
    that stays becomes the largest of these and itself, so that the maximum of the history stays the same until the next
    step; missing ones are zeros, older than all others. The scale is computed again from the history, as in a step.
    Where that is zero, and with static scaling, the scale is converted to the format and margin of the state.

    Args:
        table: `[*stack, operands, columns]`, float32. Static scaling's amax of calibration counts as a history of one.
        state: What the table has to fit.
        saved: What the rows of the table mean.

    Raises:
        ValueError: If the table has fewer columns than they need.
    """
    remembered = [row for row, scaling in zip(saved, state.scalings, strict=True) if scaling.memory is not None]
    if table.shape == state.table.array.shape and all(row.is_same for row in remembered):
        return table, []
    result, any_used, fresh = state.before_first_step(), False, []
    for i, (scaling, limit, row) in enumerate(zip(state.scalings, state.limits, saved, strict=True)):
        if scaling.memory is None:
            continue
        used, columns = _fitted_row(table[..., i, :-1], scaling, len(scaling.memory.first_row), limit, row)
        if not used.any():
            fresh.append(i)
            continue
        any_used, width = True, columns.shape[-1]
        result[..., i, :width] = np.where(used, columns, result[..., i, :width])
    return (np.asarray(OpState.guarded(jnp.asarray(result[..., :-1]))) if any_used else None), fresh


def _fitted_row(
    values: Float32[np.ndarray, "*stack columns"], scaling: AbstractScaling, width: int, limit: float, row: SavedRow
) -> tuple[np.ndarray, np.ndarray]:
    """Which layers of a stack have something to go by in a row, and the columns of those."""
    everywhere, nowhere = (np.full((*values.shape[:-1], 1), value) for value in (True, False))
    needed = width if row.is_same else row.columns
    if needed > values.shape[-1]:
        raise ValueError(f"its recipe needs {needed + 1} columns, and the table has {values.shape[-1] + 1}")
    if row.is_same:
        return everywhere, values[..., :width]
    memory = scaling.memory
    margin = memory.margin if isinstance(memory, AmaxHistory) else getattr(scaling, "margin", 0)
    scale = values[..., :1] * np.float32(row.limit / limit * 2.0 ** (margin - row.margin) * row.factor)
    amaxes = values[..., 1 : 1 + row.length] * np.float32(row.factor)
    if isinstance(scaling, StaticScaling) and row.scaling == "StaticScaling":
        return everywhere, np.concatenate([scale, amaxes], axis=-1)
    if not isinstance(memory, AmaxHistory) or row.scaling not in ("", "DelayedScaling", "StaticScaling"):
        return nowhere, values
    history = _resized(amaxes, memory.length)
    used = (history.max(axis=-1, keepdims=True) > 0.0) | (row.scaling == "DelayedScaling")
    newest, older, before = (jnp.asarray(x[..., None, :]) for x in (history[..., :1], history[..., 1:], scale))
    new_scale = memory.scale_of(newest, older, before, (limit,))
    return used, np.concatenate([np.asarray(new_scale)[..., 0, :], history], axis=-1)


def _resized(history: Float32[np.ndarray, "*stack old"], length: int) -> Float32[np.ndarray, "*stack new"]:
    in_time = np.concatenate([history[..., 1:], history[..., :1]], axis=-1)
    surplus = in_time.shape[-1] - length
    if surplus > 0:
        oldest = in_time[..., : surplus + 1].max(axis=-1, keepdims=True)
        in_time = np.concatenate([oldest, in_time[..., surplus + 1 :]], axis=-1)
    elif surplus < 0:
        in_time = np.concatenate([np.zeros((*history.shape[:-1], -surplus), np.float32), in_time], axis=-1)
    return np.concatenate([in_time[..., -1:], in_time[..., :-1]], axis=-1)
