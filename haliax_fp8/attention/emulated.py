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

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .._jax.xla import actually_rounded
from .._numerics.formats import E4M3
from .._numerics.quantized_array import divide_by
from .tensors import TENSORS


LIKELIHOOD_SCALE = 1.0 / E4M3.max
"""With which the forward pass rounds the exponential of a score, which is at most 1."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """The static arguments of one attention.

    Args:
        scale: Multiplies the scores.
        is_causal: Whether a query sees only keys up to its own position.
        rounds: Whether tensors are rounded to FP8; if not, scales are not used.
        emulate: Whether to emulate on every device, even those that have the cuDNN kernels.
    """

    scale: float
    is_causal: bool
    rounds: bool = True
    emulate: bool = False


@dataclasses.dataclass(frozen=True)
class TensorScales:
    """The scales of the ten tensors by name.

    Args:
        all: float32, `[*members, 10]`.
        rounds: Whether tensors are rounded at all.
    """

    all: Float32[Array, "*members 10"]
    rounds: bool

    def __getitem__(self, name: str) -> Float32[Array, "*members"]:
        return lax.index_in_dim(self.all, TENSORS.index(name), self.all.ndim - 1, keepdims=False)

    def over(self, name: str, x: Array) -> Float32[Array, "..."]:
        """The scale of a tensor, shaped to multiply an array."""
        return lax.expand_dims(self[name], range(self.all.ndim - 1, x.ndim))

    def quantize(self, name: str, x: Float[Array, "..."]) -> Array:
        """The data of a tensor in FP8; the tensor in float32 if nothing is rounded."""
        return divide_by(x, self.over(name, x), E4M3).data if self.rounds else x.astype(jnp.float32)

    def dequantize(self, name: str, data: Array) -> Float32[Array, "..."]:
        x = actually_rounded(data).astype(jnp.float32) if self.rounds else data
        return x * self.over(name, x) if self.rounds else x

    def rounded(self, name: str, x: Float32[Array, "..."]) -> Float32[Array, "..."]:
        """A tensor after rounding to FP8 and back."""
        return self.dequantize(name, self.quantize(name, x))


def forward(
    query: Array, key: Array, value: Array, scales: Float32[Array, "*members 10"], *, attention: Attention
) -> tuple[Array, Array, Float32[Array, "*members 2"]]:
    """The output's data, the logarithms that the gradient needs, and the amaxes of weights and output.

    Args:
        query: Its data, `[*members, batch, tokens, heads, head_dim]`.
        key: Its data; each head may serve several heads of the query.
        value: Its data, with the heads of the key.
        scales: The scales of all tensors.
        attention: The static arguments.
    """
    by = TensorScales(scales, rounds=attention.rounds)
    members = scales.ndim - 1
    q, k, v = (by.dequantize(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    scores = _scores(q, k, attention)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    likely = jnp.exp(scores - highest)
    total = jnp.sum(likely, axis=-1, keepdims=True)
    logs, weights = highest + jnp.log(total), likely / total
    if by.rounds:
        of_likelihoods = jnp.full((1,) * likely.ndim, LIKELIHOOD_SCALE, jnp.float32)
        rounded = divide_by(likely, of_likelihoods, E4M3).data
        likely = actually_rounded(rounded).astype(jnp.float32) * of_likelihoods
    # Queries first, as in the output.
    out = _einsum("...bhgts,...bshd->...bthgd", likely, v) / jnp.moveaxis(total, -2, -4)
    out = jnp.reshape(out, query.shape)
    amaxes = jnp.stack([_amax(weights, members), _amax(out, members)], axis=-1)
    return by.quantize("output", out), jnp.reshape(logs, (*query.shape[:-3], -1, query.shape[-3])), amaxes


def backward(
    query: Array,
    key: Array,
    value: Array,
    output: Array,
    output_grad: Array,
    logs: Float32[Array, "*members batch heads tokens"],
    scales: Float32[Array, "*members 10"],
    *,
    attention: Attention,
) -> tuple[Array, Array, Array, Float32[Array, "*members 4"]]:
    """The data of the gradients of query, key and value; the amaxes of the gradients of scores, query, key and value.

    Args:
        query: As in the forward pass.
        key: As in the forward pass.
        value: As in the forward pass.
        output: As the forward pass returned it.
        output_grad: The data of its gradient.
        logs: As the forward pass returned them.
        scales: The scales of all tensors.
        attention: The static arguments.
    """
    by = TensorScales(scales, rounds=attention.rounds)
    members = scales.ndim - 1
    named = {"query": query, "key": key, "value": value, "output": output, "output_grad": output_grad}
    q, k, v, o, g = (by.dequantize(name, x) for name, x in named.items())
    scores = _scores(q, k, attention)
    weights = jnp.exp(scores - jnp.reshape(logs, (*scores.shape[:-1], 1)))
    in_groups = lambda x: _in_groups(x, k)
    of_value = _einsum("...bhgts,...bthgd->...bshd", by.rounded("weights", weights), in_groups(g))
    of_weights = _einsum("...bthgd,...bshd->...bhgts", in_groups(g), v)
    along = jnp.moveaxis(jnp.sum(in_groups(g) * in_groups(o), axis=-1), -3, -1)
    of_scores = (of_weights - along[..., None]) * weights * np.float32(attention.scale)
    rounded = by.rounded("scores_grad", of_scores)
    of_query = jnp.reshape(_einsum("...bhgts,...bshd->...bthgd", rounded, k), query.shape)
    of_key = _einsum("...bhgts,...bthgd->...bshd", rounded, in_groups(q))
    measured = [of_scores, of_query, of_key, of_value]
    gradients = {"query_grad": of_query, "key_grad": of_key, "value_grad": of_value}
    of_query, of_key, of_value = (by.quantize(name, x) for name, x in gradients.items())
    return of_query, of_key, of_value, jnp.stack([_amax(x, members) for x in measured], axis=-1)


def reference(
    query: Float32[Array, "*members batch tokens heads head_dim"],
    key: Float32[Array, "*members batch keys kv_heads head_dim"],
    value: Float32[Array, "*members batch keys kv_heads head_dim"],
    *,
    attention: Attention,
) -> Float32[Array, "*members batch tokens heads head_dim"]:
    """Attention in float32, without rounding to FP8."""
    scores = _scores(query, key, attention)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.reshape(_einsum("...bhgts,...bshd->...bthgd", weights, value), query.shape)


def _in_groups(x: Array, key: Array) -> Array:
    """The array with one axis for the heads of the key, and one for the query heads that each serves."""
    heads = key.shape[-2]
    return jnp.reshape(x, (*x.shape[:-2], heads, x.shape[-2] // heads, x.shape[-1]))


def _scores(query: Array, key: Array, attention: Attention) -> Float32[Array, "*batch heads group tokens keys"]:
    scores = _einsum("...bthgd,...bshd->...bhgts", _in_groups(query, key), key) * np.float32(attention.scale)
    if not attention.is_causal:
        return scores
    of_query, of_key = (lax.broadcasted_iota(jnp.int32, scores.shape[-2:], axis) for axis in (0, 1))
    seen = lax.broadcast_in_dim(lax.le(of_key, of_query), scores.shape, (scores.ndim - 2, scores.ndim - 1))
    return jnp.where(seen, scores, np.float32(-np.inf))


def _einsum(subscripts: str, *operands: Array) -> Float32[Array, "..."]:
    return jnp.einsum(subscripts, *operands, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _amax(x: Array, members: int) -> Float32[Array, "*members"]:
    return jnp.max(jnp.abs(x), axis=tuple(range(members, x.ndim)), initial=0.0)
