"""A store to shared memory by a Pallas kernel for GPUs, in a layout in which threads may wait for each other."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array


def store_unoptimized(ref: Any, value: Array) -> None:
    """Stores `value` in `ref`, whatever the layout.

    Since JAX 0.12 a plain assignment refuses layouts in which stores have bank conflicts, and `plgpu.store` takes them.
    JAX 0.11 has no `plgpu.store`, and an assignment takes them all.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
