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
from jax.interpreters import mlir
from jaxtyping import Array, BFloat16, Float, UInt8

from .._jax.custom_partitioning import devices_of, has_its_part, lower_after_partitioning
from .._jax.meshes import as_varying, aval_of_result
from .._jax.primitives import define, mapped_in_front, mapped_size, to_front
from .._jax.scaled_matmul import scaled_matmul, swizzled_matmul
from .._jax.xla import keep_cast, on_cpu, transposed_in_bytes
from .._numerics.casts import saturating_cast
from .._numerics.quantized_array import MX_BLOCK, NV_BLOCK, QuantizedArray, expand, in_mx_blocks, in_nv_blocks
from ..devices.device import Device
from ..devices.units import FP4_UNITS, FP8_UNITS, MX_UNITS
from ..formats import E4M3
from .dimensions import DotDimensions
from .partition import PartitionedProduct
from .scaled_product import FLOAT32, rows_scaled


def block_scaled_dot(
    a: QuantizedArray, b: QuantizedArray, dimensions: DotDimensions, precision: lax.PrecisionLike, dtype: np.dtype
) -> Float[Array, "..."]:
    """`dot(a.data * a.scale, b.data * b.scale)`, accumulated in float32.

    If all scales are powers of two and belong to blocks of 32 along the contraction, or of a multiple of 32, an
    accelerator multiplies the FP8 data directly (`jax.lax.scaled_dot`). Blackwell does so in hardware, Hopper in one
    Triton kernel that widens in registers. Operands of NVFP4 are multiplied in FP4 where a device has such units; on
    other accelerators data and scales of blocks are multiplied to bfloat16, which holds them exactly, and the scales of
    tensors applied behind the product. Anything else, and everything on a CPU, multiplies dequantized operands.

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
        # Scales of tensors stay outside of the sum, as in hardware: sums of such small numbers hardly depend on their
        # order.
        left, right = (a, b) if blocks is not NV else (_without_tensor_scale(a), _without_tensor_scale(b))
        out = lax.dot_general(
            left.dequantize_rotated(),
            right.dequantize_rotated(),
            dimensions.numbers,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        if blocks is NV:
            return rows_scaled(out, _tensor_scale_alone(a), _tensor_scale_alone(b), dimensions, dtype)
        return lax.convert_element_type(out, dtype)

    pairs = sorted(zip(dimensions.lhs_contract, dimensions.rhs_contract, strict=True))
    blocks = _blocks_of(a, b, *pairs[-1]) if pairs else None
    if blocks is None:
        return dequantized(a, b)
    in_order = dataclasses.replace(
        dimensions, lhs_contract=tuple(axis for axis, _ in pairs), rhs_contract=tuple(axis for _, axis in pairs)
    )

    def native(a: QuantizedArray, b: QuantizedArray) -> Array:
        return native_product(a, b, in_order, dtype, blocks)

    return on_cpu(dequantized, native, a, b)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks that hardware multiplies.

    Args:
        size: How many elements along the sum share a scale.
        scale: The element type of the scales.
        data: The element type of the data; None for the one in which they are stored.
        multiple: What cuDNN's operands are padded to along the sum, so that each row begins at a multiple of 16 bytes.
    """

    size: int
    scale: np.dtype
    data: np.dtype | None
    multiple: int

    def scale_bits(self, x: QuantizedArray) -> UInt8[Array, "*blocks"]:
        """The bits of an operand's scales, without that of the tensor."""
        if x.tensor_scale is None:
            return exponent_of(x.scale)
        # Exact: the scale is a value of E4M3 times the tensor's.
        return lax.bitcast_convert_type(saturating_cast(x.scale / x.tensor_scale, E4M3), jnp.uint8)


MX = Blocks(MX_BLOCK, np.dtype(jnp.float8_e8m0fnu), None, 32)
NV = Blocks(NV_BLOCK, np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float4_e2m1fn), 32)


def _blocks_of(a: QuantizedArray, b: QuantizedArray, axis_of_a: int, axis_of_b: int) -> Blocks | None:
    """What kind of blocks two operands have along the last axes that are summed; None if hardware takes neither."""
    if in_mx_blocks(a, axis_of_a) and in_mx_blocks(b, axis_of_b):
        return MX
    return NV if in_nv_blocks(a, axis_of_a) and in_nv_blocks(b, axis_of_b) else None


def native_product(
    a: QuantizedArray, b: QuantizedArray, dimensions: DotDimensions, dtype: np.dtype, blocks: Blocks = MX
) -> Float[Array, "..."]:
    """The product of data and scales of blocks, by what hardware has for them.

    Args:
        a: The first operand. Its blocks run along the last contracted axis: for `MX`, scales are powers of two and the
            size is a multiple of 32; for `NV`, it has a scale of the tensor.
        b: The second operand, with scales of the same kind.
        dimensions: What is contracted; blocks run along the last pair of axes.
        dtype: The dtype of the result; also that in which devices add up parts of the sum.
        blocks: The kind of blocks.

    Returns:
        The product, axes in the order of `lax.dot_general`.
    """
    if a.tensor_scale is None or b.tensor_scale is None:
        return _bind(a, b, dimensions, dtype, blocks)
    if a.tensor_scale.size == b.tensor_scale.size == 1:
        scale = lax.reshape(a.tensor_scale, ()) * lax.reshape(b.tensor_scale, ())
        # The call takes it in the dtype of the result; a bfloat16 has 8 significant bits.
        is_exact = dtype == jnp.bfloat16 and a.tensor_scale_bits + b.tensor_scale_bits <= 8
        between = dtype if is_exact else FLOAT32
        return lax.convert_element_type(_bind(a, b, dimensions, between, blocks, scale.astype(between)), dtype)
    # Rows, or members of an ensemble, have scales of their own.
    out = _bind(a, b, dimensions, FLOAT32, blocks)
    return rows_scaled(out, _tensor_scale_alone(a), _tensor_scale_alone(b), dimensions, dtype)


def _tensor_scale_alone(x: QuantizedArray) -> QuantizedArray:
    assert x.tensor_scale is not None
    return QuantizedArray(x.data, x.tensor_scale)


def _without_tensor_scale(x: QuantizedArray) -> QuantizedArray:
    assert x.tensor_scale is not None
    # Exact: the scale is a value of E4M3 times the tensor's.
    scale = saturating_cast(x.scale / x.tensor_scale, E4M3).astype(jnp.float32)
    return dataclasses.replace(x, scale=scale, tensor_scale=None)


def _bind(
    a: QuantizedArray, b: QuantizedArray, dimensions: DotDimensions, dtype: np.dtype, blocks: Blocks, *scale: Array
) -> Float[Array, "..."]:
    """The primitive; `scale` is that of both tensors, if the product applies it."""
    operands = *in_blocks(a, dimensions.lhs_contract[-1], blocks), *in_blocks(b, dimensions.rhs_contract[-1], blocks)
    operands = [as_varying(x, (*operands, *scale)) for x in (*operands, *scale)]
    has_vector = any(
        math.prod([x.data.shape[axis] for axis in axes]) == 1
        for x, axes in ((a, dimensions.lhs_free), (b, dimensions.rhs_free))
    )
    implementations = _implementations(blocks, has_vector)
    params = {"dimensions": dimensions, "dtype": np.dtype(dtype), "implementations": implementations, "blocks": blocks}
    if a.swizzled is None or b.swizzled is None or not _is_plain(dimensions):
        return block_product_p.bind(*operands, **params)
    swizzled = [as_varying(x, operands) for x in (a.swizzled, b.swizzled)]
    return swizzled_product_p.bind(*swizzled, *operands, **params)


def _is_plain(dims: DotDimensions) -> bool:
    """Whether both operands are matrices whose summed axes are in the order in which they are quantized."""
    return not dims.lhs_batch and all(list(x) == sorted(x) for x in (dims.lhs_contract, dims.rhs_contract))


def _implementations(blocks: Blocks, has_vector: bool) -> "tuple[Implementation, Implementation]":
    """What multiplies on an NVIDIA GPU, and on each of several, where emulation may have been requested.

    Args:
        blocks: The kind of blocks.
        has_vector: Whether an operand is a vector, for which XLA's Triton has no kernel.
    """
    device = Device.default()
    # A program that is made for GPUs elsewhere does not say which they are.
    is_known = device.platform == "cuda"
    has_fp8, has_mx, has_fp4 = (not is_known or device.lacks(x) is None for x in (FP8_UNITS, MX_UNITS, FP4_UNITS))
    if blocks == NV:
        # Without such units XLA would expand the call to a product in float32.
        each = Implementation.SCALED_MATMUL if is_known and has_fp4 else Implementation.DEQUANTIZED
        return each, each
    # cuDNN has products of blocks for Blackwell alone. XLA ends the process where Triton has no FP8.
    if is_known and has_mx:
        return Implementation.SCALED_MATMUL, Implementation.SCALED_MATMUL
    alone = Implementation.SCALED_DOT if has_fp8 and not has_vector else Implementation.DEQUANTIZED
    return alone, Implementation.SCALED_MATMUL if has_mx else Implementation.DEQUANTIZED


def in_blocks(x: QuantizedArray, last: int, kind: Blocks) -> tuple[Float[Array, "*shape"], UInt8[Array, "*blocks"]]:
    """Data padded with zeros to whole blocks along an axis; and the bits of each block's scale."""
    size = x.data.shape[last]
    padding = -size % kind.size
    data = jnp.pad(x.data, [(0, padding if axis == last else 0) for axis in range(x.data.ndim)])
    assert x.block is not None
    block = tuple(kind.size if axis == last else n for axis, n in enumerate(x.block))
    blocks = (size + padding) // kind.size
    bits = kind.scale_bits(x)
    if x.block[last] != kind.size:
        bits = jnp.repeat(bits, x.block[last] // kind.size, axis=last)
        bits = lax.slice_in_dim(bits, 0, blocks, axis=last)
    whole = tuple(blocks if axis == last else n for axis, n in enumerate(x.data.shape))
    return data, expand(bits, whole, tuple(1 if axis == last else n for axis, n in enumerate(block)))


def exponent_of(scale: Array) -> UInt8[Array, "*blocks"]:
    """The biased exponent of powers of two, which is their E8M0; 255 for NaN."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32) >> np.uint32(23)
    return bits.astype(jnp.uint8)


# --- The primitive ----------------------------------------------------------------------------------------------------


class Implementation(enum.Enum):
    """What multiplies data and scales of blocks in XLA."""

    SCALED_DOT = "an operation that becomes one launch, which XLA has to find before it divides a program"
    SCALED_MATMUL = "a cuDNN kernel, on Blackwell"
    DEQUANTIZED = "a product of operands that other launches have widened"


def _block_product(
    a: Array,
    scale_a: Array,
    b: Array,
    scale_b: Array,
    *tensor_scale: Array,
    dimensions: DotDimensions,
    dtype: np.dtype,
    implementation: Implementation,
    blocks: Blocks,
) -> Float[Array, "..."]:
    """The product on one device; scales of blocks are their bits."""
    in_cudnn = implementation is Implementation.SCALED_MATMUL

    def rows(x: Array, batch: tuple[int, ...], free: tuple[int, ...], contracted: tuple[int, ...]) -> Array:
        return lax.transpose(x, (*batch, *free, *contracted)).reshape(
            *(math.prod(x.shape[axis] for axis in axes) for axes in (batch, free, contracted))
        )

    def data_and_scale(x: Array, scale: Array, *axes: tuple[int, ...]) -> tuple[Array, Array]:
        if in_cudnn and axes[2][-1] != x.ndim - 1:
            x = transposed_in_bytes(x)
        data, bits = rows(x, *axes), rows(scale, *axes)
        if in_cudnn:
            padding = -data.shape[2] % blocks.multiple
            data = lax.pad(data, np.asarray(0.0, data.dtype), [(0, 0, 0), (0, 0, 0), (0, padding, 0)])
            bits = lax.pad(bits, np.uint8(0), [(0, 0, 0), (0, 0, 0), (0, padding // blocks.size, 0)])
            data = data if blocks.data is None else lax.convert_element_type(data, blocks.data)
        return data, lax.bitcast_convert_type(bits, blocks.scale)

    lhs, lhs_scale = data_and_scale(a, scale_a, dimensions.lhs_batch, dimensions.lhs_free, dimensions.lhs_contract)
    rhs, rhs_scale = data_and_scale(b, scale_b, dimensions.rhs_batch, dimensions.rhs_free, dimensions.rhs_contract)
    numbers = ((2,), (2,)), ((0,), (0,))
    match implementation:
        case Implementation.SCALED_MATMUL if tensor_scale:
            out = scaled_matmul(lhs, rhs, lhs_scale, rhs_scale, *tensor_scale)
            return out.reshape(dimensions.out_shape(a.shape, b.shape))
        case Implementation.SCALED_MATMUL:
            out = jax.nn.scaled_matmul(lhs, rhs, lhs_scale, rhs_scale, preferred_element_type=dtype)
        case Implementation.SCALED_DOT:
            scales = {"lhs_scale": lhs_scale, "rhs_scale": rhs_scale}
            out = lax.scaled_dot(lhs, rhs, **scales, dimension_numbers=numbers, preferred_element_type=jnp.float32)
        case Implementation.DEQUANTIZED:
            both = _values(lhs, lhs_scale, blocks.size), _values(rhs, rhs_scale, blocks.size)
            out = lax.dot_general(*both, numbers, preferred_element_type=jnp.float32)
    if tensor_scale:
        out = out * lax.convert_element_type(tensor_scale[0], jnp.float32)
    return lax.convert_element_type(out.reshape(dimensions.out_shape(a.shape, b.shape)), dtype)


def _values(data: Array, scale: Array, size: int) -> BFloat16[Array, "batch rows contracted"]:
    """Data times scales of blocks, which bfloat16 holds: powers of two, or E2M1 times E4M3."""
    blocks = lax.convert_element_type(keep_cast(data), jnp.float32).reshape(*scale.shape, size)
    scaled = blocks * lax.convert_element_type(scale, jnp.float32)[..., None]
    return lax.convert_element_type(scaled.reshape(data.shape), jnp.bfloat16)


def _aval(a: Any, scale_a: Any, b: Any, *scales: Any, dimensions: DotDimensions, dtype: np.dtype, **params: Any) -> Any:
    del scale_a, scales, params
    return aval_of_result(a, dimensions.out_shape(a.shape, b.shape), dtype)


def _batched(args: Any, axes: Any, *, dimensions: DotDimensions, **params: Any) -> tuple[Array, int]:
    """The mapped axis is a batch axis of both operands."""
    if len(args) > 4:
        # Each example may have a scale: they are applied behind the product.
        scale = to_front(args[4], axes[4], mapped_size(args, axes), 0)
        dtype = params.pop("dtype")
        out, axis = _batched(args[:4], axes[:4], dimensions=dimensions, dtype=FLOAT32, **params)
        scale = lax.expand_dims(scale.astype(jnp.float32), [i for i in range(out.ndim) if i != axis])
        return (out * scale).astype(dtype), axis
    dimensions, out_axis = dimensions.with_batch_axis()
    return block_product_p.bind(*mapped_in_front(args, axes), dimensions=dimensions, **params), out_axis


def _lowered(
    context: Any,
    *operands: Any,
    dimensions: DotDimensions,
    dtype: np.dtype,
    implementations: tuple[Implementation, Implementation],
    blocks: Blocks,
) -> Any:
    product = functools.partial(_block_product, dimensions=dimensions, blocks=blocks)
    if blocks == NV and implementations[1] is Implementation.DEQUANTIZED:
        # XLA divides a product of widened operands.
        product = functools.partial(product, dtype=dtype, implementation=implementations[1])
        return mlir.lower_fun(product, multiple_results=False)(context, *operands)
    if len(operands) > 4 and devices_of(context) > 1:

        def scaled_behind(*arrays: Array) -> Array:
            params = {"dimensions": dimensions, "dtype": FLOAT32, "implementations": implementations, "blocks": blocks}
            out = block_product_p.bind(*arrays[:4], **params)
            return lax.convert_element_type(out * lax.convert_element_type(arrays[4], jnp.float32), dtype)

        return mlir.lower_fun(scaled_behind, multiple_results=False)(context, *operands)
    product = functools.partial(product, dtype=dtype)
    count = context.avals_in[1].shape[dimensions.lhs_contract[-1]]
    partitioned = PartitionedProduct(dimensions, blocks.size, count)
    return lower_after_partitioning(
        context,
        *operands,
        name=_NAME,
        function=functools.partial(product, implementation=implementations[0]),
        part=functools.partial(product, implementation=implementations[1]),
        rule=partitioned.rule,
        sizes=partitioned.named,
        partition=partitioned.partition,
        of_blocks=(1, 3),
        remedy="choose a recipe whose scales stay outside the sum, such as 'rowwise'",
    )


def _lowered_elsewhere(context: Any, *operands: Any, implementations: Any, **params: Any) -> Any:
    del implementations
    alone = Implementation.DEQUANTIZED if params["blocks"] == NV else Implementation.SCALED_DOT
    return _lowered(context, *operands, implementations=(alone, Implementation.DEQUANTIZED), **params)


def _lowered_on_tpu(context: Any, *operands: Any, implementations: Any, **params: Any) -> Any:
    if devices_of(context) == 1:
        return _lowered_elsewhere(context, *operands, implementations=implementations, **params)
    # The compiler widens the operands anyway. It divides a product of those, and not the scaled one.
    product = functools.partial(_block_product, implementation=Implementation.DEQUANTIZED, **params)
    return mlir.lower_fun(product, multiple_results=False)(context, *operands)


def _lowered_on_rocm(context: Any, *operands: Any, **params: Any) -> Any:
    if devices_of(context) > 1 and params["blocks"] == MX:
        raise ValueError(
            f"{_NAME} cannot be divided over {devices_of(context)} AMD devices: XLA would dequantize the operands. "
            "Choose a recipe whose scales stay outside the sum, such as 'rowwise', or use one device"
        )
    return _lowered_elsewhere(context, *operands, **params)


def _swizzled_batched(args: Any, axes: Any, **params: Any) -> tuple[Array, int]:
    return _batched(args[2:], axes[2:], **params)


def _swizzled_lowered(context: Any, *operands: Any, dimensions: DotDimensions, dtype: np.dtype, **params: Any) -> Any:
    blocks: Blocks = params["blocks"]
    if devices_of(context) > 1 and not has_its_part(context):
        by_xla = functools.partial(_without_swizzled, dimensions=dimensions, dtype=dtype, **params)
        return mlir.lower_fun(by_xla, multiple_results=False)(context, *operands)

    def product(swizzled_a: Array, swizzled_b: Array, a: Array, _: Array, b: Array, __: Array, *scale: Array) -> Array:
        matrices = []
        for x, swizzled, free, contracted in (
            (a, swizzled_a, dimensions.lhs_free, dimensions.lhs_contract),
            (b, swizzled_b, dimensions.rhs_free, dimensions.rhs_contract),
        ):
            rows = math.prod(x.shape[axis] for axis in free)
            data = lax.transpose(x, (*free, *contracted)).reshape(1, rows, -1)
            scales = lax.bitcast_convert_type(swizzled, blocks.scale).reshape(1, rows, -1)
            matrices.append((data, scales))
        (lhs, lhs_scales), (rhs, rhs_scales) = matrices
        out = swizzled_matmul(lhs, rhs, lhs_scales, rhs_scales, *scale, dtype=dtype)
        return out.reshape(dimensions.out_shape(a.shape, b.shape))

    return mlir.lower_fun(product, multiple_results=False)(context, *operands)


def _without_swizzled(swizzled_a: Array, swizzled_b: Array, *operands: Array, **params: Any) -> Array:
    del swizzled_a, swizzled_b
    return block_product_p.bind(*operands, **params)


_NAME = "a product with a scale for each block (recipes such as mxfp8, deepseek and nvfp4)"

block_product_p = define(
    "fp8_block_product",
    aval=_aval,
    batch=_batched,
    lower=_lowered_elsewhere,
    cuda=_lowered,
    rocm=_lowered_on_rocm,
    tpu=_lowered_on_tpu,
    with_devices=True,
)

# The same, with the scales once more in cuDNN's order in front: where it multiplies on one device, XLA need not reorder
# them.
swizzled_product_p = define(
    "fp8_swizzled_product",
    function=_without_swizzled,
    aval=lambda _, __, *operands, **params: _aval(*operands, **params),
    batch=_swizzled_batched,
    cuda=_swizzled_lowered,
    with_devices=True,
)
