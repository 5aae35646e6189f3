"""How results show themselves: as a table in a terminal, in a log and in a notebook."""

import abc
import io
import shutil
from typing import Any

import rich.box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text


class Printable(abc.ABC):
    """What `print`, a Python prompt and a notebook show as a table, and `rich` with colors."""

    @abc.abstractmethod
    def __rich__(self) -> RenderableType:
        """The table, or whatever rich prints."""

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
