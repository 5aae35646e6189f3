"""The two forms in which an op's state enters a product, and what the product returns as its cotangent."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from .._jax.max_grad import is_max_grad, to_float32
from .._jax.opaque import opaque
from .._jax.xla import not_kept_from_forward
from ..recipes.recipe import Recipe
from .members import measured_of_replicas, recorded_by_first
from .table import next_table, numbers_of, record_length, scales_in


# What was measured of parts of an operand: `[*ensemble, numbers, parts]`, with as many parts as the operand has.
type Parts = Array


class Kept(NamedTuple):
    """What the backward pass finds of state and measurements.

    Args:
        state: What the scales come from: a table, or a record without its mark.
        mark: The mark of a record, `[*ensemble, 1, parts]`; None for a table, or if nothing was measured.
        measured: What was measured of input and kernel, one after the other; None if nothing.
    """

    state: Array
    mark: Array | None
    measured: Parts | None


@dataclasses.dataclass(frozen=True)
class AbstractStateForm(abc.ABC):
    """How state enters a product.

    Args:
        stacked: Whether the layer is one of a stack, from which a scan slices its state.
        index_among_sharers: Which one this is of the layers that share the scale of their input; None if it is alone.
    """

    stacked: bool = False
    index_among_sharers: int | None = None

    is_record: ClassVar[bool]
    """Whether state is a record: kept with what was measured as one array, and with a mark that replicas share."""

    @property
    def alike(self) -> "AbstractStateForm":
        """The form as all layers that share a scale have it, so that they share traces."""
        return self if self.index_among_sharers is None else dataclasses.replace(self, index_among_sharers=0)

    @abc.abstractmethod
    def scales(self, state: Array, limits: tuple[float, ...], *, exact: bool) -> tuple[Array, Array, Array]:
        """The scales of input, kernel and output gradient, `[*ensemble]`.

        Args:
            state: As it enters the product, or as it is kept.
            limits: The largest value of each operand's format.
            exact: Whether as they are, or rounded up to `SCALE_BITS`.
        """

    @abc.abstractmethod
    def packed(self, state: Array, measured: Sequence[Parts]) -> Array:
        """What the backward pass needs as one array: what was measured, and the state if `is_record`.

        Args:
            state: As it entered the product.
            measured: What was measured of input and kernel.
        """

    @abc.abstractmethod
    def kept(self, measured: Array | None, state: Array | None, recipe: Recipe, ensemble: int) -> Kept:
        """What the backward pass kept, taken apart.

        Args:
            measured: As `packed` returned it; None if nothing was measured.
            state: The state; None if it was packed.
            recipe: The recipe of the op.
            ensemble: How many leading axes number members.
        """

    @abc.abstractmethod
    def cotangent(
        self,
        kept: Kept,
        measured_grad: Parts | None,
        grad: Array,
        kernel: Array | None,
        recipe: Recipe,
        ensemble: int,
        devices: tuple[str, ...] = (),
    ) -> Array:
        """The cotangent of the state, in float32.

        Args:
            kept: As `kept` returned it.
            measured_grad: What was measured of the output's gradient; None if nothing was measured of any operand.
            grad: The output's gradient.
            kernel: The kernel as it was kept; None for a record, or if it was rounded at random: replicas may differ.
            recipe: The recipe of the op.
            ensemble: How many leading axes number members.
            devices: Inside `shard_map`, the mesh axes over which devices share the state, and record the maximum.
        """


@dataclasses.dataclass(frozen=True)
class TableForm(AbstractStateForm):
    """The whole table. Its cotangent is the table of the next step, so a plain gradient is complete."""

    is_record: ClassVar[bool] = False

    def scales(self, state: Array, limits: tuple[float, ...], *, exact: bool) -> tuple[Array, Array, Array]:
        """Scales, computed from scales and guards."""
        return _three(scales_in(to_float32(state), limits)[0], first=0 if exact else 3)

    def packed(self, state: Array, measured: Sequence[Parts]) -> Array:
        """The measurements."""
        return _joined(measured)

    def kept(self, measured: Array | None, state: Array | None, recipe: Recipe, ensemble: int) -> Kept:
        """The table, and what was measured."""
        assert state is not None
        # Without this, XLA quantizes experts' kernels for both passes at once, and keeps both.
        state = not_kept_from_forward(state)
        return Kept(state, None, measured)

    def cotangent(
        self,
        kept: Kept,
        measured_grad: Parts | None,
        grad: Array,
        kernel: Array | None,
        recipe: Recipe,
        ensemble: int,
        devices: tuple[str, ...] = (),
    ) -> Array:
        """The table of the next step; zeros if a replica of this state records for both."""
        maxima, table = is_max_grad(kept.state), to_float32(kept.state)
        if kept.measured is None or measured_grad is None:
            measured = lax.full((*table.shape[:-2], 0), 0.0, np.float32)
        else:
            measured = _largest(_whole(_joined([kept.measured, measured_grad])), devices)
        if maxima:
            return _next_table(table, measured, recipe=recipe)
        measured_kernel = lax.index_in_dim(_of_operands(measured), 1, axis=measured.ndim - 1, keepdims=False)
        measured, records = measured_of_replicas(
            measured, table, measured_kernel, grad, ensemble, kernel=kernel, devices=devices
        )
        new = _next_table(table, measured, recipe=recipe)
        return lax.select(lax.broadcast_in_dim(records, new.shape, range(records.ndim)), new, lax.full_like(new, 0.0))


@dataclasses.dataclass(frozen=True)
class RecordForm(AbstractStateForm):
    """Scales alone, with a mark: `[*ensemble, record_length + 1]`. The cotangent is what was measured, and the mark.

    State and measurements are kept as one array, because a scan stacks each array that it keeps.
    """

    is_record: ClassVar[bool] = True

    def scales(self, state: Array, limits: tuple[float, ...], *, exact: bool) -> tuple[Array, Array, Array]:
        """The scales as they are: exact ones come first, then rounded ones."""
        return _three(state, first=0 if exact else 3)

    def packed(self, state: Array, measured: Sequence[Parts]) -> Array:
        """The state as rows in front of what was measured."""
        return _joined([lax.expand_dims(to_float32(state), (state.ndim,)), *measured])

    def kept(self, measured: Array | None, state: Array | None, recipe: Recipe, ensemble: int) -> Kept:
        """State, mark and measurements apart."""
        if measured is None:
            assert state is not None
            return Kept(lax.slice_in_dim(state, 0, state.shape[-1] - 1, axis=state.ndim - 1), None, None)
        count = record_length(recipe.scalings)
        rows, mark, measured = lax.split(measured, (count, 1, measured.shape[ensemble] - count - 1), ensemble)
        if rows.shape[ensemble + 1] > 1:
            rows = lax.slice_in_dim(rows, 0, 1, axis=ensemble + 1)
        return Kept(lax.squeeze(rows, (ensemble + 1,)), mark, measured)

    def cotangent(
        self,
        kept: Kept,
        measured_grad: Parts | None,
        grad: Array,
        kernel: Array | None,
        recipe: Recipe,
        ensemble: int,
        devices: tuple[str, ...] = (),
    ) -> Array:
        """The measurements of all operands, padded to the length of a record; then the mark."""
        if kept.measured is None or measured_grad is None or kept.mark is None:
            return lax.full((*kept.state.shape[:-1], kept.state.shape[-1] + 1), 0.0, np.float32)
        # Repeated where a record has room for two scales of each operand; the second copy is not read.
        times = record_length(recipe.scalings) // (3 * numbers_of(recipe.scalings))
        measured = _whole(_joined([*[kept.measured, measured_grad] * times, kept.mark]))
        return _largest(recorded_by_first(measured, grad, ensemble), devices)


def _three(numbers: Array, *, first: int) -> tuple[Array, Array, Array]:
    # One by one: XLA finds out that slices of two layers' are the same scale.
    numbers, axis = to_float32(numbers), numbers.ndim - 1
    x, w, g = [lax.index_in_dim(numbers, first + i, axis, keepdims=False) for i in range(3)]
    return x, w, g


def _joined(measured: Sequence[Array]) -> Parts:
    """The measurements of several operands as one array; those with fewer parts are padded with `-inf`."""
    if len({x.dtype for x in measured}) > 1:
        measured = [to_float32(x) for x in measured]
    axis, parts = measured[0].ndim - 2, max([x.shape[-1] for x in measured])
    none = [(0, 0, 0)] * (axis + 1)
    fill = lambda x: lax.pad(x, np.asarray(-np.inf, x.dtype), [*none, (0, parts - x.shape[-1], 0)])
    return lax.concatenate([x if x.shape[-1] == parts else fill(x) for x in measured], axis)


def _whole(measured: Parts) -> Float32[Array, "*ensemble numbers"]:
    """The measurements of operands as a whole, in float32."""
    axes = (measured.ndim - 1,)
    return to_float32(lax.squeeze(measured, axes) if measured.shape[-1] == 1 else lax.reduce_max(measured, axes))


def _largest(measured: Array, devices: tuple[str, ...]) -> Array:
    return lax.pmax(measured, devices) if devices else measured


def _of_operands(measured: Array) -> Float32[Array, "*ensemble 3 numbers"]:
    return lax.reshape(measured, (*measured.shape[:-1], 3, measured.shape[-1] // 3))


# Opaque, so that ops of all shapes share one trace.
@opaque
def _next_table(table: Array, measured: Array, *, recipe: Recipe) -> Array:
    return next_table(table, _of_operands(measured) if measured.shape[-1] else None, recipe.scalings, recipe.limits)
