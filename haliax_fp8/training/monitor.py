"""Monitors: what a training step measures in some of its steps, and how it counts steps."""

import abc
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree

from ..layers.rule import LayerRule


class AbstractMonitor(abc.ABC):
    """What `TrainStep(monitor=...)` measures, and when; `haliax_fp8.statistics.every` makes one.

    A step that measures is a program of its own, so the other steps run the same program as without a monitor.
    """

    @abc.abstractmethod
    def is_due(self, step: int) -> bool:
        """Whether to measure in a step.

        Args:
            step: The number of steps taken before.
        """

    @abc.abstractmethod
    def measuring(self, model: Any, rules: tuple[LayerRule, ...]) -> Any:
        """The model with ops that measure, which is differentiated in steps that measure.

        Args:
            model: The model.
            rules: The rules of its layer classes.
        """

    @abc.abstractmethod
    def without_measurements(self, tree: Any, model: Any) -> Any:
        """Gradients, or a part of them, as they would be without measuring.

        Args:
            tree: The gradients of the measuring model, over all microbatches.
            model: The model.
        """

    @abc.abstractmethod
    def measured(self, overwrites: Any) -> Any:
        """The measurements, a tree of arrays.

        Args:
            overwrites: The part of the measuring model's gradients that replaces state.
        """

    @abc.abstractmethod
    def metrics(self, measured: Any) -> dict[str, Any]:
        """The numbers by their names in a tracker; called on the host.

        Args:
            measured: The result of `measured`, with concrete values.
        """


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
