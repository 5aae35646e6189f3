"""What `diagnose` returns: problems with the numbers that show them; and how they are printed."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .._printing import Printable, in_one_name, new_table, without_numbers
from ..recipes import OperandName
from .result import numbered


class Problem(enum.Enum):
    """What can be wrong with an operand."""

    NOT_FINITE = "not finite"
    NOT_CALIBRATED = "not calibrated"
    FORMATS_SWAPPED = "formats swapped"
    SHORT_HISTORY = "history too short"
    JUMP = "jump"
    GROWTH = "growth"
    SATURATION = "saturation"
    OLD_SPIKE = "old spike"
    UNDERFLOW = "underflow"
    OUTLIERS = "outliers"
    NOISE = "noise"
    NO_ROWS = "expert without rows"
    DEAD = "dead"


HISTORY = 16
"""How many steps are remembered after `Remedy.SHORTER_HISTORY` and `Remedy.LONGER_HISTORY`."""


class Remedy(enum.Enum):
    """What `apply_remedies` can change in a model; `NONE` stands for what it cannot."""

    NONE = "none"
    SHORTER_HISTORY = f"a history of {HISTORY} steps"
    LONGER_HISTORY = f"the largest amax of {HISTORY} steps"
    MARGIN = "one more binade of margin"
    SCALE_PER_ROW = "the recipe rowwise"
    STANDARD_FORMATS = "E4M3 forward, E5M2 for output gradients"
    HIGH_PRECISION = "high precision"


@dataclasses.dataclass(frozen=True)
class Words:
    """How a finding is printed. The braces of a text are filled with its numbers; advice has none.

    Args:
        seen: What is said of each number, if it was seen; under "", what is said always. Of two texts, the first is for
            the number 1.
        threshold: The same for each limit.
        advice: What to do.
        source: Where the threshold comes from; "heuristic" if it is ours.
    """

    seen: Mapping[str, str | tuple[str, str]]
    threshold: Mapping[str, str | tuple[str, str]]
    advice: str
    source: str = "heuristic"


@dataclasses.dataclass(frozen=True, repr=False)
class Finding(Printable):
    """One problem. Print it for a report.

    Args:
        layer: The path of the layer, as `fp8_linear_layers` names it.
        index: Which layer of a stack; empty outside of stacks.
        operand: "input", "kernel" or "output_grad".
        problem: What is wrong.
        remedy: What `apply_remedies` does about it.
        seen: The numbers that show it, by name: fields of `OpStatistics`, of `Thresholds`, and what explains them.
        limits: The limits that they were compared with, by the names in `seen`.
        others: The names of other layers or operands that have to do with it.
        words: How it is printed.
    """

    layer: str
    index: tuple[int, ...]
    operand: OperandName
    problem: Problem
    remedy: Remedy = dataclasses.field(kw_only=True)
    seen: Mapping[str, float] = dataclasses.field(kw_only=True, hash=False)
    limits: Mapping[str, float] = dataclasses.field(kw_only=True, hash=False)
    others: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
    words: Words = dataclasses.field(kw_only=True, hash=False)

    @property
    def where(self) -> str:
        """The layer, with its number in a stack."""
        return numbered(self.layer, self.index)

    @property
    def seen_in_words(self) -> str:
        """What shows it."""
        others = ", ".join(self.others[:3]) + (" ..." if len(self.others) > 3 else "")
        return _said(self.words.seen, {"operand": self.operand.replace("_", " "), "others": others, **self.seen})

    @property
    def threshold_in_words(self) -> str:
        """What that is compared with."""
        return _said(self.words.threshold, self.limits)

    @property
    def advice(self) -> str:
        """What to do."""
        return self.words.advice

    def __rich__(self) -> Table:
        return _report((self,))


def _said(words: Mapping[str, str | tuple[str, str]], values: Mapping[str, float | str]) -> str:
    """The texts of the values that are there."""
    said = ""
    for name, text in words.items():
        if not name or values.get(name, "") != "":
            chosen = text if isinstance(text, str) else text[values[name] != 1]
            said += chosen.format_map(values)
    return said


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
        alike: dict[object, list[Finding]] = {}
        for finding in self.findings:
            words = finding.threshold_in_words, finding.words.source, finding.advice
            alike.setdefault((finding.problem, finding.remedy, *words), []).append(finding)
        return Group(*map(_report, alike.values()))


def _report(findings: Sequence[Finding]) -> Table:
    """The report on one finding, or on several that differ in where it is and what was seen."""
    first, *others = findings
    count = f" ({len(findings)} findings)" if others else ""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((without_numbers(finding.where), finding.operand), []).append(finding)
    ranges = {f"{in_one_name([x.where for x in same])}, {same[0].operand}": same for same in alike.values()}
    title = f"{next(iter(ranges))}: {first.problem.value}" if len(ranges) == 1 else first.problem.value
    table = new_table(title + count)
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column()
    if len(ranges) == 1:
        table.add_row("seen", Text(_seen(findings)))
    elif len({finding.seen_in_words for finding in findings}) == 1:
        table.add_row("where", Text("\n".join(ranges)))
        table.add_row("seen", Text(first.seen_in_words))
    else:
        table.add_row("seen", Text("\n".join(f"{name}: {_seen(same)}" for name, same in ranges.items())))
    table.add_row("threshold", Text(f"{first.threshold_in_words} ({first.words.source})"))
    table.add_row("remedy", Text(first.advice))
    return table


def _seen(findings: Sequence[Finding]) -> str:
    """What was seen in the first finding, which is named if the others differ."""
    first = findings[0]
    differ = any(finding.seen_in_words != first.seen_in_words for finding in findings)
    return f"{first.seen_in_words} (in {first.where})" if differ else first.seen_in_words
