"""Work that takes minutes: what it is doing is on the standard error, and Ctrl-C ends it at once."""

import threading
from collections.abc import Callable

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .screen import on_error


def with_progress[T](function: Callable[[Callable[[str], None]], T]) -> T:
    """Calls a function; the standard error shows meanwhile what it says.

    Args:
        function: Is called with a function that takes words about what it is doing.

    Raises:
        KeyboardInterrupt: On Ctrl-C, at once; a compilation may go on in its thread until the process ends.
    """
    console = on_error()
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def say(what: str) -> None:
            progress.update(task, description=what)
            if not console.is_terminal:
                console.print(what)

        return interruptible(lambda: function(say))


def interruptible[T](function: Callable[[], T]) -> T:
    """Calls a function in a separate thread.

    Python handles Ctrl-C between its own instructions: in the main thread it would wait for the compiler's end.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
