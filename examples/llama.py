"""A Llama-style language model in Haliax: RMSNorm, RoPE, grouped-query attention, SwiGLU, stacked blocks.

Nothing in this file is about FP8. `haliax_fp8.fp8_linear_layers` converts the model from outside: it finds every
`haliax.nn.Linear` in the tree by its path, for example `blocks.stacked.attention.query`.

References:
    Llama: arXiv:2302.13971; RMSNorm: arXiv:1910.07467; RoPE: arXiv:2104.09864; grouped-query attention:
    arXiv:2305.13245; SwiGLU: arXiv:2002.05202.
"""

import dataclasses
import math
from collections.abc import Callable

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import PRNGKeyArray


type Activation = Callable[[NamedArray, NamedArray], NamedArray]


def swiglu(gate: NamedArray, up: NamedArray) -> NamedArray:
    """`silu(gate) * up`."""
    return hnn.silu(gate) * up


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model; each is a named axis.

    Args:
        layers: Number of blocks.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads; each is shared by `heads / kv_heads` query heads.
        head_dim: Width of a head; even, because RoPE rotates pairs.
        mlp: Width of the SwiGLU layer.
        vocab: Number of tokens; 256 for bytes.
        max_length: Longest sequence that RoPE's table covers.
        rope_theta: Base of RoPE's wavelengths.
        norm_eps: Added to the mean square in RMSNorm.
        checkpointing: Recompute each block in the backward pass, keeping only its input.
        unroll: The number of blocks per iteration of the scan. More blocks compile longer and run faster.
        activation: The activation function between the products of the feed-forward layer.

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
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    checkpointing: bool = False
    unroll: int = 3
    activation: Activation = swiglu

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; every key head serves the same "
                "number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE rotates pairs of elements, so use an even number")

    @property
    def Layers(self) -> Axis:
        return Axis("layers", self.layers)

    @property
    def Hidden(self) -> Axis:
        return Axis("hidden", self.hidden)

    @property
    def KvHeads(self) -> Axis:
        return Axis("kv_heads", self.kv_heads)

    @property
    def Group(self) -> Axis:
        return Axis("group", self.heads // self.kv_heads)

    @property
    def HeadDim(self) -> Axis:
        return Axis("head_dim", self.head_dim)

    @property
    def Mlp(self) -> Axis:
        return Axis("mlp", self.mlp)

    @property
    def Vocab(self) -> Axis:
        return Axis("vocab", self.vocab)

    @property
    def residual_scale(self) -> float:
        """Scale of the weights that write to the residual stream, so that its variance does not grow with depth."""
        return 1.0 / math.sqrt(2 * self.layers)


def rope_tables(Position: Axis, HeadDim: Axis, theta: float) -> tuple[NamedArray, NamedArray]:
    """Cosine and sine of each position's angles, `position * theta**(-2i / head_dim)`.

    Returns:
        Two float32 arrays `(Position, HeadDim)`; the second half of `HeadDim` repeats the first.
    """
    half = jnp.arange(HeadDim.size // 2, dtype=jnp.float32)
    wavelength = theta ** (-2.0 * half / HeadDim.size)
    angles = jnp.arange(Position.size, dtype=jnp.float32)[:, None] * wavelength[None, :]
    angles = hax.named(jnp.concatenate([angles, angles], axis=-1), (Position, HeadDim))
    return hax.cos(angles), hax.sin(angles)


def apply_rope(x: NamedArray, cos: NamedArray, sin: NamedArray, HeadDim: Axis) -> NamedArray:
    """Rotates each pair `(x[i], x[i + head_dim / 2])` by its position's angle."""
    half = HeadDim.size // 2
    first, second = x[HeadDim, :half], x[HeadDim, half:]
    turned = hax.concatenate(HeadDim, [-second, first])
    return x * cos.astype(x.dtype) + turned * sin.astype(x.dtype)


class Attention(eqx.Module):
    """Causal attention in which several query heads share one key and value head."""

    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    output: hnn.Linear
    HeadDim: Axis = eqx.field(static=True)

    @staticmethod
    def init(config: LlamaConfig, *, key: PRNGKeyArray) -> "Attention":
        keys = jax.random.split(key, 4)
        QueryHeads = (config.KvHeads, config.Group, config.HeadDim)
        KeyHeads = (config.KvHeads, config.HeadDim)
        return Attention(
            query=hnn.Linear.init(config.Hidden, QueryHeads, key=keys[0], use_bias=False),
            key=hnn.Linear.init(config.Hidden, KeyHeads, key=keys[1], use_bias=False),
            value=hnn.Linear.init(config.Hidden, KeyHeads, key=keys[2], use_bias=False),
            output=hnn.Linear.init(
                QueryHeads, config.Hidden, key=keys[3], use_bias=False, init_scale=config.residual_scale
            ),
            HeadDim=config.HeadDim,
        )

    def __call__(self, x: NamedArray, cos: NamedArray, sin: NamedArray) -> NamedArray:
        """Maps `(..., position, hidden)` to the same shape."""
        Position = x.resolve_axis("position")
        KeyPosition = Position.alias("key_position")
        query = apply_rope(self.query(x), cos, sin, self.HeadDim) * (1.0 / math.sqrt(self.HeadDim.size))
        # The keys get their own position axis. They have no group axis, so by names alone the product below shares
        # each key head among the query heads of its group.
        key = apply_rope(self.key(x), cos, sin, self.HeadDim).rename({Position: KeyPosition})
        value = self.value(x).rename({Position: KeyPosition})
        scores = hax.dot(query, key, axis=self.HeadDim).astype(jnp.float32)
        scores = hax.where(hnn.attention.causal_mask(Position, KeyPosition), scores, -1e9)
        weights = hnn.softmax(scores, axis=KeyPosition).astype(x.dtype)
        return self.output(hax.dot(weights, value, axis=KeyPosition))


class SwiGlu(eqx.Module):
    """`down(silu(gate(x)) * up(x))`."""

    gate: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear
    activation: Activation = eqx.field(static=True, default=swiglu)

    @staticmethod
    def init(config: LlamaConfig, *, key: PRNGKeyArray) -> "SwiGlu":
        keys = jax.random.split(key, 3)
        return SwiGlu(
            gate=hnn.Linear.init(config.Hidden, config.Mlp, key=keys[0], use_bias=False),
            up=hnn.Linear.init(config.Hidden, config.Mlp, key=keys[1], use_bias=False),
            down=hnn.Linear.init(
                config.Mlp, config.Hidden, key=keys[2], use_bias=False, init_scale=config.residual_scale
            ),
            activation=config.activation,
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `(..., hidden)` to the same shape."""
        return self.down(self.activation(self.gate(x), self.up(x)))


class Block(eqx.Module):
    """A pre-norm transformer block."""

    attention_norm: hnn.RmsNorm
    attention: Attention
    mlp_norm: hnn.RmsNorm
    mlp: SwiGlu

    @staticmethod
    def init(config: LlamaConfig, *, key: PRNGKeyArray) -> "Block":
        attention_key, mlp_key = jax.random.split(key)
        return Block(
            attention_norm=_norm(config),
            attention=Attention.init(config, key=attention_key),
            mlp_norm=_norm(config),
            mlp=SwiGlu.init(config, key=mlp_key),
        )

    def __call__(self, x: NamedArray, cos: NamedArray, sin: NamedArray) -> NamedArray:
        """Maps `(..., position, hidden)` to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(eqx.Module):
    """The whole model: embedding, stacked blocks, norm, head."""

    embedding: hnn.Embedding
    blocks: hnn.Stacked[Block]
    norm: hnn.RmsNorm
    head: hnn.Linear
    config: LlamaConfig = eqx.field(static=True)

    @staticmethod
    def init(config: LlamaConfig, *, key: PRNGKeyArray) -> "Llama":
        embedding_key, blocks_key, head_key = jax.random.split(key, 3)
        stacked = hnn.Stacked.init(config.Layers, Block, gradient_checkpointing=config.checkpointing)
        return Llama(
            embedding=hnn.Embedding.init(config.Vocab, config.Hidden, key=embedding_key),
            blocks=stacked(config, key=jax.random.split(blocks_key, config.layers)),
            norm=_norm(config),
            head=hnn.Linear.init(config.Hidden, config.Vocab, key=head_key, use_bias=False),
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
        Position = tokens.resolve_axis("position")
        if Position.size > self.config.max_length:
            raise ValueError(
                f"tokens has {Position.size} positions, more than max_length={self.config.max_length}; "
                "shorten the sequence or build the model with a larger max_length"
            )
        cos, sin = rope_tables(Position, self.config.HeadDim, self.config.rope_theta)
        x = self.blocks.fold(self.embedding(tokens), cos, sin, unroll=self.config.unroll)
        return self.head(self.norm(x))


def next_token_loss(model: Llama, tokens: NamedArray) -> jax.Array:
    """Mean cross-entropy in nats of each token given those before it.

    Args:
        model: The model, in any dtype; the cross-entropy is computed in float32.
        tokens: Integers `(..., position)`: the first `position - 1` are read, the last `position - 1` predicted.

    Returns:
        A scalar, float32.
    """
    logits = model(tokens["position", :-1]).astype(jnp.float32)
    targets = hnn.one_hot(tokens["position", 1:], model.config.Vocab, dtype=jnp.float32)
    loss = hnn.cross_entropy_loss(logits, model.config.Vocab, targets)
    assert isinstance(loss, NamedArray)
    return loss.scalar()


@eqx.filter_jit
def generate(model: Llama, prompt: jax.Array, *, count: int, temperature: float, key: PRNGKeyArray) -> jax.Array:
    """Continues a prompt, token by token, inside one compiled loop.

    The window has a fixed size. Until it is full, causality hides the positions after the last token; then its oldest
    token drops out.

    Args:
        model: The model, in the dtype to compute in.
        prompt: Integers `(length,)`, at least one and at most `model.config.max_length`.
        count: How many tokens to add.
        temperature: Divides the logits; 0 picks the likeliest token.
        key: The random key for sampling.

    Returns:
        Integers `(count,)`.
    """
    Position = Axis("position", model.config.max_length)
    window = jnp.zeros(Position.size, jnp.int32).at[: prompt.size].set(prompt)

    def next_token(carry: tuple[jax.Array, jax.Array], key: PRNGKeyArray):
        window, length = carry
        logits = model(hax.named(window, Position)).array[length - 1].astype(jnp.float32)
        token = jax.random.categorical(key, logits / temperature) if temperature else jnp.argmax(logits)
        window = jnp.where(length == Position.size, jnp.roll(window, -1), window)
        length = jnp.minimum(length, Position.size - 1)
        window = window.at[length].set(token.astype(jnp.int32))
        return (window, length + 1), token

    start = (window, jnp.asarray(prompt.size, jnp.int32))
    return jax.lax.scan(next_token, start, jax.random.split(key, count))[1]


def _norm(config: LlamaConfig) -> hnn.RmsNorm:
    # The mean square in float32 whatever the weights' dtype: a sum of squares in bf16 loses the small ones.
    return hnn.RmsNorm.init(config.Hidden, eps=config.norm_eps, use_bias=False, dtype=jnp.dtype(jnp.float32))
