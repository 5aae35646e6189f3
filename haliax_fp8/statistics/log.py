"""StatisticsLog: the statistics of many steps."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import ArrayLike, Float64
from rich.text import Text

from .._printing import Printable
from .result import OPERANDS


@dataclasses.dataclass(frozen=True, repr=False)
class StatisticsLog(Printable):
    """Numbers of many steps by name, as `ModelStatistics.flat` names them.

    Args:
        steps: The steps at which was measured.
        numbers: For each name one number per step; NaN where a step has none.

    Example:
        >>> # As in `measured.flat()`.
        >>> measured = {"fp8/layers.0/input/amax": 1.0, "fp8/layers.1/input/amax": 2.0}
        >>> log = StatisticsLog.of([measured, measured], steps=[0, 100])
        >>> layers, amaxes = log.table("amax", "input")
        >>> layers, amaxes.shape
        (('layers.0', 'layers.1'), (2, 2))
    """

    steps: tuple[int, ...]
    numbers: Mapping[str, Float64[np.ndarray, " steps"]]

    def __rich__(self) -> Text:
        """One line: which steps, and how much of each."""
        first, *rest = self.steps
        which = f"{len(self.steps)} steps, {first} to {self.steps[-1]}" if rest else f"step {first}"
        return Text(f"{len(self.numbers)} numbers of {which}")

    @staticmethod
    def of(measured: Sequence[Mapping[str, ArrayLike]], steps: Sequence[int] | None = None) -> "StatisticsLog":
        """A log of what `ModelStatistics.flat()` gave at each step. Further numbers, such as the loss, are kept too.

        Args:
            measured: One dictionary per step.
            steps: The number of each step; None counts from 0.

        Raises:
            ValueError: If `measured` is empty, `steps` is not as long or not increasing, or a value is not one number.
        """
        steps = tuple(range(len(measured)) if steps is None else map(int, steps))
        if not measured or len(steps) != len(measured):
            raise ValueError(
                f"steps has {len(steps)} entries and measured {len(measured)}; give one measured.flat() for each step"
            )
        if any(after <= before for before, after in zip(steps, steps[1:], strict=False)):
            raise ValueError(
                f"steps={list(steps)} is not increasing; sort the measurements by step, with each step once"
            )
        for step, numbers in zip(steps, measured, strict=True):
            if not isinstance(numbers, Mapping):
                raise ValueError(
                    f"measured has a {type(numbers).__name__} for step {step}, not a dict of numbers; use its flat()"
                )
            for name, value in numbers.items():
                if np.size(value) != 1:
                    raise ValueError(f"{name!r} of step {step} has shape {np.shape(value)}, not one number; use flat()")
        names = dict.fromkeys(name for numbers in measured for name in numbers)
        return StatisticsLog(
            steps,
            {
                name: np.asarray([float(np.asarray(numbers.get(name, np.nan)).item()) for numbers in measured])
                for name in names
            },
        )

    def table(
        self, statistic: str, operand: str = "input"
    ) -> tuple[tuple[str, ...], Float64[np.ndarray, "layers steps"]]:
        """One statistic of one operand, for each layer and step.

        Args:
            statistic: A field of `OpStatistics`, or `"sqnr"`.
            operand: `"input"`, `"kernel"` or `"output_grad"`.

        Returns:
            The layers' names, and the numbers.

        Raises:
            ValueError: If the log has no such number.
        """
        if operand not in OPERANDS:
            raise ValueError(f"operand={operand!r} is not one of {list(OPERANDS)}")
        split = {name: name.rsplit("/", 3) for name in self.numbers}
        logged = {name: parts for name, parts in split.items() if len(parts) == 4 and parts[2] in OPERANDS}
        rows = {parts[1]: name for name, parts in logged.items() if parts[2:] == [operand, statistic]}
        if not rows:
            known = sorted({parts[3] for parts in logged.values()})
            raise ValueError(f"statistic={statistic!r} of {operand} is not in the log, which has {known}")
        return tuple(rows), np.stack([self.numbers[name] for name in rows.values()])
