"""The end of a training step: splits state from parameters, updates both, and adds up microbatches."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import haliax as hax
import haliax.quantization as haxq
import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax.quantization import CustomGradientAccumulation
from jax.core import Tracer
from jaxtyping import Array, Key, PyTree, UInt32

from .._jax.errors import explained_by
from .._numerics.rounding import stochastic_bfloat16
from .._state.op_state import OpState, OverwriteWithGradient
from .._state.update import overwrite_states, replace_states
from ..layers.checks import (
    check_not_modified,
    require_calibrated,
    require_layers,
    require_model,
    require_no_quantized_kernels,
    require_tree,
    require_whole_state,
    table_on_host,
)
from ..layers.quantized_kernels import without_quantized_kernels
from ..layers.walk import named_ops
from .quantized_state import with_moments_of


def partition_for_grad_overwrite[T](tree: T) -> tuple[T, T]:
    """Splits a model or its gradients into state that gradients overwrite and the rest, which the optimizer sees.

    Args:
        tree: A model, or a tree of gradients with its structure.

    Returns:
        `(overwrites, rest)`: each has the structure of `tree`, with None where the other one has a node. Gradients of
        a model with quantized kernels have the structure of the model without them.

    Raises:
        ValueError: If `tree` is a model with quantized kernels.

    References:
        Identical to `haliax.quantization.partition_for_grad_overwrite`, which finds state by its marker type too.

    Example:
        >>> overwrites, params = partition_for_grad_overwrite(fp8_linear_layers(model))
        >>> overwrites.layers[0].weight is None, params.layers[0].dot_general.state is None
        (True, True)
    """
    if tree is not None:
        require_tree(tree, "partition_for_grad_overwrite(model)", "tree")
    require_no_quantized_kernels(tree, "tree")
    return split_state(tree)


def split_state[T](tree: T) -> tuple[T, T]:
    """`partition_for_grad_overwrite` of a tree that was checked, or of gradients; quantized kernels are left out.

    Args:
        tree: The model, or its gradients.
    """
    return haxq.partition_for_grad_overwrite(without_quantized_kernels(tree))


@explained_by(lambda error, module, updates, overwrites, **_: _require_same_structure(module, updates, overwrites))
def apply_updates[T](module: T, updates: PyTree, overwrites: PyTree, *, key: Key[Array, ""] | None = None) -> T:
    """The model after a step: parameters plus their updates, and the new state that the gradients carried.

    State is not copied from the gradient: each layer's scale and history are recomputed from the model's own state and
    the newest amax in the gradient. So state does not change if the step did not reach the layer or an amax is not
    finite. It is not corrupted if a layer was used several times under a plain gradient.

    Args:
        module: The model before the step.
        updates: The optimizer's updates: the structure of the model, with None where nothing is updated.
        overwrites: The first part of `partition_for_grad_overwrite(gradients)`.
        key: A new key in each step, to round sums to bfloat16 parameters stochastically: up or down at random, so that
            on average an update arrives whole, however small. It may be the key of `with_rounding_keys`. Give the
            optimizer parameters and gradients in float32, from which it makes updates in float32. By default sums are
            rounded to nearest.

    Returns:
        The model for the next step, its parameters in their own dtype.

    Raises:
        ValueError: If `updates` or `overwrites` do not have the model's structure, or are swapped; if the model has
            quantized kernels, or is a part without its state; if gradients were cast to float16 before state was split
            from them; outside `jit`, if anything but its own update changed the model's state; with `key`, if the model
            has no parameters in bfloat16, or some in float16.
    """
    require_model(module, "apply_updates(module, updates, overwrites)", "module")
    require_updatable(module, "module")
    require_calibrated(module)
    _require_split(module, updates, overwrites)
    if key is not None:
        require_bfloat16(module, "module", "key is for bfloat16 parameters")
    return _applied(module, updates, overwrites, overwrite_states, key)


def require_updatable(model: Any, name: str = "model") -> None:
    """Raises a ValueError if a step would go on from changed state, or from a part or a copy of the model.

    Args:
        model: The model.
        name: Its name as an argument.
    """
    check_not_modified(model)
    require_whole_state(model)
    require_no_quantized_kernels(model, name)


def require_bfloat16(model: Any, name: str, reason: str) -> None:
    """Raises a ValueError unless a model has parameters that are rounded to bfloat16, and none in float16.

    Args:
        model: The model.
        name: Its name as an argument.
        reason: What asks for bfloat16.
    """
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(trainable_part(model))}
    if np.dtype(jnp.bfloat16) not in dtypes or np.dtype(jnp.float16) in dtypes:
        has = ", ".join(sorted(map(str, dtypes))) or "no dtype"
        raise ValueError(
            f"{reason}, and {name} has parameters in {has}: cast them with cast_params({name}, jnp.bfloat16), or round "
            "to nearest, which is the default"
        )


def apply_exact_updates[M](module: M, updates: Any, overwrites: Any, key: Key[Array, ""] | None) -> M:
    """`apply_updates` without recomputing scales and histories, which these gradients already contain.

    Args:
        module: As in `apply_updates`, but checked before.
        updates: As in `apply_updates`.
        overwrites: From `filter_grad` or `filter_value_and_grad`, of one batch.
        key: As in `apply_updates`.
    """
    return _applied(module, updates, overwrites, replace_states, key)


# Apart from what `with_rounding_keys` and microbatches derive from the same key, which count from 0.
_FOR_PARAMETERS = 2**32 - 1


def _applied(
    module: Any,
    updates: Any,
    overwrites: Any,
    new_states: Callable[[list[OpState], list[OpState]], list[OpState]],
    key: Key[Array, ""] | None,
) -> Any:
    pairs: list[tuple[OpState, OpState]] = []
    seeds = itertools.repeat(None)
    if key is not None:
        count = len(jax.tree.leaves(updates))
        seeds = iter(jax.random.bits(jax.random.fold_in(key, _FOR_PARAMETERS), (count,), jnp.uint32))
    add = lambda update, parameter: _add(update, parameter, None if update is None else next(seeds))

    def apply(leaf: Any, update: Any, overwrite: Any) -> Any:
        if isinstance(leaf, OpState):
            # Static scales, in the frozen part of a model; or a record, which belongs to one evaluation.
            if overwrite is None or leaf.table.array is None or leaf.is_record:
                return leaf
            pairs.append((leaf, overwrite))
            return _Pending(len(pairs) - 1)
        if isinstance(leaf, CustomGradientAccumulation):
            if overwrite is None:
                return leaf
            return leaf.overwritten_by(overwrite) if isinstance(leaf, OverwriteWithGradient) else overwrite
        return jax.tree.map(add, update, leaf, is_leaf=lambda node: node is None)

    applied = jax.tree.map(apply, module, updates, overwrites, is_leaf=_is_state_or_missing)
    states = new_states([leaf for leaf, _ in pairs], [overwrite for _, overwrite in pairs])
    fill = lambda node: states[node.index] if isinstance(node, _Pending) else node
    return jax.tree.map(fill, applied, is_leaf=lambda node: isinstance(node, _Pending))


def _require_split(module: Any, updates: Any, overwrites: Any) -> None:
    """Raises a ValueError if gradients were not split as they should, or changed: state would be lost in silence."""

    def check(leaf: Any, update: Any, overwrite: Any) -> None:
        if isinstance(leaf, OpState) and isinstance(overwrite, OpState):
            _require_range(leaf, overwrite)
        elif isinstance(leaf, OverwriteWithGradient) and overwrite is None and update is not None:
            raise ValueError(
                "updates contain FP8 state, which an optimizer must not see: split the gradients first with "
                "overwrites, grads = partition_for_grad_overwrite(grads), and start with "
                "optimizer.init(trainable(model))"
            )
        elif not isinstance(leaf, CustomGradientAccumulation) and (
            overwrite is not None or isinstance(update, CustomGradientAccumulation)
        ):
            raise ValueError(
                "overwrites have an array where the model has a parameter: they are swapped with updates, or not "
                "split from them. Call apply_updates(model, updates, overwrites) with overwrites, grads = "
                "partition_for_grad_overwrite(grads), and updates from the optimizer"
            )

    jax.tree.map(check, module, updates, overwrites, is_leaf=_is_state_or_missing)


def _require_range(state: OpState, overwrite: OpState) -> None:
    """Raises if gradients were cast to float16: that holds no amax below 6e-8 or above 65504."""
    if state.table.array is None or state.is_record:
        return
    if overwrite.table.array.dtype == jnp.float16 != state.table.array.dtype:
        raise ValueError(
            f"overwrites are in float16, and the model's FP8 state is in {state.table.array.dtype}: amaxes below 6e-8 "
            "became zero, and those above 65504 infinite. Split state from gradients before you cast them: overwrites, "
            "grads = partition_for_grad_overwrite(grads)"
        )
    table = table_on_host(overwrite, wait=False)
    if table is not None and (np.isfinite(table[..., 0]) & (table[..., 0] < 0.0)).any():
        raise ValueError(
            "overwrites hold negative scales: they were negated or multiplied. Pass the first part of "
            "partition_for_grad_overwrite(gradients) as it is"
        )


@dataclasses.dataclass(frozen=True)
class _Pending:
    """Marks where a state goes once all states are computed."""

    index: int


def _add(update: Array | None, parameter: Any, seed: UInt32[Array, ""] | None) -> Any:
    if update is None:  # nothing to differentiate: a function, integers
        return parameter
    if parameter.shape != update.shape:
        raise ValueError(f"updates have an array of shape {update.shape} for a parameter of shape {parameter.shape}")
    if seed is not None and parameter.dtype == jnp.bfloat16:
        return stochastic_bfloat16(parameter.astype(jnp.float32) + update.astype(jnp.float32), seed)
    dtype = common_dtype(parameter.dtype, update.dtype)
    return (parameter.astype(dtype) + update.astype(dtype)).astype(parameter.dtype)


def common_dtype(a: np.dtype, b: np.dtype) -> np.dtype:
    """The dtype that holds both, even in a program that allows no implicit promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.promote_types(a, b))


def in_float32[T](tree: T) -> T:
    """The arrays of a tree in float32, or in their own dtype if that is wider.

    Args:
        tree: Gradients, or any other tree of floating-point arrays.
    """
    return jax.tree.map(lambda x: x.astype(common_dtype(x.dtype, np.dtype(np.float32))), tree)


def _is_state_or_none(node: Any) -> bool:
    return node is None or isinstance(node, CustomGradientAccumulation)


def _is_state_or_missing(node: Any) -> bool:
    return node is None or isinstance(node, CustomGradientAccumulation | hax.NamedArray)


def _require_same_structure(module: Any, updates: Any, overwrites: Any) -> None:
    if others := [type(x).__name__ for x in jax.tree.leaves(updates) if not eqx.is_array_like(x)]:
        raise ValueError(
            f"updates contain a {others[0]}, not only arrays; pass the updates that optimizer.update returned"
        )
    for name, tree in (("updates", updates), ("overwrites", overwrites)):
        _require_structure_of(module, name, tree)


def _require_structure_of(module: Any, name: str, tree: Any) -> None:
    """Raises a ValueError that names the first path at which a tree and the model differ."""

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
        )
    for (path, ours), (_, theirs) in zip(named_ops(module), named_ops(tree), strict=False):
        for a, b in zip(ours.recipe.operands, theirs.recipe.operands, strict=True):
            if a != b:
                raise ValueError(
                    f"{name} are of a model with another recipe: at {path!r} they have {b.format.name} "
                    f"{b.scaling!r}, and the model has {a.format.name} {a.scaling!r}. Take them from the gradients of "
                    "this model"
                )


@explained_by(lambda error, accumulated, gradients: _require_structure_of(accumulated, "gradients", gradients))
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
            return total.accumulate(gradient)
        return gradient if total is None else total + gradient

    return jax.tree.map(add, accumulated, gradients, is_leaf=_is_state_or_none)


@explained_by(lambda error, new, old, step_size: _require_structure_of(trainable_part(new), "old", trainable_part(old)))
def incremental_update[M](new: M, old: M, step_size: Any) -> M:
    """`optax.incremental_update` for whole models: an average of weights, with the newest state of FP8 layers.

    For moving averages (EMA), target networks (soft updates), and with `step_size=1 / (n + 1)` for the mean of models
    (SWA). An average of scales would be none: products with it give NaN.

    Args:
        new: The model after a step. The result has its state, and all else that is not trained.
        old: The average so far, with the same structure; at first the model itself.
        step_size: How far the average moves towards `new`, from 0 to 1: 1 minus the decay.

    Raises:
        ValueError: If the models do not have the same structure, if anything but its own update changed the state of
            `new`, or if `step_size` is not a number from 0 to 1, or one that is traced.

    Example:
        >>> model = fp8_linear_layers(model)
        >>> average = incremental_update(model, model, step_size=0.01)
        >>> average.layers[0].dot_general.state is model.layers[0].dot_general.state
        True
    """
    _require_share("step_size", step_size)
    for name, model in (("new", new), ("old", old)):
        require_model(model, "incremental_update(new, old, step_size)", name)
        require_no_quantized_kernels(model, name)
    check_not_modified(new)
    trained, average = cast(Any, trainable_part(new)), cast(Any, trainable_part(old))
    moved: Any = optax.incremental_update(trained, average, step_size)
    return eqx.combine(moved, new)


def _require_share(name: str, value: Any) -> None:
    if isinstance(value, Tracer):
        return
    is_number = eqx.is_array_like(value) and np.asarray(value).dtype.kind not in "bc"
    if not (is_number and bool(((np.asarray(value) >= 0) & (np.asarray(value) <= 1)).all())):
        raise ValueError(
            f"{name}={value!r} of incremental_update must be a number from 0 to 1, how far the average moves towards "
            "the new model; for a decay of 0.99 use step_size=0.01"
        )


def trainable[M](model: M) -> M:
    """The part of a model that an optimizer may see: its inexact arrays, without state that gradients overwrite.

    Args:
        model: The model, its arrays or `jax.ShapeDtypeStruct`s of them, as `eqx.filter_eval_shape` returns it.

    Example:
        >>> abstract = eqx.filter_eval_shape(eqx.nn.Linear, 3, 2, key=jax.random.key(0))
        >>> [x.shape for x in jax.tree.leaves(trainable(abstract))]
        [(2, 3), (2,)]
    """
    require_model(model, "trainable(model)")
    require_no_quantized_kernels(model)
    return trainable_part(model)


def trainable_part[M](model: M) -> M:
    """`trainable` of a model that was checked; quantized kernels are left out.

    Args:
        model: The model.
    """
    return eqx.filter(split_state(model)[1], _is_inexact)


def _is_inexact(leaf: Any) -> bool:
    is_abstract = isinstance(leaf, jax.ShapeDtypeStruct)
    return jnp.issubdtype(leaf.dtype, jnp.inexact) if is_abstract else eqx.is_inexact_array(leaf)


def transfer_optimizer_state(
    opt_state: PyTree,
    old_model: PyTree,
    new_model: PyTree,
    *,
    optimizer: optax.GradientTransformation | optax.MultiSteps | None = None,
) -> PyTree:
    """An optimizer's state for a model that was converted, or converted back, during training.

    Conversion does not change parameters, but it changes the type of a layer's product, and with it the tree that
    moments are stored in. This function puts the same moments into the new model's tree.

    With `optimizer`, it also changes the precision of the moments, from float32 to the FP8 of `quantized_state` or the
    reverse; `old_model` and `new_model` may then be the same.

    Args:
        opt_state: The optimizer's state for `old_model`.
        old_model: The model before `fp8_linear_layers` or `restore_linear_layers`.
        new_model: The model after it.
        optimizer: The optimizer that goes on, which differs from the earlier one in `quantized_state` alone; None if it
            is the same.

    Returns:
        The state, in which every tree with the old model's structure has the new model's instead.

    Raises:
        ValueError: If the models' parameters differ in number, shape or dtype, or `opt_state` is not `old_model`'s or
            not `optimizer`'s.

    Example:
        >>> step, fp8_model = TrainStep(loss_fn, optax.adamw(1e-3)), fp8_linear_layers(model)
        >>> opt_state = transfer_optimizer_state(step.init(model), model, fp8_model)
        >>> jax.tree.structure(opt_state) == jax.tree.structure(step.init(fp8_model))
        True
    """
    for name, model in (("old_model", old_model), ("new_model", new_model)):
        require_layers(model, "transfer_optimizer_state(opt_state, old_model, new_model)", name)
    old, new = trainable(old_model), trainable(new_model)
    old_leaves, old_structure = jax.tree.flatten(old)
    new_leaves, new_structure = jax.tree.flatten(new)
    described = [[(x.shape, x.dtype) for x in leaves] for leaves in (old_leaves, new_leaves)]
    if described[0] != described[1]:
        raise ValueError(
            f"new_model and old_model have different parameters ({len(new_leaves)} and {len(old_leaves)} arrays); only "
            "a conversion of the same parameters can keep the optimizer's state"
        )

    def parts(node: Any) -> list[Any] | None:
        """The node of a model-shaped tree for each parameter: an array, or Optax's `MaskedNode`."""
        try:
            return old_structure.flatten_up_to(node)
        except (ValueError, TypeError):
            return None

    def is_model_tree(node: Any) -> bool:
        return parts(node) is not None

    nodes = jax.tree.leaves(opt_state, is_leaf=is_model_tree)
    if not any(map(is_model_tree, nodes)) and any(jnp.ndim(node) > 0 for node in nodes):
        raise ValueError(
            "opt_state holds no tree with the structure of old_model's parameters; it was not made by "
            "optimizer.init(trainable(old_model))"
        )

    def transfer(node: Any) -> Any:
        return node if (old_parts := parts(node)) is None else jax.tree.unflatten(new_structure, old_parts)

    transferred = jax.tree.map(transfer, opt_state, is_leaf=is_model_tree)
    return transferred if optimizer is None else with_moments_of(optimizer, transferred, new)
