"""The forward and the backward pass of attention: quantize, attend, dequantize, and collect amaxes."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .._jax.opaque import opaque
from .._product.names import FP8_ATTENTION
from .._state.record import in_product
from ..recipes.scaling import AbstractScaling
from . import by_platform
from .emulated import Attention, TensorScales, reference
from .state import as_record, scales_of
from .tensors import OPERANDS


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The static arguments of one FP8 attention with its state.

    Args:
        attention: The static arguments of the attention itself.
        scaling: The scaling of all ten tensors.
        out_dtype: The dtype of the output.
        ensemble: How many leading axes of every array index independent members, each with its own state.
    """

    attention: Attention
    scaling: AbstractScaling
    out_dtype: np.dtype
    ensemble: int = 0


class Residuals(NamedTuple):
    """What is kept for the backward pass: FP8 data, and a few numbers.

    Args:
        query: The quantized query.
        key: The quantized key.
        value: The quantized value.
        output: The output as cuDNN rounded it.
        logs: The logarithm of each row's sum.
        measured: The amaxes of the five tensors of the forward pass.
        state: The state that the scales come from.
    """

    query: Array
    key: Array
    value: Array
    output: Array
    logs: Array
    measured: Array
    state: Array


def output(query: Array, key: Array, value: Array, state: Array, spec: AttentionSpec) -> Array:
    """The output, if no gradient is requested."""
    return _forward(query, key, value, in_product(state), spec=spec, differentiated=False)[0]


def forward(query: Array, key: Array, value: Array, state: Array, spec: AttentionSpec) -> tuple[Array, Residuals]:
    """The output, and the residuals of the backward pass."""
    state = in_product(state)
    out, kept = _forward(query, key, value, state, spec=spec, differentiated=True)
    quantized_query, quantized_key, quantized_value, rounded, logs, measured = kept
    return out, Residuals(quantized_query, quantized_key, quantized_value, rounded, logs, measured, state)


@opaque
def _forward(
    query: Array, key: Array, value: Array, state: Array, *, spec: AttentionSpec, differentiated: bool
) -> tuple[Array, tuple[Array, ...]]:
    """The output; all residuals but the state."""
    by = _scales(state, spec)
    operands = dict(zip(OPERANDS, (query, key, value), strict=True))
    with jax.named_scope(FP8_ATTENTION):
        q, k, v = (by.quantize(name, x) for name, x in operands.items())
        out, logs, amaxes = by_platform.forward(
            q, k, v, by.all, attention=spec.attention, differentiated=differentiated, members=spec.ensemble
        )
    result = lax.convert_element_type(by.dequantize("output", out), spec.out_dtype)
    if not differentiated:
        return result, ()
    measured = _measured([*operands.values()], amaxes, spec)
    return result, (q, k, v, out, logs, measured)


@opaque
def backward(
    grad: Array,
    residuals: Residuals,
    *,
    spec: AttentionSpec,
    dtypes: tuple[np.dtype, np.dtype, np.dtype],
    update: bool,
) -> tuple[tuple[Array, Array, Array], Array | None]:
    """The gradients of query, key and value in the given dtypes, and what was measured if that is requested."""
    by = _scales(residuals.state, spec)
    with jax.named_scope(FP8_ATTENTION):
        data = by.quantize("output_grad", grad)
        *found, amaxes = by_platform.backward(
            *residuals[:4], data, residuals.logs, by.all, attention=spec.attention, members=spec.ensemble
        )
    names = ("query_grad", "key_grad", "value_grad")
    gradients = [
        lax.convert_element_type(by.dequantize(name, x), dtype)
        for name, x, dtype in zip(names, found, dtypes, strict=True)
    ]
    of_query, of_key, of_value = gradients
    if not update:
        return (of_query, of_key, of_value), None
    measured = lax.concatenate([residuals.measured, _measured([grad], amaxes, spec)], residuals.measured.ndim - 1)
    return (of_query, of_key, of_value), as_record(measured)


def tangent(tangents: Sequence[Array | None], residuals: Residuals, *, spec: AttentionSpec) -> Array:
    """The output's tangent at the quantized operands, rounding taken as the identity."""
    by = _scales(residuals.state, spec)
    operands = [by.dequantize(name, x) for name, x in zip(OPERANDS, residuals[:3], strict=True)]
    given = [jnp.zeros_like(x) if t is None else t.astype(jnp.float32) for x, t in zip(operands, tangents, strict=True)]
    function = lambda *operands: reference(*operands, attention=spec.attention)
    return jax.jvp(function, tuple(operands), tuple(given))[1].astype(spec.out_dtype)


def _scales(state: Array, spec: AttentionSpec) -> TensorScales:
    return TensorScales(scales_of(state), spec.attention.rounds)


def _measured(
    operands: Sequence[Float[Array, "..."]],
    amaxes: Float32[Array, "*ensemble returned"],
    spec: AttentionSpec,
) -> Float32[Array, "*ensemble all"]:
    """The amaxes of the operands, then the returned ones."""
    found = [
        lax.convert_element_type(
            jnp.max(jnp.abs(x), axis=tuple(range(spec.ensemble, x.ndim)), initial=0.0), jnp.float32
        )
        for x in operands
    ]
    return lax.concatenate([*(lax.expand_dims(x, (x.ndim,)) for x in found), amaxes], amaxes.ndim - 1)
