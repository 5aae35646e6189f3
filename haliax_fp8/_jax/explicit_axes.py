"""Meshes with explicit axes: how a product's result is divided, and functions inside which XLA chooses shardings."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array


type _Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def explicit_axes_of(x: object) -> tuple[str, ...]:
    """The explicit axes of the mesh of a sharding or of an array; () without a mesh."""
    mesh = getattr(x, "mesh", None)
    if mesh is None and isinstance(x, jax.Array):
        mesh = jax.typeof(x).sharding.mesh
    if mesh is None:
        return ()
    types = mesh.axis_types or ()
    return tuple(name for name, kind in zip(mesh.axis_names, types, strict=True) if kind == AxisType.Explicit)


def aval_of_result(of_operand: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The abstract value of a primitive's result: on the operand's mesh, and not divided along explicit axes.

    Args:
        of_operand: The abstract value of an operand.
        shape: The shape of the result.
        dtype: Its dtype.
    """
    sharding = of_operand.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    return of_operand.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)


def sharding_of_product(lhs: Array, rhs: Array, dimension_numbers: _Numbers, out_sharding: Any) -> NamedSharding | None:
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
    lhs: Array, rhs: Array, dimension_numbers: _Numbers, out_sharding: Any, second: Callable[[Array], Array]
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
    of_arrays: Any = jax.sharding.auto_axes(function, axes=explicit_axes_of(sharding), out_sharding=sharding)
    return of_arrays(*arrays)
