"""Safetensors files, read one tensor at a time."""

import pathlib

import jax
import numpy as np

from ..files import BrokenCheckpoint
from ..files.header import read_header
from .checkpoint import HostArrays


def open_safetensors(path: pathlib.Path) -> HostArrays:
    """The tensors of a file.

    Raises:
        ValueError: If the file is damaged.
    """
    try:
        # Not with safetensors' own reader, which has no FP8 for NumPy.
        tensors = read_header(path)
    except BrokenCheckpoint as error:
        raise ValueError(f"path={str(path)!r} cannot be read: {error}") from error
    # Mapped as long as the checkpoint is open: the file may be replaced meanwhile.
    content = np.memmap(path, np.uint8, "r")

    def array(name: str) -> np.ndarray:
        stored = tensors[name]
        stored.require_known()
        # A copy, as the bytes may not be aligned.
        words = np.array(content[stored.offset : stored.offset + stored.bytes])
        return words.view(stored.dtype).reshape(stored.shape)

    return HostArrays({name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in tensors.items()}, array)
