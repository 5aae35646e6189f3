"""The operands and the result of a product, with gradients that carry the new state."""

from functools import partial

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from .._jax.max_grad import to_float32
from .arguments import History, Scale, Values, format_of, history_of, scale_of, state_of, wide, wide_dtype
from .casts import dequantize, quantize, quantize_dequantize
from .meta import update_fp8_meta


def in_q(
    compute_dtype: DTypeLike, q_dtype: DTypeLike, inp: Values, scale: Scale, amax_history: History
) -> tuple[Float[Array, "*shape"], Shaped[Array, "..."]]:
    """Quantizes an operand with delayed scaling: `quantize` with the scale of `update_fp8_meta`.

    Source: Flax guide, "Delayed Scaling".

    Args:
        compute_dtype: As in `quantize`.
        q_dtype: FP8 dtype of the result.
        inp: The operand.
        scale: As in `update_fp8_meta`.
        amax_history: As in `update_fp8_meta`.

    Returns:
        FP8 data and its scale. Backward, `inp` gets zero: this function does not provide the product's gradient.

    Raises:
        ValueError: As in `quantize` and `update_fp8_meta`.

    Example:
        >>> in_q(jnp.float32, jnp.float8_e4m3fn, 3.0, jnp.array(1.0), jnp.array([896.0, 0.0]))
        (Array(1.5, dtype=float8_e4m3fn), Array(2., dtype=float32))
    """
    return _in_q(compute_dtype, q_dtype, wide("inp", inp), scale_of("scale", scale), history_of(amax_history))


def out_dq(dq_type: DTypeLike, lhs_scale: Scale, rhs_scale: Scale, out: Values) -> Float[Array, "*shape"]:
    """Dequantizes a product of quantized operands: `out * (lhs_scale * rhs_scale)`, the scales' product in float32.

    Source: Flax guide, "Delayed Scaling".

    Args:
        dq_type: Dtype of the result, 16 bits or more.
        lhs_scale: The first operand's scale, from `in_q`.
        rhs_scale: The second operand's scale, from `in_q`.
        out: The product, with a `preferred_element_type` of 16 bits or more.

    Returns:
        The dequantized product. Backward, `out` gets the cotangent unscaled, and the scales get zero.

    Raises:
        ValueError: For other dtypes.

    Example:
        >>> out_dq(jnp.float32, jnp.array(2.0), jnp.array(0.5), jnp.array([3.0]))
        Array([3.], dtype=float32)
    """
    dq_type = wide_dtype("dq_type", dq_type)
    # Cast outside the custom rule, so that the cotangent comes back in the dtype of `out`.
    out = wide("out", out).astype(dq_type)
    return _out_dq(dq_type, state_of("lhs_scale", lhs_scale), state_of("rhs_scale", rhs_scale), out)


def in_qdq(
    compute_dtype: DTypeLike, q_dtype: DTypeLike, inp: Values, scale: Scale, amax_history: History
) -> Float[Array, "*shape"]:
    """Rounds an operand to FP8 with delayed scaling: `quantize_dequantize` with the scale of `update_fp8_meta`.

    Deprecated: use `in_q`, the product, `out_dq`. Source: Flax guide, "Accumulate gradient of FP8 params".

    Args:
        compute_dtype: As in `quantize`.
        q_dtype: FP8 dtype to round to.
        inp: The operand.
        scale: As in `update_fp8_meta`.
        amax_history: As in `update_fp8_meta`.

    Returns:
        `inp` rounded. Backward, `inp` gets the cotangent unchanged.

    Raises:
        ValueError: As in `in_q`.

    Example:
        >>> def reuse(x, y, scale, history):
        ...     scale, history = scale.astype(fp32_max_grad), history.astype(fp32_max_grad)
        ...     x = in_qdq(jnp.float32, jnp.float8_e4m3fn, x, scale, history)
        ...     return x + in_qdq(jnp.float32, jnp.float8_e4m3fn, y, scale, history)
        >>> jax.jit(jax.grad(reuse, (2, 3)))(2.0, 3.0, jnp.array(1.0), jnp.zeros(3))
        (Array(1., dtype=float32), Array([3., 0., 0.], dtype=float32))
    """
    return _in_qdq(compute_dtype, q_dtype, wide("inp", inp), scale_of("scale", scale), history_of(amax_history))


def out_qdq(
    compute_dtype: DTypeLike, q_dtype: DTypeLike, out: Values, scale: Scale, amax_history: History
) -> Float[Array, "*shape"]:
    """Returns a product unchanged, and rounds its cotangent to FP8 with delayed scaling, as `in_qdq` does.

    Deprecated: use `in_q`, the product, `out_dq`. Source: Flax guide, "Deprecated APIs".

    Args:
        compute_dtype: As in `quantize`.
        q_dtype: FP8 dtype to round the cotangent to.
        out: The product.
        scale: As in `update_fp8_meta`, for the cotangent.
        amax_history: As in `update_fp8_meta`, for the cotangent.

    Returns:
        `out`. Backward, `out` gets the rounded cotangent.

    Raises:
        ValueError: As in `in_q`.

    Example:
        >>> def loss(out, scale, history):
        ...     return 1.06 * out_qdq(jnp.float32, jnp.float8_e5m2, out, scale, history)
        >>> jax.grad(loss)(2.0, jnp.array(1.0), jnp.zeros(3))
        Array(1., dtype=float32)
    """
    # Checked here, because only the backward pass uses them.
    compute_dtype, q_dtype = wide_dtype("compute_dtype", compute_dtype), format_of("q_dtype", q_dtype).dtype
    return _out_qdq(compute_dtype, q_dtype, wide("out", out), scale_of("scale", scale), history_of(amax_history))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_q(compute_dtype, q_dtype, inp, scale, amax_history):
    return _in_q_forward(compute_dtype, q_dtype, inp, scale, amax_history)[0]


def _in_q_forward(compute_dtype, q_dtype, inp, scale, amax_history):
    state = update_fp8_meta(inp, q_dtype, scale, amax_history)
    return (quantize(inp, q_dtype, state[0], compute_dtype), state[0]), state


_in_q.defvjp(_in_q_forward, lambda compute_dtype, q_dtype, state, cotangents: (None, *state))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _out_dq(dq_type, lhs_scale, rhs_scale, out):
    return dequantize(out, dq_type, to_float32(lhs_scale) * to_float32(rhs_scale))


_out_dq.defvjp(lambda *args: (_out_dq(*args), None), lambda dq_type, _, cotangent: (None, None, cotangent))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_qdq(compute_dtype, q_dtype, inp, scale, amax_history):
    return _in_qdq_forward(compute_dtype, q_dtype, inp, scale, amax_history)[0]


def _in_qdq_forward(compute_dtype, q_dtype, inp, scale, amax_history):
    state = update_fp8_meta(inp, q_dtype, scale, amax_history)
    return quantize_dequantize(inp, q_dtype, state[0], compute_dtype), state


_in_qdq.defvjp(_in_qdq_forward, lambda compute_dtype, q_dtype, state, cotangent: (cotangent, *state))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _out_qdq(compute_dtype, q_dtype, out, scale, amax_history):
    return out


def _out_qdq_backward(compute_dtype, q_dtype, state, cotangent):
    rounded, new_state = _in_qdq_forward(compute_dtype, q_dtype, cotangent, *state)
    return rounded, *new_state


_out_qdq.defvjp(lambda compute_dtype, q_dtype, out, *state: (out, state), _out_qdq_backward)
