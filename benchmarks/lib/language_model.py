"""A language model with the shape of Llama-8B: as many of its layers as fit, trained with AdamW.

Weights and moments are float32, products run in bf16 or FP8, and blocks are recomputed in the backward pass.
The embedding and the head stay in bf16, as is common. Positions are not encoded.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax

import haliax_fp8 as fp8
from haliax_fp8._jax import cudnn_attention
from haliax_fp8.models import Transformer, TransformerConfig
from haliax_fp8.training import quantized_state
from lib.models import LLAMA_8B


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """The sizes of the model; its sequences are as long as it allows."""

    config: TransformerConfig = dataclasses.replace(
        LLAMA_8B.llama, layers=32, vocab=128256, max_length=4096, checkpointing=True
    )

    def with_layers(self, layers: int) -> "ModelSizes":
        """The same with another number of blocks."""
        return ModelSizes(dataclasses.replace(self.config, layers=layers))


@dataclasses.dataclass(frozen=True)
class JaxAttention:
    """JAX's causal attention, without rotary positions, of queries `(batch, position, ...)`.

    Args:
        implementation: As in `jax.nn.dot_product_attention`.
    """

    implementation: str | None

    def __call__(
        self, query: hax.NamedArray, key: hax.NamedArray, value: hax.NamedArray, *rotary: Any
    ) -> hax.NamedArray:
        """An array with the axes of `query`."""
        as_heads = lambda x: x.array.reshape(*x.array.shape[:2], -1, x.axes[-1].size)
        heads = (as_heads(x) for x in (query, key, value))
        if self.implementation == "cudnn" and jax.default_backend() != "gpu":  # Compiled for a GPU that is not here.
            out = cudnn_attention.attention(*heads, scale=query.axes[-1].size ** -0.5, is_causal=True)
        else:
            out = jax.nn.dot_product_attention(*heads, is_causal=True, implementation=self.implementation)
        return hax.named(out.reshape(query.array.shape), query.axes)


def next_token_loss(model: Transformer, tokens: hax.NamedArray) -> jax.Array:
    """The mean cross-entropy of each token given those before it."""
    logits = fp8.cast_params(model, jnp.bfloat16)(tokens).array.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens.array[:, 1:])
    return losses.mean()


def loss_in_parts(model: Transformer, tokens: hax.NamedArray) -> jax.Array:
    """The same, with the logits of one sequence at a time, which the backward pass computes again."""
    cast = fp8.cast_params(model, jnp.bfloat16)

    @jax.checkpoint
    def of_sequence(sequence: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, targets = sequence
        logits = cast.logits(hax.named(x, ("position", "hidden"))).array.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:-1], targets).mean()

    x = cast.activations(tokens).rearrange(("batch", "position", "hidden")).array
    return jax.lax.map(of_sequence, (x, tokens.array[:, 1:])).mean()


CONVERSIONS = {
    "bf16": lambda model: model,
    "haliax_fp8": lambda model: fp8.fp8_linear_layers(model, fp8.Fp8Config(exclude="head")),
}
"""What the model is trained in, by name."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train the model.

    Args:
        convert: Converts it.
        loss: Its loss.
        optimizer: The optimizer.
    """

    convert: Callable[[Transformer], Transformer]
    loss: Callable[..., jax.Array] = next_token_loss
    optimizer: optax.GradientTransformation = optax.adamw(1e-4)

    @property
    def step(self) -> fp8.TrainStep:
        """Its step."""
        return fp8.TrainStep(self.loss, self.optimizer)

    def initial(self, sizes: ModelSizes, implementation: str | None) -> tuple[Any, Any]:
        """The model and the optimizer's state."""
        config = dataclasses.replace(sizes.config, attention=JaxAttention(implementation))
        model = self.convert(Transformer.init(config, key=jax.random.key(0)))
        return model, self.step.init(model)


WAYS = {name: Way(convert) for name, convert in CONVERSIONS.items()}
"""As `CONVERSIONS`, with all logits at once."""

WAYS_IN_PARTS = {
    **{name: Way(convert, loss_in_parts) for name, convert in CONVERSIONS.items()},
    "haliax_fp8, head in FP8": Way(fp8.fp8_linear_layers, loss_in_parts),
    "haliax_fp8, head and moments in FP8": Way(
        fp8.fp8_linear_layers, loss_in_parts, quantized_state(optax.adamw(1e-4))
    ),
}
"""With the logits of one sequence at a time."""


def batch(sizes: ModelSizes, sequences: int) -> hax.NamedArray:
    """Random tokens."""
    axes = hax.Axis("batch", sequences), hax.Axis("position", sizes.config.max_length)
    return hax.random.randint(jax.random.key(1), axes, 0, sizes.config.vocab)


def state_bytes(sizes: ModelSizes) -> int:
    """Of weights and moments."""
    state = eqx.filter_eval_shape(WAYS["bf16"].initial, sizes, None)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if hasattr(leaf, "dtype"))


def fitting_layers(sizes: ModelSizes, limit: int) -> int:
    """As many layers, at most those asked for, as leave a third of the memory to activations.

    Args:
        sizes: The model.
        limit: The memory, in bytes.
    """
    one, two = (state_bytes(sizes.with_layers(layers)) for layers in (1, 2))
    # Beside weights and moments, 12 bytes for each weight, gradients (4) and the copy that is multiplied (2).
    needed = lambda layers: 1.5 * (one + (layers - 1) * (two - one))
    fitting = [layers for layers in range(1, sizes.config.layers + 1) if needed(layers) <= 0.65 * limit]
    return max(fitting, default=1)
