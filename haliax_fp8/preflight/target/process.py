"""What compiling for an absent device changes in this process: for a while, and for one thread at a time."""

import contextlib
import logging
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence


# Variables, log filters and warning filters belong to the whole process: two threads that restored them in the wrong
# order would leave a change behind. A thread may enter again.
_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def changed_process(
    *, variables: Mapping[str, str] | None = None, quiet: Sequence[str] = (), ignored: Sequence[str] = ()
) -> Iterator[None]:
    """Changes the process, and undoes that at the end; other threads wait until then.

    Args:
        variables: Variables of the environment by name; those that are set already stay as they are.
        quiet: Names of loggers whose warnings are dropped.
        ignored: How the messages begin of Python warnings that are dropped.
    """
    with _ONE_AT_A_TIME, contextlib.ExitStack() as undo:
        for name, value in (variables or {}).items():
            if name not in os.environ:
                os.environ[name] = value
                undo.callback(os.environ.pop, name, None)
        for name in quiet:
            logging.getLogger(name).addFilter(_is_error)
            undo.callback(logging.getLogger(name).removeFilter, _is_error)
        undo.enter_context(warnings.catch_warnings())
        for message in ignored:
            warnings.filterwarnings("ignore", message=message)
        yield


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
