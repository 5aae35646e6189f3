"""What a training step needs: splitting state from parameters, updating both, gradients with exact maxima."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import haliax as hax
import haliax.quantization as haxq
import jax
import jax.numpy as jnp
import numpy as np
from haliax.quantization import CustomGradientAccumulation
from jaxtyping import Array, PyTree

from ._overwrite import (
    OpState,
    OverwriteWithGradient,
    overwrite_states,
)
from ._own_state import require_own_state
from ._records import OpRecord, complete_states, record_states
from ._state import is_max_grad
from ._ways import Way, first_that_works


T = TypeVar("T")


def partition_for_grad_overwrite[T](tree: T) -> tuple[T, T]:
    """Splits a model or its gradients into state that gradients overwrite and the rest, which the optimizer sees.

    Args:
        tree: A model, or a tree of gradients with its structure.

    Returns:
        `(overwrites, rest)`: each has the structure of `tree`, with None where the other one has a node.

    References:
        Identical to `haliax.quantization.partition_for_grad_overwrite`, which also finds state by its marker type.

    Example:
        >>> overwrites, params = partition_for_grad_overwrite(fp8_linear_layers(model))
        >>> overwrites.layers[0].weight is None, params.layers[0].dot_general.state is None
        (True, True)
    """
    return haxq.partition_for_grad_overwrite(tree)


def apply_updates[T](module: T, updates: PyTree, overwrites: PyTree) -> T:
    """The model after a step: parameters plus their updates, and state replaced by what the gradients carried.

    State is not copied from the gradient: each layer's scale and history are recomputed from the model's own and the
    newest amax of the gradient. So state does not change if the step did not reach the layer or an amax is not finite,
    and it is not corrupted if a layer was used several times under a plain gradient.

    Args:
        module: The model before the step.
        updates: What the optimizer returned: the structure of the model, None where nothing is updated.
        overwrites: The first part of `partition_for_grad_overwrite(gradients)`.

    Returns:
        The model for the next step, its parameters in their own dtype.

    Raises:
        ValueError: If `updates` or `overwrites` do not have the model's structure, or are swapped; outside `jit`, if
            anything but its own update changed the model's state.
    """

    pairs: list[tuple[OpState, OpState]] = []

    def apply(leaf: Any, update: Any, overwrite: Any) -> Any:
        if isinstance(leaf, OverwriteWithGradient):
            if overwrite is None:
                if update is not None:
                    raise ValueError(
                        "updates contain FP8 state, which an optimizer must not see: split the gradients first with "
                        "overwrites, grads = partition_for_grad_overwrite(grads), and start with "
                        "optimizer.init(trainable(model))"
                    )
                return leaf
            _require_same_type("overwrites", leaf, overwrite)
            if isinstance(leaf, OpState):
                pairs.append((leaf, overwrite))
                return _Place(len(pairs) - 1)
            return leaf.overwritten_by(overwrite)
        if overwrite is not None and isinstance(leaf, CustomGradientAccumulation):
            return overwrite
        if overwrite is not None or isinstance(update, CustomGradientAccumulation):
            raise ValueError(
                "overwrites have an array where the model has a parameter: they are swapped with updates, or not "
                "split from them. Call apply_updates(model, updates, overwrites) with overwrites, grads = "
                "partition_for_grad_overwrite(grads), and updates from the optimizer"
            )
        return jax.tree.map(_add, update, leaf, is_leaf=lambda node: node is None)

    require_own_state(module)
    try:
        applied = jax.tree.map(apply, module, updates, overwrites, is_leaf=_is_state_or_missing)
    except (ValueError, TypeError) as error:
        for name, tree in (("updates", updates), ("overwrites", overwrites)):
            _require_structure_of(module, name, tree, error)
        raise
    states = overwrite_states([leaf for leaf, _ in pairs], [overwrite for _, overwrite in pairs])
    fill = lambda node: states[node.index] if isinstance(node, _Place) else node
    return jax.tree.map(fill, applied, is_leaf=lambda node: isinstance(node, _Place))


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a state goes once all are computed."""

    index: int


def _add(update: Array | None, parameter: Any) -> Any:
    if update is None:  # nothing to differentiate: a function, integers
        return parameter
    if parameter.shape != update.shape:
        raise ValueError(f"updates have an array of shape {update.shape} for a parameter of shape {parameter.shape}")
    dtype = common_dtype(parameter.dtype, update.dtype)
    return (parameter.astype(dtype) + update.astype(dtype)).astype(parameter.dtype)


def common_dtype(a: np.dtype, b: np.dtype) -> np.dtype:
    """The dtype that holds both, also in a program that allows no implicit promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.promote_types(a, b))


def _is_state_or_none(node: Any) -> bool:
    return node is None or isinstance(node, CustomGradientAccumulation)


def _is_state_or_missing(node: Any) -> bool:
    return node is None or isinstance(node, CustomGradientAccumulation | hax.NamedArray)


def _require_same_type(name: str, expected: Any, got: Any) -> None:
    if type(expected) is not type(got):
        raise ValueError(
            f"{name} have a {type(got).__name__} where the model has a {type(expected).__name__}; "
            "pass the first part of partition_for_grad_overwrite(gradients)"
        )


def _require_structure_of(module: Any, name: str, tree: Any, cause: Exception) -> None:
    """Says which of the two trees is not the model's, by the first path that only one of them has."""

    def paths(t: Any) -> dict[str, Any]:
        flat, _ = jax.tree_util.tree_flatten_with_path(t, is_leaf=_is_state_or_missing)
        return {jax.tree_util.keystr(path): leaf for path, leaf in flat}

    ours, theirs = paths(module), paths(tree)
    differing = [path for path in (*ours, *theirs) if (path in ours) != (path in theirs)]
    if differing:
        raise ValueError(
            f"{name} do not have the structure of the model: they differ at {differing[0]!r}. Take them from the "
            "gradients of this model, and initialise the optimizer with the second part of "
            "partition_for_grad_overwrite(model)"
        ) from cause


def accumulate_gradients[T](accumulated: T | None, gradients: T) -> T:
    """Adds the gradients of another microbatch: parameters are summed, state takes the maximum.

    Args:
        accumulated: The sum so far; None before the first microbatch.
        gradients: The gradients of one microbatch, taken with the same model.

    Returns:
        The new sum. Divide the parameters' part by the number of microbatches, not the state.

    Raises:
        ValueError: If the trees differ in structure.

    References:
        `haliax.quantization.accumulate_gradients`, which also works on our state.
    """
    if accumulated is None:
        return gradients

    def add(total: Any, gradient: Any) -> Any:
        if isinstance(total, CustomGradientAccumulation):
            if type(gradient) is not type(total):
                raise ValueError(f"gradients have a {type(gradient).__name__} in place of a {type(total).__name__}")
            return total.accumulate(gradient)
        return gradient if total is None else total + gradient

    try:
        return jax.tree.map(add, accumulated, gradients, is_leaf=_is_state_or_none)
    except (ValueError, TypeError) as error:
        _require_structure_of(accumulated, "gradients", gradients, error)
        raise


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

    def in_a_way(way: Way, model: Any, *args: Any, **kwargs: Any) -> Any:
        differentiated, rest = eqx.partition(_recording(model, way), _is_differentiated)

        def of(differentiated: Any) -> Any:
            # Records have the element type already; other state may not.
            return function(with_max_gradients(eqx.combine(differentiated, rest)), *args, **kwargs)

        # To JAX, `fp32_max_grad` is no more a float than integers are.
        value, gradients = jax.value_and_grad(of, has_aux=has_aux, allow_int=True)(differentiated)
        return value, gradients if way.tables else _completed(model, gradients)

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
