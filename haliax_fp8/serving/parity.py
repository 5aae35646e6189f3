"""serving_mismatch: how far a served model's log-probabilities are from those of training, and from the floor."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int
from rich.console import RenderableType

from .._printing import Printable, new_table
from ..layers.checks import require_model


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far probabilities `q` are from `p`, those of training, over all positions.

    Args:
        mean: The mean of `|log q - log p|` of the tokens.
        largest: The largest `|log q - log p|`.
        kl: The mean of `KL(p, q) = sum p (log p - log q)`, in nats, over the whole vocabulary.
        k3: The mean of `r - 1 - log r` with `r = q / p` of the tokens, which estimates the KL for tokens drawn from
            `p`.
        agreement: The share of positions at which both have the same most likely token.
        equal: The share of logits that are equal bit for bit.
    """

    mean: float
    largest: float
    kl: float
    k3: float
    agreement: float
    equal: float


@dataclasses.dataclass(frozen=True, repr=False)
class Mismatch(Printable):
    """The result of `serving_mismatch`.

    Args:
        served: The served model compared with the training model.
        floor: The training model compared with itself, compiled so that intermediates are rounded differently.
        positions: The number of positions compared.
    """

    served: Difference
    floor: Difference
    positions: int

    def __rich__(self) -> RenderableType:
        """A row for the served model, and one for the floor."""
        table = new_table(f"Against the training model, {self.positions} positions")
        for column in ("", "mean change of log p", "largest", "KL", "k3", "same greedy token", "equal logits"):
            table.add_column(column)
        for name, difference in (("served", self.served), ("floor: training, rounded otherwise", self.floor)):
            changes = (f"{x:.3g}" for x in (difference.mean, difference.largest, difference.kl, difference.k3))
            table.add_row(name, *changes, f"{difference.agreement:.1%}", f"{difference.equal:.1%}")
        return table


def _called(model: Any, batch: Any) -> Any:
    return model(batch)


def serving_mismatch(
    train_model: Any,
    served: Any,
    batch: Any,
    *,
    logits: Callable[[Any, Any], Any] = _called,
    tokens: Int[Array, "..."] | hax.NamedArray | None = None,
) -> Mismatch:
    """Compares the log-probabilities of a served model with those of the model in training.

    The result also has the floor: the same numbers for the training model compiled with
    `xla_allow_excess_precision=False`. XLA then rounds intermediates wherever the program says so; by default it omits
    some roundings. No engine with different GPU kernels can be expected to come closer.

    Args:
        train_model: The model in training.
        served: The model that serves it: `quantize_for_inference(train_model, ...)`, or a plain or imported model.
        batch: The argument that both are called with.
        logits: `logits(model, batch)`, the logits with the vocabulary on the last axis.
        tokens: The token at each position whose log-probability is compared, such as the generated ones; by default
            the training model's most likely tokens.

    Returns:
        The differences; `print` shows them as a table.

    Raises:
        ValueError: If the models' logits differ in shape, or some are not finite.

    Example:
        >>> served = quantize_for_inference(model, "FP8_DYNAMIC")
        >>> mismatch = serving_mismatch(model, served, x)
        >>> mismatch.floor.kl <= mismatch.served.kl < 0.01
        True
    """
    for name, model in (("train_model", train_model), ("served", served)):
        require_model(model, "serving_mismatch(train_model, served, batch)", name)
    of_training = _computed(logits, train_model, batch)
    of_served = _computed(logits, served, batch)
    otherwise = _computed(logits, train_model, batch, xla_allow_excess_precision=False)
    if of_training.shape != of_served.shape:
        raise ValueError(
            f"train_model has logits of shape {of_training.shape}, and served of shape {of_served.shape}; compare "
            "models with the same vocabulary, on the same batch"
        )
    for name, x in (("train_model", of_training), ("served", of_served)):
        if not np.isfinite(x).all():
            raise ValueError(f"the logits of {name} hold an infinity or NaN, so they cannot be compared")
    if tokens is None:
        chosen = of_training.argmax(-1)
    else:
        chosen = np.asarray(tokens.array if isinstance(tokens, hax.NamedArray) else tokens)
        if chosen.shape != of_training.shape[:-1]:
            raise ValueError(f"tokens has shape {chosen.shape}, but logits are for shape {of_training.shape[:-1]}")
    positions = int(np.prod(of_training.shape[:-1]))
    return Mismatch(_difference(of_training, of_served, chosen), _difference(of_training, otherwise, chosen), positions)


def _computed(
    logits: Callable[[Any, Any], Any], model: Any, batch: Any, **options: bool
) -> Float32[np.ndarray, "... vocabulary"]:
    """The logits, computed in one program."""
    arrays, static = eqx.partition((model, batch), eqx.is_array)

    def compute(arrays: Any) -> Array:
        out = logits(*eqx.combine(arrays, static))
        return out.array if isinstance(out, hax.NamedArray) else out

    return np.asarray(jax.jit(compute, compiler_options=options)(arrays).astype(jnp.float32))


def _difference(p: np.ndarray, q: np.ndarray, tokens: np.ndarray) -> Difference:
    """The difference in float64, from logits."""
    log_p, log_q = (_log_softmax(x.astype(np.float64)) for x in (p, q))
    of_tokens = lambda x: np.take_along_axis(x, tokens[..., None], -1)
    change = of_tokens(log_q) - of_tokens(log_p)
    return Difference(
        mean=float(np.abs(change).mean()),
        largest=float(np.abs(change).max()),
        kl=float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()),
        k3=float((np.expm1(change) - change).mean()),
        agreement=float((p.argmax(-1) == q.argmax(-1)).mean()),
        equal=float((p == q).mean()),
    )


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
