"""What delayed scaling measures of a tensor, and how its history is reduced to one number."""

import abc
import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from ..._arguments import require_number


# A GPU's multiprocessors take a few rows each.
_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class AbstractAmaxCompute(abc.ABC):
    """A rule for the amax that delayed scaling divides by. `amax_compute_algo` in TransformerEngine."""

    @abc.abstractmethod
    def measure(self, x: Float[Array, "*shape"], ensemble: int) -> Float[Array, "*ensemble 1 parts"]:
        """What a step measures of parts of an operand, in any dtype; it records their maximum.

        Args:
            x: The operand; it may have no elements, and then 0 is measured.
            ensemble: How many leading axes number members, each with its own amax.
        """

    @abc.abstractmethod
    def of_history(
        self, newest: Float32[Array, "*rows 1"], older: Float32[Array, "*rows others"]
    ) -> Float32[Array, "*rows 1"]:
        """The number that the scale comes from; 0 or less if nothing was recorded.

        What is computed of `older` alone is computed once in a compiled step, whose gradient and update both call this.
        What is not yet recorded is 0, what was not finite `-inf`.

        Args:
            newest: This step's measurement.
            older: Those of the steps before, from the oldest on; none if the history has a length of 1.
        """


def amaxes_of_rows(x: Float[Array, "*shape"], ensemble: int) -> Float[Array, "*ensemble 1 parts"]:
    """`max |x|` of the rows of the leading axes, enough of them to keep a device busy; 0 for a row without elements.

    Args:
        x: The operand.
        ensemble: How many leading axes number members.

    Example:
        >>> amaxes_of_rows(jnp.array([[1.0, -2.0], [3.0, -4.0]], jnp.bfloat16), 0)
        Array([[2, 4]], dtype=bfloat16)
    """
    rows, axis = 1, ensemble
    while axis < x.ndim - 1 and rows < _ROWS:
        rows, axis = rows * x.shape[axis], axis + 1
    # A wider operand is one part. Where it is the result of an FP8 product, XLA lets cuBLASLt quantize it and take
    # its amax; and takes any maximum of its magnitudes for that of all (it fails on a vector of them).
    if x.size == 0 or rows == 1 or x.dtype.itemsize > 2:
        axes, magnitude, rows = tuple(range(ensemble, x.ndim)), lax.abs(x), 1
        amax = jnp.max(magnitude, axis=axes, initial=0.0) if x.size == 0 else lax.reduce_max(magnitude, axes)
        parts = lax.convert_element_type(amax, jnp.float32)
    else:
        parts = lax.reduce_max(lax.abs(x), tuple(range(axis, x.ndim)))
    return lax.reshape(parts, (*x.shape[:ensemble], 1, rows))


@dataclasses.dataclass(frozen=True)
class MaxOfHistory(AbstractAmaxCompute):
    """The largest amax of the history: values are clipped only if they exceed everything in the history."""

    def measure(self, x: Float[Array, "*shape"], ensemble: int) -> Float[Array, "*ensemble 1 parts"]:
        """The amaxes of rows."""
        return amaxes_of_rows(x, ensemble)

    def of_history(
        self, newest: Float32[Array, "*rows 1"], older: Float32[Array, "*rows others"]
    ) -> Float32[Array, "*rows 1"]:
        """`max(newest, max(older))`."""
        if older.shape[-1] == 0:
            return newest
        axis = older.ndim - 1
        return lax.max(newest, lax.expand_dims(lax.reduce_max(older, (axis,)), (axis,)))


@dataclasses.dataclass(frozen=True)
class MostRecent(AbstractAmaxCompute):
    """The last step's amax: reacts at once, and forgets at once."""

    def measure(self, x: Float[Array, "*shape"], ensemble: int) -> Float[Array, "*ensemble 1 parts"]:
        """The amaxes of rows."""
        return amaxes_of_rows(x, ensemble)

    def of_history(
        self, newest: Float32[Array, "*rows 1"], older: Float32[Array, "*rows others"]
    ) -> Float32[Array, "*rows 1"]:
        """`newest`."""
        del older
        return newest


@dataclasses.dataclass(frozen=True)
class RecoveringMax(AbstractAmaxCompute):
    """The largest amax of the history, but never far above the last few: one bad step is soon forgotten.

    `min(max(history), factor * max(last steps))`. After a step a million times too large, `MaxOfHistory` rounds
    everything to zero until that step has left the history; this rule does so for `steps` steps at most. A tensor that
    grows, or alternates within a factor of `factor`, gets the scale of `MaxOfHistory`, and nothing of it is clipped.

    If the last few steps recorded only zeros, as after a layer whose own input was flushed to zero, the smallest amax
    of the history replaces them. So all layers recover in the same step, not one after the other.

    Args:
        steps: How many of the last steps count. Values above the history's length have no further effect.
        factor: How far above their amaxes the result may be. E4M3 represents a tensor whose scale is 256 times too
            large without loss (`docs/recipes.md`); the `margin` of delayed scaling is applied on top.

    Raises:
        ValueError: If `steps` is not a positive integer, or `factor` is below 1 or not finite.

    Example:
        >>> newest, older = jnp.array([2.0]), jnp.array([3.0, 9000.0, 3.0, 2.0])
        >>> RecoveringMax(steps=2).of_history(newest, older), MaxOfHistory().of_history(newest, older)
        (Array([512.], dtype=float32), Array([9000.], dtype=float32))
    """

    steps: int = 16
    factor: float = 256.0

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise ValueError(f"steps={self.steps!r} of RecoveringMax must be a positive integer; 16 is usual")
        if not (1.0 <= self.factor < np.inf):
            raise ValueError(f"factor={self.factor} of RecoveringMax must be finite and at least 1; 256 is usual")

    def measure(self, x: Float[Array, "*shape"], ensemble: int) -> Float[Array, "*ensemble 1 parts"]:
        """The amaxes of rows."""
        return amaxes_of_rows(x, ensemble)

    def of_history(
        self, newest: Float32[Array, "*rows 1"], older: Float32[Array, "*rows others"]
    ) -> Float32[Array, "*rows 1"]:
        """`min(max(history), factor * max(last steps))`."""
        axis, others = older.ndim - 1, older.shape[-1]
        largest = MaxOfHistory().of_history(newest, older)
        last = lax.slice_in_dim(older, others - min(self.steps - 1, others), others, axis=axis)
        recent = MaxOfHistory().of_history(newest, last)
        recorded = [jnp.where(amaxes > 0.0, amaxes, np.float32(np.inf)) for amaxes in (newest, older)]
        smallest = lax.min(recorded[0], jnp.min(recorded[1], axis=axis, keepdims=True, initial=np.inf))
        recent = jnp.where(recent > 0.0, recent, smallest)
        # Before the factor: the product may exceed float32.
        return jnp.where(recent < largest / np.float32(self.factor), recent * np.float32(self.factor), largest)


@dataclasses.dataclass(frozen=True)
class MovingAverage(AbstractAmaxCompute):
    """The exponential moving average of the amaxes: one outlier moves the scale a little, and is clipped.

    `sum(decay**age * amax) / sum(decay**age)` over the recorded steps, so the first steps are unbiased.

    Args:
        decay: The weight of a step relative to the one after it.

    Raises:
        ValueError: If `decay` is not between 0 and 1.

    Example:
        >>> MovingAverage(decay=0.5).of_history(jnp.array([3.0]), jnp.array([0.0, 6.0]))
        Array([4.], dtype=float32)
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        require_number("decay", self.decay, "0.9", of="MovingAverage")
        if not 0.0 < self.decay < 1.0:
            raise ValueError(f"decay={self.decay} of MovingAverage must lie between 0 and 1; 0.9 is usual")

    def measure(self, x: Float[Array, "*shape"], ensemble: int) -> Float[Array, "*ensemble 1 parts"]:
        """The amaxes of rows."""
        return amaxes_of_rows(x, ensemble)

    def of_history(
        self, newest: Float32[Array, "*rows 1"], older: Float32[Array, "*rows others"]
    ) -> Float32[Array, "*rows 1"]:
        """The weighted mean of the positive entries."""
        history = lax.concatenate([newest, older], older.ndim - 1)
        ages = -np.arange(history.shape[-1]) % history.shape[-1]
        recorded = history > 0.0
        weights = jnp.where(recorded, np.asarray(self.decay**ages, np.float32), np.float32(0.0))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        mean = jnp.sum(weights * jnp.where(recorded, history, np.float32(0.0)), axis=-1, keepdims=True)
        return mean / jnp.where(total > 0.0, total, np.float32(1.0))


@dataclasses.dataclass(frozen=True)
class Percentile(AbstractAmaxCompute):
    """A percentile of `|x|` instead of its maximum: a few outliers are clipped, and everything else keeps its
    precision.

    It is exact, which requires sorting the tensor, and meant for research and calibration. Several uses of one state
    record the largest of their percentiles.

    Args:
        percent: The percentage of elements that must fit the range.

    Raises:
        ValueError: If `percent` is below 50, which would be a fraction, or above 100.

    Example:
        >>> Percentile(75.0).measure(jnp.array([1.0, -2.0, 3.0, -400.0, 5.0]), 0)
        Array([[5.]], dtype=float32)
    """

    percent: float = 99.99

    def __post_init__(self) -> None:
        require_number("percent", self.percent, "99.99", of="Percentile")
        if not 0.0 < self.percent <= 100.0:
            raise ValueError(f"percent={self.percent} of Percentile must be above 0 and at most 100; 99.99 is usual")
        if self.percent < 50.0:
            meant = 100.0 * self.percent if 0.5 <= self.percent <= 1.0 else 99.99
            raise ValueError(
                f"percent={self.percent} of Percentile would clip {100.0 - self.percent:.4g} % of every tensor: it is "
                f"a percentage, not a fraction; use {meant:g}"
            )

    def measure(self, x: Float[Array, "*shape"], ensemble: int) -> Float[Array, "*ensemble 1 1"]:
        """The smallest element of `|x|` that `percent` of all elements do not exceed.

        Of the operand as a whole: the percentile of all is not the largest of the parts' percentiles.
        """
        if x.size == 0:
            return amaxes_of_rows(x, ensemble)
        magnitude = lax.convert_element_type(lax.abs(x), jnp.float32).reshape(*x.shape[:ensemble], 1, -1)
        count = magnitude.shape[-1]
        rank = max(0, int(np.ceil(count * self.percent / 100.0)) - 1)
        return jnp.sort(magnitude, axis=-1)[..., rank : rank + 1]

    def of_history(
        self, newest: Float32[Array, "*rows 1"], older: Float32[Array, "*rows others"]
    ) -> Float32[Array, "*rows 1"]:
        """The largest of them."""
        return MaxOfHistory().of_history(newest, older)
