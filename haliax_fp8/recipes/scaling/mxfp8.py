"""MXFP8: blocks of 32 with scales that are powers of two, as the OCP microscaling formats have it."""

import dataclasses
import math
from typing import ClassVar, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from ..._numerics.quantized_array import QuantizedArray, expand
from ..._numerics.stored_array import power_of_two
from ...devices.device import MX_UNITS, MatrixUnits
from ...formats import E4M3, Format
from .base import AbstractScaling, CastCost, OperandUse
from .block import block_shape, blockwise_amax, e8m0_exponent


ScaleRounding = Literal["up", "nearest", "down"]


@dataclasses.dataclass(frozen=True)
class MXFP8Scaling(AbstractScaling):
    """The OCP microscaling format: blocks of 32 along the contraction, scales of E8M0 (powers of two).

    By default `scale = 2**ceil(log2(amax / max))`, which never clips. Quantizers differ here: where a model is
    trained for one of them, take its rule. For weights in E2M1, many blocks get another scale from another rule.

    Args:
        square: Blocks of 32x32, the same for both products that use an operand.
        padding: Whether the last block of an axis may be partial, as if padded with zeros.
        scale_rounding: How a scale becomes a power of two. `"up"`: as TransformerEngine and torchao's RCEIL do.
            `"down"`: as in the OCP document, `2**(floor(log2(amax)) - floor(log2(max)))`, which clips all that is above
            the format's maximum after scaling, in E2M1 from 6 to 8. `"nearest"`: as compressed-tensors does, which
            rounds the amax to one bit of mantissa first, halves up; in E2M1 it clips from 6 to 7.

    Raises:
        ValueError: If `scale_rounding` is none of these; when used, if the last block is partial and `padding` is
            False.

    References:
        OCP Microscaling Formats 1.0, section 6.3; TransformerEngine `util/ptx_arch_spec.cuh::float_to_e8m0`;
        compressed-tensors `quantization/utils/mxfp_utils.py::generate_mx_scales`.

    Example:
        >>> x = jnp.array([[6.5] + 31 * [1.0]])
        >>> for rule in ("up", "nearest", "down"):
        ...     q = MXFP8Scaling(scale_rounding=rule).quantize(x, OperandUse(E2M1, contracted=(1,)))
        ...     print(rule, q.scale[0, 0], q.dequantize()[0, 0])
        up 2.0 6.0
        nearest 1.0 6.0
        down 1.0 6.0
    """

    square: bool = False
    padding: bool = True
    scale_rounding: ScaleRounding = "up"

    units: ClassVar[MatrixUnits] = MX_UNITS
    gradient_format: ClassVar[Format] = E4M3
    # An amax and two scales for each block of 32, in float32 and in E8M0: 16 bytes more. And for every second product
    # a transposition in bytes.
    cast_cost: ClassVar[CastCost] = CastCost(bytes=6.5, launches=4)

    def __post_init__(self) -> None:
        if self.scale_rounding not in get_args(ScaleRounding):
            raise ValueError(
                f"scale_rounding={self.scale_rounding!r} of MXFP8Scaling is unknown; use 'up', which clips nothing, "
                "'nearest' as compressed-tensors, or 'down' as in the OCP document"
            )

    @property
    def per_axis(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Squares look the same from both sides."""
        return not self.square

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """Quantizes with the amax of each block of 32."""
        block = block_shape(x.shape, 32, use, square=self.square, padding=self.padding, scaling=self)
        amax = blockwise_amax(use.counted(x), block)
        exponent = self.exponent(amax, use.format)
        # Above 2**-127, which is subnormal, and flushed to zero by some devices; a block of zeros may have it.
        normal = jnp.maximum(exponent, 1)
        data = use.cast(lax.div(x.astype(jnp.float32), expand(power_of_two(normal), x.shape, block)))
        scale = power_of_two(jnp.where(amax == 0.0, 0, normal))
        return QuantizedArray(data, scale, block, scale_bits=1)

    def exponent(self, amax: Float32[Array, "*blocks"], format: Format) -> Int32[Array, "*blocks"]:
        """The biased exponent of the scale; 0 or less where the scale would be too small."""
        if self.scale_rounding == "up":
            return e8m0_exponent(amax * np.float32(1.0 / format.max)).astype(jnp.int32)
        # Half of the mantissa's first bit carries into the exponent from 1.75 on.
        half = np.uint32(1 << 21) if self.scale_rounding == "nearest" else np.uint32(0)
        rounded = (lax.bitcast_convert_type(amax, jnp.uint32) + half) >> np.uint32(23)
        exponent = rounded.astype(jnp.int32) - np.int32(math.floor(math.log2(format.max)))
        return jnp.where(jnp.isnan(amax), np.int32(255), exponent)
