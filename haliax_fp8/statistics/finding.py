"""What `diagnose` takes and returns: thresholds; problems with the numbers that show them; and how they are printed."""

import dataclasses
import enum
import math
import numbers
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .._numerics.checks import require_integer
from .._printing import Printable, in_one_name, new_table, without_numbers
from .result import numbered


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


# Factors whose logarithm is taken or whose square is a divisor, and a number of steps.
_POSITIVE = "kernel_jump", "kernel_mismatch", "growth_steps", "over_noise"


@dataclasses.dataclass(frozen=True, repr=False)
class Thresholds(Printable):
    """Limits beyond which a number counts as a problem. All but `over_noise` are heuristics, chosen on small models.

    An infinite limit turns its check off, except `over_noise`, which is a lower limit.

    Args:
        saturation: The share of clipped elements, where clipping costs more than rounding could.
        underflow: The share of elements flushed to zero.
        jump: How many times an amax may exceed the largest of its history.
        kernel_jump: By what factor the amax of a kernel may change in one step; those of most kernels, by its root.
        kernel_mismatch: The same, where earlier steps and other kernels change four times less.
        growth: By what factor an amax may grow that grows in each of the last `growth_steps` steps.
        growth_steps: See `growth`.
        kurtosis: The kurtosis of inputs and kernels with one scale, if also `underflow_of_outliers` is exceeded.
        underflow_of_outliers: The share of elements flushed to zero beside outliers.
        over_noise: `|x| / (sqrt(3) |x - q|)` of output gradients should be at least this (arXiv:2505.19115).

    Raises:
        ValueError: If a limit is not a number, or must be positive and is not.
    """

    saturation: float = 0.001
    underflow: float = 0.05
    jump: float = 4.0
    kernel_jump: float = 2.0
    kernel_mismatch: float = 1.1
    growth: float = 4.0
    growth_steps: int = 8
    kurtosis: float = 50.0
    underflow_of_outliers: float = 0.01
    over_noise: float = 1.0

    def __post_init__(self) -> None:
        require_integer("growth_steps", self.growth_steps, of="Thresholds")
        for field in dataclasses.fields(self):
            value, usual = getattr(self, field.name), f"{field.default} is the default"
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
                raise ValueError(f"{field.name}={value!r} of Thresholds must be a number; {usual}")
            if field.name in _POSITIVE and value <= 0:
                raise ValueError(f"{field.name}={value!r} of Thresholds must be positive; {usual}")

    def __rich__(self) -> Table:
        table = new_table("The values from which a number counts as a problem")
        table.add_column("threshold", no_wrap=True)
        table.add_column("value", justify="right", no_wrap=True)
        for field in dataclasses.fields(self):
            table.add_row(field.name, f"{getattr(self, field.name):g}")
        return table


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
    operand: str
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
