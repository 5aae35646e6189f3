"""How results show themselves: as a table in a terminal, in a log and in a notebook."""

import abc
import dataclasses
import io
import itertools
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import rich.box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


class Printable(abc.ABC):
    """What `print`, a Python prompt and a notebook show as a table, and `rich` with colors."""

    @abc.abstractmethod
    def __rich__(self) -> RenderableType:
        """What to show."""

    def __str__(self) -> str:
        console = Console(width=columns(), color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    # Data classes need `repr=False` to inherit it.
    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        console = Console(width=columns(), record=True, file=io.StringIO(), force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format='<pre style="line-height: 1.2">{code}</pre>')


def columns() -> int:
    """How wide tables are: as `COLUMNS` says, or the terminal, or 80 columns without one."""
    return shutil.get_terminal_size((80, 24)).columns


def new_table(title: str = "", caption: str = "") -> Table:
    """An empty table in the style of the package.

    Args:
        title: The line above it; none by default.
        caption: The lines below it.
    """
    # A title is as wide as its table, and would break above a narrow one.
    whole: dict[str, Any] = {"no_wrap": True, "overflow": "ignore"} if len(title) <= columns() else {}
    return Table(
        title=Text(title, "bold", **whole) if title else None,
        title_justify="left",
        box=rich.box.SIMPLE,
        # Text, not markup, which would read brackets as styles.
        caption=Text(caption) if caption else None,
        caption_justify="left",
    )


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
