"""One kernel in FP8, computed in NumPy: the numbers of the products, without a compiled program for each shape.

Everything is computed for some rows at a time, so that nothing of a kernel's size is in memory but its FP8 data.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32

from ..formats import E2M1, E4M3, LARGEST_MULTIPLIER, Format


BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class Unit:
    """The scale of a whole tensor whose blocks have scales in E4M3, as in NVFP4.

    Args:
        value: The scale, or its reciprocal.
        divides: Whether it is the reciprocal, as in compressed-tensors: to multiply by its own gives other last bits.
    """

    value: Any
    divides: bool

    def scales(self, blocks: np.ndarray) -> np.ndarray:
        """The scales of blocks in float32, from those that E4M3 holds."""
        blocks = blocks.astype(np.float32)
        return blocks / self.value if self.divides else blocks * self.value

    def blocks(self, scales: np.ndarray) -> np.ndarray:
        """The inverse of `scales`: its arguments again, bit for bit."""
        return (scales * self.value if self.divides else scales / self.value).astype(E4M3.dtype)

    @property
    def multiplier(self) -> float:
        """The scale."""
        return 1.0 / float(self.value) if self.divides else float(self.value)


@dataclasses.dataclass(frozen=True)
class ScaledMatrix:
    """A kernel in FP8 or in four bits: `values ≈ data * scale`, a scale for each block of it.

    Args:
        data: The rounded values.
        scale: One for each block; those at the edge may be cut.
        block: The rows and columns of a block.
        origin: Where the scales come from, for people.
        input_scale: The scale of the layer's input; None if each engine computes its own.
        unit: The scale of the tensor, which `scale` includes; None if there is one level of scales.
    """

    data: Float[np.ndarray, "out in"]
    scale: Float32[np.ndarray, "blocks_out blocks_in"]
    block: tuple[int, int]
    origin: str
    input_scale: float | None = None
    unit: Unit | None = None

    @property
    def input_limit(self) -> float:
        """The largest input by its scale: blocks of NVFP4 have scales of their own, of up to 448."""
        return E4M3.max if self.unit is None else E4M3.max * E2M1.max

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns of the data, `[out, in]`."""
        return self.data.shape

    def __getitem__(self, rows: slice) -> Float32[np.ndarray, "rows in"]:
        """`data * scale` of some rows, in float32."""
        return self.data[rows].astype(np.float32) * expanded(self.scale, rows, self.shape[1], self.block)

    def dequantized(self) -> Float32[np.ndarray, "out in"]:
        """`data * scale`, in float32."""
        values = np.empty(self.shape, np.float32)
        for rows in parts_of(self.shape):
            values[rows] = self[rows]
        return values


type Rows = np.ndarray | ScaledMatrix
"""A matrix that is read some rows at a time: values, or FP8 data and scales."""


def parts_of(shape: tuple[int, ...]) -> Iterator[slice]:
    """The rows of a matrix, a quarter of a megabyte of FP8 at a time.

    Args:
        shape: The shape of the matrix.
    """
    step = max(1, (1 << 18) // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def expanded(scale: np.ndarray, rows: slice, width: int, block: tuple[int, int]) -> np.ndarray:
    """Each scale repeated over its block, or one that broadcasts, for some rows.

    Args:
        scale: One for each block.
        rows: The rows.
        width: How many columns the data have.
        block: The rows and columns of a block.
    """
    if scale.shape[0] > 1:
        scale = scale[np.arange(rows.start, rows.stop) // block[0]]
    return scale if scale.shape[1] in (1, width) else np.repeat(scale, block[1], axis=1)[:, :width]


BF16_BITS = 8
"""The significant bits of bfloat16: an engine that casts scales to it leaves those with so many unchanged."""


def rounded_up(scale: Float32[np.ndarray, "..."], bits: int = BF16_BITS) -> Float32[np.ndarray, "..."]:
    """The smallest numbers with so many significant bits that are not below positive scales: they clip nothing.

    Args:
        scale: The scales.
        bits: How many, the leading one included.
    """
    dropped = np.uint32((1 << (24 - bits)) - 1)
    return ((scale.view(np.uint32) + dropped) & ~dropped).view(np.float32)


def are_exponents(scale: Float32[np.ndarray, "..."]) -> bool:
    """Whether E8M0 holds all scales: powers of two, none smaller than its smallest.

    Args:
        scale: The scales.
    """
    return bool(((np.frexp(scale)[0] == 0.5) & (scale >= np.float32(2.0**-127))).all())


def quantized(
    matrix: Rows,
    block: tuple[int, int],
    *,
    bf16_scales: bool = True,
    powers_of_two: bool = False,
    exponents: str = "",
    format: Format = E4M3,
) -> ScaledMatrix:
    """Quantizes a kernel with new scales, `amax / limit`, by which values are divided.

    Args:
        matrix: The kernel, in the dtype in which it is multiplied.
        block: The rows and columns of a block.
        bf16_scales: Whether scales that bfloat16 does not hold are rounded up, and values divided by those.
        powers_of_two: Whether they are rounded up to powers of two.
        exponents: How the powers of two of MXFP8 are rounded, which E8M0 holds; empty for other scales.
        format: The format.

    Raises:
        ValueError: If the kernel holds an infinity or NaN.
    """
    require_finite(matrix)
    amax = amax_of(matrix, block)
    if exponents:
        return microscaled(matrix, amax, block, format, exponents)
    scale = np.maximum(amax / np.float32(format.max), np.float32(1.0 / LARGEST_MULTIPLIER))
    scale = np.where(amax > 0, scale, np.float32(1.0))
    scale = rounded_up(scale, 1) if powers_of_two else scale
    return divided(matrix, scale, block, format, "computed for the export", bf16_scales=bf16_scales)


def require_finite(matrix: Rows) -> None:
    """Raises a ValueError if a kernel holds an infinity or NaN."""
    if not all(np.isfinite(matrix[rows].astype(np.float32)).all() for rows in parts_of(matrix.shape)):
        raise ValueError("it holds an infinity or NaN, which FP8 would spread over a block; export an earlier step")


def spread(matrix: ScaledMatrix, block: tuple[int, int]) -> ScaledMatrix | None:
    """The same data with scales for finer blocks; None if its blocks do not consist of those.

    Args:
        matrix: A kernel.
        block: The rows and columns of the finer blocks.
    """
    shape = matrix.data.shape
    clipped = [tuple(min(size, b) for size, b in zip(shape, blocks, strict=True)) for blocks in (matrix.block, block)]
    if clipped[0] == clipped[1]:
        return dataclasses.replace(matrix, block=block)
    if any(coarse % fine and coarse != size for coarse, fine, size in zip(*clipped, shape, strict=True)):
        return None
    starts = [np.arange(0, size, fine) // coarse for size, coarse, fine in zip(shape, *clipped, strict=True)]
    scale = np.ascontiguousarray(matrix.scale[np.ix_(*starts)])
    return dataclasses.replace(matrix, scale=scale, block=block)


def divided(
    matrix: Rows, scale: np.ndarray, block: tuple[int, int], format: Format, origin: str, *, bf16_scales: bool
) -> ScaledMatrix:
    """A matrix divided by scales that are there already, and cast."""
    if bf16_scales:
        scale = rounded_up(np.ascontiguousarray(scale, np.float32))
    return ScaledMatrix(cast(matrix, np.divide, scale, block, format), scale, block, origin)


def microscaled(matrix: Rows, amax: np.ndarray, block: tuple[int, int], format: Format, rule: str) -> ScaledMatrix:
    """Scales that are powers of two, as `MXFP8Scaling` rounds them by a rule."""
    if rule == "up":
        words = (amax * np.float32(1.0 / format.max)).view(np.uint32)
        exponent = (words >> 23).astype(np.int64) + ((words & np.uint32(0x7FFFFF)) != 0)
    else:
        half = np.uint32(1 << 21 if rule == "nearest" else 0)
        exponent = ((amax.view(np.uint32) + half) >> 23).astype(np.int64) - math.floor(math.log2(format.max))
    normal = np.clip(exponent, 1, 254).astype(np.uint32)
    data = cast(matrix, np.divide, (normal << 23).view(np.float32), block, format)
    # A block of zeros has the smallest scale of E8M0, which is subnormal in float32.
    scale = np.where(amax == 0, np.uint32(0x00400000), normal << 23).astype(np.uint32).view(np.float32)
    return ScaledMatrix(data, scale, block, f"E8M0 rounded {'to nearest' if rule == 'nearest' else rule}")


def quantized_in_two_levels(matrix: Rows, block: tuple[int, int], amax: float) -> ScaledMatrix:
    """Quantizes a kernel as NVFP4: a scale in E4M3 for each block, and one for the tensor.

    The rule is that of compressed-tensors: the tensor's is `2688 / amax`, and divides.

    Args:
        matrix: The kernel.
        block: The rows and columns of a block.
        amax: The largest magnitude of it and of the kernels that engines fuse with it.

    Raises:
        ValueError: If the kernel holds an infinity or NaN.
    """
    of_blocks = amax_of(matrix, block)
    if not np.isfinite(of_blocks).all():
        raise ValueError("it holds an infinity or NaN, which would spread over a block; take an earlier step")
    limit = np.float32(E4M3.max)
    with np.errstate(divide="ignore", over="ignore"):
        value = np.float32(E4M3.max * E2M1.max) / np.float32(amax)
    unit = Unit(value if np.isfinite(value) else np.float32(1.0), divides=True)
    stored = np.minimum(of_blocks / np.float32(E2M1.max) * unit.value, limit).astype(E4M3.dtype)
    scale = unit.scales(np.where(stored == 0, np.asarray(0.125, E4M3.dtype), stored))
    data = cast(matrix, np.divide, scale, block, E2M1)
    return ScaledMatrix(data, scale, block, "two levels, computed for the export", unit=unit)


def in_two_levels(matrix: ScaledMatrix) -> ScaledMatrix | None:
    """The same data with a tensor's scale that divides, as compressed-tensors has it; None if there is none.

    The scales of blocks keep their bits. If the tensor's multiplied, as ModelOpt has it, it is rounded.
    """
    if (unit := matrix.unit) is None or unit.divides:
        return matrix if unit is not None else None
    new = Unit(np.float32(1.0 / unit.value), divides=True)
    return dataclasses.replace(matrix, scale=new.scales(unit.blocks(matrix.scale)), unit=new)


def largest(matrix: Rows) -> float:
    """The largest magnitude of a matrix."""
    return max((float(np.abs(matrix[rows].astype(np.float32)).max()) for rows in parts_of(matrix.shape)), default=0.0)


def coarsened(matrix: ScaledMatrix, block: tuple[int, int]) -> ScaledMatrix | None:
    """The same values in E4M3 with scales for larger blocks; None if a value would change.

    Scales become powers of two, and the data of a block are multiplied by powers of two. This is exact until they leave
    the format: weights in MXFP4 become FP8 in blocks of 128x128 unless their scales differ by more than `2**14` in one.

    Args:
        matrix: A kernel whose scales are powers of two.
        block: The rows and columns of the larger blocks, which have whole numbers of the old ones.
    """
    sizes = zip(block, matrix.block, matrix.shape, strict=True)
    if not are_exponents(matrix.scale) or any(new % min(old, n) and new < n for new, old, n in sizes):
        return None
    amax = amax_of(matrix, block)
    scale = rounded_up(np.where(amax > 0, amax / np.float32(E4M3.max), np.float32(1.0)), 1)
    new = ScaledMatrix(cast(matrix, np.divide, scale, block, E4M3), scale, block, "checkpoint", matrix.input_scale)
    return new if _are_equal(matrix, new) else None


def recast(matrix: ScaledMatrix, format: Format) -> ScaledMatrix | None:
    """The same values with data in another format; None if it does not hold them."""
    if matrix.data.dtype == format.dtype:
        return matrix
    new = dataclasses.replace(matrix, data=matrix.data.astype(np.float32).astype(format.dtype))
    return new if _are_equal(matrix, new) else None


def _are_equal(a: Rows, b: Rows) -> bool:
    return all(np.array_equal(a[rows], b[rows]) for rows in parts_of(a.shape))


def amax_of(matrix: Rows, block: tuple[int, int]) -> np.ndarray:
    """The largest magnitude of each block, read some rows at a time."""
    columns = np.arange(0, matrix.shape[1], block[1])
    of_rows = [
        np.maximum.reduceat(np.abs(matrix[rows].astype(np.float32)), columns, axis=1) for rows in parts_of(matrix.shape)
    ]
    return np.maximum.reduceat(np.concatenate(of_rows), np.arange(0, matrix.shape[0], block[0]), axis=0)


def cast(
    matrix: Rows, operation: Callable[..., np.ndarray], factor: np.ndarray, block: tuple[int, int], format: Format
) -> np.ndarray:
    """The values, multiplied or divided by a factor for each block, clipped and rounded."""
    limit, data = np.float32(format.max), np.empty(matrix.shape, format.dtype)
    for rows in parts_of(matrix.shape):
        values = matrix[rows].astype(np.float32)
        operation(values, expanded(factor, rows, matrix.shape[1], block), out=values)
        data[rows] = np.clip(values, -limit, limit, out=values).astype(format.dtype)
    return data
