"""Records: scales in, amaxes out. What a product reads in place of its op's table, and its cotangent.

A record is one array, `[*ensemble, record_length]`. Into a product go scales; out of it comes, as the record's
cotangent, what was measured:

    scales       x       w       g       x rounded  w rounded  g rounded  spare
    cotangent    amax x  amax w  amax g  (again)                          spare

With several numbers per operand, the cotangent has those of x first, then those of w and g; zeros fill the record after
its scales. Its cotangent is `-inf` where the loss did not reach the product: what JAX fills in where it adds cotangents
by maximum.

The spare is never read. With it XLA takes the slices of a stacked layer's scales in one launch, and joins reductions of
several layers: 286 launches instead of 297 in a step of two stacked blocks on an H100.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.interpreters import ad
from jaxtyping import Array, Float32

from .._jax.errors import NotDifferentiable
from .._jax.max_grad import is_max_grad, reduced_later, to_dtype_of, to_float32
from .._jax.meshes import (
    as_varying,
    aval_of_result,
    largest_over_devices,
    marked_as_shared,
    unchecked_axes,
    varying_axes,
)
from .._jax.opaque import opaque_constant
from .._jax.primitives import define, mapped_in_front, to_front
from ..recipes.scaling.base import AbstractScaling
from .table import measured_in_record, next_table, numbers_of, record_length, scales_in


# What was measured of an operand's parts, `[*ensemble, numbers, parts]`. The number of parts depends on the operand.
type MeasuredParts = Array


# Opaque, so that layers share one trace.
@opaque_constant
def records_of(
    tables: Array, *, scalings: tuple[AbstractScaling, ...], limits: tuple[float, ...]
) -> Float32[Array, "*ensemble ops length"]:
    """The records of one op or several.

    Args:
        tables: `[*ensemble, ops * operands, columns]`.
        scalings: The scaling of each operand of an op.
        limits: The largest value of each operand's format.
    """
    scales = scales_in(tables, limits)
    zeros = lax.full((*scales.shape[:-1], record_length(scalings) - 2 * len(limits)), 0.0, np.float32)
    return lax.concatenate([scales, zeros], scales.ndim - 1)


# --- In a product -----------------------------------------------------------------------------------------------------


def in_product(record: Array) -> Float32[Array, "*ensemble length"]:
    """A record as a product reads it.

    Inside `shard_map` it is marked as varying, because each device measures something else; but all devices that share
    a state have the same scales.
    """
    scales = to_float32(record)
    devices = reduced_later(record)
    return marked_as_shared(lax.stop_gradient(scales), devices) if devices else scales


def operand_scales(record: Array, *, exact: bool) -> tuple[Array, Array, Array]:
    """The scales of input, kernel and output gradient, `[*ensemble]`.

    Args:
        record: As it enters the product.
        exact: Whether as they are, or rounded up to `SCALE_BITS`.
    """
    numbers, axis, first = to_float32(record), record.ndim - 1, 0 if exact else 3
    # One by one: XLA finds out that slices of two layers' are the same scale.
    x, w, g = [lax.index_in_dim(numbers, first + i, axis, keepdims=False) for i in range(3)]
    return x, w, g


def pack(record: Array, measured: Sequence[MeasuredParts]) -> MeasuredParts:
    """A record and what was measured, as one array, because a scan stacks each array that it saves.

    Args:
        record: As it entered the product.
        measured: What was measured of input and kernel; nothing if the op's state records nothing.
    """
    return _joined([lax.expand_dims(to_float32(record), (record.ndim,)), *measured])


class StateResiduals(NamedTuple):
    """State residuals, unpacked: a record and what the forward pass measured.

    Args:
        scales: The record, `[*ensemble, length]`.
        spare: Its last number.
        measured: What was measured of input and kernel.
    """

    scales: Array
    spare: MeasuredParts
    measured: MeasuredParts


def unpack(packed: MeasuredParts, length: int) -> StateResiduals:
    """The inverse of `pack`.

    Args:
        packed: What `pack` returned.
        length: The length of the record.
    """
    axis = packed.ndim - 2
    record, measured = lax.split(packed, (length, packed.shape[axis] - length), axis)
    spare = lax.slice_in_dim(record, length - 1, length, axis=axis)
    return StateResiduals(to_float32(lax.index_in_dim(record, 0, axis + 1, keepdims=False)), spare, measured)


def measured_in_product(residuals: StateResiduals, output_grad: MeasuredParts) -> Float32[Array, "*ensemble length"]:
    """What a product measured, as long as its record.

    Args:
        residuals: The state residuals of the forward pass.
        output_grad: What was measured of the output gradient.
    """
    measured = [residuals.measured, output_grad]
    # Repeated where a record has room for two scales of each operand; the second copy is not read.
    times = residuals.scales.shape[-1] // sum([x.shape[-2] for x in measured])
    whole = _joined([*measured * times, residuals.spare])
    axes = (whole.ndim - 1,)
    return to_float32(lax.squeeze(whole, axes) if whole.shape[-1] == 1 else lax.reduce_max(whole, axes))


def _joined(measured: Sequence[Array]) -> MeasuredParts:
    """The measurements of several operands as one array; those with fewer parts are padded with `-inf`."""
    if len({x.dtype for x in measured}) > 1:
        measured = [to_float32(x) for x in measured]
    axis, parts = measured[0].ndim - 2, max([x.shape[-1] for x in measured])
    none = [(0, 0, 0)] * (axis + 1)
    fill = lambda x: lax.pad(x, np.asarray(-np.inf, x.dtype), [*none, (0, parts - x.shape[-1], 0)])
    return lax.concatenate([x if x.shape[-1] == parts else fill(x) for x in measured], axis)


def cotangent(measured: Float32[Array, "*ensemble length"], tangent: Any) -> Array:
    """What a product returns for its record.

    Inside `shard_map` that is what this device measured, if the gradient is `filter_grad`'s. Any other gradient of
    state that devices share has to be the same on all of them, so the maximum over devices is taken here, where JAX
    adds up the gradients of weights that they share.

    Args:
        measured: What was measured.
        tangent: The record's tangent, as a transposition gets it.

    Raises:
        ValueError: If JAX would add what devices measured.
    """
    aval = tangent.aval
    # A record in float32 comes from a table, of which `_transpose` says the same.
    if is_max_grad(aval) and (axes := unchecked_axes()) and not set(axes) <= set(reduced_later(aval)):
        raise NotDifferentiable(_unchecked(axes))
    if axes := tuple(sorted(varying_axes(measured) - varying_axes(tangent))):
        measured = largest_over_devices(measured, axes)
    return to_dtype_of(as_varying(measured, (tangent,)), aval)


def _unchecked(axes: tuple[str, ...]) -> str:
    return (
        f"a gradient of FP8 state in shard_map over {axes} with check_vma=False is taken around it, or by another "
        "function than haliax_fp8.filter_grad, filter_value_and_grad and TrainStep. Devices that share the state would "
        "record different amaxes, or their sum. Call one of these functions inside shard_map, or use check_vma=True"
    )


# --- For gradients taken without `filter_grad` ------------------------------------------------------------------------


def record_of_table(
    table: Array,
    scalings: tuple[AbstractScaling, ...],
    limits: tuple[float, ...],
) -> Float32[Array, "*ensemble length"]:
    """The record of an op whose gradient is taken without `filter_grad`; its transpose makes the next table.

    So a gradient that `eqx.filter_grad` or a trainer takes is complete. Each use of a layer makes a table of its own,
    and JAX adds them: `apply_updates` reads the newest amaxes from the sum, and nothing else.

    Args:
        table: The op's table, in float32 or `fp32_max_grad`.
        scalings: The scaling of each operand.
        limits: The largest value of each operand's format.
    """
    return record_of_table_p.bind(table, scalings=scalings, limits=limits)


def _record(table: Array, **static: Any) -> Array:
    record = records_of(to_float32(table), **static)
    return lax.squeeze(record, (record.ndim - 2,))


def _tangent(tangent: Array, table: Array, **static: Any) -> Array:
    """Zeros: in forward mode, a product treats scales as constants."""
    del tangent
    return lax.full_like(_record(table, **static), 0.0)


# Opaque, so that layers share one trace.
@opaque_constant
def _next_table(
    table: Array, record: Array, *, scalings: tuple[AbstractScaling, ...], limits: tuple[float, ...]
) -> Array:
    """The table of the next step; zeros in rows that the step did not reach."""
    if not numbers_of(scalings):
        return table
    measured = measured_in_record(lax.expand_dims(record, (record.ndim - 1,)), scalings)
    new = next_table(table, measured.numbers, scalings, limits)
    return lax.select(lax.broadcast_in_dim(measured.reached, new.shape, range(new.ndim)), new, lax.full_like(new, 0.0))


def _record_aval(table: Any, *others: Any, scalings: tuple[AbstractScaling, ...], limits: tuple[float, ...]) -> Any:
    return aval_of_result(table, (*table.shape[:-2], record_length(scalings)), np.dtype(np.float32))


def _zero(primal: Array) -> ad.Zero:
    """The tangent of a result that does not change."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _record_jvp(primals: Any, tangents: Any, **static: Any) -> tuple[Array, Any]:
    (table,), (tangent,) = primals, tangents
    record = record_of_table_p.bind(table, **static)
    if type(tangent) is ad.Zero:
        return record, _zero(record)
    return record, record_of_table_tangent_p.bind(tangent, table, **static)


def _transpose(cotangent: Any, tangent: Any, table: Array, **static: Any) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [None, None]
    if axes := unchecked_axes():
        raise NotDifferentiable(_unchecked(axes))
    return [to_dtype_of(next_table_p.bind(to_float32(table), cotangent, **static), tangent.aval), None]


def _record_batch(args: Any, axes: Any, **static: Any) -> tuple[Array, int]:
    return record_of_table_p.bind(*mapped_in_front(args, axes), **static), 0


def _tangent_batch(args: Any, axes: Any, **static: Any) -> tuple[Array, int]:
    return record_of_table_tangent_p.bind(*mapped_in_front(args, axes), **static), 0


def _next_table_batch(args: Any, axes: Any, **static: Any) -> tuple[Array, int]:
    """Examples that share a table share the next one: the first has it, and the others zeros, so their sum is exact.

    JAX sums them if a `jax.custom_vjp` is mapped, and so does a user who maps a gradient. A mean reveals itself.
    """
    (table, record), (table_axis, record_axis) = args, axes
    if table_axis is not None:
        return next_table_p.bind(*mapped_in_front(args, axes), **static), 0
    new = next_table_p.bind(table, lax.reduce_max(record, (record_axis,)), **static)
    zeros = (0, record.shape[record_axis] - 1, 0)
    return lax.pad(lax.expand_dims(new, (0,)), np.float32(0.0), [zeros, *[(0, 0, 0)] * new.ndim]), 0


def _next_table_jvp(primals: Any, tangents: Any, **static: Any) -> tuple[Array, Any]:
    del tangents
    table = next_table_p.bind(*primals, **static)
    return table, _zero(table)


# --- One record for several replicas of a state -----------------------------------------------------------------------


def repeated(record: Array, size: int) -> Array:
    """The record for each of several replicas of a state, `[size, ...]`; its transpose takes the maximum over them.

    `vmap` makes replicas if each example has a random key of its own.
    """
    return repeated_p.bind(record, size=size, axis=0)


def _repeat(record: Array, *, size: int, axis: int) -> Array:
    shape = (*record.shape[:axis], size, *record.shape[axis:])
    return lax.broadcast_in_dim(record, shape, [i for i in range(len(shape)) if i != axis])


def _repeated_aval(record: Any, *, size: int, axis: int) -> Any:
    # `aval_of_result` makes a NumPy type of its dtype; the record may have another.
    aval = aval_of_result(record, (*record.shape[:axis], size, *record.shape[axis:]), np.dtype(np.float32))
    return aval.update(dtype=record.dtype)


def _repeated_jvp(primals: Any, tangents: Any, **static: Any) -> tuple[Array, Any]:
    (record,), (tangent,) = primals, tangents
    out = repeated_p.bind(record, **static)
    if type(tangent) is ad.Zero:
        return out, _zero(out)
    return out, repeated_p.bind(tangent, **static)


def _repeated_transpose(cotangent: Any, record: Any, *, size: int, axis: int) -> list[Any]:
    del size
    if type(cotangent) is ad.Zero:
        return [None]
    return [to_dtype_of(lax.reduce_max(to_float32(cotangent), (axis,)), record.aval)]


def _repeated_batch(args: Any, axes: Any, *, size: int, axis: int) -> tuple[Array, int]:
    return repeated_p.bind(to_front(args[0], axes[0], args[0].shape[axes[0]], 0), size=size, axis=axis + 1), 0


# --- The primitives ---------------------------------------------------------------------------------------------------


record_of_table_p = define(
    "fp8_record_of_table", function=_record, aval=_record_aval, batch=_record_batch, jvp=_record_jvp
)
record_of_table_tangent_p = define(
    "fp8_record_of_table_tangent",
    function=_tangent,
    aval=lambda tangent, table, **static: _record_aval(table, **static),
    batch=_tangent_batch,
    transpose=_transpose,
)
next_table_p = define(
    "fp8_next_table",
    function=_next_table,
    aval=lambda table, record, **static: table,
    batch=_next_table_batch,
    jvp=_next_table_jvp,
)
repeated_p = define(
    "fp8_repeated_record",
    function=_repeat,
    aval=_repeated_aval,
    batch=_repeated_batch,
    jvp=_repeated_jvp,
    transpose=_repeated_transpose,
)
