"""A decoder-only language model in Haliax. By default a Llama: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Nothing in this file is about FP8. `haliax_fp8.fp8_linear_layers` converts the model from outside: it finds every
`haliax.nn.Linear` in the tree by its path, for example `blocks.stacked.attention.query`.

References:
    Llama: arXiv:2302.13971; RMSNorm: arXiv:1910.07467; RoPE: arXiv:2104.09864; grouped-query attention:
    arXiv:2305.13245; SwiGLU: arXiv:2002.05202; Mixtral: arXiv:2401.04088.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSelector, NamedArray
from jaxtyping import Array, PRNGKeyArray


type Norm = hnn.RmsNorm | hnn.LayerNorm


def swiglu(gate: NamedArray, up: NamedArray) -> NamedArray:
    """`silu(gate) * up`."""
    return hnn.silu(gate) * up


def causal_attention(query: NamedArray, key: NamedArray, value: NamedArray, *rotary: NamedArray) -> NamedArray:
    """Attention to all earlier positions; scores and softmax in float32.

    Args:
        query: `(..., position, kv_heads, group, head_dim)`, the axes in any order.
        key: `(..., position, kv_heads, head_dim)`. Its names alone let the query heads of a group share a key head.
        value: The same axes as `key`.
        *rotary: The tables of `rotary_tables`; without them, nothing is rotated.

    Returns:
        An array with the axes of `query`.
    """
    Position, HeadDim = query.resolve_axis("position"), query.resolve_axis("head_dim")
    KeyPosition = Position.alias("key_position")
    if rotary:
        query, key = rotate(query, *rotary), rotate(key, *rotary)
    renames: dict[AxisSelector, AxisSelector] = {Position: KeyPosition}
    key, value = key.rename(renames), value.rename(renames)
    scores = hax.dot(query * (1.0 / math.sqrt(HeadDim.size)), key, axis=HeadDim).astype(jnp.float32)
    scores = hax.where(hnn.attention.causal_mask(Position, KeyPosition), scores, -1e9)
    return hax.dot(hnn.softmax(scores, axis=KeyPosition).astype(value.dtype), value, axis=KeyPosition)


@dataclasses.dataclass(frozen=True)
class LinearRope:
    """RoPE's frequencies divided by a factor: positions are interpolated (arXiv:2306.15595).

    Args:
        factor: How much longer sequences are than in pretraining.
    """

    factor: float

    def __call__(self, frequencies: Array) -> Array:
        """The scaled frequencies."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's frequencies: slow ones are divided by a factor, fast ones stay, and those between are blended.

    Args:
        factor: How much the slow ones are slowed down.
        low_frequency_factor: Wavelengths above `original_length` divided by this are slow.
        high_frequency_factor: Wavelengths below `original_length` divided by this are fast.
        original_length: The longest sequence of pretraining.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_length: int

    def __call__(self, frequencies: Array) -> Array:
        """The scaled frequencies."""
        turns = self.original_length * frequencies / (2.0 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / self.factor)


def rotary_tables(
    Position: Axis, HeadDim: Axis, theta: float, scaling: Callable[[Array], Array] | None = None
) -> tuple[NamedArray, NamedArray]:
    """Cosine and sine of each position's angles, `position * theta**(-2i / head_dim)`.

    Args:
        Position: The positions.
        HeadDim: The width of a head.
        theta: The base of the wavelengths.
        scaling: Changes the frequencies, such as `Llama3Rope`.

    Returns:
        Two float32 arrays `(Position, HeadDim)`; the second half of `HeadDim` repeats the first.
    """
    half = jnp.arange(HeadDim.size // 2, dtype=jnp.float32)
    frequencies = theta ** (-2.0 * half / HeadDim.size)
    if scaling is not None:
        frequencies = scaling(frequencies)
    angles = jnp.arange(Position.size, dtype=jnp.float32)[:, None] * frequencies[None, :]
    angles = hax.named(jnp.concatenate([angles, angles], axis=-1), (Position, HeadDim))
    return hax.cos(angles), hax.sin(angles)


def rotate(x: NamedArray, cos: NamedArray, sin: NamedArray) -> NamedArray:
    """Rotates each pair `(x[i], x[i + head_dim / 2])` by its position's angle."""
    HeadDim = x.resolve_axis("head_dim")
    first, second = x[HeadDim, : HeadDim.size // 2], x[HeadDim, HeadDim.size // 2 :]
    turned = hax.concatenate(HeadDim, [-second, first])
    return x * cos.astype(x.dtype) + turned * sin.astype(x.dtype)


def rms_norm(config: "TransformerConfig", Width: Axis | None = None) -> Norm:
    """RMSNorm in float32 whatever the weights' dtype: a sum of squares in bf16 loses the small ones."""
    axis = config.Hidden if Width is None else Width
    return hnn.RmsNorm.init(axis, eps=config.norm_eps, use_bias=False, dtype=jnp.dtype(jnp.float32))


class Attention(eqx.Module):
    """Four linear layers, and a function between them that mixes positions."""

    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    output: hnn.Linear
    query_norm: Norm | None
    key_norm: Norm | None
    config: "TransformerConfig" = eqx.field(static=True)

    @staticmethod
    def init(config: "TransformerConfig", *, key: PRNGKeyArray) -> "Attention":
        keys, scale = jax.random.split(key, 4), config.residual_scale
        QueryHeads = (config.KvHeads, config.Group, config.HeadDim)
        KeyHeads = (config.KvHeads, config.HeadDim)
        return Attention(
            query=config.linear("query", config.Hidden, QueryHeads, key=keys[0]),
            key=config.linear("key", config.Hidden, KeyHeads, key=keys[1]),
            value=config.linear("value", config.Hidden, KeyHeads, key=keys[2]),
            output=config.linear("output", QueryHeads, config.Hidden, key=keys[3], init_scale=scale),
            query_norm=rms_norm(config, config.HeadDim) if config.query_key_norm else None,
            key_norm=rms_norm(config, config.HeadDim) if config.query_key_norm else None,
            config=config,
        )

    def __call__(self, x: NamedArray, *rotary: NamedArray) -> NamedArray:
        """Maps `(..., position, hidden)` to the same axes."""
        between = self.config.between
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = between(self.query_norm)(query), between(self.key_norm)(key)
        return self.output(between(self.config.attention)(query, key, value, *rotary))


class SwiGlu(eqx.Module):
    """`down(silu(gate(x)) * up(x))`."""

    gate: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear
    config: "TransformerConfig" = eqx.field(static=True)

    @staticmethod
    def init(config: "TransformerConfig", *, key: PRNGKeyArray) -> "SwiGlu":
        keys, scale = jax.random.split(key, 3), config.residual_scale
        return SwiGlu(
            gate=config.linear("gate", config.Hidden, config.Mlp, key=keys[0]),
            up=config.linear("up", config.Hidden, config.Mlp, key=keys[1]),
            down=config.linear("down", config.Mlp, config.Hidden, key=keys[2], init_scale=scale),
            config=config,
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `(..., hidden)` to the same axes."""
        activation = self.config.between(self.config.activation)
        return self.down(activation(self.gate(x), self.up(x)))


class MixtureOfExperts(eqx.Module):
    """Sends each token through the experts that a router scores highest; each expert is a SwiGLU."""

    router: hnn.Linear
    gate: hnn.MoELinear
    up: hnn.MoELinear
    down: hnn.MoELinear
    Experts: Axis = eqx.field(static=True)
    Chosen: Axis = eqx.field(static=True)
    normalized: bool = eqx.field(static=True)

    @staticmethod
    def init(
        config: "TransformerConfig", *, experts: int, chosen: int, normalized: bool = True, key: PRNGKeyArray
    ) -> "MixtureOfExperts":
        """Random weights, with `chosen` of the `experts` for each token; `normalized` if their weights add up to 1."""
        keys, Experts = jax.random.split(key, 4), Axis("experts", experts)
        linear = lambda name, In, Out, key: hnn.MoELinear.init(
            Experts, In, Out, key=key, use_bias=name in config.biases
        )
        return MixtureOfExperts(
            config.linear("router", config.Hidden, Experts, key=keys[0]),
            linear("gate", config.Hidden, config.Mlp, keys[1]),
            linear("up", config.Hidden, config.Mlp, keys[2]),
            linear("down", config.Mlp, config.Hidden, keys[3]),
            Experts,
            Axis("chosen", chosen),
            normalized,
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `(..., hidden)` to the same axes."""
        leading = hax.axis.without_axes(x.axes, self.router.In)
        rows = x.flatten_axes(leading, "row")
        scores = self.router(rows).astype(jnp.float32)
        if not self.normalized:
            scores = hnn.softmax(scores, axis=self.Experts)
        weights, experts = hax.top_k(scores, self.Experts, self.Chosen.size, self.Chosen)
        if self.normalized:
            weights = hnn.softmax(weights, axis=self.Chosen)
        weights = weights.astype(x.dtype)
        # A copy of each row for each of its experts, sorted by expert.
        expert_of_copy = experts.rearrange((..., self.Chosen)).array.reshape(-1)
        order = jnp.argsort(expert_of_copy)
        sizes = hax.named(jnp.bincount(expert_of_copy, length=self.Experts.size), self.Experts)
        copies = rows["row", hax.named(order // self.Chosen.size, "copy")]
        out = self.down(hnn.silu(self.gate(copies, sizes)) * self.up(copies, sizes), sizes)
        out = out["copy", hax.named(jnp.argsort(order), "copy")]
        out = out.unflatten_axis("copy", (rows.resolve_axis("row"), self.Chosen))
        return hax.sum(out * weights, axis=self.Chosen).unflatten_axis("row", leading)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The sizes of a model, each of them a named axis, and its parts. The default is a small Llama.

    Args:
        layers: Number of blocks.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads; each is shared by `heads / kv_heads` query heads.
        head_dim: Width of a head; even, because RoPE rotates pairs.
        mlp: Width of the feed-forward layer, or of each expert.
        vocab: Number of tokens; 256 for bytes.
        max_length: Longest sequence.
        rope_theta: Base of RoPE's wavelengths; with None, positions are learned instead.
        rope_scaling: Changes RoPE's frequencies for longer sequences, such as `Llama3Rope`.
        query_key_norm: Whether each head of query and key is normed before RoPE, as in Qwen3.
        norm: Makes a norm from the configuration.
        norm_eps: Added to the mean square in RMSNorm.
        feed_forward: Makes a feed-forward layer from the configuration and a key.
        activation: The function between the products of `SwiGlu`.
        attention: The function of query, key and value between the products of `Attention`.
        between: Wraps each function between products, norms included, such as `memory.rematerialized`.
        biases: The linear layers that have biases, by the names of their fields, such as `("query", "key", "value")`.
        tied_head: Whether the head is the embedding.
        stacked: Whether blocks are stacked and run in a `lax.scan`; otherwise they follow each other in the program.
        checkpointing: Whether each block is recomputed in the backward pass, keeping only its input.
        unroll: The number of blocks per iteration of the scan. More blocks compile longer and run faster.

    Raises:
        ValueError: If `heads` is not a multiple of `kv_heads`, or `head_dim` is odd.
    """

    layers: int = 3
    hidden: int = 96
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 32
    mlp: int = 256
    vocab: int = 256
    max_length: int = 128
    rope_theta: float | None = 10_000.0
    rope_scaling: Callable[[Array], Array] | None = None
    query_key_norm: bool = False
    norm: "Callable[[TransformerConfig], Norm]" = rms_norm
    norm_eps: float = 1e-5
    feed_forward: Callable[..., Any] = SwiGlu.init
    activation: Callable[[NamedArray, NamedArray], NamedArray] = swiglu
    attention: Callable[..., NamedArray] = causal_attention
    between: Callable[[Any], Any] = lambda function: function
    biases: tuple[str, ...] = ()
    tied_head: bool = False
    stacked: bool = True
    checkpointing: Any = False
    unroll: int = 3

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; every key head must serve the same "
                "number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE rotates pairs of elements, so use an even number")

    Layers = property(lambda self: Axis("layers", self.layers))
    Hidden = property(lambda self: Axis("hidden", self.hidden))
    KvHeads = property(lambda self: Axis("kv_heads", self.kv_heads))
    Group = property(lambda self: Axis("group", self.heads // self.kv_heads))
    HeadDim = property(lambda self: Axis("head_dim", self.head_dim))
    Mlp = property(lambda self: Axis("mlp", self.mlp))
    Vocab = property(lambda self: Axis("vocab", self.vocab))

    def linear(self, name: str, In: Any, Out: Any, *, key: PRNGKeyArray, init_scale: float = 1.0) -> hnn.Linear:
        """The linear layer of a field, with a bias if `biases` names it."""
        return hnn.Linear.init(In, Out, key=key, use_bias=name in self.biases, init_scale=init_scale)

    @property
    def residual_scale(self) -> float:
        """Scale of the weights that write to the residual stream, so that its variance does not grow with depth."""
        return 1.0 / math.sqrt(2 * self.layers)


class Block(eqx.Module):
    """A pre-norm transformer block."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Any
    config: TransformerConfig = eqx.field(static=True)

    @staticmethod
    def init(config: TransformerConfig, *, key: PRNGKeyArray) -> "Block":
        attention_key, mlp_key = jax.random.split(key)
        return Block(
            attention_norm=config.norm(config),
            attention=Attention.init(config, key=attention_key),
            mlp_norm=config.norm(config),
            mlp=config.feed_forward(config, key=mlp_key),
            config=config,
        )

    def __call__(self, x: NamedArray, *rotary: NamedArray) -> NamedArray:
        """Maps `(..., position, hidden)` to the same axes."""
        between = self.config.between
        x = x + self.attention(between(self.attention_norm)(x), *rotary)
        return x + self.mlp(between(self.mlp_norm)(x))


class Transformer(eqx.Module):
    """The whole model: embedding, blocks, norm, head."""

    embedding: hnn.Embedding
    positions: NamedArray | None
    blocks: hnn.Stacked[Block] | hnn.BlockSeq[Block]
    norm: Norm
    head: hnn.Linear | None
    config: TransformerConfig = eqx.field(static=True)

    @staticmethod
    def init(config: TransformerConfig, *, key: PRNGKeyArray) -> "Transformer":
        embedding_key, blocks_key, head_key = jax.random.split(key, 3)
        positions = None
        if config.rope_theta is None:
            axes = (Axis("position", config.max_length), config.Hidden)
            positions = 0.02 * hax.random.normal(jax.random.fold_in(embedding_key, 1), axes)
        head = None
        if not config.tied_head:
            head = config.linear("head", config.Hidden, config.Vocab, key=head_key)
        return Transformer(
            embedding=hnn.Embedding.init(config.Vocab, config.Hidden, key=embedding_key),
            positions=positions,
            blocks=_blocks(config, key=blocks_key),
            norm=config.norm(config),
            head=head,
            config=config,
        )

    def __call__(self, tokens: NamedArray) -> NamedArray:
        """Logits of each next token.

        Args:
            tokens: Integers `(..., position)`.

        Returns:
            `(..., position, vocab)` in the dtype of the weights.

        Raises:
            ValueError: If the sequence is longer than `config.max_length`.
        """
        return self.logits(self.activations(tokens))

    def activations(self, tokens: NamedArray) -> NamedArray:
        """The input of the head, `(..., position, hidden)`; see `__call__`."""
        Position, config = tokens.resolve_axis("position"), self.config
        if Position.size > config.max_length:
            raise ValueError(
                f"tokens has {Position.size} positions, more than max_length={config.max_length}; "
                "shorten the sequence or build the model with a larger max_length"
            )
        # Sharded like the blocks' outputs; otherwise XLA shards the residual stream's features like the embedding's.
        x = hax.auto_sharded(self.embedding(tokens))
        if self.positions is not None:
            x = x + self.positions["position", : Position.size]
        rotary = ()
        if config.rope_theta is not None:
            rotary = rotary_tables(Position, config.HeadDim, config.rope_theta, config.rope_scaling)
        return self.norm(self.blocks.fold(x, *rotary, unroll=config.unroll))

    def logits(self, x: NamedArray) -> NamedArray:
        """Applies the head, or the embedding if they are tied."""
        return self.embedding.unembed(x) if self.head is None else self.head(x)


def _blocks(config: TransformerConfig, *, key: PRNGKeyArray) -> hnn.Stacked[Block] | hnn.BlockSeq[Block]:
    kind = hnn.Stacked if config.stacked else hnn.BlockSeq
    blocks = kind.init(config.Layers, Block, gradient_checkpointing=config.checkpointing)
    return blocks(config, key=jax.random.split(key, config.layers))
