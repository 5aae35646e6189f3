"""Casts to FP8 and back, with a given scale."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._jax.xla import keep_cast
from .._numerics.casts import saturating_cast
from .arguments import Scale, Values, floating, format_of, scale_for, wide, wide_dtype


def quantize(x: Values, q_dtype: DTypeLike, scale: Scale, compute_dtype: DTypeLike) -> Float[Array, "*shape"]:
    """Scales down, clips and rounds: `cast(clip(x / scale, -max, max))`, to nearest, ties to even.

    Source: Flax guide, "Current Scaling".

    Args:
        x: Values, 16 bits or more.
        q_dtype: FP8 dtype of the result.
        scale: One element, or a shape that broadcasts to that of `x`.
        compute_dtype: The dtype that `scale` is rounded to, and that the division runs in unless `x` is wider.

    Returns:
        Data of dtype `q_dtype`. Infinities become ±max; NaN stays NaN.

    Raises:
        ValueError: For other dtypes, or a scale that does not broadcast.

    Example:
        >>> quantize(jnp.array([0.5, 2.0, 1e6]), jnp.float8_e4m3fn, 2.0, jnp.float32)
        Array([0.25, 1, 448], dtype=float8_e4m3fn)
    """
    format = format_of("q_dtype", q_dtype)
    x = wide("x", x)
    scale = scale_for(x, scale, wide_dtype("compute_dtype", compute_dtype))
    with jax.numpy_dtype_promotion("standard"):  # The caller named both dtypes, so mixing them is intended.
        dtype = jnp.result_type(x, compute_dtype)
    return saturating_cast(x.astype(dtype) / scale.astype(dtype), format)


def dequantize(x: Values, dq_dtype: DTypeLike, scale: Scale) -> Float[Array, "*shape"]:
    """Scales FP8 data, or a product of such data, back: `x * scale`, both cast to `dq_dtype` first.

    Source: Flax guide, "Current Scaling".

    Args:
        x: FP8 data, or a product with `preferred_element_type`.
        dq_dtype: Dtype of the result, 16 bits or more.
        scale: One element, or a shape that broadcasts to that of `x`; for a product, the product of its two scales.

    Raises:
        ValueError: For other dtypes, or a scale that does not broadcast.

    Example:
        >>> dequantize(jnp.array([0.25, 1.0], jnp.float8_e4m3fn), jnp.float32, 2.0)
        Array([0.5, 2. ], dtype=float32)
    """
    dq_dtype = wide_dtype("dq_dtype", dq_dtype)
    x = floating("x", x)
    return keep_cast(x).astype(dq_dtype) * scale_for(x, scale, dq_dtype)


def quantize_dequantize(
    x: Values, q_dtype: DTypeLike, scale: Scale, compute_dtype: DTypeLike
) -> Float[Array, "*shape"]:
    """Rounds to values of an FP8 dtype, in the dtype of `x`: `dequantize(quantize(x))`. Also named `qdq`.

    Deprecated: products run in FP8 only if the compiler recognizes the pattern, which other passes may break. Use
    `quantize`, the product, `dequantize`. Source: Flax guide, "Deprecated APIs".

    Args:
        x: Values, 16 bits or more.
        q_dtype: FP8 dtype to round to.
        scale: As in `quantize`.
        compute_dtype: As in `quantize`.

    Raises:
        ValueError: As in `quantize`.

    Example:
        >>> quantize_dequantize(jnp.array([1.06, 500.0]), jnp.float8_e4m3fn, 1.0, jnp.float32)
        Array([  1., 448.], dtype=float32)
    """
    x = wide("x", x)
    return dequantize(quantize(x, q_dtype, scale, compute_dtype), x.dtype, scale)


qdq = quantize_dequantize
