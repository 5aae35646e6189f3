"""Where output goes: results to the standard output, all else to the standard error."""

from rich.console import Console


def screen() -> Console:
    """For results. A pipe or a file has no width: 140 columns fit every table."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def on_error() -> Console:
    """For messages: as they are, a line stays a line."""
    return Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
