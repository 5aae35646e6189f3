"""Training steps of models with published shapes: what `preflight --demo` compiles."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis, NamedArray
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from .._numerics.nearest import nearest
from ..demo import (
    MixtureOfExperts,
    Mlp,
    Transformer,
    TransformerConfig,
    causal_attention,
    fused_causal_attention,
    layer_norm,
    next_token_loss,
)
from ..layers.config import Fp8Config
from ..layers.convert import fp8_linear_layers
from ..training.cast import cast_params
from ..training.step import TrainStep


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
    use_bias=True,
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


def bfloat16_loss(model: Transformer, tokens: NamedArray, *, at_once: int) -> Float[Array, ""]:
    """`next_token_loss` of a model with float32 weights that computes in bf16."""
    return next_token_loss(cast_params(model, jnp.bfloat16), tokens, at_once=at_once)


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
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step with AdamW, float32 master weights and bf16 activations, and its abstract arguments.

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
    train = TrainStep(loss, optax.adamw(1e-4), donate=True)
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
        # Of a random key, the optimizer has none.
        if not isinstance(node, NamedArray) or node.array is None:
            return node
        spec = PartitionSpec(*("devices" if axis.name in ("batch", "hidden") else None for axis in node.axes))
        array = jax.ShapeDtypeStruct(node.array.shape, node.array.dtype, sharding=NamedSharding(mesh, spec))
        return NamedArray(array, node.axes)  # pyright: ignore[reportArgumentType]

    return jax.tree.map(divide, tree, is_leaf=lambda node: isinstance(node, NamedArray))
