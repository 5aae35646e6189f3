"""Writes folders of safetensors, one tensor at a time."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .folder import INDEX, SINGLE
from .types import NAMES


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor before it exists.

    Args:
        name: Its name.
        dtype: Its dtype.
        shape: Its shape.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


@contextlib.contextmanager
def new_folder(directory: str | os.PathLike[str], name: str = "directory") -> Iterator[pathlib.Path]:
    """A folder to write to, which takes its name when everything in it is complete.

    Until then it lies beside, under another name, which begins with a dot; an error removes it.

    Args:
        directory: The folder, which must not exist, or be empty.
        name: The caller's argument, for errors.

    Raises:
        ValueError: If it exists and is not empty, is a link, or cannot be made.
    """
    given = f"{name}={os.fspath(directory)!r}"
    final = pathlib.Path(directory).absolute()
    # A complete folder could not take these names.
    if final.is_symlink():
        raise ValueError(f"{given} is a link; give the folder that it leads to, {str(final.resolve())!r}")
    if final.name == "..":
        raise ValueError(f"{given} ends with '..'; give the folder's own name")
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ValueError(f"{given} exists and is not empty; remove it or choose another")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = pathlib.Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    except OSError as error:
        raise ValueError(
            f"{given} cannot be made in {str(final.parent)!r}: {error.strerror}; choose a writable folder"
        ) from error
    try:
        yield temporary
        temporary.chmod(0o755)
        for path in (*temporary.iterdir(), temporary):
            _to_disk(path)
        temporary.replace(final)
        _to_disk(final.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _to_disk(path: pathlib.Path) -> None:
    """Waits until a file, or the names in a folder, would survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(
    folder: pathlib.Path, groups: Sequence[tuple[Sequence[TensorSpec], Callable[[], Sequence[np.ndarray]]]], limit: int
) -> None:
    """Writes tensors into `model.safetensors`, or into numbered files with an index.

    Args:
        folder: Where to.
        groups: Tensors that are made together, and what makes them.
        limit: The most bytes of a file, unless a group alone has more.
    """
    shards: list[list[int]] = [[]]
    size = 0
    for i, (specs, _) in enumerate(groups):
        more = sum(spec.bytes for spec in specs)
        if shards[-1] and size + more > limit:
            shards.append([])
            size = 0
        shards[-1].append(i)
        size += more
    files = [SINGLE] if len(shards) == 1 else [_numbered(i, len(shards)) for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        _write(folder / file, [groups[i] for i in shard])
    if len(files) > 1:
        where = {s.name: file for file, shard in zip(files, shards, strict=True) for i in shard for s in groups[i][0]}
        total = sum(spec.bytes for specs, _ in groups for spec in specs)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _numbered(i: int, n: int) -> str:
    return f"model-{i:05d}-of-{n:05d}.safetensors"


def _write(
    path: pathlib.Path, groups: Sequence[tuple[Sequence[TensorSpec], Callable[[], Sequence[np.ndarray]]]]
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, offset = {}, 0
    # The widest elements first: so each tensor begins at a multiple of its element, without which PyTorch fails.
    for spec in sorted((spec for specs, _ in groups for spec in specs), key=lambda spec: -spec.dtype.itemsize):
        entry = {"dtype": NAMES[spec.dtype], "shape": spec.shape, "data_offsets": (offset, offset + spec.bytes)}
        header[spec.name], offsets[spec.name] = entry, offset
        offset += spec.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        begin = file.tell()
        for specs, make in groups:
            for spec, array in zip(specs, make(), strict=True):
                if (array.dtype, array.shape) != (spec.dtype, spec.shape):
                    raise ValueError(
                        f"{spec.name} is {array.dtype}{array.shape}, announced as {spec.dtype}{spec.shape}: report this"
                    )
                file.seek(begin + offsets[spec.name])
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
