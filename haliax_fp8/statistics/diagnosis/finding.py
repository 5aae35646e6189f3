"""Finding: what is wrong with an operand, how one sees it, and what helps."""

import dataclasses
import enum
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..._printing import Printable, in_one_name, new_table, without_numbers
from ..result import numbered


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


SHORTER_HISTORY = 16
"""How many steps are remembered after `Remedy.SHORTER_HISTORY`; shorter histories stay as they are."""


class Remedy(enum.Enum):
    """What `apply_remedies` can change in a model; `NONE` stands for what it cannot."""

    NONE = "none"
    SHORTER_HISTORY = f"a history of {SHORTER_HISTORY} steps"
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
        remedy: What of it `apply_remedies` does.
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

    @property
    def where(self) -> str:
        """The layer, with its number in a stack."""
        return numbered(self.layer, self.index)

    def __rich__(self) -> Table:
        return _report((self,))


@dataclasses.dataclass(frozen=True, repr=False)
class Diagnosis(Printable):
    """What `diagnose` found, the most urgent first; print it for a report. It is false if nothing was found.

    The report says once what is wrong with several layers alike, and what helps: with ranges of the layers of a list or
    stack, and what was seen in the first of them. `findings` has every layer.

    Args:
        findings: The problems, one for each layer.
    """

    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __rich__(self) -> RenderableType:
        if not self.findings:
            return Text("No problem found.")
        # Those with the same remedy are told apart by where and what was seen.
        alike: dict[Finding, list[Finding]] = {}
        for finding in self.findings:
            same = dataclasses.replace(finding, layer="", index=(), operand="", seen="")
            alike.setdefault(same, []).append(finding)
        return Group(*map(_report, alike.values()))


def _report(findings: Sequence[Finding]) -> Table:
    """The report on one finding, or on several that differ in where it is and what was seen."""
    first, *others = findings
    count = f" ({len(findings)} findings)" if others else ""
    ranges: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        ranges.setdefault((without_numbers(finding.where), finding.operand), []).append(finding)
    names = {f"{in_one_name([x.where for x in found])}, {found[0].operand}": found for found in ranges.values()}
    title = f"{next(iter(names))}: {first.problem.value}" if len(names) == 1 else first.problem.value
    table = new_table(title + count)
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column()
    if len(names) == 1:
        table.add_row("seen", Text(_seen(findings)))
    elif len({finding.seen for finding in findings}) == 1:
        table.add_row("where", Text("\n".join(names)))
        table.add_row("seen", Text(first.seen))
    else:
        table.add_row("seen", Text("\n".join(f"{name}: {_seen(found)}" for name, found in names.items())))
    table.add_row("threshold", Text(f"{first.threshold} ({first.source})"))
    table.add_row("remedy", Text(first.advice))
    return table


def _seen(findings: Sequence[Finding]) -> str:
    """What was seen in the first finding, which is named if the others differ."""
    first = findings[0]
    differ = any(finding.seen != first.seen for finding in findings)
    return f"{first.seen} (in {first.where})" if differ else first.seen
