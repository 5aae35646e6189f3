"""TensorFolder: the tensors of a folder, of one file or of several with an index, read through a memory map."""

import dataclasses
import os
import pathlib
from typing import Any

import numpy as np

from .broken import BrokenCheckpoint
from .header import Stored, read_header
from .strict_json import json_file


SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


def require_folder_name(directory: Any, call: str) -> None:
    """Raises a ValueError if an argument cannot be the name of a folder, as where it and the model are swapped.

    Args:
        directory: The argument.
        call: The call with its arguments in order.
    """
    if not isinstance(directory, str | os.PathLike):
        raise ValueError(f"directory is of type {type(directory).__name__}, not the name of a folder; use {call}")


@dataclasses.dataclass(frozen=True)
class TensorFolder:
    """The tensors of a folder and its configuration.

    Args:
        directory: The folder.
        tensors: Where each tensor is, by name.
        config: What `config.json` holds.
        follow_links: Whether files may be links that lead out of the folder.
    """

    directory: pathlib.Path
    tensors: dict[str, Stored]
    config: dict[str, Any]
    follow_links: bool = False

    @staticmethod
    def open(directory: str | os.PathLike[str], *, follow_links: bool = False) -> "TensorFolder":
        """Reads the headers of a folder's files; no tensor yet.

        Nothing is executed and nothing is unpickled: a folder that holds only `pytorch_model.bin` is refused.

        Args:
            directory: The folder.
            follow_links: Whether files may be links that lead out of the folder, as in the cache of Hugging Face's
                hub. An index may never name files elsewhere.

        Raises:
            BrokenCheckpoint: If a file is missing, lies outside of the folder, or is not what the format says; a
                `ValueError` that names the file, and the tensor if it is one.
        """
        folder = pathlib.Path(directory)
        if not folder.is_dir():
            raise BrokenCheckpoint(os.fspath(directory), "it is not a folder")
        config = json_file(_inside(folder, CONFIG, "a checkpoint has it beside its tensors", follow_links))
        listed = None
        if os.path.lexists(folder / INDEX):
            listed = _weight_map(json_file(_inside(folder, INDEX, "", follow_links)))
            remedy = f"{INDEX} names it; copy it too"
            paths = [_inside(folder, file, remedy, follow_links) for file in dict.fromkeys(listed.values())]
        else:
            remedy = f"a checkpoint is this file, or those that {INDEX} lists; pickled weights are never read"
            paths = [_inside(folder, SINGLE, remedy, follow_links)]
        return TensorFolder(folder, _tensors(paths, listed), config, follow_links)

    def json_beside(self, name: str) -> dict[str, Any] | None:
        """What another file of the folder holds; None if there is none.

        Args:
            name: The file.

        Raises:
            BrokenCheckpoint: If it is a link out of the folder, or not JSON.
        """
        if not os.path.lexists(self.directory / name):
            return None
        return json_file(_inside(self.directory, name, "", self.follow_links))

    def __getitem__(self, name: str) -> np.ndarray:
        """A tensor, mapped: its bytes are read as they are used.

        Raises:
            ValueError: If the folder has no file of that name.
        """
        if name not in self.tensors:
            raise ValueError(f"{self.directory} has no tensor {name}")
        return self.tensors[name].array()


def _weight_map(index: dict[str, Any]) -> dict[str, str]:
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise BrokenCheckpoint(INDEX, "it has no weight_map from names of tensors to names of files")
    return listed


def _tensors(paths: list[pathlib.Path], listed: dict[str, str] | None) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for path in paths:
        for name, stored in read_header(path).items():
            if name in tensors:
                raise BrokenCheckpoint(
                    path.name, f"it is in {tensors[name].file.name} too; a tensor may be in one file only", name
                )
            tensors[name] = stored
    for name, stored in tensors.items():
        if listed is not None and listed.get(name) != stored.file.name:
            where = f"says that it is in {listed[name]}" if name in listed else "does not list it"
            raise BrokenCheckpoint(stored.file.name, f"{INDEX} {where}", name)
    for name, file in (listed or {}).items():
        if name not in tensors:
            raise BrokenCheckpoint(file, f"it is missing, but {INDEX} lists it", name)
    return tensors


def _inside(folder: pathlib.Path, name: str, remedy: str, follow_links: bool) -> pathlib.Path:
    """A file of a folder, which may not lie elsewhere."""
    if name in ("", ".", "..") or "\0" in name or pathlib.PurePath(name).name != name or "\\" in name:
        raise BrokenCheckpoint(INDEX, f"it names the file {name!r}, which would lie outside of the folder")
    path = folder / name
    if not os.path.lexists(path):
        raise BrokenCheckpoint(name, f"it is missing; {remedy}")
    if not follow_links and path.resolve().parent != folder.resolve():
        raise BrokenCheckpoint(name, f"it is a link out of the folder; {_LINKS}")
    if not path.is_file():
        raise BrokenCheckpoint(name, "it is not a file")
    return path


_LINKS = "allow that with follow_links=True (--follow-links), or copy the folder with cp -L"
