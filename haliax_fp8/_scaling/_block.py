"""Block scaling: a scale for each block of elements, as DeepSeek-V3 and the OCP microscaling formats have it."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .._formats import E4M3, Format, saturating_cast
from .._quantized_array import QuantizedArray, expand, quantize_by
from ._amax import multiplier_of
from ._base import AbstractScaling


@dataclasses.dataclass(frozen=True)
class BlockScaling(AbstractScaling):
    """One scale per block: `size` elements along the contraction, or a square of them.

    DeepSeek-V3 scales input and output gradient in blocks of 1x128 and the kernel in blocks of 128x128. Squares are
    the same for both products that use the kernel; 1-D blocks are quantized anew for each.

    Args:
        size: Elements of a block along the contracted axis (the last one, if several are contracted).
        square: Whether a block spans as many elements of the last free axis too.
        power_of_two: Round scales up to powers of two.

    Raises:
        ValueError: If `size` is below 1.

    References:
        DeepSeek-V3 (arXiv:2412.19437), section 3.3.2; TransformerEngine's `Float8BlockScaling`.
    """

    size: int = 128
    square: bool = False
    power_of_two: bool = True

    stateful: ClassVar[bool] = False
    gradient_format: ClassVar[Format] = E4M3

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size} of a block must be at least 1; DeepSeek-V3 uses 128")

    @property
    def directional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Squares look the same from both sides."""
        return not self.square

    @property
    def for_kernel(self) -> AbstractScaling:
        """Squares, as in DeepSeek-V3."""
        return dataclasses.replace(self, square=True)

    def quantize(
        self,
        x: Float[Array, "*shape"],
        format: Format,
        stored: Float32[Array, "*ensemble 1 1"] | None,
        ensemble: int,
        contracted: tuple[int, ...],
    ) -> QuantizedArray:
        """Quantizes with the amax of each block; blocks cut by the edge are smaller."""
        block = block_shape(x.ndim, self.size, self.square, ensemble, contracted)
        largest = float(jnp.finfo(x.dtype).max)
        amax = blockwise_amax(x, block)
        multiplier = multiplier_of(amax, format.max, power_of_two=self.power_of_two, largest=largest)
        return quantize_by(x, multiplier, format, block)


@dataclasses.dataclass(frozen=True)
class MXFP8Scaling(AbstractScaling):
    """The OCP microscaling format: blocks of 32 along the contraction, scales of E8M0 (powers of two).

    `scale = 2**ceil(log2(amax / max))`. The OCP document rounds down and lets the largest elements of a block
    saturate; rounding up, as TransformerEngine and torchao's RCEIL do, never clips.

    Args:
        square: Blocks of 32x32, the same for both products that use an operand.

    References:
        OCP Microscaling Formats 1.0, section 6.3; TransformerEngine `util/ptx_arch_spec.cuh::float_to_e8m0`.
    """

    square: bool = False

    stateful: ClassVar[bool] = False
    gradient_format: ClassVar[Format] = E4M3

    @property
    def directional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Squares look the same from both sides."""
        return not self.square

    def quantize(
        self,
        x: Float[Array, "*shape"],
        format: Format,
        stored: Float32[Array, "*ensemble 1 1"] | None,
        ensemble: int,
        contracted: tuple[int, ...],
    ) -> QuantizedArray:
        """Quantizes with the amax of each block of 32."""
        block = block_shape(x.ndim, 32, self.square, ensemble, contracted)
        exponent = e8m0_exponent(blockwise_amax(x, block) * np.float32(1.0 / format.max)).astype(jnp.int32)
        # 2**-127 is subnormal, and flushed to zero by some devices: divide by 2**-126 and double.
        x = lax.div(x.astype(jnp.float32), expand(power_of_two(jnp.maximum(exponent, 1)), x.shape, block))
        double = jnp.where(exponent == 0, jnp.float32(2.0), jnp.float32(1.0))
        data = saturating_cast(lax.mul(x, expand(double, x.shape, block)), format)
        return QuantizedArray(data, power_of_two(exponent), block)


def block_shape(ndim: int, size: int, square: bool, ensemble: int, contracted: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a block: `size` along the last contracted axis, and if square along the last free one."""
    axes = {max(contracted)} if contracted else set()
    free = [axis for axis in range(ensemble, ndim) if axis not in contracted]
    if square and free:
        axes.add(free[-1])
    return tuple(size if axis in axes else 1 for axis in range(ndim))


def blockwise_amax(x: Float[Array, "*shape"], block: tuple[int, ...]) -> Float32[Array, "*blocks"]:
    """The largest magnitude of each block."""
    padding = [(0, -size % b) for size, b in zip(x.shape, block, strict=True)]
    x = jnp.pad(jnp.abs(x), padding)
    split = [part for size, b in zip(x.shape, block, strict=True) for part in (size // b, b)]
    return jnp.max(x.reshape(split), axis=tuple(range(1, 2 * len(block), 2)), initial=0.0).astype(jnp.float32)


def e8m0_exponent(x: Float32[Array, "*shape"]) -> Array:
    """The biased exponent of the smallest power of two that is not below `x`, as uint8: E8M0, rounded up.

    `2**(e - 127)`; 0 means `2**-127`, 254 is the largest, 255 is NaN.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    exponent, significand = bits >> np.uint32(23), bits & np.uint32(0x7FFFFF)
    fits = (exponent == 0) & (significand <= 0x400000)
    up = (significand > 0) & (exponent != 0xFE) & ~fits
    exponent = exponent + up.astype(jnp.uint32)
    exponent = jnp.where(jnp.isnan(x), jnp.uint32(255), jnp.where(jnp.isinf(x), jnp.uint32(254), exponent))
    return exponent.astype(jnp.uint8)


def power_of_two(exponent: Array) -> Float32[Array, "*shape"]:
    """`2**(exponent - 127)` for a biased exponent from 0 to 254; NaN for 255."""
    bits = jnp.where(exponent == 0, 0x400000, jnp.minimum(exponent, 254) << 23)
    value = lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.float32)
    return jnp.where(exponent > 254, jnp.float32(jnp.nan), value)
