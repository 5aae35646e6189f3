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

from .._numerics.formats import E4M3, Format
from ..recipes.scaling import BlockScaling, CurrentScaling, RowwiseScaling
from ..recipes.scaling.base import AbstractScaling
from ..recipes.scaling.multiplier import LARGEST_MULTIPLIER


BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class ScaledMatrix:
    """A kernel in FP8: `values ≈ data * scale`, a scale for each block of it.

    Args:
        data: The rounded values.
        scale: One for each block; those at the edge may be cut.
        block: The rows and columns of a block.
        origin: Where the scales come from, for people.
        input_scale: The scale of the layer's input; None if each engine computes its own.
    """

    data: Float[np.ndarray, "out in"]
    scale: Float32[np.ndarray, "blocks_out blocks_in"]
    block: tuple[int, int]
    origin: str
    input_scale: float | None = None

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
    scaling: AbstractScaling | None = None,
    stored: float | None = None,
    scale_bits: int = 24,
    bf16_scales: bool = True,
    powers_of_two: bool = False,
    exponents: bool = False,
    format: Format = E4M3,
) -> ScaledMatrix:
    """Quantizes a kernel, with the scales that training has where they fit the blocks.

    The rules are those of the scalings, bit for bit: delayed and static scaling divide by the stored scale, rounded up
    to `scale_bits`; current ones multiply by `limit / amax`. Without a scaling of training, `scale = amax / limit`, and
    values are divided by it. With `bf16_scales`, scales that bfloat16 does not hold are rounded up, and values divided
    by those.

    Args:
        matrix: The kernel, in the dtype in which it is multiplied.
        block: The rows and columns of a block.
        scaling: The kernel's scaling in training; None for fresh scales.
        stored: The scale that the state of training holds.
        scale_bits: How many significant bits the scale of a whole kernel has where the step multiplies by it.
        bf16_scales: See above.
        powers_of_two: Whether new scales are rounded up to powers of two.
        exponents: Whether scales are those of MXFP8, powers of two that E8M0 holds.
        format: The format.

    Raises:
        ValueError: If the kernel holds an infinity or NaN, or the stored scale is not positive and finite.
    """
    if not all(np.isfinite(matrix[rows].astype(np.float32)).all() for rows in parts_of(matrix.shape)):
        raise ValueError("it holds an infinity or NaN, which FP8 would spread over a block; export an earlier step")
    limit = np.float32(format.max)
    if stored is not None and (not exponents or are_exponents(np.asarray(stored, np.float32))):
        if not (np.isfinite(stored) and stored > 0):
            raise ValueError(f"its scale in the state is {stored}; calibrate the model, or train a step")
        blocks = tuple(-(-size // b) for size, b in zip(matrix.shape, block, strict=True))
        scale = rounded_up(np.full(blocks, stored, np.float32), scale_bits)
        return _divided(matrix, scale, block, format, "state of training", bf16_scales=bf16_scales)
    height, width = matrix.shape
    if isinstance(scaling, CurrentScaling) and not exponents and block != (height, width):
        # One scale for all: the same in each block, so that the values are those of training.
        options: Any = {"scaling": scaling, "scale_bits": scale_bits, "bf16_scales": bf16_scales, "format": format}
        whole = quantized(matrix, (height, width), **options)
        blocks = tuple(-(-size // b) for size, b in zip(matrix.shape, block, strict=True))
        scale = np.ascontiguousarray(np.broadcast_to(whole.scale, blocks))
        return dataclasses.replace(whole, scale=scale, block=block)
    amax = _amax(matrix, block)
    if exponents:
        return _microscaled(matrix, amax, block, format)
    power_of_two = (
        scaling is not None and _fits(scaling, matrix.shape, block) and getattr(scaling, "power_of_two", False)
    )
    if scaling is None or not _fits(scaling, matrix.shape, block):
        scale = np.maximum(amax / limit, np.float32(1.0 / LARGEST_MULTIPLIER))
        scale = np.where(amax > 0, scale, np.float32(1.0))
        scale = rounded_up(scale, 1) if powers_of_two else scale
        return _divided(matrix, scale, block, format, "computed for the export", bf16_scales=bf16_scales)
    with np.errstate(divide="ignore", over="ignore"):
        multiplier = np.minimum(limit / amax, np.float32(LARGEST_MULTIPLIER))
    multiplier = np.where(amax > 0, multiplier, np.float32(1.0))
    if power_of_two:
        multiplier = (multiplier.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    scale = np.float32(1.0) / multiplier
    if isinstance(scaling, CurrentScaling) and scale_bits < 24 and not power_of_two:
        return _divided(
            matrix, rounded_up(scale, scale_bits), block, format, "recipe of training", bf16_scales=bf16_scales
        )
    if bf16_scales and not (rounded_up(scale) == scale).all():
        return _divided(matrix, scale, block, format, "recipe of training", bf16_scales=True)
    data = _cast(matrix, np.multiply, multiplier, block, format)
    return ScaledMatrix(data, scale, block, "recipe of training")


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


def _fits(scaling: AbstractScaling, shape: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Whether a stateless scaling other than MXFP8 has a scale for each of these blocks, of a matrix.

    Args:
        scaling: That of a kernel.
        shape: The kernel's, `[out, in]`.
        block: The rows and columns of a block.
    """
    match scaling:
        case CurrentScaling():
            return block == shape
        case RowwiseScaling():
            return block == (1, shape[1])
        case BlockScaling():
            return block == (scaling.size if scaling.square else 1, scaling.size)
        case _:
            return False


def _divided(
    matrix: Rows, scale: np.ndarray, block: tuple[int, int], format: Format, origin: str, *, bf16_scales: bool
) -> ScaledMatrix:
    if bf16_scales:
        scale = rounded_up(np.ascontiguousarray(scale, np.float32))
    return ScaledMatrix(_cast(matrix, np.divide, scale, block, format), scale, block, origin)


def _microscaled(matrix: Rows, amax: np.ndarray, block: tuple[int, int], format: Format) -> ScaledMatrix:
    """`scale = 2**ceil(log2(amax / limit))`, as `MXFP8Scaling`."""
    words = (amax * np.float32(1.0 / format.max)).view(np.uint32)
    exponent = np.minimum((words >> 23) + ((words & np.uint32(0x7FFFFF)) != 0), 254).astype(np.uint32)
    normal = np.maximum(exponent, 1)
    data = _cast(matrix, np.divide, (normal << 23).view(np.float32), block, format)
    # A block of zeros has the smallest scale of E8M0, which is subnormal in float32.
    scale = np.where(amax == 0, np.uint32(0x00400000), normal << 23).astype(np.uint32).view(np.float32)
    return ScaledMatrix(data, scale, block, "E8M0 rounded up")


def _amax(matrix: Rows, block: tuple[int, int]) -> np.ndarray:
    columns = np.arange(0, matrix.shape[1], block[1])
    of_rows = [
        np.maximum.reduceat(np.abs(matrix[rows].astype(np.float32)), columns, axis=1) for rows in parts_of(matrix.shape)
    ]
    return np.maximum.reduceat(np.concatenate(of_rows), np.arange(0, matrix.shape[0], block[0]), axis=0)


def _cast(
    matrix: Rows, operation: Callable[..., np.ndarray], factor: np.ndarray, block: tuple[int, int], format: Format
) -> np.ndarray:
    """The values, multiplied or divided by a factor for each block, clipped and rounded."""
    limit, data = np.float32(format.max), np.empty(matrix.shape, format.dtype)
    for rows in parts_of(matrix.shape):
        values = matrix[rows].astype(np.float32)
        operation(values, expanded(factor, rows, matrix.shape[1], block), out=values)
        data[rows] = np.clip(values, -limit, limit, out=values).astype(format.dtype)
    return data
