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

    Both stand in one array, so that a step reads and writes one buffer per layer. It carries names, so that Haliax
    never takes it for data to scan over. Layers that are stacked have the axes of their stack in front.

    Args:
        table: float32, `[*stack, operand, 1 + history]`: a row for input, kernel and output gradient; first the scale,
            initially 1, then the amaxes, initially 0, newest first, then oldest to newest.
        scaling: The delayed scaling that updates it.
        limits: The largest value of each operand's format.
    """

    table: hax.NamedArray
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
        row = jnp.zeros(1 + scaling.amax_history_length, jnp.float32).at[0].set(1.0)
        axes = (*stack, hax.Axis("fp8_operand", len(recipe.quantizations)), hax.Axis("fp8_state", row.size))
        table = hax.named(jnp.broadcast_to(row, tuple(axis.size for axis in axes)), axes)
        return DelayedState(table, scaling, recipe.limits)

    @property
    def scale(self) -> Array:
        """The scales that the next use takes, `[*stack, operand]`."""
        return self.table.array[..., 0]

    @property
    def amax_history(self) -> Array:
        """The amaxes of past steps, `[*stack, operand, history]`."""
        return self.table.array[..., 1:]

    @property
    def array(self) -> Array:
        """The table as the product takes it: float32 (or `fp32_max_grad`), whatever the model was cast to."""
        table = self.table.array
        return table if is_max_grad(table) or table.dtype == jnp.float32 else to_float32(table)

    def with_array(self, table: Array) -> "DelayedState":
        """This state with another table."""
        # Through the tree: inside `vmap` and `scan` the names may count axes that the array does not have.
        return jax.tree.unflatten(jax.tree.structure(self), [table])

    def accumulate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, other: "DelayedState"
    ) -> "DelayedState":
        """The maximum of both, exact because every evaluation began with the same scale and history."""
        return other.with_array(jnp.maximum(self.array, other.array))

    def overwritten_by(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, gradient: "DelayedState"
    ) -> "DelayedState":
        """The state with the newest amax of the gradient entered.

        Only that amax is taken; scale and the rest of the history are recomputed from this state. So a plain gradient,
        which sums where a layer is used several times, cannot corrupt them. State stays as it was where the gradient is
        that of a layer that the step did not reach (a scale of 0 or `-inf`) and where the amax is not finite.
        """
        reached, amax = gradient.array[..., :1], gradient.array[..., 1:2]
        recorded = jnp.isfinite(reached) & (reached > 0.0) & jnp.isfinite(amax) & (amax >= 0.0)
        new = self.scaling.update(self.array, amax, self.limits)
        return self.with_array(jnp.where(recorded, new, self.array))

    def with_max_gradients(self) -> "DelayedState":
        """The table in `fp32_max_grad`."""
        return self.with_array(to_max_grad(self.array))
