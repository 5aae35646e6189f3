"""What a loss function may return: one number, as JAX's gradients take it."""

from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np


def scalar_loss(value: Any) -> Any:
    """The number that a loss function returned; a `NamedArray` without axes counts as one.

    Args:
        value: What the function returned.

    Raises:
        ValueError: If it is several numbers, or a number together with something else; the message has the remedy.

    Example:
        >>> scalar_loss(hax.mean(hax.ones(hax.Axis("batch", 4))))
        Array(1., dtype=float32)
    """
    if isinstance(value, hax.NamedArray):
        if value.axes:
            raise ValueError(
                f"loss_fn returned an array with axes {value.axes}, but a loss is one number; take the mean over them, "
                "hax.mean(loss)"
            )
        return value.array
    if isinstance(value, tuple | list | dict):
        raise ValueError(
            f"loss_fn returned a {type(value).__name__} of {len(value)}, but must return the loss alone. For auxiliary "
            "results, write the step with haliax_fp8.filter_value_and_grad(loss_fn, has_aux=True): see 'By hand' in "
            "docs/training-step.md"
        )
    if isinstance(value, jax.Array | np.ndarray) and jnp.ndim(value) > 0:
        raise ValueError(
            f"loss_fn returned an array of shape {value.shape}, but a loss is one number; take its mean, jnp.mean(loss)"
        )
    return value
