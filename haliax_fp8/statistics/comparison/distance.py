"""How far apart two arrays are, as numbers; larger ones are worse."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


NUMBERS = ("relative_error", "cosine_distance", "largest")
"""The computed numbers, in the order of the last axis."""


def distances(reference: Float[Array, "..."], other: Float[Array, "..."], kept: int = 0) -> Float32[Array, "*kept 3"]:
    """`NUMBERS` of two arrays, where one is not finite infinity.

    Args:
        reference: The array that errors are relative to.
        other: The other one.
        kept: How many leading axes number arrays of their own.
    """
    axes = tuple(range(kept, reference.ndim))
    total = lambda x: jnp.sum(x, axes, keepdims=True)
    a, b = reference.astype(jnp.float32), other.astype(jnp.float32)
    # Squares of what is below 1e-19, as gradients are, would be flushed to zero.
    largest = jnp.max(jnp.maximum(jnp.abs(a), jnp.abs(b)), axes, initial=0.0, keepdims=True)
    unit = jnp.where(largest > 0.0, largest, jnp.float32(1.0))
    a, b = a / unit, b / unit
    norm = lambda x: jnp.sqrt(total(x**2))
    directions = [x / jnp.where(norm(x) > 0.0, norm(x), jnp.float32(1.0)) for x in (a, b)]
    numbers = [
        _ratio(norm(b - a), norm(a)),
        # 1 - cos, where that would lose its digits.
        total((directions[0] - directions[1]) ** 2) / 2,
        _ratio(
            jnp.max(jnp.abs(b - a), axes, initial=0.0, keepdims=True),
            jnp.max(jnp.abs(a), axes, initial=0.0, keepdims=True),
        ),
    ]
    stacked = jnp.stack([x.reshape(reference.shape[:kept]) for x in numbers], axis=-1)
    return jnp.where(jnp.isfinite(stacked), stacked, jnp.float32(jnp.inf))


def _ratio(a: Array, b: Array) -> Array:
    return jnp.where(a == 0.0, jnp.float32(0.0), a / b)
