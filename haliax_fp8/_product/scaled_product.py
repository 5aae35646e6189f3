"""A product with one scale, whose platform decides how it is computed: that is known when a program is lowered.

On NVIDIA GPUs a product in bfloat16 is the product of the FP8 data, in bfloat16, times the scale. cuBLASLt computes
both at once and rounds once. Triton kernels, which XLA prefers by default, read FP8 only if the FP8 data are
multiplied directly: for dequantized operands they read bfloat16. And whatever XLA puts between product and scale (a
sum over devices, a slice of a padded product), the scale stays exact, because bfloat16 can represent it.

Elsewhere the product is stored in float32, multiplied, and rounded.

`lax.platform_dependent` does the same, but traces what both compute, and a conditional: for every product, twice as
many equations.
"""

import functools
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Float, Float32

from .._jax.compiled_alone import compile_alone
from .._jax.explicit_axes import aval_of_result
from .._jax.lowered_by_platform import lower_by_platform
from .._jax.mapped_axis import to_front
from .._jax.mesh_axes import all_varying
from .._numerics.quantized_array import QuantizedArray
from .dimensions import DotDimensions
from .scales import dot_times_scale, is_exact


def scaled_product(
    a: QuantizedArray,
    b: QuantizedArray,
    scale: Float32[Array, ""],
    dimensions: DotDimensions,
    precision: lax.PrecisionLike,
    dtype: np.dtype,
) -> Float[Array, "..."]:
    """`dot(a.data, b.data) * scale` in a dtype.

    Args:
        a: The first operand.
        b: The second.
        scale: The product of their scales.
        dimensions: What is contracted.
        precision: The precision of the product.
        dtype: The dtype of the result.
    """
    params = {"dimensions": dimensions, "precision": precision, "dtype": dtype}
    if not is_exact(a, b, dtype):
        return multiplied(a.data, b.data, scale, in_dtype=False, **params)
    return scaled_product_p.bind(*all_varying(a.data, b.data, scale), **params)


def multiplied(
    a: Array,
    b: Array,
    scale: Float32[Array, "*members"],
    *,
    dimensions: DotDimensions,
    precision: lax.PrecisionLike,
    dtype: np.dtype,
    in_dtype: bool,
) -> Float[Array, "..."]:
    """The product as one platform computes it, see `dot_times_scale`."""

    def dot(a: Array, b: Array, dtype: np.dtype) -> Array:
        return lax.dot_general(a, b, dimensions.numbers, precision=precision, preferred_element_type=dtype)

    return dot_times_scale(dot, a, b, scale, dtype, in_dtype=in_dtype)


def aval_of(a: Any, b: Any, scale: Any, *, dimensions: DotDimensions, dtype: np.dtype, **params: Any) -> Any:
    """The abstract value of the product of abstract values."""
    del scale, params
    return aval_of_result(a, dimensions.out_shape(a.shape, b.shape), dtype)


def _batched(args: Any, axes: Any, *, dimensions: DotDimensions, **params: Any) -> tuple[Array, int]:
    """The mapped axis is a free axis of the operand that has it; or a batch axis of both, if scales have it too."""
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    are_mapped = [axis is not None for axis in axes]
    if args[2].ndim or are_mapped[2]:
        are_mapped = [True] * 3
    pairs = zip(args, axes, are_mapped, strict=True)
    operands = [to_front(x, axis, size, 0) if is_mapped else x for x, axis, is_mapped in pairs]
    dimensions, out_axis = dimensions.with_axis(*are_mapped[:2])
    return scaled_product_p.bind(*operands, dimensions=dimensions, **params), out_axis


def _lowered(context: Any, *operands: Any, in_dtype: bool = False, **params: Any) -> Any:
    product = functools.partial(multiplied, in_dtype=in_dtype, **params)
    return mlir.lower_fun(product, multiple_results=False)(context, *operands)


scaled_product_p = Primitive("fp8_scaled_product")
compile_alone(scaled_product_p)
scaled_product_p.def_abstract_eval(aval_of)
batching.primitive_batchers[scaled_product_p] = _batched
lower_by_platform(scaled_product_p, _lowered, cuda=functools.partial(_lowered, in_dtype=True))
