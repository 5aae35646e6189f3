"""Causal attention with its gradients: JAX's in bf16 (on a GPU cuDNN's), and `Fp8Attention`."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from haliax_fp8.experimental.attention import Fp8Attention


WAYS = ("bf16", "haliax_fp8")


class Bf16Attention(eqx.Module):
    """`jax.nn.dot_product_attention`, by cuDNN where there is one."""

    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool) -> jax.Array:
        """Its output."""
        fused = "cudnn" if jax.default_backend() == "gpu" else None
        return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal, implementation=fused)


def op_and_arrays(way: str, tokens: int, heads: int, kv_heads: int, features: int) -> tuple[Any, ...]:
    """The op, query, key and value, and the output's gradient."""
    keys = jax.random.split(jax.random.key(0), 4)
    counts = (heads, kv_heads, kv_heads, heads)
    arrays = [
        jax.random.normal(key, (1, tokens, count, features)).astype(jnp.bfloat16)
        for key, count in zip(keys, counts, strict=True)
    ]
    emulate = jax.default_backend() != "gpu"
    return (Bf16Attention() if way == "bf16" else Fp8Attention.init(emulate=emulate), *arrays)


def gradients(op: Any, query: jax.Array, key: jax.Array, value: jax.Array, grad: jax.Array) -> tuple[jax.Array, Any]:
    """The output; and the gradients of the op, whose state they carry, and of query, key and value."""

    def loss(args: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        op, *arrays = args
        out = op(*arrays, is_causal=True)
        return (out.astype(jnp.float32) * grad.astype(jnp.float32)).sum(), out

    (_, out), grads = eqx.filter_value_and_grad(loss, has_aux=True)((op, query, key, value))
    return out, grads
