"""The low-level functions of Flax's guide to FP8, under their Flax names and with their Flax semantics.

To write an FP8 product by hand, `in_q` both operands, multiply with `preferred_element_type`, `out_dq` the result.
Layers should use `Fp8DotGeneral`, which has the backward products too.

Scales multiply to give the value back, `x ≈ data * scale`. Numbers are those of `flax.linen.fp8_ops` bit for bit, in
the corners too: an amax of zero, infinity or NaN is recorded but leaves the scale as it was, and an amax below
`fp8_max / float32_max` makes the scale zero. Three things differ: a scale of one element fits every shape, a scalar
too; the amax of an empty array is zero; and dtypes that cannot be right raise `ValueError`, where Flax fails late or
rounds the state.

A gradient carries the new state: the cotangents of `scale` and `amax_history` are their next values. JAX adds the
cotangents of a value that is used twice. Cast state to `fp32_max_grad` inside the differentiated function, and the
maximum is taken instead. These functions do not know `vmap` over examples with one state for all: it adds the
cotangents too, and refuses `fp32_max_grad` with a `TypeError`. `Fp8DotGeneral` has neither limit.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Shaped

from haliax_fp8._formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, Format, saturating_cast
from haliax_fp8._state import fp32_max_grad, is_max_grad, to_float32, to_max_grad
from haliax_fp8.preflight import check_fp8_call


__all__ = [
    "check_fp8_call",
    "compute_amax_history",
    "compute_scale",
    "dequantize",
    "fp32_max_grad",
    "get_fp8_max",
    "in_q",
    "in_qdq",
    "out_dq",
    "out_qdq",
    "qdq",
    "quantize",
    "quantize_dequantize",
    "update_fp8_meta",
]

_Values = Float[ArrayLike, "*shape"]
_Scale = Shaped[ArrayLike, "..."]  # `Shaped`, as `Float` refuses `fp32_max_grad`.
_History = Shaped[ArrayLike, " length"]
_FORMATS = {format.dtype: format for format in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)}


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
    return jnp.asarray(_format("fp8_dtype", fp8_dtype).max, _wide_dtype("out_dtype", out_dtype))


def quantize(x: _Values, q_dtype: DTypeLike, scale: _Scale, compute_dtype: DTypeLike) -> Float[Array, "*shape"]:
    """Scales down, clips and rounds: `cast(clip(x / scale, -max, max))`, to nearest, ties to even.

    Source: Flax guide, "Current Scaling".

    Args:
        x: Values, 16 bits or more.
        q_dtype: FP8 dtype of the result.
        scale: One element, or a shape that broadcasts to that of `x`.
        compute_dtype: What `scale` is rounded to, and what the division runs in unless `x` is wider.

    Returns:
        Data of dtype `q_dtype`. Infinities become ±max; NaN stays NaN.

    Raises:
        ValueError: For other dtypes, or a scale that does not broadcast.

    Example:
        >>> quantize(jnp.array([0.5, 2.0, 1e6]), jnp.float8_e4m3fn, 2.0, jnp.float32)
        Array([0.25, 1, 448], dtype=float8_e4m3fn)
    """
    format = _format("q_dtype", q_dtype)
    x = _wide("x", x)
    scale = _scale_for(x, scale, _wide_dtype("compute_dtype", compute_dtype))
    with jax.numpy_dtype_promotion("standard"):  # The caller named both dtypes: no accident to report.
        dtype = jnp.result_type(x, compute_dtype)
    return saturating_cast(x.astype(dtype) / scale.astype(dtype), format)


def dequantize(x: _Values, dq_dtype: DTypeLike, scale: _Scale) -> Float[Array, "*shape"]:
    """Gives FP8 data, or a product of them, its scale back: `x * scale`, both cast to `dq_dtype` first.

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
    dq_dtype = _wide_dtype("dq_dtype", dq_dtype)
    x = _floating("x", x)
    return x.astype(dq_dtype) * _scale_for(x, scale, dq_dtype)


def compute_scale(amax: _Scale, scale: _Scale, fp8_max: ArrayLike, margin: int | float = 0) -> Shaped[Array, "..."]:
    """The scale that maps `amax` to `fp8_max / 2**margin`: `1 / (fp8_max / amax / 2**margin)`.

    Both reciprocals belong to the definition: `amax / fp8_max` differs in the last bit for half of all amaxes.
    Source: Flax; TransformerEngine's `update_fp8_metas`, whose scale is the reciprocal of this one.

    Args:
        amax: Largest magnitude, of any shape that broadcasts with `scale`.
        scale: The present scale, kept where `amax` is not positive, infinite or NaN.
        fp8_max: Largest value of the format, see `get_fp8_max`.
        margin: Binades to leave free above `amax`.

    Returns:
        The new scale, float32 or `fp32_max_grad` as `scale` is.

    Raises:
        ValueError: If `scale` is neither, or `amax` is not floating-point.

    Example:
        >>> compute_scale(jnp.array([896.0, 0.0, jnp.inf]), 0.5, 448.0)
        Array([2. , 0.5, 0.5], dtype=float32)
        >>> compute_scale(896.0, 1.0, 448.0, margin=1)
        Array(4., dtype=float32)
    """
    amax, scale = _floating("amax", amax).astype(jnp.float32), _state("scale", scale)
    inverse = (jnp.asarray(fp8_max, jnp.float32) / amax) / 2**margin
    inverse = jnp.where((amax > 0.0) & jnp.isfinite(amax), inverse, 1.0 / to_float32(scale))
    return _like(1.0 / inverse, scale)


def compute_amax_history(x: _Values, amax_history: _History) -> Shaped[Array, " length"]:
    """Records the amax of `x`: `roll(amax_history, -1).at[0].set(max(|x|))`.

    The newest amax is at index 0, the one before it at index -1, then backwards; the oldest, at 1, goes next.
    Source: Flax; arXiv:2209.05433, section 3.2, for the idea.

    Args:
        x: Values; NaN among them is recorded as NaN.
        amax_history: Amaxes of the steps before, float32 or `fp32_max_grad`.

    Returns:
        The new history, with the dtype of the old.

    Raises:
        ValueError: For other dtypes, or a history that is not of shape `(length,)`.

    Example:
        >>> compute_amax_history(jnp.array([-5.0, 2.0]), jnp.array([3.0, 0.0, 1.0]))
        Array([5., 1., 3.], dtype=float32)
    """
    history = _history(amax_history)
    amax = jnp.max(jnp.abs(_floating("x", x)), initial=0).astype(jnp.float32)
    return _like(jnp.roll(to_float32(history), -1).at[0].set(amax), history)


def update_fp8_meta(
    x: _Values, q_dtype: DTypeLike, scale: _Scale, amax_history: _History
) -> tuple[Shaped[Array, "..."], Shaped[Array, " length"]]:
    """One step of delayed scaling: `compute_scale(max(amax_history), scale, ...), compute_amax_history(x, ...)`.

    The scale for `x` comes from the history before it. Source: Flax.

    Args:
        x: The operand of this step.
        q_dtype: FP8 dtype that it will be quantized to.
        scale: The scale before, shape `()` or `(1,)`, float32 or `fp32_max_grad`.
        amax_history: Amaxes of the steps before, float32 or `fp32_max_grad`.

    Returns:
        The new scale and the new history.

    Raises:
        ValueError: As the two functions.

    Example:
        >>> update_fp8_meta(7.0, jnp.float8_e4m3fn, jnp.array(1.0), jnp.array([896.0, 0.0]))
        (Array(2., dtype=float32), Array([  7., 896.], dtype=float32))
    """
    amax = jnp.max(to_float32(_history(amax_history)))
    new_scale = compute_scale(amax, scale, get_fp8_max(q_dtype, jnp.float32))
    return new_scale, compute_amax_history(x, amax_history)


def in_q(
    compute_dtype: DTypeLike, q_dtype: DTypeLike, inp: _Values, scale: _Scale, amax_history: _History
) -> tuple[Float[Array, "*shape"], Shaped[Array, "..."]]:
    """Quantizes an operand with delayed scaling: `quantize` with the scale of `update_fp8_meta`.

    Source: Flax guide, "Delayed Scaling".

    Args:
        compute_dtype: As for `quantize`.
        q_dtype: FP8 dtype of the result.
        inp: The operand.
        scale: As for `update_fp8_meta`.
        amax_history: As for `update_fp8_meta`.

    Returns:
        FP8 data and its scale. Backward, `inp` gets zero: the product's gradient is not in this function.

    Raises:
        ValueError: As `quantize` and `update_fp8_meta`.

    Example:
        >>> in_q(jnp.float32, jnp.float8_e4m3fn, 3.0, jnp.array(1.0), jnp.array([896.0, 0.0]))
        (Array(1.5, dtype=float8_e4m3fn), Array(2., dtype=float32))
    """
    return _in_q(compute_dtype, q_dtype, _wide("inp", inp), _state("scale", scale), _history(amax_history))


def out_dq(dq_type: DTypeLike, lhs_scale: _Scale, rhs_scale: _Scale, out: _Values) -> Float[Array, "*shape"]:
    """Dequantizes a product of quantized operands: `out * (lhs_scale * rhs_scale)`, the scales' product in float32.

    Source: Flax guide, "Delayed Scaling".

    Args:
        dq_type: Dtype of the result, 16 bits or more.
        lhs_scale: The first operand's scale, from `in_q`.
        rhs_scale: The second operand's scale, from `in_q`.
        out: The product, with a `preferred_element_type` of 16 bits or more.

    Returns:
        The dequantized product. Backward, `out` gets the cotangent unscaled, the scales get zero.

    Raises:
        ValueError: For other dtypes.

    Example:
        >>> out_dq(jnp.float32, jnp.array(2.0), jnp.array(0.5), jnp.array([3.0]))
        Array([3.], dtype=float32)
    """
    dq_type = _wide_dtype("dq_type", dq_type)
    # Cast outside the custom rule: the cotangent comes back in the dtype of `out`.
    out = _wide("out", out).astype(dq_type)
    return _out_dq(dq_type, _state("lhs_scale", lhs_scale), _state("rhs_scale", rhs_scale), out)


def quantize_dequantize(
    x: _Values, q_dtype: DTypeLike, scale: _Scale, compute_dtype: DTypeLike
) -> Float[Array, "*shape"]:
    """Rounds to what an FP8 dtype can hold, in the dtype of `x`: `dequantize(quantize(x))`. Also named `qdq`.

    Deprecated: its products run in FP8 only where the compiler recognizes the pattern, which other passes break. Use
    `quantize`, the product, `dequantize`. Source: Flax guide, "Deprecated APIs".

    Args:
        x: Values, 16 bits or more.
        q_dtype: FP8 dtype to round to.
        scale: As for `quantize`.
        compute_dtype: As for `quantize`.

    Raises:
        ValueError: As `quantize`.

    Example:
        >>> quantize_dequantize(jnp.array([1.06, 500.0]), jnp.float8_e4m3fn, 1.0, jnp.float32)
        Array([  1., 448.], dtype=float32)
    """
    x = _wide("x", x)
    return dequantize(quantize(x, q_dtype, scale, compute_dtype), x.dtype, scale)


qdq = quantize_dequantize


def in_qdq(
    compute_dtype: DTypeLike, q_dtype: DTypeLike, inp: _Values, scale: _Scale, amax_history: _History
) -> Float[Array, "*shape"]:
    """Rounds an operand to FP8 with delayed scaling: `quantize_dequantize` with the scale of `update_fp8_meta`.

    Deprecated: use `in_q`, the product, `out_dq`. Source: Flax guide, "Accumulate gradient of FP8 params".

    Args:
        compute_dtype: As for `quantize`.
        q_dtype: FP8 dtype to round to.
        inp: The operand.
        scale: As for `update_fp8_meta`.
        amax_history: As for `update_fp8_meta`.

    Returns:
        `inp` rounded. Backward, `inp` gets the cotangent as it is.

    Raises:
        ValueError: As `in_q`.

    Example:
        >>> def reuse(x, y, scale, history):
        ...     scale, history = scale.astype(fp32_max_grad), history.astype(fp32_max_grad)
        ...     x = in_qdq(jnp.float32, jnp.float8_e4m3fn, x, scale, history)
        ...     return x + in_qdq(jnp.float32, jnp.float8_e4m3fn, y, scale, history)
        >>> jax.grad(reuse, (2, 3))(2.0, 3.0, jnp.array(1.0), jnp.zeros(3))
        (Array(1., dtype=float32), Array([3., 0., 0.], dtype=float32))
    """
    return _in_qdq(compute_dtype, q_dtype, _wide("inp", inp), _state("scale", scale), _history(amax_history))


def out_qdq(
    compute_dtype: DTypeLike, q_dtype: DTypeLike, out: _Values, scale: _Scale, amax_history: _History
) -> Float[Array, "*shape"]:
    """Returns a product as it is, and rounds its cotangent to FP8 with delayed scaling, as `in_qdq` does.

    Deprecated: use `in_q`, the product, `out_dq`. Source: Flax guide, "Deprecated APIs".

    Args:
        compute_dtype: As for `quantize`.
        q_dtype: FP8 dtype to round the cotangent to.
        out: The product.
        scale: As for `update_fp8_meta`, of the cotangent.
        amax_history: As for `update_fp8_meta`, of the cotangent.

    Returns:
        `out`. Backward, `out` gets the cotangent rounded.

    Raises:
        ValueError: As `in_q`.

    Example:
        >>> def loss(out, scale, history):
        ...     return 1.06 * out_qdq(jnp.float32, jnp.float8_e5m2, out, scale, history)
        >>> jax.grad(loss)(2.0, jnp.array(1.0), jnp.zeros(3))
        Array(1., dtype=float32)
    """
    # Checked here, as only the backward pass uses them.
    compute_dtype, q_dtype = _wide_dtype("compute_dtype", compute_dtype), _format("q_dtype", q_dtype).dtype
    return _out_qdq(compute_dtype, q_dtype, _wide("out", out), _state("scale", scale), _history(amax_history))


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


def _dtype(name: str, value: Any) -> np.dtype:
    try:
        return np.dtype("none" if value is None else value)  # NumPy reads None as float64.
    except TypeError as error:
        raise ValueError(f"{name}={value!r} is not a dtype; use one such as jnp.float32") from error


def _format(name: str, value: Any) -> Format:
    dtype = _dtype(name, value)
    if dtype not in _FORMATS:
        raise ValueError(f"{name}={dtype} is not an FP8 dtype; use one of {', '.join(map(str, _FORMATS))}")
    return _FORMATS[dtype]


def _wide_dtype(name: str, value: Any) -> np.dtype:
    dtype = _dtype(name, value)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 16:
        raise ValueError(
            f"{name}={dtype} is not a floating-point dtype of 16 bits or more; use float32, bfloat16 or float16"
        )
    return dtype


def _floating(name: str, value: ArrayLike) -> Array:
    """An array of any floating-point dtype; `fp32_max_grad` comes out as float32."""
    array = value if isinstance(value, Array) else jnp.asarray(value)
    if is_max_grad(array):
        return to_float32(array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name}.dtype={array.dtype} is not floating-point; cast it with {name}.astype(jnp.float32)")
    return array


def _wide(name: str, value: ArrayLike) -> Array:
    array = _floating(name, value)
    _wide_dtype(f"{name}.dtype", array.dtype)
    return array


def _state(name: str, value: ArrayLike) -> Array:
    """A scale or a history: not bfloat16, whose rounding would be an error of up to 0.2 % on every product."""
    array = value if isinstance(value, Array) else jnp.asarray(value, getattr(value, "dtype", jnp.float32))
    if array.dtype != jnp.float32 and not is_max_grad(array):
        raise ValueError(
            f"{name}.dtype={array.dtype}, but scales and amax histories have to be float32 or fp32_max_grad; "
            f"leave them out of casts of the whole model, or cast back with {name}.astype(jnp.float32)"
        )
    return array


def _history(value: ArrayLike) -> Array:
    array = _state("amax_history", value)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(
            f"amax_history.shape={array.shape}, but it has to be (length,) with a length of 1 or more; "
            "start with jnp.zeros(1024), and use jax.vmap for stacked histories"
        )
    return array


def _scale_for(x: Array, value: ArrayLike, dtype: np.dtype) -> Array:
    """A scale in a dtype, and in a shape that broadcasts to that of `x`."""
    scale = _floating("scale", value).astype(dtype)
    if scale.size == 1:
        return scale.reshape(())
    try:
        return jnp.broadcast_to(scale, x.shape)
    except ValueError as error:
        raise ValueError(
            f"scale.shape={scale.shape} does not broadcast to x.shape={x.shape}; use a scale of shape (), or keep the "
            "axes of size 1 (keepdims=True) where the amax is taken"
        ) from error


def _like(value: Array, state: Array) -> Array:
    """float32 in the dtype of a state."""
    return to_max_grad(value) if is_max_grad(state) else value
