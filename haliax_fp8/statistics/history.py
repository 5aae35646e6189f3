"""The amaxes that an op remembers, in time."""

import dataclasses

import numpy as np

from ..layers import Fp8DotGeneral
from ..layers.checks import table_on_host
from ..recipes import AmaxHistory
from ..training import OpState


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
        memory = op.state.scalings[row].memory if isinstance(op.state, OpState) else None
        if table is None or not isinstance(memory, AmaxHistory):
            return None
        of_row = table[*index, row]
        # Newest first, then oldest to newest.
        amaxes = np.roll(of_row[1 : 1 + memory.length], -1)
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

    def growth(self, steps: int) -> float:
        """The factor by which the amax grew over the last steps, if it grew in each of them; else 1.

        Args:
            steps: How many.
        """
        last = self.amaxes[-steps - 1 :]
        if len(last) <= steps or last[0] <= 0.0 or not (np.diff(last) > 0.0).all():
            return 1.0
        return float(last[-1] / last[0])
