"""The state of an op as one array: a row for each operand, which that operand's scaling reads and writes."""

from collections.abc import Sequence

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


# Where a gradient of scales has no amax above zero.
_ZERO, _NOT_FINITE = -1.0, -2.0


def recorded(measured: Array) -> Array:
    """What a step measured, as the gradient of scales.

    Several uses take the maximum, whose identity is `-inf`; and where nothing uses an op JAX gives 0. So neither
    stands for a number: an amax of zero is -1, one that is infinite or NaN is -2.

    Args:
        measured: `[*ensemble, operands, measures]`.
    """
    positive = lax.select(lax.gt(measured, lax.full_like(measured, 0.0)), measured, lax.full_like(measured, _ZERO))
    return lax.select(lax.is_finite(measured), positive, lax.full_like(measured, _NOT_FINITE))


def recorded_nothing(scales: Array) -> Array:
    """The gradient of scales, `[*ensemble, operands, 1]`, of an op that was used and measures nothing."""
    return lax.full_like(scales, _ZERO, np.float32)


def completed(table: Array, record: Array, scalings: Sequence[AbstractScaling], limits: Sequence[float]) -> Array:
    """The table of the next step, from a gradient of scales; `-inf` where the op was not reached.

    Args:
        table: This step's, `[*ensemble, operands, columns]`.
        record: See `recorded`.
        scalings: Of each operand.
        limits: The largest value of each operand's format.
    """
    reached = jnp.isfinite(record[..., :1]) & (record[..., :1] != 0.0)
    measured = jnp.where(record == _NOT_FINITE, jnp.nan, jnp.maximum(record, 0.0))
    return jnp.where(reached, updated(table, measured, scalings, limits), -jnp.inf)


def overwritten(table: Array, gradient: Array, scalings: Sequence[AbstractScaling], limits: Sequence[float]) -> Array:
    """The table of the next step, from what the gradient newly recorded; all else is computed anew from this table.

    So a gradient that is a sum over several uses cannot corrupt scales and histories. Rows stay as they were where the
    gradient is that of a layer that the step did not reach (a scale of 0 or `-inf`), and where what it recorded is not
    finite.
    """
    count = measures(scalings)
    if count == 0:
        return table
    operands = table.ndim - 2
    newest = jnp.zeros((*table.shape[:-1], count), jnp.float32)
    recorded = jnp.zeros((*table.shape[:-1], 1), bool)
    for scaling, members in _groups(scalings).items():
        of_rows = _rows_of(gradient, members, len(scaling.first_row))
        entered, reached = scaling.newest(of_rows), of_rows[..., :1]
        finite = jnp.isfinite(entered) & (entered >= 0.0)
        fine = jnp.isfinite(reached) & (reached > 0.0) & finite.all(axis=-1, keepdims=True)
        for i, row in enumerate(members):
            newest = _with_row(newest, entered, row, i, operands)
            recorded = _with_row(recorded, fine, row, i, operands)
    return jnp.where(recorded, updated(table, newest, scalings, limits), table)


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
