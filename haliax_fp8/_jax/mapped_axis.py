"""An axis that `vmap` maps, moved to where a batching rule wants it."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped


def to_front(x: Shaped[Array, "..."], axis: int | None, size: int, position: int) -> Shaped[Array, "..."]:
    """Moves an axis to a position near the front, or makes a new one there by repeating."""
    if axis is not None:
        return x if axis == position else jnp.moveaxis(x, axis, position)
    shape = (*x.shape[:position], size, *x.shape[position:])
    return jnp.broadcast_to(jnp.expand_dims(x, position), shape)
