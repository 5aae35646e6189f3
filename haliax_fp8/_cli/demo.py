"""Training steps of models with published shapes: what `preflight --demo` compiles."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import optax
from haliax import Axis, NamedArray
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from .._arguments import nearest
from .._jax import cudnn_attention
from ..layers import Fp8Config, fp8_linear_layers
from ..models.feed_forward import MixtureOfExperts
from ..models.rotary import rotate
from ..models.transformer import Norm, Transformer, TransformerConfig, causal_attention
from ..training import TrainStep, cast_params
from .load import UsageError


def layer_norm(config: TransformerConfig) -> Norm:
    """LayerNorm in float32, whatever the weights' dtype."""
    return hnn.LayerNorm.init(config.Hidden, dtype=jnp.dtype(jnp.float32))


class Mlp(eqx.Module):
    """`down(gelu(up(x)))`."""

    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(config: TransformerConfig, *, key: PRNGKeyArray) -> "Mlp":
        up, down = jax.random.split(key)
        return Mlp(
            config.linear("up", config.Hidden, config.Mlp, key=up),
            config.linear("down", config.Mlp, config.Hidden, key=down),
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps `(..., hidden)` to the same axes."""
        return self.down(hnn.gelu(self.up(x)))


@dataclasses.dataclass(frozen=True)
class Demo:
    """A published model.

    Args:
        title: Its name.
        config: Its sizes and parts.
        source: Where they are published.
    """

    title: str
    config: TransformerConfig
    source: str


_llama_3 = partial(TransformerConfig, kv_heads=8, head_dim=128, vocab=128256, rope_theta=500_000.0, unroll=1)
_gpt_2 = partial(
    TransformerConfig,
    head_dim=64,
    vocab=50257,
    rope_theta=None,
    norm=layer_norm,
    feed_forward=Mlp.init,
    biases=("query", "key", "value", "output", "up", "down"),
    tied_head=True,
    unroll=1,
)

demos: Mapping[str, Demo] = {
    "gpt2": Demo(
        "GPT-2 124M",
        _gpt_2(layers=12, hidden=768, heads=12, kv_heads=12, mlp=3072),
        "huggingface.co/openai-community/gpt2, config.json",
    ),
    "llama-8b": Demo(
        "Llama 3.1 8B",
        _llama_3(layers=32, hidden=4096, heads=32, mlp=14336),
        "The Llama 3 Herd of Models (arXiv:2407.21783), table 3",
    ),
    "llama-70b": Demo(
        "Llama 3.1 70B",
        _llama_3(layers=80, hidden=8192, heads=64, mlp=28672),
        "The Llama 3 Herd of Models (arXiv:2407.21783), table 3",
    ),
    "mixtral-8x7b": Demo(
        "Mixtral 8x7B",
        _llama_3(
            layers=32,
            hidden=4096,
            heads=32,
            mlp=14336,
            vocab=32000,
            rope_theta=1_000_000.0,
            feed_forward=partial(MixtureOfExperts.init, experts=8, chosen=2),
        ),
        "Mixtral of Experts (arXiv:2401.04088), table 1",
    ),
}
"""The models by name."""


def demo_by_name(name: str) -> Demo:
    """The demo of a name.

    Args:
        name: A key of `demos`.

    Raises:
        ValueError: If there is none; the nearest are listed.
    """
    if name not in demos:
        near = nearest(name, demos)
        raise ValueError(f"--demo {name} is unknown; the nearest are {near or list(demos)}, all are {list(demos)}")
    return demos[name]


def demo_config(demo: Demo, recipe: str, exclude: Sequence[str]) -> Fp8Config:
    """How the demo is converted: without its head, as the guide advises; a tied one is left out by itself."""
    heads = [] if demo.config.tied_head else ["head"]
    try:
        return Fp8Config(recipe=recipe, exclude=[*exclude, *heads])
    except ValueError as error:
        raise UsageError(f"--{error}") from error


stackings: Mapping[str, Mapping[str, Any]] = {
    "checkpointed": {"checkpointing": True},
    "scan": {},
    "unrolled": {"stacked": False},
}
"""How blocks follow each other: in a `lax.scan`, recomputing each in the backward pass or not, or one by one."""


LOSS_TOKENS = 4096
"""The tokens of each device whose logits are in memory at once: of 128256 words, 2 GB in float32.

Fewer take less memory. But for each part of the tokens the head's kernel is quantized, gathered from other devices, and
its gradient added up.
"""


def next_token_loss(model: Transformer, tokens: NamedArray, *, at_once: int | None = None) -> Float[Array, ""]:
    """The mean cross-entropy of each token given those before it, in float32.

    `mean(logsumexp(logits) - logits[label])`. With `at_once`, only the logits of that many tokens are in memory at a
    time, and the backward pass computes them again. For 128256 words and 8192 tokens, all of them would take 4 GB.

    Args:
        model: The model.
        tokens: Integers `(..., position)`.
        at_once: How many tokens at a time, over all sequences, rounded so that it divides the sequence; None for all.

    Returns:
        A scalar. The last token of a sequence has no successor and is left out.
    """
    Position = tokens.resolve_axis("position")
    x, labels = model.activations(tokens), hax.roll(tokens, -1, Position)
    known = hax.arange(Position) < Position.size - 1
    sequences = tokens.size // Position.size
    count = next(n for n in range(1, Position.size + 1) if _fits(Position.size, n, sequences, at_once))
    count_of_known = sequences * (Position.size - 1)

    def losses(model: Transformer, x: NamedArray, labels: NamedArray, known: NamedArray) -> Float[Array, ""]:
        with jax.named_scope("cross_entropy"):
            logits = model.logits(x).astype(jnp.float32)
            likelihood = hax.take(logits, "vocab", labels) - hnn.logsumexp(logits, "vocab")
            return -hax.sum(hax.where(known.broadcast_axis(labels.axes), likelihood, 0.0)).scalar()

    if count == 1:
        return losses(model, x, labels, known) / count_of_known
    Part = Axis("part", count)
    parts = [a.unflatten_axis(Position, (Part, Position.resize(Position.size // count))) for a in (x, labels, known)]
    # The head stays outside: Haliax would slice it if it were an argument of the scan.
    step = jax.checkpoint(lambda total, part: total + losses(model, *part))
    return hax.fold(lambda total, *part: step(total, part), Part)(jnp.float32(0.0), *parts) / count_of_known


def _fits(length: int, count: int, sequences: int, at_once: int | None) -> bool:
    """Whether a sequence divides into that many parts, and a part of all sequences has few enough tokens."""
    return length % count == 0 and (at_once is None or length // count * sequences <= at_once or count == length)


def bfloat16_loss(model: Transformer, tokens: NamedArray, *, at_once: int) -> Float[Array, ""]:
    """`next_token_loss` of a model with float32 weights that computes in bf16."""
    return next_token_loss(cast_params(model, jnp.bfloat16), tokens, at_once=at_once)


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


def demo_step(
    demo: Demo,
    *,
    layers: int | None,
    tokens: int,
    length: int,
    stacking: str,
    config: Fp8Config | None,
    devices: int = 1,
    fused_attention: bool = False,
    optimizer: Callable[[Transformer], optax.GradientTransformation] = lambda model: optax.adamw(1e-4),
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step with float32 master weights and bf16 activations, and its abstract arguments.

    On several devices the batch is divided among them, and so are weights and moments, along the width of the residual
    stream (FSDP): each device gathers a layer's kernel when it needs it.

    Args:
        demo: Which model.
        layers: How many blocks; None as published.
        tokens: How many in a step.
        length: How many in a sequence.
        stacking: A key of `stackings`.
        config: How to convert; None leaves the model in bf16.
        devices: The size of the mesh axis `devices`.
        fused_attention: Whether attention is cuDNN's, which keeps no scores in memory: for NVIDIA GPUs.
        optimizer: Makes the optimizer for the model; AdamW by default.

    Raises:
        ValueError: If the numbers do not fit together, or the configuration does not fit the model.
    """
    if tokens % length:
        raise ValueError(f"--tokens {tokens} is not a multiple of --length {length}")
    if tokens // length % devices:
        raise ValueError(
            f"--tokens {tokens} gives {tokens // length} sequences of --length {length}, which do not divide evenly "
            f"over --devices {devices}; use more tokens or shorter sequences"
        )
    sizes = {"layers": layers or demo.config.layers, "max_length": length}
    attention = fused_causal_attention if fused_attention else causal_attention
    shape = dataclasses.replace(demo.config, **sizes, **stackings[stacking], attention=attention)
    model = eqx.filter_eval_shape(lambda: Transformer.init(shape, key=jax.random.key(0)))
    model = model if config is None else fp8_linear_layers(model, config)
    loss = partial(bfloat16_loss, at_once=LOSS_TOKENS * devices)
    train = TrainStep(loss, optimizer(model), donate=True)
    Batch = (Axis("batch", tokens // length), Axis("position", length))
    batch = eqx.filter_eval_shape(lambda: hax.zeros(Batch, jnp.int32))
    # Of the key, recipes that do not round at random make nothing.
    args = (model, eqx.filter_eval_shape(train.init, model), batch, jax.eval_shape(lambda: jax.random.key(0)))

    def step(model: Transformer, opt_state: Any, batch: NamedArray, key: PRNGKeyArray) -> Any:
        with hax.axis_mapping({"batch": "devices"}):
            return train(model, opt_state, batch, key=key)

    return step, _divided(args, AbstractMesh((devices,), ("devices",)))


def _divided[T](tree: T, mesh: AbstractMesh) -> T:
    """Abstract arrays with shardings: over their batch axis, or along the residual stream; the rest on every device."""

    def divide(node: Any) -> Any:
        # Of a random key, the optimizer has none, and Muon has a node of Optax's for what it leaves to Adam.
        if not isinstance(node, NamedArray) or not hasattr(node.array, "shape"):
            return node
        spec = PartitionSpec(*("devices" if axis.name in ("batch", "hidden") else None for axis in node.axes))
        array = jax.ShapeDtypeStruct(node.array.shape, node.array.dtype, sharding=NamedSharding(mesh, spec))
        return NamedArray(array, node.axes)  # pyright: ignore[reportArgumentType]

    return jax.tree.map(divide, tree, is_leaf=lambda node: isinstance(node, NamedArray))
