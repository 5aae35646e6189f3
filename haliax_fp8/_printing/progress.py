"""Signs of life of work that takes minutes: a bar on a terminal, or calls of a function."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


type Watcher = Callable[[str, int, int], None]
"""`watcher(name, done, total)`: a tensor or layer, the bytes that are done with it, and all bytes."""


@contextlib.contextmanager
def progress_of(task: str, total: int, watcher: Watcher | None) -> Iterator[Callable[[str, int], None]]:
    """Yields the function to call with the name and the bytes of each part that is done.

    Args:
        task: What is done, for the bar.
        total: All bytes.
        watcher: Called with each part. None shows a bar if the standard error is a terminal, until the work is done.

    Raises:
        ValueError: If the watcher is something else.
    """
    if watcher is not None and not callable(watcher):
        raise ValueError(
            f"progress={watcher!r} is not a function; give one that is called as progress(name, done, total), or None "
            "for a bar on a terminal. lambda *_: None shows nothing"
        )
    console, done = Console(stderr=True), 0
    if watcher is not None:

        def tell(name: str, size: int) -> None:
            nonlocal done
            done += size
            watcher(name, done, total)

        yield tell
    elif not console.is_terminal:
        yield lambda name, size: None
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        name_column = TextColumn("{task.fields[name]}", markup=False)
        with Progress(*columns, name_column, console=console, transient=True) as bar:
            only = bar.add_task(task, total=total, name="")
            yield lambda name, size: bar.update(only, advance=size, name=name)
