"""Values of tensors, looked at through their bits, a part at a time."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np


E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
BF16 = np.dtype(ml_dtypes.bfloat16)

# How many elements are looked at together.
_PART = 1 << 20

# All bits of the exponent, by the size of an element.
_EXPONENTS = {
    BF16: np.uint16(0x7F80),
    np.dtype(np.float16): np.uint16(0x7C00),
    np.dtype(np.float32): np.uint32(0x7F800000),
}


def parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """An array in parts of a few megabytes, along its first axis; each is read when it comes."""
    if array.ndim == 0:
        yield array.reshape(1)
        return
    rows = max(1, _PART // max(1, array[:1].size))
    for start in range(0, array.shape[0], rows):
        yield array[start : start + rows]


def not_finite(array: np.ndarray) -> int:
    """The number of infinities and NaNs.

    Args:
        array: An array of floating point; whole numbers have none.
    """
    if array.dtype == E4M3:
        return sum(int(((part.view(np.uint8) & 0x7F) == 0x7F).sum()) for part in parts(array))
    exponents = _EXPONENTS.get(array.dtype)
    if exponents is not None:
        return sum(int(((part.view(exponents.dtype) & exponents) == exponents).sum()) for part in parts(array))
    if array.dtype == np.float64:
        return sum(int((~np.isfinite(part)).sum()) for part in parts(array))
    return 0


def amaxes(data: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The largest magnitudes of the blocks of E4M3 data, in float32.

    Args:
        data: `[out, in]`.
        block: The rows and columns of a block.
    """
    height, width = block
    columns = np.arange(0, data.shape[1], width)
    step = max(1, _PART // max(1, height * data.shape[1])) * height
    found = []
    for start in range(0, data.shape[0], step):
        # Without its sign, a larger byte is a larger magnitude.
        bits = np.maximum.reduceat(data[start : start + step].view(np.uint8) & 0x7F, columns, axis=1)
        found.append(np.maximum.reduceat(bits, np.arange(0, bits.shape[0], height), axis=0))
    return np.concatenate(found).view(E4M3).astype(np.float32)
