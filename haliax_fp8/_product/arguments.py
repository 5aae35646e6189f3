"""What an FP8 product takes: operands, groups, dtypes and precision, checked with errors that name the argument."""

import contextlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array


def check_operands(lhs: Any, rhs: Any) -> None:
    """Raises unless both operands are floating-point arrays."""
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if not isinstance(x, jax.Array | np.ndarray | np.generic):
            is_batch = isinstance(x, tuple | list | dict)
            batch = ". If it is a batch, unpack it: step(model, opt_state, *batch) calls loss_fn(model, *batch)"
            # Optax calls whatever can be called, and so a tree of labels or of masks that is a model.
            tree = ". If it is a tree of labels or masks for Optax, pass lambda _: labels: Optax calls a model"
            raise ValueError(
                f"{name} of an FP8 product is a {type(x).__name__}; pass an array, such as jnp.asarray(...) or the "
                f".array of a haliax.NamedArray{batch if is_batch else tree if isinstance(x, eqx.Module) else ''}"
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"{name} of an FP8 product has dtype {x.dtype}; cast it to a floating dtype, or leave this product to "
                "lax.dot_general"
            )
        if jnp.finfo(x.dtype).bits < 16:
            raise ValueError(
                f"{name} of an FP8 product has dtype {x.dtype}, but the product quantizes its operands itself: pass "
                "the values in 16 bits or more, or multiply FP8 data with lax.dot_general"
            )


def check_groups(lhs: Array, rhs: Array, group_sizes: Any) -> None:
    """Raises unless the operands of a grouped product fit, and their groups too, where their sizes are known by now."""
    if not isinstance(group_sizes, jax.Array | np.ndarray) or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes={group_sizes!r} must be an array of integers, one for each group")
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1] or group_sizes.shape != rhs.shape[:1]:
        raise ValueError(
            f"lhs {lhs.shape}, rhs {rhs.shape} and group_sizes {group_sizes.shape} do not fit: "
            "they must be [rows, inputs], [groups, inputs, outputs] and [groups]"
        )
    if not isinstance(group_sizes, Tracer):
        sizes = np.asarray(group_sizes)
        if (sizes < 0).any() or sizes.sum() > lhs.shape[0]:
            raise ValueError(
                f"group_sizes={sizes.tolist()} must not be negative, nor add up to more than the {lhs.shape[0]} rows "
                "of lhs"
            )


def check_key(key: Array | None) -> Array | None:
    """The words of a key, None if it was taken out; raises if they were cast, which makes JAX differentiate them."""
    if key is not None and key.dtype != np.uint32:
        raise ValueError(
            f"the key for stochastic rounding is in {key.dtype}: the model was cast after it got its keys. Cast it "
            "before you call with_rounding_keys, or cast with cast_params(model, dtype), which leaves keys as they are"
        )
    return key


def floating_dtype(name: str, dtype: Any) -> np.dtype:
    """An argument that has to be a floating dtype of 16 bits or more, as NumPy's; raises a ValueError with its name."""
    with contextlib.suppress(TypeError):  # raised for anything but a dtype
        result = np.dtype(dtype)
        if jnp.issubdtype(result, jnp.floating) and jnp.finfo(result).bits >= 16:
            return result
    # A model or an array would fill the screen.
    is_short = isinstance(dtype, str | type | np.dtype)
    shown = f"{name}={dtype}" if is_short else f"{name} is of type {type(dtype).__name__}, and"
    raise ValueError(f"{shown} is not a floating dtype of 16 bits or more; use one such as jnp.bfloat16")


def precision_of(precision: lax.PrecisionLike) -> lax.Precision:
    """The precision of fprop; raises unless it is one, or None."""
    return lax.Precision.DEFAULT if precision is None else lax.Precision(precision)
