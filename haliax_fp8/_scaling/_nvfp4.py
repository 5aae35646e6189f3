"""NVFP4: 4-bit data in blocks of 16, with a scale of 8 bits for each block and one of 32 bits for the tensor."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .._device import NO_UNITS, MatrixUnits
from .._formats import E2M1, E4M3, Format, saturating_cast
from .._quantized_array import QuantizedArray, expand
from ._amax import amax_over
from ._base import AbstractScaling, OperandUse
from ._blocks import block_shape, blockwise_amax


_LARGEST = np.finfo(np.float32).max


@dataclasses.dataclass(frozen=True)
class NVFP4Scaling(AbstractScaling):
    """Blocks of 16 along the contraction, with scales in E4M3 that one float32 scale brings into E4M3's range.

    `tensor_scale = amax(tensor) / (448 * 6)`, `block_scale = E4M3(amax(block) / 6 / tensor_scale)`, and
    `scale = block_scale * tensor_scale`; 6 is the maximum of E2M1. An operand has 4.5 bits per element.

    Args:
        square: Blocks of 16x16, the same for both products that use an operand; kernels take them.
        padding: Whether an axis may end in the middle of a block, as if it went on with zeros.

    Raises:
        ValueError: When used, if a block is cut by the edge and `padding` is False.

    References:
        NVIDIA, Pretraining Large Language Models with NVFP4 (arXiv:2509.25149); TransformerEngine's
        `NVFP4BlockScaling`.
    """

    square: bool = False
    padding: bool = True

    units: ClassVar[MatrixUnits] = NO_UNITS
    gradient_format: ClassVar[Format] = E2M1

    @property
    def directional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Squares look the same from both sides."""
        return not self.square

    @property
    def for_kernel(self) -> AbstractScaling:
        """Squares."""
        return dataclasses.replace(self, square=True)

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """Quantizes with the amax of each block and that of the tensor."""
        block = block_shape(x.shape, 16, use, square=self.square, padding=self.padding, scaling=self)
        limit = np.float32(use.format.max)
        x = lax.convert_element_type(x, jnp.float32)
        amax = amax_over(x, tuple(range(use.ensemble, x.ndim)))
        multiplier = jnp.minimum(np.float32(E4M3.max * use.format.max) / amax, _LARGEST)
        multiplier = jnp.where((amax == 0.0) | (multiplier == 0.0), np.float32(1.0), multiplier)
        of_block = saturating_cast(blockwise_amax(x, block) * (multiplier / limit), E4M3)
        # The barrier keeps XLA from taking the two casts for nothing.
        of_block = lax.optimization_barrier(of_block).astype(jnp.float32)
        scale = of_block * (np.float32(1.0) / multiplier)
        inverse = jnp.minimum(np.float32(1.0) / scale, _LARGEST)
        return QuantizedArray(use.cast(x * expand(inverse, x.shape, block)), scale, block)
