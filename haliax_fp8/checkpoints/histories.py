"""The table of an op's state, from one of another history length."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from .._state.guard import is_modified
from .._state.op_state import OpState
from .._state.table import first_table, guarded
from ..recipes.scaling import DelayedScaling


def first_of(state: OpState) -> np.ndarray:
    """The table before the first step, in the shape of a state."""
    first, shape = first_table(state.scalings), state.table.array.shape
    assert first is not None
    return np.array(np.broadcast_to(first, shape))


def refusal(table: Float32[np.ndarray, "*stack operands columns"]) -> str | None:
    """Why the numbers of a table cannot be a state; None if they can."""
    if not is_modified(table[..., 0], table[..., -1]):
        return None
    return "the scales in the checkpoint were changed by something other than their own update, such as an optimizer"


def fitted(
    table: Float32[np.ndarray, "*stack operands columns"], state: OpState
) -> Float32[np.ndarray, "*stack operands own_columns"] | None:
    """A table of another width as that of a state; None if no row of it remembers amaxes that the state has use for.

    A row `[scale, newest, oldest, ..., second newest, guard]` keeps its newest amaxes. If some have to go, the oldest
    that stays becomes the largest of these and itself, so that the maximum of the history stays the same until the next
    step; missing ones are zeros, older than all others. The scale is computed again from the history, as in a step.

    Args:
        table: `[*stack, operands, columns]`, float32. Static scaling's amax of calibration counts as a history of one.
            Whether it counts the steps between updates (`update_interval`) is not in it: taken to be as in the state.
        state: What the table has to fit.
    """
    result, found = first_of(state), False
    for row, scaling in enumerate(state.scalings):
        if not isinstance(scaling, DelayedScaling):
            continue
        end = table.shape[-1] - (2 if scaling.update_interval > 1 else 1)
        history = _resized(table[..., row, 1:end], scaling.amax_history_length)
        # A table of three columns may be that of static scaling, whose scale without an amax is nothing to go by.
        used = (history.max(axis=-1, keepdims=True) > 0.0) | (table.shape[-1] > 3)
        found |= bool(used.any())
        newest, older = jnp.asarray(history[..., None, :1]), jnp.asarray(history[..., None, 1:])
        before = jnp.asarray(table[..., row : row + 1, :1])
        scale = scaling.memory.scale_of(newest, older, before, (state.limits[row],))
        columns = np.concatenate([np.asarray(scale)[..., 0, :], history], axis=-1)
        width = columns.shape[-1]
        result[..., row, :width] = np.where(used, columns, result[..., row, :width])
    return np.asarray(guarded(jnp.asarray(result[..., :-1]))) if found else None


def _resized(history: Float32[np.ndarray, "*stack old"], length: int) -> Float32[np.ndarray, "*stack new"]:
    in_time = np.concatenate([history[..., 1:], history[..., :1]], axis=-1)
    surplus = in_time.shape[-1] - length
    if surplus > 0:
        oldest = in_time[..., : surplus + 1].max(axis=-1, keepdims=True)
        in_time = np.concatenate([oldest, in_time[..., surplus + 1 :]], axis=-1)
    elif surplus < 0:
        in_time = np.concatenate([np.zeros((*history.shape[:-1], -surplus), np.float32), in_time], axis=-1)
    return np.concatenate([in_time[..., -1:], in_time[..., :-1]], axis=-1)


def widths(table: Any, state: OpState) -> str:
    """How a history was fitted, in words."""
    old, new = table.shape[-1] - 2, state.table.array.shape[-1] - 2
    return f"the history of {old} steps was {'cut' if old > new else 'padded'} to {new}; its maximum is the same"
