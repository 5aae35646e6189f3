"""State that travels through gradients: the marker type, and what an FP8 op remembers."""

import abc

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax.quantization import CustomGradientAccumulation
from jaxtyping import Array

from ._recipe import Recipe
from ._scaling import AbstractScaling, first_table, overwritten
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


class OpState(OverwriteWithGradient):
    """What an op remembers: a table with a row for each operand, first the scale that its next use takes.

    One array for all, so that a step reads and writes one buffer per layer. It carries names, so that Haliax never
    takes it for data to scan over. Layers that are stacked have the axes of their stack in front.

    Args:
        table: float32, `[*stack, operand, column]`, with a row for input, kernel and output gradient. A row of delayed
            scaling is its scale, initially 1, then the amaxes, initially 0, newest first, then oldest to newest.
        scalings: The scalings that read and write the rows.
        limits: The largest value of each operand's format.
    """

    table: hax.NamedArray
    scalings: tuple[AbstractScaling, ...] = eqx.field(static=True)
    limits: tuple[float, ...] = eqx.field(static=True)

    @staticmethod
    def init(recipe: Recipe, stack: tuple[hax.Axis, ...] = ()) -> "OpState | None":
        """The state before the first step; None for a recipe that keeps none.

        Args:
            recipe: The recipe of the op.
            stack: Axes of the layer stacks that the op's layer is in.
        """
        first = first_table(recipe.scalings)
        if first is None:
            return None
        axes = (*stack, hax.Axis("fp8_operand", first.shape[0]), hax.Axis("fp8_state", first.shape[1]))
        table = hax.named(jnp.broadcast_to(first, tuple(axis.size for axis in axes)), axes)
        return OpState(table, recipe.scalings, recipe.limits)

    @property
    def scale(self) -> Array:
        """The scales that the next use takes, `[*stack, operand]`."""
        return self.table.array[..., 0]

    @property
    def array(self) -> Array:
        """The table as the product takes it: float32 (or `fp32_max_grad`), whatever the model was cast to."""
        table = self.table.array
        return table if is_max_grad(table) or table.dtype == jnp.float32 else to_float32(table)

    def with_array(self, table: Array) -> "OpState":
        """This state with another table."""
        # Through the tree: inside `vmap` and `scan` the names may count axes that the array does not have.
        return jax.tree.unflatten(jax.tree.structure(self), [table])

    def accumulate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, other: "OpState"
    ) -> "OpState":
        """The maximum of both, exact because every evaluation began with the same scale and history."""
        return other.with_array(jnp.maximum(self.array, other.array))

    def overwritten_by(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, gradient: "OpState"
    ) -> "OpState":
        """The state with the newest amax of the gradient entered.

        Only that amax is taken; scale and the rest of the history are recomputed from this state. So a plain gradient,
        which sums where a layer is used several times, cannot corrupt them. State stays as it was where the gradient is
        that of a layer that the step did not reach (a scale of 0 or `-inf`) and where the amax is not finite.
        """
        return self.with_array(overwritten(self.array, gradient.array, self.scalings, self.limits))

    def with_recipe(self, recipe: Recipe) -> "OpState":
        """This state as a recipe updates it whose rows begin as these do, and may be longer."""
        first, table = first_table(recipe.scalings), self.array
        assert first is not None
        padding = [(0, 0)] * (table.ndim - 1) + [(0, first.shape[1] - table.shape[-1])]
        return OpState(self.table, recipe.scalings, self.limits).with_array(jnp.pad(table, padding))

    def with_max_gradients(self) -> "OpState":
        """The table in `fp32_max_grad`."""
        return self.with_array(to_max_grad(self.array))
