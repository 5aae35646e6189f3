"""Sums that give a maximum: what a product records for state that JAX has mapped, and will sum over the mapped axis.

If every example takes its own branch of a `lax.cond` under `vmap`, or if a `jax.custom_vjp` is mapped, JAX gives every
example its own replica of the state, and sums what the replicas record. Members of an ensemble look the same, but their
records are their own. So every state in a differentiated function carries a unique number, its mark, which follows the
state everywhere: replicas share it. The first replica that the loss depends on records the largest measurement of all,
and the others record 0, so the sum over them is the maximum. Not simply the first: if its example did not take the
branch, JAX drops its record.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Bool, Float32, UInt32

from .._jax.mapped_axis import to_front


_FIRST = np.float32(1.0).view(np.int32)


def marks(shapes: Sequence[tuple[int, ...]]) -> list[Float32[Array, "..."]]:
    """A unique number for each element of arrays of these shapes, which have an axis or more.

    Consecutive floats from 1 on: only equality counts. If this is mapped, which makes each example a separate
    evaluation, all examples get different numbers.
    """
    if not shapes:
        return []
    total = sum([math.prod(shape) for shape in shapes])
    numbers = marks_p.bind(count=total)
    kinds: dict[tuple[int, ...], list[int]] = {}
    for i, shape in enumerate(shapes):
        kinds.setdefault(shape, []).append(i)
    # Those of one shape side by side: one equation takes them apart.
    blocks = [(*shape[:-1], shape[-1] * len(members)) for shape, members in kinds.items()]
    parts = lax.split(numbers, [math.prod(block) for block in blocks])
    found: dict[int, Array] = {}
    for part, block, (shape, members) in zip(parts, blocks, kinds.items(), strict=True):
        of_kind = part if part.shape == block else lax.reshape(part, block)
        found |= zip(members, lax.split(of_kind, [shape[-1]] * len(members), len(shape) - 1), strict=True)
    return [found[i] for i in range(len(shapes))]


def recorded_by_first(
    measured: Float32[Array, "*ensemble numbers"], grad: Array, ensemble: int
) -> Float32[Array, "*ensemble numbers"]:
    """What each member of an ensemble records: of those with the same mark, one the maximum, and the others zeros.

    A member whose branch was not taken receives a gradient of zeros, and records zeros. It is indistinguishable from
    one whose result had no effect, which also records zeros.

    Args:
        measured: What each member measured, nowhere negative; last its mark.
        grad: The output's gradient.
        ensemble: How many leading axes number members.
    """
    return members_p.bind(measured, grad, ensemble=ensemble)


def measured_of_replicas(
    measured: Float32[Array, "*ensemble numbers"],
    table: Float32[Array, "*ensemble operands columns"],
    measured_kernel: Float32[Array, "*ensemble measures"],
    grad: Array,
    ensemble: int,
    *,
    kernel: Array | None = None,
    devices: tuple[str, ...] = (),
) -> tuple[Float32[Array, "*ensemble numbers"], Bool[Array, "*ensemble"]]:
    """The same for whole tables, which have no mark: replicas of one state have equal values and equal kernels.

    Members of an ensemble hardly ever do. Members that are equal, before their first step, are treated
    as one: all but the first keep their state for this step. What was measured of a kernel would not tell them apart:
    in bfloat16, kernels with one distribution have one of a few amaxes.

    Args:
        measured: What each member measured.
        table: Its state.
        measured_kernel: What it measured of its kernel.
        grad: The output's gradient.
        ensemble: How many leading axes number members.
        kernel: Its kernel; None if that is not the same in all replicas.
        devices: Inside `shard_map`, the mesh axes over which devices share the state.

    Returns:
        What each member records, and whether it records.
    """
    axis = measured.ndim - 1
    words = lax.concatenate([lax.collapse(table, axis), measured_kernel], axis)
    words = lax.bitcast_convert_type(words, np.uint32)
    if kernel is not None:
        bits = lax.bitcast_convert_type(kernel, np.dtype(f"uint{8 * min(kernel.dtype.itemsize, 4)}"))
        of_kernel = _sum_of_words(lax.convert_element_type(bits, np.uint32), axis)
        # Each device may hold another part of it.
        of_kernel = lax.psum(of_kernel, devices) if devices else of_kernel
        words = lax.concatenate([words, lax.expand_dims(of_kernel, (axis,))], axis)
    mark = _sum_of_words(words, axis)
    ones = jnp.ones((*measured.shape[:-1], 1), measured.dtype)
    measured = members_p.bind(lax.concatenate([measured, ones], axis), grad, mark, ensemble=ensemble)
    measured, records = lax.split(measured, (measured.shape[axis] - 1, 1), axis)
    return measured, lax.squeeze(records, (axis,)) > np.float32(0.0)


def _sum_of_words(words: UInt32[Array, "*shape"], axis: int) -> UInt32[Array, "*ensemble"]:
    """A number for each array of words; if two arrays differ in exactly one word, their numbers differ.

    The axes stay apart: to merge them, devices that hold parts of a kernel would send each other all of it.

    Args:
        words: The arrays.
        axis: The first of an array's own axes.
    """
    if words.ndim == axis:  # a kernel that is one number
        words = lax.expand_dims(words, (axis,))
    index = lax.broadcasted_iota(np.uint32, words.shape, axis)
    for i in range(axis + 1, words.ndim):
        index = index * np.uint32(words.shape[i]) + lax.broadcasted_iota(np.uint32, words.shape, i)
    # Odd, and so without a common factor with 2**32.
    factors = index * np.uint32(2 * 1640531527) + np.uint32(1)
    return jnp.sum(words * factors, axis=tuple(range(axis, words.ndim)), dtype=np.uint32)


# --- The primitives: `vmap` makes members of both ---------------------------------------------------------------------

marks_p = Primitive("fp8_marks")
members_p = Primitive("fp8_members")


def _marks(*, count: int) -> Float32[Array, " count"]:
    """As many consecutive floats as asked for, starting at 1."""
    return lax.bitcast_convert_type(lax.add(lax.iota(np.int32, count), _FIRST), np.float32)


def _marks_batch(axis_data: Any, args: Any, axes: Any, *, count: int) -> tuple[Array, int]:
    """Each example of a `vmap` is a separate evaluation."""
    del args, axes
    return lax.reshape(marks_p.bind(count=axis_data.size * count), (axis_data.size, count)), 0


def _members(measured: Array, grad: Array, *of_tables: Array, ensemble: int) -> Array:
    """What members record; their marks are the last numbers of records, or given for tables."""
    if ensemble == 0:
        return measured
    count = int(np.prod(measured.shape[:ensemble]))
    flat = lax.reshape(measured, (count, measured.shape[-1]))
    mark = lax.reshape(of_tables[0], (count,)) if of_tables else flat[:, -1]
    if grad.ndim > ensemble:
        # As amaxes are taken, so that XLA reads the gradient once for both.
        grad = lax.reduce_max(lax.abs(grad), (grad.ndim - 1,))
    needed = jnp.any(lax.reshape(grad, (count, grad.size // max(count, 1))) != 0, axis=1)
    combined = _compared if count <= _MANY else _sorted
    return lax.reshape(combined(flat, mark, needed, alone=bool(of_tables)), measured.shape)


# Comparing each with each is one small launch on a GPU, where sorting is about thirty.
_MANY = 1024


def _compared(flat: Array, mark: Array, needed: Array, *, alone: bool) -> Array:
    """For the first needed member with a mark, the maximum over all needed members with it; zeros for the others."""
    same = mark[:, None] == mark[None, :]
    if alone:
        # One without replicas always records: a trainer may replace its state with zeros.
        needed |= same.sum(axis=1) == 1
    counts = same & needed[None, :]
    largest = jnp.where(counts[..., None], flat[None], np.float32(0.0)).max(axis=1)
    index = lax.iota(np.int32, mark.shape[0])
    is_first = needed & ~jnp.any(counts & (index[None, :] < index[:, None]), axis=1)
    return jnp.where(is_first[:, None], largest, np.float32(0.0))


def _sorted(flat: Array, mark: Array, needed: Array, *, alone: bool) -> Array:
    """What `_compared` computes, by sorting: faster for many."""
    order = jnp.lexsort((~needed, mark))
    first = order[jnp.searchsorted(mark[order], mark)]
    if alone:
        needed |= jnp.zeros(mark.shape, np.int32).at[first].add(1)[first] == 1
    flat = jnp.where(needed[:, None], flat, np.float32(0.0))
    return jnp.zeros_like(flat).at[first].max(flat)


def _members_lowering(ctx: Any, measured: Any, *args: Any, ensemble: int) -> Any:
    # Nearly always: nothing to trace.
    return [measured] if ensemble == 0 else _lowered_members(ctx, measured, *args, ensemble=ensemble)


_lowered_members = mlir.lower_fun(_members, multiple_results=False)


def _members_batch(args: Any, axes: Any, *, ensemble: int) -> tuple[Array, int]:
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    args = [to_front(x, axis, size, 0) for x, axis in zip(args, axes, strict=True)]
    return members_p.bind(*args, ensemble=ensemble + 1), 0


marks_p.def_impl(_marks)
marks_p.def_abstract_eval(lambda *, count: ShapedArray((count,), np.dtype(np.float32)))
mlir.register_lowering(marks_p, mlir.lower_fun(_marks, multiple_results=False))
batching.fancy_primitive_batchers[marks_p] = _marks_batch
members_p.def_impl(_members)
members_p.def_abstract_eval(lambda measured, *others, ensemble: measured)
mlir.register_lowering(members_p, _members_lowering)
batching.primitive_batchers[members_p] = _members_batch
