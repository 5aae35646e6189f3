"""calibrate: a pass in high precision that fills the state, so that training starts with good scales."""

from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax

from ._op import Fp8DotGeneral
from ._overwrite import OverwriteWithGradient
from ._training import filter_grad


def calibrate[M](model: M, loss_fn: Callable[..., Any], batches: Iterable[Any]) -> M:
    """Runs forward and backward passes in high precision and enters every amax into the state of the model.

    State starts with scales of 1. Where gradients are around 1e-6, E5M2 rounds them to zero under that scale; the last
    layer finds its scale in the first step, the one before it in the second, and so on. After calibration on one
    batch, all layers train from the first step.

    Args:
        model: A converted model. Its parameters are not changed.
        loss_fn: `loss_fn(model, *batch)`, a scalar.
        batches: One step each; a tuple is several arguments to `loss_fn`.

    Returns:
        The model with its state filled: the history holds one amax for each batch, newest first.

    Raises:
        ValueError: If `batches` is empty, or the model has no state to fill.

    Example:
        >>> fp8_model = calibrate(fp8_linear_layers(model), loss_fn, [(x,)])
        >>> all(bool((node.scale != 1.0).all()) for node in fp8_states(fp8_model))
        True
    """
    if not fp8_states(model):
        raise ValueError(
            "model has no FP8 state to calibrate; convert it with fp8_linear_layers and a recipe that keeps state, "
            "such as DelayedScaling()"
        )
    count = 0
    for batch in batches:
        observed = _observed(model)
        gradients = _observed_gradients(observed, loss_fn, batch if isinstance(batch, tuple) else (batch,))
        model = _overwritten(model, observed, gradients)
        count += 1
    if count == 0:
        raise ValueError("batches is empty; calibration needs one batch at least")
    return model


def fp8_states(model: Any) -> list[OverwriteWithGradient]:
    """All state in a model that gradients overwrite."""
    return [node for node in jax.tree.leaves(model, is_leaf=_is_state) if _is_state(node)]


# One function for all calls, so that a second calibration with the same loss does not compile again.
@eqx.filter_jit
def _observed_gradients(model: Any, loss_fn: Callable[..., Any], batch: tuple[Any, ...]) -> Any:
    return filter_grad(lambda model: loss_fn(model, *batch))(model)


def _observed(model: Any) -> Any:
    """The model with every op in high precision, recording."""

    def observe(node: Any) -> Any:
        return node.with_recipe(node.recipe.observed) if isinstance(node, Fp8DotGeneral) else node

    return jax.tree.map(observe, model, is_leaf=lambda node: isinstance(node, Fp8DotGeneral))


def _overwritten(model: Any, observed: Any, gradients: Any) -> Any:
    """The model with the state that the observed model's would have."""
    pairs = zip(fp8_states(observed), fp8_states(gradients), strict=True)
    new = iter([jax.tree.leaves(state.overwritten_by(gradient)) for state, gradient in pairs])
    # The observed state's arrays, in a state that training updates.
    overwrite = lambda node: jax.tree.unflatten(jax.tree.structure(node), next(new)) if _is_state(node) else node
    return jax.tree.map(overwrite, model, is_leaf=_is_state)


def _is_state(node: Any) -> bool:
    return isinstance(node, OverwriteWithGradient)
