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
            f"loss_fn returned a {type(value).__name__} of {len(value)}, but must return the loss alone. For a loss "
            "with auxiliary results, (loss, aux), use TrainStep(loss_fn, optimizer, has_aux=True); elsewhere give "
            "lambda *args: loss_fn(*args)[0]"
        )
    if isinstance(value, jax.Array | np.ndarray) and jnp.ndim(value) > 0:
        raise ValueError(
            f"loss_fn returned an array of shape {value.shape}, but a loss is one number; take its mean, jnp.mean(loss)"
        )
    return value


def loss_and_aux(value: Any) -> tuple[Any, Any]:
    """The number and the auxiliary results that a loss function with `has_aux` returned.

    Args:
        value: What the function returned.

    Raises:
        ValueError: If it is not a pair, or its first part is not one number.
    """
    if not isinstance(value, tuple) or len(value) != 2:
        kind = "array" if isinstance(value, jax.Array) else type(value).__name__
        got = f"a tuple of {len(value)}" if isinstance(value, tuple) else f"one {kind}"
        raise ValueError(f"has_aux=True: loss_fn must return (loss, aux), and returned {got}")
    return scalar_loss(value[0]), value[1]
