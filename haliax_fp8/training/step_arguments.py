"""Checks of a training step's arguments, with errors that name the argument and the remedy."""

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
from .._numerics.checks import require_bool
from .._numerics.keys import require_single_key
from .._numerics.rounding import Rounding
from .._op import Fp8DotGeneral
from .._state.op_state import is_state
from ..layers.checks import holds_optimizer_state
from ..layers.config import default_rules
from ..layers.walk import all_ops, find_layers
from .monitor import Monitor


def require_loss_and_optimizer(loss_fn: Any, optimizer: Any) -> None:
    """Raises a ValueError unless one is a function and the other an optimizer: swapped, missing, or something else."""

    def is_optimizer(x: Any) -> bool:
        return not isinstance(x, type) and all(callable(getattr(x, name, None)) for name in ("init", "update"))

    if is_optimizer(loss_fn):
        if optimizer is not None and callable(optimizer):
            raise ValueError("loss_fn and optimizer are swapped; use TrainStep(loss_fn, optimizer)")
        raise ValueError("loss_fn is an optimizer; the loss comes first: TrainStep(loss_fn, optimizer)")
    if isinstance(loss_fn, eqx.Module) and find_layers(loss_fn, default_rules):
        raise ValueError(
            f"loss_fn is a {type(loss_fn).__name__}, a model; use TrainStep(loss_fn, optimizer), with a function that "
            "is called as loss_fn(model, *batch), and give the model to each step"
        )
    require_function(loss_fn)
    if optimizer is None:
        raise ValueError("optimizer is missing; use one from optax: TrainStep(loss_fn, optax.adamw(1e-3))")
    if not is_optimizer(optimizer):
        called = "; call it to make one" if callable(optimizer) else ""
        raise ValueError(
            f"optimizer={optimizer!r} is not an optimizer{called}; use one from optax, such as optax.adamw(1e-3)"
        )


def require_function(loss_fn: Any) -> None:
    """Raises a ValueError unless a loss is a function."""
    if not callable(loss_fn):
        raise ValueError(f"loss_fn={loss_fn!r} is not a function; give one that is called as loss_fn(model, *batch)")


def require_model_first(model: Any, loss_fn: Any, call: str) -> None:
    """Raises a ValueError if a function was given as the model, and a model as the loss.

    Args:
        model: What was given as the model.
        loss_fn: What was given as the loss.
        call: The call with its arguments in order.
    """
    if isinstance(loss_fn, eqx.Module) and callable(model) and not jax.tree.leaves(eqx.filter(model, eqx.is_array)):
        raise ValueError(
            f"model and loss_fn are swapped: loss_fn is a model of class {type(loss_fn).__name__}; use {call}, where "
            "loss_fn is a function of the model and a batch"
        )


def require_choices(
    *, microbatches: Any, donate: Any, has_aux: Any, recompute_in_scans: Any, parameter_rounding: Any, monitor: Any
) -> None:
    """Raises a ValueError unless a step's choices are of the kinds that they must be."""
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise ValueError(
            f"microbatches={microbatches!r} must be an integer of at least 1: the number of parts that a step splits "
            "its batch into"
        )
    require_bool("donate", donate, of="TrainStep")
    require_bool("has_aux", has_aux, of="TrainStep")
    require_bool("recompute_in_scans", recompute_in_scans, of="TrainStep")
    if not isinstance(parameter_rounding, Rounding):
        raise ValueError(
            f"parameter_rounding={parameter_rounding!r} must be Rounding.TO_NEAREST or Rounding.STOCHASTIC, of "
            "haliax_fp8.recipes"
        )
    if monitor is not None and not isinstance(monitor, Monitor):
        raise ValueError(
            f"monitor={monitor!r} does not say when to measure; use haliax_fp8.statistics.every(100), or None"
        )


def require_call(
    loss_fn: Callable[..., Any], batch: tuple[Any, ...], key: Any, loss_key: Any, *, call: str, before: tuple[Any, ...]
) -> None:
    """Raises a ValueError where a step's loss cannot be called with what the step got, or a key is not one key.

    Args:
        loss_fn: The step's loss.
        batch: What it is given after the model.
        key: The key for stochastic rounding; None is fine.
        loss_key: The key for the loss; None is fine.
        call: How the step is called, for errors.
        before: What the step was given between model and batch; the loss is not.
    """
    for name, given in (("key", key), ("loss_key", loss_key)):
        if given is not None:
            require_single_key(given, name)
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a builtin: the call will say what is wrong
        return
    named = {} if loss_key is None else {"key": loss_key}
    try:
        given = signature.bind(None, *batch, **named).arguments
    except TypeError as error:
        if loss_key is not None and _takes(signature, batch, {}):
            raise ValueError(
                f"loss_key is given to loss_fn as its keyword argument 'key', which does not fit: {error}. Add the "
                "parameter, loss_fn(model, *batch, key), or leave loss_key out"
            ) from error
        fits = "needs a key: pass loss_key=" if _takes(signature, batch, {"key": None}) else str(error)
        left = "the argument that is" if len(batch) == 1 else f"the {len(batch)} arguments that are"
        if len(batch) == 1 and isinstance(batch[0], tuple | list) and _takes(signature, tuple(batch[0]), named):
            hint = "The batch was passed as one argument; unpack it. "
        # An array instead of the state may be the first argument of the loss.
        elif any(map(_is_array, before)) and _takes(signature, (*before, *batch), named):
            hint = "opt_state seems to be missing. "
        else:
            hint = ""
        raise ValueError(
            f"loss_fn cannot be called with {left} left for it: {fits}. {hint}Use {call}, which calls "
            "loss_fn(model, *batch)"
        ) from error
    if key is not None and "key" in signature.parameters and "key" not in given:
        raise ValueError(
            "key= is for recipes that round at random; it does not reach loss_fn, which has a parameter 'key'. Pass "
            f"the loss's own key as loss_key=, {call[:-1]}, loss_key=...), or None as part of the batch"
        )


def require_fit(loss_fn: Callable[..., Any], batch: tuple[Any, ...], remedy: str) -> None:
    """Raises a ValueError where a loss cannot be called with a model and a batch.

    Args:
        loss_fn: The loss.
        batch: Its arguments after the model.
        remedy: How to pass them.
    """
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, *batch)
    except TypeError as error:
        raise ValueError(
            f"loss_fn cannot be called with a model and a batch of {len(batch)} argument{'s'[: len(batch) != 1]}: "
            f"{error}. {remedy}"
        ) from error


def require_labels_not_called(error: Exception) -> None:
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
                ) from error


def require_not_deleted(error: RuntimeError, **given: Any) -> None:
    """Raises a ValueError that names what a step was given, if an earlier step reused its memory.

    Args:
        error: What JAX raised.
        **given: Model, optimizer state and batch.
    """
    # Another failure of a step with `donate=True` may have deleted them itself.
    if not is_about_deleted_array(error):
        return
    is_deleted = lambda x: isinstance(x, jax.Array) and x.is_deleted()
    found = [name for name, tree in given.items() if any(map(is_deleted, jax.tree.leaves(tree)))]
    if found:
        raise ValueError(
            f"{' and '.join(found)} cannot be used again: arrays in it were deleted when an earlier step, with "
            "donate=True, reused their memory. Go on with the model and the opt_state that it returned, or use "
            "donate=False to keep the old ones"
        ) from error


def require_order(model: Any, opt_state: Any, batch: tuple[Any, ...]) -> None:
    """Raises a ValueError if a step was given the optimizer's state, or an array of the batch, before the model."""
    if isinstance(opt_state, eqx.Module) and isinstance(model, tuple) and not isinstance(model, eqx.Module):
        raise ValueError("model and opt_state are swapped; a step is called as step(model, opt_state, *batch)")
    if _is_array(opt_state) and any(map(holds_optimizer_state, batch)):
        raise ValueError(
            f"opt_state is an array of shape {opt_state.shape}, and the optimizer's state comes after it; a step is "
            "called as step(model, opt_state, *batch)"
        )
    others = [x for x in (opt_state, *batch) if isinstance(x, eqx.Module) and not _is_array(x)]
    if _is_array(model) and others:
        raise ValueError(
            f"model is an array of shape {model.shape}, and the model, of class {type(others[0]).__name__}, comes "
            "after it; a step is called as step(model, opt_state, *batch)"
        )


def _is_array(x: Any) -> TypeGuard[hax.NamedArray]:
    return isinstance(x, hax.NamedArray) or eqx.is_array(x) or isinstance(x, np.ndarray)


def _takes(signature: inspect.Signature, batch: tuple[Any, ...], named: dict[str, Any]) -> bool:
    try:
        signature.bind(None, *batch, **named)
    except TypeError:
        return False
    return True


def require_state_of(
    init: Callable[[Any], Any], params: Any, opt_state: Any, model: Any, error: Exception | None
) -> None:
    """Raises a ValueError that says whose state it is, if an optimizer's state is not that of a model.

    Args:
        init: The optimizer's function for the first state.
        params: What it is given of the model.
        opt_state: The state.
        model: The model.
        error: What the optimizer said of it.
    """
    expected = jax.eval_shape(init, params)
    shapes = lambda tree: [(jnp.shape(x), jax.dtypes.canonicalize_dtype(x.dtype)) for x in jax.tree.leaves(tree)]
    arrays = eqx.filter(opt_state, eqx.is_array)
    if jax.tree.structure(arrays) == jax.tree.structure(expected) and shapes(arrays) == shapes(expected):
        return
    raise ValueError(
        f"opt_state does not belong to this model and optimizer: {_difference(opt_state, expected, model)}. Create it "
        "with step.init(model); if the model was converted, or converted back, during training, keep the moments with "
        "opt_state = transfer_optimizer_state(opt_state, old_model, model)"
    ) from error


def _difference(opt_state: Any, expected: Any, model: Any) -> str:
    if eqx.is_array(opt_state):
        return f"it is an array of shape {opt_state.shape}, and a step is called as step(model, opt_state, *batch)"
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
