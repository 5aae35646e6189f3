"""Atomic checkpoints: arrays in one file, progress as JSON next to it."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from haliax_fp8.checkpoints import load_into, save as save_tree

from .options import flag_name


_PROGRESS = "checkpoint.json"


def save(
    folder: pathlib.Path,
    step: int,
    state: Any,
    flags: Mapping[str, Any],
    history: Mapping[str, Any],
    text: str | None = None,
) -> None:
    """Writes a checkpoint; if interrupted, the previous one remains.

    Each step's arrays have their own file name, and both files are first written under another name. The new checkpoint
    takes effect when the JSON file, which says which arrays are current, is renamed.

    Args:
        folder: The folder to write to; created if missing.
        step: Completed steps.
        state: Models and optimizer states, any pytree of arrays.
        flags: Flags that a continued run must share.
        history: Losses so far.
        text: The file that is trained on; None for the default.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays = folder / f"step_{step:06d}.safetensors"
    save_tree(arrays, state)
    progress = {"step": step, "arrays": arrays.name, "flags": dict(flags), "history": dict(history), "text": text}
    temporary = folder / (_PROGRESS + ".tmp")
    with temporary.open("w") as file:
        file.write(json.dumps(progress))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / _PROGRESS)
    for old in folder.glob("step_*.safetensors"):
        if old != arrays:
            old.unlink()


def read_progress(folder: pathlib.Path) -> dict[str, Any] | None:
    """The JSON part of the checkpoint in a folder; None if there is none."""
    try:
        return json.loads((folder / _PROGRESS).read_text())
    except FileNotFoundError:
        return None


def stored_flags(progress: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of the run that wrote a checkpoint, which a resumed run takes where it is given no others.

    Args:
        progress: What `read_progress` returned.
    """
    # Of the text the flags have a hash.
    return {**progress["flags"], "data": progress.get("text")}


def check_flags(saved: Mapping[str, Any], now: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Compares the flags of a checkpoint with those given now.

    Raises:
        ValueError: If they differ; the message names each flag with both values.
    """
    differences = [
        f"{flag_name(name)} is {now.get(name)!r} now and {saved.get(name)!r} in the checkpoint"
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    ]
    if differences:
        raise ValueError(
            f"--resume: {'; '.join(differences)}. Repeat the flags of the run in {folder}, "
            "or start a new run in another --out"
        )


def load_state(folder: pathlib.Path, progress: Mapping[str, Any], like: Any) -> Any:
    """The arrays of a checkpoint.

    Args:
        folder: Where the checkpoint is.
        progress: What `read_progress` returned.
        like: A tree with the saved structure, shapes and dtypes; its arrays may be on other devices.
    """
    return load_into(like, folder / progress["arrays"], strict=True)[0]
