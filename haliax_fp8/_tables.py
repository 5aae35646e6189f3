"""How results show themselves: as a table in a terminal, in a log and in a notebook."""

import abc
import io
import shutil
from typing import ClassVar

import rich.box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text


class Printable(abc.ABC):
    """What `print`, a Python prompt and a notebook show as a table, and `rich` with colors."""

    width: ClassVar[int | None] = None
    """The number of columns of the text; by default those of the terminal (or `COLUMNS`), and 80 without one."""

    @abc.abstractmethod
    def __rich__(self) -> RenderableType:
        """What to show."""

    def __str__(self) -> str:
        console = Console(width=self._columns, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    @property
    def _columns(self) -> int:
        return shutil.get_terminal_size((80, 24)).columns if self.width is None else self.width

    # Data classes need `repr=False` to inherit it.
    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        console = Console(width=self._columns, record=True, file=io.StringIO(), force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format='<pre style="line-height: 1.2">{code}</pre>')


def new_table(title: str, caption: str = "") -> Table:
    """An empty table in the style of the package.

    Args:
        title: The line above it.
        caption: The lines below it.
    """
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=rich.box.SIMPLE,
        caption=Text(caption) if caption else None,  # not markup, which would read brackets as styles
        caption_justify="left",
    )
