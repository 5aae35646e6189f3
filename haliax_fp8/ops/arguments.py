"""Checks of the low-level functions' arguments, with errors that name the argument, the value and the remedy."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Shaped

from .._jax.max_grad import is_max_grad, to_float32, to_max_grad
from ..formats import FORMATS, Format


Values = Float[ArrayLike, "*shape"]
Scale = Shaped[ArrayLike, "..."]  # `Shaped`, because `Float` rejects `fp32_max_grad`.
History = Shaped[ArrayLike, " length"]


def dtype_of(name: str, value: Any) -> np.dtype:
    """An argument as a NumPy dtype."""
    try:
        return np.dtype("none" if value is None else value)  # NumPy reads None as float64.
    except TypeError as error:
        raise ValueError(f"{name}={value!r} is not a dtype; use one such as jnp.float32") from error


def format_of(name: str, value: Any) -> Format:
    """The format of an argument that has to be an FP8 dtype."""
    dtype = dtype_of(name, value)
    if dtype not in FORMATS:
        raise ValueError(f"{name}={dtype} is not an FP8 dtype; use one of {', '.join(map(str, FORMATS))}")
    return FORMATS[dtype]


def wide_dtype(name: str, value: Any) -> np.dtype:
    """An argument that has to be a floating dtype of 16 bits or more."""
    dtype = dtype_of(name, value)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 16:
        raise ValueError(
            f"{name}={dtype} is not a floating-point dtype of 16 bits or more; use float32, bfloat16 or float16"
        )
    return dtype


def floating(name: str, value: ArrayLike) -> Array:
    """An array of any floating-point dtype; `fp32_max_grad` comes out as float32."""
    if isinstance(value, str | bytes) or value is None:
        raise ValueError(f"{name}={value!r} is not an array; use one such as jnp.float32(1.0)")
    array = value if isinstance(value, Array) else jnp.asarray(value)
    if is_max_grad(array):
        return to_float32(array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name}.dtype={array.dtype} is not floating-point; cast it with {name}.astype(jnp.float32)")
    return array


def wide(name: str, value: ArrayLike) -> Array:
    """An array of a floating dtype of 16 bits or more; `fp32_max_grad` comes out as float32."""
    array = floating(name, value)
    wide_dtype(f"{name}.dtype", array.dtype)
    return array


def state_of(name: str, value: ArrayLike) -> Array:
    """A scale or a history: not bfloat16, whose rounding would be an error of up to 0.2 % on every product."""
    if isinstance(value, str | bytes) or value is None:
        raise ValueError(f"{name}={value!r} is not an array; start with jnp.ones(1) or jnp.zeros(1024)")
    array = value if isinstance(value, Array) else jnp.asarray(value, getattr(value, "dtype", jnp.float32))
    if array.dtype != jnp.float32 and not is_max_grad(array):
        raise ValueError(
            f"{name}.dtype={array.dtype}, but scales and amax histories must be float32 or fp32_max_grad; "
            f"leave them out of casts of the whole model, or cast back with {name}.astype(jnp.float32)"
        )
    return array


def scale_of(name: str, value: ArrayLike) -> Array:
    """A scale that goes with a history: that of a whole tensor, `()` or `(1,)`."""
    array = state_of(name, value)
    if array.size != 1:
        raise ValueError(
            f"{name}.shape={array.shape}, but the scale of a tensor must be () or (1,); are {name} and amax_history "
            "swapped? For stacked state, use jax.vmap"
        )
    return array


def history_of(value: ArrayLike) -> Array:
    """An amax history, `(length,)`."""
    array = state_of("amax_history", value)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(
            f"amax_history.shape={array.shape}, but it must be (length,) with a length of 1 or more; "
            "start with jnp.zeros(1024), and use jax.vmap for stacked histories"
        )
    return array


def scale_for(x: Array, value: ArrayLike, dtype: np.dtype) -> Array:
    """A scale in a dtype, and in a shape that broadcasts to that of `x`."""
    scale = floating("scale", value).astype(dtype)
    if scale.size == 1:
        return scale.reshape(())
    try:
        return jnp.broadcast_to(scale, x.shape)
    except ValueError as error:
        raise ValueError(
            f"scale.shape={scale.shape} does not broadcast to x.shape={x.shape}; use a scale of shape (), or keep the "
            "axes of size 1 (keepdims=True) when you take the amax"
        ) from error


def like(value: Array, state: Array) -> Array:
    """Casts float32 to the dtype of a state."""
    return to_max_grad(value) if is_max_grad(state) else value
