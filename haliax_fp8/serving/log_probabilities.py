"""log_probability_mismatch: how far sampling and training are apart, for reinforcement-learning loops."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Float32
from rich.text import Text

from .._printing import Printable


class TokenMismatch(Printable, eqx.Module):
    """How far the log-probabilities of the same tokens are apart, with `c = trained - sampled` for each token.

    Print it for one line.

    Args:
        mean: The mean of `|c|`.
        largest: The largest `|c|`.
        k1: The mean of `-c`, an unbiased estimate of the KL, noisier than `k3`.
        k3: The mean of `exp(c) - 1 - c`, an estimate of `KL(sampled, trained)` for tokens that the sampling engine
            drew. It is never negative.
        ratio: The largest `exp(|c|)`, the importance ratio that clipping sees.
        multiplicative_error: The mean of `exp(|c|)`, which NeMo RL reports as `token_mult_prob_error`: 1 if engines
            agree.
        tokens: The number of tokens compared.
    """

    mean: Float32[Array, ""]
    largest: Float32[Array, ""]
    k1: Float32[Array, ""]
    k3: Float32[Array, ""]
    ratio: Float32[Array, ""]
    multiplicative_error: Float32[Array, ""]
    tokens: Float32[Array, ""]

    def flat(self, prefix: str = "serving") -> dict[str, Float32[Array, ""]]:
        """All numbers, named `{prefix}/{statistic}` for trackers; also under `jit`.

        Args:
            prefix: The first part of the names.
        """
        return {f"{prefix}/{name}": getattr(self, name) for name in TokenMismatch.__dataclass_fields__}

    def __rich__(self) -> Text:
        numbers = {name: getattr(self, name) for name in TokenMismatch.__dataclass_fields__ if name != "tokens"}
        if any(isinstance(x, Tracer) or not eqx.is_array(x) for x in (self.tokens, *numbers.values())):
            return Text("traced or abstract: no numbers")
        found = ", ".join(f"{name.replace('_', ' ')} {float(x):.3g}" for name, x in numbers.items())
        return Text(f"{float(self.tokens):.0f} tokens: {found}")


def log_probability_mismatch(
    trained: Float[Array | np.ndarray, "..."] | hax.NamedArray,
    sampled: Float[Array | np.ndarray, "..."] | hax.NamedArray,
    *,
    mask: Bool[Array | np.ndarray, "..."] | hax.NamedArray | None = None,
) -> TokenMismatch:
    """Compares the log-probabilities of sampled tokens: those of training with those of the engine that drew them.

    For loops that train on another engine's samples: it computes these numbers in every step from arrays that the loop
    has anyway, under `jit` if you like. `serving_mismatch` compares two models over the whole vocabulary.

    Args:
        trained: The log-probabilities of the tokens by the model in training.
        sampled: The log-probabilities of the same tokens, from the engine that drew them.
        mask: Which tokens count; all by default. Leave out prompts and padding.

    Returns:
        The numbers, in float32; NaN if no token counts.

    Raises:
        ValueError: If shapes or axes differ.

    References:
        J. Schulman, "Approximating KL Divergence" (2020), k1 and k3, with `r = trained / sampled`.
        NVIDIA, "Adding new models" in the guide to NeMo RL, the multiplicative error.

    Example:
        >>> found = log_probability_mismatch(jnp.array([-1.0, -2.0]), jnp.array([-1.01, -2.0]))
        >>> print(f"{found.largest:.3f} {found.k3:.6f}")
        0.010 0.000025
    """
    given = {"trained": trained, "sampled": sampled} | ({} if mask is None else {"mask": mask})
    shapes = {name: x.axes if isinstance(x, hax.NamedArray) else jnp.shape(x) for name, x in given.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name}: {shape}" for name, shape in shapes.items())
        raise ValueError(f"log-probabilities are not for the same tokens ({listed}); pass one of each for every token")
    arrays = {name: x.array if isinstance(x, hax.NamedArray) else jnp.asarray(x) for name, x in given.items()}
    change = arrays["trained"].astype(jnp.float32) - arrays["sampled"].astype(jnp.float32)
    counts = jnp.ones(change.shape, bool) if mask is None else arrays["mask"]
    # Tokens that do not count may have any value.
    change = jnp.where(counts, change, jnp.float32(0.0))
    tokens = jnp.sum(counts.astype(jnp.float32))
    mean = lambda x: jnp.sum(x) / tokens
    largest = jnp.max(jnp.abs(change), initial=0.0)
    return TokenMismatch(
        mean=mean(jnp.abs(change)),
        largest=largest,
        k1=mean(-change),
        k3=mean(_k3(change)),
        ratio=jnp.exp(largest),
        # Without the tokens that do not count, whose change is 0 and whose ratio 1.
        multiplicative_error=mean(jnp.where(counts, jnp.exp(jnp.abs(change)), jnp.float32(0.0))),
        tokens=tokens,
    )


@jax.jit
def _k3(change: Float32[Array, "*tokens"]) -> Float32[Array, "*tokens"]:
    """`exp(c) - 1 - c`; by its series for small `c`, where the difference would lose its digits."""
    small = jnp.abs(change) < 0.1
    c = jnp.where(small, change, jnp.float32(0.0))
    series = c**2 * (1 / 2 + c * (1 / 6 + c * (1 / 24 + c * (1 / 120 + c / 720))))
    return jnp.where(small, series, jnp.expm1(change) - change)
