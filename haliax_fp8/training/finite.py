"""Rejects steps whose loss or gradient is not finite."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer


class NonFiniteStep(ValueError):
    """A step whose loss or gradient is infinite or NaN.

    Args:
        step: The number of the step; None if unknown.
        names: The metrics that are not finite.
        where: Where it began, in words; empty if not searched for.
    """

    def __init__(self, step: int | None, names: tuple[str, ...], where: str = ""):
        self.step, self.names, self.where = step, names, where
        of_step = "the step" if step is None else f"step {step}"
        advice = where or (
            "to find where it began, use require_finite_step(..., where=partial(where_not_finite, model, loss_fn, "
            "*batch)), with the model before the step"
        )
        super().__init__(
            f"{of_step} is not finite: {', '.join(names)}. {advice[0].upper()}{advice[1:]}. Keep the model and the "
            "optimizer's state from before the step, and skip this batch; if it happens again, go back to the last "
            "checkpoint, lower the learning rate or clean the data"
        )


def require_finite_step(
    metrics: Mapping[str, Any],
    *,
    step: int | None = None,
    where: Callable[[], str] | None = None,
) -> None:
    """Raises if a step's loss or gradient is infinite or NaN; call it before the new model replaces the old one.

    It reads only what the step returns anyway, so the compiled program does not change: the norm of the gradients is
    not finite if one of their elements is not. Reading waits for the step to end. With `donate=True`, the old model is
    gone by then; stop, and go back to a checkpoint.

    Args:
        metrics: The metrics that `TrainStep` returned, or numbers of your own step. Auxiliary results, `aux`, and a
            monitor's numbers, with names like `fp8/layers.0/input/sqnr`, are ignored: for a layer that the loss does
            not reach, they are NaN in a healthy step.
        step: Its number, for the message.
        where: Locates the origin if the step is not finite: `functools.partial(where_not_finite, model, loss_fn,
            *batch)`.

    Raises:
        NonFiniteStep: If one of the numbers is not finite. It is a `ValueError`, and names the step, what `where`
            found, and the remedy.
        ValueError: If `metrics` is not a mapping, or is empty or traced: inside `jit` there is nothing to read.

    Example:
        >>> step = TrainStep(loss_fn, optax.sgd(0.1))
        >>> new_model, new_opt_state, metrics = step(model, step.init(model), x)
        >>> require_finite_step(metrics, step=0)
        >>> model, opt_state = new_model, new_opt_state
    """
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"metrics is a {type(metrics).__name__}, but must be a mapping of names to numbers: the third result of a "
            'TrainStep, or {"loss": loss} in a step of your own'
        )
    if not metrics:
        raise ValueError("metrics is empty, so it cannot show whether the step was finite; pass what TrainStep returns")
    if any(isinstance(value, Tracer) for value in metrics.values()):
        raise ValueError("metrics are traced; call require_finite_step outside jit, with the metrics of the step")
    read = {name: value for name, value in metrics.items() if name != "aux" and name.count("/") < 3}
    numbers: dict[str, Any] = jax.device_get(read)
    bad = tuple(f"{name} is {float(x)}" for name, x in numbers.items() if not np.isfinite(x).all())
    if bad:
        raise NonFiniteStep(step, bad, "" if where is None else where())
