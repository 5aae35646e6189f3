"""Changes that compiling for an absent device makes to this process, temporarily and for one thread at a time."""

import contextlib
import logging
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence


# Variables, log filters and warning filters belong to the whole process: if two threads restored them in the wrong
# order, a change would remain. A thread may enter again.
_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def changed_process(
    *, variables: Mapping[str, str] | None = None, quiet: Sequence[str] = (), ignored: Sequence[str] = ()
) -> Iterator[None]:
    """Changes the process, and undoes the changes at the end; other threads wait until then.

    Args:
        variables: Environment variables by name; those that are set already do not change.
        quiet: Names of loggers whose warnings are dropped.
        ignored: Beginnings of the messages of Python warnings that are dropped.
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
