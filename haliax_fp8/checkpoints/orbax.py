"""Orbax's checkpoints: which folder holds one, and its arrays, restored onto their shardings."""

import importlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..layers.walk import path_string
from .checkpoint import AbstractCheckpoint, Entries
from .names import require_one_each


METADATA = "_METADATA"
"""What Orbax writes into the folder of a tree."""


def tree_in(path: pathlib.Path) -> pathlib.Path:
    """The folder of the tree that Orbax wrote: this one, or the only one in a step.

    Args:
        path: A folder.

    Raises:
        ValueError: If it is neither; names what it holds, as it was given.
    """
    if _is_tree(path):
        return path
    shown, inside = f"path={os.fspath(path)!r}", sorted(path.iterdir())
    trees = [child for child in inside if _is_tree(child)]
    if len(trees) == 1:
        return trees[0]
    if trees:
        raise ValueError(f"{shown} holds several checkpoints of Orbax, {_names(trees)}; name one, {_such_as(trees[0])}")
    steps = [
        child for child in inside if child.is_dir() and (child.name.isdigit() or any(map(_is_tree, child.iterdir())))
    ]
    if steps:
        newest = max(steps, key=lambda step: (len(step.name), step.name))
        raise ValueError(f"{shown} holds a folder for each step, {_names(steps)}; name one, {_such_as(newest)}")
    if files := [child for child in inside if child.suffix in (".eqx", ".safetensors")]:
        whole = f", or import_model({os.fspath(path)!r}, model), which reads config.json and all files beside it"
        more = whole if (path / "config.json").exists() else ""
        raise ValueError(f"{shown} is a folder that Orbax did not write; name a file in it, {_such_as(files[0])}{more}")
    if above := next((parent for parent in path.absolute().parents[:2] if _is_tree(parent)), None):
        raise ValueError(f"{shown} is a part of Orbax's checkpoint {os.fspath(above)!r}; give that folder")
    raise ValueError(
        f"{shown} is a folder without a checkpoint: Orbax ends a save with the file {METADATA}, but this one holds "
        f"{_names(inside) or 'nothing'}. Give the folder of another step"
    )


def _is_tree(path: pathlib.Path) -> bool:
    return (path / METADATA).exists()


def _names(paths: list[pathlib.Path]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(path.name for path in paths[:3]) + more


def _such_as(path: pathlib.Path) -> str:
    return f"such as {os.fspath(path)!r}"


class OrbaxFolder(AbstractCheckpoint):
    """What `StandardCheckpointer`, or a `CheckpointManager` with one item, wrote in a step."""

    def __init__(self, path: pathlib.Path):
        """Reads shapes and dtypes.

        Args:
            path: The folder of a step, or of the tree in it.

        Raises:
            ValueError: If it is not such a folder or is damaged, or Orbax is not installed.
        """
        self._path = tree_in(path).absolute()
        self._orbax = _orbax()
        self._tree, why = self._described()
        if self._tree is None:
            raise ValueError(
                f"path={str(path)!r} is damaged: Orbax cannot read its {METADATA}{why}; copy it again, or load another "
                "step"
            )
        flat = jax.tree_util.tree_flatten_with_path(self._tree)[0]
        paths = {path_string(path) for path, _ in flat}
        self._names = [_name(path, paths) for path, _ in flat]
        require_one_each(self._names, f"path={str(path)!r}")
        self._entries = {
            name: jax.ShapeDtypeStruct(tuple(getattr(leaf, "shape", ())), _dtype(leaf))
            for name, (_, leaf) in zip(self._names, flat, strict=True)
        }

    @property
    def entries(self) -> Entries:
        """What the folder holds, by name."""
        return self._entries

    def read(self, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        """All at once: Orbax reads several arrays at a time, and each device its own part."""
        arrays, ocp = [], self._orbax
        arguments, structure = [], jax.tree.structure(self._tree)
        for name in self._names:
            entry = self._entries[name]
            sharding = wanted.get(name)
            arrays.append(ocp.PLACEHOLDER if name not in wanted else entry)
            on_host = ocp.RestoreArgs(restore_type=np.ndarray)
            arguments.append(on_host if sharding is None else ocp.ArrayRestoreArgs(sharding=sharding))
        item, restore_args = (jax.tree.unflatten(structure, leaves) for leaves in (arrays, arguments))
        with self._checkpointer() as checkpointer:
            restored = checkpointer.restore(self._path, ocp.args.PyTreeRestore(item=item, restore_args=restore_args))
        flat = structure.flatten_up_to(restored)
        return {name: array for name, array in zip(self._names, flat, strict=True) if name in wanted}

    def _described(self) -> tuple[Any, str]:
        """The tree with a description of each array, None if Orbax cannot read it; and why not, if it says so."""
        try:
            metadata = self._checkpointer().metadata(self._path)
        except (ValueError, KeyError, TypeError) as error:
            return None, f" ({error!r})"
        # Since 0.11 in a description of the step.
        metadata = getattr(metadata, "item_metadata", metadata)
        return getattr(metadata, "tree", metadata), ""

    def _checkpointer(self) -> Any:
        return self._orbax.Checkpointer(self._orbax.PyTreeCheckpointHandler())


def _name(path: tuple[Any, ...], others: set[str]) -> str:
    """The name in `names.leaves_of`: Orbax takes the array inside a named array for a list with one array."""
    name = path_string(path)
    whole, _, last = name.rpartition(".")
    return whole if last == "0" and whole and f"{whole}.1" not in others else name


def _dtype(leaf: Any) -> Any:
    dtype = getattr(leaf, "dtype", None)
    return np.dtype(np.float32) if dtype is None else dtype


def _orbax() -> Any:
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise ValueError("path is a folder of Orbax, which is not installed: pip install orbax-checkpoint") from error
