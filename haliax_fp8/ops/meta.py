"""Scales and histories: how a step computes them from amaxes."""

import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Shaped

from .._jax.max_grad import to_float32
from .arguments import History, Scale, Values, floating, format_of, history_of, like, scale_of, state_of, wide_dtype


def get_fp8_max(fp8_dtype: DTypeLike, out_dtype: DTypeLike) -> Float[Array, ""]:
    """The largest finite value of an FP8 dtype: arXiv:2209.05433, table 1.

    Args:
        fp8_dtype: `float8_e4m3fn` (448), `float8_e5m2` (57344) or a `fnuz` variant (240, 57344).
        out_dtype: Dtype of the result, 16 bits or more.

    Raises:
        ValueError: For other dtypes.

    Example:
        >>> get_fp8_max(jnp.float8_e4m3fn, jnp.float32)
        Array(448., dtype=float32)
    """
    return jnp.asarray(format_of("fp8_dtype", fp8_dtype).max, wide_dtype("out_dtype", out_dtype))


def compute_scale(amax: Scale, scale: Scale, fp8_max: ArrayLike, margin: int | float = 0) -> Shaped[Array, "..."]:
    """The scale that maps `amax` to `fp8_max / 2**margin`: `1 / (fp8_max / amax / 2**margin)`.

    Both reciprocals belong to the definition: `amax / fp8_max` differs in the last bit for half of all amaxes.
    Source: Flax; TransformerEngine's `update_fp8_metas`, whose scale is the reciprocal of this one.

    Args:
        amax: Largest magnitude, of any shape that broadcasts with `scale`.
        scale: The present scale, kept where `amax` is zero, negative, infinite or NaN.
        fp8_max: Largest value of the format, see `get_fp8_max`.
        margin: Binades to leave free above `amax`.

    Returns:
        The new scale, float32 or `fp32_max_grad` like `scale`.

    Raises:
        ValueError: If `scale` is neither, or `amax` is not floating-point.

    Example:
        >>> compute_scale(jnp.array([896.0, 0.0, jnp.inf]), 0.5, 448.0)
        Array([2. , 0.5, 0.5], dtype=float32)
        >>> compute_scale(896.0, 1.0, 448.0, margin=1)
        Array(4., dtype=float32)
    """
    amax, scale = floating("amax", amax).astype(jnp.float32), state_of("scale", scale)
    inverse = (jnp.asarray(fp8_max, jnp.float32) / amax) / 2**margin
    inverse = jnp.where((amax > 0.0) & jnp.isfinite(amax), inverse, 1.0 / to_float32(scale))
    return like(1.0 / inverse, scale)


def compute_amax_history(x: Values, amax_history: History) -> Shaped[Array, " length"]:
    """Records the amax of `x`: `roll(amax_history, -1).at[0].set(max(|x|))`.

    The newest amax is at index 0, the one before it at index -1, and so on; the oldest, at 1, is dropped next.
    Source: Flax; arXiv:2209.05433, section 3.2, for the idea.

    Args:
        x: Values; NaN among them is recorded as NaN.
        amax_history: Amaxes of the previous steps, float32 or `fp32_max_grad`.

    Returns:
        The new history, in the dtype of the old.

    Raises:
        ValueError: For other dtypes, or a history that is not of shape `(length,)`.

    Example:
        >>> compute_amax_history(jnp.array([-5.0, 2.0]), jnp.array([3.0, 0.0, 1.0]))
        Array([5., 1., 3.], dtype=float32)
    """
    history = history_of(amax_history)
    amax = jnp.max(jnp.abs(floating("x", x)), initial=0).astype(jnp.float32)
    return like(jnp.roll(to_float32(history), -1).at[0].set(amax), history)


def update_fp8_meta(
    x: Values, q_dtype: DTypeLike, scale: Scale, amax_history: History
) -> tuple[Shaped[Array, "..."], Shaped[Array, " length"]]:
    """One step of delayed scaling: `compute_scale(max(amax_history), scale, ...), compute_amax_history(x, ...)`.

    The scale for `x` comes from the history before this step. Source: Flax.

    Args:
        x: The operand of this step.
        q_dtype: FP8 dtype that it will be quantized to.
        scale: The previous scale, shape `()` or `(1,)`, float32 or `fp32_max_grad`.
        amax_history: Amaxes of the previous steps, float32 or `fp32_max_grad`.

    Returns:
        The new scale and the new history.

    Raises:
        ValueError: As in those two functions.

    Example:
        >>> update_fp8_meta(7.0, jnp.float8_e4m3fn, jnp.array(1.0), jnp.array([896.0, 0.0]))
        (Array(2., dtype=float32), Array([  7., 896.], dtype=float32))
    """
    amax = jnp.max(to_float32(history_of(amax_history)))
    new_scale = compute_scale(amax, scale_of("scale", scale), get_fp8_max(q_dtype, jnp.float32))
    return new_scale, compute_amax_history(x, amax_history)
