"""One kernel in FP8, computed in NumPy: the numbers of the products, without a compiled program for each shape."""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32

from .._numerics.formats import E4M3, Format
from ..recipes.scaling import BlockScaling, CurrentScaling, MXFP8Scaling, RowwiseScaling
from ..recipes.scaling.amax import LARGEST_MULTIPLIER
from ..recipes.scaling.base import AbstractScaling


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

    def dequantized(self) -> Float32[np.ndarray, "out in"]:
        """`data * scale`, in float32."""
        return self.data.astype(np.float32) * expanded(self.scale, self.data.shape, self.block)


def expanded(scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """Each scale repeated over its block, or one that broadcasts.

    Args:
        scale: One for each block.
        shape: Of the data.
        block: The rows and columns of a block.
    """
    for axis in (0, 1):
        if scale.shape[axis] not in (1, shape[axis]):
            scale = np.repeat(scale, block[axis], axis=axis)
            scale = scale[: shape[0]] if axis == 0 else scale[:, : shape[1]]
    return scale


BF16_BITS = 8
"""The significant bits of bfloat16: an engine that casts scales to it changes nothing of those with so many."""


def rounded_up(scale: Float32[np.ndarray, "..."], bits: int = BF16_BITS) -> Float32[np.ndarray, "..."]:
    """The smallest numbers with so many significant bits that are not below positive scales: they clip nothing.

    Args:
        scale: The scales.
        bits: How many, the leading one included.
    """
    dropped = np.uint32((1 << (24 - bits)) - 1)
    return ((scale.view(np.uint32) + dropped) & ~dropped).view(np.float32)


def quantized(
    matrix: Float[np.ndarray, "out in"],
    block: tuple[int, int],
    *,
    scaling: AbstractScaling | None = None,
    stored: float | None = None,
    scale_bits: int = 24,
    bf16_scales: bool = True,
    format: Format = E4M3,
) -> ScaledMatrix:
    """Quantizes a kernel, with the scales that training has where they fit the blocks.

    The rules are those of the scalings, bit for bit: delayed and static scaling divide by the stored scale, rounded up
    to `scale_bits`; current ones multiply by `limit / amax`. Without a scaling of training, `scale = amax / limit`, and
    values are divided by it. With `bf16_scales`, scales that bfloat16 does not hold are rounded up, and values divided
    by those.

    Args:
        matrix: The kernel, in the dtype in which it is multiplied.
        block: The rows and columns of a block; `(1, 32)` has scales that are powers of two, as MXFP8.
        scaling: That of the kernel in training; None for fresh scales.
        stored: The scale that the state of training holds.
        scale_bits: How many significant bits the scale of a whole kernel has where the step multiplies by it.
        bf16_scales: See above.
        format: The format.

    Raises:
        ValueError: If the kernel holds an infinity or NaN, or the stored scale is not positive and finite.
    """
    if not np.isfinite(matrix.astype(np.float32)).all():
        raise ValueError("it holds an infinity or NaN, which FP8 would spread over a block; export an earlier step")
    values, limit = matrix.astype(np.float32), np.float32(format.max)
    if stored is not None and (block != (1, 32) or np.frexp(stored)[0] == 0.5):
        if not (np.isfinite(stored) and stored > 0):
            raise ValueError(f"its scale in the state is {stored}; calibrate the model, or train a step")
        blocks = tuple(-(-size // b) for size, b in zip(matrix.shape, block, strict=True))
        scale = rounded_up(np.full(blocks, stored, np.float32), scale_bits)
        return _divided(values, scale, block, format, "state of training", bf16_scales=bf16_scales)
    if isinstance(scaling, CurrentScaling) and block not in ((1, 32), matrix.shape):
        # One scale for all: the same in each block, so that the values are those of training.
        options: Any = {"scaling": scaling, "scale_bits": scale_bits, "bf16_scales": bf16_scales, "format": format}
        whole = quantized(matrix, matrix.shape, **options)
        blocks = tuple(-(-size // b) for size, b in zip(matrix.shape, block, strict=True))
        scale = np.ascontiguousarray(np.broadcast_to(whole.scale, blocks))
        return dataclasses.replace(whole, scale=scale, block=block)
    amax = _amax(values, block)
    if block == (1, 32):
        return _microscaled(values, amax, block, format)
    power_of_two = (
        scaling is not None and fits(scaling, matrix.shape, block) and getattr(scaling, "power_of_two", False)
    )
    if scaling is None or not fits(scaling, matrix.shape, block):
        scale = np.maximum(amax / limit, np.float32(1.0 / LARGEST_MULTIPLIER))
        scale = np.where(amax > 0, scale, np.float32(1.0))
        return _divided(values, scale, block, format, "computed for the export", bf16_scales=bf16_scales)
    with np.errstate(divide="ignore", over="ignore"):
        multiplier = np.minimum(limit / amax, np.float32(LARGEST_MULTIPLIER))
    multiplier = np.where(amax > 0, multiplier, np.float32(1.0))
    if power_of_two:
        multiplier = (multiplier.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    scale = np.float32(1.0) / multiplier
    if isinstance(scaling, CurrentScaling) and scale_bits < 24 and not power_of_two:
        return _divided(
            values, rounded_up(scale, scale_bits), block, format, "recipe of training", bf16_scales=bf16_scales
        )
    if bf16_scales and not (rounded_up(scale) == scale).all():
        return _divided(values, scale, block, format, "recipe of training", bf16_scales=True)
    data = _cast(values * expanded(multiplier, values.shape, block), format)
    return ScaledMatrix(data, scale, block, "recipe of training")


def spread(matrix: ScaledMatrix, block: tuple[int, int]) -> ScaledMatrix | None:
    """The same data with scales for finer blocks; None if its blocks are not made of such.

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


def fits(scaling: AbstractScaling, shape: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Whether a stateless scaling has a scale for each of these blocks, if one axis is summed and one is not.

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
        case MXFP8Scaling():
            return block == (1, 32) and not scaling.square
        case _:
            return False


def _divided(
    values: np.ndarray, scale: np.ndarray, block: tuple[int, int], format: Format, origin: str, *, bf16_scales: bool
) -> ScaledMatrix:
    if bf16_scales:
        scale = rounded_up(np.ascontiguousarray(scale, np.float32))
    data = _cast(values / expanded(scale, values.shape, block), format)
    return ScaledMatrix(data, scale, block, origin)


def _microscaled(values: np.ndarray, amax: np.ndarray, block: tuple[int, int], format: Format) -> ScaledMatrix:
    """`scale = 2**ceil(log2(amax / limit))`, as `MXFP8Scaling`."""
    words = (amax * np.float32(1.0 / format.max)).view(np.uint32)
    exponent = np.minimum((words >> 23) + ((words & np.uint32(0x7FFFFF)) != 0), 254).astype(np.uint32)
    normal = np.maximum(exponent, 1)
    data = _cast(values / expanded((normal << 23).view(np.float32), values.shape, block), format)
    # A block of zeros has the smallest scale of E8M0, which is subnormal in float32.
    scale = np.where(amax == 0, np.uint32(0x00400000), normal << 23).astype(np.uint32).view(np.float32)
    return ScaledMatrix(data, scale, block, "E8M0 rounded up")


def _amax(values: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    magnitudes = np.abs(values)
    for axis in (0, 1):
        starts = np.arange(0, values.shape[axis], block[axis])
        magnitudes = np.maximum.reduceat(magnitudes, starts, axis=axis)
    return magnitudes


def _cast(values: np.ndarray, format: Format) -> np.ndarray:
    limit = np.float32(format.max)
    return np.clip(values, -limit, limit, out=values).astype(format.dtype)
