"""MXFP8: blocks of 32 with scales that are powers of two, as the OCP microscaling formats have it."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .._device import MX_UNITS, MatrixUnits
from .._formats import E4M3, Format
from .._quantized_array import QuantizedArray, expand
from ._base import AbstractScaling, OperandUse
from ._blocks import block_shape, blockwise_amax, e8m0_exponent, power_of_two


@dataclasses.dataclass(frozen=True)
class MXFP8Scaling(AbstractScaling):
    """The OCP microscaling format: blocks of 32 along the contraction, scales of E8M0 (powers of two).

    `scale = 2**ceil(log2(amax / max))`. The OCP document rounds down and lets the largest elements of a block
    saturate; rounding up, as TransformerEngine and torchao's RCEIL do, never clips.

    Args:
        square: Blocks of 32x32, the same for both products that use an operand.
        padding: Whether an axis may end in the middle of a block, as if it went on with zeros.

    Raises:
        ValueError: When used, if a block is cut by the edge and `padding` is False.

    References:
        OCP Microscaling Formats 1.0, section 6.3; TransformerEngine `util/ptx_arch_spec.cuh::float_to_e8m0`.
    """

    square: bool = False
    padding: bool = True

    units: ClassVar[MatrixUnits] = MX_UNITS
    gradient_format: ClassVar[Format] = E4M3

    @property
    def directional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Squares look the same from both sides."""
        return not self.square

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """Quantizes with the amax of each block of 32."""
        block = block_shape(x.shape, 32, use, square=self.square, padding=self.padding, scaling=self)
        exponent = e8m0_exponent(blockwise_amax(x, block) * np.float32(1.0 / use.format.max)).astype(jnp.int32)
        # 2**-127 is subnormal, and flushed to zero by some devices: divide by 2**-126 and double.
        x = lax.div(x.astype(jnp.float32), expand(power_of_two(jnp.maximum(exponent, 1)), x.shape, block))
        double = jnp.where(exponent == 0, jnp.float32(2.0), jnp.float32(1.0))
        data = use.cast(lax.mul(x, expand(double, x.shape, block)))
        return QuantizedArray(data, power_of_two(exponent), block, scale_bits=1)
