"""Monitors: what a training step measures in some of its steps, and how it counts steps."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

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


class CountedState(NamedTuple):
    """The optimizer's state of a step with a monitor, with a count of steps.

    Args:
        steps: The number of steps taken; on the host, so that the next step need not wait for this one.
        optimizer: The optimizer's own state.
    """

    steps: np.ndarray
    optimizer: PyTree


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
            "monitor measures in some steps, which run a program of their own, but inside jit there is only one. Call "
            "the step outside jit, or use haliax_fp8.quantization_statistics inside"
        )
    found = opt_state if isinstance(opt_state, CountedState) else CountedState(np.zeros((), np.int64), opt_state)
    return found._replace(steps=np.asarray(found.steps, np.int64))
