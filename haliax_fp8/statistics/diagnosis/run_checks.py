"""diagnose: which layers FP8 hurts, and what helps."""

from typing import Any

from ..._numerics.checks import require
from ...layers.checks import require_model
from ...layers.walk import all_ops
from ..result import ModelStatistics
from .checks import CHECKS, EXPLAIN_ALL
from .finding import Diagnosis, Finding, Problem
from .operand import operands
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
    everything = operands(model, statistics)
    found: dict[tuple[str, tuple[int, ...], str], Finding] = {}
    # Scales of another layer explain all else that is wrong with a layer.
    explained: set[tuple[str, tuple[int, ...]]] = set()
    for check in CHECKS:
        new = [x for x in check(everything, thresholds) if (x.layer, x.index) not in explained]
        for finding in new:
            found.setdefault((finding.layer, finding.index, finding.operand), finding)
        explained |= {(x.layer, x.index) for x in new if x.problem is Problem.FOREIGN_STATE}
        if new and check in EXPLAIN_ALL:
            break
    return Diagnosis(tuple(found.values()))
