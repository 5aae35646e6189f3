"""Which kind of checkpoint a path is."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from .checkpoint import AbstractCheckpoint, HostArrays
from .file import open_equinox, open_file, with_suffix
from .names import described
from .orbax_folder import OrbaxFolder
from .state_dict import with_names_of


def open_checkpoint(path: Any, model: Any, made_from: Any) -> AbstractCheckpoint:
    """A checkpoint, with the names of a model's leaves where it has them under other keys.

    Args:
        path: As in `load_into`.
        model: As in `load_into`.
        made_from: As in `load_into`.

    Raises:
        ValueError: If there is nothing, or nothing that can be read.
    """
    if isinstance(path, Mapping):
        arrays = {str(name): array for name, array in path.items() if array is not None}
        entries = {name: described(array) for name, array in arrays.items()}
        return with_names_of(model, HostArrays(entries, arrays.__getitem__))
    if not isinstance(path, str | os.PathLike):
        raise ValueError(
            f"path is of type {type(path).__name__}, not a file, a folder of Orbax or a state dict; use "
            "load_into(model, path)"
        )
    path = pathlib.Path(path)
    if path.is_dir():
        return OrbaxFolder(path)
    given, path = path, path if path.exists() else with_suffix(path)
    if not path.exists():
        either = "" if path == given else f", and neither does {os.fspath(path)!r}"
        raise ValueError(f"path={os.fspath(given)!r} does not exist{either}; give a file, or a folder that Orbax wrote")
    with path.open("rb") as file:
        is_equinox = made_from is not None or file.read(len(_ARRAY)) == _ARRAY
    return open_equinox(path, made_from) if is_equinox else with_names_of(model, open_file(path))


# How each array of Equinox's files begins: NumPy's format.
_ARRAY = b"\x93NUMPY"
