"""The state of an op as one array: a row for each operand, which that operand's scaling reads and writes."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32

from ._base import AbstractScaling, AbstractStatefulScaling


type Table = Float32[Array, "*ensemble operands columns"]


def first_table(scalings: Sequence[AbstractScaling]) -> np.ndarray | None:
    """The table before the first step; None if no scaling keeps state. A stateless operand has a row, of scale 1."""
    if not any(isinstance(scaling, AbstractStatefulScaling) for scaling in scalings):
        return None
    rows = [s.first_row if isinstance(s, AbstractStatefulScaling) else (1.0,) for s in scalings]
    table = np.zeros((len(rows), max(map(len, rows))), np.float32)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values
    return table


def measures(scalings: Sequence[AbstractScaling]) -> int:
    """How many numbers a step records of each operand."""
    return max(s.measures if isinstance(s, AbstractStatefulScaling) else 0 for s in scalings)


def updated(
    table: Array, measured: Array | None, scalings: Sequence[AbstractScaling], limits: Sequence[float]
) -> Array:
    """The table of the next step.

    Args:
        table: This step's, `[*ensemble, operands, columns]`.
        measured: What the step recorded, `[*ensemble, operands, measures]`; None if nothing is.
        scalings: Of each operand.
        limits: The largest value of each operand's format.
    """
    operands, rows = table.ndim - 2, {}
    for scaling, members in _groups(scalings).items():
        if scaling.measures == 0 or measured is None:
            continue
        width = len(scaling.first_row)
        old = _rows_of(table, members, width)
        new = scaling.update(old, _rows_of(measured, members, scaling.measures), tuple(limits[row] for row in members))
        if len(members) == len(scalings) and width == table.shape[-1]:
            return new
        new = lax.concatenate([new, _rows_of(table, members, table.shape[-1], start=width)], operands + 1)
        rows |= {row: lax.slice_in_dim(new, i, i + 1, axis=operands) for i, row in enumerate(members)}
    kept = (row for row in range(len(scalings)) if row not in rows)
    rows |= {row: lax.slice_in_dim(table, row, row + 1, axis=operands) for row in kept}
    return lax.concatenate([rows[row] for row in range(len(scalings))], operands)


# Where a use of an op has no finite amax.
_NOT_FINITE = -1.0


def recorded(measured: Array) -> Array:
    """What a step measured, as the gradient of scales.

    Several uses take the maximum, whose identity is `-inf`: no use at all. An amax that is infinite or NaN is -1.

    Args:
        measured: `[*ensemble, operands, measures]`.
    """
    return lax.select(lax.is_finite(measured), measured, lax.full_like(measured, _NOT_FINITE))


def recorded_nothing(scales: Array) -> Array:
    """The gradient of scales, `[*ensemble, operands, 1]`, of an op that was used and measures nothing."""
    return lax.full_like(scales, _NOT_FINITE, np.float32)


class Change(NamedTuple):
    """How tables change in a step: the columns that have to be computed together, all else element by element.

    Args:
        head: The first columns of the new tables, `[*ensemble, operands, columns]`.
        changes: Which rows change, `[*ensemble, operands, 1]`.
    """

    head: Array
    changes: Array


def completion(table: Array, record: Array, scalings: Sequence[AbstractScaling], limits: Sequence[float]) -> Change:
    """The change of tables from gradients of scales.

    Args:
        table: This step's, `[*ensemble, operands, columns]`.
        record: See `recorded`.
        scalings: Of each operand.
        limits: The largest value of each operand's format.
    """
    first = record[..., :1]
    # Where nothing in the program uses an op, JAX gives 0 for all that it has. One whose operands are all zero in a
    # step is taken for one of these.
    reached = jnp.isfinite(first) & jnp.any(first != 0.0, axis=-2, keepdims=True)
    measured = jnp.where(record < 0.0, jnp.nan, record)
    return Change(_heads(table, measured, scalings, limits), reached)


def completed(table: Array, change: Change, scalings: Sequence[AbstractScaling]) -> Array:
    """The table of the next step as a gradient; `-inf` where the op was not reached."""
    return jnp.where(change.changes, _assembled(table, change.head, scalings), -jnp.inf)


def overwriting(table: Array, gradient: Array, scalings: Sequence[AbstractScaling], limits: Sequence[float]) -> Change:
    """The change of tables by what gradients newly recorded; all else is computed anew from these tables.

    So a gradient that is a sum over several uses cannot corrupt scales and histories. Rows stay as they were where the
    gradient is that of a layer that the step did not reach (a scale of 0 or `-inf`), and where what it recorded is not
    finite.
    """
    operands = table.ndim - 2
    newest = jnp.zeros((*table.shape[:-1], max(1, measures(scalings))), jnp.float32)
    changes = jnp.zeros((*table.shape[:-1], 1), bool)
    for scaling, members in _groups(scalings).items():
        if scaling.measures == 0:
            continue
        of_rows = _rows_of(gradient, members, len(scaling.first_row))
        entered, reached = scaling.newest(of_rows), of_rows[..., :1]
        finite = jnp.isfinite(entered) & (entered >= 0.0)
        fine = jnp.isfinite(reached) & (reached > 0.0) & finite.all(axis=-1, keepdims=True)
        for i, row in enumerate(members):
            newest = _with_row(newest, entered, row, i, operands)
            changes = _with_row(changes, fine, row, i, operands)
    return Change(_heads(table, newest, scalings, limits), changes)


def overwritten(table: Array, change: Change, scalings: Sequence[AbstractScaling]) -> Array:
    """The table of the next step: as it was where it does not change."""
    return jnp.where(change.changes, _assembled(table, change.head, scalings), table)


def _heads(table: Array, measured: Array, scalings: Sequence[AbstractScaling], limits: Sequence[float]) -> Array:
    scaling = _of_all(scalings)
    if scaling is None:
        return updated(table, measured, scalings, limits)
    return scaling.head(table, measured, tuple(limits))


def _assembled(table: Array, head: Array, scalings: Sequence[AbstractScaling]) -> Array:
    scaling = _of_all(scalings)
    return head if scaling is None else lax.concatenate([head, scaling.tail(table)], table.ndim - 1)


def _of_all(scalings: Sequence[AbstractScaling]) -> AbstractStatefulScaling | None:
    """The scaling of all operands, if they have the same and it records."""
    first = scalings[0]
    same = all(scaling == first for scaling in scalings)
    return first if same and isinstance(first, AbstractStatefulScaling) and first.measures else None


def _with_row(x: Array, rows: Array, row: int, i: int, axis: int) -> Array | Bool[Array, "..."]:
    taken = lax.slice_in_dim(rows, i, i + 1, axis=axis)
    return lax.dynamic_update_slice(x, taken, [0] * axis + [row, 0])


def _groups(scalings: Sequence[AbstractScaling]) -> dict[AbstractStatefulScaling, tuple[int, ...]]:
    """The rows of each scaling that keeps state: those with the same are updated in one go."""
    groups: dict[AbstractStatefulScaling, tuple[int, ...]] = {}
    for row, scaling in enumerate(scalings):
        if isinstance(scaling, AbstractStatefulScaling):
            groups[scaling] = (*groups.get(scaling, ()), row)
    return groups


def _rows_of(table: Array, rows: tuple[int, ...], end: int, start: int = 0) -> Array:
    operands = table.ndim - 2
    if start or end < table.shape[-1]:
        table = lax.slice_in_dim(table, start, end, axis=operands + 1)
    if rows == tuple(range(table.shape[operands])):
        return table
    return lax.concatenate([lax.slice_in_dim(table, row, row + 1, axis=operands) for row in rows], operands)
