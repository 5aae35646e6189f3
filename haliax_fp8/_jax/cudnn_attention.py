"""cuDNN's fused attention in FP8 and in bfloat16, which never stores the scores, as JAX's own custom calls.

JAX's public functions ask a GPU for its compute capability and its version of cuDNN, and so compile only on a machine
with that GPU. The calls themselves need neither, so they are made here directly; their limits, which JAX would check,
are checked by callers. Whether cuDNN supports a call is known only on the device, when the program is loaded.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Float32

from .private import needs


# JAX passes it to its own checks, all of which accept newer versions.
_VERSION = 91000


class _Cudnn(NamedTuple):
    """The private names of JAX that are used here."""

    attention: Callable[..., Array]
    forward: Primitive
    backward: Primitive
    causal: Any
    no_mask: Any
    layout: int


@functools.cache
def _cudnn() -> _Cudnn:
    with needs("attention by cuDNN"):
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        return _Cudnn(
            cudnn._dot_product_attention,
            cudnn._dot_product_attention_fp8_fwd_p,
            cudnn._dot_product_attention_fp8_bwd_p,
            cudnn.MaskType.CAUSAL,
            cudnn.MaskType.NO_MASK,
            # `[batch, tokens, heads, head_dim]`.
            cudnn.AttentionLayout.BTNH.value,
        )


def fp8_forward(
    operands: Sequence[Float[Array, "batch _ _ head_dim"]],
    scales: Sequence[Float32[Array, ""]],
    *,
    scale: float,
    is_causal: bool,
    differentiated: bool,
) -> tuple[Array, Array, Array, Array]:
    """The output in FP8, the amaxes of the softmax weights and the output, and the logarithms that the gradient needs.

    Args:
        operands: Query, key and value in E4M3.
        scales: The scales of query, key, value and weights; then the reciprocal scales with which weights and output
            are quantized.
        scale: Multiplies the scores.
        is_causal: Whether a query sees only keys up to its own position.
        differentiated: Whether a gradient follows. Without one, the logarithms are zeros.
    """
    query = operands[0]
    numbers = [lax.reshape(x, (1, 1, 1, 1)) for x in scales]
    found = _fp8_forward(*operands, *numbers, scale, is_causal, differentiated)
    batch, tokens, heads, _ = query.shape
    logs = found[3] if differentiated else jnp.zeros((batch, heads, tokens), jnp.float32)
    return found[0], lax.reshape(found[1], ()), lax.reshape(found[2], ()), logs


def fp8_backward(
    operands: Sequence[Float[Array, "batch _ _ head_dim"]],
    logs: Float32[Array, "batch heads tokens"],
    scales: Sequence[Float32[Array, ""]],
    *,
    scale: float,
    is_causal: bool,
) -> tuple[Array, ...]:
    """The gradients of query, key and value in FP8, their amaxes, and the amax of the scores' gradient.

    Args:
        operands: Query, key, value, output and the output's gradient in E4M3.
        logs: From the forward pass.
        scales: The scales of query, key, value, weights, output, the output's gradient and scores' gradients; then the
            reciprocal scales with which weights and the gradients of scores, query, key and value are quantized. That
            is XLA's order, in `GetCudnnFlashAttentionBackwardF8OperationGraph`. JAX 0.11 and 0.12 name them in another
            one, and hand them on as they come; while all are 1, as in JAX's tests, nobody notices.
        scale: As in the forward pass.
        is_causal: As in the forward pass.
    """
    numbers = [lax.reshape(x, (1, 1, 1, 1)) for x in scales]
    *gradients, of_query, of_key, of_value, of_scores = _fp8_backward(*operands, logs, *numbers, scale, is_causal)
    return *gradients, *(lax.reshape(x, ()) for x in (of_query, of_key, of_value, of_scores))


def attention(
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    *,
    scale: float,
    is_causal: bool,
) -> Float[Array, "batch tokens heads head_dim"]:
    """`jax.nn.dot_product_attention(implementation="cudnn")` for bfloat16 or float16, compiled without a device.

    Args:
        query: The queries.
        key: The keys.
        value: The values.
        scale: Multiplies the scores.
        is_causal: Whether a query sees only keys up to its own position.
    """
    cudnn, none = _cudnn(), jnp.zeros(0, query.dtype)
    empty = ("bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v")
    static: dict[str, Any] = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": cudnn.causal if is_causal else cudnn.no_mask,
        "layout": cudnn.layout,
        "sliding_window_length": None,
        "cudnn_version": _VERSION,
        "return_residual": False,
    }
    # JAX 0.11 has no functions of scores.
    if "score_mod" in inspect.signature(cudnn.attention).parameters:
        static |= {"score_mod_args": (), "score_mod": None}
    return cudnn.attention(query, key, value, **dict.fromkeys(empty, none), **static)


# --- Divided over devices ---------------------------------------------------------------------------------------------

# JAX's own rule for these calls returns each device's amaxes as if they were those of all devices.


def _over_batch_and_heads(
    call: Callable[..., Sequence[Array]], results: str, *, operands: int, extra: int, scalars: int, amaxes: slice
) -> Callable[..., Sequence[Array]]:
    """A call that XLA may divide along batch and heads; its amaxes are those of all devices.

    Args:
        call: Takes arrays, then static arguments.
        results: The axes of its results, one letter each.
        operands: The number of arrays that come first: query, key and value, then others shaped like the query.
        extra: The number of static arguments.
        scalars: The number of scales.
        amaxes: Which results are amaxes.
    """
    arrays = ["b t h d", "b s g d", "b s g d", "b t h d", "b t h d", "b h t"][:operands]
    rule = f"{', '.join([*arrays, *['w x y z'] * scalars])} -> {results}"
    static = tuple(range(operands + scalars, operands + scalars + extra))
    divided = custom_partitioning(call, static_argnums=static)

    def partition(*args: Any) -> tuple[Any, ...]:
        *given, mesh, shapes, _ = args
        batch, _, heads, *_ = [*shapes[0].sharding.spec, None, None, None]
        if shapes[1].shape[2] % math.prod(mesh.shape[name] for name in _names(heads)):
            heads = None  # Keys have fewer heads.
        divided_by = {"b": batch, "h": heads, "g": heads}
        sharding = lambda axes: NamedSharding(mesh, P(*(divided_by.get(name) for name in axes.split())))
        names = (*_names(batch), *_names(heads))

        def on_each(*arrays: Array) -> Sequence[Array]:
            found = list(call(*arrays, *given))
            found[amaxes] = [lax.pmax(x, names) if names else x for x in found[amaxes]]
            return found

        inputs, out = ([sharding(axes) for axes in side.split(", ")] for side in rule.split(" -> "))
        return mesh, on_each, out, tuple(inputs)

    divided.def_partition(
        partition=partition,
        sharding_rule=rule,
        need_replication_factors=("t", "d", "s", "w", "x", "y", "z"),  # in the order of the rule
    )
    return divided


def _names(spec: Any) -> tuple[Any, ...]:
    """The mesh axes that divide an axis of an array."""
    return spec if isinstance(spec, tuple) else () if spec is None else (spec,)


def _forward_call(*args: Any) -> Sequence[Array]:
    *arrays, scale, is_causal, differentiated = args
    cudnn = _cudnn()
    params = {"scale": scale, "use_causal_mask": is_causal, "layout": cudnn.layout, "is_training": differentiated}
    return cudnn.forward.bind(*arrays, **params)


def _backward_call(*args: Any) -> Sequence[Array]:
    *arrays, scale, is_causal = args
    cudnn = _cudnn()
    return cudnn.backward.bind(*arrays, scale=scale, use_causal_mask=is_causal, layout=cudnn.layout)


_AMAX = "w x y z"
_forward = functools.partial(_over_batch_and_heads, _forward_call, operands=3, extra=3, scalars=6, amaxes=slice(1, 3))
_with_logs = _forward(f"b t h d, {_AMAX}, {_AMAX}, b h t")
_without_logs = _forward(f"b t h d, {_AMAX}, {_AMAX}")


def _fp8_forward(*args: Any) -> Sequence[Array]:
    return (_with_logs if args[-1] else _without_logs)(*args)


_fp8_backward = _over_batch_and_heads(
    _backward_call,
    ", ".join(["b t h d", "b s g d", "b s g d", *[_AMAX] * 4]),
    operands=6,
    extra=2,
    scalars=12,
    amaxes=slice(3, 7),
)
