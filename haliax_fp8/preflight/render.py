"""A report as tables: what it says, as text for a terminal and as Markdown."""

import dataclasses
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .._printing import DottedName, new_table


def size(count: int | float) -> str:
    """Bytes for people.

    Example:
        >>> size(4123456789)
        '4.12 GB'
    """
    return _scaled(count, ("B", "kB", "MB", "GB", "TB"))


def operations(count: int | float) -> str:
    """FLOPs for people.

    Example:
        >>> operations(3.161e12)
        '3.16 TFLOP'
    """
    return _scaled(count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def _scaled(count: int | float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        # What three digits would round up to 1000 has the next unit.
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {units[-1]}"


type Cell = str | Text | DottedName


@dataclasses.dataclass(frozen=True)
class Section:
    """A table of a report.

    Args:
        heads: The heads of its columns.
        lines: The cells of each line. A line that is shorter is a heading for those below it, which are indented.
        wide: The columns that may be broken.
        figures: The columns that are aligned at the right.
    """

    heads: tuple[str, ...]
    lines: Sequence[tuple[Cell, ...]]
    wide: Sequence[str] = ()
    figures: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Page:
    """What is shown of a report.

    Args:
        flags: The flags of XLA, and what another setting of them changes.
        headline: The verdict.
        sections: The tables.
        findings: The warnings, worst first.
        notes: What the report does not know, and what it assumes.
    """

    flags: str
    headline: str
    sections: Sequence[Section]
    findings: Sequence[str]
    notes: Sequence[str]


def as_renderable(page: Page) -> RenderableType:
    """A page for a terminal of 80 columns or more: the verdict first.

    Args:
        page: The page.
    """
    # What the other setting changes stands at the end; here, under which flags all of it holds.
    headline = Text(page.headline, "bold").append(f"; {page.flags.partition('; ')[0]}", "not bold")
    findings = [Text(f"! {finding}", "yellow") for finding in page.findings]
    notes = [Text(f"? {note}", "dim") for note in page.notes]
    return Group(headline, *map(_as_table, page.sections), *findings, *notes, Text(page.flags, "dim"))


def _as_table(section: Section) -> Table:
    table = new_table()
    table.padding = (0, 1, 0, 0)
    for head in section.heads:
        justify, is_wide = "right" if head in section.figures else "left", head in section.wide
        table.add_column(head, no_wrap=not is_wide, overflow="fold", justify=justify)
    for line in section.lines:
        # Not markup, which would read brackets as styles.
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in line))
    return table


def as_markdown(page: Page) -> str:
    """A page for a pull request or another page.

    Args:
        page: The page.
    """
    lines = [page.flags, "", f"**{page.headline}**", ""]
    for section in page.sections:
        rows = [section.heads, ["---"] * len(section.heads), *section.lines]
        lines += [*(_row(row, len(section.heads)) for row in rows), ""]
    lines += [f"- {finding}" for finding in page.findings]
    lines += [f"- not known: {note}" for note in page.notes]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[Cell], count: int) -> str:
    escaped = (str(cell).replace("|", "\\|").replace("\n", " ").replace("  ", "&emsp;") for cell in cells)
    return f"| {' | '.join([*escaped, *[''] * (count - len(cells))])} |"
