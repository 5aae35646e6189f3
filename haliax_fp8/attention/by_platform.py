"""Attention's two passes as primitives: cuDNN's on an NVIDIA GPU, emulated on a CPU, an error elsewhere."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Float32

from .._jax import cudnn_attention
from .._jax.after_partitioning import lower_with_devices
from .._jax.compiled_alone import compile_alone
from .._jax.explicit_axes import aval_of_result
from .._jax.lowered_by_platform import lower_by_platform
from .._jax.mapped_axis import to_front
from . import emulated
from .emulated import Attention, TensorScales


# The cuDNN kernel for Hopper, and JAX, compute gradients for heads of this size only,
_HEAD_DIM = 128

# and for sequences that are multiples of this.
_TILE = 128


def forward(
    query: Array, key: Array, value: Array, scales: Array, *, attention: Attention, differentiated: bool, members: int
) -> tuple[Array, Array, Float32[Array, "*members 2"]]:
    """The forward pass; see `emulated.forward`.

    Args:
        query: As in `emulated.forward`.
        key: As in `emulated.forward`.
        value: As in `emulated.forward`.
        scales: As in `emulated.forward`.
        attention: As in `emulated.forward`.
        differentiated: Whether a gradient follows; without one, the logarithms are not needed.
        members: How many leading axes of every array index members.
    """
    params = {"attention": attention, "differentiated": differentiated, "members": members}
    out, logs, amaxes = forward_p.bind(query, key, value, scales, **params)
    return out, logs, amaxes


def backward(*arrays: Array, attention: Attention, members: int) -> tuple[Array, Array, Array, Array]:
    """The backward pass; see `emulated.backward`.

    Args:
        *arrays: The arrays that `emulated.backward` takes.
        attention: As in `emulated.backward`.
        members: As in `forward`.
    """
    of_query, of_key, of_value, amaxes = backward_p.bind(*arrays, attention=attention, members=members)
    return of_query, of_key, of_value, amaxes


def _emulated_forward(*arrays: Array, attention: Attention, differentiated: bool, members: int) -> Any:
    del differentiated, members
    return emulated.forward(*arrays, attention=attention)


def _emulated_backward(*arrays: Array, attention: Attention, members: int) -> Any:
    del members
    return emulated.backward(*arrays, attention=attention)


# --- cuDNN ------------------------------------------------------------------------------------------------------------


def _on_cuda(of_one: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The cuDNN kernel for each member in turn; or `otherwise`, if emulation is requested."""

    def call(*arrays: Array, attention: Attention, members: int, **params: Any) -> Any:
        if attention.emulate or not attention.rounds:
            return otherwise(*arrays, attention=attention, members=members, **params)
        one = lambda arrays: of_one(*arrays, attention=attention, **params)
        for _ in range(members):
            one = functools.partial(lax.map, one)
        return one(arrays)

    return call


def _cudnn_forward(
    query: Array, key: Array, value: Array, scales: Array, *, attention: Attention, differentiated: bool
):
    by, size = TensorScales(scales, rounds=True), query.shape[-1]
    if differentiated:
        _require_whole_tiles(query, key)
        query, key, value = map(_padded, (query, key, value))
    of_likelihoods = jnp.asarray(emulated.LIKELIHOOD_SCALE, jnp.float32)
    given = [by["query"], by["key"], by["value"], of_likelihoods, 1.0 / of_likelihoods, 1.0 / by["output"]]
    static = {"scale": attention.scale, "is_causal": attention.is_causal, "differentiated": differentiated}
    out, of_weights, of_out, logs = cudnn_attention.fp8_forward((query, key, value), given, **static)
    return out[..., :size], logs, jnp.stack([of_weights, of_out])


def _cudnn_backward(
    query: Array,
    key: Array,
    value: Array,
    output: Array,
    output_grad: Array,
    logs: Array,
    scales: Array,
    *,
    attention: Attention,
):
    by, size = TensorScales(scales, rounds=True), query.shape[-1]
    _require_whole_tiles(query, key)
    operands = tuple(map(_padded, (query, key, value, output, output_grad)))
    back = [by[name] for name in ("query", "key", "value", "weights", "output", "output_grad", "scores_grad")]
    there = [1.0 / by[name] for name in ("weights", "scores_grad", "query_grad", "key_grad", "value_grad")]
    static = {"scale": attention.scale, "is_causal": attention.is_causal}
    *gradients, of_query, of_key, of_value, of_scores = cudnn_attention.fp8_backward(
        operands, logs, [*back, *there], **static
    )
    of_query_data, of_key_data, of_value_data = (x[..., :size] for x in gradients)
    return of_query_data, of_key_data, of_value_data, jnp.stack([of_scores, of_query, of_key, of_value])


def _padded(x: Array) -> Array:
    """Pads heads with zeros to the size that the gradient's cuDNN kernel takes, which changes no score and no amax."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, _HEAD_DIM - x.shape[-1])])


def _require_whole_tiles(query: Array, key: Array) -> None:
    for name, x in (("query", query), ("key", key)):
        if x.shape[-3] % _TILE:
            raise ValueError(
                f"{name} of an Fp8Attention has {x.shape[-3]} tokens, but cuDNN's FP8 attention has gradients for "
                f"multiples of {_TILE} only; pad the sequence, or use jax.nn.dot_product_attention in bfloat16"
            )


def _nowhere_else(*arrays: Array, attention: Attention, **params: Any) -> Any:
    raise ValueError(
        "an Fp8Attention is compiled for a device without cuDNN's FP8 attention, which needs an NVIDIA GPU, Hopper or "
        "newer. Use jax.nn.dot_product_attention, or request emulation with Fp8Attention.init(emulate=True)"
    )


def _elsewhere(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arrays: Array, attention: Attention, **params: Any) -> Any:
        chosen = otherwise if attention.emulate or not attention.rounds else _nowhere_else
        return chosen(*arrays, attention=attention, **params)

    return call


# --- The primitives ---------------------------------------------------------------------------------------------------

forward_p = Primitive("fp8_attention_forward")
backward_p = Primitive("fp8_attention_backward")


def _forward_avals(query: Any, key: Any, value: Any, scales: Any, *, attention: Attention, members: int, **params: Any):
    *batch, tokens, heads, _ = query.shape
    return (
        aval_of_result(query, query.shape, query.dtype),
        aval_of_result(query, (*batch, heads, tokens), jnp.float32),
        aval_of_result(query, (*batch[:members], 2), jnp.float32),
    )


def _backward_avals(*avals: Any, attention: Attention, members: int):
    amaxes = aval_of_result(avals[0], (*avals[0].shape[:members], 4), jnp.float32)
    return (*(aval_of_result(x, x.shape, x.dtype) for x in avals[:3]), amaxes)


def _batch(primitive: Primitive) -> Callable[..., Any]:
    """Examples that are mapped here become members, each with its own amaxes."""

    def rule(arrays: Any, axes: Any, *, members: int, **params: Any) -> Any:
        size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
        arrays = [to_front(x, axis, size, 0) for x, axis in zip(arrays, axes, strict=True)]
        found = primitive.bind(*arrays, members=members + 1, **params)
        return found, [0] * len(found)

    return rule


for _primitive, _emulation, _cudnn, _avals in (
    (forward_p, _emulated_forward, _cudnn_forward, _forward_avals),
    (backward_p, _emulated_backward, _cudnn_backward, _backward_avals),
):
    _primitive.multiple_results = True
    compile_alone(_primitive)
    _primitive.def_abstract_eval(_avals)
    _lowered = functools.partial(mlir.lower_fun, multiple_results=True)
    lower_by_platform(
        _primitive,
        _lowered(_elsewhere(_emulation)),
        cpu=_lowered(_emulation),
        cuda=_lowered(_on_cuda(_cudnn, _emulation)),
    )
    batching.primitive_batchers[_primitive] = _batch(_primitive)
lower_with_devices(forward_p, backward_p)
