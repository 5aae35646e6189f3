"""One kernel in FP8 with the scales that training has, as far as a layout's blocks can hold them."""

import dataclasses

import numpy as np

from ..folders.scaled_matrix import (
    Rows,
    ScaledMatrix,
    amax_of,
    are_exponents,
    cast,
    divided,
    quantized,
    require_finite,
    rounded_up,
)
from ..formats import E4M3, LARGEST_MULTIPLIER, Format
from ..recipes import AbstractScaling, BlockScaling, CurrentScaling, MXFP8Scaling, RowwiseScaling


def quantized_as_in_training(
    matrix: Rows,
    block: tuple[int, int],
    *,
    scaling: AbstractScaling | None = None,
    stored: float | None = None,
    scale_bits: int = 24,
    bf16_scales: bool = True,
    exponents: str = "",
    format: Format = E4M3,
) -> ScaledMatrix:
    """Quantizes a kernel with the scales that training has where they fit the blocks, and else with new ones.

    The rules are those of the scalings, bit for bit: delayed and static scaling divide by the stored scale, rounded up
    to `scale_bits`; current ones multiply by `limit / amax`. With `bf16_scales`, scales that bfloat16 does not hold are
    rounded up, and values divided by those.

    Args:
        matrix: The kernel, in the dtype in which it is multiplied.
        block: The rows and columns of a block.
        scaling: The kernel's scaling in training; None for fresh scales.
        stored: The scale that the state of training holds.
        scale_bits: How many significant bits the scale of a whole kernel has where the step multiplies by it.
        bf16_scales: See above.
        exponents: How new powers of two are rounded in E8M0, unless training does it otherwise; empty for other scales.
        format: The format.

    Raises:
        ValueError: If the kernel holds an infinity or NaN, or the stored scale is not positive and finite.
    """
    if stored is not None and (not exponents or are_exponents(np.asarray(stored, np.float32))):
        require_finite(matrix)
        if not (np.isfinite(stored) and stored > 0):
            raise ValueError(f"its scale in the state is {stored}; calibrate the model, or train a step")
        scale = rounded_up(np.full(_blocks(matrix.shape, block), stored, np.float32), scale_bits)
        return divided(matrix, scale, block, format, "state of training", bf16_scales=bf16_scales)
    if exponents:
        rule = scaling.scale_rounding if isinstance(scaling, MXFP8Scaling) else exponents
        return quantized(matrix, block, exponents=rule, format=format)
    whole = (matrix.shape[0], matrix.shape[1])
    if isinstance(scaling, CurrentScaling) and block != whole:
        # One scale for all: the same in each block, so that the values are those of training.
        made = quantized_as_in_training(
            matrix, whole, scaling=scaling, scale_bits=scale_bits, bf16_scales=bf16_scales, format=format
        )
        scale = np.ascontiguousarray(np.broadcast_to(made.scale, _blocks(matrix.shape, block)))
        return dataclasses.replace(made, scale=scale, block=block)
    if scaling is None or not _fits(scaling, matrix.shape, block):
        return quantized(matrix, block, bf16_scales=bf16_scales, format=format)
    require_finite(matrix)
    amax = amax_of(matrix, block)
    with np.errstate(divide="ignore", over="ignore"):
        multiplier = np.minimum(np.float32(format.max) / amax, np.float32(LARGEST_MULTIPLIER))
    multiplier = np.where(amax > 0, multiplier, np.float32(1.0))
    if power_of_two := getattr(scaling, "power_of_two", False):
        multiplier = (multiplier.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    scale = np.float32(1.0) / multiplier
    if isinstance(scaling, CurrentScaling) and scale_bits < 24 and not power_of_two:
        scale = rounded_up(scale, scale_bits)
        return divided(matrix, scale, block, format, "recipe of training", bf16_scales=bf16_scales)
    if bf16_scales and not (rounded_up(scale) == scale).all():
        return divided(matrix, scale, block, format, "recipe of training", bf16_scales=True)
    return ScaledMatrix(cast(matrix, np.multiply, multiplier, block, format), scale, block, "recipe of training")


def _blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return tuple(-(-size // b) for size, b in zip(shape, block, strict=True))


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
