"""Checksums of the leaves of a file, because weights with a wrong byte look like weights."""

import zlib
from typing import Any, BinaryIO

import equinox as eqx
import numpy as np

from .array_headers import E5M2


class Summed:
    """What is written to a file, with a CRC-32 for each leaf: of its name, its dtype and its bytes with their header.

    It is computed as the bytes go by, so that nothing is read again.
    """

    def __init__(self, file: BinaryIO):
        """Nothing is written yet.

        Args:
            file: Where to.
        """
        self._file, self._sum = file, 0

    def write(self, data: Any) -> int:
        """Writes bytes of the leaf that is being written."""
        self._sum = zlib.crc32(data, self._sum)
        return self._file.write(data)

    def leaf(self, name: str, dtype: str, value: Any) -> int:
        """Writes a leaf as Equinox does, and returns its sum.

        Args:
            name: Its name.
            dtype: The name of its dtype.
            value: Its numbers.
        """
        self._sum = start(name, dtype)
        if dtype == E5M2.name:
            # By its own name in NumPy's files, which NumPy cannot read; the other formats of 8 bits are bytes there.
            value = np.asarray(value).view("V1")
        eqx.default_serialise_filter_spec(self, value)
        return self._sum


def start(name: str, dtype: str) -> int:
    """The sum before the first byte of a leaf."""
    return zlib.crc32(f"{name} {dtype}".encode())


def summed(raw: np.ndarray, name: str, dtype: str) -> int:
    """The sum of a leaf in a file.

    Args:
        raw: Its bytes, with their header.
        name: Its name.
        dtype: The name of its dtype.
    """
    return zlib.crc32(raw, start(name, dtype))
