"""`dot(a, b)` of two quantized operands: by one scale, by scales of rows, or by those of blocks.

XLA drops a cast to FP8 that is followed by a cast back, and with it the rounding. So where it widens the operands of a
product, it would multiply numbers that were never rounded, unless something stands between the two casts. It widens all
operands on a device without FP8 units; on an NVIDIA GPU with FP8 units those of products with a vector, and of matrices
so small that it multiplies them in a loop.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .._jax.mesh_axes import automatic_axes
from .._jax.still_rounded import still_rounded, still_rounded_in_parts
from .._numerics.formats import E5M2, FORMATS
from .._numerics.quantized_array import QuantizedArray, factors_out
from ..devices.device import Device
from .block_product import block_scaled_dot
from .dimensions import DotDimensions
from .divided_sum import scaled_by_each_device
from .scaled_product import scaled_product
from .scales import FLOAT32, rows_scaled, scalar


# The default of `xla_gpu_gemm_rewrite_size_threshold`. XLA multiplies smaller matrices in float16, in which the product
# of two E4M3 numbers may be infinite.
_SMALLEST_GEMM = 100


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
    a, b = _rounded_if_widened(a, b, dims)
    if a.scale.size == b.scale.size == 1:
        if scale is None:
            scale = lax.mul(scalar(a.scale), scalar(b.scale))
        if in_a_sum and automatic_axes():
            return scaled_by_each_device(a, b, scale, dims, precision, dtype)
        return scaled_product(a, b, scale, dims, precision, dtype)
    out = lax.dot_general(a.data, b.data, dims.numbers, precision=precision, preferred_element_type=FLOAT32)
    return rows_scaled(out, a, b, dims, dtype)


def _rounded_if_widened(
    a: QuantizedArray, b: QuantizedArray, dims: DotDimensions
) -> tuple[QuantizedArray, QuantizedArray]:
    """Two operands, whose data stay rounded if XLA widens them on the default device.

    Args:
        a: The first operand of `lax.dot_general`.
        b: The second.
        dims: What is contracted.
    """
    device = Device.default()
    if device.emulates:  # XLA's compiler for CPUs keeps both casts.
        return a, b
    sides = m, n, k = [_size(x, axes) for x, axes in ((a, dims.lhs_free), (b, dims.rhs_free), (a, dims.lhs_contract))]
    if _widens(device, a, b):
        data = [still_rounded(x.data) for x in (a, b)]
    else:
        data = [still_rounded_in_parts(x.data, smallest=min(sides)) for x in (a, b)]
    if device.platform == "cuda" and (m + n) * k < _SMALLEST_GEMM:
        data = [lax.convert_element_type(still_rounded(x), jnp.float32) for x in data]
    return dataclasses.replace(a, data=data[0]), dataclasses.replace(b, data=data[1])


def _widens(device: Device, a: QuantizedArray, b: QuantizedArray) -> bool:
    """Whether an accelerator has no units for the data of two operands: for their formats, or for two in E5M2."""
    formats = [FORMATS[x.data.dtype] for x in (a, b) if x.data.dtype in FORMATS]
    return formats == [E5M2, E5M2] or any(device.lacks(format) is not None for format in formats)


def _size(x: QuantizedArray, axes: tuple[int, ...]) -> int:
    """The number of elements of some axes; of an unknown size, which an export may have, the smallest."""
    return math.prod([size if isinstance(size := x.data.shape[axis], int) else 1 for axis in axes])
