"""The amaxes that an op remembers, in time; and how old a scale is."""

import dataclasses

import equinox as eqx
import numpy as np

from .._op import Fp8DotGeneral
from .._state.op_state import OpState
from ..layers.checks import require_model, table_on_host
from ..layers.walk import named_ops
from ..recipes.scaling import DelayedScaling
from .result import OPERANDS, numbered


@dataclasses.dataclass(frozen=True)
class History:
    """The amaxes of an operand's past steps, oldest first; read from a model on the host.

    Args:
        amaxes: `[history]`, the newest last. Steps that have not been taken, or whose amax was not finite, have 0.
        scale: The scale of the next step.
    """

    amaxes: np.ndarray
    scale: float

    @staticmethod
    def of(op: Fp8DotGeneral, row: int, index: tuple[int, ...]) -> "History | None":
        """The history of an operand; None if its scaling keeps none, or its values are not there to read.

        Args:
            op: A converted layer's op.
            row: 0 for input, 1 for kernel, 2 for output gradient.
            index: Which layer of a stack.
        """
        table = table_on_host(op.state)
        scaling = op.state.scalings[row] if isinstance(op.state, OpState) else None
        if table is None or not isinstance(scaling, DelayedScaling):
            return None
        of_row = table[*index, row]
        # Newest first, then oldest to newest.
        amaxes = np.roll(of_row[1 : 1 + scaling.amax_history_length], -1)
        return History(np.maximum(amaxes, 0.0), float(of_row[0]))

    @property
    def newest(self) -> float:
        """The amax of the last step; 0 before the first."""
        return float(self.amaxes[-1])

    @property
    def largest(self) -> float:
        """The amax that the scale comes from; 0 before the first step."""
        return float(self.amaxes.max())

    @property
    def age(self) -> int:
        """How many steps ago the amax was measured that the scale comes from; 0 if it was in the last step."""
        return int(np.argmax(self.amaxes[::-1]))

    @property
    def recorded(self) -> int:
        """How many steps recorded an amax above 0."""
        return int((self.amaxes > 0.0).sum())

    @property
    def largest_change(self) -> float:
        """The largest change from one recorded amax to the next, in binades."""
        logs = np.log2(self.amaxes[self.amaxes > 0.0])
        return float(np.abs(np.diff(logs)).max(initial=0.0))

    def growth(self, steps: int) -> float:
        """The factor by which the amax grew over the last steps, if it grew in each of them; else 1.

        Args:
            steps: How many.
        """
        last = self.amaxes[-steps - 1 :]
        if len(last) <= steps or last[0] <= 0.0 or not (np.diff(last) > 0.0).all():
            return 1.0
        return float(last[-1] / last[0])


def scale_ages(model: object) -> dict[str, int]:
    """How many steps ago the amaxes were measured that the scales of delayed scaling come from.

    An age near the length of the history means that the scale still follows a spike.

    Args:
        model: A converted model, outside `jit`.

    Returns:
        Ages by `{layer}/{operand}`, as `ModelStatistics.flat` names them; without operands that keep no history.

    Example:
        >>> scale_ages(fp8_linear_layers(model))["layers.0/input"]
        0
    """
    require_model(model, "scale_ages(model)")
    ages = {}
    for path, op in named_ops(model):
        if not isinstance(op.state, OpState) or not eqx.is_array(op.state.table.array):
            continue
        for index in np.ndindex(op.state.table.array.shape[:-2]):
            for row, operand in enumerate(OPERANDS):
                if (history := History.of(op, row, index)) is not None:
                    ages[f"{numbered(path, index)}/{operand}"] = history.age
    return ages
