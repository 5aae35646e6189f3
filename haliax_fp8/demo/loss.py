"""The cross-entropy of a language model, computed for some of the tokens at a time."""

import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import Array, Float

from .transformer import Transformer


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
