"""Headers of the arrays in a file of Equinox: NumPy's, one array after the other."""

import io
import pathlib
import tokenize
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np


E5M2 = np.dtype(ml_dtypes.float8_e5m2)

# What NumPy calls E5M2 in a header, and cannot read again; and what it calls the other formats of ml_dtypes, bytes.
_UNREADABLE, _BYTES = b"'<f1'", b"'|V1'"

# Longer than the header of any array with so few axes as NumPy allows.
_LONGEST = 1 << 12


class Header(NamedTuple):
    """Where an array is in a file.

    Args:
        shape: Its shape.
        in_columns: Whether columns come first.
        start: Where it begins, with its header.
        numbers: Where its numbers begin.
        end: Where they end.
    """

    shape: tuple[int, ...]
    in_columns: bool
    start: int
    numbers: int
    end: int


def headers(file: BinaryIO, size: int, names: list[tuple[str, Any]], path: pathlib.Path) -> Iterator[Header]:
    """One array after the other.

    Args:
        file: The file, at its first array.
        size: Its size.
        names: The name and the dtype of each array.
        path: The file's path, for errors.

    Raises:
        ValueError: If it is cut off, or holds something else; names the array.
    """
    for name, dtype in names:
        start, dtype = file.tell(), np.dtype(dtype)
        try:
            shape, in_columns, stored = _parsed(file, dtype)
        except (ValueError, OSError, SyntaxError, tokenize.TokenError) as error:  # NumPy reads the header as Python.
            raise ValueError(f"{path} ends, or is not Equinox's, where {name} should begin: {error}") from error
        numbers = file.tell()
        end = numbers + int(np.prod(shape, dtype=np.int64)) * stored.itemsize
        # NumPy knows the formats of ml_dtypes as bytes alone, V; in another order of bytes, numbers are others.
        is_other = stored.itemsize != dtype.itemsize or (stored.kind != "V" and stored != dtype)
        if stored.hasobject or end > size or is_other:
            what = "is cut off" if end > size else f"holds {stored} where made_from has {dtype.name}"
            raise ValueError(f"{path} {what}, in {name}")
        file.seek(end)
        yield Header(shape, in_columns, start, numbers, end)


def _parsed(file: BinaryIO, dtype: np.dtype) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and dtype of the array that begins here; the file is at its numbers then."""
    start, source = file.tell(), file
    if dtype == E5M2:
        # Both names are as long, so the header stays as long as it says.
        source = io.BytesIO(file.read(_LONGEST).replace(_UNREADABLE, _BYTES, 1))
    version = np.lib.format.read_magic(source)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    found = read(source)
    if source is not file:
        file.seek(start + source.tell())
    return found
