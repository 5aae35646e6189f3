"""Finding: what is wrong with an operand, how one sees it, and what helps."""

import dataclasses
import enum

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..._tables import Printable, new_table


class Problem(enum.Enum):
    """What can be wrong with an operand."""

    NOT_FINITE = "not finite"
    NOT_CALIBRATED = "not calibrated"
    FORMATS_SWAPPED = "formats swapped"
    FOREIGN_STATE = "state of another layer"
    JUMP = "jump"
    GROWTH = "growth"
    SATURATION = "saturation"
    OLD_SPIKE = "old spike"
    UNDERFLOW = "underflow"
    OUTLIERS = "outliers"
    NOISE = "noise"
    NO_ROWS = "expert without rows"
    DEAD = "dead"


class Remedy(enum.Enum):
    """What `Diagnosis.apply` can change in a model; `NONE` stands for what it cannot."""

    NONE = "none"
    SHORTER_HISTORY = "a history of 16 steps"
    MARGIN = "one more binade of margin"
    SCALE_PER_ROW = "the recipe rowwise"
    STANDARD_FORMATS = "E4M3 forward, E5M2 for output gradients"
    HIGH_PRECISION = "high precision"


@dataclasses.dataclass(frozen=True, repr=False)
class Finding(Printable):
    """One problem. Print it for a report.

    Args:
        layer: The path of the layer, as `fp8_linear_layers` names it.
        index: Which layer of a stack; empty outside of stacks.
        operand: "input", "kernel" or "output_grad".
        problem: What is wrong.
        seen: The number that shows it, in words.
        threshold: What that number is compared with, in words.
        source: Where the threshold comes from; "heuristic" if it is ours.
        advice: What to do.
        remedy: What of it `Diagnosis.apply` does.
    """

    layer: str
    index: tuple[int, ...]
    operand: str
    problem: Problem
    seen: str
    threshold: str
    source: str
    advice: str
    remedy: Remedy = Remedy.NONE

    def __rich__(self) -> Table:
        where = f"{self.layer or 'model'}{''.join(f'[{i}]' for i in self.index)}, {self.operand}"
        table = new_table(f"{where}: {self.problem.value}")
        table.show_header = False
        table.add_column(no_wrap=True)
        table.add_column()
        table.add_row("seen", Text(self.seen))
        table.add_row("threshold", Text(f"{self.threshold} ({self.source})"))
        table.add_row("remedy", Text(self.advice))
        return table


@dataclasses.dataclass(frozen=True, repr=False)
class Diagnosis(Printable):
    """What `diagnose` found, the most urgent first; print it for a report. It is false if nothing was found.

    Args:
        findings: The problems.
    """

    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __rich__(self) -> RenderableType:
        if not self.findings:
            return Text("No problem found.")
        return Group(*self.findings)
