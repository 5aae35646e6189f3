"""Numbers put where a leaf of a model is: on its devices, in its dtype."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .open import on_host


def sharding_of(leaf: Any) -> Any:
    """Where a leaf has to be; None where JAX may decide, and for leaves that are not on a device."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding
    # An array that nobody put on a device may move to the others of a computation.
    return leaf.sharding if isinstance(leaf, jax.Array) and getattr(leaf, "committed", True) else None


def like_leaf(array: Any, leaf: Any) -> Any:
    """An array, or a number, on the devices and of the kind of a leaf.

    Args:
        array: The numbers, of the leaf's shape; on its sharding already or on the host.
        leaf: What the model has.
    """
    if isinstance(leaf, np.ndarray):
        return on_host(array).astype(leaf.dtype, copy=False)
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return type(leaf)(np.asarray(array).item())
    sharding = sharding_of(leaf)
    if isinstance(array, jax.Array) and sharding is not None and array.sharding == sharding:
        return array if array.dtype == leaf.dtype else array.astype(leaf.dtype)
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array if sharding is None else jax.device_put(array, sharding)
    host = on_host(array).astype(leaf.dtype, copy=False)
    if sharding is None:
        return jnp.asarray(host)
    # Each device gets its own part, and no device the whole.
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
