"""State that travels through gradients: the marker type, and the state of an FP8 op."""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.quantization import CustomGradientAccumulation
from jax import lax
from jax.core import Tracer
from jaxtyping import Array

from ._members import measured_by_reached
from ._mesh_axes import varying_axes
from ._recipe import Recipe
from ._scaling import (
    AbstractScaling,
    first_table,
    guarded,
    measures,
    overwriting,
    overwritten,
    unguarded,
)
from ._state import is_max_grad, to_float32, to_max_grad


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


class OpState(OverwriteWithGradient):
    """What an op remembers: a table with a row for each operand, first the scale that its next use takes.

    It is a single array, so a step reads and writes one buffer per layer. It is named, so that Haliax never scans over
    it by mistake. In stacked layers, the axes of the stack come first.

    Args:
        table: float32, `[*stack, operand, column]`, with a row for input, kernel and output gradient. A row of delayed
            scaling is its scale, initially 1, then the amaxes, initially 0, newest first, then oldest to newest; last
            the guard, which reveals a scale that anything but its own update changed.
        scalings: The scalings that read and write the rows.
        limits: The largest value of each operand's format.
        input_group: A name shared by ops that read the same input, see `fuse_projections`; None for most.
    """

    table: hax.NamedArray
    scalings: tuple[AbstractScaling, ...] = eqx.field(static=True)
    limits: tuple[float, ...] = eqx.field(static=True)
    input_group: str | None = eqx.field(static=True, default=None)

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
        return as_state(self.table.array)

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

        Only that amax is used; scale and the rest of the history are recomputed from this state. So a plain gradient,
        which sums if a layer is used several times, cannot corrupt them. State does not change if the step did not
        reach the layer (a scale of 0 or `-inf`) or if the amax is not finite.
        """
        return overwrite_states([self], [gradient])[0]

    def with_recipe(self, recipe: Recipe) -> "OpState":
        """This state as a recipe updates it whose rows begin as these do, and may be longer."""
        first, rows = first_table(recipe.scalings), unguarded(self.array)
        assert first is not None
        padding = [(0, 0)] * (rows.ndim - 1) + [(0, first.shape[1] - 1 - rows.shape[-1])]
        table = lax.concatenate([jnp.pad(rows, padding), self.array[..., -1:]], rows.ndim - 1)
        return OpState(self.table, recipe.scalings, self.limits, self.input_group).with_array(table)

    def with_scale(self, scale: Array) -> "OpState":
        """This state with other scales, which broadcast to `[*stack, operand]`."""
        rows = unguarded(self.array)
        scale = jnp.broadcast_to(jnp.asarray(scale, jnp.float32), rows.shape[:-1])
        return self.with_array(guarded(rows.at[..., 0].set(scale)))

    def with_max_gradients(self) -> "OpState":
        """The table in `fp32_max_grad`."""
        return self.with_array(to_max_grad(self.array))


def as_state(table: Array) -> Array:
    """A table as products take it: `fp32_max_grad` unchanged, everything else in float32."""
    return table if is_max_grad(table) or table.dtype == jnp.float32 else to_float32(table)


def overwrite_states(states: Sequence[OpState], gradients: Sequence[OpState]) -> list[OpState]:
    """The result of `OpState.overwritten_by` for each state and its gradient; all of a kind at once.

    Args:
        states: This step's.
        gradients: Their gradients, in the same order.
    """
    return together(overwriting, overwritten, states, gradients)


def together(
    change_of: Callable[..., Array],
    changed: Callable[..., Array],
    states: Sequence[OpState],
    others: Sequence[Any],
    of_ops: Sequence[Array] | None = None,
) -> list[OpState]:
    """Computes the change of all states of a kind at once: a kernel or two for all layers, not for each."""
    new: list[OpState] = list(states)
    for members in kinds(states, others).values():
        scalings, limits = states[members[0]].scalings, states[members[0]].limits
        if measures(scalings) == 0:
            continue
        tables = concatenated([states[i].array for i in members])
        of_others = [others[i].array for i in members]
        # Records have one axis where tables have rows and columns.
        axis = states[members[0]].array.ndim - 2
        of_others = to_float32(of_others[0] if len(of_others) == 1 else lax.concatenate(of_others, axis))
        if of_ops is not None:
            of_others = measured_by_reached(of_others, lax.concatenate([of_ops[i] for i in members], axis))
        # Apart from the tables: one kernel for the changes of all.
        changes = lax.optimization_barrier(change_of(tables, of_others, scalings, limits))
        rows = changes.shape[-2] // len(members)
        # Their places are not constants, or writing each table would be another program for XLA to compile.
        starts = lax.optimization_barrier([np.int32(rows * place) for place in range(len(members))])
        for i, start in zip(members, starts, strict=True):
            new[i] = states[i].with_array(_changed(states[i].array, changes, start, changed=changed, scalings=scalings))
    return new


@functools.partial(jax.jit, static_argnames=("changed", "scalings"))
def _changed(
    table: Array, changes: Array, start: Array, *, changed: Callable[..., Array], scalings: Sequence[AbstractScaling]
) -> Array:
    """The table with its part of the changes. Jitted, so that layers share one trace."""
    axis = table.ndim - 2
    return changed(table, lax.dynamic_slice_in_dim(changes, start, table.shape[axis], axis), scalings)


def kinds(states: Sequence[OpState], others: Sequence[Any] | None = None) -> dict[Any, list[int]]:
    """The places of states that can become one array: same scalings, same stack, same devices."""
    kinds: dict[Any, list[int]] = {}
    for i, state in enumerate(states):
        place = _place(state.array), None if others is None else _place(others[i].array)
        kinds.setdefault((state.scalings, state.limits, place), []).append(i)
    return kinds


def concatenated(tables: list[Array]) -> Array:
    """One table with the rows of all."""
    return tables[0] if len(tables) == 1 else lax.concatenate(tables, tables[0].ndim - 2)


def _place(table: Array) -> tuple[Any, ...]:
    """What two tables must share to become one array: shape, devices, and the mesh axes along which they vary."""
    if isinstance(table, Tracer):
        return table.shape, varying_axes(table)
    return table.shape, getattr(table, "sharding", None)
