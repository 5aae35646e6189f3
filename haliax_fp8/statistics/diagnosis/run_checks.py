"""diagnose: which layers FP8 hurts, and what helps."""

from typing import Any

from ...layers.ops import all_ops
from ..result import ModelStatistics
from .checks import CHECKS
from .finding import Diagnosis, Finding
from .operand import operands
from .thresholds import Thresholds


def diagnose(model: Any, statistics: ModelStatistics, thresholds: Thresholds | None = None) -> Diagnosis:
    """Names the layers that saturate, underflow, grow, are dead or hold values that are not finite; with remedies.

    It reads numbers on the host, so it runs outside `jit`. What the state remembers counts as well: measure on a batch
    of training, between two steps.

    Args:
        model: The model that was measured.
        statistics: What `quantization_statistics(model, loss_fn, *batch)` returned.
        thresholds: From where on a number counts as a problem; the default is `Thresholds()`.

    Returns:
        The problems, the most urgent first; empty, and false, for a healthy model. An operand has at most one.

    Raises:
        ValueError: If the statistics are of another model, or the model has no FP8 product.

    Example:
        >>> model = calibrate(fp8_linear_layers(model), loss_fn, [(x,)])
        >>> print(diagnose(model, quantization_statistics(model, loss_fn, x)))
        No problem found.
    """
    if not isinstance(statistics, ModelStatistics):
        raise ValueError(
            f"statistics={type(statistics).__name__} must be what quantization_statistics(model, loss_fn, *batch) "
            "returns"
        )
    if not all_ops(model):
        raise ValueError("model has no FP8 product to diagnose; convert it with fp8_linear_layers")
    everything = operands(model, statistics)
    thresholds = Thresholds() if thresholds is None else thresholds
    found: dict[tuple[str, tuple[int, ...], str], Finding] = {}
    for check in CHECKS:
        for finding in check(everything, thresholds):
            found.setdefault((finding.layer, finding.index, finding.operand), finding)
        if check is CHECKS[0] and found:
            # What is not finite makes every other number meaningless.
            break
    return Diagnosis(tuple(found.values()))
