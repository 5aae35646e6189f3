"""The check of a random key."""

from typing import Any

import jax
import jax.numpy as jnp


def require_single_key(key: Any, name: str = "key") -> None:
    """Raises a ValueError unless an argument is one key of `jax.random.key`."""
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0):
        raise ValueError(f"{name}={key!r} is not a single random key; make one with jax.random.key(seed)")
