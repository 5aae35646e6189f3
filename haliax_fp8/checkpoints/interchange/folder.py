"""Which folder of Orbax a folder is or holds; and what to give instead where it is none."""

import os
import pathlib


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
