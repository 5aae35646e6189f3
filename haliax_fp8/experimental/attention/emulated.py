"""Attention with the roundings of the FP8 cuDNN kernels, in plain JAX, which keeps every score in memory.

    likely   = exp(scale * q k^T - highest of the row)     rounded with a scale of 1/448, as none exceeds 1
    output   = likely v / rowsum(likely)                   rounded with the scale of `output`; the sum is of float32
    weights  = likely / rowsum(likely)                     rounded with the scale of `weights`
    dv       = weights^T do                                rounded
    dscores  = (do v^T - rowsum(do * o)) * weights * scale rounded; `weights` here in float32
    dq, dk   = dscores k, dscores^T q                      rounded

Everything between roundings is in float32, and so is the sum over the query heads that share a key. The amaxes are
those of weights, not of `likely`.

References:
    cuDNN's documentation of SDPA in FP8; cudnn-frontend, `scaled_dot_product_flash_attention` and `sdpa_fp8_bwd`, for
    what is rounded, with which scale, and where amaxes are taken. The documentation says that the forward pass rounds
    weights. cuDNN 9.19 on an H200 rounds `likely`, as a softmax in tiles has to; it saturates where that times the
    reciprocal scale exceeds 448.
"""

import dataclasses
from typing import Final

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from ..._jax.xla import force_cast
from ..._numerics.quantized_array import divide_by
from ...formats import E4M3


OPERANDS: Final = ("query", "key", "value")
"""The inputs of attention."""

TENSORS: Final = (
    # Of the forward pass; `weights` is the softmax of the scores.
    *(*OPERANDS, "weights", "output"),
    # Of the backward pass.
    *("output_grad", "scores_grad", "query_grad", "key_grad", "value_grad"),
)
"""The ten tensors that have a scale, in the order in which state stores them."""

LIKELIHOOD_SCALE = 1.0 / E4M3.max
"""With which the forward pass rounds the exponential of a score, which is at most 1."""


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The static arguments of one attention.

    Args:
        scale: Multiplies the scores.
        is_causal: Whether a query sees only keys up to its own position.
        out_dtype: The dtype of the output.
        rounds: Whether tensors are rounded to FP8; if not, scales are not used.
        emulate: Whether to emulate on every device, even those that have the cuDNN kernels.
        ensemble: How many leading axes of every array index members of an ensemble, each with its own state.
    """

    scale: float
    is_causal: bool
    out_dtype: np.dtype
    rounds: bool = True
    emulate: bool = False
    ensemble: int = 0


@dataclasses.dataclass(frozen=True)
class TensorScales:
    """The scales of the ten tensors by name.

    Args:
        all: float32, `[*ensemble, 10]`.
        rounds: Whether tensors are rounded at all.
    """

    all: Float32[Array, "*ensemble 10"]
    rounds: bool

    def __getitem__(self, name: str) -> Float32[Array, "*ensemble"]:
        return lax.index_in_dim(self.all, TENSORS.index(name), self.all.ndim - 1, keepdims=False)

    def over(self, name: str, x: Array) -> Float32[Array, "..."]:
        """The scale of a tensor, shaped to multiply an array."""
        return lax.expand_dims(self[name], range(self.all.ndim - 1, x.ndim))

    def quantize(self, name: str, x: Float[Array, "..."]) -> Array:
        """The data of a tensor in FP8; the tensor in float32 if nothing is rounded."""
        return divide_by(x, self.over(name, x), E4M3).data if self.rounds else x.astype(jnp.float32)

    def dequantize(self, name: str, data: Array) -> Float32[Array, "..."]:
        """The inverse of `quantize`, up to rounding."""
        x = force_cast(data).astype(jnp.float32) if self.rounds else data
        return x * self.over(name, x) if self.rounds else x

    def rounded(self, name: str, x: Float32[Array, "..."]) -> Float32[Array, "..."]:
        """A tensor after rounding to FP8 and back."""
        return self.dequantize(name, self.quantize(name, x))


def forward(
    query: Array, key: Array, value: Array, scales: Float32[Array, "*ensemble 10"], *, spec: AttentionSpec
) -> tuple[Array, Array, Float32[Array, "*ensemble 2"]]:
    """The output's data, the logarithms that the gradient needs, and the amaxes of weights and output.

    Args:
        query: Its data, `[*ensemble, batch, tokens, heads, head_dim]`.
        key: Its data; each head may serve several heads of the query.
        value: Its data, with the heads of the key.
        scales: The scales of all tensors.
        spec: The static arguments.
    """
    named = TensorScales(scales, spec.rounds)
    q, k, v = (named.dequantize(name, x) for name, x in zip(OPERANDS, (query, key, value), strict=True))
    scores = _scores(q, k, spec)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    likely = jnp.exp(scores - highest)
    total = jnp.sum(likely, axis=-1, keepdims=True)
    logs, weights = highest + jnp.log(total), likely / total
    if spec.rounds:
        likelihood_scale = jnp.full((1,) * likely.ndim, LIKELIHOOD_SCALE, jnp.float32)
        data = divide_by(likely, likelihood_scale, E4M3).data
        likely = force_cast(data).astype(jnp.float32) * likelihood_scale
    # Queries first, as in the output.
    out = _einsum("...bhgts,...bshd->...bthgd", likely, v) / jnp.moveaxis(total, -2, -4)
    out = jnp.reshape(out, query.shape)
    amaxes = jnp.stack([amax(x, scales.ndim - 1) for x in (weights, out)], axis=-1)
    return named.quantize("output", out), jnp.reshape(logs, (*query.shape[:-3], -1, query.shape[-3])), amaxes


def backward(
    query: Array,
    key: Array,
    value: Array,
    output: Array,
    output_grad: Array,
    logs: Float32[Array, "*ensemble batch heads tokens"],
    scales: Float32[Array, "*ensemble 10"],
    *,
    spec: AttentionSpec,
) -> tuple[Array, Array, Array, Float32[Array, "*ensemble 4"]]:
    """The data of the gradients of query, key and value; the amaxes of the gradients of scores, query, key and value.

    Args:
        query: As in the forward pass.
        key: As in the forward pass.
        value: As in the forward pass.
        output: As the forward pass returned it.
        output_grad: The data of its gradient.
        logs: As the forward pass returned them.
        scales: The scales of all tensors.
        spec: The static arguments.
    """
    named = TensorScales(scales, spec.rounds)
    data = {"query": query, "key": key, "value": value, "output": output, "output_grad": output_grad}
    q, k, v, o, do = (named.dequantize(name, x) for name, x in data.items())
    scores = _scores(q, k, spec)
    weights = jnp.exp(scores - jnp.reshape(logs, (*scores.shape[:-1], 1)))
    q_groups, o_groups, do_groups = (_in_groups(x, k) for x in (q, o, do))
    dv = _einsum("...bhgts,...bthgd->...bshd", named.rounded("weights", weights), do_groups)
    dweights = _einsum("...bthgd,...bshd->...bhgts", do_groups, v)
    along = jnp.moveaxis(jnp.sum(do_groups * o_groups, axis=-1), -3, -1)
    dscores = (dweights - along[..., None]) * weights * np.float32(spec.scale)
    rounded = named.rounded("scores_grad", dscores)
    dq = jnp.reshape(_einsum("...bhgts,...bshd->...bthgd", rounded, k), query.shape)
    dk = _einsum("...bhgts,...bthgd->...bshd", rounded, q_groups)
    amaxes = jnp.stack([amax(x, scales.ndim - 1) for x in (dscores, dq, dk, dv)], axis=-1)
    return named.quantize("query_grad", dq), named.quantize("key_grad", dk), named.quantize("value_grad", dv), amaxes


def reference(
    query: Float32[Array, "*ensemble batch tokens heads head_dim"],
    key: Float32[Array, "*ensemble batch keys kv_heads head_dim"],
    value: Float32[Array, "*ensemble batch keys kv_heads head_dim"],
    *,
    spec: AttentionSpec,
) -> Float32[Array, "*ensemble batch tokens heads head_dim"]:
    """Attention in float32, without rounding to FP8."""
    scores = _scores(query, key, spec)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.reshape(_einsum("...bhgts,...bshd->...bthgd", weights, value), query.shape)


def amax(x: Float[Array, "..."], ensemble: int) -> Float32[Array, "*ensemble"]:
    """The largest magnitude of each member of an ensemble.

    Args:
        x: An array.
        ensemble: How many leading axes index members.
    """
    largest = jnp.max(jnp.abs(x), axis=tuple(range(ensemble, x.ndim)), initial=0.0)
    return lax.convert_element_type(largest, jnp.float32)


def _in_groups(x: Array, key: Array) -> Array:
    """The array with one axis for the heads of the key, and one for the query heads that each serves."""
    heads = key.shape[-2]
    return jnp.reshape(x, (*x.shape[:-2], heads, x.shape[-2] // heads, x.shape[-1]))


def _scores(query: Array, key: Array, spec: AttentionSpec) -> Float32[Array, "*batch heads group tokens keys"]:
    scores = _einsum("...bthgd,...bshd->...bhgts", _in_groups(query, key), key) * np.float32(spec.scale)
    if not spec.is_causal:
        return scores
    query_index, key_index = (lax.broadcasted_iota(jnp.int32, scores.shape[-2:], axis) for axis in (0, 1))
    is_seen = lax.le(key_index, query_index)
    is_seen = lax.broadcast_in_dim(is_seen, scores.shape, (scores.ndim - 2, scores.ndim - 1))
    return jnp.where(is_seen, scores, np.float32(-np.inf))


def _einsum(subscripts: str, *operands: Array) -> Float32[Array, "..."]:
    return jnp.einsum(subscripts, *operands, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
