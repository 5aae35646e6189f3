"""log_probability_mismatch, importance_weights: sampling and training compared, for reinforcement-learning loops."""

from typing import Any, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Float32
from rich.text import Text

from .._printing import Printable


type TokenValues = Float[Array | np.ndarray, "..."] | hax.NamedArray
"""A number for each token."""

type Mask = Array | np.ndarray | hax.NamedArray | None
"""Which tokens count, as booleans; None for all."""


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
        return _as_text(numbers, self.tokens)


def _as_text(numbers: dict[str, Any], tokens: Any = None) -> Text:
    """Numbers with their names in one line, after the number of tokens."""
    if any(isinstance(x, Tracer) or not eqx.is_array(x) for x in (tokens, *numbers.values()) if x is not None):
        return Text("traced or abstract: no numbers")
    listed = ", ".join(f"{name.replace('_', ' ')} {float(x):.3g}" for name, x in numbers.items())
    return Text(listed if tokens is None else f"{float(tokens):.0f} tokens: {listed}")


def log_probability_mismatch(trained: TokenValues, sampled: TokenValues, mask: Mask = None) -> TokenMismatch:
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
        ValueError: If shapes or axes differ, or the mask is not boolean.

    References:
        J. Schulman, "Approximating KL Divergence" (2020), k1 and k3, with `r = trained / sampled`.
        NVIDIA, "Adding new models" in the guide to NeMo RL, the multiplicative error.

    Example:
        >>> mismatch = log_probability_mismatch(jnp.array([-1.0, -2.0]), jnp.array([-1.01, -2.0]))
        >>> print(f"{mismatch.largest:.3f} {mismatch.k3:.6f}")
        0.010 0.000025
    """
    return _mismatch(*_changes(trained, sampled, mask))


class ImportanceWeights(Printable, eqx.Module):
    """What each token counts in the loss, and how much of the batch is left. Print it for one line.

    The importance ratio `r` is `exp(trained - sampled)` of a token, or of a whole sequence the product of its tokens'.
    A sample is a token or a sequence too.

    Args:
        weights: A weight for each token, in float32 and without a gradient; 0 where the mask is False. It is a
            NamedArray if the log-probabilities are.
        mismatch: The tokens' log-probabilities compared, before anything is truncated or masked: `k3`,
            `multiplicative_error` and others.
        chi_squared: The mean of `r² - 1`, an estimate of the chi-squared divergence of training from the engine, before
            anything is truncated or masked: the variance that the weights add to the gradient. It may be negative.
        effective_sample_size: `(sum of weights)² / (sum of weights²)` as a share of the samples: 1 if all weights are
            equal, 0 if all are 0.
        capped: The share of the samples whose ratio is above the cap.
    """

    weights: Any
    mismatch: TokenMismatch
    chi_squared: Float32[Array, ""]
    effective_sample_size: Float32[Array, ""]
    capped: Float32[Array, ""]

    def flat(self, prefix: str = "serving") -> dict[str, Float32[Array, ""]]:
        """All metrics, those of the mismatch too, named `{prefix}/{metric}` for trackers; also under `jit`.

        Args:
            prefix: The first part of the names.
        """
        return self.mismatch.flat(prefix) | {f"{prefix}/{name}": getattr(self, name) for name in _METRICS}

    def __rich__(self) -> Text:
        return Text("; ").join([self.mismatch.__rich__(), _as_text({name: getattr(self, name) for name in _METRICS})])


_METRICS = ("chi_squared", "effective_sample_size", "capped")


def importance_weights(
    trained: TokenValues,
    sampled: TokenValues,
    mask: Mask = None,
    *,
    level: str = "token",
    kind: str = "truncate",
    cap: float = 2.0,
    axis: hax.AxisSelector | None = None,
) -> ImportanceWeights:
    """The weights with which a policy gradient corrects for the engine that drew the samples, and their metrics.

    Multiply each token's term of the loss by its weight. The engine's probabilities differ from those of training, by
    other kernels and formats or by older weights, so without this the gradient is that of another distribution. Ratios
    of tokens have little variance and a bias; those of sequences have no bias, and a variance that grows with length.

    Gradients do not flow through the weights: they are constants (`stop_gradient`), as are the metrics.

    Args:
        trained: The log-probabilities of the tokens by the model in training. Any dtype; the rest is in float32.
        sampled: The log-probabilities of the same tokens, from the engine that drew them.
        mask: Which tokens count; all by default. Leave out prompts and padding.
        level: `"token"` weights each token by its own ratio, `"sequence"` all tokens of a sequence by their product.
        kind: What happens to ratios above `cap`: `"truncate"` makes them the cap, `"mask"` makes the weight 0, so that
            the token or sequence is left out.
        cap: The largest weight, at least 1.
        axis: Along which the tokens of a sequence lie, for `level="sequence"`: of a NamedArray, the axis or its name;
            otherwise it is the last.

    Returns:
        The weights and the metrics; the latter are NaN if no token counts. A token that training calls impossible (a
        log-probability of -inf) has weight 0; if the engine calls it impossible too, ratio 1.

    Raises:
        ValueError: If shapes or axes differ, the mask is not boolean, `level` or `kind` is unknown, `cap` is below 1,
            or `axis` is missing or not one of theirs.

    References:
        F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025), truncation.
        J. Liu et al., "When Speed Kills Stability" (2025), sequences and masking. TRL has the same four combinations.
        verl, "Rollout Correction", chi-squared and the effective sample size.

    Example:
        >>> trained, sampled = jnp.log(jnp.array([[0.5, 0.9]])), jnp.log(jnp.array([[0.1, 0.6]]))
        >>> of_tokens = importance_weights(trained, sampled, cap=2.0)
        >>> of_sequences = importance_weights(trained, sampled, level="sequence", kind="mask", cap=8.0)
        >>> [[f"{weight:.2f}" for weight in importance.weights[0]] for importance in (of_tokens, of_sequences)]
        [['2.00', '1.50'], ['7.50', '7.50']]
    """
    for name, value, known in (("level", level, ("token", "sequence")), ("kind", kind, ("truncate", "mask"))):
        if value not in known:
            raise ValueError(f"{name}={value!r} of importance_weights is unknown; use {' or '.join(map(repr, known))}")
    if not cap >= 1.0:  # NaN too
        raise ValueError(
            f"cap={cap!r} of importance_weights must be at least 1, the weight of a token on which both agree; use one "
            "such as 2.0"
        )
    if level == "token" and axis is not None:
        raise ValueError(f"axis={axis!r} of importance_weights is that of a sequence; pass level='sequence' too")
    position = _position_of(axis, trained) if level == "sequence" else None
    change, counts = jax.lax.stop_gradient(_changes(trained, sampled, mask))
    if position is None:
        of_samples, is_sample = change, counts
    else:
        # What training cannot produce has weight 0, also if another token of it is one that the engine cannot.
        is_impossible = jnp.any(change == -jnp.inf, axis=position, keepdims=True)
        of_samples = jnp.where(is_impossible, -jnp.inf, jnp.sum(change, axis=position, keepdims=True))
        is_sample = jnp.any(counts, axis=position, keepdims=True)
    ratio = jnp.exp(of_samples)
    above = is_sample & (ratio > cap)
    limited = jnp.where(above, jnp.float32(cap if kind == "truncate" else 0.0), ratio)
    weights = jnp.where(counts, limited, jnp.float32(0.0))
    of_sample = jnp.where(is_sample, limited, jnp.float32(0.0))
    samples, squares = jnp.sum(is_sample.astype(jnp.float32)), jnp.sum(jnp.square(of_sample))
    return ImportanceWeights(
        weights=hax.named(weights, trained.axes) if isinstance(trained, hax.NamedArray) else weights,
        mismatch=_mismatch(change, counts),
        # Not the mean of squares less one, which would lose the digits of small changes.
        chi_squared=jnp.sum(jnp.where(is_sample, jnp.expm1(2.0 * of_samples), jnp.float32(0.0))) / samples,
        effective_sample_size=jnp.where(squares > 0.0, jnp.square(jnp.sum(of_sample)) / squares, 0.0) / samples,
        capped=jnp.sum(above.astype(jnp.float32)) / samples,
    )


def _position_of(axis: hax.AxisSelector | None, values: TokenValues) -> int:
    """The index of the axis along which the tokens of a sequence lie."""
    if isinstance(values, hax.NamedArray):
        names = [one.name for one in values.axes]
        name = axis.name if isinstance(axis, hax.Axis) else axis
        if name not in names:
            raise ValueError(
                f"axis={name!r} of importance_weights is not an axis of trained; level='sequence' needs the one along "
                f"which the tokens of a sequence lie, one of {names}"
            )
        return names.index(cast(str, name))
    if axis is not None or jnp.ndim(values) == 0:
        raise ValueError(
            f"axis={axis!r} of importance_weights is for NamedArrays; in an array of shape {jnp.shape(values)}, the "
            "tokens of a sequence have to lie along the last axis: leave axis out, or transpose the array"
        )
    return jnp.ndim(values) - 1


def _changes(
    trained: TokenValues, sampled: TokenValues, mask: Mask
) -> tuple[Float32[Array, "*tokens"], Bool[Array, "*tokens"]]:
    """`trained - sampled` of each token, 0 for those that do not count; and which count."""
    arguments = {"trained": trained, "sampled": sampled} | ({} if mask is None else {"mask": mask})
    shapes = {name: x.axes if isinstance(x, hax.NamedArray) else jnp.shape(x) for name, x in arguments.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name}: {shape}" for name, shape in shapes.items())
        raise ValueError(f"log-probabilities are not for the same tokens ({listed}); pass one of each for every token")
    arrays = {name: x.array if isinstance(x, hax.NamedArray) else jnp.asarray(x) for name, x in arguments.items()}
    after, before = (arrays[name].astype(jnp.float32) for name in ("trained", "sampled"))
    counts = jnp.ones(after.shape, bool) if mask is None else arrays["mask"]
    if counts.dtype != bool:
        raise ValueError(f"mask is of dtype {counts.dtype}, but says which tokens count; pass booleans: mask != 0")
    # Tokens that do not count may have any value. If both are -inf, they agree.
    return jnp.where(counts & (after != before), after - before, jnp.float32(0.0)), counts


def _mismatch(change: Float32[Array, "*tokens"], counts: Bool[Array, "*tokens"]) -> TokenMismatch:
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
