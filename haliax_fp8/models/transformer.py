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
from jaxtyping import PRNGKeyArray


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


def rotary_tables(Position: Axis, HeadDim: Axis, theta: float) -> tuple[NamedArray, NamedArray]:
    """Cosine and sine of each position's angles, `position * theta**(-2i / head_dim)`.

    Returns:
        Two float32 arrays `(Position, HeadDim)`; the second half of `HeadDim` repeats the first.
    """
    half = jnp.arange(HeadDim.size // 2, dtype=jnp.float32)
    wavelength = theta ** (-2.0 * half / HeadDim.size)
    angles = jnp.arange(Position.size, dtype=jnp.float32)[:, None] * wavelength[None, :]
    angles = hax.named(jnp.concatenate([angles, angles], axis=-1), (Position, HeadDim))
    return hax.cos(angles), hax.sin(angles)


def rotate(x: NamedArray, cos: NamedArray, sin: NamedArray) -> NamedArray:
    """Rotates each pair `(x[i], x[i + head_dim / 2])` by its position's angle."""
    HeadDim = x.resolve_axis("head_dim")
    first, second = x[HeadDim, : HeadDim.size // 2], x[HeadDim, HeadDim.size // 2 :]
    turned = hax.concatenate(HeadDim, [-second, first])
    return x * cos.astype(x.dtype) + turned * sin.astype(x.dtype)


def rms_norm(config: "TransformerConfig") -> Norm:
    """RMSNorm in float32 whatever the weights' dtype: a sum of squares in bf16 loses the small ones."""
    return hnn.RmsNorm.init(config.Hidden, eps=config.norm_eps, use_bias=False, dtype=jnp.dtype(jnp.float32))


class Attention(eqx.Module):
    """Four linear layers, and a function between them that mixes positions."""

    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    output: hnn.Linear
    config: "TransformerConfig" = eqx.field(static=True)

    @staticmethod
    def init(config: "TransformerConfig", *, key: PRNGKeyArray) -> "Attention":
        keys, scale = jax.random.split(key, 4), config.residual_scale
        QueryHeads = (config.KvHeads, config.Group, config.HeadDim)
        KeyHeads = (config.KvHeads, config.HeadDim)
        linear = lambda In, Out, key, **options: hnn.Linear.init(In, Out, key=key, use_bias=config.use_bias, **options)
        return Attention(
            query=linear(config.Hidden, QueryHeads, keys[0]),
            key=linear(config.Hidden, KeyHeads, keys[1]),
            value=linear(config.Hidden, KeyHeads, keys[2]),
            output=linear(QueryHeads, config.Hidden, keys[3], init_scale=scale),
            config=config,
        )

    def __call__(self, x: NamedArray, *rotary: NamedArray) -> NamedArray:
        """Maps `(..., position, hidden)` to the same axes."""
        attend = self.config.between(self.config.attention)
        return self.output(attend(self.query(x), self.key(x), self.value(x), *rotary))


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
            gate=hnn.Linear.init(config.Hidden, config.Mlp, key=keys[0], use_bias=config.use_bias),
            up=hnn.Linear.init(config.Hidden, config.Mlp, key=keys[1], use_bias=config.use_bias),
            down=hnn.Linear.init(config.Mlp, config.Hidden, key=keys[2], use_bias=config.use_bias, init_scale=scale),
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

    @staticmethod
    def init(config: "TransformerConfig", *, experts: int, chosen: int, key: PRNGKeyArray) -> "MixtureOfExperts":
        """Random weights, with `chosen` of the `experts` for each token."""
        keys, Experts = jax.random.split(key, 4), Axis("experts", experts)
        linear = lambda In, Out, key: hnn.MoELinear.init(Experts, In, Out, key=key, use_bias=config.use_bias)
        return MixtureOfExperts(
            hnn.Linear.init(config.Hidden, Experts, key=keys[0], use_bias=config.use_bias),
            linear(config.Hidden, config.Mlp, keys[1]),
            linear(config.Hidden, config.Mlp, keys[2]),
            linear(config.Mlp, config.Hidden, keys[3]),
            Experts,
            Axis("chosen", chosen),
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `(..., hidden)` to the same axes."""
        leading = hax.axis.without_axes(x.axes, self.router.In)
        rows = x.flatten_axes(leading, "row")
        likes, experts = hax.top_k(self.router(rows).astype(jnp.float32), self.Experts, self.Chosen.size, self.Chosen)
        weights = hnn.softmax(likes, axis=self.Chosen).astype(x.dtype)
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
        norm: Makes a norm from the configuration.
        norm_eps: Added to the mean square in RMSNorm.
        feed_forward: Makes a feed-forward layer from the configuration and a key.
        activation: The function between the products of `SwiGlu`.
        attention: The function of query, key and value between the products of `Attention`.
        between: Wraps each function between products, norms included, such as `memory.rematerialized`.
        use_bias: Whether linear layers have biases.
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
    norm: "Callable[[TransformerConfig], Norm]" = rms_norm
    norm_eps: float = 1e-5
    feed_forward: Callable[..., Any] = SwiGlu.init
    activation: Callable[[NamedArray, NamedArray], NamedArray] = swiglu
    attention: Callable[..., NamedArray] = causal_attention
    between: Callable[[Any], Any] = lambda function: function
    use_bias: bool = False
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
            head = hnn.Linear.init(config.Hidden, config.Vocab, key=head_key, use_bias=config.use_bias)
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
        Position, theta = tokens.resolve_axis("position"), self.config.rope_theta
        if Position.size > self.config.max_length:
            raise ValueError(
                f"tokens has {Position.size} positions, more than max_length={self.config.max_length}; "
                "shorten the sequence or build the model with a larger max_length"
            )
        # Sharded like the blocks' outputs; otherwise XLA shards the residual stream's features like the embedding's.
        x = hax.auto_sharded(self.embedding(tokens))
        if self.positions is not None:
            x = x + self.positions["position", : Position.size]
        rotary = () if theta is None else rotary_tables(Position, self.config.HeadDim, theta)
        return self.norm(self.blocks.fold(x, *rotary, unroll=self.config.unroll))

    def logits(self, x: NamedArray) -> NamedArray:
        """Applies the head, or the embedding if they are tied."""
        return self.embedding.unembed(x) if self.head is None else self.head(x)


def _blocks(config: TransformerConfig, *, key: PRNGKeyArray) -> hnn.Stacked[Block] | hnn.BlockSeq[Block]:
    kind = hnn.Stacked if config.stacked else hnn.BlockSeq
    blocks = kind.init(config.Layers, Block, gradient_checkpointing=config.checkpointing)
    return blocks(config, key=jax.random.split(key, config.layers))


def hugging_face_config(model: Transformer, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """The `config.json` of a model: a Llama, or with a mixture of experts a Mixtral.

    The weights need no permutation: both libraries rotate halves of a head, and number heads alike.

    Args:
        model: The model, converted or not.
        dtype: The dtype in which engines compute.

    Raises:
        ValueError: If the model has neither architecture: if it has learned positions, LayerNorm or another
            feed-forward layer.

    Example:
        >>> from haliax_fp8.models import Transformer, TransformerConfig
        >>> model = Transformer.init(TransformerConfig(layers=1), key=jax.random.key(0))
        >>> hugging_face_config(model)["architectures"]
        ['LlamaForCausalLM']
    """
    config = model.config
    block = model.blocks.stacked if isinstance(model.blocks, hnn.Stacked) else model.blocks.blocks[0]
    if config.rope_theta is None or not isinstance(model.norm, hnn.RmsNorm):
        raise ValueError("model has learned positions or LayerNorm, so it is not a Llama; use RoPE and RMSNorm")
    shared = {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        # Older versions of transformers read the first key of each pair, newer ones the second.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "torch_dtype": dtype,
        "dtype": dtype,
        "tie_word_embeddings": config.tied_head,
        "attention_bias": config.use_bias,
        "mlp_bias": config.use_bias,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if isinstance(block.mlp, MixtureOfExperts):
        experts = {"num_local_experts": block.mlp.Experts.size, "num_experts_per_tok": block.mlp.Chosen.size}
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **shared, **experts}
    if not all(hasattr(block.mlp, name) for name in ("gate", "up", "down")):
        raise ValueError(f"model has {type(block.mlp).__name__} in its blocks, so it is not a Llama; use SwiGlu")
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shared}
