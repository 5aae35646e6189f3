"""The writer of safetensors files: of folders for engines, and of one's own runs."""

import dataclasses
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import numpy as np

from .checksums import checksum, index_metadata, to_json
from .header import NAMES


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


def write_tensors_of(
    file: BinaryIO,
    specs: Iterable[TensorSpec],
    arrays: Iterable[tuple[str, Any]],
    *,
    index: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes tensors with their checksums, one at a time.

    A tensor in a dtype that safetensors lacks is bytes, on one more axis; the index names its dtype.

    Args:
        file: The file, open at its beginning.
        specs: The tensors.
        arrays: Their names and values, in any order.
        index: What is recorded beside the checksums, and covered by that of the header.
        metadata: What the metadata of the file have besides.
    """
    header: dict[str, Any] = {}
    leaves: dict[str, dict[str, str]] = {}
    offset = 0
    # The widest elements first: so each tensor begins at a multiple of its element, without which PyTorch fails.
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        dtype, shape, leaves[spec.name] = spec.dtype, spec.shape, {"crc32": "0" * 8}
        if dtype not in NAMES:
            leaves[spec.name]["dtype"], dtype, shape = dtype.name, np.dtype(np.uint8), (*shape, dtype.itemsize)
        header[spec.name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": (offset, offset + spec.bytes)}
        offset += spec.bytes
    described = {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}

    def text() -> bytes:
        of_file = {**(metadata or {}), **index_metadata({"leaves": leaves, **(index or {})}, described)}
        content = to_json({"__metadata__": of_file, **header}).encode()
        return content + b" " * (-len(content) % 8)

    file.write(struct.pack("<Q", len(text())) + text())
    begin = file.tell()
    for name, array in arrays:
        words = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        leaves[name]["crc32"] = checksum(name, *described[name], words)
        file.seek(begin + header[name]["data_offsets"][0])
        file.write(words)
    # Checksums are as long as the zeros that stood for them.
    file.seek(8)
    file.write(text())
