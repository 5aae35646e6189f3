"""where_not_finite: the first operand of a step that holds an infinity or NaN."""

from collections.abc import Callable
from typing import Any

import equinox as eqx

from ...layers.checks import require_model
from ...layers.walk import all_ops
from ...recipes.recipe import USES
from ..measure import quantization_statistics
from .checks import not_finite
from .operand import operands
from .thresholds import Thresholds


def where_not_finite(model: Any, loss_fn: Callable[..., Any], *batch: Any) -> str:
    """Runs a step's forward and backward pass again, and says in words which operand is not finite first.

    `require_finite_step(metrics, where=partial(where_not_finite, model, loss_fn, *batch))` calls it only when a step is
    not finite, and puts the answer into its error. A kernel comes before an input before an output gradient, because
    each spoils the next; layers come in the order of the model's fields.

    Args:
        model: The model that the step was given; not under `jit`.
        loss_fn: `loss_fn(model, *batch)`, a scalar.
        *batch: Its arguments after the model.

    Returns:
        Layer, operand, the first product that reads it, how many elements are not finite, and what to do.

    Example:
        >>> where_not_finite(fp8_linear_layers(model), loss_fn, x)
        'every operand of every FP8 product is finite: look at the loss and at layers in high precision'
    """
    require_model(model, "where_not_finite(model, loss_fn, *batch)")
    if not all_ops(model):
        return "the model has no FP8 product; look for the first NaN with jax.config.update('jax_debug_nans', True)"
    everything = operands(model, eqx.filter_jit(quantization_statistics)(model, loss_fn, *batch))
    for finding in not_finite(everything, Thresholds()):
        (product,) = [uses[0] for operand, uses in USES.items() if operand == finding.operand]
        return (
            f"the first in {finding.where}: {finding.operand}, which {product} reads; {finding.seen}; {finding.advice}"
        )
    return "every operand of every FP8 product is finite: look at the loss and at layers in high precision"
