"""High precision: an operand that is not quantized, so that its product runs in the layer's own dtype."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._numerics.quantized_array import QuantizedArray
from .base import AbstractScaling, OperandUse


@dataclasses.dataclass(frozen=True)
class HighPrecision(AbstractScaling):
    """Does not quantize the operand. Use it for both operands of a product, or for neither."""

    quantizes: ClassVar[bool] = False
    per_axis: ClassVar[bool] = True

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """The operand itself, with scales of 1."""
        return unscaled(x, use.ensemble)


def unscaled(x: Float[Array, "*shape"], ensemble: int) -> QuantizedArray:
    """An array with scales of 1, one for each member."""
    scale = jnp.ones((*x.shape[:ensemble], *(1,) * (x.ndim - ensemble)), jnp.float32)
    return QuantizedArray(x, scale, scale_bits=1)
