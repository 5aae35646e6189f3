"""Files and folders that are hidden until they are complete, and are removed however their writer ends."""

import contextlib
import importlib
import os
import pathlib
import re
import shutil
import signal
import threading
import uuid
from collections.abc import Iterator
from typing import Any


# Locks files, which Windows does not need: there, a file that is open cannot be removed.
_fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

# In a folder, the file that is locked: network file systems lock no folders.
_LOCK = ".lock"


@contextlib.contextmanager
def unfinished(final: pathlib.Path, *, is_folder: bool = False) -> Iterator[pathlib.Path]:
    """A new file or folder beside another, whose name begins with a dot, until it takes the other's name.

    An error removes it, and so does SIGTERM, with which batch systems end a process. It is locked as long as its writer
    lives: what was killed otherwise is not, and the next writer of the same name removes that.

    Args:
        final: The name that it will take, in a folder that exists.
        is_folder: Whether it is a folder.
    """
    _remove_left(final)
    temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex}.tmp")
    lock = _created(temporary, is_folder=is_folder)
    try:
        with _removed_at_sigterm(temporary):
            yield temporary
    finally:
        _remove(temporary)
        if lock is not None:
            os.close(lock)


def take_name(temporary: pathlib.Path, final: pathlib.Path) -> None:
    """Gives what is complete its name, and returns when that would survive a crash.

    Args:
        temporary: What `unfinished` gave.
        final: Its name.
    """
    is_folder = temporary.is_dir()
    for path in (*temporary.iterdir(), temporary) if is_folder else (temporary,):
        _to_disk(path)
    if is_folder:
        (temporary / _LOCK).unlink()
    temporary.replace(final)
    _to_disk(final.parent)


def _created(temporary: pathlib.Path, *, is_folder: bool) -> int | None:
    """Makes it, locked where the file system has locks; returns what holds the lock."""
    while True:
        if is_folder:
            temporary.mkdir(exist_ok=True)
        lock = os.open(temporary / _LOCK if is_folder else temporary, os.O_CREAT | os.O_RDWR, 0o666)
        if _fcntl is None:
            os.close(lock)
            return None
        with contextlib.suppress(OSError):
            _fcntl.flock(lock, _fcntl.LOCK_EX)
        if temporary.exists():
            return lock
        os.close(lock)  # Another writer found it before it was locked, and removed it.


def _remove_left(final: pathlib.Path) -> None:
    """Removes what writers of a name left that were killed: nobody has it locked, or open on Windows."""
    left = re.compile(rf"\.{re.escape(final.name)}\.[0-9a-f]{{32}}\.tmp")
    for other in [other for other in final.parent.iterdir() if left.fullmatch(other.name)]:
        with contextlib.suppress(OSError):
            if _fcntl is None:
                _remove(other)
                continue
            with (other / _LOCK if other.is_dir() else other).open("r+b") as file:
                _fcntl.flock(file, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
                _remove(other)


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _removed_at_sigterm(path: pathlib.Path) -> Iterator[None]:
    """Meanwhile SIGTERM removes something before it ends the process, unless the program handles the signal itself."""
    if threading.current_thread() is not threading.main_thread() or not _ends_the_process(signal.SIGTERM):
        yield
        return

    writer = os.getpid()

    def end(number: int, frame: Any) -> None:
        if os.getpid() == writer:  # and no process that was forked meanwhile
            _remove(path)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _ends_the_process(number: int) -> bool:
    """Whether nobody handles a signal: neither in Python, nor beside it, as `jax.distributed` does."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    try:
        status = pathlib.Path("/proc/self/status").read_text()
    except OSError:
        return True
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return match is None or not int(match[1], 16) >> (number - 1) & 1


def _to_disk(path: pathlib.Path) -> None:
    """Waits until a file, or the names in a folder, would survive a crash; Windows has no such call for folders."""
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
