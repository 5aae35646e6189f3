"""Checksums of the leaves of a file, because weights with a wrong byte look like weights."""

import zlib
from typing import Any, BinaryIO

import equinox as eqx
import numpy as np


class Summed:
    """What is written to a file, with a CRC-32 for each leaf: of its name, its dtype and its bytes with their header.

    It is computed as the bytes go by, so that nothing is read again.
    """

    def __init__(self, file: BinaryIO, names: list[tuple[str, str]]):
        """Nothing is written yet.

        Args:
            file: Where to.
            names: The names and dtypes of the leaves that will be written, in their order.
        """
        self._file, self._names, self._sum = file, names, 0
        self.sums: list[int] = []

    def write(self, data: Any) -> int:
        """Writes bytes of the leaf that is being written."""
        self._sum = zlib.crc32(data, self._sum)
        return self._file.write(data)

    def leaf(self, _: Any, value: Any) -> None:
        """Writes a leaf as Equinox does; replaces `eqx.default_serialise_filter_spec`."""
        if not eqx.is_array_like(value):
            return
        self._sum = start(*self._names[len(self.sums)])
        eqx.default_serialise_filter_spec(self, value)
        self.sums.append(self._sum)


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
