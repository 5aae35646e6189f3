"""`dot(a, b)` of two quantized operands: by one scale, by scales of rows, or by those of blocks."""

import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .._jax.mesh_axes import automatic_axes
from .._numerics.quantized_array import QuantizedArray, factors_out
from .block_product import block_scaled_dot
from .dimensions import DotDimensions
from .divided_sum import scaled_by_each_device
from .scaled_product import scaled_product
from .scales import FLOAT32, rows_scaled, scalar


def scaled_dot(
    a: QuantizedArray,
    b: QuantizedArray,
    dims: DotDimensions,
    precision: lax.PrecisionLike,
    dtype: np.dtype,
    scale: Float32[Array, ""] | None,
    *,
    in_a_sum: bool = False,
) -> Float[Array, "..."]:
    """`dot(a, b)` in a dtype; scales that are constant along what is contracted factor out of the sum.

    Args:
        a: The first operand of `lax.dot_general`.
        b: The second.
        dims: What is contracted.
        precision: The precision of the product.
        dtype: The dtype of the result.
        scale: The product of both scales, if that is computed already.
        in_a_sum: Whether the result may be added to other products, as gradients of a tensor that several layers read.
    """
    if not (factors_out(a, dims.lhs_contract) and factors_out(b, dims.rhs_contract)):
        return block_scaled_dot(a, b, dims, precision, dtype)
    if a.scale.size == b.scale.size == 1:
        if scale is None:
            scale = lax.mul(scalar(a.scale), scalar(b.scale))
        if in_a_sum and automatic_axes():
            return scaled_by_each_device(a, b, scale, dims, precision, dtype)
        return scaled_product(a, b, scale, dims, precision, dtype)
    out = lax.dot_general(a.data, b.data, dims.numbers, precision=precision, preferred_element_type=FLOAT32)
    return rows_scaled(out, a, b, dims, dtype)
