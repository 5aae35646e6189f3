"""Tells XLA how to divide arrays over a mesh with automatic axes."""

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array


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
    return jax.lax.with_sharding_constraint(x, spec)


def whole_in_front(x: Array) -> Array:
    """The array with its first axis whole on every device and its other axes divided as before.

    Without an automatic mesh it is returned unchanged.
    """
    if not automatic_mesh() or jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return divided(x, PartitionSpec(None, *(PartitionSpec.UNCONSTRAINED for _ in x.shape[1:])))
