"""Delayed scaling in NumPy: what the suite compares states against. Uses nothing of the package."""

from fractions import Fraction

import numpy as np


OPERANDS = ("input", "kernel", "output_grad")
OCP = {"input": 448.0, "kernel": 448.0, "output_grad": 57344.0}
FNUZ = {"input": 240.0, "kernel": 240.0, "output_grad": 57344.0}


class DelayedScalingReference:
    """The state of one op: amaxes in, scales out.

    In float32 every operation rounds as the definition says, so that states can be compared bit by bit; in float64 it
    is the state of a training run without rounding.
    """

    def __init__(self, length, limits=OCP, dtype=np.float32):
        self.dtype = dtype
        self.limits = {operand: dtype(limit) for operand, limit in limits.items()}
        self.scale = {operand: dtype(1.0) for operand in OPERANDS}
        self.history = {operand: np.zeros(length, dtype) for operand in OPERANDS}

    def record(self, **amaxes):
        """One step: `record(input=..., kernel=..., output_grad=...)`; an operand left out keeps its state."""
        for operand, amax in amaxes.items():
            history = np.roll(self.history[operand], -1)
            history[0] = amax
            self.history[operand] = history
            if (largest := history.max()) > 0:
                self.scale[operand] = self.dtype(1.0) / (self.limits[operand] / largest)


class DelayedOptionsReference:
    """The scale of one operand in float64, for any rule, margin, interval and rounding of scales.

    Args:
        limit: The largest value of the operand's format.
        length: How many amaxes the rule sees.
        rule: From the amaxes, oldest first, to the number that the scale comes from.
        measure: What a step records of a tensor.
        margin: Headroom as a power of two.
        interval: The scale moves in the first step and then every so many.
        power_of_two: Whether scales are rounded up to powers of two.
    """

    def __init__(self, limit, length, rule=max, measure=None, margin=0, interval=1, power_of_two=False):
        self.limit, self.length, self.rule, self.measure = limit, length, rule, measure or amax
        self.margin, self.interval, self.power_of_two = margin, interval, power_of_two
        self.scale, self.amaxes, self.steps = 1.0, [], 0

    def record(self, *uses):
        """One step with these tensors; the largest of what they measure counts, and nothing that is not finite."""
        with np.errstate(invalid="ignore"):
            measured = max(float(self.measure(np.asarray(x, np.float64))) for x in uses)
        if not np.isfinite(measured):
            return
        self.amaxes.append(measured)
        if self.steps % self.interval == 0 and (chosen := self.rule(self.amaxes[-self.length :])) > 0:
            self.scale = chosen / self.limit * 2.0**self.margin
            if self.power_of_two:
                self.scale = 2.0 ** np.ceil(np.log2(self.scale))
        self.steps += 1


def moving_average(decay):
    """The rule that weighs an amax by `decay` for each step since; steps that recorded nothing do not count."""

    def rule(amaxes):
        recorded = [(decay**age, amax) for age, amax in enumerate(reversed(amaxes)) if amax > 0]
        return sum(w * a for w, a in recorded) / sum(w for w, _ in recorded) if recorded else 0.0

    return rule


def percentile(percent):
    """The smallest magnitude that so many percent do not exceed, by counting."""

    def measure(x):
        magnitudes = sorted(np.abs(x).ravel())
        return next(a for i, a in enumerate(magnitudes) if 100 * (i + 1) >= Fraction(str(percent)) * len(magnitudes))

    return measure


def amax(x):
    """The largest magnitude of an array, named or not."""
    return np.max(np.abs(np.asarray(getattr(x, "array", x))))


def assert_state_is(op, reference):
    """The state of an op, bit for bit."""
    for operand in OPERANDS:
        np.testing.assert_array_equal(op.amax_history(operand), reference.history[operand], err_msg=operand)
        np.testing.assert_array_equal(op.scale(operand), reference.scale[operand], err_msg=operand)
