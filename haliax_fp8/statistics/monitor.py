"""every: statistics in some of the steps of a `TrainStep`, measured by the step itself."""

from ..training import Monitor
from .measure import measuring, statistics_in, without_measurements
from .result import ModelStatistics


def every(steps: int, prefix: str = "fp8") -> Monitor:
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
        ['grad_norm', 'loss', 'output_grad_amax_ratio']
    """
    return Monitor(steps, prefix, measuring, without_measurements, statistics_in, ModelStatistics.flat)
