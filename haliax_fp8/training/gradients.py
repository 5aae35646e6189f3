"""Gradients whose state is an exact maximum over all uses of a layer."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .._jax.max_grad import is_max_grad
from .._jax.reached import Reached, noticed
from .._state.marker import OverwriteWithGradient
from .._state.op_state import OpState
from .._state.records import OpRecord, complete_states, record_states
from ..layers.quantized_kernels import without_kernel_copies
from .ways import Way, first_that_works


def filter_grad(function: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """`eqx.filter_grad` whose state gradients are exact maxima over all uses of a layer.

    Inside the differentiated function, state has the element type `fp32_max_grad`. If a layer is used several times
    (called twice, tied, constant of a `scan`, one branch of a `cond`), JAX combines its state gradients by maximum
    instead of by sum. If JAX copies a layer for every example (a `cond` per example, a `custom_vjp` under `vmap`), the
    maximum is over all examples whose output gradient is not zero. Parameters' gradients are those of
    `eqx.filter_grad`.

    If JAX cannot differentiate that, the function is called again in another way: for a loss that assembles a model
    from parts, for Equinox's functions with custom derivatives, and as one program under `jax_debug_nans`.

    Args:
        function: `function(model, *args, **kwargs)`, returning a scalar, or `(scalar, aux)` with `has_aux`.
        has_aux: As in `eqx.filter_grad`.

    Returns:
        A function with the same arguments that returns the gradients, `(gradients, aux)` with `has_aux`.

    Raises:
        ValueError: When called, if JAX or Equinox would sum amaxes; the message says where, and what to use instead.

    Example:
        >>> def twice(layer, x):
        ...     return (layer(x) + layer(3.0 * x)).sum().array
        >>> x = hax.ones((hax.Axis("batch", 2), layer.In))
        >>> [float(g(twice)(layer, x).dot_general.amax_history("input")[0]) for g in (filter_grad, eqx.filter_grad)]
        [3.0, 4.0]
    """

    value_and_grad = filter_value_and_grad(function, has_aux=has_aux)

    def take(model: Any, *args: Any, **kwargs: Any) -> Any:
        value, gradients = value_and_grad(model, *args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return take


def filter_value_and_grad(function: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """`eqx.filter_value_and_grad` whose state gradients are exact maxima; see `filter_grad`.

    Args:
        function: `function(model, *args, **kwargs)`, returning a scalar, or `(scalar, aux)` with `has_aux`.
        has_aux: As in `eqx.filter_value_and_grad`.

    Returns:
        A function with the same arguments that returns `(value, gradients)`.
    """

    def in_a_way(way: Way, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        differentiated, rest = eqx.partition(_recording(model, way), _is_differentiated)
        reached = Reached()

        def of(differentiated: Any) -> Any:
            # Records have the element type already; other state may not.
            whole = with_max_gradients(eqx.combine(_noticed(differentiated, reached), rest))
            return function(whole, *args, **kwargs)

        # To JAX, `fp32_max_grad` is as little a float as an integer is.
        value, gradients = jax.value_and_grad(of, has_aux=has_aux, allow_int=True)(differentiated)
        gradients = without_kernel_copies(gradients)
        unreached = len(_records(differentiated)) - len(reached.places)
        return (value, gradients if way.tables else _completed(model, gradients)), unreached

    def take(model: Any, *args: Any, **kwargs: Any) -> Any:
        return first_that_works(in_a_way, model, *args, **kwargs)

    return take


def _is_differentiated(leaf: Any) -> bool:
    """What `eqx.filter_grad` differentiates, and records."""
    return eqx.is_inexact_array(leaf) or is_max_grad(leaf)


def _recording(model: Any, way: Way) -> Any:
    """The model with ops that record instead of updating their state."""
    if way.tables:
        return model
    records = iter(record_states(_states(model), inexact=way.inexact))
    return jax.tree.map(lambda node: next(records) if _is_op_state(node) else node, model, is_leaf=_is_op_state)


def _states(model: Any) -> list[OpState]:
    return [node for node in jax.tree.leaves(model, is_leaf=_is_op_state) if _is_op_state(node)]


def _noticed(differentiated: Any, reached: Reached) -> Any:
    """The arguments of a differentiated function, whose records notice whether they get a gradient."""
    places = itertools.count()

    def of(record: OpRecord) -> OpRecord:
        place = next(places)
        table = jax.tree.map(lambda x: noticed(x, place, reached), record.table)
        return dataclasses.replace(record, table=table)

    return jax.tree.map(lambda x: of(x) if _is_record(x) else x, differentiated, is_leaf=_is_record)


def _completed(model: Any, gradients: Any) -> Any:
    """The gradients with states instead of records."""
    new = iter(complete_states(_states(model), _records(gradients)))
    return jax.tree.map(lambda node: next(new) if _is_record(node) else node, gradients, is_leaf=_is_record)


def _records(tree: Any) -> list[OpRecord]:
    return [node for node in jax.tree.leaves(tree, is_leaf=_is_record) if _is_record(node)]


def _is_record(node: Any) -> bool:
    return isinstance(node, OpRecord)


def _is_op_state(node: Any) -> bool:
    # A partitioned model may have no state.
    return isinstance(node, OpState) and node.table.array is not None


def with_max_gradients[T](tree: T) -> T:
    """The tree with its state in the element type whose gradients accumulate by maximum.

    `filter_grad` does this at the top of the differentiated function; call it if you write that function yourself.
    """
    return jax.tree.map(
        lambda node: node.with_max_gradients() if _is_whole_state(node) else node, tree, is_leaf=_is_whole_state
    )


def _is_whole_state(node: Any) -> bool:
    # A partitioned model has None for some arrays.
    return isinstance(node, OverwriteWithGradient) and None not in jax.tree.leaves(node, is_leaf=lambda x: x is None)
