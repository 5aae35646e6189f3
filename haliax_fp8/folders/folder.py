"""Folders of safetensors: read through a memory map; written one tensor at a time, complete or absent."""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._arguments import require_bool
from .._printing.progress import Watcher, progress_of
from .checksums import FORMAT, checksum, read_index, text_checksum
from .header import Stored, read_header
from .strict_json import BrokenCheckpoint, json_file
from .unfinished import take_name, unfinished
from .writer import TensorSpec, write_tensors_of


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
        checksums: Those of the tensors by their names in files, of files that have them.
    """

    directory: pathlib.Path
    tensors: dict[str, Stored]
    config: dict[str, Any]
    follow_links: bool = False
    checksums: Mapping[str, str] = dataclasses.field(default_factory=dict)

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
        require_bool("follow_links", follow_links, "a folder")
        folder = pathlib.Path(directory)
        if not folder.is_dir():
            problem = "it is not a folder; give the one that holds config.json, on this machine"
            raise BrokenCheckpoint(os.fspath(directory), problem)
        if not os.path.lexists(folder / CONFIG) and (folder / "adapter_config.json").exists():
            problem = "it is missing, because this is an adapter and not a model; load its base, then use"
            raise BrokenCheckpoint(CONFIG, f"{problem} huggingface.import_adapter({os.fspath(directory)!r}, base)")
        config = json_file(file_inside(folder, CONFIG, "a checkpoint has it beside its tensors", follow_links))
        listed = None
        if os.path.lexists(folder / INDEX):
            listed = _weight_map(json_file(file_inside(folder, INDEX, "", follow_links)))
            remedy = f"{INDEX} names it; copy it too"
            paths = [file_inside(folder, file, remedy, follow_links) for file in dict.fromkeys(listed.values())]
        else:
            remedy = f"a checkpoint is this file, or those that {INDEX} lists; pickled weights are never read"
            paths = [file_inside(folder, SINGLE, remedy, follow_links)]
        tensors, checksums, of_index = _tensors(paths, listed)
        if listed is not None and of_index - {text_checksum((folder / INDEX).read_bytes())}:
            raise BrokenCheckpoint(INDEX, "it has changed since it was written; copy it again")
        return TensorFolder(folder, tensors, config, follow_links, checksums)

    def json_beside(self, name: str) -> dict[str, Any] | None:
        """What another file of the folder holds; None if there is none.

        Args:
            name: The file.

        Raises:
            BrokenCheckpoint: If it is a link out of the folder, or not JSON.
        """
        if not os.path.lexists(self.directory / name):
            return None
        return json_file(file_inside(self.directory, name, "", self.follow_links))

    def __getitem__(self, name: str) -> np.ndarray:
        """A tensor, mapped: its bytes are read as they are used.

        Raises:
            ValueError: If the folder has no file of that name.
        """
        if name not in self.tensors:
            raise ValueError(f"{self.directory} has no tensor {name}")
        return self.tensors[name].array()

    def has_changed(self, name: str) -> bool:
        """Whether the bytes of a tensor are not those that were written, as far as its file has checksums."""
        parts = [part for part in self.tensors[name].parts if part.name in self.checksums]
        return any(checksum(x.name, x.type, x.shape, x.words()) != self.checksums[x.name] for x in parts)


def _weight_map(index: dict[str, Any]) -> dict[str, str]:
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise BrokenCheckpoint(INDEX, "it has no weight_map from names of tensors to names of files")
    return listed


def _tensors(
    paths: list[pathlib.Path], listed: dict[str, str] | None
) -> tuple[dict[str, Stored], dict[str, str], set[str]]:
    """The tensors of the files, their checksums, and those of the file that lists them, as each file has it."""
    tensors: dict[str, Stored] = {}
    checksums: dict[str, str] = {}
    of_index: set[str] = set()
    for path in paths:
        metadata: dict[str, str] = {}
        of_file = read_header(path, metadata)
        index = read_index(path.name, metadata, of_file)
        checksums |= {name: entry["crc32"] for name, entry in index.get("leaves", {}).items()}
        of_index |= {str(index[INDEX])} if INDEX in index else set()
        for name, stored in of_file.items():
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
    return tensors, checksums, of_index


def file_inside(folder: pathlib.Path, name: str, remedy: str, follow_links: bool) -> pathlib.Path:
    """A file of a folder.

    Args:
        folder: The folder.
        name: The file.
        remedy: What to do if it is missing.
        follow_links: Whether it may be a link that leads out of the folder.

    Raises:
        BrokenCheckpoint: If it is missing, lies elsewhere, or is not a file.
    """
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


type Group = tuple[Sequence[TensorSpec], Callable[[], Sequence[np.ndarray]]]
"""Tensors that are made together, and what makes them."""


@contextlib.contextmanager
def new_folder(directory: str | os.PathLike[str], name: str = "directory") -> Iterator[pathlib.Path]:
    """A folder to write to, which takes its name when everything in it is complete.

    Until then it lies beside, under another name, which begins with a dot: see `unfinished`.

    Args:
        directory: The folder, which must not exist, or be empty.
        name: The caller's argument, for errors.

    Raises:
        ValueError: If it exists and is not empty, is a link, or cannot be made.
    """
    argument = f"{name}={os.fspath(directory)!r}"
    final = pathlib.Path(directory).absolute()
    # A complete folder could not take these names.
    if final.is_symlink():
        raise ValueError(f"{argument} is a link; give the folder that it leads to, {str(final.resolve())!r}")
    if final.name == "..":
        raise ValueError(f"{argument} ends with '..'; give the folder's own name")
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ValueError(f"{argument} exists and is not empty; remove it or choose another")
    with contextlib.ExitStack() as stack:
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            temporary = stack.enter_context(unfinished(final, is_folder=True))
        except OSError as error:
            raise ValueError(
                f"{argument} cannot be made in {str(final.parent)!r}: {error.strerror}; choose a writable folder"
            ) from error
        yield temporary
        take_name(temporary, final)


def write_tensors(folder: pathlib.Path, groups: Sequence[Group], limit: int, progress: Watcher | None = None) -> None:
    """Writes tensors into `model.safetensors`, or into numbered files with an index, whose checksum each of them has.

    Args:
        folder: Where to.
        groups: Tensors that are made together, and what makes them.
        limit: The most bytes of a file, unless a group alone has more.
        progress: Called with each tensor.
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
    total = sum(spec.bytes for specs, _ in groups for spec in specs)
    of_index: dict[str, str] = {}
    if len(files) > 1:
        where = {s.name: file for file, shard in zip(files, shards, strict=True) for i in shard for s in groups[i][0]}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        text = json.dumps(index, indent=2).encode()
        (folder / INDEX).write_bytes(text)
        of_index = {INDEX: text_checksum(text)}
    with progress_of("writing", total, progress) as advance:
        for file, shard in zip(files, shards, strict=True):
            _write(folder / file, [groups[i] for i in shard], of_index, advance)


def _numbered(i: int, n: int) -> str:
    return f"model-{i:05d}-of-{n:05d}.safetensors"


def _write(
    path: pathlib.Path, groups: Sequence[Group], of_index: Mapping[str, str], advance: Callable[[str, int], None]
) -> None:
    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for specs, make in groups:
            for spec, array in zip(specs, make(), strict=True):
                if (array.dtype, array.shape) != (spec.dtype, spec.shape):
                    raise ValueError(
                        f"{spec.name} is {array.dtype}{array.shape}, announced as {spec.dtype}{spec.shape}: report this"
                    )
                yield spec.name, array
                advance(spec.name, spec.bytes)

    with path.open("wb") as file:
        specs = (spec for specs, _ in groups for spec in specs)
        write_tensors_of(file, specs, arrays(), index=of_index, metadata=FORMAT)
