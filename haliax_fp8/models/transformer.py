"""A decoder-only language model in Haliax. By default a Llama: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Nothing in this file is about FP8. `haliax_fp8.fp8_linear_layers` converts the model from outside: it finds every
`haliax.nn.Linear` in the tree by its path, for example `blocks.stacked.attention.query`.

References:
    Llama: arXiv:2302.13971; RMSNorm: arXiv:1910.07467; grouped-query attention: arXiv:2305.13245; SwiGLU:
    arXiv:2002.05202; Mixtral: arXiv:2401.04088; Gemma 2: arXiv:2408.00118; OLMo 2: arXiv:2501.00656.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSelector, AxisSpec, NamedArray
from jaxtyping import Array, PRNGKeyArray

from .feed_forward import SwiGlu, swiglu
from .rotary import Rope, rotary_tables, rotate


type Norm = hnn.RmsNorm | hnn.LayerNorm


def causal_attention(
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    *rotary: NamedArray,
    window: NamedArray | int | None = None,
    multiplier: float | None = None,
    softcap: float | None = None,
    interleaved: bool = False,
) -> NamedArray:
    """Attention to all earlier positions; scores and softmax in float32.

    Args:
        query: `(..., position, kv_heads, group, head_dim)`, the axes in any order.
        key: `(..., position, kv_heads, head_dim)`. Its names alone let the query heads of a group share a key head.
        value: The same axes as `key`.
        *rotary: The tables of `rotary_tables`; without them, nothing is rotated.
        window: How many positions are attended to, the last of them its own; by default all earlier ones.
        multiplier: What scores are multiplied by; by default one over the root of `head_dim`.
        softcap: Scores are bounded by `softcap * tanh(score / softcap)`.
        interleaved: Which pairs are rotated, see `rotate`.

    Returns:
        An array with the axes of `query`.
    """
    Position, HeadDim = query.resolve_axis("position"), query.resolve_axis("head_dim")
    KeyPosition = Position.alias("key_position")
    if rotary:
        query, key = (rotate(x, *rotary, interleaved=interleaved) for x in (query, key))
    renames: dict[AxisSelector, AxisSelector] = {Position: KeyPosition}
    key, value = key.rename(renames), value.rename(renames)
    multiplier = 1.0 / math.sqrt(HeadDim.size) if multiplier is None else multiplier
    scores = hax.dot(query * multiplier, key, axis=HeadDim).astype(jnp.float32)
    if softcap is not None:
        scores = hax.tanh(scores / softcap) * softcap
    mask = hnn.attention.causal_mask(Position, KeyPosition)
    if window is not None:
        mask = mask & (hax.arange(KeyPosition) > hax.arange(Position).broadcast_axis(KeyPosition) - window)
    scores = hax.where(mask, scores, -1e9)
    return hax.dot(hnn.softmax(scores, axis=KeyPosition).astype(value.dtype), value, axis=KeyPosition)


def rms_norm(config: "TransformerConfig", Width: AxisSpec | None = None) -> Norm:
    """RMSNorm in float32 whatever the weights' dtype: a sum of squares in bf16 loses the small ones."""
    axis = config.Hidden if Width is None else Width
    return hnn.RmsNorm.init(axis, eps=config.norm_eps, use_bias=False, dtype=jnp.dtype(jnp.float32))


class OffsetRmsNorm(hnn.RmsNorm):
    """RMSNorm that multiplies by `1 + weight`, as Gemma's."""

    def __call__(self, x: NamedArray) -> NamedArray:
        assert self.weight is not None
        wide, weight = x.astype(jnp.float32), self.weight.astype(jnp.float32)
        normed = wide * hax.rsqrt(hax.mean(hax.square(wide), axis=self.axis) + self.eps)
        return (normed * (1.0 + weight)).astype(x.dtype)


def offset_rms_norm(config: "TransformerConfig", Width: AxisSpec | None = None) -> Norm:
    """Gemma's RMSNorm, whose weight begins at 0."""
    norm = rms_norm(config, Width)
    return OffsetRmsNorm(norm.axis, hax.zeros(norm.axis), None, norm.eps, norm.dtype)


class Attention(eqx.Module):
    """Four linear layers, or two if query, key and value are one, and a function between them that mixes positions."""

    query: Any
    key: Any
    value: Any
    query_key_value: Any
    output: hnn.Linear
    query_norm: Norm | None
    key_norm: Norm | None
    config: "TransformerConfig" = eqx.field(static=True)

    @staticmethod
    def init(config: "TransformerConfig", *, key: PRNGKeyArray) -> "Attention":
        keys, scale = jax.random.split(key, 4), config.residual_scale
        QueryHeads = (config.KvHeads, config.Group, config.HeadDim)
        KeyHeads = (config.KvHeads, config.HeadDim)
        layers: dict[str, Any] = dict.fromkeys(("query", "key", "value", "query_key_value"))
        if config.joined_projections:
            rows = Axis("query_key_value", (config.heads + 2 * config.kv_heads) * config.head_dim)
            layers["query_key_value"] = config.linear("query_key_value", config.Hidden, rows, key=keys[0])
        else:
            for name, Out, each in zip(("query", "key", "value"), (QueryHeads, KeyHeads, KeyHeads), keys, strict=False):
                layers[name] = config.linear(name, config.Hidden, Out, key=each)
        of_all = config.query_key_norm == "all heads"
        norm = lambda Heads: config.norm(config, Heads if of_all else config.HeadDim) if config.query_key_norm else None
        return Attention(
            **layers,
            output=config.linear("output", QueryHeads, config.Hidden, key=keys[3], init_scale=scale),
            query_norm=norm(QueryHeads),
            key_norm=norm(KeyHeads),
            config=config,
        )

    def __call__(self, x: NamedArray, *rotary: NamedArray, window: NamedArray | None = None) -> NamedArray:
        """Maps `(..., position, hidden)` to the same axes."""
        config, between = self.config, self.config.between
        query, key, value = self.projections(x)
        options = config.attention_options | ({} if window is None else {"window": window})
        if config.query_key_norm == "after rotation":
            turn = partial(rotate, interleaved=config.rope_interleaved)
            query, key, rotary = between(turn)(query, *rotary), between(turn)(key, *rotary), ()
        if self.query_norm is not None and self.key_norm is not None:
            query, key = between(self.query_norm)(query), between(self.key_norm)(key)
        if config.query_growth is not None:
            growth = config.query_growth(jnp.arange(query.resolve_axis("position").size))
            query = query * hax.named(growth, "position").astype(query.dtype)
        return self.output(between(partial(config.attention, **options))(query, key, value, *rotary))

    def projections(self, x: NamedArray) -> tuple[NamedArray, NamedArray, NamedArray]:
        """Query, key and value."""
        if self.query_key_value is None:
            return self.query(x), self.key(x), self.value(x)
        config, joined = self.config, self.query_key_value(x)
        of_query, of_key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        part = lambda start, size, axes: joined["query_key_value", start : start + size].unflatten_axis(
            "query_key_value", axes
        )
        KeyHeads = (config.KvHeads, config.HeadDim)
        return (
            part(0, of_query, (config.KvHeads, config.Group, config.HeadDim)),
            part(of_query, of_key, KeyHeads),
            part(of_query + of_key, of_key, KeyHeads),
        )


@dataclasses.dataclass(frozen=True)
class QueryGrowth:
    """Queries that grow with their position, `1 + beta * log(1 + position // original_length)`, as Llama 4's.

    Args:
        beta: How fast.
        original_length: Within this length they do not grow.
    """

    beta: float
    original_length: int

    def __call__(self, positions: Array) -> Array:
        """What the queries of positions are multiplied by."""
        return 1.0 + self.beta * jnp.log1p(jnp.floor(positions / self.original_length))


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
        ropes: RoPE of each layer, if they differ; by default `Rope(rope_theta, rope_scaling)` in all.
        rope_interleaved: Whether RoPE rotates neighbours instead of halves.
        partial_rotary_factor: The part of each head that RoPE rotates.
        windows: For each layer how many positions it attends to, or None for all earlier ones; by default all.
        query_key_norm: Whether each head of query and key is normed before RoPE, as in Qwen3; or
            `"after rotation"`, or `"all heads"` for a norm over all of them together.
        query_growth: What queries are multiplied by, from their positions, such as `QueryGrowth`.
        attention_multiplier: What scores are multiplied by; by default one over the root of `head_dim`.
        attention_softcap: What bounds scores, see `causal_attention`.
        joined_projections: Whether query, key and value are one layer.
        norms: Whether norms are `"before"` attention and feed-forward layers, `"after"` them, or `"both"`.
        norm: Makes a norm from the configuration, and one of other axes if it is also given those.
        norm_eps: Added to the mean square in RMSNorm.
        feed_forward: Makes a feed-forward layer from the configuration and a key.
        activation: The function between the products of `SwiGlu`.
        attention: The function of query, key and value between the products of `Attention`.
        between: Wraps each function between products, norms included, such as `memory.rematerialized`.
        biases: The linear layers that have biases, by the names of their fields, such as `("query", "key", "value")`.
        tied_head: Whether the head is the embedding.
        embedding_multiplier: What the embeddings of tokens are multiplied by.
        residual_multiplier: What attention and feed-forward layers add to the residual stream is multiplied by this.
        logits_scaling: What logits are divided by.
        logit_softcap: Logits are bounded by `logit_softcap * tanh(logit / logit_softcap)`.
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
    rope_scaling: Callable[..., Any] | None = None
    ropes: tuple[Rope, ...] = ()
    rope_interleaved: bool = False
    partial_rotary_factor: float = 1.0
    windows: tuple[int | None, ...] = ()
    query_key_norm: bool | Literal["after rotation", "all heads"] = False
    query_growth: Callable[[Array], Array] | None = None
    attention_multiplier: float | None = None
    attention_softcap: float | None = None
    joined_projections: bool = False
    norms: Literal["before", "after", "both"] = "before"
    norm: Callable[..., Norm] = rms_norm
    norm_eps: float = 1e-5
    feed_forward: Callable[..., Any] = SwiGlu.init
    activation: Callable[[NamedArray, NamedArray], NamedArray] = swiglu
    attention: Callable[..., NamedArray] = causal_attention
    between: Callable[[Any], Any] = lambda function: function
    biases: tuple[str, ...] = ()
    tied_head: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    logit_softcap: float | None = None
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
        for name in ("ropes", "windows"):
            if getattr(self, name) and self.rope_theta is None:
                raise ValueError(f"{name} is for models with RoPE, and rope_theta=None has learned positions")
            if len(getattr(self, name)) not in (0, self.layers):
                raise ValueError(f"{name} has {len(getattr(self, name))} layers, and layers={self.layers}; name each")

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
    def Rotated(self) -> Axis:
        """What RoPE rotates of a head."""
        return Axis("head_dim", int(self.head_dim * self.partial_rotary_factor))

    @property
    def attention_options(self) -> dict[str, Any]:
        """What `attention` takes beside arrays: nothing for a Llama."""
        multiplier, softcap = self.attention_multiplier, self.attention_softcap
        options = {"multiplier": multiplier, "softcap": softcap, "interleaved": self.rope_interleaved or None}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def residual_scale(self) -> float:
        """Scale of the weights that write to the residual stream, so that its variance does not grow with depth."""
        return 1.0 / math.sqrt(2 * self.layers)


class Block(eqx.Module):
    """A transformer block: attention and a feed-forward layer, which add to the residual stream."""

    attention_norm: Norm
    attention: Attention
    attention_post_norm: Norm | None
    mlp_norm: Norm
    mlp: Any
    mlp_post_norm: Norm | None
    config: TransformerConfig = eqx.field(static=True)

    @staticmethod
    def init(config: TransformerConfig, *, key: PRNGKeyArray) -> "Block":
        attention_key, mlp_key = jax.random.split(key)
        post_norm = lambda: config.norm(config) if config.norms == "both" else None
        return Block(
            attention_norm=config.norm(config),
            attention=Attention.init(config, key=attention_key),
            attention_post_norm=post_norm(),
            mlp_norm=config.norm(config),
            mlp=config.feed_forward(config, key=mlp_key),
            mlp_post_norm=post_norm(),
            config=config,
        )

    def __call__(
        self, x: NamedArray, *rotary: NamedArray, window: NamedArray | None = None, kind: NamedArray | None = None
    ) -> NamedArray:
        """Maps `(..., position, hidden)` to the same axes.

        Args:
            x: The residual stream.
            *rotary: Tables for attention, or those of all kinds of layers.
            window: How many positions it attends to, or that of all kinds.
            kind: Which of them this layer is.
        """
        if kind is not None:
            rotary = tuple(table["kind", kind] for table in rotary)
            window = None if window is None else window["kind", kind]
        attention = partial(self.attention, window=window)
        x = self._added(x, self.attention_norm, attention, self.attention_post_norm, *rotary)
        return self._added(x, self.mlp_norm, self.mlp, self.mlp_post_norm)

    def _added(self, x: NamedArray, norm: Norm, layer: Any, post_norm: Norm | None, *args: NamedArray) -> NamedArray:
        config, between = self.config, self.config.between
        out = layer(x, *args) if config.norms == "after" else layer(between(norm)(x), *args)
        last = norm if config.norms == "after" else post_norm
        out = out if last is None else between(last)(out)
        return x + (out if config.residual_multiplier == 1.0 else out * config.residual_multiplier)


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
        x = x if config.embedding_multiplier == 1.0 else x * config.embedding_multiplier
        if self.positions is not None:
            x = x + self.positions["position", : Position.size]
        rotary, of_layers = _of_layers(config, Position)
        return self.norm(self.blocks.fold(x, *rotary, **of_layers, unroll=config.unroll))

    def logits(self, x: NamedArray) -> NamedArray:
        """Applies the head, or the embedding if they are tied."""
        logits, config = self.embedding.unembed(x) if self.head is None else self.head(x), self.config
        logits = logits if config.logits_scaling == 1.0 else logits / config.logits_scaling
        cap = config.logit_softcap
        return logits if cap is None else hax.tanh(logits / cap) * cap


def _of_layers(config: TransformerConfig, Position: Axis) -> tuple[tuple[NamedArray, ...], dict[str, NamedArray]]:
    """What layers attend by: tables of RoPE, windows that end within the sequence, and the kind of each layer."""
    if config.rope_theta is None:
        return (), {}
    ropes = config.ropes or (Rope(config.rope_theta, config.rope_scaling),) * config.layers
    # In a window that is as long as the sequence, a layer attends to all earlier positions.
    windows = [min(window or Position.size, Position.size) for window in config.windows or (None,) * config.layers]
    of_layers = list(zip(ropes, windows, strict=True))
    kinds = list(dict.fromkeys(of_layers))
    tables = [rotary_tables(Position, config.Rotated, rope.theta, rope.scaling) for rope, _ in kinds]
    window = hax.named(jnp.array([window for _, window in kinds]), "kind")
    more = {"window": window} if min(windows) < Position.size else {}
    if len(kinds) == 1:
        return tables[0], {name: array["kind", 0] for name, array in more.items()}
    kind = hax.named(jnp.array([kinds.index(each) for each in of_layers]), config.Layers)
    rotary = tuple(hax.stack(Axis("kind", len(kinds)), table) for table in zip(*tables, strict=True))
    return rotary, {**more, "kind": kind}


def _blocks(config: TransformerConfig, *, key: PRNGKeyArray) -> hnn.Stacked[Block] | hnn.BlockSeq[Block]:
    kind = hnn.Stacked if config.stacked else hnn.BlockSeq
    blocks = kind.init(config.Layers, Block, gradient_checkpointing=config.checkpointing)
    return blocks(config, key=jax.random.split(key, config.layers))
