"""Whether the units that a scaling names take the scales that it makes."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._numerics.quantized_array import QuantizedArray, factors_out, in_mx_blocks
from ..devices.units import FP8_UNITS, MX_UNITS
from .recipe import Quantization
from .scaling import OperandUse


# More than any block has: one as large as an axis looks like a row.
_SIDE = 2**16


@functools.cache
def misfit(quantization: Quantization) -> str | None:
    """Why products dequantize an operand although its scaling names units; None if they do not, or it names none.

    Products look at the scales, not at `units`. So does this, on an abstract operand.

    Args:
        quantization: How the operand is quantized.
    """
    scaling = quantization.scaling
    if scaling.units not in (FP8_UNITS, MX_UNITS):
        return None

    def quantized(x: Float[Array, "rows columns"]) -> QuantizedArray:
        key = jax.random.key(0) if quantization.rounding.needs_key else None
        stored = jnp.float32(1.0) if scaling.stores_scale else None
        return scaling.quantize(
            x, OperandUse(quantization.format, (1,), stored=stored, rounding=quantization.rounding, key=key)
        )

    made = jax.eval_shape(quantized, jax.ShapeDtypeStruct((_SIDE, _SIDE), jnp.float32))
    if scaling.units == FP8_UNITS and not factors_out(made, (1,)):
        found = f"{scaling} makes scales that change along the sum, but FP8 units only take scales of tensors or rows"
    elif scaling.units == MX_UNITS and not in_mx_blocks(made, 1):
        found = f"{scaling} makes scales that are not powers of two for whole blocks of 32, as MXFP8 units need"
    else:
        return None
    return f"{found}: operands are dequantized first"
