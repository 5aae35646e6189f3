"""Inside `shard_map`: the mesh axes over which an array differs from device to device."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.interpreters import ad
from jaxtyping import Array

from .opaque import on_one_device


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which an array differs from device to device, inside `shard_map`.

    Args:
        x: The array; or an `ad.UndefinedPrimal`, which stands for it during transposition.
    """
    aval = x.aval if ad.is_undefined_primal(x) else jax.typeof(x)
    axes = getattr(aval, "manual_axis_type", None)  # JAX 0.12 moved `vma` here.
    return frozenset(axes.varying if axes is not None else getattr(aval, "vma", ()))


def as_varying(x: Array, others: Sequence[Any]) -> Array:
    """The array, marked as varying over all mesh axes over which the others vary."""
    return _marked(x, varying_axes(x), frozenset().union(*map(varying_axes, others)))


def all_varying(*arrays: Array) -> Sequence[Array]:
    """The arrays, each marked as varying over all mesh axes over which any of them varies."""
    if not manual_axes():
        return arrays
    axes = [varying_axes(x) for x in arrays]
    of_any = frozenset().union(*axes)
    return [_marked(x, of_x, of_any) for x, of_x in zip(arrays, axes, strict=True)] if of_any else arrays


def _marked(x: Array, varying: frozenset[str], wanted: frozenset[str]) -> Array:
    missing = tuple(sorted(wanted - varying))
    return lax.pcast(x, missing, to="varying") if missing else x


def automatic_axes() -> tuple[str, ...]:
    """The axes of the mesh in use over which XLA divides arrays as it sees fit; () without a mesh (`jax.set_mesh`)."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types or (), strict=True)
        if kind == jax.sharding.AxisType.Auto and mesh.shape[name] > 1
    )


def unchecked_axes() -> tuple[str, ...]:
    """The mesh axes of a `shard_map` with `check_vma=False`, which does not know what varies; () elsewhere."""
    manual = manual_axes()
    return manual if manual and not varying_axes(lax.axis_index(manual[0])) else ()


def axes_of_parts(x: Array, state: Array | None = None) -> tuple[str, ...]:
    """The mesh axes over which devices hold parts of an operand, inside `shard_map`; all axes if this is unknown.

    Args:
        x: The operand.
        state: Its state: axes over which devices have states of their own do not count.
    """
    if not manual_axes():
        return ()
    own = frozenset() if state is None else varying_axes(state)
    return unchecked_axes() or tuple(sorted(varying_axes(x) - own))


def shared_axes(x: Array) -> tuple[str, ...]:
    """The mesh axes along which all devices hold the same array, inside `shard_map`; all axes if this is unknown."""
    if not manual_axes():
        return ()
    return unchecked_axes() or tuple(sorted(frozenset(manual_axes()) - varying_axes(x)))


def marked_as_varying(x: Array, axes: Sequence[str]) -> Array:
    """The array, marked as varying over these mesh axes too."""
    return x if unchecked_axes() else _marked(x, varying_axes(x), varying_axes(x).union(axes))


def marked_as_shared(x: Array, axes: Sequence[str]) -> Array:
    """The inverse of `marked_as_varying`, for an array that is the same on all devices along these mesh axes."""
    varying = varying_axes(x)
    if varying.isdisjoint(axes):
        return x
    return _marked(on_one_device(lambda x: x, x), frozenset(), varying.difference(axes))


def largest_over_devices(x: Array, axes: tuple[str, ...]) -> Array:
    """The largest float32 numbers of all devices along mesh axes of a `shard_map`; NaN if one is NaN."""
    # As whole numbers they have the same order, with NaN on top: a maximum of float32 drops NaN on a CPU.
    words = lax.bitcast_convert_type(lax.select(lax.ne(x, x), lax.full_like(x, np.nan), x), np.int32)
    return lax.bitcast_convert_type(_in_order(lax.pmax(_in_order(words), axes)), np.float32)


def _in_order(words: Array) -> Array:
    """The bits of floats as integers in the order of the floats; and back."""
    below_zero = lax.shift_right_arithmetic(words, np.int32(31))
    return lax.bitwise_xor(words, lax.bitwise_and(below_zero, np.int32(0x7FFFFFFF)))


def manual_axes() -> tuple[str, ...]:
    """The mesh axes of the `shard_map` that is traced; () elsewhere, where nothing varies."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)
