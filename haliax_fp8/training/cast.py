"""cast_params: a model's parameters in another dtype, without its FP8 state."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import DTypeLike

from .._product.arguments import floating_dtype
from .._state.marker import is_state
from ..layers.model_argument import require_model


def cast_params[M](model: M, dtype: DTypeLike) -> M:
    """The model with its floating-point parameters in `dtype`; FP8 state is not a parameter and stays float32.

    Call it inside the loss to compute in bfloat16 from float32 master weights: the cast is then part of the
    differentiated function, so that gradients arrive in float32 and the optimizer keeps its precision.

    Args:
        model: The model, or any tree.
        dtype: A floating dtype of 16 bits or more. Integers, keys and everything that is not an array stay.

    Raises:
        ValueError: If `dtype` is not such a dtype, or a model.

    Example:
        >>> half = cast_params(layer, jnp.bfloat16)
        >>> half.weight.dtype, half.dot_general.scale("kernel").dtype
        (dtype(bfloat16), dtype('float32'))
    """
    if isinstance(dtype, eqx.Module):
        raise ValueError(
            f"model and dtype are swapped: dtype is a model of class {type(dtype).__name__}; use cast_params(model, "
            "jnp.bfloat16)"
        )
    to = floating_dtype("dtype", dtype)
    require_model(model, "cast_params(model, dtype)")

    def cast(leaf: Any) -> Any:
        return leaf.astype(to) if eqx.is_inexact_array(leaf) else leaf

    return jax.tree.map(cast, model, is_leaf=is_state)
