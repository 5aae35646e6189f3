"""The marker type of state that gradients overwrite."""

import abc
from typing import Any

from haliax.quantization import CustomGradientAccumulation


class OverwriteWithGradient(CustomGradientAccumulation):
    """Marks state whose gradient is not a direction, but the state of the next step.

    `partition_for_grad_overwrite` finds state by this type, so that no optimizer, weight decay, clipping or average
    ever touches it. It is a subclass of Haliax's marker: trainers written for `haliax.quantization` work unchanged.
    """

    @abc.abstractmethod
    def accumulate[S](self: S, other: S) -> S:
        """Combines the gradients of two evaluations from the same state, such as two microbatches."""

    @abc.abstractmethod
    def overwritten_by[S](self: S, gradient: S) -> S:
        """The state of the next step, from this state and its gradient."""

    @abc.abstractmethod
    def with_max_gradients[S](self: S) -> S:
        """This state with arrays whose gradients accumulate by maximum, for the differentiated function."""


def is_state(node: Any) -> bool:
    """Whether a node of a tree is state that gradients overwrite."""
    return isinstance(node, OverwriteWithGradient)
