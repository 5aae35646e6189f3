"""Safetensors files: which tensors one holds, and their bytes through a memory map."""

import dataclasses
import math
import os
import pathlib
import struct
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from .strict_json import BrokenCheckpoint, json_object, open_regular


DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "C64": np.dtype(np.complex64),
}
"""By the names in files."""

UNKNOWN = np.dtype("V1")
"""Stands for any type that is not in `DTYPES`."""

NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""By NumPy's types."""


# What the format's own parser accepts at most.
_LONGEST_HEADER = 100_000_000

# One more of the widest type, and an array would have 2**63 bytes, which NumPy cannot count.
_MOST_ELEMENTS = 2**60 - 1


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor is.

    Args:
        file: Its file.
        name: Its name.
        type: What the file calls its dtype.
        shape: Its shape.
        offset: Its first byte in the file.
        bytes: Its size in the file.
        dtype: Its dtype; `UNKNOWN` if its type is not known.
        is_known: Whether its type is known; if not, it cannot be read.
        shown: The name of its dtype, or of its type, for messages.
    """

    file: pathlib.Path
    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    dtype: np.dtype
    is_known: bool
    shown: str

    @property
    def unreadable(self) -> str | None:
        """Why it cannot be read; None if it can."""
        if self.is_known:
            return None
        return (
            f"its dtype {self.type!r} is unknown; the known ones are {', '.join(DTYPES)}. Convert it to one of "
            "these with the library that wrote the file"
        )

    @property
    def parts(self) -> tuple["Stored", ...]:
        """The tensors of files that it is made of: itself, unless a subclass says otherwise."""
        return (self,)

    def require_known(self) -> None:
        """Raises a BrokenCheckpoint if its type is not known."""
        if (problem := self.unreadable) is not None:
            raise BrokenCheckpoint(self.file.name, problem, self.name)

    def words(self) -> np.ndarray:
        """Its bytes, mapped and read-only."""
        if self.bytes == 0:
            words = np.zeros(0, np.uint8)
            words.flags.writeable = False
            return words
        return np.memmap(self.file, np.uint8, "r", offset=self.offset, shape=(self.bytes,))

    def array(self, index: tuple[int, ...] = ()) -> np.ndarray:
        """Its values, mapped and read-only: bytes are read as they are used.

        Args:
            index: Which part, along the first axes; all by default.

        Raises:
            BrokenCheckpoint: If its type is not known.
        """
        self.require_known()
        words = self.words()
        if self.offset % self.dtype.itemsize:
            words = np.array(words)  # not aligned: a view would not be allowed
            words.flags.writeable = False
        array = np.asarray(words).view(self.dtype).reshape(self.shape)
        return array[index] if index else array


def read_header(path: pathlib.Path, described: dict[str, str] | None = None) -> dict[str, Stored]:
    """The tensors of a file by their names; none is read.

    The bytes of the tensors have to fill the file: without gap or overlap, and to its end.

    Args:
        path: The file.
        described: Gets what the file says of itself, its `__metadata__`.

    Raises:
        BrokenCheckpoint: If the file is not what the format says; names the tensor, if it is one.
    """
    with open_regular(path) as content:
        return header_in(content, path, described)


def header_in(content: BinaryIO, path: pathlib.Path, described: dict[str, str] | None = None) -> dict[str, Stored]:
    """As `read_header`, of a file that is open at its beginning.

    Args:
        content: The file.
        path: Where it lies.
        described: As in `read_header`.

    Raises:
        BrokenCheckpoint: As `read_header` does.
    """
    file = path.name
    try:
        size = os.fstat(content.fileno()).st_size
        start = content.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if len(start) < 8:
            raise BrokenCheckpoint(file, f"it is truncated: {size} bytes hold no header; copy it again")
        if length > min(_LONGEST_HEADER, size - 8):
            problem = f"it is truncated, or not a safetensors file: its header would have {length} bytes of {size}"
            raise BrokenCheckpoint(file, problem)
        text = content.read(length)
    except OSError as error:
        raise BrokenCheckpoint(file, f"it cannot be read: {error.strerror}") from None
    header = json_object(text, file, what="header", constants=False)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BrokenCheckpoint(file, "its __metadata__ is not an object of strings", "__metadata__")
    if described is not None:
        described |= metadata
    tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if stored.offset != end:
            kind = "overlap the tensor" if stored.offset < end else "leave a gap after the tensor"
            raise BrokenCheckpoint(file, f"its bytes {kind} before it; the file is damaged", name)
        end += stored.bytes
    if end != size:
        problem = f"it is truncated: {size} bytes, of {end}" if end > size else f"{size - end} bytes follow its tensors"
        raise BrokenCheckpoint(file, f"{problem}; copy it again", _last(tensors) if end > size else "")
    return tensors


def _last(tensors: dict[str, Stored]) -> str:
    return max(tensors, key=lambda name: tensors[name].offset, default="")


def _stored(path: pathlib.Path, name: str, entry: Any, base: int) -> Stored:
    def wrong(problem: str) -> BrokenCheckpoint:
        return BrokenCheckpoint(path.name, problem, printable)

    printable = name.encode("utf-8", "backslashreplace").decode()
    if printable != name:
        raise wrong("its name is not Unicode")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise wrong("the header does not give its dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or not kind.isprintable() or len(kind) > 40:
        raise wrong(f"its dtype {kind!r:.40} is not the name of a dtype")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise wrong(f"its {what} {numbers!r:.60} is not a list of whole numbers from 0 to 2**63 - 1")
    if len(shape) > 32:  # NumPy's arrays have 64 axes at most, tensors of models four
        raise wrong(f"its shape has {len(shape)} axes; at most 32 are supported")
    if math.prod(n for n in shape if n) > _MOST_ELEMENTS:  # NumPy counts so in arrays without elements, too
        raise wrong(f"its shape {shape!s:.60} is too large for an array")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"its data_offsets {offsets} are not its start and end")
    size = offsets[1] - offsets[0]
    is_known, dtype = kind in DTYPES, DTYPES.get(kind, UNKNOWN)
    if is_known and size != (taken := math.prod(shape) * dtype.itemsize):
        raise wrong(f"its shape {shape} in {kind} takes {taken} bytes, but its offsets are {offsets}")
    shown = dtype.name if is_known else kind
    return Stored(path, name, kind, tuple(shape), base + offsets[0], size, dtype, is_known, shown)
