"""Names of layers in tables: what they share is said once, and layers that differ in a number alone share one name."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text


def common_prefix(paths: Sequence[str]) -> str:
    """The segments that all dotted paths begin with, but for their last: said once, above the rest of each.

    Args:
        paths: At least one.
    """
    split = [path.split(".")[:-1] for path in paths]
    same = itertools.takewhile(lambda segments: len(set(segments)) == 1, zip(*split, strict=False))
    return ".".join(segments[0] for segments in same)


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

    def __str__(self) -> str:
        return " " * self.indent + self.path

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


_NUMBER = re.compile(r"(?:(?<=[.\[])|^)\d+(?=[.\[\]]|$)")
# More runs of numbers than that make a name that nobody reads.
_MOST_RUNS = 4


def without_numbers(path: str) -> str:
    """A path with `*` for each number in it: the same for all layers of a list, and for all of a stack.

    Args:
        path: The path, which may end with the index of a stack.

    Example:
        >>> without_numbers("blocks.11.up"), without_numbers("blocks.stacked.fc1[3]")
        ('blocks.*.up', 'blocks.stacked.fc1[*]')
    """
    return _NUMBER.sub("*", path)


def in_one_name(paths: Sequence[str]) -> str:
    """One name for paths that differ only in their numbers: with ranges, or the first of them and how many there are.

    Args:
        paths: At least one; all the same `without_numbers`.

    Example:
        >>> in_one_name(["blocks.0.up", "blocks.1.up", "blocks.2.up", "blocks.11.up"])
        'blocks.0-2,11.up'
        >>> in_one_name(["blocks.0.heads.0", "blocks.1.heads.1"])
        'blocks.0.heads.0 and 1 more'
    """
    # No brackets around ranges: [0-11] is a pattern, which selects the layers 0 and 1.
    first, *others = names = list(dict.fromkeys(paths))
    if not others:
        return first
    columns = [sorted(set(column), key=int) for column in zip(*map(_NUMBER.findall, names), strict=True)]
    ranges = [_ranges(column) for column in columns]
    if math.prod(map(len, columns)) != len(names) or max(map(len, ranges)) > _MOST_RUNS:
        return f"{first} and {len(others)} more"
    texts = map(",".join, ranges)
    return _NUMBER.sub(lambda _: next(texts), first)


def _ranges(numbers: Sequence[str]) -> list[str]:
    """Runs of consecutive numbers, as `0-3`."""
    runs: list[list[str]] = []
    for number in numbers:
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
