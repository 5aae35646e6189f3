"""What is trained to see whether a recipe trains: a language model on bytes, a vision transformer on digits."""

import abc
import dataclasses
import functools
import importlib
import pathlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.train_lm.corpus import Corpus, load_corpus, split_corpus
from examples.train_lm.run import next_token_loss
from examples.train_vit.model import CLASSES, VisionTransformer
from examples.train_vit.train import Digits
from haliax_fp8 import cast_params
from haliax_fp8.models import MixtureOfExperts, SwiGlu, Transformer, TransformerConfig


type Batches = tuple[np.ndarray, ...]
"""Arguments of a loss after the model; the leading axis counts batches."""


@dataclasses.dataclass(frozen=True)
class AbstractTask(abc.ABC):
    """A model, a loss and data; all but the sizes follow from a seed.

    Args:
        batch: Sequences or images per step.
        dtype: What the model computes in; master weights are float32.
        outlier: Factor of one channel of the first norm's weights, and so of that channel of what its layers read.
    """

    batch: int = 16
    dtype: str = "bfloat16"
    outlier: float = 1.0

    @abc.abstractmethod
    def init(self, key: jax.Array) -> Any:
        """The model in float32."""

    @property
    @abc.abstractmethod
    def loss(self) -> Callable[..., jax.Array]:
        """`loss(model, *batch)`, the mean over the batch. Equal for tasks that differ in data: they share programs."""

    @abc.abstractmethod
    def batches(self, seed: int, steps: int) -> Batches:
        """What a seed trains on."""

    @abc.abstractmethod
    def validation(self, seed: int) -> Batches:
        """What a seed is judged on; all that is held back and fills whole batches."""


@dataclasses.dataclass(frozen=True)
class ByteLoss:
    """The cross-entropy of bytes `(batch, position)`, in float32."""

    dtype: str

    def __call__(self, model: Transformer, tokens: jax.Array) -> jax.Array:
        """Its mean, of a model in float32, which is cast."""
        return next_token_loss(cast_params(model, self.dtype), hax.named(tokens, ("batch", "position")))


@dataclasses.dataclass(frozen=True)
class DigitLoss:
    """The cross-entropy of images `(batch, 8, 8)` with smoothed labels, in float32."""

    dtype: str
    smoothing: float

    def __call__(self, model: VisionTransformer, images: jax.Array, labels: jax.Array) -> jax.Array:
        """Its mean, of a model in float32, which is cast."""
        logits = jax.vmap(cast_params(model, self.dtype))(images.astype(self.dtype)).astype(jnp.float32)
        targets = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), self.smoothing)
        return optax.softmax_cross_entropy(logits, targets).mean()


@dataclasses.dataclass(frozen=True)
class LanguageTask(AbstractTask):
    """The next byte of a text, by a small Llama. All seeds have the same split.

    Args:
        text: `topics`, the prose of Python's help, as in `examples/train_lm`; `source`, the code of its packages
            `asyncio` and `email`; or a file.
        layers: Blocks.
        hidden: Width of the residual stream; heads are 32 wide, or a single one as wide as the stream.
        length: Predicted bytes per sequence.
        experts: SwiGLU layers of a block, two for each byte, 0 for one that all share. The router stays in bf16.
        stacked: Whether blocks are a stack that compiles as one. Else each layer has a path of its own.
        embedding_scale: Factor of the embedding's weights; their standard deviation is one over the width.
    """

    text: str = "topics"
    layers: int = 2
    hidden: int = 64
    length: int = 64
    experts: int = 0
    stacked: bool = False
    embedding_scale: float = 1.0

    def init(self, key: jax.Array) -> Transformer:
        """The model in float32."""
        head_dim = min(32, self.hidden)
        mixture = functools.partial(MixtureOfExperts.init, experts=self.experts, chosen=min(2, self.experts))
        sizes = TransformerConfig(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.hidden // head_dim,
            head_dim=head_dim,
            mlp=3 * self.hidden,
            max_length=self.length,
            stacked=self.stacked,
            unroll=1,
            feed_forward=mixture if self.experts else SwiGlu.init,
        )
        model = Transformer.init(sizes, key=key)
        if self.embedding_scale != 1.0:
            embedded = lambda model: model.embedding.weight.array
            model = eqx.tree_at(embedded, model, embedded(model) * self.embedding_scale)
        if self.outlier == 1.0:
            return model
        block = lambda model: model.blocks.stacked if sizes.stacked else model.blocks.blocks[0]
        weight = lambda model: block(model).attention_norm.weight.array
        return eqx.tree_at(weight, model, weight(model).at[..., 0].multiply(self.outlier))

    @property
    def loss(self) -> "ByteLoss":
        """The cross-entropy, in nats per byte."""
        return ByteLoss(self.dtype)

    def batches(self, seed: int, steps: int) -> Batches:
        """Windows at random positions."""
        corpus = self.corpus
        return (np.stack([corpus.batch(seed, step, self.batch, self.length) for step in range(steps)]),)

    def validation(self, seed: int) -> Batches:
        """Every tenth block of 4 KiB."""
        return (np.stack(self.corpus.validation_batches(self.batch, self.length)),)

    @functools.cached_property
    def corpus(self) -> Corpus:
        """The text, a tenth of it held back."""
        if self.text == "source":
            return split_corpus("asyncio and email", source_text(), 0.1)
        return load_corpus(None if self.text == "topics" else self.text, 0.1)


@dataclasses.dataclass(frozen=True)
class VisionTask(AbstractTask):
    """scikit-learn's handwritten digits, 8x8 pixels, with noise; a split for each seed.

    Args:
        layers: Blocks.
        hidden: Width of the residual stream.
        smoothing: Of the labels, so that the loss does not tend to zero, where ratios are meaningless.
    """

    layers: int = 2
    hidden: int = 32
    smoothing: float = 0.1

    def init(self, key: jax.Array) -> VisionTransformer:
        """Patches of 2x2, heads 16 wide."""
        model = VisionTransformer(
            patch=2, layers=self.layers, hidden=self.hidden, heads=self.hidden // 16, mlp=3 * self.hidden, key=key
        )
        weight = lambda model: model.blocks[0].attention_norm.weight
        return eqx.tree_at(weight, model, weight(model).at[0].multiply(self.outlier))

    @property
    def loss(self) -> "DigitLoss":
        """The cross-entropy with smoothed labels."""
        return DigitLoss(self.dtype, self.smoothing)

    def batches(self, seed: int, steps: int) -> Batches:
        """Epochs, one after the other."""
        digits, rng, batches = Digits.load(0.3, seed), np.random.default_rng(seed), []
        while len(batches) < steps:
            batches += digits.batches(self.batch, 0.25, rng)
        images, labels = zip(*batches[:steps], strict=True)
        return np.stack(images), np.stack(labels)

    def validation(self, seed: int) -> Batches:
        """The images held back, without noise."""
        digits = Digits.load(0.3, seed)
        count = len(digits.test_labels) // self.batch
        parts = lambda x: x[: count * self.batch].reshape(count, self.batch, *x.shape[1:])
        return parts(digits.test_images), parts(digits.test_labels)


def source_text() -> bytes:
    """The source text of Python's packages `asyncio` and `email`."""
    folders = [pathlib.Path(path) for name in ("asyncio", "email") for path in importlib.import_module(name).__path__]
    return b"\n".join(path.read_bytes() for folder in folders for path in sorted(folder.glob("*.py")))
