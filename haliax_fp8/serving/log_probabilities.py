"""log_probability_mismatch: what a reinforcement-learning loop watches between the engine that samples and training."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32


class TokenMismatch(eqx.Module):
    """How far the log-probabilities of the same tokens are apart; `c = trained - sampled` of each.

    Args:
        mean: Of `|c|`.
        largest: The largest of it.
        k1: The mean of `-c`: estimates the KL without bias, with more noise than `k3`.
        k3: The mean of `exp(c) - 1 - c`: estimates `KL(sampled, trained)` of tokens that were drawn from the sampling
            engine. It is never negative.
        ratio: The largest of `exp(|c|)`, the importance ratio that clipping sees.
        tokens: How many tokens were compared.
    """

    mean: Float32[Array, ""]
    largest: Float32[Array, ""]
    k1: Float32[Array, ""]
    k3: Float32[Array, ""]
    ratio: Float32[Array, ""]
    tokens: Float32[Array, ""]

    def flat(self, prefix: str = "serving") -> dict[str, Float32[Array, ""]]:
        """Every number by the name `{prefix}/{statistic}`, as trackers take them; also under `jit`.

        Args:
            prefix: What the names begin with.
        """
        return {f"{prefix}/{name}": getattr(self, name) for name in TokenMismatch.__dataclass_fields__}


def log_probability_mismatch(
    trained: Float[Array | np.ndarray, "..."] | hax.NamedArray,
    sampled: Float[Array | np.ndarray, "..."] | hax.NamedArray,
    *,
    mask: Bool[Array | np.ndarray, "..."] | hax.NamedArray | None = None,
) -> TokenMismatch:
    """Compares given log-probabilities of sampled tokens: those of training with those of the engine that drew them.

    For loops that train on what another engine samples: it returns the numbers in every step, from arrays that are
    there anyway, under `jit` if you like. `serving_mismatch` compares two models over the whole vocabulary.

    Args:
        trained: Of the tokens, by the model in training.
        sampled: Of the same tokens, by the engine that drew them.
        mask: Which of them count; all by default. Prompts and padding do not.

    Returns:
        The numbers, in float32; NaN without any token that counts.

    Raises:
        ValueError: If shapes or axes differ.

    References:
        J. Schulman, "Approximating KL Divergence" (2020), k1 and k3, with `r = trained / sampled`.

    Example:
        >>> found = log_probability_mismatch(jnp.array([-1.0, -2.0]), jnp.array([-1.01, -2.0]))
        >>> print(f"{found.largest:.3f} {found.k3:.6f}")
        0.010 0.000025
    """
    given = {"trained": trained, "sampled": sampled} | ({} if mask is None else {"mask": mask})
    shapes = {name: x.axes if isinstance(x, hax.NamedArray) else jnp.shape(x) for name, x in given.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name}: {shape}" for name, shape in shapes.items())
        raise ValueError(f"log-probabilities are not of the same tokens ({listed}); pass one of each for every token")
    arrays = {name: x.array if isinstance(x, hax.NamedArray) else jnp.asarray(x) for name, x in given.items()}
    change = arrays["trained"].astype(jnp.float32) - arrays["sampled"].astype(jnp.float32)
    counts = jnp.ones(change.shape, bool) if mask is None else arrays["mask"]
    # What does not count may hold anything.
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
        tokens=tokens,
    )


@jax.jit
def _k3(change: Float32[Array, "*tokens"]) -> Float32[Array, "*tokens"]:
    """`exp(c) - 1 - c`; of a small one by its series, where the difference would lose its digits."""
    small = jnp.abs(change) < 0.1
    c = jnp.where(small, change, jnp.float32(0.0))
    series = c**2 * (1 / 2 + c * (1 / 6 + c * (1 / 24 + c * (1 / 120 + c / 720))))
    return jnp.where(small, series, jnp.expm1(change) - change)
