"""FP8 attention as a JAX primitive with a linear tangent primitive, like the FP8 product.

    fp8_attention(query, key, value, record)
      jvp       -> fp8_attention_tangent(tangents..., residuals...)    linear in the tangents
      transpose -> the backward pass; the amaxes as the record's cotangent

`_product/primitive.py` explains why these are primitives, and `_state/README.md` how an amax reaches the next scale.
Under `vmap` the mapped axis becomes part of the batch, unless the state is mapped too: then each example is a member of
an ensemble, with its own state.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad
from jaxtyping import Array, Float, Float32

from ..._jax.max_grad import require_differentiated_state, require_transposed_state, to_float32
from ..._jax.meshes import all_varying, aval_of_result
from ..._jax.opaque import opaque
from ..._jax.primitives import define, mapped_in_front, mapped_size, to_front
from ..._state.record import cotangent, in_product
from . import platforms
from .emulated import OPERANDS, TENSORS, AttentionSpec, TensorScales, amax, reference


FP8_ATTENTION: Final = "fp8_attention"
"""The scope of attention in FP8."""


def fp8_attention(
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    record: Array,
    spec: AttentionSpec,
) -> Float[Array, "batch tokens heads head_dim"]:
    """Attention with FP8 products.

    Args:
        query: The queries.
        key: The keys; each head serves the same number of query heads.
        value: The values.
        record: The scales of the ten tensors as `OpState.record` gives them, in float32 or `fp32_max_grad`.
        spec: The static arguments.

    Returns:
        The output in `spec.out_dtype`.
    """
    query, key, value = all_varying(query, key, value)
    return fp8_attention_p.bind(query, key, value, record, spec=spec)


# --- The passes: quantize, attend, dequantize, and collect amaxes -----------------------------------------------------


class Residuals(NamedTuple):
    """What the backward pass needs: FP8 data, and a few numbers.

    Args:
        query: The quantized query.
        key: The quantized key.
        value: The quantized value.
        output: The output as cuDNN rounded it.
        logs: The logarithm of each row's sum.
        amaxes: Those of the five tensors of the forward pass.
        record: The scales of all tensors.
    """

    query: Array
    key: Array
    value: Array
    output: Array
    logs: Array
    amaxes: Array
    record: Array


@opaque
def _forward(
    query: Array, key: Array, value: Array, record: Array, *, spec: AttentionSpec, differentiated: bool
) -> tuple[Array, tuple[Array, ...]]:
    """The output; and all residuals but the record, if a gradient follows."""
    scales = _scales(record, spec)
    with jax.named_scope(FP8_ATTENTION):
        q, k, v = (scales.quantize(name, x) for name, x in zip(OPERANDS, (query, key, value), strict=True))
        data, logs, amaxes = platforms.forward(q, k, v, scales.all, spec=spec, differentiated=differentiated)
    out = lax.convert_element_type(scales.dequantize("output", data), spec.out_dtype)
    if not differentiated:
        return out, ()
    return out, (q, k, v, data, logs, _amaxes([query, key, value], amaxes, spec))


@opaque
def _backward(
    grad: Array, residuals: Residuals, *, spec: AttentionSpec, dtypes: tuple[np.dtype, ...], update: bool
) -> tuple[tuple[Array, ...], Array | None]:
    """The gradients of query, key and value in the given dtypes; and if it is asked for, what was measured."""
    scales, record = _scales(residuals.record, spec), residuals.record
    with jax.named_scope(FP8_ATTENTION):
        data = scales.quantize("output_grad", grad)
        *gradients, amaxes = platforms.backward(*residuals[:4], data, residuals.logs, scales.all, spec=spec)
    gradients = tuple(
        lax.convert_element_type(scales.dequantize(f"{name}_grad", x), dtype)
        for name, x, dtype in zip(OPERANDS, gradients, dtypes, strict=True)
    )
    if not update:
        return gradients, None
    amaxes = [residuals.amaxes, _amaxes([grad], amaxes, spec)]
    # A record is longer than its amaxes; the rest is not read.
    rest = lax.full((*record.shape[:-1], record.shape[-1] - len(TENSORS)), 0.0, np.float32)
    return gradients, lax.concatenate([*amaxes, rest], record.ndim - 1)


def _output_tangent(tangents: Sequence[Array | None], residuals: Residuals, spec: AttentionSpec) -> Array:
    """The output's tangent at the quantized operands, rounding taken as the identity."""
    scales = _scales(residuals.record, spec)
    operands = [scales.dequantize(name, x) for name, x in zip(OPERANDS, residuals[:3], strict=True)]
    pairs = zip(operands, tangents, strict=True)
    tangents = [jnp.zeros_like(x) if t is None else t.astype(jnp.float32) for x, t in pairs]
    function = lambda *operands: reference(*operands, spec=spec)
    return jax.jvp(function, tuple(operands), tuple(tangents))[1].astype(spec.out_dtype)


def _scales(record: Array, spec: AttentionSpec) -> TensorScales:
    scales = lax.slice_in_dim(to_float32(record), 0, len(TENSORS), axis=record.ndim - 1)
    return TensorScales(scales, spec.rounds)


def _amaxes(
    tensors: Sequence[Float[Array, "..."]],
    others: Float32[Array, "*ensemble others"],
    spec: AttentionSpec,
) -> Float32[Array, "*ensemble amaxes"]:
    """The amaxes of tensors, then others."""
    amaxes = [lax.expand_dims(amax(x, spec.ensemble), (spec.ensemble,)) for x in tensors]
    return lax.concatenate([*amaxes, others], spec.ensemble)


# --- The primitives ---------------------------------------------------------------------------------------------------


def _attention(query: Array, key: Array, value: Array, record: Array, *, spec: AttentionSpec) -> Array:
    return _forward(query, key, value, in_product(record), spec=spec, differentiated=False)[0]


def _attention_aval(query: Any, *others: Any, spec: AttentionSpec) -> Any:
    return aval_of_result(query, query.shape, spec.out_dtype)


def _linearize(linear: Sequence[bool], *primals: Any, spec: AttentionSpec) -> Any:
    query, key, value, record = primals
    if any(linear[:3]):
        require_differentiated_state(record, linear[3])
    record = in_product(record)
    out, residuals = _forward(query, key, value, record, spec=spec, differentiated=True)
    bind = lambda residuals, tangents: fp8_attention_tangent_p.bind(
        *tangents, *residuals, spec=spec, linear=tuple(linear)
    )
    return out, [*residuals, record], bind


def _jvp(primals: Any, tangents: Any, *, spec: AttentionSpec) -> Any:
    linear = tuple(type(t) is not ad.Zero for t in tangents)
    out, residuals, bind = _linearize(linear, *primals, spec=spec)
    return out, bind(residuals, [t for t in tangents if type(t) is not ad.Zero])


def _unpack(args: Sequence[Any], linear: tuple[bool, ...]) -> tuple[list[Any], Residuals]:
    """The tangents of query, key, value and record, None where they are zero; and the residuals."""
    count = len(args) - len(Residuals._fields)
    tangents = iter(args[:count])
    return [next(tangents) if is_linear else None for is_linear in linear], Residuals(*args[count:])


def _tangent(*args: Array, spec: AttentionSpec, linear: tuple[bool, ...]) -> Array:
    tangents, residuals = _unpack(args, linear)
    return _output_tangent(tangents[:3], residuals, spec)


def _tangent_aval(*args: Any, spec: AttentionSpec, linear: tuple[bool, ...]) -> Any:
    return _attention_aval(_unpack(args, linear)[1].query, spec=spec)


def _transpose(grad: Any, *args: Any, spec: AttentionSpec, linear: tuple[bool, ...]) -> list[Any]:
    if type(grad) is ad.Zero:
        return [None] * len(args)
    tangents, residuals = _unpack(args, linear)
    if linear[3]:
        require_transposed_state(tangents[3], tangents[:3])
    dtypes = tuple(t.aval.dtype if ad.is_undefined_primal(t) else spec.out_dtype for t in tangents[:3])
    gradients, measured = _backward(grad, residuals, spec=spec, dtypes=dtypes, update=linear[3])
    record_cotangent = None if measured is None else cotangent(measured, tangents[3])
    pairs = zip((*gradients, record_cotangent), tangents, strict=True)
    cotangents = [ct if ad.is_undefined_primal(t) else None for ct, t in pairs if t is not None]
    return cotangents + [None] * len(residuals)


# --- `vmap` -----------------------------------------------------------------------------------------------------------


def _into_batch(x: Array, axis: int | None, size: int, position: int) -> Array:
    """Folds an array's mapped axis into its batch."""
    x = to_front(x, axis, size, position)
    return lax.collapse(x, position, position + 2)


def _out_of_batch(x: Array, size: int, position: int) -> Array:
    """Moves a result's mapped axis to the front, where `platforms.py` puts it too; see `_product/primitive.py`."""
    x = lax.reshape(x, (*x.shape[:position], size, x.shape[position] // size, *x.shape[position + 1 :]))
    return jnp.moveaxis(x, position, 0)


def _with_ensemble(primitive: Primitive, args: Any, axes: Any, *, spec: AttentionSpec, **params: Any) -> Any:
    """Examples with a state each are members of an ensemble."""
    args = mapped_in_front(args, axes)
    return primitive.bind(*args, spec=dataclasses.replace(spec, ensemble=spec.ensemble + 1), **params), 0


def _attention_batch(args: Any, axes: Any, *, spec: AttentionSpec) -> tuple[Array, int]:
    size = mapped_size(args, axes)
    if axes[3] is not None:
        return _with_ensemble(fp8_attention_p, args, axes, spec=spec)
    position = spec.ensemble
    operands = [_into_batch(x, axis, size, position) for x, axis in zip(args[:3], axes[:3], strict=True)]
    return _out_of_batch(fp8_attention_p.bind(*operands, args[3], spec=spec), size, position), 0


def _tangent_batch(args: Any, axes: Any, *, spec: AttentionSpec, linear: tuple[bool, ...]) -> tuple[Array, int]:
    """The batching rule for functions that JAX differentiates first and maps afterwards."""
    size = mapped_size(args, axes)
    (tangents, residuals), (tangent_axes, residual_axes) = (_unpack(x, linear) for x in (args, axes))
    if tangent_axes[3] is not None or residual_axes.record is not None:
        return _with_ensemble(fp8_attention_tangent_p, args, axes, spec=spec, linear=linear)
    position = spec.ensemble
    fold = lambda x, axis: None if x is None else _into_batch(x, axis, size, position)
    amaxes = residuals.amaxes
    if residual_axes.amaxes is not None:
        amaxes = lax.reduce_max(amaxes, (residual_axes.amaxes,))
    tangents = [*map(fold, tangents[:3], tangent_axes[:3]), tangents[3]]
    data = map(fold, residuals[:5], residual_axes[:5])
    args = [*(t for t in tangents if t is not None), *data, amaxes, residuals.record]
    return _out_of_batch(fp8_attention_tangent_p.bind(*args, spec=spec, linear=linear), size, position), 0


fp8_attention_p = define(
    "fp8_attention",
    aval=_attention_aval,
    batch=_attention_batch,
    function=_attention,
    jvp=_jvp,
    linearize=_linearize,
    with_devices=True,
)
fp8_attention_tangent_p = define(
    "fp8_attention_tangent",
    aval=_tangent_aval,
    batch=_tangent_batch,
    function=_tangent,
    transpose=_transpose,
    with_devices=True,
)
