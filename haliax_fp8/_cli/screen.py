"""Where output goes: results to the standard output, everything else to the standard error."""

import io
import re

from rich.console import Console, RenderableType
from rich.terminal_theme import DEFAULT_TERMINAL_THEME


# A pipe, a file or a picture has no width: this one fits every table.
_WIDTH = 140


def screen(width: int = _WIDTH) -> Console:
    """For results.

    Args:
        width: The number of columns where there is no terminal.
    """
    console = Console()
    return console if console.is_terminal else Console(width=width)


def on_error() -> Console:
    """For messages, unchanged: a line stays a line."""
    return Console(stderr=True, soft_wrap=True, markup=False, highlight=False)


def as_svg(content: RenderableType, title: str) -> str:
    """What would be on the screen, as a picture that needs nothing from elsewhere.

    Args:
        content: What would be printed.
        title: The line above it.
    """
    console = Console(record=True, width=_WIDTH, file=io.StringIO())
    console.print(content)
    svg = console.export_svg(title=title, theme=DEFAULT_TERMINAL_THEME)
    # Rich's fonts are loaded from the network; the reader's own monospaced font does.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
