"""A language model with the shape of Llama-8B: as many of its layers as fit, trained with AdamW.

Weights and moments are float32, products run in bf16 or FP8, and blocks are recomputed in the backward pass.
Embedding and head stay in bf16, as is common. There are no rotary positions.
"""

import dataclasses
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import optax
from models import Block, Sizes

import haliax_fp8 as fp8
from lib.libraries import in_bf16


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """The sizes of the model and of its batches.

    Args:
        blocks: Of a block, and how many there are.
        vocab: How many tokens there are to choose from.
        length: Of a sequence.
    """

    blocks: Sizes = Sizes(blocks=32)
    vocab: int = 128256
    length: int = 4096

    def with_layers(self, layers: int) -> "ModelSizes":
        """The same with another number of blocks."""
        return dataclasses.replace(self, blocks=dataclasses.replace(self.blocks, blocks=layers))


class AttentionBlock(eqx.Module):
    """A block with causal attention between its linear layers."""

    layers: Block
    implementation: str | None = eqx.field(static=True)

    @staticmethod
    def init(sizes: Sizes, implementation: str | None, *, key: jax.Array) -> "AttentionBlock":
        """With random weights; the implementation is that of `jax.nn.dot_product_attention`."""
        return AttentionBlock(Block.init(sizes, key=key), implementation)

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        """Maps `(batch, position, embed)` to the same axes."""
        h = self.layers.norms[0](x)
        query, key, value = self.layers.query(h), self.layers.key(h), self.layers.value(h)
        leading = x.axes[:2]
        as_heads = lambda q: q.array.reshape(*(axis.size for axis in leading), -1, q.axes[-1].size)
        out = jax.nn.dot_product_attention(
            as_heads(query), as_heads(key), as_heads(value), is_causal=True, implementation=self.implementation
        )
        x = x + self.layers.out(hax.named(out.reshape(query.array.shape), query.axes))
        return self.layers.feed_forward(x)


class LanguageModel(eqx.Module):
    """Embedding, blocks in a checkpointed scan, norm, head."""

    embedding: hnn.Embedding
    blocks: hnn.Stacked
    norm: hnn.RmsNorm
    head: hnn.Linear

    @staticmethod
    def init(sizes: ModelSizes, implementation: str | None, *, key: jax.Array) -> "LanguageModel":
        """With random weights."""
        first, second, third = jax.random.split(key, 3)
        Embed, Vocab = sizes.blocks.Embed, hax.Axis("vocab", sizes.vocab)
        Blocks = hax.Axis("block", sizes.blocks.blocks)
        blocks = hnn.Stacked.init(Blocks, AttentionBlock, gradient_checkpointing=True)
        return LanguageModel(
            hnn.Embedding.init(Vocab, Embed, key=first),
            blocks(sizes.blocks, implementation, key=jax.random.split(second, Blocks.size)),
            hnn.RmsNorm.init(Embed, use_bias=False),
            hnn.Linear.init(Embed, Vocab, key=third, use_bias=False),
        )

    def __call__(self, tokens: hax.NamedArray) -> hax.NamedArray:
        """Logits `(batch, position, vocab)` of each next token."""
        return self.head(self.norm(self.blocks.fold(self.embedding(tokens))))


def next_token_loss(model: LanguageModel, tokens: hax.NamedArray) -> jax.Array:
    """The mean cross-entropy of each token given those before it."""
    # The state of FP8 layers is not a weight.
    remembered, weights = fp8.partition_for_grad_overwrite(model)
    logits = eqx.combine(remembered, in_bf16(weights), is_leaf=_is_state)(tokens).array.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens.array[:, 1:])
    return losses.mean()


def _is_state(node: Any) -> bool:
    return isinstance(node, fp8.OverwriteWithGradient)


CONVERSIONS = {
    "bf16": lambda model: model,
    "haliax_fp8": lambda model: fp8.fp8_linear_layers(model, fp8.Fp8Config(exclude="head")),
}
"""What the model is trained in, by name."""

STEP = fp8.TrainStep(next_token_loss, optax.adamw(1e-4))


def initial(library: str, sizes: ModelSizes, implementation: str | None) -> tuple[Any, Any]:
    """The model and the optimizer's state."""
    model = CONVERSIONS[library](LanguageModel.init(sizes, implementation, key=jax.random.key(0)))
    return model, STEP.init(model)


def batch(sizes: ModelSizes, sequences: int) -> hax.NamedArray:
    """Random tokens."""
    axes = hax.Axis("batch", sequences), hax.Axis("position", sizes.length)
    return hax.random.randint(jax.random.key(1), axes, 0, sizes.vocab)


def state_bytes(sizes: ModelSizes) -> int:
    """Of weights and moments."""
    state = eqx.filter_eval_shape(initial, "bf16", sizes, None)
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
    fitting = [layers for layers in range(1, sizes.blocks.blocks + 1) if needed(layers) <= 0.65 * limit]
    return max(fitting, default=1)
