"""State that travels through gradients: the marker type, and what an FP8 op remembers."""

import abc

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax.quantization import CustomGradientAccumulation
from jaxtyping import Array

from ._recipe import Recipe
from ._scaling import DelayedScaling
from ._state import is_max_grad, to_float32, to_max_grad


class OverwriteWithGradient(CustomGradientAccumulation):
    """Marks state whose gradient is not a direction to go but the state of the next step.

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


class DelayedState(OverwriteWithGradient):
    """What delayed scaling remembers: per operand, the scale for the next use and the amaxes of past steps.

    Operands are in the order input, kernel, output gradient. Arrays carry names, so that Haliax never takes them for
    data to scan over. Layers that are stacked have the axes of their stack in front.

    Args:
        scale: float32, `[*stack, operand]`, initially 1.
        amax_history: float32, `[*stack, operand, history]`, initially 0; newest first, then oldest to newest.
        scaling: The delayed scaling that updates both.
        limits: The largest value of each operand's format.
    """

    scale: hax.NamedArray
    amax_history: hax.NamedArray
    scaling: DelayedScaling = eqx.field(static=True)
    limits: tuple[float, ...] = eqx.field(static=True)

    @staticmethod
    def init(recipe: Recipe, stack: tuple[hax.Axis, ...] = ()) -> "DelayedState | None":
        """The state before the first step; None for a recipe that keeps none.

        Args:
            recipe: The recipe of the op.
            stack: Axes of the layer stacks that the op's layer is in.
        """
        scaling = recipe.delayed
        if scaling is None:
            return None
        operand = hax.Axis("fp8_operand", len(recipe.quantizations))
        history = hax.Axis("fp8_history", scaling.amax_history_length)
        return DelayedState(
            scale=hax.ones((*stack, operand), jnp.float32),
            amax_history=hax.zeros((*stack, operand, history), jnp.float32),
            scaling=scaling,
            limits=tuple(q.format.max for q in recipe.quantizations),
        )

    @property
    def arrays(self) -> tuple[Array, Array]:
        """Scale and history as the product takes them: float32 (or `fp32_max_grad`), whatever the model was cast to."""
        scale, history = self.scale.array, self.amax_history.array
        return _at_least_float32(scale), _at_least_float32(history)

    def _replace(self, scale: Array, history: Array) -> "DelayedState":
        arrays = jax.tree.leaves(self)
        assert len(arrays) == 2
        # Through the tree: inside `vmap` and `scan` the names may count axes that the arrays do not have.
        return jax.tree.unflatten(jax.tree.structure(self), [scale, history])

    def accumulate(self, other: "DelayedState") -> "DelayedState":
        """The maximum of both, exact because every evaluation began with the same scale and history."""
        (scale, history), (other_scale, other_history) = self.arrays, other.arrays
        return other._replace(jnp.maximum(scale, other_scale), jnp.maximum(history, other_history))

    def overwritten_by(self, gradient: "DelayedState") -> "DelayedState":
        """The state with the newest amax of the gradient entered.

        Only that amax is taken; scale and the rest of the history are recomputed from this state. So a plain gradient,
        which sums where a layer is used several times, cannot corrupt them. State stays as it was where the gradient is
        that of a layer that the step did not reach (a scale of 0 or `-inf`) and where the amax is not finite.
        """
        (scale, history), (reached, observed) = self.arrays, gradient.arrays
        amax = observed[..., 0]
        recorded = jnp.isfinite(reached) & (reached > 0.0) & jnp.isfinite(amax) & (amax >= 0.0)
        new_scale, new_history = self.scaling.update(scale, history, amax, self.limits)
        return self._replace(
            jnp.where(recorded, new_scale, scale), jnp.where(recorded[..., None], new_history, history)
        )

    def with_max_gradients(self) -> "DelayedState":
        """Scale and history in `fp32_max_grad`."""
        scale, history = self.arrays
        return self._replace(to_max_grad(scale), to_max_grad(history))


def _at_least_float32(x: Array) -> Array:
    return x if is_max_grad(x) else to_float32(x)
