"""What is compiled and run: blocks with the sizes of Llama-8B, and a stack of feed-forward layers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from lib.libraries import in_bf16

import haliax_fp8 as fp8


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the models; smaller ones are for tests.

    Args:
        embed: Width of a block of Llama-8B.
        mlp: Width of its feed-forward layer.
        kv_heads: Key and value heads.
        group: Query heads that share one of them.
        head: Width of a head.
        blocks: How many blocks.
        tokens: How many tokens, in all models.
        mlp_embed: Width of the stack of feed-forward layers, between them.
        mlp_inner: The same, inside.
        mlp_blocks: How many there are.
    """

    embed: int = 4096
    mlp: int = 14336
    kv_heads: int = 8
    group: int = 4
    head: int = 128
    blocks: int = 4
    tokens: int = 8192
    mlp_embed: int = 2048
    mlp_inner: int = 8192
    mlp_blocks: int = 8

    @property
    def Embed(self) -> hax.Axis:
        """Of the residual stream."""
        return hax.Axis("embed", self.embed)

    @property
    def Key(self) -> tuple[hax.Axis, hax.Axis]:
        """Of keys and values."""
        return hax.Axis("kv_heads", self.kv_heads), hax.Axis("head", self.head)

    @property
    def Query(self) -> tuple[hax.Axis, hax.Axis, hax.Axis]:
        """Of queries."""
        return hax.Axis("kv_heads", self.kv_heads), hax.Axis("group", self.group), hax.Axis("head", self.head)


LLAMA_8B = Sizes()
"""Those of Llama-8B."""

TINY = Sizes(
    embed=32, mlp=64, kv_heads=2, group=2, head=16, blocks=2, tokens=16, mlp_embed=16, mlp_inner=32, mlp_blocks=2
)
"""For tests."""


QKV = ("query", "key", "value")


class Block(eqx.Module):
    """The linear layers of a block of Llama-8B, with RMSNorm and SwiGLU; attention's scores are left out."""

    norms: tuple[hnn.RmsNorm, hnn.RmsNorm]
    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    out: hnn.Linear
    gate: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(sizes: Sizes, *, key: jax.Array) -> "Block":
        """A block with random weights."""
        keys = iter(jax.random.split(key, 7))
        linear = lambda In, Out: hnn.Linear.init(In, Out, key=next(keys), use_bias=False)
        Embed, Mlp = sizes.Embed, hax.Axis("mlp", sizes.mlp)
        return Block(
            (hnn.RmsNorm.init(Embed, use_bias=False), hnn.RmsNorm.init(Embed, use_bias=False)),
            linear(Embed, sizes.Query),
            linear(Embed, sizes.Key),
            linear(Embed, sizes.Key),
            linear(sizes.Query, Embed),
            linear(Embed, Mlp),
            linear(Embed, Mlp),
            linear(Mlp, Embed),
        )

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        """Adds both halves' output."""
        h = self.norm(0, x)
        x = x + self.out(self.mixed(*self.projected(h)))
        return self.feed_forward(x)

    def projected(self, h: hax.NamedArray) -> tuple[hax.NamedArray, ...]:
        """Queries, keys and values."""
        return self.query(h), self.key(h), self.value(h)

    def feed_forward(self, x: hax.NamedArray) -> hax.NamedArray:
        """Adds the second half's output."""
        h = self.norm(1, x)
        return x + self.down(self.activation(self.gate(h), self.up(h)))

    def norm(self, i: int, x: hax.NamedArray) -> hax.NamedArray:
        """Normalizes the input of a half."""
        return self.norms[i](x)

    def mixed(self, query: hax.NamedArray, key: hax.NamedArray, value: hax.NamedArray) -> hax.NamedArray:
        """What stands for attention."""
        return mix(query, key, value)

    def activation(self, gate: hax.NamedArray, up: hax.NamedArray) -> hax.NamedArray:
        """SwiGLU."""
        return swiglu(gate, up)


def mix(query: hax.NamedArray, key: hax.NamedArray, value: hax.NamedArray) -> hax.NamedArray:
    """Elementwise, so that the program has the traffic of the linear layers and little else."""
    return query + key * value


def swiglu(gate: hax.NamedArray, up: hax.NamedArray) -> hax.NamedArray:
    """The gated activation of Llama."""
    return hnn.silu(gate) * up


class RematerializedBlock(Block):
    """A block in which everything between products keeps only its inputs."""

    @classmethod
    def init(cls, sizes: Sizes, *, key: jax.Array) -> "RematerializedBlock":
        """A block with random weights."""
        return _as(cls, Block.init(sizes, key=key))

    def norm(self, i: int, x: hax.NamedArray) -> hax.NamedArray:
        """Normalizes the input of a half."""
        return fp8.rematerialized(self.norms[i])(x)

    def mixed(self, query: hax.NamedArray, key: hax.NamedArray, value: hax.NamedArray) -> hax.NamedArray:
        """What stands for attention."""
        return self.rematerialized(mix)(query, key, value)

    def activation(self, gate: hax.NamedArray, up: hax.NamedArray) -> hax.NamedArray:
        """SwiGLU."""
        return self.rematerialized(swiglu)(gate, up)

    def rematerialized(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """In the dtype of its inputs."""
        return fp8.rematerialized(function)


class Float32Block(RematerializedBlock):
    """The same, computed in float32; the norms do so anyway."""

    def rematerialized(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """In float32."""
        return fp8.rematerialized(function, compute_dtype=jnp.float32)


class JoinedBlock(Float32Block):
    """The same, with one product for queries, keys and values."""

    qkv: fp8.JoinedLinear

    @staticmethod
    def init(sizes: Sizes, *, key: jax.Array) -> "JoinedBlock":  # pyright: ignore[reportIncompatibleMethodOverride]
        """A block with random weights."""
        fields = vars(Block.init(sizes, key=key))
        apart = [fields[name] for name in QKV]
        return JoinedBlock(**fields | dict.fromkeys(QKV), qkv=fp8.join_linear(apart))

    def projected(self, h: hax.NamedArray) -> tuple[hax.NamedArray, ...]:
        """Queries, keys and values."""
        return self.qkv(h)


class CompressedBlock(Block):
    """A block that keeps the inputs of its activation function in FP8."""

    @staticmethod
    def init(sizes: Sizes, *, key: jax.Array) -> "CompressedBlock":
        """A block with random weights."""
        return _as(CompressedBlock, Block.init(sizes, key=key))

    def activation(self, gate: hax.NamedArray, up: hax.NamedArray) -> hax.NamedArray:
        """SwiGLU."""
        return fp8.compressed(swiglu)(gate, up)


def _as[B: Block](kind: type[B], block: Block) -> B:
    return kind(**{field.name: getattr(block, field.name) for field in dataclasses.fields(block)})


class FeedForward(eqx.Module):
    """`down(gelu(up(x)))`."""

    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(sizes: Sizes, *, key: jax.Array) -> "FeedForward":
        """A layer with random weights."""
        Embed, Inner = hax.Axis("embed", sizes.mlp_embed), hax.Axis("inner", sizes.mlp_inner)
        up, down = jax.random.split(key)
        return FeedForward(
            hnn.Linear.init(Embed, Inner, key=up, use_bias=False),
            hnn.Linear.init(Inner, Embed, key=down, use_bias=False),
        )

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        """Maps `(token, embed)` to the same axes."""
        return self.down(hnn.gelu(self.up(x)))


@dataclasses.dataclass(frozen=True)
class Stack:
    """Blocks that follow each other.

    Args:
        model: Makes them from the sizes, in bf16.
        width: Of what they take.
    """

    model: Callable[[Sizes], Any]
    width: Callable[[Sizes], int]

    def batch(self, sizes: Sizes) -> hax.NamedArray:
        """Random inputs in bf16."""
        axes = hax.Axis("token", sizes.tokens), hax.Axis("embed", self.width(sizes))
        return hax.random.normal(jax.random.key(1), axes, dtype=jnp.bfloat16)


def _stack(kind: Any, block: type, count: Callable[[Sizes], int], **options: Any) -> Callable[[Sizes], Any]:
    def init(sizes: Sizes) -> Any:
        Blocks = hax.Axis("block", count(sizes))
        return in_bf16(kind.init(Blocks, block, **options)(sizes, key=jax.random.split(jax.random.key(0), Blocks.size)))

    return init


def llama(kind: Any, block: type = Block, **options: Any) -> Stack:
    """Blocks of Llama-8B in a `haliax.nn.BlockSeq` or `Stacked`, with options of the latter."""
    return Stack(_stack(kind, block, lambda sizes: sizes.blocks, **options), lambda sizes: sizes.embed)


STACKS: dict[str, Stack] = {
    "Llama-8B, unrolled": llama(hnn.BlockSeq),
    "Llama-8B, scan": llama(hnn.Stacked),
    "Llama-8B, scan + checkpointing": llama(hnn.Stacked, gradient_checkpointing=True),
    "MLP": Stack(_stack(hnn.BlockSeq, FeedForward, lambda s: s.mlp_blocks), lambda sizes: sizes.mlp_embed),
}
"""By name. MLP: eight feed-forward layers, each from 2048 to 8192 and back, one after the other."""


def loss(model: Any, x: hax.NamedArray) -> jax.Array:
    """The mean square of the output."""
    return (model.fold(x) ** 2).mean().scalar().astype(jnp.float32)
