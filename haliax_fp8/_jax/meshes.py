"""How arrays are divided over the axes of a mesh.

An axis is manual inside `shard_map`, where each device runs its own program; explicit if it is in the types of arrays;
or automatic if XLA divides arrays over it as it sees fit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from .opaque import on_one_device


# --- Manual axes, inside `shard_map` ----------------------------------------------------------------------------------


def manual_axes() -> tuple[str, ...]:
    """The mesh axes of the `shard_map` that is traced; () elsewhere, where nothing varies."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def unchecked_axes() -> tuple[str, ...]:
    """The mesh axes of a `shard_map` with `check_vma=False`, which does not know what varies; () elsewhere."""
    manual = manual_axes()
    return manual if manual and not varying_axes(lax.axis_index(manual[0])) else ()


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which an array differs from device to device, inside `shard_map`.

    Args:
        x: The array; or an `ad.UndefinedPrimal`, which stands for it during transposition.
    """
    aval = x.aval if ad.is_undefined_primal(x) else jax.typeof(x)
    axes = getattr(aval, "manual_axis_type", None)  # JAX 0.12 moved `vma` here.
    return frozenset(axes.varying if axes is not None else getattr(aval, "vma", ()))


def shared_axes(x: Array) -> tuple[str, ...]:
    """The mesh axes along which all devices hold the same array, inside `shard_map`; all axes if this is unknown."""
    if not manual_axes():
        return ()
    return unchecked_axes() or tuple(sorted(frozenset(manual_axes()) - varying_axes(x)))


def axes_of_parts(x: Array, state: Array | None = None) -> tuple[str, ...]:
    """The mesh axes over which devices hold parts of an operand, inside `shard_map`; all axes if this is unknown.

    Args:
        x: The operand.
        state: Its state: axes over which devices have states of their own do not count.
    """
    if not manual_axes():
        return ()
    state_axes = frozenset() if state is None else varying_axes(state)
    return unchecked_axes() or tuple(sorted(varying_axes(x) - state_axes))


def as_varying(x: Array, others: Sequence[Any]) -> Array:
    """The array, marked as varying over all mesh axes over which the others vary."""
    return _marked(x, varying_axes(x), frozenset().union(*map(varying_axes, others)))


def all_varying(*arrays: Array) -> Sequence[Array]:
    """The arrays, each marked as varying over all mesh axes over which any of them varies."""
    if not manual_axes():
        return arrays
    axes = [varying_axes(x) for x in arrays]
    union = frozenset().union(*axes)
    return [_marked(x, varying, union) for x, varying in zip(arrays, axes, strict=True)] if union else arrays


def marked_as_varying(x: Array, axes: Sequence[str]) -> Array:
    """The array, marked as varying over these mesh axes too."""
    return x if unchecked_axes() else _marked(x, varying_axes(x), varying_axes(x).union(axes))


def marked_as_shared(x: Array, axes: Sequence[str]) -> Array:
    """The inverse of `marked_as_varying`, for an array that is the same on all devices along these mesh axes."""
    varying = varying_axes(x)
    if varying.isdisjoint(axes):
        return x
    return _marked(on_one_device(lambda x: x, x), frozenset(), varying.difference(axes))


def _marked(x: Array, varying: frozenset[str], target: frozenset[str]) -> Array:
    missing = tuple(sorted(target - varying))
    return lax.pcast(x, missing, to="varying") if missing else x


def largest_over_devices(x: Array, axes: tuple[str, ...]) -> Array:
    """The largest float32 numbers of all devices along mesh axes of a `shard_map`; NaN if one is NaN.

    Args:
        x: The numbers of this device.
        axes: The mesh axes; with () the numbers are returned as they are.
    """
    if not axes:
        return x
    # As whole numbers they have the same order, with NaN on top: a maximum of float32 drops NaN on a CPU.
    words = lax.bitcast_convert_type(lax.select(lax.ne(x, x), lax.full_like(x, np.nan), x), np.int32)
    return lax.bitcast_convert_type(_in_order(lax.pmax(_in_order(words), axes)), np.float32)


def _in_order(words: Array) -> Array:
    """The bits of floats as integers in the order of the floats; and back."""
    below_zero = lax.shift_right_arithmetic(words, np.int32(31))
    return lax.bitwise_xor(words, lax.bitwise_and(below_zero, np.int32(0x7FFFFFFF)))


# --- Explicit axes ----------------------------------------------------------------------------------------------------


def explicit_axes_of(x: object) -> tuple[str, ...]:
    """The explicit axes of the mesh of a sharding or of an array; () without a mesh."""
    mesh = getattr(x, "mesh", None)
    if mesh is None and isinstance(x, jax.Array):
        mesh = jax.typeof(x).sharding.mesh
    if mesh is None:
        return ()
    types = mesh.axis_types or ()
    return tuple(name for name, axis_type in zip(mesh.axis_names, types, strict=True) if axis_type == AxisType.Explicit)


def aval_of_result(operand: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The abstract value of a primitive's result: on the operand's mesh, and not divided along explicit axes.

    Args:
        operand: The abstract value of an operand.
        shape: The shape of the result.
        dtype: Its dtype.
    """
    sharding = operand.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    return operand.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)


type _DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def sharding_of_product(
    lhs: Array, rhs: Array, dimension_numbers: _DimensionNumbers, out_sharding: Any
) -> NamedSharding | None:
    """The sharding that `lax.dot_general` gives its result on a mesh with explicit axes; None on any other mesh.

    Raises what `lax.dot_general` raises.

    Args:
        lhs: The first operand.
        rhs: The second.
        dimension_numbers: In the form that `lax.dot_general` takes.
        out_sharding: In the form that `lax.dot_general` takes.
    """
    return _sharding_of(lhs, rhs, dimension_numbers, out_sharding, lambda rhs: rhs)


def sharding_of_groups(rows: Array, kernels: Array, out_sharding: Any) -> NamedSharding | None:
    """The same for a grouped product, which is divided like the product of its rows and one of the kernels.

    Args:
        rows: `[rows, inputs]`.
        kernels: `[groups, inputs, outputs]`.
        out_sharding: In the form that `lax.dot_general` takes.
    """
    # Not `kernels[0]`: indexing would need the sharding of its result.
    one = lambda kernels: jnp.max(kernels, axis=0)
    return _sharding_of(rows, kernels, (((1,), (0,)), ((), ())), out_sharding, one)


def _sharding_of(
    lhs: Array, rhs: Array, dimension_numbers: _DimensionNumbers, out_sharding: Any, second: Callable[[Array], Array]
) -> NamedSharding | None:
    if not any(map(explicit_axes_of, (lhs, rhs, jax.sharding.get_abstract_mesh()))):
        return None
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)

    def product(lhs: Array, rhs: Array) -> Array:
        lhs, rhs = (lax.convert_element_type(x, dtype) for x in (lhs, second(rhs)))
        return lax.dot_general(lhs, rhs, dimension_numbers, out_sharding=out_sharding)

    # Not `jax.eval_shape`, which leaves out the sharding if the mesh also has automatic axes.
    out: Any = jax.make_jaxpr(product)(lhs, rhs).out_avals[0]
    return out.sharding


def with_automatic_axes(function: Callable[..., Array], sharding: NamedSharding | None, *arrays: Array) -> Array:
    """`function(*arrays)` with a result of this sharding; inside, XLA divides arrays as it sees fit.

    Quantizing takes maxima over tensors and blocks, and updates state that all devices share. Explicit axes would add
    nothing here, but every operation would have to name its sharding. The gradient of each array has the array's own
    sharding. With `sharding=None` the function is called unchanged.

    Args:
        function: A function of arrays.
        sharding: The sharding of its result.
        *arrays: Its arguments.
    """
    if sharding is None:
        return function(*arrays)
    # Without `out_sharding`, `auto_axes` returns a function; its types say so in either case.
    automatic: Any = jax.sharding.auto_axes(function, axes=explicit_axes_of(sharding), out_sharding=sharding)
    return automatic(*arrays)


# --- Automatic axes ---------------------------------------------------------------------------------------------------


def automatic_axes() -> tuple[str, ...]:
    """The axes of the mesh in use over which XLA divides arrays as it sees fit; () without a mesh (`jax.set_mesh`)."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(
        name
        for name, axis_type in zip(mesh.axis_names, mesh.axis_types or (), strict=True)
        if axis_type == AxisType.Auto and mesh.shape[name] > 1
    )


def automatic_mesh() -> bool:
    """Whether a mesh is set (`jax.set_mesh`) over which XLA alone divides arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.are_all_axes_auto


def divided(x: Array, spec: PartitionSpec) -> Array:
    """The array, divided over the mesh as specified.

    Args:
        x: The array.
        spec: The mesh axes that divide each axis; axes that it leaves out are whole.
    """
    return lax.with_sharding_constraint(x, spec)


def whole_in_front(x: Array) -> Array:
    """The array with its first axis whole on every device and its other axes divided as before.

    Without an automatic mesh it is returned unchanged.
    """
    if not automatic_mesh() or jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return divided(x, PartitionSpec(None, *(PartitionSpec.UNCONSTRAINED for _ in x.shape[1:])))
