"""Delayed scaling in NumPy: what the suite compares states against. Uses nothing of the package."""

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


def amax(x):
    """The largest magnitude of an array, named or not."""
    return np.max(np.abs(np.asarray(getattr(x, "array", x))))


def assert_state_is(op, reference):
    """The state of an op, bit for bit."""
    for operand in OPERANDS:
        np.testing.assert_array_equal(op.amax_history(operand), reference.history[operand], err_msg=operand)
        np.testing.assert_array_equal(op.scale(operand), reference.scale[operand], err_msg=operand)
