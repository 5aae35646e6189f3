"""A product of FP8 data, and where the scales of its operands are applied."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir
from jaxtyping import Array, Float, Float32

from .._jax.meshes import all_varying, aval_of_result
from .._jax.primitives import define, mapped_size, to_front
from .._numerics.quantized_array import QuantizedArray, expand
from .dimensions import DotDimensions


FLOAT32 = np.dtype(np.float32)


# The significant bits of a bfloat16, the leading one included.
_BFLOAT16_BITS = 8


def is_exact(a: QuantizedArray, b: QuantizedArray, dtype: np.dtype) -> bool:
    """Whether a product's dtype is bfloat16, and that holds the product of the operands' scales."""
    return dtype == jnp.bfloat16 and a.scale_bits + b.scale_bits <= _BFLOAT16_BITS


def dot_times_scale(
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    scale: Float32[Array, "*members"],
    *,
    dimensions: DotDimensions,
    precision: lax.PrecisionLike,
    dtype: np.dtype,
    in_dtype: bool,
) -> Float[Array, "..."]:
    """`dot(a, b) * scale`, multiplied in a dtype that holds the scale exactly, or else in float32.

    Args:
        a: The first operand's data.
        b: The second's.
        scale: The product of their scales; where leading axes of the result number members, one for each.
        dimensions: What is contracted.
        precision: The precision of the product.
        dtype: The dtype of the result.
        in_dtype: Whether to multiply in it.
    """
    between = dtype if in_dtype else FLOAT32
    out = lax.dot_general(a, b, dimensions.numbers, precision=precision, preferred_element_type=between)
    scale = lax.convert_element_type(scale, between)
    if scale.ndim:
        scale = lax.broadcast_in_dim(scale, out.shape, range(scale.ndim))
    return lax.convert_element_type(lax.mul(out, scale), dtype)


def scale_of_members(a: QuantizedArray, b: QuantizedArray, dims: DotDimensions) -> Float32[Array, "*members"] | None:
    """The product of both scales, if each member along the batch axes has one; None if parts of a member have others.

    Args:
        a: The first operand of `lax.dot_general`.
        b: The second.
        dims: What is contracted.
    """
    scale: Any = 1.0
    for x, batch in ((a, dims.lhs_batch), (b, dims.rhs_batch)):
        if any(count != 1 for axis, count in enumerate(x.scale.shape) if axis not in batch):
            return None
        if x.scale.ndim:
            others = [axis for axis in range(x.scale.ndim) if axis not in batch]
            scale = lax.squeeze(lax.transpose(x.scale, (*batch, *others)), range(len(batch), x.scale.ndim)) * scale
        else:
            scale = x.scale * scale
    return scale


def rows_scaled(
    out: Float32[Array, "..."], a: QuantizedArray, b: QuantizedArray, dims: DotDimensions, dtype: np.dtype
) -> Float[Array, "..."]:
    """A product times the scales of its operands' rows.

    Args:
        out: The product of the data.
        a: The first operand of `lax.dot_general`.
        b: The second.
        dims: What was contracted.
        dtype: The dtype of the result.
    """
    batch, free_a, free_b = len(dims.lhs_batch), len(dims.lhs_free), len(dims.rhs_free)
    scale_a, scale_b = (x.scale if x.scale.ndim else lax.reshape(x.scale, (1,) * x.data.ndim) for x in (a, b))
    scale_a = lax.transpose(scale_a, dims.lhs_batch + dims.lhs_free + dims.lhs_contract)
    scale_b = lax.transpose(scale_b, dims.rhs_batch + dims.rhs_free + dims.rhs_contract)
    scale_a = lax.reshape(scale_a, scale_a.shape[: batch + free_a] + (1,) * free_b)
    scale_b = lax.reshape(scale_b, scale_b.shape[:batch] + (1,) * free_a + scale_b.shape[batch : batch + free_b])
    out = lax.mul(out, lax.mul(expand(scale_a, out.shape), expand(scale_b, out.shape)))
    return lax.convert_element_type(out, dtype)


def members_dot(
    dot: Callable[[Array, Array], Array],
    a: QuantizedArray,
    b: QuantizedArray,
    batch: int,
    dtype: np.dtype,
    scale: Float32[Array, "..."] | None,
) -> Float[Array, "..."]:
    """`dot(a, b)` in a dtype, where members of leading axes have a scale each. Other scales do not factor out.

    Args:
        dot: The product of two arrays, in float32.
        a: Its first operand.
        b: Its second.
        batch: How many leading axes number members.
        dtype: The dtype of the result.
        scale: The product of both scales, if that is computed already.
    """
    if any(count > 1 for x in (a, b) for count in x.scale.shape[batch:]):
        return dot(a.dequantize(), b.dequantize()).astype(dtype)
    out = dot(a.data, b.data)
    if scale is None:
        scale_a, scale_b = (x.scale.reshape(x.scale.shape[:batch]) for x in (a, b))
        scale = scale_a * scale_b
    return (out * scale.reshape(scale.shape + (1,) * (out.ndim - scale.ndim))).astype(dtype)


def each_row_scaled(
    values: Float32[Array, "*rows columns"], scale: Float32[Array, "*leading"], dtype: np.dtype
) -> Float[Array, "*rows columns"]:
    """A product of groups of rows, or an operand of one, each row or member times the scale of its group.

    Args:
        values: The product of the data; or an operand's data, unscaled.
        scale: The scale of each element of the leading axes; of a product, that of both operands.
        dtype: The dtype of the result.
    """
    return (values * lax.expand_dims(scale, range(scale.ndim, values.ndim))).astype(dtype)


def scalar(x: Float32[Array, "..."]) -> Float32[Array, ""]:
    """The only element."""
    return x if x.ndim == 0 else lax.reshape(x, ())


def scaled_product(
    a: QuantizedArray,
    b: QuantizedArray,
    scale: Float32[Array, "*members"],
    dimensions: DotDimensions,
    precision: lax.PrecisionLike,
    dtype: np.dtype,
) -> Float[Array, "..."]:
    """`dot(a.data, b.data) * scale` in a dtype.

    Args:
        a: The first operand.
        b: The second.
        scale: The product of their scales, or of each member's along the batch axes.
        dimensions: What is contracted.
        precision: The precision of the product.
        dtype: The dtype of the result.
    """
    params = {"dimensions": dimensions, "precision": precision, "dtype": dtype}
    if not is_exact(a, b, dtype):
        return dot_times_scale(a.data, b.data, scale, in_dtype=False, **params)
    return scaled_product_p.bind(*all_varying(a.data, b.data, scale), **params)


def aval_of(a: Any, b: Any, scale: Any, *, dimensions: DotDimensions, dtype: np.dtype, **params: Any) -> Any:
    """The abstract value of the product of abstract values."""
    del scale, params
    return aval_of_result(a, dimensions.out_shape(a.shape, b.shape), dtype)


def _batched(args: Any, axes: Any, *, dimensions: DotDimensions, **params: Any) -> tuple[Array, int]:
    """The mapped axis is a free axis of the operand that has it; or a batch axis of both, if scales have it too."""
    size = mapped_size(args, axes)
    are_mapped = [axis is not None for axis in axes]
    if args[2].ndim or are_mapped[2]:
        are_mapped = [True] * 3
    pairs = zip(args, axes, are_mapped, strict=True)
    operands = [to_front(x, axis, size, 0) if is_mapped else x for x, axis, is_mapped in pairs]
    dimensions, out_axis = dimensions.with_axis(*are_mapped[:2])
    return scaled_product_p.bind(*operands, dimensions=dimensions, **params), out_axis


def _lowered(context: Any, *operands: Any, product: Callable[..., Array], **params: Any) -> Any:
    return mlir.lower_fun(functools.partial(product, **params), multiple_results=False)(context, *operands)


scaled_product_p = define(
    "fp8_scaled_product",
    aval=aval_of,
    batch=_batched,
    lower=functools.partial(_lowered, product=functools.partial(dot_times_scale, in_dtype=False)),
    cuda=functools.partial(_lowered, product=functools.partial(dot_times_scale, in_dtype=True)),
)
