"""diagnose: which layers FP8 hurts, and what helps; where_not_finite: which operand of a step spoils it first."""

from collections.abc import Callable
from typing import Any

import equinox as eqx

from .._arguments import require
from ..layers.checks import require_model
from ..layers.walk import all_ops
from ..recipes import USES
from .checks import CHECKS, FINITE
from .finding import Diagnosis, Finding
from .measure import quantization_statistics
from .operand import Operand, operands
from .result import ModelStatistics
from .thresholds import Thresholds


def diagnose(model: Any, statistics: ModelStatistics, thresholds: Thresholds | None = None) -> Diagnosis:
    """Names the layers that saturate, underflow, grow, are dead or hold values that are not finite; with remedies.

    It reads numbers on the host, so it runs outside `jit`. What the state remembers counts as well: measure on a batch
    of training, between two steps.

    Args:
        model: The model that was measured.
        statistics: What `quantization_statistics(model, loss_fn, *batch)` returned.
        thresholds: The limits beyond which a number counts as a problem; the default is `Thresholds()`.

    Returns:
        The problems, the most urgent first; empty, and false, for a healthy model. An operand has at most one. What
        follows from another problem is left out: mend that, and diagnose again.

    Raises:
        ValueError: If the statistics are of another model, traced or abstract; if the model has no FP8 product; or if
            `thresholds` is not a `Thresholds`.

    Example:
        >>> model = calibrate(fp8_linear_layers(model), loss_fn, [(x,)])
        >>> print(diagnose(model, quantization_statistics(model, loss_fn, x)))
        No problem found.
    """
    if isinstance(model, ModelStatistics):
        raise ValueError("model and statistics are swapped; use diagnose(model, statistics)")
    require_model(model, "diagnose(model, statistics)")
    if not isinstance(statistics, ModelStatistics):
        raise ValueError(
            f"statistics={type(statistics).__name__} must be what quantization_statistics(model, loss_fn, *batch) "
            "returns"
        )
    if not all_ops(model):
        raise ValueError("model has no FP8 product to diagnose; convert it with fp8_linear_layers")
    thresholds = Thresholds() if thresholds is None else thresholds
    require("thresholds", thresholds, Thresholds, "Thresholds(saturation=0.01)", of="diagnose")
    return Diagnosis(check(operands(model, statistics), thresholds))


def check(operands: list[Operand], thresholds: Thresholds) -> tuple[Finding, ...]:
    """What all checks find, one finding for an operand.

    Args:
        operands: The operands of a model.
        thresholds: As in `diagnose`.
    """
    findings: dict[tuple[str, tuple[int, ...], str], Finding] = {}
    for row in CHECKS:
        new = row.findings(operands, thresholds)
        for finding in new:
            findings.setdefault((finding.layer, finding.index, finding.operand), finding)
        if new and row.explains_all:
            break
    return tuple(findings.values())


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
    for finding in (finding for row in FINITE for finding in row.findings(everything, Thresholds())):
        (product,) = [uses[0] for operand, uses in USES.items() if operand == finding.operand]
        return (
            f"the first in {finding.where}: {finding.operand}, which {product} reads; {finding.seen_in_words}; "
            f"{finding.advice}"
        )
    return "every operand of every FP8 product is finite: look at the loss and at layers in high precision"
