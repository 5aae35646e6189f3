"""Where output goes: results to the standard output, everything else to the standard error."""

import io
import re
import shutil
import sys
import textwrap

from rich.console import Console, RenderableType
from rich.terminal_theme import DEFAULT_TERMINAL_THEME


# Of a picture: the report fits, and on a phone its text is still 7 px high.
_WIDTH = 80


def screen() -> Console:
    """The console for results: as wide as `COLUMNS` says or the terminal is, and 80 columns in a pipe or a file."""
    return Console()


def on_error() -> Console:
    """The console for messages, which stay as they are: a line stays a line."""
    return Console(stderr=True, soft_wrap=True, markup=False, highlight=False)


def fitted(message: str) -> str:
    """A message in lines as long as `COLUMNS` says or the terminal is, broken between words.

    In a pipe or a file its lines stay whole, for those who search them.

    Args:
        message: What to say: no code, whose lines are not prose.
    """
    width = shutil.get_terminal_size((sys.maxsize, 24)).columns
    # A path or a flag that is broken cannot be copied.
    wrap = lambda line: textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(wrap, message.splitlines()))


def as_svg(content: RenderableType, title: str) -> str:
    """What would be on the screen, as a self-contained picture.

    Args:
        content: What would be printed.
        title: The line above it.
    """
    console = Console(record=True, width=_WIDTH, file=io.StringIO())
    console.print(content)
    svg = console.export_svg(title=title, theme=DEFAULT_TERMINAL_THEME)
    # Rich's fonts are loaded from the network; the reader's own monospaced font does.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
