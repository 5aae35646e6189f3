"""Files opened, and JSON read, strictly; and the error for files that are not what they say."""

import json
import os
import pathlib
import stat
from typing import Any, BinaryIO


class BrokenCheckpoint(ValueError):
    """A folder is not what its files say.

    Args:
        file: The file, by its name in the folder.
        problem: What is wrong, and what to do.
        tensor: The tensor; empty if it is the file as a whole.
    """

    def __init__(self, file: str, problem: str, tensor: str = "") -> None:
        self.file, self.tensor, self.problem = file, tensor, problem
        super().__init__(f"{file}: {tensor}: {problem}" if tensor else f"{file}: {problem}")


def open_regular(path: pathlib.Path) -> BinaryIO:
    """Opens a file to read it; what is read through it is of one file, whoever replaces that meanwhile.

    Args:
        path: The file.

    Raises:
        BrokenCheckpoint: If it cannot be opened, or is not a regular file.
    """
    try:
        # Otherwise a named pipe would wait for its writer.
        file = open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb")
    except OSError as error:
        raise BrokenCheckpoint(path.name, f"it cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise BrokenCheckpoint(path.name, "it is not a file, but a pipe or a device; give a regular file")
    return file


def json_object(text: bytes, file: str, *, what: str = "content", constants: bool = True) -> dict[str, Any]:
    """The JSON object that a text holds.

    Args:
        text: The text, in UTF-8.
        file: Where it is from, for errors.
        what: What the text is, for errors.
        constants: Whether `NaN` and `Infinity` are numbers, as Python writes them and JSON does not know.

    Raises:
        BrokenCheckpoint: If it is not a JSON object, is nested too deep, or has a name twice.
    """
    try:
        content = json.loads(
            text.decode("utf-8"), object_pairs_hook=_once, parse_constant=None if constants else _no_constant
        )
    except UnicodeDecodeError:
        raise BrokenCheckpoint(file, f"its {what} is not UTF-8; the file is damaged, or of another format") from None
    except RecursionError:
        raise BrokenCheckpoint(file, f"its {what} is nested too deeply for a checkpoint") from None
    except _Twice as error:
        raise BrokenCheckpoint(file, f"its {what} has this name twice; each may occur only once", str(error)) from None
    except ValueError as error:
        raise BrokenCheckpoint(file, f"its {what} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise BrokenCheckpoint(file, f"its {what} is a {type(content).__name__}, but must be a JSON object")
    return content


def json_file(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object of a file.

    Args:
        path: The file.

    Raises:
        BrokenCheckpoint: As in `json_object`, or if the file cannot be read.
    """
    with open_regular(path) as file:
        return json_object(file.read(), path.name)


class _Twice(ValueError):
    """A name that an object has twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise _Twice(name.encode("utf-8", "backslashreplace").decode())
        members[name] = value
    return members


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
