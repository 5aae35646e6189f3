"""State: its marker type, the state of an op, and the checks of it.

`OverwriteWithGradient` marks state in a model, and `OpState` is the state of every op. Below them is what ops and
products require of the state they are called with, and the messages if it is missing.
"""

import abc
import dataclasses
import pathlib
import warnings
from typing import Any, ClassVar

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.quantization import CustomGradientAccumulation
from haliax.state_dict import ModuleWithStateDictSerialization
from jax import lax
from jaxtyping import Array

from .._jax.max_grad import is_max_grad, to_float32, to_max_grad
from .._jax.meshes import marked_as_varying
from ..recipes.recipe import Recipe
from ..recipes.scaling import AbstractScaling
from .guard import fit, is_modified
from .record import record_of_table
from .table import first_table, guarded, numbers_of, unguarded
from .update import overwrite_states


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


class OpState(OverwriteWithGradient):
    """What an op remembers: a table with a row for each operand, first the scale that its next use takes.

    It is a single array, so a step reads and writes one buffer per layer. It is named, so that Haliax never scans over
    it by mistake. In stacked layers, the axes of the stack come first.

    Args:
        table: float32, `[*stack, operand, column]`, with a row for each operand: input, kernel and output gradient of
            a product. A row of delayed scaling is its scale, initially 1, then the amaxes, initially 0, newest first,
            then oldest to newest; last the guard, which reveals a scale that anything but its own update changed.
        scalings: The scalings that read and write the rows.
        limits: The largest value of each operand's format.
        shared_input: A name shared by ops that read the same input, see `share_input_scales`; None for most.
        shared: Of a record, both scales of that input, `[*stack, 1, 2]`, which `table` then lacks: the same array in
            all these ops, because XLA finds two loop variables equal, but not parts of them.
        index_among_sharers: Of a record, which one of these ops this is, counted from 0; None if it shares nothing.

    Inside a function that `filter_grad` differentiates, there is a record in place of the table: one row, the scales
    of all operands, in `fp32_max_grad`. Its gradient is what the step measured, see `record.py`. The tree is the same,
    so a function may assemble its model from parts.
    """

    table: hax.NamedArray
    scalings: tuple[AbstractScaling, ...] = eqx.field(static=True)
    limits: tuple[float, ...] = eqx.field(static=True)
    shared_input: str | None = eqx.field(static=True, default=None)
    shared: hax.NamedArray | None = None
    index_among_sharers: int | None = eqx.field(static=True, default=None)

    @staticmethod
    def init(recipe: Recipe, stack: tuple[hax.Axis, ...] = ()) -> "OpState | None":
        """The state before the first step; None for a recipe that keeps none.

        Args:
            recipe: The recipe of the op.
            stack: Axes of the layer stacks that the op's layer is in.
        """
        return OpState.of(recipe.scalings, recipe.limits, stack)

    @staticmethod
    def of(
        scalings: tuple[AbstractScaling, ...], limits: tuple[float, ...], stack: tuple[hax.Axis, ...] = ()
    ) -> "OpState | None":
        """The state before the first step of an op with these operands; None if no scaling keeps any.

        Args:
            scalings: The scaling of each operand.
            limits: The largest value of each operand's format.
            stack: As in `init`.
        """
        first = first_table(scalings)
        if first is None:
            return None
        axes = (*stack, hax.Axis("fp8_row", first.shape[0]), hax.Axis("fp8_column", first.shape[1]))
        table = hax.named(jnp.broadcast_to(first, tuple(axis.size for axis in axes)), axes)
        return OpState(table, scalings, limits)

    @property
    def scale(self) -> Array:
        """The scales that the next use takes, `[*stack, operand]`.

        They are NaN where anything but their own update changed the state, and 1 where a step did not reach the layer.
        """
        if self.is_record:
            return to_float32(self.record)[..., : len(self.limits)]
        table = to_float32(self.array)
        scale, guard = table[..., 0], table[..., -1]
        positive_or_one = jnp.where(scale <= 0.0, jnp.float32(1.0), scale)
        # NumPy's NaN: one of JAX's would stop `jax_debug_nans` where no scale is NaN.
        return jnp.where(fit(scale, guard), positive_or_one, np.float32(np.nan))

    @property
    def is_record(self) -> bool:
        """Whether this holds scales in place of the table, inside a differentiated function."""
        # A table has a row for each operand.
        return self.table.array.shape[-2] == 1

    @property
    def array(self) -> Array:
        """The table, in float32 whatever the model was cast to (or in `fp32_max_grad`); or the record."""
        array = _as_float32(self.table.array)
        if self.shared is None:
            return array
        shared, axis, others = _as_float32(self.shared.array), array.ndim - 1, len(self.limits) - 1
        exact, rounded, rest = lax.split(array, (others, others, array.shape[-1] - 2 * others), axis)
        input_exact, input_rounded = lax.split(shared, (1, 1), axis)
        return lax.concatenate([input_exact, exact, input_rounded, rounded, rest], axis)

    @property
    def record(self) -> Array:
        """The scales as a product takes them, `[*stack, length]`."""
        if not self.is_record:
            return record_of_table(self.array, self.scalings, self.limits)
        record = self.array
        return lax.squeeze(record, (record.ndim - 2,))

    def with_array(self, table: Array) -> "OpState":
        """This state with another table."""
        # Through the tree: inside `vmap` and `scan` the names may count axes that the array does not have.
        return jax.tree.unflatten(jax.tree.structure(self), [table])

    def as_record(
        self,
        record: Array,
        shared: Array | None = None,
        index_among_sharers: int | None = None,
        devices: tuple[str, ...] = (),
    ) -> "OpState":
        """The record in place of this table, in `fp32_max_grad`.

        Args:
            record: `[*stack, 1, length]`; without the scales of the first operand, if ops share them.
            shared: Those, `[*stack, 1, 2]`.
            index_among_sharers: Which one of the ops that share them this is.
            devices: As in `to_max_grad`.
        """
        record = to_max_grad(marked_as_varying(record, devices), devices)
        if shared is None:
            return self.with_array(record)
        shared = to_max_grad(marked_as_varying(shared, devices), devices)
        names = (*self.table.axis_names[:-2], "fp8_row", "fp8_shared")
        empty: Any = np.zeros((0,) * len(names))
        like = dataclasses.replace(self, shared=hax.NamedArray(empty, names), index_among_sharers=index_among_sharers)
        return jax.tree.unflatten(jax.tree.structure(like), [record, shared])

    def accumulate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, other: "OpState"
    ) -> "OpState":
        """The maximum of both: every evaluation began with the same scale and history.

        An evaluation without an amax keeps its scale, which may be too large; `overwritten_by` recomputes it.
        """
        return jax.tree.map(lambda a, b: jnp.maximum(_as_float32(a), _as_float32(b)), self, other)

    def overwritten_by(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, gradient: "OpState"
    ) -> "OpState":
        """The state with the newest amax of the gradient entered.

        Only that amax is used; scale and the rest of the history are recomputed from this state. So a plain gradient,
        which sums if a layer is used several times, cannot corrupt them. State does not change if the step did not
        reach the layer (a scale of 0 or `-inf`) or if the amax is not finite.
        """
        return overwrite_states([self], [gradient])[0]

    def before_first_step(self) -> np.ndarray:
        """The table before the first step, in the shape of this one, on the host."""
        first = first_table(self.scalings)
        assert first is not None
        return np.array(np.broadcast_to(first, self.table.array.shape))

    @staticmethod
    def guarded(rows: Array) -> Array:
        """A table from rows without guards, `[*stack, operand, column]`: each row gets the guard of its scale."""
        return guarded(rows)

    @staticmethod
    def is_modified(table: np.ndarray) -> bool:
        """Whether anything but its own update changed a scale of a table, on the host: its guard does not fit."""
        return is_modified(table[..., 0], table[..., -1])

    def with_recipe(self, recipe: Recipe) -> "OpState":
        """This state extended for a recipe that stores more columns."""
        first, rows = first_table(recipe.scalings), unguarded(self.array)
        assert first is not None
        padding = [(0, 0)] * (rows.ndim - 1) + [(0, first.shape[1] - 1 - rows.shape[-1])]
        table = lax.concatenate([jnp.pad(rows, padding), self.array[..., -1:]], rows.ndim - 1)
        return OpState(self.table, recipe.scalings, self.limits, self.shared_input).with_array(table)

    def with_scale(self, scale: Array) -> "OpState":
        """This state with other scales, which broadcast to `[*stack, operand]`."""
        rows = unguarded(self.array)
        scale = jnp.broadcast_to(jnp.asarray(scale, jnp.float32), rows.shape[:-1])
        return self.with_array(guarded(rows.at[..., 0].set(scale)))

    def with_max_gradients(self) -> "OpState":
        """The record in place of the table: however often it is used, the next table is made once."""
        return self if self.is_record else self.as_record(lax.expand_dims(self.record, (self.array.ndim - 2,)))


def _as_float32(array: Array) -> Array:
    return array if is_max_grad(array) or array.dtype == np.float32 else to_float32(array)


# --- Ops with state, and checks of what they are called with ----------------------------------------------------------


class AbstractOp(ModuleWithStateDictSerialization):
    """An op that has a state: what `calibrate` and checkpoints need to know of it.

    Args:
        state: What the op remembers; None if that is nothing.
        operand_names: The names of the rows of its state, in their order; those of gradients end with `_grad`.
    """

    state: eqx.AbstractVar[OpState | None]
    operand_names: ClassVar[tuple[str, ...]]

    @property
    @abc.abstractmethod
    def observed(self) -> "AbstractOp":
        """This op in high precision, recording what its state needs."""


KEEP_STATE_WITH_TRAINED = """Keep state with what is trained:
    is_state = lambda node: isinstance(node, OverwriteWithGradient)
    spec = jax.tree.map(is_state, model, is_leaf=is_state)
then set the trained weights in spec to True, and split with eqx.partition(model, spec)."""
"""How to split a model, for messages about state that went with the frozen weights."""

# Frames in these folders are skipped, so that a warning points at the user's code.
_LIBRARIES = tuple(
    str(pathlib.Path(file).parent) for file in (pathlib.Path(__file__).parent, jax.__file__, eqx.__file__)
)


def warn_of_constant_state(recipe: Recipe) -> None:
    """Warns that a kernel's gradient was taken and that of its state was not, although steps should write it.

    Args:
        recipe: The recipe of the op.
    """
    if not numbers_of(recipe.scalings):
        return
    warnings.warn(
        f"the gradient of an FP8 layer's weight was taken without that of its state ({recipe}): if this trains the "
        "weight, the scales stay as they are for ever. The model was converted inside the loss: convert it once, "
        "before; or the op was made inside __call__: make it a field of the layer; or eqx.partition put the state with "
        f"the frozen weights, or the gradient is of the weights alone. {KEEP_STATE_WITH_TRAINED} If the gradient "
        "trains nothing, as in an analysis or a line search, take that of "
        "haliax_fp8.training.exact_gradients(loss_fn)",
        stacklevel=2,
        skip_file_prefixes=_LIBRARIES,
    )


def require_state(state: OpState | None, recipe: Recipe, groups: tuple[int, ...] = ()) -> None:
    """Raises a ValueError unless a stateful recipe has the state of a single layer.

    Args:
        state: The state of an op; None if it has none.
        recipe: Its recipe.
        groups: The number of groups, if each has a state of its own.
    """
    if state is None:
        if recipe.is_stateful:
            raise ValueError(
                f"an FP8 product with the recipe {recipe} was called without its state; if the model was split "
                "(eqx.partition, eqx.filter), join its parts with eqx.combine first"
            )
        return
    leading = leading_axes(state)
    if leading != groups:
        raise ValueError(
            f"an FP8 product was called with the state of {leading} layers of an ensemble or a stack; call them under "
            "eqx.filter_vmap or jax.vmap, or in a scan over the stack, so that each gets its own state"
        )


def leading_axes(state: OpState) -> tuple[int, ...]:
    """The sizes of the axes in front of one op's state, of stacks, ensembles and groups.

    () for a state that has something else in place of its array, as a tree of shapes or of shardings has.

    Args:
        state: The state of an op.
    """
    shape = getattr(state.table.array, "shape", ())
    return shape[:-2] if isinstance(shape, tuple) else ()


def require_stored_scales(recipe: Recipe) -> None:
    """Raises a ValueError unless all operands have scales in the state, as groups with a state each need them.

    Args:
        recipe: The recipe of the op.
    """
    if not all(scaling.stores_scale for scaling in recipe.scalings):
        raise ValueError(
            f"scale_per_expert=True needs a recipe that stores the scales of all operands, and {recipe} does not; use "
            '"delayed" or "static", or scale_per_expert=False'
        )
