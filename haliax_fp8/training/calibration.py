"""calibrate: a pass in high precision that fills the state, so that training starts with good scales."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._jax.errors import calls_users_function
from .._state.op_state import AbstractOp, OpState, OverwriteWithGradient, is_state
from ..layers.checks import require_model, require_whole_state, uncalibrated_operands, unrecorded_operands
from ..layers.walk import all_ops
from .gradients import filter_grad
from .loss import scalar_loss


@calls_users_function
def calibrate[M](model: M, loss_fn: Callable[..., Any], batches: Iterable[Any]) -> M:
    """Runs forward and backward passes in high precision and records every amax in the model's state.

    State starts with scales of 1. With that scale, E5M2 rounds gradients around 1e-6 to zero: the last layer finds its
    scale in the first step, the one before it in the second, and so on. After calibration on one batch, all layers
    train from the first step. Stateless recipes need no calibration: layers with such a recipe, and models that have
    only such layers, are returned unchanged.

    Each batch has to match one evaluation of the loss in training. If a step splits its batch into microbatches, output
    gradients are larger than those of the whole batch; `TrainStep.calibrate` splits as its step does.

    Args:
        model: A converted model. Its parameters are not changed.
        loss_fn: `loss_fn(model, *batch)`, a scalar.
        batches: An iterable of batches, one step each. A tuple holds several arguments of `loss_fn`.

    Returns:
        The model with its state filled: the history holds one amax for each batch, newest first.

    Raises:
        ValueError: If `batches` is empty or is itself a batch; if the model has no FP8 layer; if a batch holds NaN or
            infinities, or is zero everywhere; or if no layer has recorded its input.

    Example:
        >>> fp8_model = calibrate(fp8_linear_layers(model), loss_fn, [(x,)])
        >>> all(bool((node.scale != 1.0).all()) for node in fp8_states(fp8_model))
        True
    """
    require_model(model, "calibrate(model, loss_fn, batches)")
    if not _has_ops(model):
        raise ValueError(
            "model has no FP8 layer to calibrate; convert it first: model = fp8_linear_layers(model, config)"
        )
    _require_batches(batches)
    if not fp8_states(model):
        return model
    count = 0
    for batch in batches:
        arguments = batch if isinstance(batch, tuple) else (batch,)
        require_usable(arguments, f"batches[{count}]")
        model = recorded(model, lambda observed, arguments=arguments: _gradients(observed, loss_fn, arguments))
        count += 1
    if count == 0:
        raise ValueError("batches is empty; calibration needs at least one batch")
    require_recorded(model)
    return model


def require_usable(batch: Any, name: str) -> None:
    """Raises a ValueError for a batch from which scales would stay as they are: with NaN or inf, or of zeros alone.

    A mask may hold `-inf`, and token ids may all be 0. Traced and abstract arrays are not checked.

    Args:
        batch: The arguments of the loss.
        name: What the batch is called.
    """
    arrays = [x for x in jax.tree.leaves(batch) if isinstance(x, jax.Array | np.ndarray) and not isinstance(x, Tracer)]
    numbers = [x for x in arrays if x.size and jnp.issubdtype(x.dtype, jnp.number)]
    floats = [x for x in numbers if jnp.issubdtype(x.dtype, jnp.floating)]
    # Not `isposinf`, which makes an infinity to compare with, and stops `jax_debug_infs`.
    if any(bool((~jnp.isfinite(x) & ~(x < 0)).any()) for x in floats):
        raise ValueError(f"{name} holds NaN or infinities, whose amaxes are not recorded; calibrate on finite batches")
    if floats and not any(bool((x != 0).any()) for x in numbers):
        raise ValueError(f"{name} is zero everywhere, so scales would stay at 1; calibrate on batches of real data")


def require_recorded(model: Any) -> None:
    """Raises a ValueError if calibration has recorded the input of no layer; abstract models are not checked."""
    missing = [
        {*unrecorded_operands(op.state), *uncalibrated_operands(op.state)}
        for op in all_ops(model)
        if isinstance(op.state, OpState)
    ]
    if missing and all("input" in operands for operands in missing):
        raise ValueError(
            "calibration recorded the input of no layer: the loss calls no FP8 layer, or inputs were zero or not "
            "finite. print(describe(model, loss_fn, *batch)) shows which layers the loss calls"
        )


@calls_users_function
def recorded[M](model: M, gradients_of: Callable[[M], Any]) -> M:
    """The model after one step of calibration.

    Args:
        model: A converted model; one without state is returned unchanged.
        gradients_of: Computes the gradients of a model, `with_next_states`; only those are used. It gets the model
            with every product in high precision, recording what the state of its recipe needs.
    """
    if not fp8_states(model):
        return model
    require_whole_state(model, calibrating=True)
    return _overwritten(model, gradients_of(_observed(model)))


def fp8_states(model: Any) -> list[OverwriteWithGradient]:
    """All state in a model that gradients overwrite."""
    return [node for node in jax.tree.leaves(model, is_leaf=is_state) if is_state(node)]


# One function for all calls, so that a second calibration with the same loss does not compile again.
@eqx.filter_jit
def _gradients(model: Any, loss_fn: Callable[..., Any], batch: tuple[Any, ...]) -> Any:
    return with_next_states(model, filter_grad(lambda model: scalar_loss(loss_fn(model, *batch)))(model))


def with_next_states[G](model: Any, gradients: G) -> G:
    """Gradients with the states of the next step, to be called in the program that computes them.

    The gradient of a layer that the loss does not reach is `-inf`, at which `jax_debug_infs` would stop outside.

    Args:
        model: The model.
        gradients: Its gradients.
    """
    pairs = zip(fp8_states(model), fp8_states(gradients), strict=True)
    new = iter([state.overwritten_by(gradient) for state, gradient in pairs])
    return jax.tree.map(lambda node: next(new) if is_state(node) else node, gradients, is_leaf=is_state)


def _observed[M](model: M) -> M:
    """The model with every op in high precision, recording."""
    return jax.tree.map(lambda node: node.observed if _is_op(node) else node, model, is_leaf=_is_op)


def _overwritten[M](model: M, gradients: Any) -> M:
    """The model with the states that the gradients of the observed model hold."""
    new = iter([jax.tree.leaves(state) for state in fp8_states(gradients)])
    # The observed state's arrays, in a state that training updates.
    overwrite = lambda node: jax.tree.unflatten(jax.tree.structure(node), next(new)) if is_state(node) else node
    return jax.tree.map(overwrite, model, is_leaf=is_state)


def _require_batches(batches: Any) -> None:
    """A single batch instead of a list would be iterated row by row, or argument by argument."""
    if isinstance(batches, tuple):
        is_batch = any(_is_batch(element) for element in batches)
    else:
        is_batch = _is_batch(batches) or not isinstance(batches, Iterable)
    if is_batch:
        raise ValueError(
            f"batches is {_kind(batches)}, which is one batch or a part of it; pass a list of batches: "
            "calibrate(model, loss_fn, [batch]). For a loss_fn with several arguments a batch is a tuple of them, "
            "[(x, y)]"
        )


def _kind(value: Any) -> str:
    return "an array" if isinstance(value, jax.Array | np.ndarray) else f"a {type(value).__name__}"


def _is_batch(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | hax.NamedArray | Mapping | eqx.Module | str | bytes)


def _has_ops(model: Any) -> bool:
    return bool(fp8_states(model)) or any(map(_is_op, jax.tree.leaves(model, is_leaf=_is_op)))


def _is_op(node: Any) -> bool:
    return isinstance(node, AbstractOp)
