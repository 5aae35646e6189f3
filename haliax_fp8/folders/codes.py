"""What a look through the numbers of a tensor shows: in FP8 by its codes, and in high precision by its bits."""

import dataclasses

import ml_dtypes
import numpy as np

from .four_bits import E2M1
from .layout import E4M3, FLOATS


# A weight whose largest element is this, of 448, has scales 64 times too large; not one of few different magnitudes.
_UNUSED, _FEW = 448.0 / 64, 32
_UNUSED_CODE = int(np.asarray(_UNUSED, E4M3).view(np.uint8))

# The values of E2M1's codes in E4M3.
_IN_E4M3 = np.arange(16, dtype=np.uint8).view(E2M1).astype(E4M3).view(np.uint8)

# How many elements are looked at together.
_PART = 1 << 20


def looked_through(array: np.ndarray) -> tuple[int, bool]:
    """The number of infinities and NaNs, and whether all is zero; by the bits, some megabytes at a time."""
    if array.dtype not in (E4M3, *FLOATS, np.float64):
        return 0, False
    info, words = ml_dtypes.finfo(array.dtype), np.dtype(f"u{array.dtype.itemsize}")
    # All bits of the exponent; E4M3 has numbers there too, and NaN alone has all bits.
    mask = words.type(0x7F if array.dtype == E4M3 else ((1 << info.nexp) - 1) << info.nmant)
    magnitude = words.type((1 << (8 * words.itemsize - 1)) - 1)
    flat, count, is_zero = array.reshape(-1), 0, array.size > 0
    for start in range(0, flat.size, _PART):
        part = flat[start : start + _PART].view(words)
        count += int(((part & mask) == mask).sum())
        is_zero = is_zero and not (part & magnitude).any()
    return count, is_zero


@dataclasses.dataclass(frozen=True)
class Codes:
    """What one pass over E4M3 data shows, or over E2M1's values in E4M3.

    Args:
        amaxes: The largest magnitude of each block; of experts, one after the other.
        size: How many elements there are.
        limits: How many are 448, -448 or NaN.
        zeros: How many are 0 or -0.
        has_negative_zeros: Whether one is -0.
        counts: How many have each magnitude, by its code; not known of data without NaN whose magnitudes look sound.
    """

    amaxes: np.ndarray
    size: int = 0
    limits: int = 0
    zeros: int = 0
    has_negative_zeros: bool = False
    counts: np.ndarray | None = None

    @property
    def nan(self) -> int:
        """How many are NaN."""
        return 0 if self.counts is None else int(self.counts[0x7F])

    @property
    def is_clipped(self) -> bool:
        """Whether larger weights were clipped: 448 stands out.

        Each block reaches it, a few times at most. Otherwise only clipped weights have it more often than 416, to which
        a wider range is rounded; or weights of few values, such as -1, 0 and 1.
        """
        more = self.limits - 2 * self.amaxes.size
        return self._has_many_magnitudes and more > 0.01 * self.size and more > self._count(0x7D)

    @property
    def is_unused(self) -> bool:
        """Whether none is near 448, and they are not a few values either, such as ones."""
        return self._has_many_magnitudes and bool(self.amaxes.max() <= _UNUSED)

    @property
    def _has_many_magnitudes(self) -> bool:
        return self.counts is not None and int(np.count_nonzero(self.counts)) > _FEW

    def _count(self, code: int) -> int:
        return 0 if self.counts is None else int(self.counts[code])


def count_codes(data: np.ndarray, block: tuple[int, int]) -> Codes:
    """Looks through data in E4M3 or E2M1, `[out, in]` or `[experts, out, in]`, some megabytes at a time.

    Args:
        data: The data.
        block: The rows and columns of which the largest magnitudes are wanted.
    """
    if data.size == 0:
        return Codes(np.zeros((0, 0), np.float32))
    height, width = (min(size, b) for size, b in zip(data.shape[-2:], block, strict=True))
    columns, of_matrices, limits, nonzero, has_negative_zeros = np.arange(0, data.shape[-1], width), [], 0, 0, False
    step = max(1, _PART // data.shape[-1])
    matrices = data.view(np.uint8).reshape(-1, *data.shape[-2:])
    as_e4m3 = lambda part: _IN_E4M3[part] if data.dtype == E2M1 else part
    for matrix in matrices:
        of_rows = []
        for start in range(0, matrix.shape[0], step):
            part = as_e4m3(matrix[start : start + step])
            # Without its sign, a larger byte is a larger magnitude.
            bits = part & 0x7F
            of_rows.append(np.maximum.reduceat(bits, columns, axis=1))
            limits += int(np.count_nonzero(bits >= 0x7E))
            nonzero += (count := int(np.count_nonzero(bits)))
            if not has_negative_zeros and count < bits.size:
                has_negative_zeros = bool((part == 0x80).any())
        rows = np.concatenate(of_rows)
        of_matrices.append(np.maximum.reduceat(rows, np.arange(0, rows.shape[0], height), axis=0))
    amaxes, counts = np.concatenate(of_matrices), None
    if amaxes.max() == 0x7F or limits > 0.01 * data.size or amaxes.max() <= _UNUSED_CODE:
        counts = np.zeros(256, np.int64)
        for matrix in matrices:
            for start in range(0, matrix.shape[0], step):
                counts += np.bincount(as_e4m3(matrix[start : start + step]).reshape(-1), minlength=256)
        counts = counts[:128] + counts[128:]
    amaxes = amaxes.view(E4M3).astype(np.float32)
    return Codes(amaxes, data.size, limits, data.size - nonzero, has_negative_zeros, counts)
