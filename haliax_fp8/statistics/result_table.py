"""The table of a model's statistics: its verdict first, what layers have in common said once, names broken at dots."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text

from .._tables import common_prefix


@dataclasses.dataclass(frozen=True)
class DottedName:
    """A path that a narrow column breaks at its dots, and never inside an index.

    Args:
        path: The path.
        indent: How many blanks stand before it.
    """

    path: str
    indent: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width, lines = max(1, options.max_width - self.indent), [""]
        for segment in self._segments():
            for piece in [segment] if len(segment) <= width else _pieces(segment):
                if lines[-1] and len(lines[-1]) + len(piece) > width:
                    lines.append("")
                lines[-1] += piece
        yield Text("\n".join(" " * self.indent + line for line in lines), overflow="fold")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        fit = lambda width: min(width, options.max_width)
        return Measurement(fit(self.longest_segment), fit(len(self.path) + self.indent))

    @property
    def longest_segment(self) -> int:
        """The width at which it is broken at dots alone."""
        return self.indent + max(map(len, self._segments()))

    @property
    def longest_piece(self) -> int:
        """The least width at which no word is broken."""
        return self.indent + max(len(piece) for segment in self._segments() for piece in _pieces(segment))

    def _segments(self) -> list[str]:
        """The segments, each with its dot in front."""
        return [piece if i == 0 else f".{piece}" for i, piece in enumerate(self.path.split("."))]


def _pieces(segment: str) -> list[str]:
    """What a segment that fits no line is broken into: at underscores, and before an index."""
    return re.findall(r"\[[^\]]*\]|[^_\[]+_*|_+|\[", segment)


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers whose paths begin alike, one after the other.

    Args:
        prefix: What their paths begin with; empty for a layer alone.
        names: The rest of each path, by path.
    """

    prefix: str
    names: dict[str, str]


def groups(paths: Sequence[str]) -> list[Group]:
    """The groups of a table, in the order of the layers: those whose paths have at least their first segment alike."""
    found = []
    for _, same in itertools.groupby(paths, lambda path: path.partition(".")[0]):
        members = list(same)
        prefix = common_prefix(members) if len(members) > 1 else ""
        found.append(Group(prefix, {path: path.removeprefix(prefix).removeprefix(".") for path in members}))
    return found


@dataclasses.dataclass(frozen=True)
class Worst:
    """What the verdict reads of an operand: the worst of a stack, NaN where the loss does not reach it.

    Args:
        saturation: The share of clipped elements.
        underflow: The share of elements flushed to zero.
        nonfinite: How many elements are infinite or NaN.
    """

    saturation: float
    underflow: float
    nonfinite: float


_SATURATION, _UNDERFLOW = 0.001, 0.01


def verdict(operands: Iterable[Worst]) -> str:
    """What is worst, in a few words: the first line above the table."""
    all = list(operands)
    if not all:
        return "nothing was measured"
    reached = [x for x in all if not np.isnan(x.saturation)]
    if not reached:
        return f"the loss reaches none of {len(all)} operands"
    clipped = [x.saturation for x in reached if x.saturation > _SATURATION]
    flushed = [x.underflow for x in reached if x.underflow > _UNDERFLOW]
    bad = sum(x.nonfinite > 0 for x in reached)
    count, parts = f"of {len(reached)} operands", list[str]()
    if bad:
        parts.append(f"{bad} {count} {'holds' if bad == 1 else 'hold'} NaN or infinities")
    if clipped:
        verb = "saturates" if len(clipped) == 1 else "saturate"
        parts.append(f"{len(clipped)} {count} {verb} by more than {_SATURATION:.1%} (the worst {max(clipped):.1%})")
    else:
        at_all = any(x.saturation > 0.0 for x in reached)
        parts.append("no operand saturates" + (f" by more than {_SATURATION:.1%}" if at_all else ""))
    if flushed:
        verb = "underflows" if len(flushed) == 1 else "underflow"
        of_all = "" if clipped or bad else f" {count}"
        parts.append(f"{len(flushed)}{of_all} {verb} by more than {_UNDERFLOW:.0%} (the worst {max(flushed):.1%})")
    else:
        parts.append(f"none underflows by more than {_UNDERFLOW:.0%}")
    if len(reached) < len(all):
        parts.append(f"the loss does not reach {len(all) - len(reached)}")
    return "; ".join(parts)
