"""An axis that `vmap` maps, moved to where a batching rule wants it.

Rules for results move it to the very front. In a traced program (a `jit`, a loop, a checkpoint) JAX assumes that the
mapped axis of a custom derivative's result is also that of its derivative. If it were not, and sizes agreed, axes would
be swapped without an error.
"""

import jax.numpy as jnp
from jaxtyping import Array, Shaped


def to_front(x: Shaped[Array, "..."], axis: int | None, size: int, position: int) -> Shaped[Array, "..."]:
    """Moves an axis to a position near the front, or makes a new one there by repeating."""
    if axis is not None:
        return x if axis == position else jnp.moveaxis(x, axis, position)
    shape = (*x.shape[:position], size, *x.shape[position:])
    return jnp.broadcast_to(jnp.expand_dims(x, position), shape)
