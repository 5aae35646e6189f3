"""every: statistics in some of the steps of a `TrainStep`, measured by the step itself."""

import dataclasses
from typing import Any

from ..layers.rule import LayerRule
from ..training.monitor import AbstractMonitor
from .measure import measuring, statistics_in, without_measurements
from .result import ModelStatistics


@dataclasses.dataclass(frozen=True)
class Every(AbstractMonitor):
    """Measures what `quantization_statistics` does, in one step of `steps`.

    Args:
        steps: How many steps from one that measures to the next; the first one does.
        prefix: What the names in `metrics` begin with.

    Raises:
        ValueError: If `steps` is not an integer of at least 1.
    """

    steps: int
    prefix: str = "fp8"

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise ValueError(f"steps={self.steps!r} must be an integer of at least 1; every(1) measures in each step")

    def is_due(self, step: int) -> bool:
        """In the first step, and every `steps` after it."""
        return step % self.steps == 0

    def measuring(self, model: Any, rules: tuple[LayerRule, ...]) -> Any:
        """The model with ops that measure."""
        return measuring(model, rules)

    def without_measurements(self, tree: Any, model: Any) -> Any:
        """The gradients without what was measured."""
        return without_measurements(tree, model)

    def measured(self, overwrites: Any) -> ModelStatistics:
        """The statistics."""
        return statistics_in(overwrites)

    def metrics(self, measured: ModelStatistics) -> dict[str, Any]:
        """`ModelStatistics.flat`, read from the device all at once."""
        return measured.flat(self.prefix)


def every(steps: int, prefix: str = "fp8") -> Every:
    """Statistics in one step of `steps`, for `TrainStep(monitor=every(100))`.

    The step itself measures: no operand is computed or quantized twice, and the step trains as it would without. Its
    numbers are in the step's `metrics`, by the names of `ModelStatistics.flat`. With microbatches, each is the largest
    over them. The other steps run the program of a step without a monitor. A step that measures is waited for.

    Args:
        steps: How many steps from one that measures to the next; the first one does.
        prefix: What the names begin with.

    Raises:
        ValueError: If `steps` is not an integer of at least 1.

    Example:
        >>> step = TrainStep(loss_fn, optax.adamw(1e-3), monitor=every(100))
        >>> fp8_model = fp8_linear_layers(model)
        >>> opt_state = step.init(fp8_model)
        >>> fp8_model, opt_state, metrics = step(fp8_model, opt_state, x)
        >>> float(metrics["fp8/layers.0/input/saturation"])
        0.0
        >>> fp8_model, opt_state, metrics = step(fp8_model, opt_state, x)
        >>> sorted(metrics)
        ['grad_norm', 'loss']
    """
    return Every(steps, prefix)
