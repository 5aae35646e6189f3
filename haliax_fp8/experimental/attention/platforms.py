"""What each platform runs: cuDNN's fused kernels on an NVIDIA GPU, the emulation on a CPU, an error elsewhere.

JAX's public function for FP8 attention asks a GPU for its compute capability and its version of cuDNN, so it compiles
only on a machine with that GPU. JAX's primitives for the calls need neither. They are bound here directly, and `op.py`
checks the limits that JAX would check. Whether cuDNN supports a call is known only on the device, when the program is
loaded.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float32

from ..._jax.meshes import aval_of_result
from ..._jax.primitives import define, mapped_in_front
from ..._jax.private import needs
from . import emulated
from .emulated import AttentionSpec, TensorScales


# The cuDNN kernel for Hopper, and JAX, compute gradients for heads of this size only,
_HEAD_DIM = 128

# and for sequences that are multiples of this.
_TILE = 128


def forward(
    query: Array, key: Array, value: Array, scales: Array, *, spec: AttentionSpec, differentiated: bool
) -> tuple[Array, Array, Float32[Array, "*ensemble 2"]]:
    """The forward pass; see `emulated.forward`.

    Args:
        query: As in `emulated.forward`.
        key: As in `emulated.forward`.
        value: As in `emulated.forward`.
        scales: As in `emulated.forward`.
        spec: As in `emulated.forward`.
        differentiated: Whether a gradient follows; without one, the logarithms are not needed.
    """
    out, logs, amaxes = forward_p.bind(query, key, value, scales, spec=spec, differentiated=differentiated)
    return out, logs, amaxes


def backward(*arrays: Array, spec: AttentionSpec) -> tuple[Array, Array, Array, Array]:
    """The backward pass; see `emulated.backward`.

    Args:
        *arrays: The arrays that `emulated.backward` takes.
        spec: As in `emulated.backward`.
    """
    query_grad, key_grad, value_grad, amaxes = backward_p.bind(*arrays, spec=spec)
    return query_grad, key_grad, value_grad, amaxes


# --- cuDNN ------------------------------------------------------------------------------------------------------------


# The axes of arrays as rules of partitioning write them. Keys have tokens and heads of their own, `s` and `g`.
_QUERY, _KEY, _LOGS, _NUMBER = "b t h d", "b s g d", "b h t", "w x y z"


def _cudnn_forward(query: Array, key: Array, value: Array, scales: Array, *, spec: AttentionSpec, differentiated: bool):
    """`emulated.forward` by cuDNN, without ensembles; the logarithms are zeros unless a gradient follows."""
    named, size = TensorScales(scales, rounds=True), query.shape[-1]
    if differentiated:
        _require_whole_tiles(query, key)
        query, key, value = map(_padded, (query, key, value))
    likelihood = jnp.asarray(emulated.LIKELIHOOD_SCALE, jnp.float32)
    numbers = [named["query"], named["key"], named["value"], likelihood, 1.0 / likelihood, 1.0 / named["output"]]
    call = _divisible(
        "_dot_product_attention_fp8_fwd_p",
        (_QUERY, _KEY, _KEY, *[_NUMBER] * len(numbers)),
        (_QUERY, _NUMBER, _NUMBER, *[_LOGS] * differentiated),
        scale=spec.scale,
        use_causal_mask=spec.is_causal,
        is_training=differentiated,
    )
    out, weights_amax, output_amax, *logs = call(query, key, value, *map(_as_tensor, numbers))
    if not differentiated:
        batch, tokens, heads, _ = query.shape
        logs = [jnp.zeros((batch, heads, tokens), jnp.float32)]
    return out[..., :size], *logs, _as_vector(weights_amax, output_amax)


def _cudnn_backward(
    query: Array,
    key: Array,
    value: Array,
    output: Array,
    output_grad: Array,
    logs: Array,
    scales: Array,
    *,
    spec: AttentionSpec,
):
    """`emulated.backward` by cuDNN, without ensembles."""
    named, size = TensorScales(scales, rounds=True), query.shape[-1]
    _require_whole_tiles(query, key)
    operands = map(_padded, (query, key, value, output, output_grad))
    # XLA's order, in `GetCudnnFlashAttentionBackwardF8OperationGraph`. JAX 0.11 and 0.12 name them in another one, and
    # hand them on as they come; while all are 1, as in JAX's tests, nobody notices.
    read = [named[name] for name in ("query", "key", "value", "weights", "output", "output_grad", "scores_grad")]
    written = [1.0 / named[name] for name in ("weights", "scores_grad", "query_grad", "key_grad", "value_grad")]
    numbers = [*read, *written]
    call = _divisible(
        "_dot_product_attention_fp8_bwd_p",
        (_QUERY, _KEY, _KEY, _QUERY, _QUERY, _LOGS, *[_NUMBER] * len(numbers)),
        (_QUERY, _KEY, _KEY, *[_NUMBER] * 4),
        scale=spec.scale,
        use_causal_mask=spec.is_causal,
    )
    *gradients, query_amax, key_amax, value_amax, scores_amax = call(*operands, logs, *map(_as_tensor, numbers))
    query_grad, key_grad, value_grad = (x[..., :size] for x in gradients)
    return query_grad, key_grad, value_grad, _as_vector(scores_amax, query_amax, key_amax, value_amax)


def _padded(x: Array) -> Array:
    """Pads heads with zeros to the size that the gradient's cuDNN kernel takes, which changes no score and no amax."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, _HEAD_DIM - x.shape[-1])])


def _as_tensor(number: Float32[Array, ""]) -> Float32[Array, "1 1 1 1"]:
    return lax.reshape(number, (1, 1, 1, 1))


def _as_vector(*numbers: Float32[Array, "1 1 1 1"]) -> Float32[Array, " numbers"]:
    return jnp.stack([lax.reshape(x, ()) for x in numbers])


def _require_whole_tiles(query: Array, key: Array) -> None:
    for name, x in (("query", query), ("key", key)):
        if x.shape[-3] % _TILE:
            raise ValueError(
                f"{name} of an Fp8Attention has {x.shape[-3]} tokens, but cuDNN's FP8 attention has gradients for "
                f"multiples of {_TILE} only; pad the sequence, or use jax.nn.dot_product_attention in bfloat16"
            )


# One function for all calls with the same arguments, so that JAX lowers the layers of a model once.
@functools.cache
def _divisible(
    primitive: str, operands: tuple[str, ...], results: tuple[str, ...], **params: Any
) -> Callable[..., Sequence[Array]]:
    """A call of cuDNN that XLA may divide along batch and heads; its amaxes are those of all devices.

    JAX's own rule for these calls returns each device's amaxes as if they were those of all devices.

    Args:
        primitive: The name of JAX's private primitive.
        operands: The axes of each argument.
        results: The axes of each result; those that are numbers are amaxes.
        **params: The primitive's parameters, but for the layout.
    """

    def call(*arrays: Array) -> Sequence[Array]:
        bind, layout = _private(primitive)
        return bind(*arrays, **params, layout=layout)

    def partition(mesh: Any, shapes: Any, _: Any) -> tuple[Any, ...]:
        batch, _, heads, *_ = [*shapes[0].sharding.spec, None, None, None]
        if shapes[1].shape[2] % math.prod(mesh.shape[name] for name in _names(heads)):
            heads = None  # Keys have fewer heads.
        divided_by = {"b": batch, "h": heads, "g": heads}
        sharding = lambda axes: NamedSharding(mesh, P(*(divided_by.get(name) for name in axes.split())))
        names = (*_names(batch), *_names(heads))

        def on_each(*arrays: Array) -> Sequence[Array]:
            pairs = zip(call(*arrays), results, strict=True)
            return [lax.pmax(x, names) if names and axes == _NUMBER else x for x, axes in pairs]

        return mesh, on_each, list(map(sharding, results)), tuple(map(sharding, operands))

    divided = custom_partitioning(call)
    divided.def_partition(
        partition=partition,
        sharding_rule=f"{', '.join(operands)} -> {', '.join(results)}",
        need_replication_factors=("t", "d", "s", "w", "x", "y", "z"),  # in the order of the rule
    )
    return divided


def _names(spec: Any) -> tuple[Any, ...]:
    """The mesh axes that divide an axis of an array."""
    return spec if isinstance(spec, tuple) else () if spec is None else (spec,)


def _private(primitive: str) -> tuple[Callable[..., Any], int]:
    """JAX's private primitive of a call, and cuDNN's number for the layout `[batch, tokens, heads, head_dim]`."""
    with needs("Fp8Attention on a GPU"):
        from jax._src.cudnn import fused_attention_stablehlo

        return getattr(fused_attention_stablehlo, primitive).bind, fused_attention_stablehlo.AttentionLayout.BTNH.value


# --- The primitives ---------------------------------------------------------------------------------------------------


def _emulated_forward(*arrays: Array, spec: AttentionSpec, differentiated: bool) -> Any:
    del differentiated
    return emulated.forward(*arrays, spec=spec)


def _on_cuda(cudnn: Callable[..., Any], emulation: Callable[..., Any]) -> Callable[..., Any]:
    """The cuDNN kernel for each member of an ensemble in turn; the emulation where it is asked for."""

    def call(*arrays: Array, spec: AttentionSpec, **params: Any) -> Any:
        if spec.emulate or not spec.rounds:
            return emulation(*arrays, spec=spec, **params)
        one = lambda arrays: cudnn(*arrays, spec=spec, **params)
        for _ in range(spec.ensemble):
            one = functools.partial(lax.map, one)
        return one(arrays)

    return call


def _elsewhere(emulation: Callable[..., Any]) -> Callable[..., Any]:
    """The emulation where it is asked for; else an error."""

    def call(*arrays: Array, spec: AttentionSpec, **params: Any) -> Any:
        if spec.emulate or not spec.rounds:
            return emulation(*arrays, spec=spec, **params)
        raise ValueError(
            "an Fp8Attention is compiled for a device without cuDNN's FP8 attention, which needs an NVIDIA GPU, Hopper "
            "or newer. Use jax.nn.dot_product_attention, or request emulation with Fp8Attention.init(emulate=True)"
        )

    return call


def _forward_avals(query: Any, key: Any, value: Any, scales: Any, *, spec: AttentionSpec, differentiated: bool):
    *batch, tokens, heads, _ = query.shape
    return (
        aval_of_result(query, query.shape, query.dtype),
        aval_of_result(query, (*batch, heads, tokens), jnp.float32),
        aval_of_result(query, (*batch[: spec.ensemble], 2), jnp.float32),
    )


def _backward_avals(*avals: Any, spec: AttentionSpec):
    amaxes = aval_of_result(avals[0], (*avals[0].shape[: spec.ensemble], 4), jnp.float32)
    return (*(aval_of_result(x, x.shape, x.dtype) for x in avals[:3]), amaxes)


def _defined(name: str, avals: Callable[..., Any], emulation: Callable[..., Any], cudnn: Callable[..., Any]) -> Any:
    """A primitive that is known only where it is lowered.

    Examples that are mapped here become members of an ensemble, each with its own amaxes.
    """

    def batch(arrays: Any, axes: Any, *, spec: AttentionSpec, **params: Any) -> Any:
        more = dataclasses.replace(spec, ensemble=spec.ensemble + 1)
        results = primitive.bind(*mapped_in_front(arrays, axes), spec=more, **params)
        return results, [0] * len(results)

    lowered = functools.partial(mlir.lower_fun, multiple_results=True)
    primitive = define(
        name,
        aval=avals,
        batch=batch,
        lower=lowered(_elsewhere(emulation)),
        cpu=lowered(emulation),
        cuda=lowered(_on_cuda(cudnn, emulation)),
        multiple_results=True,
        with_devices=True,
    )
    return primitive


forward_p = _defined("fp8_attention_forward", _forward_avals, _emulated_forward, _cudnn_forward)
backward_p = _defined("fp8_attention_backward", _backward_avals, emulated.backward, _cudnn_backward)
