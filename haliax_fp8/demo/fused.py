"""Causal attention that never stores its scores, for NVIDIA GPUs."""

import math
from collections.abc import Callable

from haliax import NamedArray
from jaxtyping import Array

from .._jax import cudnn_attention
from .transformer import rotate


def fused_causal_attention(
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    *rotary: NamedArray,
    attention: Callable[..., Array] = cudnn_attention.attention,
) -> NamedArray:
    """`causal_attention` as the fused cuDNN kernel, `jax.nn.dot_product_attention(implementation="cudnn")`.

    It compiles for NVIDIA GPUs, which this machine need not have, and runs only there. Operands are in bfloat16 or
    float16, heads at most 128 wide.

    Args:
        query: As in `causal_attention`.
        key: As in `causal_attention`.
        value: As in `causal_attention`.
        *rotary: As in `causal_attention`.
        attention: Computes it; called like `jax.nn.dot_product_attention`, so another library's runs elsewhere.

    Returns:
        An array with the axes of `query`.
    """
    HeadDim = query.resolve_axis("head_dim")
    if rotary:
        query, key = rotate(query, *rotary), rotate(key, *rotary)
    of_query = "position", "kv_heads", "group", "head_dim"
    of_key = "position", "kv_heads", "head_dim"
    batch = tuple(axis for axis in query.axes if axis.name not in of_query)
    query = query.rearrange((*batch, *of_query))
    arrays = [query, *(x.rearrange((*batch, *of_key)) for x in (key, value))]
    # One axis for the batch and one for the heads.
    tokens, width = query.resolve_axis("position").size, HeadDim.size
    q, k, v = (x.array.reshape(-1, tokens, x.size // (_count(batch) * tokens * width), width) for x in arrays)
    out = attention(q, k, v, scale=1.0 / math.sqrt(width), is_causal=True)
    return NamedArray(out.reshape(query.array.shape), query.axes)


def _count(axes: tuple) -> int:
    return math.prod(axis.size for axis in axes)
