"""The product of two arrays with a scale per block, which do not factor out of the sum."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from ._dimension_numbers import DotDimensions
from ._quantized_array import QuantizedArray, expand


# What hardware and XLA's scaled dot take: one E8M0 scale for 32 elements along the contraction.
_BLOCK = 32


def scaled_product(
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

    return lax.platform_dependent(a, b, cpu=dequantized, default=native)


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
