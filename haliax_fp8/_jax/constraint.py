"""How arrays are divided over a mesh whose axes are automatic, said to XLA."""

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array


def automatic_mesh() -> bool:
    """Whether a mesh is set (`jax.set_mesh`) over which XLA alone divides arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.are_all_axes_auto


def divided(x: Array, spec: PartitionSpec) -> Array:
    """An array, divided over the mesh as a specification says.

    Args:
        x: The array.
        spec: What each axis is divided over; axes that it leaves out are whole.
    """
    return jax.lax.with_sharding_constraint(x, spec)


def whole_in_front(x: Array) -> Array:
    """An array whose first axis is whole on every device; its other axes are divided as they were.

    Without an automatic mesh there is nothing to say.
    """
    if not automatic_mesh() or jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return divided(x, PartitionSpec(None, *(PartitionSpec.UNCONSTRAINED for _ in x.shape[1:])))
