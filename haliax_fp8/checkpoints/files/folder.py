"""TensorFolder: the tensors of a folder, of one file or of several with an index, read through a memory map."""

import dataclasses
import json
import math
import os
import pathlib
import struct
from typing import Any

import numpy as np

from .types import DTYPES


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# What the format's own parser accepts at most.
_LONGEST_HEADER = 100_000_000


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor is.

    Args:
        file: Its file.
        dtype: Its dtype.
        shape: Its shape.
        offset: Its first byte in the file.
    """

    file: pathlib.Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


@dataclasses.dataclass(frozen=True)
class TensorFolder:
    """The tensors of a folder and its configuration.

    Args:
        directory: The folder.
        tensors: Where each tensor is, by name.
        config: What `config.json` holds.
    """

    directory: pathlib.Path
    tensors: dict[str, Stored]
    config: dict[str, Any]

    @staticmethod
    def open(directory: str | os.PathLike[str]) -> "TensorFolder":
        """Reads the headers of a folder's files; no tensor yet.

        Args:
            directory: The folder.

        Raises:
            ValueError: If a file is missing, lies outside of the folder, or is not what the format says; the message
                names the file, and the tensor if it is one.
        """
        folder = pathlib.Path(directory)
        config = _json_object(folder / "config.json")
        if (folder / INDEX).exists():
            listed = _json_object(folder / INDEX).get("weight_map")
            if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
                raise ValueError(f"{folder / INDEX} has no weight_map from tensors to files")
            files = {name: _inside(folder, name) for name in dict.fromkeys(listed.values())}
        else:
            listed, files = None, {SINGLE: _inside(folder, SINGLE)}
        tensors: dict[str, Stored] = {}
        for name, path in files.items():
            for tensor, stored in _header(path).items():
                if tensor in tensors:
                    raise ValueError(f"{tensor} is in {tensors[tensor].file.name} and in {name}; it has to be in one")
                if listed is not None and listed.get(tensor) != name:
                    raise ValueError(f"{tensor} is in {name}, and {INDEX} says {listed.get(tensor)}")
                tensors[tensor] = stored
        if missing := [tensor for tensor in listed or () if tensor not in tensors]:
            raise ValueError(f"{missing[0]} is not in {(listed or {})[missing[0]]}, where {INDEX} says it is")
        return TensorFolder(folder, tensors, config)

    def __getitem__(self, name: str) -> np.ndarray:
        """A tensor, mapped: its bytes are read as they are used."""
        stored = self.tensors[name]
        count = math.prod(stored.shape)
        if count == 0:
            return np.zeros(stored.shape, stored.dtype)
        size = count * stored.dtype.itemsize
        words = np.memmap(stored.file, np.uint8, "r", offset=stored.offset, shape=(size,))
        if stored.offset % stored.dtype.itemsize:
            words = np.array(words)  # not aligned: a view would not be allowed
        return np.asarray(words).view(stored.dtype).reshape(stored.shape)


def _header(path: pathlib.Path) -> dict[str, Stored]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError(f"{path} is truncated: it has {size} bytes, fewer than the length of its header takes")
        (length,) = struct.unpack("<Q", start)
        if length > min(_LONGEST_HEADER, size - 8):
            raise ValueError(f"{path} is truncated or no safetensors file: its header would have {length} bytes")
        text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a header that is not JSON as the format has it: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} has a header that is no JSON object")
    found, spans = {}, []
    for name, entry in header.items():
        if name != "__metadata__":
            found[name] = stored = _entry(path, name, entry, 8 + length)
            spans.append((stored.offset, stored.offset + math.prod(stored.shape) * stored.dtype.itemsize, name))
    end = 8 + length
    for first, last, name in sorted(spans):
        if first != end:
            raise ValueError(f"{path} has a gap or an overlap before the bytes of {name}")
        end = last
    if end != size:
        raise ValueError(f"{path} has {size} bytes, and its tensors end at {end}: it is truncated, or goes on")
    return found


def _entry(path: pathlib.Path, name: str, entry: Any, base: int) -> Stored:
    wrong = ValueError(f"{path} describes {name} as {entry!r:.200}, which is not a tensor of the format")
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        raise wrong
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{path} has {name} in {entry['dtype']!r:.80}, which is none of {', '.join(DTYPES)}")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise wrong
    assert isinstance(shape, list) and isinstance(offsets, list)
    dtype = DTYPES[entry["dtype"]]
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{path} has {name} of shape {shape} in {entry['dtype']} at bytes {offsets}, which do not fit")
    return Stored(path, dtype, tuple(shape), base + offsets[0])


def _inside(folder: pathlib.Path, name: str) -> pathlib.Path:
    path = folder / name
    if pathlib.PurePath(name).name != name or (path.exists() and path.resolve().parent != folder.resolve()):
        raise ValueError(f"{folder} names the file {name!r}, which does not lie in it")
    if not path.is_file():
        raise ValueError(f"{folder} has no file {name}; a checkpoint is {SINGLE}, or files that {INDEX} lists")
    return path


def _json_object(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; a checkpoint has it beside its tensors") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, but must be a JSON object")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name is there twice")
    return dict(pairs)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
