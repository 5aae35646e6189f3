"""Where scales are applied: to the result of a product, or inside it where they do not factor out of the sum."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from .._jax.mesh_axes import automatic_axes
from .._jax.xla import on_cuda
from .._numerics.quantized_array import QuantizedArray, expand
from .block_product import block_scaled_dot
from .dimensions import DotDimensions
from .divided_sum import scaled_by_each_device


def scaled_dot(
    a: QuantizedArray,
    b: QuantizedArray,
    dims: DotDimensions,
    precision: lax.PrecisionLike,
    dtype: np.dtype,
    scale: Float32[Array, ""] | None,
    *,
    in_a_sum: bool = False,
) -> Array:
    """`dot(a, b)` in a dtype; scales that are constant along what is contracted factor out of the sum.

    Args:
        a: The first operand of `lax.dot_general`.
        b: The second.
        dims: What is contracted.
        precision: Of the product.
        dtype: Of the result.
        scale: The product of both scales, if that is computed already.
        in_a_sum: Whether the result may be added to other products, as gradients of a tensor that several layers read.
    """

    def dot(x: Array, y: Array, dtype: np.dtype) -> Array:
        return lax.dot_general(x, y, dims.numbers, precision=precision, preferred_element_type=dtype)

    if not (_factors_out(a, dims.lhs_contract) and _factors_out(b, dims.rhs_contract)):
        return block_scaled_dot(a, b, dims, precision, dtype)
    if a.scale.size == b.scale.size == 1:
        if scale is None:
            scale = lax.mul(_scalar(a.scale), _scalar(b.scale))
        if in_a_sum and automatic_axes():
            exact = _is_exact(a, b, dtype)
            return scaled_by_each_device(a.data, b.data, scale, dims, precision, dtype, exact=exact)
        return _one_scale_dot(dot, a, b, scale, dtype)
    return _rows_scaled(dot(a.data, b.data, _FLOAT32), a, b, dims, dtype)


def members_dot(
    dot: Callable[[Array, Array], Array],
    a: QuantizedArray,
    b: QuantizedArray,
    batch: int,
    dtype: np.dtype,
    scale: Float32[Array, "..."] | None,
) -> Array:
    """`dot(a, b)` in a dtype, where members of leading axes have a scale each. Other scales do not factor out.

    Args:
        dot: The product of two arrays, in float32.
        a: Its first operand.
        b: Its second.
        batch: How many leading axes number members.
        dtype: Of the result.
        scale: The product of both scales, if that is computed already.
    """
    if any(count > 1 for x in (a, b) for count in x.scale.shape[batch:]):
        return dot(a.dequantize(), b.dequantize()).astype(dtype)
    out = dot(a.data, b.data)
    if scale is None:
        of_a, of_b = (x.scale.reshape(x.scale.shape[:batch]) for x in (a, b))
        scale = of_a * of_b
    return (out * scale.reshape(scale.shape + (1,) * (out.ndim - scale.ndim))).astype(dtype)


_FLOAT32 = np.dtype(np.float32)


# The significant bits of a bfloat16, the leading one included.
_BFLOAT16_BITS = 8


def _one_scale_dot(
    dot: Callable[..., Array], a: QuantizedArray, b: QuantizedArray, scale: Float32[Array, ""], dtype: np.dtype
) -> Array:
    """`dot(a.data, b.data) * scale` in a dtype.

    On NVIDIA GPUs a product in bfloat16 is the product of the FP8 data, in bfloat16, times the scale. cuBLASLt computes
    both at once and rounds once. Triton's kernels, which XLA prefers by default, read FP8 only if the FP8 data are
    multiplied directly: for dequantized operands they read bfloat16. And whatever XLA puts between product and scale (a
    sum over devices, a slice of a padded product), the scale stays exact, because bfloat16 can represent it.

    Elsewhere the product is stored in float32, multiplied, and rounded.

    Args:
        dot: The product of two arrays in a dtype.
        a: The first operand.
        b: The second.
        scale: The product of their scales.
        dtype: Of the result.
    """

    def in_float32(a: Array, b: Array, scale: Array) -> Array:
        return lax.convert_element_type(lax.mul(dot(a, b, _FLOAT32), scale), dtype)

    def in_dtype(a: Array, b: Array, scale: Array) -> Array:
        return lax.mul(dot(a, b, dtype), lax.convert_element_type(scale, dtype))

    if not _is_exact(a, b, dtype):
        return in_float32(a.data, b.data, scale)
    return on_cuda(in_dtype, in_float32, a.data, b.data, scale)


def _is_exact(a: QuantizedArray, b: QuantizedArray, dtype: np.dtype) -> bool:
    """Whether a product's dtype is bfloat16, and that holds the product of the operands' scales."""
    return dtype == jnp.bfloat16 and a.scale_bits + b.scale_bits <= _BFLOAT16_BITS


def _rows_scaled(
    out: Float32[Array, "..."], a: QuantizedArray, b: QuantizedArray, dims: DotDimensions, dtype: np.dtype
) -> Array:
    """A product times the scales of its operands' rows."""
    batch, kept_a, kept_b = len(dims.lhs_batch), len(dims.lhs_free), len(dims.rhs_free)
    of_a, of_b = (x.scale if x.scale.ndim else lax.reshape(x.scale, (1,) * x.data.ndim) for x in (a, b))
    of_a = lax.transpose(of_a, dims.lhs_batch + dims.lhs_free + dims.lhs_contract)
    of_b = lax.transpose(of_b, dims.rhs_batch + dims.rhs_free + dims.rhs_contract)
    of_a = lax.reshape(of_a, of_a.shape[: batch + kept_a] + (1,) * kept_b)
    of_b = lax.reshape(of_b, of_b.shape[:batch] + (1,) * kept_a + of_b.shape[batch : batch + kept_b])
    out = lax.mul(out, lax.mul(expand(of_a, out.shape), expand(of_b, out.shape)))
    return lax.convert_element_type(out, dtype)


def _factors_out(x: QuantizedArray, contract: tuple[int, ...]) -> bool:
    """Whether one scale serves everything that is summed, and blocks are whole axes or single elements."""
    if x.scale.ndim == 0:
        return True
    whole = all(count in (1, size) for count, size in zip(x.scale.shape, x.data.shape, strict=True))
    return whole and all(x.scale.shape[axis] == 1 for axis in contract)


def _scalar(x: Array) -> Array:
    return x if x.ndim == 0 else lax.reshape(x, ())
