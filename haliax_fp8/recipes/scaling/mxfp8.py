"""MXFP8: blocks of 32 with scales that are powers of two, as the OCP microscaling formats have it."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ..._numerics.formats import E4M3, Format
from ..._numerics.quantized_array import QuantizedArray, expand
from ...devices.device import MX_UNITS, MatrixUnits
from .base import AbstractScaling, CastCost, OperandUse
from .block import block_shape, blockwise_amax, e8m0_exponent, power_of_two


@dataclasses.dataclass(frozen=True)
class MXFP8Scaling(AbstractScaling):
    """The OCP microscaling format: blocks of 32 along the contraction, scales of E8M0 (powers of two).

    `scale = 2**ceil(log2(amax / max))`. The OCP document rounds down and lets the largest elements of a block
    saturate; rounding up, as TransformerEngine and torchao's RCEIL do, never clips.

    Args:
        square: Blocks of 32x32, the same for both products that use an operand.
        padding: Whether the last block of an axis may be partial, as if padded with zeros.

    Raises:
        ValueError: When used, if the last block is partial and `padding` is False.

    References:
        OCP Microscaling Formats 1.0, section 6.3; TransformerEngine `util/ptx_arch_spec.cuh::float_to_e8m0`.
    """

    square: bool = False
    padding: bool = True

    units: ClassVar[MatrixUnits] = MX_UNITS
    gradient_format: ClassVar[Format] = E4M3
    # An amax and two scales for each block of 32, in float32 and in E8M0: 16 bytes more.
    cast_cost: ClassVar[CastCost] = CastCost(bytes=5.5, launches=3)

    @property
    def per_axis(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Squares look the same from both sides."""
        return not self.square

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """Quantizes with the amax of each block of 32."""
        block = block_shape(x.shape, 32, use, square=self.square, padding=self.padding, scaling=self)
        amax = blockwise_amax(use.counted(x), block)
        exponent = e8m0_exponent(amax * np.float32(1.0 / use.format.max)).astype(jnp.int32)
        # Above 2**-127, which is subnormal, and flushed to zero by some devices; a block of zeros may have it.
        normal = jnp.maximum(exponent, 1)
        data = use.cast(lax.div(x.astype(jnp.float32), expand(power_of_two(normal), x.shape, block)))
        scale = power_of_two(jnp.where(amax == 0.0, 0, normal))
        return QuantizedArray(data, scale, block, scale_bits=1)
