"""Statistics that a step measures every few steps, and the check that its numbers are finite."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from ..layers.rule import LayerRule


@dataclasses.dataclass(frozen=True)
class Monitor:
    """What `TrainStep(monitor=...)` measures, and when; `haliax_fp8.statistics.every` makes one.

    A step that measures is a program of its own, so the other steps run the same program as without a monitor. Two
    monitors with the same functions, steps and prefix share it.

    Args:
        steps: How many steps from one that measures to the next; the first one does.
        prefix: What the names of the numbers begin with.
        measuring: From the model and the rules of its layer classes, makes the one that is differentiated in steps that
            measure: with ops that measure.
        without_measurements: From gradients of the measuring model, or a part of them, and the model, makes what they
            would be without measuring.
        measured: Finds the measurements, a tree of arrays, in the part of the gradients that replaces state.
        metrics: From the measurements and the prefix, makes the numbers by their names in a tracker; called on the
            host.

    Raises:
        ValueError: If `steps` is not an integer of at least 1.
    """

    steps: int
    prefix: str
    # Statistics are taken with gradients, so that this file cannot import them.
    measuring: Callable[[Any, tuple[LayerRule, ...]], Any] = dataclasses.field(repr=False)
    without_measurements: Callable[[Any, Any], Any] = dataclasses.field(repr=False)
    measured: Callable[[Any], Any] = dataclasses.field(repr=False)
    metrics: Callable[[Any, str], dict[str, Any]] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise ValueError(f"steps={self.steps!r} must be an integer of at least 1; every(1) measures in each step")

    def is_due(self, step: int) -> bool:
        """Whether to measure in a step: in the first one, and every `steps` after it.

        Args:
            step: The number of steps taken before.
        """
        return step % self.steps == 0


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Plan:
    """The phases of the run that a state belongs to, for checkpoints: a step knows its own.

    Args:
        phases: `Phase`s, in their order; none for a run without.
    """

    phases: tuple[Any, ...] = ()


class CountedState(NamedTuple):
    """The optimizer's state of a step with a monitor or phases, with a count of steps.

    Args:
        steps: The number of steps taken; on the host, so that the next step need not wait for this one.
        optimizer: The optimizer's own state.
        plan: The phases of the step.
    """

    steps: np.ndarray | int
    optimizer: PyTree
    plan: Plan = Plan()


def counted(opt_state: PyTree, *, nested: bool = False) -> CountedState:
    """The state with its count; a state without one starts at 0.

    Args:
        opt_state: The state.
        nested: Whether the step runs inside `jit`.

    Raises:
        ValueError: Inside `jit`, where the number of the step cannot select a program.
    """
    if nested:
        raise ValueError(
            "monitor and phases have programs of their own for some steps, but inside jit there is only one. Call the "
            "step outside jit; or use haliax_fp8.quantization_statistics inside, or a step of one phase, "
            "TrainStep(..., phases=[Phase(0, recipe)])"
        )
    state = opt_state if isinstance(opt_state, CountedState) else CountedState(np.zeros((), np.int64), opt_state)
    return state._replace(steps=np.asarray(state.steps, np.int64))


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
        ValueError: If `metrics` is empty.

    Example:
        >>> step = TrainStep(loss_fn, optax.sgd(0.1))
        >>> new_model, new_opt_state, metrics = step(model, step.init(model), x)
        >>> require_finite_step(metrics, step=0)
        >>> model, opt_state = new_model, new_opt_state
    """
    if not metrics:
        raise ValueError("metrics is empty, so it cannot show whether the step was finite; pass what TrainStep returns")
    read = {name: value for name, value in metrics.items() if name != "aux" and name.count("/") < 3}
    numbers: dict[str, Any] = jax.device_get(read)
    bad = tuple(f"{name} is {float(x)}" for name, x in numbers.items() if not np.isfinite(x).all())
    if bad:
        raise NonFiniteStep(step, bad, "" if where is None else where())
