"""Where scales are applied: to the result of a product, or inside it where they do not factor out of the sum."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .._jax.mesh_axes import as_varying
from .._jax.xla import on_cpu, on_cuda
from .._numerics.quantized_array import QuantizedArray, expand
from .dimensions import DotDimensions


def scaled_dot(
    a: QuantizedArray,
    b: QuantizedArray,
    dims: DotDimensions,
    precision: lax.PrecisionLike,
    dtype: np.dtype,
    scale: Float32[Array, ""] | None,
) -> Array:
    """`dot(a, b)` in a dtype; scales that are constant along what is contracted factor out of the sum.

    Args:
        a: The first operand of `lax.dot_general`.
        b: The second.
        dims: What is contracted.
        precision: Of the product.
        dtype: Of the result.
        scale: The product of both scales, if that is computed already.
    """

    def dot(x: Array, y: Array, dtype: np.dtype) -> Array:
        return lax.dot_general(x, y, dims.numbers, precision=precision, preferred_element_type=dtype)

    if not (_factors_out(a, dims.lhs_contract) and _factors_out(b, dims.rhs_contract)):
        return lax.convert_element_type(block_scaled_dot(a, b, dims, precision), dtype)
    if a.scale.size == b.scale.size == 1:
        if scale is None:
            scale = lax.mul(_scalar(a.scale), _scalar(b.scale))
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

    exact = a.scale_bits + b.scale_bits <= _BFLOAT16_BITS
    if dtype != jnp.bfloat16 or not exact:
        return in_float32(a.data, b.data, scale)
    return on_cuda(in_dtype, in_float32, a.data, b.data, scale)


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


# What hardware and XLA's scaled dot take: one E8M0 scale for 32 elements along the contraction.
_BLOCK = 32


def block_scaled_dot(
    a: QuantizedArray, b: QuantizedArray, dimensions: DotDimensions, precision: lax.PrecisionLike
) -> Float32[Array, "..."]:
    """`dot(a.data * a.scale, b.data * b.scale)`, accumulated in float32.

    If all scales are powers of two and belong to blocks of 32 along the contraction, or of a multiple of 32, an
    accelerator multiplies the FP8 data directly (`jax.lax.scaled_dot`): in hardware on Blackwell, in one fused
    kernel that widens in registers on Hopper. Anything else, and everything on a CPU, multiplies dequantized operands.

    Args:
        a: The first operand.
        b: The second operand, its contracted axes paired with those of the first.
        dimensions: What is contracted.
        precision: Of the product of dequantized operands.

    Returns:
        The product, axes in the order of `lax.dot_general`.
    """

    def dequantized(a: QuantizedArray, b: QuantizedArray) -> Array:
        return lax.dot_general(
            a.dequantize_rotated(),
            b.dequantize_rotated(),
            dimensions.numbers,
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    pairs = sorted(zip(dimensions.lhs_contract, dimensions.rhs_contract, strict=True))
    if not (pairs and _in_blocks_of_32(a, pairs[-1][0]) and _in_blocks_of_32(b, pairs[-1][1])):
        return dequantized(a, b)
    in_order = dataclasses.replace(
        dimensions, lhs_contract=tuple(axis for axis, _ in pairs), rhs_contract=tuple(axis for _, axis in pairs)
    )

    def native(a: QuantizedArray, b: QuantizedArray) -> Array:
        return native_product(a, b, in_order)

    return on_cpu(dequantized, native, a, b)


def native_product(a: QuantizedArray, b: QuantizedArray, dimensions: DotDimensions) -> Float32[Array, "..."]:
    """The product of FP8 data and E8M0 scales, by `jax.lax.scaled_dot`.

    Args:
        a: The first operand. Its scales are powers of two for blocks whose size along the last contracted axis is a
            multiple of 32.
        b: The second operand, likewise.
        dimensions: What is contracted; blocks run along the last pair of axes.

    Returns:
        The product, axes in the order of `lax.dot_general`.
    """
    lhs, lhs_scale = _in_rows(a, dimensions.lhs_batch, dimensions.lhs_free, dimensions.lhs_contract)
    rhs, rhs_scale = _in_rows(b, dimensions.rhs_batch, dimensions.rhs_free, dimensions.rhs_contract)
    out = lax.scaled_dot(
        lhs,
        rhs,
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale,
        dimension_numbers=(((2,), (2,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )
    # XLA's scaled product does not say over which axes of a `shard_map` its result differs.
    out = as_varying(out, jax.tree.leaves((a, b)))
    return out.reshape(dimensions.out_shape(a.data.shape, b.data.shape))


def _in_blocks_of_32(x: QuantizedArray, contracted: int) -> bool:
    # An operand without elements has no blocks to give to the hardware.
    return x.scale_bits == 1 and x.block is not None and x.block[contracted] % _BLOCK == 0 and x.data.size > 0


def _in_rows(
    x: QuantizedArray, batch: tuple[int, ...], free: tuple[int, ...], contracted: tuple[int, ...]
) -> tuple[Float[Array, "batch rows contracted"], Array]:
    """Data as rows along the contraction, padded with zeros to whole blocks; and the scale of each block of 32."""
    last, size = contracted[-1], x.data.shape[contracted[-1]]
    padding = -size % _BLOCK
    data = jnp.pad(x.data, [(0, padding if axis == last else 0) for axis in range(x.data.ndim)])
    assert x.block is not None
    block = tuple(_BLOCK if axis == last else n for axis, n in enumerate(x.block))
    blocks = (size + padding) // _BLOCK
    exponent = exponent_of(x.scale)
    if x.block[last] != _BLOCK:
        exponent = jnp.repeat(exponent, x.block[last] // _BLOCK, axis=last)
        exponent = lax.slice_in_dim(exponent, 0, blocks, axis=last)
    whole = tuple(blocks if axis == last else n for axis, n in enumerate(x.data.shape))
    exponent = expand(exponent, whole, tuple(1 if axis == last else n for axis, n in enumerate(block)))
    order = (*batch, *free, *contracted)
    rows = lambda x: lax.transpose(x, order).reshape(
        *(math.prod(x.shape[axis] for axis in axes) for axes in (batch, free, contracted))
    )
    return rows(data), lax.bitcast_convert_type(rows(exponent), jnp.float8_e8m0fnu)


def exponent_of(scale: Float32[Array, "*blocks"]) -> Array:
    """The biased exponent of powers of two, which is their E8M0; 255 for NaN."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32) >> np.uint32(23)
    return bits.astype(jnp.uint8)
