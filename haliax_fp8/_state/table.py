"""The state of an op as one array: a row for each operand, which the memory of that operand's scaling fills.

A row begins with the scale and ends with its guard (see `guard.py`); between them lies what else is remembered.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from .._jax.xla import side_by_side
from ..recipes.recipe import SCALE_BITS
from ..recipes.scaling.base import AbstractScaling
from ..recipes.scaling.memory import AbstractMemory
from ..recipes.scaling.multiplier import positive_or_one, round_up_words, words_of
from .guard import fit, guard_of, guard_on_host, is_on_grid, is_scaled_down


type Table = Float32[Array, "*ensemble operands columns"]


# --- Its shape --------------------------------------------------------------------------------------------------------


def first_table(scalings: tuple[AbstractScaling, ...]) -> np.ndarray | None:
    """The table before the first step; None if no scaling keeps state. A stateless operand has a row, of scale 1."""
    memories = [scaling.memory for scaling in scalings]
    if all(memory is None for memory in memories):
        return None
    rows = [(1.0,) if memory is None else memory.first_row for memory in memories]
    table = np.zeros((len(rows), max(map(len, rows)) + 1), np.float32)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values
    table[:, -1] = guard_on_host(table[:, 0])
    return table


def guarded(rows: Array) -> Array:
    """Rows that had no guards, each with the guard of its scale appended."""
    return lax.concatenate([rows, guard_of(lax.slice_in_dim(rows, 0, 1, axis=rows.ndim - 1))], rows.ndim - 1)


def unguarded(table: Array) -> Array:
    """The rows of a table without their guards."""
    return lax.slice_in_dim(table, 0, table.shape[-1] - 1, axis=table.ndim - 1)


@functools.cache
def numbers_of(scalings: tuple[AbstractScaling, ...]) -> int:
    """How many numbers a step records of each operand."""
    return max(0 if scaling.memory is None else scaling.memory.numbers for scaling in scalings)


@functools.cache
def record_length(scalings: tuple[AbstractScaling, ...]) -> int:
    """How many numbers a record has: exact scales, then rounded ones; as a cotangent, what a step measured; a spare."""
    return max(2, numbers_of(scalings)) * len(scalings) + 1


# --- Scales, as products take them ------------------------------------------------------------------------------------


def scales_in(table: Array, limits: Sequence[float]) -> Float32[Array, "*ensemble ops numbers"]:
    """The scales of ops as products take them: for each op first the exact ones, then the same rounded up.

    They are NaN in rows that anything but their own update changed, and 1 where a step did not reach the row. For ops
    with other operands than a product's three, both are the exact scales: these are not multiplied in bfloat16.

    Args:
        table: `[*ensemble, ops * operands, columns]`.
        limits: The largest value of each operand's format.
    """
    axis, rows, operands = table.ndim - 1, table.shape[-2], len(limits)
    once, twice = ((*table.shape[:-2], rows // operands, count, operands) for count in (1, 2))
    scale, guard = [lax.reshape(lax.slice_in_dim(table, i, i + 1, axis=axis), once) for i in (0, table.shape[axis] - 1)]
    unmodified = fit(scale, guard)
    scale = positive_or_one(scale)  # Others than those of rows that a step did not reach are NaN below.
    repeated = lambda x: lax.broadcast_in_dim(x, twice, range(len(twice)))
    scales = _multipliable(scale, limits[-1]) if operands == 3 else repeated(scale)
    scales = lax.select(repeated(unmodified), scales, lax.full_like(scales, np.nan))
    return lax.reshape(scales, (*table.shape[:-2], rows // operands, 2 * operands))


def _multipliable(scale: Float32[Array, "*ops 1 3"], limit: float) -> Float32[Array, "*ops 2 3"]:
    """Scales of (input, kernel, output gradient), whose products float32 holds where that is possible.

    First exact, then rounded up; in one array, so that both take one launch.

    A product of two scales below `2**-126` is flushed to zero, and the gradient with it, even if the gradient itself
    would be representable. So the scale of the output's gradient is raised to `2**-126 / min(others)`, but only so far
    that the amax stays above 1 in its format, where FP8 has its full precision.

    Args:
        scale: The scales, which are normal numbers; for others the result means nothing.
        limit: The largest value of the output gradient's format.
    """
    axis, words = scale.ndim - 1, words_of(scale)
    exact = [lax.slice_in_dim(words, i, i + 1, axis=axis) for i in range(3)]
    rounded = map(round_up_words, exact, SCALE_BITS.values())
    input, kernel, output_grad = [lax.concatenate(both, axis - 1) for both in zip(exact, rounded, strict=True)]
    # A power of two, by its exponent: exact, and a scale of a few bits remains one.
    exponent = lax.bitwise_and(lax.min(input, kernel), np.uint32(0xFF << 23))
    lowest = lax.sub(np.uint32((2 * 127 - 126) << 23), lax.min(exponent, np.uint32(127 << 23)))
    highest = lax.add(output_grad, np.uint32((np.frexp(limit)[1] - 1) << 23))
    output_grad = lax.max(output_grad, lax.min(lowest, highest))
    return lax.bitcast_convert_type(lax.concatenate([input, kernel, output_grad], axis), np.float32)


# --- What a step measured ---------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """What a step measured, of tables `[*ensemble, ops * operands, columns]`.

    Args:
        numbers: The numbers of each row, `[*ensemble, ops * operands, numbers]`.
        reached: Whether the step reached the row and may change it, `[*ensemble, ops * operands, 1]`.
        scaled_down: Whether something multiplied the row by a number below one; None if nothing can have done that.
    """

    numbers: Array
    reached: Array
    scaled_down: Array | None = None


def measured_in_record(record: Array, scalings: tuple[AbstractScaling, ...]) -> Measured:
    """What a step measured, from the cotangents of records.

    Args:
        record: `[*ensemble, ops, record_length]`: for each op what was measured, an operand's numbers one after the
            other; `-inf` where the step did not reach it.
        scalings: The scaling of each operand of an op.
    """
    ensemble, ops, operands, columns = record.shape[:-2], record.shape[-2], len(scalings), numbers_of(scalings)
    measured = lax.slice_in_dim(record, 0, operands * columns, axis=record.ndim - 1)
    numbers = lax.reshape(measured, (*ensemble, ops * operands, columns))
    # A NaN or an infinity was measured, and a memory knows what to do with it.
    reached = lax.ne(lax.slice_in_dim(numbers, 0, 1, axis=numbers.ndim - 1), np.float32(-np.inf))
    return Measured(numbers, reached)


def measured_in_gradient(
    gradient: Array, scalings: tuple[AbstractScaling, ...], before: Array | None = None
) -> Measured:
    """What a step measured, from tables that are gradients: the newest numbers in them, and nothing else.

    So a gradient that is a sum over several uses cannot corrupt scales and histories. A step that did not reach a row
    left a scale of 0 or `-inf`; one that measured something that is not finite counts as well.

    Args:
        gradient: Tables, as `next_table` would have made them.
        scalings: The scaling of each operand of an op.
        before: The tables of this step; with them, averages of gradients are detected too.
    """
    axis, count = gradient.ndim - 2, len(scalings)
    scale, guard = gradient[..., :1], gradient[..., -1:]
    scaled_down = is_scaled_down(scale, guard)
    if before is not None:
        scaled_down = lax.bitwise_or(scaled_down, _is_averaged(gradient, before, scalings))
    # A guard is a root: float16 holds it, as 2**-24 or more, where it rounds the scale to zero.
    has_scale = jnp.isfinite(scale) & ((scale > 0.0) | (guard > 2.0**-25))
    recording = {memory: rows for memory, rows in _rows_by_memory(scalings).items() if memory.numbers}
    ops = range(gradient.shape[axis] // count)
    parts: dict[int, tuple[Array, ...]] = {}
    for memory, op_rows in recording.items():
        rows = tuple(op * count + row for op in ops for row in op_rows)
        newest = memory.newest(_select_rows(gradient, rows, len(memory.first_row)))
        finite = jnp.isfinite(newest) & (newest >= 0.0)
        reached = _select_rows(has_scale, rows, 1) & finite.all(axis=-1, keepdims=True)
        if len(recording) == 1 and len(op_rows) == count:
            return Measured(newest, reached, scaled_down)
        newest = jnp.pad(newest, [(0, 0)] * (axis + 1) + [(0, numbers_of(scalings) - memory.numbers)])
        for i, row in enumerate(rows):
            parts[row] = tuple(lax.slice_in_dim(x, i, i + 1, axis=axis) for x in (newest, reached))
    nothing = jnp.zeros((*gradient.shape[:axis], 1, max(1, numbers_of(scalings))), jnp.float32)
    missing = nothing, jnp.zeros((*gradient.shape[:axis], 1, 1), bool)
    newest, reached = (
        lax.concatenate([parts.get(row, missing)[i] for row in range(gradient.shape[axis])], axis) for i in (0, 1)
    )
    return Measured(newest, reached, scaled_down)


def _is_averaged(gradient: Array, before: Array, scalings: tuple[AbstractScaling, ...]) -> Array:
    """Whether gradients are means of several, whose scales differ.

    What a step only moves, such as the oldest amaxes of a history, is the same in each. A sum over uses of a layer has
    a multiple of it, and a mean what one gradient has, but not the guard of its scale. If the scales do not differ, the
    amaxes do not matter to them, and a mean passes. So it does if nothing was recorded in the step before.
    """
    memory = _common_memory(scalings)
    tail = [] if memory is None else [x for x in memory.tail(unguarded(before)) if x.shape[-1]]
    is_guard = is_on_grid(gradient[..., -1:])
    if not tail:
        return lax.full_like(is_guard, False)
    moved, now = tail[-1][..., -1:], gradient[..., -2:-1]
    is_one = lax.bitwise_and(lax.gt(now, moved * np.float32(0.5)), lax.lt(now, moved * np.float32(1.5)))
    return lax.bitwise_and(is_one, lax.bitwise_not(is_guard))


def without_modified_rows(table: Array, measured: Measured) -> Measured:
    """What was measured, without rows that anything but their own update changed: their next use reveals the change.

    Args:
        table: This step's, `[*ensemble, ops * operands, columns]`.
        measured: What the step measured.
    """
    return measured._replace(reached=lax.bitwise_and(measured.reached, _is_unmodified(table)))


# --- The table of the next step ---------------------------------------------------------------------------------------


def next_table(
    table: Array, measured: Array | None, scalings: tuple[AbstractScaling, ...], limits: Sequence[float]
) -> Array:
    """The table of the next step; rows that anything but their own update changed stay as they are.

    Args:
        table: This step's, `[*ensemble, operands, columns]`.
        measured: What the step measured, `[*ensemble, operands, numbers]`; None if nothing is.
        scalings: The scaling of each operand.
        limits: The largest value of each operand's format.
    """
    unmodified = lax.broadcast_in_dim(_is_unmodified(table), table.shape, range(table.ndim))
    return lax.select(unmodified, _updated(table, measured, scalings, limits), table)


def table_delta(
    table: Array, measured: Measured, scalings: tuple[AbstractScaling, ...], limits: Sequence[float]
) -> Array:
    """The part of the update that needs a reduction: the new scale and the newest amax of each row.

    `apply_delta` moves the rest of a row, element by element.

    Args:
        table: This step's, `[*ensemble, ops * operands, columns]`.
        measured: What the step measured. A row that was scaled down gets a scale that fits no guard.
        scalings: The scaling of each operand of an op.
        limits: The largest value of each operand's format.

    Returns:
        For each row whether the step reached it, then the first columns of the new row.
    """
    reached = lax.convert_element_type(measured.reached, jnp.float32)
    heads = _heads(table, measured.numbers, scalings, limits)
    if measured.scaled_down is not None:
        # A negative scale fits no guard. NaN would stop `jax_debug_nans` here, where nothing is wrong.
        scaled_down = lax.broadcast_in_dim(measured.scaled_down, heads.shape, range(heads.ndim))
        heads = lax.select(scaled_down, lax.full_like(heads, -1.0), heads)
    return lax.concatenate([reached, heads], table.ndim - 1)


def _heads(table: Array, measured: Array, scalings: tuple[AbstractScaling, ...], limits: Sequence[float]) -> Array:
    """The first columns after a step."""
    ops = table.shape[-2] // len(scalings)
    if (memory := _common_memory(scalings)) is not None:
        measured = lax.slice_in_dim(measured, 0, memory.numbers, axis=measured.ndim - 1)
        return memory.head(unguarded(table), measured, tuple(limits) * ops)
    in_ops = lambda x: lax.reshape(x, (*x.shape[:-2], ops, len(scalings), x.shape[-1]))
    new = _updated(in_ops(table), in_ops(measured), scalings, limits)
    return unguarded(lax.reshape(new, table.shape))


def apply_delta(table: Array, delta: Array, scalings: tuple[AbstractScaling, ...], fill_value: float | None) -> Array:
    """The table of the next step, from what `table_delta` returned.

    Args:
        table: This step's.
        delta: Its rows of the delta.
        scalings: The scaling of each operand of an op.
        fill_value: Value for rows that the step did not reach; None keeps them.
    """
    axis = table.ndim - 1
    reached = lax.gt(lax.slice_in_dim(delta, 0, 1, axis=axis), np.float32(0.0))
    head, memory = lax.slice_in_dim(delta, 1, None, axis=axis), _common_memory(scalings)
    tail = [] if memory is None else memory.tail(unguarded(table))
    new = side_by_side([head, *tail, guard_of(lax.slice_in_dim(head, 0, 1, axis=axis))])
    unreached = table if fill_value is None else lax.full_like(table, fill_value)
    return lax.select(lax.broadcast_in_dim(reached, table.shape, range(table.ndim)), new, unreached)


def _updated(
    table: Array, measured: Array | None, scalings: tuple[AbstractScaling, ...], limits: Sequence[float]
) -> Array:
    axis, new_rows = table.ndim - 2, {}
    for memory, rows in _rows_by_memory(scalings).items():
        if memory.numbers == 0 or measured is None:
            continue
        width = len(memory.first_row)
        old = _select_rows(table, rows, width)
        new = memory.update(old, _select_rows(measured, rows, memory.numbers), tuple(limits[row] for row in rows))
        new = guarded(lax.concatenate([new, _select_rows(table, rows, table.shape[-1] - 1, start=width)], axis + 1))
        if len(rows) == len(scalings):
            return new
        new_rows |= {row: lax.slice_in_dim(new, i, i + 1, axis=axis) for i, row in enumerate(rows)}
    unchanged = [row for row in range(len(scalings)) if row not in new_rows]
    new_rows |= {row: lax.slice_in_dim(table, row, row + 1, axis=axis) for row in unchanged}
    return lax.concatenate([new_rows[row] for row in range(len(scalings))], axis)


def _is_unmodified(table: Array) -> Array:
    """Whether each row was changed only by its own updates."""
    axis = table.ndim - 1
    return fit(*[lax.slice_in_dim(table, i, i + 1, axis=axis) for i in (0, table.shape[axis] - 1)])


@functools.cache
def _common_memory(scalings: tuple[AbstractScaling, ...]) -> AbstractMemory | None:
    """The memory of all operands, if they have the same and it records."""
    first = scalings[0].memory
    same = all(scaling.memory == first for scaling in scalings)
    return first if same and first is not None and first.numbers else None


def _rows_by_memory(scalings: tuple[AbstractScaling, ...]) -> dict[AbstractMemory, tuple[int, ...]]:
    """The rows of each memory: rows with the same one are updated at once."""
    rows: dict[AbstractMemory, tuple[int, ...]] = {}
    for row, scaling in enumerate(scalings):
        if scaling.memory is not None:
            rows[scaling.memory] = (*rows.get(scaling.memory, ()), row)
    return rows


def _select_rows(table: Array, rows: tuple[int, ...], end: int, start: int = 0) -> Array:
    """Some rows of a table, from one column to another."""
    axis = table.ndim - 2
    if start or end < table.shape[-1]:
        table = lax.slice_in_dim(table, start, end, axis=axis + 1)
    if rows == tuple(range(table.shape[axis])):
        return table
    return lax.concatenate([lax.slice_in_dim(table, row, row + 1, axis=axis) for row in rows], axis)
