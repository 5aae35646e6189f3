"""The quantizer of a published folder: its blocks of a matrix, its rule of scales, and the scales that it has."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from ..._jax.xla import divisor_of_each, keep_cast
from ..._numerics.casts import saturating_cast
from ..._numerics.quantized_array import QuantizedArray, expand
from ..._numerics.stored_array import power_of_two
from ...devices.device import FP4_UNITS, FP8_UNITS, MX_UNITS, NO_UNITS, MatrixUnits
from ...formats import E4M3, Format
from .base import AbstractScaling, OperandUse
from .block import blockwise_amax
from .multiplier import round_up_words, words_of
from .mxfp8 import MXFP8Scaling


ScaleRule = Literal["float32", "bfloat16", "bfloat16_up", "e8m0_up", "e8m0_nearest", "two_levels"]

_EXPONENTS: dict[str, MXFP8Scaling] = {
    "e8m0_up": MXFP8Scaling(scale_rounding="up"),
    "e8m0_nearest": MXFP8Scaling(scale_rounding="nearest"),
}
_SMALLEST_NORMAL = np.float32(2.0**-126)


class FolderScales[A](eqx.Module):
    """The scales that a folder has for a kernel `[out, in]`, in whole numbers: neither parameters nor cast.

    Args:
        scale: The bits of float32, `[*leading, blocks_out, blocks_in]`.
        divisor: In two levels, the bits of the tensor's scale, which divides, `[*leading]`; else None.
        input: The same of the layer's input, for an export; products with such inputs scale each batch.
    """

    scale: A
    divisor: A | None = None
    input: A | None = None


@dataclasses.dataclass(frozen=True)
class FolderScaling(AbstractScaling):
    """The quantizer of a published folder: `scale = round(amax / max)` of a block, and `data = round(x / scale)`.

    A block of a kernel that still is a multiple of its scale in the folder, `x == data * scale` for all of its elements
    in the dtype of `x`, keeps this scale. No function of `x` alone has it: two folders may decode to the same values,
    such as 448 times a scale and 224 times twice that.

    Args:
        block: The outputs and inputs of a block of a kernel, `[out, in]`, or the rows and features of one of an input;
            0 for all. Blocks at the edge may be smaller.
        scales: How scales are rounded: `"float32"`, `"bfloat16"`, to nearest, `"bfloat16_up"`, `"e8m0_up"` and
            `"e8m0_nearest"`, to powers of two as in `MXFP8Scaling`, or `"two_levels"`, as NVFP4 in compressed-tensors:
            `divisor = 448 * 6 / amax(tensor)`, and `scale = E4M3(amax / 6 * divisor) / divisor`.

    Raises:
        ValueError: If an argument is of another kind; when used, if blocks lie across the axes of a kernel.

    References:
        compressed-tensors 0.20, `calculate_qparams` and `quantize`, in float32.

    Example:
        >>> x = jnp.array([[3.0, -7.0]])
        >>> FolderScaling((1, 0), "bfloat16").quantize(x, OperandUse(E4M3, contracted=(1,))).scale
        Array([[0.015625]], dtype=float32)
    """

    block: tuple[int, int] = (0, 0)
    scales: ScaleRule = "float32"

    per_axis: ClassVar[bool] = True
    gradient_format: ClassVar[Format] = E4M3
    exact_scales: ClassVar[bool] = True

    def __post_init__(self) -> None:
        is_pair = isinstance(self.block, tuple) and len(self.block) == 2
        if not is_pair or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in self.block):
            raise ValueError(f"block={self.block!r} of FolderScaling must be two whole numbers; use 0 for a whole axis")
        if self.scales not in get_args(ScaleRule):
            raise ValueError(f"scales={self.scales!r} of FolderScaling must be one of {get_args(ScaleRule)}")

    @property
    def units(self) -> MatrixUnits:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those for scales outside of the sum, for powers of two, or for two levels; none for other blocks."""
        if self.scales == "two_levels":
            return FP4_UNITS
        if self.scales in _EXPONENTS and self.block[1] and self.block[1] % 32 == 0:
            return MX_UNITS
        return NO_UNITS if self.block[1] else FP8_UNITS

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """Quantizes with the amax of each block, or the scale that the folder has."""
        free = [axis for axis in range(use.ensemble, x.ndim) if axis not in use.contracted]
        axes = (*free, *use.contracted)
        sides = [self.sides([x.shape[axis] for axis in part], n) for part, n in ((free, 0), (use.contracted, 1))]
        by_axis = dict(zip(axes, (*sides[0], *sides[1]), strict=True))
        block = tuple(by_axis.get(axis, 1) for axis in range(x.ndim))
        amax = blockwise_amax(use.counted(x), block)

        def in_blocks(of_matrix: Float32[Array, "*leading out in"]) -> Float32[Array, "*blocks"]:
            by_side = of_matrix.reshape(*x.shape[: use.ensemble], *(amax.shape[axis] for axis in axes))
            return jnp.transpose(by_side, (*range(use.ensemble), *(int(i) + use.ensemble for i in np.argsort(axes))))

        divisor = None
        if self.scales == "two_levels":
            if use.folder is not None and use.folder.divisor is not None:
                of_tensor = lax.bitcast_convert_type(use.folder.divisor, jnp.float32)
            else:
                largest = jnp.max(amax, axis=tuple(range(use.ensemble, x.ndim)))
                of_tensor = lax.div(np.float32(E4M3.max * use.format.max), jnp.where(largest > 0, largest, 1.0))
            divisor = of_tensor.reshape(*x.shape[: use.ensemble], *(1,) * len(axes))
        scale = self._scale(amax, divisor, use.format)
        if use.folder is not None:
            before = in_blocks(lax.bitcast_convert_type(use.folder.scale, jnp.float32))
            data = keep_cast(use.cast(_divided(x, before, block)))
            values = lax.mul(data.astype(jnp.float32), expand(before, x.shape, block)).astype(x.dtype)
            moved = blockwise_amax((values != x).astype(jnp.float32), block) > 0
            scale = jnp.where(moved, scale, before)
        bits = 1 if self.scales in _EXPONENTS else 24
        unit = None if divisor is None else lax.div(np.float32(1.0), divisor)
        return QuantizedArray(use.cast(_divided(x, scale, block)), scale, block, scale_bits=bits, tensor_scale=unit)

    def sides(self, sizes: Sequence[int], which: int) -> tuple[int, ...]:
        """The elements of a block along each of the axes that are one axis of the matrix.

        Args:
            sizes: The sizes of these axes.
            which: 0 for its outputs, 1 for its inputs.

        Raises:
            ValueError: If blocks lie across them.
        """
        rest, sides = min(self.block[which] or math.prod(sizes), math.prod(sizes)), ()
        for i, size in reversed(list(enumerate(sizes))):
            side = min(rest, size)
            if i and max(rest, size) % side:
                raise ValueError(
                    f"the axes {tuple(sizes)} of a kernel are one axis in the folder, and blocks of "
                    f"{self.block[which]} lie across them: exclude this layer, or build the model with "
                    "these axes as one"
                )
            rest, sides = -(-rest // side), (side, *sides)
        return sides

    def _scale(self, amax: Array, divisor: Array | None, format: Format) -> Float32[Array, "*blocks"]:
        limit = jnp.full_like(amax, format.max)
        if self.scales in _EXPONENTS:
            exponent = jnp.maximum(_EXPONENTS[self.scales].exponent(amax, format), 1)
            return power_of_two(jnp.where(amax == 0.0, 0, exponent))
        scale = lax.div(amax, divisor_of_each(limit, amax.shape))
        if divisor is not None:
            stored = saturating_cast(lax.mul(scale, jnp.broadcast_to(divisor, scale.shape)), E4M3)
            stored = keep_cast(stored).astype(jnp.float32)
            # The scale of zeros, and of blocks far below the tensor's largest, as in compressed-tensors.
            return lax.div(jnp.where(stored == 0.0, np.float32(0.125), stored), divisor_of_each(divisor, scale.shape))
        if self.scales == "bfloat16":
            scale = lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=7)
        if self.scales == "bfloat16_up":
            scale = lax.bitcast_convert_type(round_up_words(words_of(scale), 8), jnp.float32)
        return jnp.where(amax == 0.0, np.float32(1.0), jnp.maximum(scale, _SMALLEST_NORMAL))


def _divided(x: Array, scale: Float32[Array, "*blocks"], block: tuple[int, ...]) -> Float32[Array, "*shape"]:
    # A scale of zero, or one that devices flush to zero, is that of a block of zeros.
    divisor = jnp.where(scale < _SMALLEST_NORMAL, np.float32(1.0), scale)
    return lax.div(x.astype(jnp.float32), divisor_of_each(expand(divisor, x.shape, block), x.shape))
