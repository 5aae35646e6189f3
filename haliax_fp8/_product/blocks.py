"""Products of operands with a scale for each block of the sum, by what hardware has for them, on one device or many."""

import dataclasses
import enum
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, BFloat16, Float, UInt8

from .._jax.custom_partitioning import devices_of, lower_after_partitioning, lower_with_devices
from .._jax.meshes import as_varying, aval_of_result
from .._jax.primitives import compile_alone, lower_by_platform, to_front
from .._jax.xla import keep_cast, on_cpu
from .._numerics.quantized_array import MX_BLOCK, QuantizedArray, expand, in_mx_blocks
from ..devices.device import Device
from ..devices.units import FP8_UNITS, MX_UNITS
from .dimensions import DotDimensions
from .partition import DividedProduct


def block_scaled_dot(
    a: QuantizedArray, b: QuantizedArray, dimensions: DotDimensions, precision: lax.PrecisionLike, dtype: np.dtype
) -> Float[Array, "..."]:
    """`dot(a.data * a.scale, b.data * b.scale)`, accumulated in float32.

    If all scales are powers of two and belong to blocks of 32 along the contraction, or of a multiple of 32, an
    accelerator multiplies the FP8 data directly (`jax.lax.scaled_dot`). Blackwell does so in hardware, Hopper in one
    Triton kernel that widens in registers. Anything else, and everything on a CPU, multiplies dequantized operands.

    Args:
        a: The first operand.
        b: The second operand, its contracted axes paired with those of the first.
        dimensions: What is contracted.
        precision: The precision of the product of dequantized operands.
        dtype: The dtype of the result.

    Returns:
        The product, axes in the order of `lax.dot_general`.
    """

    def dequantized(a: QuantizedArray, b: QuantizedArray) -> Array:
        out = lax.dot_general(
            a.dequantize_rotated(),
            b.dequantize_rotated(),
            dimensions.numbers,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return lax.convert_element_type(out, dtype)

    pairs = sorted(zip(dimensions.lhs_contract, dimensions.rhs_contract, strict=True))
    if not (pairs and in_mx_blocks(a, pairs[-1][0]) and in_mx_blocks(b, pairs[-1][1])):
        return dequantized(a, b)
    in_order = dataclasses.replace(
        dimensions, lhs_contract=tuple(axis for axis, _ in pairs), rhs_contract=tuple(axis for _, axis in pairs)
    )

    def native(a: QuantizedArray, b: QuantizedArray) -> Array:
        return native_product(a, b, in_order, dtype)

    return on_cpu(dequantized, native, a, b)


def native_product(
    a: QuantizedArray, b: QuantizedArray, dimensions: DotDimensions, dtype: np.dtype
) -> Float[Array, "..."]:
    """The product of FP8 data and E8M0 scales, by `jax.lax.scaled_dot`.

    Args:
        a: The first operand. Its scales are powers of two for blocks whose size along the last contracted axis is a
            multiple of 32.
        b: The second operand, with scales of the same kind.
        dimensions: What is contracted; blocks run along the last pair of axes.
        dtype: The dtype of the result; also that in which devices add up parts of the sum.

    Returns:
        The product, axes in the order of `lax.dot_general`.
    """
    operands = *_in_blocks(a, dimensions.lhs_contract[-1]), *_in_blocks(b, dimensions.rhs_contract[-1])
    operands = [as_varying(x, operands) for x in operands]
    has_vector = any(
        math.prod([x.data.shape[axis] for axis in axes]) == 1
        for x, axes in ((a, dimensions.lhs_free), (b, dimensions.rhs_free))
    )
    means = _means(has_vector)
    return block_product_p.bind(*operands, dimensions=dimensions, dtype=np.dtype(dtype), means=means)


def _means(has_vector: bool) -> "tuple[Means, Means]":
    """What multiplies on an NVIDIA GPU, and on each of several, where emulation may have been requested.

    Args:
        has_vector: Whether an operand is a vector, for which XLA finds no GPU kernel.
    """
    device = Device.default()
    # A program that is made for GPUs elsewhere does not say which they are.
    is_known = device.platform == "cuda"
    # XLA ends the process where Triton has no FP8. cuDNN has products of blocks for Blackwell alone.
    has_fp8, has_blocks = (not is_known or device.lacks(units) is None for units in (FP8_UNITS, MX_UNITS))
    alone = Means.SCALED_DOT if has_fp8 and not has_vector else Means.DEQUANTIZED
    return alone, Means.SCALED_MATMUL if has_blocks else Means.DEQUANTIZED


def _in_blocks(x: QuantizedArray, last: int) -> tuple[Float[Array, "*shape"], UInt8[Array, "*blocks"]]:
    """Data padded with zeros to whole blocks along an axis; and the biased exponent of each block of 32."""
    size = x.data.shape[last]
    padding = -size % MX_BLOCK
    data = jnp.pad(x.data, [(0, padding if axis == last else 0) for axis in range(x.data.ndim)])
    assert x.block is not None
    block = tuple(MX_BLOCK if axis == last else n for axis, n in enumerate(x.block))
    blocks = (size + padding) // MX_BLOCK
    exponent = exponent_of(x.scale)
    if x.block[last] != MX_BLOCK:
        exponent = jnp.repeat(exponent, x.block[last] // MX_BLOCK, axis=last)
        exponent = lax.slice_in_dim(exponent, 0, blocks, axis=last)
    whole = tuple(blocks if axis == last else n for axis, n in enumerate(x.data.shape))
    return data, expand(exponent, whole, tuple(1 if axis == last else n for axis, n in enumerate(block)))


def exponent_of(scale: Array) -> UInt8[Array, "*blocks"]:
    """The biased exponent of powers of two, which is their E8M0; 255 for NaN."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32) >> np.uint32(23)
    return bits.astype(jnp.uint8)


# --- The primitive ----------------------------------------------------------------------------------------------------

block_product_p = Primitive("fp8_block_product")


class Means(enum.Enum):
    """What multiplies data and scales of blocks in XLA."""

    SCALED_DOT = "an operation that becomes one launch, which XLA has to find before it divides a program"
    SCALED_MATMUL = "a cuDNN kernel, on Blackwell"
    DEQUANTIZED = "a product of operands that other launches have widened"


def _block_product(
    a: Array, scale_a: Array, b: Array, scale_b: Array, *, dimensions: DotDimensions, dtype: np.dtype, means: Means
) -> Float[Array, "..."]:
    """The product on one device; scales are their biased exponents."""

    def rows(x: Array, batch: tuple[int, ...], free: tuple[int, ...], contracted: tuple[int, ...]) -> Array:
        return lax.transpose(x, (*batch, *free, *contracted)).reshape(
            *(math.prod(x.shape[axis] for axis in axes) for axes in (batch, free, contracted))
        )

    def data_and_scale(x: Array, scale: Array, *axes: tuple[int, ...]) -> tuple[Array, Array]:
        return rows(x, *axes), lax.bitcast_convert_type(rows(scale, *axes), jnp.float8_e8m0fnu)

    lhs, lhs_scale = data_and_scale(a, scale_a, dimensions.lhs_batch, dimensions.lhs_free, dimensions.lhs_contract)
    rhs, rhs_scale = data_and_scale(b, scale_b, dimensions.rhs_batch, dimensions.rhs_free, dimensions.rhs_contract)
    numbers = ((2,), (2,)), ((0,), (0,))
    match means:
        case Means.SCALED_MATMUL:
            out = jax.nn.scaled_matmul(lhs, rhs, lhs_scale, rhs_scale, preferred_element_type=dtype)
        case Means.SCALED_DOT:
            scales = {"lhs_scale": lhs_scale, "rhs_scale": rhs_scale}
            out = lax.scaled_dot(lhs, rhs, **scales, dimension_numbers=numbers, preferred_element_type=jnp.float32)
        case Means.DEQUANTIZED:
            both = _values(lhs, lhs_scale), _values(rhs, rhs_scale)
            out = lax.dot_general(*both, numbers, preferred_element_type=jnp.float32)
    return lax.convert_element_type(out.reshape(dimensions.out_shape(a.shape, b.shape)), dtype)


def _values(data: Array, scale: Array) -> BFloat16[Array, "batch rows contracted"]:
    """Data times scales, which bfloat16 holds."""
    blocks = lax.convert_element_type(keep_cast(data), jnp.float32).reshape(*scale.shape, MX_BLOCK)
    scaled = blocks * lax.convert_element_type(scale, jnp.float32)[..., None]
    return lax.convert_element_type(scaled.reshape(data.shape), jnp.bfloat16)


def _aval(a: Any, scale_a: Any, b: Any, scale_b: Any, *, dimensions: DotDimensions, dtype: np.dtype, means: Any) -> Any:
    del scale_a, scale_b, means
    return aval_of_result(a, dimensions.out_shape(a.shape, b.shape), dtype)


def _batched(args: Any, axes: Any, *, dimensions: DotDimensions, **params: Any) -> tuple[Array, int]:
    """The mapped axis is a batch axis of both operands."""
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    args = [to_front(x, axis, size, 0) for x, axis in zip(args, axes, strict=True)]
    dimensions, out_axis = dimensions.with_batch_axis()
    return block_product_p.bind(*args, dimensions=dimensions, **params), out_axis


def _lowered(
    context: Any,
    *operands: Any,
    dimensions: DotDimensions,
    dtype: np.dtype,
    means: tuple[Means, Means],
) -> Any:
    product = functools.partial(_block_product, dimensions=dimensions, dtype=dtype)
    blocks = context.avals_in[1].shape[dimensions.lhs_contract[-1]]
    divided = DividedProduct(dimensions, MX_BLOCK, blocks)
    return lower_after_partitioning(
        context,
        *operands,
        name=_NAME,
        function=functools.partial(product, means=means[0]),
        part=functools.partial(product, means=means[1]),
        rule=divided.rule,
        sizes=divided.named,
        partition=divided.partition,
        of_blocks=(1, 3),
        remedy="choose a recipe whose scales stay outside the sum, such as 'rowwise'",
    )


def _lowered_elsewhere(context: Any, *operands: Any, means: Any, **params: Any) -> Any:
    del means
    return _lowered(context, *operands, means=(Means.SCALED_DOT, Means.DEQUANTIZED), **params)


def _lowered_on_tpu(context: Any, *operands: Any, dimensions: DotDimensions, dtype: np.dtype, **params: Any) -> Any:
    if devices_of(context) == 1:
        return _lowered_elsewhere(context, *operands, dimensions=dimensions, dtype=dtype, **params)
    # The compiler widens the operands anyway. It divides a product of those, and not the scaled one.
    product = functools.partial(_block_product, dimensions=dimensions, dtype=dtype, means=Means.DEQUANTIZED)
    return mlir.lower_fun(product, multiple_results=False)(context, *operands)


def _lowered_on_rocm(context: Any, *operands: Any, **params: Any) -> Any:
    if devices_of(context) > 1:
        raise ValueError(
            f"{_NAME} cannot be divided over {devices_of(context)} AMD devices: XLA would dequantize the operands. "
            "Choose a recipe whose scales stay outside the sum, such as 'rowwise', or use one device"
        )
    return _lowered_elsewhere(context, *operands, **params)


_NAME = "a product with a scale for each block of 32 (recipes such as mxfp8 and deepseek)"

compile_alone(block_product_p)
block_product_p.def_abstract_eval(_aval)
lower_by_platform(block_product_p, _lowered_elsewhere, cuda=_lowered, rocm=_lowered_on_rocm, tpu=_lowered_on_tpu)
batching.primitive_batchers[block_product_p] = _batched
lower_with_devices(block_product_p)
