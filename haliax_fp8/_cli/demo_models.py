"""Language models to ask the preflight about without a model of one's own: blocks of the common kinds, in Haliax."""

import abc
import dataclasses
import math
from typing import ClassVar

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSelector, NamedArray
from jaxtyping import PRNGKeyArray


type Norm = hnn.LayerNorm | hnn.RmsNorm


@dataclasses.dataclass(frozen=True)
class AbstractShape(abc.ABC):
    """The sizes of a language model, and what its blocks are made of.

    Args:
        layers: Blocks.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads, each shared by `heads / kv_heads` query heads.
        mlp: Width of the feed-forward layer, or of each expert's.
        vocab: Tokens.
    """

    use_bias: ClassVar[bool]
    """Whether linear layers have biases."""

    rope_theta: ClassVar[float | None]
    """The base of rotary positions; None if positions are learned."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int

    @property
    def Hidden(self) -> Axis:
        """The residual stream."""
        return Axis("hidden", self.hidden)

    @property
    def HeadDim(self) -> Axis:
        """Inside a head."""
        return Axis("head_dim", self.hidden // self.heads)

    @property
    def KeyHeads(self) -> tuple[Axis, Axis]:
        """Of keys and values."""
        return Axis("kv_heads", self.kv_heads), self.HeadDim

    @property
    def QueryHeads(self) -> tuple[Axis, Axis, Axis]:
        """Of queries: key heads, and the query heads that share each."""
        return Axis("kv_heads", self.kv_heads), Axis("group", self.heads // self.kv_heads), self.HeadDim

    def linear(self, In: hax.AxisSpec, Out: hax.AxisSpec, *, key: PRNGKeyArray) -> hnn.Linear:
        """A linear layer, with a bias where the model has biases."""
        return hnn.Linear.init(In, Out, key=key, use_bias=self.use_bias)

    @abc.abstractmethod
    def norm(self) -> Norm:
        """Before attention, feed-forward layer and head."""

    @abc.abstractmethod
    def feed_forward(self, *, key: PRNGKeyArray) -> "Mlp | SwiGlu | MixtureOfExperts":
        """The feed-forward layer of a block."""

    @abc.abstractmethod
    def head(self, *, key: PRNGKeyArray) -> hnn.Linear | None:
        """The output head; None if it is the embedding."""


@dataclasses.dataclass(frozen=True)
class Gpt2Shape(AbstractShape):
    """GPT-2: LayerNorm, biases, GELU, learned positions, the head tied to the embedding."""

    use_bias: ClassVar[bool] = True
    rope_theta: ClassVar[float | None] = None

    def norm(self) -> Norm:
        """LayerNorm, in float32."""
        return hnn.LayerNorm.init(self.Hidden, dtype=jnp.dtype(jnp.float32))

    def feed_forward(self, *, key: PRNGKeyArray) -> "Mlp":
        """Two layers."""
        return Mlp.init(self, key=key)

    def head(self, *, key: PRNGKeyArray) -> None:
        """Tied."""


@dataclasses.dataclass(frozen=True)
class LlamaShape(AbstractShape):
    """Llama: RMSNorm, SwiGLU, rotary positions, no biases."""

    use_bias: ClassVar[bool] = False
    rope_theta: ClassVar[float | None] = 500_000.0

    def norm(self) -> Norm:
        """RMSNorm, in float32."""
        return hnn.RmsNorm.init(self.Hidden, use_bias=False, dtype=jnp.dtype(jnp.float32))

    def feed_forward(self, *, key: PRNGKeyArray) -> "SwiGlu":
        """Three layers."""
        return SwiGlu.init(self, key=key)

    def head(self, *, key: PRNGKeyArray) -> hnn.Linear:
        """Of its own."""
        return self.linear(self.Hidden, Axis("vocab", self.vocab), key=key)


@dataclasses.dataclass(frozen=True)
class MixtralShape(AbstractShape):
    """Mixtral: as Llama, with a mixture of experts.

    Args:
        experts: How many there are.
        chosen: How many a token goes through.
    """

    experts: int
    chosen: int

    use_bias: ClassVar[bool] = False
    rope_theta: ClassVar[float | None] = 1_000_000.0

    def norm(self) -> Norm:
        """RMSNorm, in float32."""
        return hnn.RmsNorm.init(self.Hidden, use_bias=False, dtype=jnp.dtype(jnp.float32))

    def feed_forward(self, *, key: PRNGKeyArray) -> "MixtureOfExperts":
        """Experts."""
        return MixtureOfExperts.init(self, Axis("experts", self.experts), self.chosen, key=key)

    def head(self, *, key: PRNGKeyArray) -> hnn.Linear:
        """Of its own."""
        return self.linear(self.Hidden, Axis("vocab", self.vocab), key=key)


class Mlp(eqx.Module):
    """`down(gelu(up(x)))`."""

    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(shape: AbstractShape, *, key: PRNGKeyArray) -> "Mlp":
        """With random weights."""
        (up, down), Inner = jax.random.split(key), Axis("mlp", shape.mlp)
        return Mlp(shape.linear(shape.Hidden, Inner, key=up), shape.linear(Inner, shape.Hidden, key=down))

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `(..., hidden)` to the same axes."""
        return self.down(hnn.gelu(self.up(x)))


class SwiGlu(eqx.Module):
    """`down(silu(gate(x)) * up(x))`."""

    gate: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(shape: AbstractShape, *, key: PRNGKeyArray) -> "SwiGlu":
        """With random weights."""
        keys, Inner = jax.random.split(key, 3), Axis("mlp", shape.mlp)
        gate, up = (shape.linear(shape.Hidden, Inner, key=k) for k in keys[:2])
        return SwiGlu(gate, up, shape.linear(Inner, shape.Hidden, key=keys[2]))

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `(..., hidden)` to the same axes."""
        return self.down(hnn.silu(self.gate(x)) * self.up(x))


class MixtureOfExperts(eqx.Module):
    """Each token goes through the experts that a router likes best, each of them a SwiGLU."""

    router: hnn.Linear
    gate: hnn.MoELinear
    up: hnn.MoELinear
    down: hnn.MoELinear
    Experts: Axis = eqx.field(static=True)
    Chosen: Axis = eqx.field(static=True)

    @staticmethod
    def init(shape: AbstractShape, Experts: Axis, chosen: int, *, key: PRNGKeyArray) -> "MixtureOfExperts":
        """With random weights."""
        keys, Inner = jax.random.split(key, 4), Axis("mlp", shape.mlp)
        router = shape.linear(shape.Hidden, Experts, key=keys[0])
        gate, up = (hnn.MoELinear.init(Experts, shape.Hidden, Inner, key=k, use_bias=False) for k in keys[1:3])
        down = hnn.MoELinear.init(Experts, Inner, shape.Hidden, key=keys[3], use_bias=False)
        return MixtureOfExperts(router, gate, up, down, Experts, Axis("chosen", chosen))

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `(..., hidden)` to the same axes."""
        leading = hax.axis.without_axes(x.axes, self.router.In)
        rows = x.flatten_axes(leading, "row")
        likes, experts = hax.top_k(self.router(rows).astype(jnp.float32), self.Experts, self.Chosen.size, self.Chosen)
        weights = hnn.softmax(likes, axis=self.Chosen).astype(x.dtype)
        # A copy of each row for each of its experts, sorted so that those of one expert lie together.
        expert_of_copy = experts.rearrange((..., self.Chosen)).array.reshape(-1)
        order = jnp.argsort(expert_of_copy)
        sizes = hax.named(jnp.bincount(expert_of_copy, length=self.Experts.size), self.Experts)
        copies = rows["row", hax.named(order // self.Chosen.size, "copy")]
        out = self.down(hnn.silu(self.gate(copies, sizes)) * self.up(copies, sizes), sizes)
        out = out["copy", hax.named(jnp.argsort(order), "copy")]
        out = out.unflatten_axis("copy", (rows.resolve_axis("row"), self.Chosen))
        return hax.sum(out * weights, axis=self.Chosen).unflatten_axis("row", leading)


class Attention(eqx.Module):
    """Causal attention; query heads share key and value heads where there are fewer of those."""

    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    output: hnn.Linear
    HeadDim: Axis = eqx.field(static=True)
    rope_theta: float | None = eqx.field(static=True)

    @staticmethod
    def init(shape: AbstractShape, *, key: PRNGKeyArray) -> "Attention":
        """With random weights."""
        keys = jax.random.split(key, 4)
        return Attention(
            shape.linear(shape.Hidden, shape.QueryHeads, key=keys[0]),
            shape.linear(shape.Hidden, shape.KeyHeads, key=keys[1]),
            shape.linear(shape.Hidden, shape.KeyHeads, key=keys[2]),
            shape.linear(shape.QueryHeads, shape.Hidden, key=keys[3]),
            shape.HeadDim,
            shape.rope_theta,
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `(..., position, hidden)` to the same axes."""
        Position = x.resolve_axis("position")
        KeyPosition = Position.alias("key_position")
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.rope_theta is not None:
            query, key = (_rotated(h, Position, self.HeadDim, self.rope_theta) for h in (query, key))
        # Keys and values have no group axis: by name, each is shared by the query heads of its group.
        renames: dict[AxisSelector, AxisSelector] = {Position: KeyPosition}
        key, value = (h.rename(renames) for h in (key, value))
        scores = hax.dot(query * (1.0 / math.sqrt(self.HeadDim.size)), key, axis=self.HeadDim).astype(jnp.float32)
        scores = hax.where(hnn.attention.causal_mask(Position, KeyPosition), scores, -1e9)
        weights = hnn.softmax(scores, axis=KeyPosition).astype(x.dtype)
        return self.output(hax.dot(weights, value, axis=KeyPosition))


def _rotated(x: NamedArray, Position: Axis, HeadDim: Axis, theta: float) -> NamedArray:
    """Pairs of elements, turned by angles that grow with the position."""
    half = jnp.arange(HeadDim.size // 2, dtype=jnp.float32)
    angles = jnp.arange(Position.size, dtype=jnp.float32)[:, None] * theta ** (-2.0 * half / HeadDim.size)
    angles = hax.named(jnp.concatenate([angles, angles], axis=-1), (Position, HeadDim))
    first, second = x[HeadDim, : HeadDim.size // 2], x[HeadDim, HeadDim.size // 2 :]
    turned = hax.concatenate(HeadDim, [-second, first])
    return x * hax.cos(angles).astype(x.dtype) + turned * hax.sin(angles).astype(x.dtype)


class Block(eqx.Module):
    """Attention and a feed-forward layer, each behind a norm and added to the residual stream."""

    attention_norm: hnn.LayerNorm | hnn.RmsNorm
    attention: Attention
    mlp_norm: hnn.LayerNorm | hnn.RmsNorm
    mlp: Mlp | SwiGlu | MixtureOfExperts

    @staticmethod
    def init(shape: AbstractShape, *, key: PRNGKeyArray) -> "Block":
        """With random weights."""
        attention, mlp = jax.random.split(key)
        return Block(shape.norm(), Attention.init(shape, key=attention), shape.norm(), shape.feed_forward(key=mlp))

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `(..., position, hidden)` to the same axes."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))
