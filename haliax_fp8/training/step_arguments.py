"""Checks of a training step's arguments: before it, of what would go unnoticed; the others after an exception."""

import inspect
import traceback
from collections.abc import Callable
from typing import Any, TypeGuard

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from .._jax.errors import is_about_deleted_array
from .._numerics.rounding import Rounding
from .._op import Fp8DotGeneral
from .._state.op_state import is_state
from ..layers.checks import require_model
from ..layers.walk import all_ops
from .microbatches import ReduceOnce
from .monitor import CountedState, Monitor
from .updates import in_float32, trainable_part


def require_key_reaches_loss(loss_fn: Callable[..., Any], batch: tuple[Any, ...], key: Any, loss_key: Any) -> None:
    """Raises a ValueError if the key for rounding was meant for the loss, which would run without one.

    Args:
        loss_fn: The step's loss.
        batch: What it is given after the model.
        key: The key for stochastic rounding, if any.
        loss_key: The key for the loss, if any.
    """
    if key is None or loss_key is not None:
        return
    try:
        signature = inspect.signature(loss_fn)
        is_in_batch = "key" in signature.bind_partial(None, *batch).arguments
    except (TypeError, ValueError):  # a builtin, or a call that will say what is wrong
        return
    if "key" in signature.parameters and not is_in_batch:
        raise ValueError(
            "key= is for recipes that round at random; it does not reach loss_fn, which has a parameter 'key'. Pass "
            "the loss's own key as loss_key=, or None as part of the batch"
        )


def require_keys(step: Any, batch: tuple[Any, ...], key: Any, loss_key: Any) -> None:
    """Raises a ValueError if something random in a step would go without its key, in silence.

    Args:
        step: The step.
        batch: What its loss is given after the model.
        key: The key for stochastic rounding, if any.
        loss_key: The key for the loss, if any.
    """
    require_key_reaches_loss(step.loss_fn, batch, key, loss_key)
    if step.parameter_rounding.needs_key and key is None:
        raise ValueError(
            f"key is missing: parameter_rounding={step.parameter_rounding} draws random numbers in each step. Pass a "
            "new key each time, as in step(model, opt_state, *batch, key=jax.random.fold_in(key, index))"
        )


# --- after an exception


def require_choices(error: Exception, step: Any, *_: Any, **__: Any) -> None:
    """Raises a ValueError unless a step's choices are of the kinds that they must be.

    Args:
        error: What a method of the step raised; if Optax did, that may be explained too.
        step: The step.
        *_: The method's arguments.
        **__: The method's arguments.
    """
    has = lambda name: callable(getattr(step.optimizer, name, None)) and not isinstance(step.optimizer, type)
    for name, is_right, remedy in (
        ("optimizer", has("init") and has("update"), "one of optax: TrainStep(loss_fn, optax.adamw(1e-3))"),
        ("microbatches", isinstance(step.microbatches, int) and step.microbatches > 0, "an integer of at least 1"),
        (
            "parameter_rounding",
            isinstance(step.parameter_rounding, Rounding),
            "recipes.Rounding.STOCHASTIC",
        ),
        ("monitor", isinstance(step.monitor, Monitor | None), "statistics.every(100), or None"),
        ("reduce_gradients", isinstance(step.reduce_gradients, ReduceOnce | None), 'ReduceOnce(over="data"), or None'),
    ):
        if not is_right:
            raise ValueError(f"{name}={getattr(step, name)!r} of TrainStep must be {remedy}")
    _require_labels_not_called(error)


def require_arguments(error: Exception, step: Any, model: Any, opt_state: Any, *batch: Any, **_: Any) -> None:
    """Raises a ValueError that says which argument of a step is not what it must be.

    Args:
        error: What the step raised.
        step: The step.
        model: Its argument.
        opt_state: Its argument.
        *batch: Its arguments.
        **_: Its keys.
    """
    call = "step(model, opt_state, *batch)"
    _require_not_deleted(error, model=model, opt_state=opt_state, batch=batch)
    require_choices(error, step)
    for name, value in (("model", model), ("opt_state", opt_state)):
        if _is_array(value):
            raise ValueError(f"{name} is an array of shape {value.shape}; a step is called as {call}")
    if isinstance(opt_state, eqx.Module) and callable(opt_state):
        raise ValueError(f"opt_state is a model, a {type(opt_state).__name__}; a step is called as {call}")
    require_model(model, call)
    params = in_float32(trainable_part(model)) if step.parameter_rounding.needs_key else trainable_part(model)
    _require_state_of(
        step.optimizer.init, params, opt_state.optimizer if isinstance(opt_state, CountedState) else opt_state, model
    )


def _require_labels_not_called(error: Exception) -> None:
    """Raises a ValueError that names the remedy, if Optax called a tree of labels: one like a model is a model itself.

    Args:
        error: What the optimizer's `init` raised.
    """

    def is_model_of_labels(x: Any) -> bool:
        leaves = jax.tree.leaves(x) if isinstance(x, eqx.Module) and callable(x) else ()
        return bool(leaves) and not any(map(_is_array, leaves))

    for frame, _ in traceback.walk_tb(error.__traceback__):
        if not frame.f_globals.get("__name__", "").startswith("optax."):
            continue
        for name, value in frame.f_locals.items():
            if is_model_of_labels(value):
                raise ValueError(
                    f"{name}, a tree with the structure of the model, is a {type(value).__name__}, and Optax calls it: "
                    f"pass `lambda _: labels`, where labels is that tree"
                )


def _require_not_deleted(error: Exception, **arguments: Any) -> None:
    """Raises a ValueError that names what a step was given, if an earlier step reused its memory.

    Args:
        error: What JAX raised.
        **arguments: Model, optimizer state and batch.
    """
    # Another failure of a step with `donate=True` may have deleted them itself.
    if not is_about_deleted_array(error):
        return
    is_deleted = lambda x: isinstance(x, jax.Array) and x.is_deleted()
    deleted = [name for name, tree in arguments.items() if any(map(is_deleted, jax.tree.leaves(tree)))]
    if deleted:
        raise ValueError(
            f"{' and '.join(deleted)} cannot be used again: arrays in it were deleted when an earlier step, with "
            "donate=True, reused their memory. Go on with the model and the opt_state that it returned, or use "
            "donate=False to keep the old ones"
        )


def _is_array(x: Any) -> TypeGuard[hax.NamedArray]:
    return isinstance(x, hax.NamedArray) or eqx.is_array(x) or isinstance(x, np.ndarray)


def _require_state_of(init: Callable[[Any], Any], params: Any, opt_state: Any, model: Any) -> None:
    """Raises a ValueError that says whose state it is, if an optimizer's state is not that of a model.

    Args:
        init: The optimizer's function for the first state.
        params: What it is given of the model.
        opt_state: The state.
        model: The model.
    """
    expected = jax.eval_shape(init, params)
    # A learning rate may have been replaced by a Python number since, and arrays by NumPy's.
    shapes = lambda tree: [jnp.shape(x) for x in jax.tree.leaves(tree)]
    arrays = eqx.filter(opt_state, eqx.is_array_like)
    if jax.tree.structure(arrays) == jax.tree.structure(expected) and shapes(arrays) == shapes(expected):
        return
    raise ValueError(
        f"opt_state does not belong to this model and optimizer: {_difference(opt_state, expected, model)}. Create it "
        "with step.init(model); if the model was converted, or converted back, during training, keep the moments with "
        "opt_state = transfer_optimizer_state(opt_state, old_model, model)"
    )


def _difference(opt_state: Any, expected: Any, model: Any) -> str:
    if any(map(is_state, jax.tree.leaves(opt_state, is_leaf=is_state))):
        return "it has moments of FP8 state, so the optimizer was given the whole model instead of trainable(model)"
    theirs, ours = _recipes(opt_state), _recipes(model)
    if theirs != ours and bool(all_ops(opt_state)) | bool(ours) and _holds_a_model(opt_state):
        of = f"a model with recipe {', '.join(theirs)}" if theirs else "a plain model"
        has = f"this model has {', '.join(ours)}" if ours else "this model is plain"
        return f"it was made for {of}, and {has}"
    paths = lambda tree: {
        jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    actual, shapes_expected = paths(opt_state), paths(expected)
    for path in (*shapes_expected, *actual):
        if path not in actual:
            return f"it has nothing at {path!r}"
        if path not in shapes_expected:
            return f"it has an array at {path!r}, where the optimizer keeps none"
        if actual[path] != shapes_expected[path]:
            return f"it has shape {actual[path]} at {path!r}, where {shapes_expected[path]} belongs"
    return "the trees' classes differ"


def _recipes(tree: Any) -> list[str]:
    return sorted({str(op.recipe) for op in all_ops(tree)})


def _holds_a_model(opt_state: Any) -> bool:
    """Whether a state has a tree like a model's, such as moments."""
    is_module = lambda node: isinstance(node, eqx.Module) and not isinstance(node, Fp8DotGeneral)
    return any(is_module(node) for node in jax.tree.leaves(opt_state, is_leaf=is_module))
