"""What is compiled and run: blocks with the sizes of Llama-8B."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp

import haliax_fp8 as fp8
from haliax_fp8 import models
from haliax_fp8.models import TransformerConfig
from lib.libraries import in_bf16


def mix(query: hax.NamedArray, key: hax.NamedArray, value: hax.NamedArray) -> hax.NamedArray:
    """Instead of attention, elementwise, so that the program has the traffic of the linear layers and little else."""
    return query + key * value


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the models; smaller ones are for tests.

    Args:
        llama: Blocks of Llama-8B.
        tokens: How many tokens.
    """

    llama: TransformerConfig = TransformerConfig(
        layers=4, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, attention=mix, unroll=1
    )
    tokens: int = 8192


LLAMA_8B = Sizes()
"""Those of Llama-8B."""

TINY = Sizes(
    TransformerConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, mlp=64, attention=mix, unroll=1),
    tokens=16,
)
"""For tests."""


class Block(eqx.Module):
    """A block of `haliax_fp8.models` with its norms first, and SwiGLU in its own code, as most people write it.

    XLA lays out memory by the order of arguments: another would change the memory that programs need by a few percent.
    """

    norms: tuple[Any, Any]
    attention: models.Attention
    gate: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear
    config: TransformerConfig = eqx.field(static=True)

    @staticmethod
    def init(config: TransformerConfig, *, key: jax.Array) -> "Block":
        """A block with random weights."""
        block = models.Block.init(config, key=key)
        mlp = block.mlp
        return Block((block.attention_norm, block.mlp_norm), block.attention, mlp.gate, mlp.up, mlp.down, config)

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        """Adds both halves' output."""
        between = self.config.between
        before_attention, before_mlp = map(between, self.norms)
        x = x + self.attention(before_attention(x))
        h = before_mlp(x)
        gated = between(lambda gate, up: hnn.silu(gate) * up)
        return x + self.down(gated(self.gate(h), self.up(h)))


@dataclasses.dataclass(frozen=True)
class Stack:
    """Blocks that follow each other.

    Args:
        init: Makes them from the sizes.
        width: The width of what they take.
    """

    init: Callable[[Sizes], Any]
    width: Callable[[Sizes], int]

    def model(self, sizes: Sizes) -> Any:
        """The blocks with random weights in bf16."""
        return in_bf16(self.init(sizes))

    def batch(self, sizes: Sizes) -> hax.NamedArray:
        """Random inputs in bf16."""
        axes = hax.Axis("token", sizes.tokens), hax.Axis("hidden", self.width(sizes))
        return hax.random.normal(jax.random.key(1), axes, dtype=jnp.bfloat16)


class JoinedAttention(eqx.Module):
    """`Attention` with one product for queries, keys and values."""

    qkv: fp8.memory.JoinedLinear
    output: hnn.Linear
    config: TransformerConfig = eqx.field(static=True)

    @staticmethod
    def of(attention: models.Attention) -> "JoinedAttention":
        """The same layers, joined."""
        qkv = fp8.memory.join_linear([attention.query, attention.key, attention.value])
        return JoinedAttention(qkv, attention.output, attention.config)

    def __call__(self, x: hax.NamedArray, *rotary: hax.NamedArray) -> hax.NamedArray:
        """As `Attention`."""
        attend = self.config.between(self.config.attention)
        return self.output(attend(*self.qkv(x), *rotary))


def llama(*, stacked: bool = True, checkpointing: Any = False, joined: bool = False, **parts: Any) -> Stack:
    """Blocks of Llama-8B with other parts.

    Args:
        stacked: Whether they run in a scan.
        checkpointing: What a scan recomputes.
        joined: Whether queries, keys and values are one product.
        **parts: Fields of `TransformerConfig`.
    """
    is_attention = lambda node: isinstance(node, models.Attention)
    changed = lambda node: JoinedAttention.of(node) if joined and is_attention(node) else node

    def init(sizes: Sizes) -> Any:
        config, kind = dataclasses.replace(sizes.llama, **parts), hnn.Stacked if stacked else hnn.BlockSeq
        blocks = kind.init(config.Layers, Block, gradient_checkpointing=checkpointing)
        blocks = blocks(config, key=jax.random.split(jax.random.key(0), config.layers))
        return jax.tree.map(changed, blocks, is_leaf=is_attention)

    return Stack(init, lambda sizes: sizes.llama.hidden)


STACKS: dict[str, Stack] = {
    "Llama-8B, unrolled": llama(stacked=False),
    "Llama-8B, scan": llama(),
    "Llama-8B, scan + checkpointing": llama(checkpointing=True),
}
"""By name."""


def loss(model: Any, x: hax.NamedArray) -> jax.Array:
    """The mean square of the output."""
    return (model.fold(x) ** 2).mean().scalar().astype(jnp.float32)
