"""Thresholds: from which values on a statistic counts as a problem, for `diagnose` and for printed statistics."""

import dataclasses
import math
import numbers

from .._arguments import require_integer


# Factors whose logarithm is taken or whose square is a divisor, and a number of steps.
_POSITIVE = "kernel_jump", "growth_steps", "over_noise"


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """Limits beyond which a number counts as a problem. All but `over_noise` are heuristics, chosen on small models.

    An infinite limit turns its check off, except `over_noise`, which is a lower limit.

    Args:
        saturation: The share of clipped elements, where clipping costs more than rounding could.
        underflow: The share of elements flushed to zero.
        jump: How many times an amax may exceed the largest of its history.
        kernel_jump: By what factor the amaxes of most kernels may change in one step.
        growth: By what factor an amax may grow that grows in each of the last `growth_steps` steps.
        growth_steps: See `growth`.
        kurtosis: The kurtosis of inputs and kernels with one scale, if also `underflow_of_outliers` is exceeded.
        underflow_of_outliers: The share of elements flushed to zero beside outliers.
        wide_rows: The share of rows near the tensor's amax beyond which a scale for each row does not help.
        over_noise: `|x| / (sqrt(3) |x - q|)` of output gradients should be at least this (arXiv:2505.19115).

    Raises:
        ValueError: If a limit is not a number, or must be positive and is not.
    """

    saturation: float = 0.001
    underflow: float = 0.05
    jump: float = 4.0
    kernel_jump: float = 1.4
    growth: float = 4.0
    growth_steps: int = 8
    kurtosis: float = 50.0
    underflow_of_outliers: float = 0.01
    wide_rows: float = 0.25
    over_noise: float = 1.0

    def __post_init__(self) -> None:
        require_integer("growth_steps", self.growth_steps, of="Thresholds")
        for field in dataclasses.fields(self):
            value, usual = getattr(self, field.name), f"{field.default} is the default"
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
                raise ValueError(f"{field.name}={value!r} of Thresholds must be a number; {usual}")
            if field.name in _POSITIVE and value <= 0:
                raise ValueError(f"{field.name}={value!r} of Thresholds must be positive; {usual}")
