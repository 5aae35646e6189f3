"""A product whose sum devices divide: each applies the scale to its part, before parts are added up.

XLA adds up the parts of a divided sum right after a product, before the scale is applied. So sums of several products,
such as the gradients of a tensor that q, k and v read, are added up one by one: between them are their scales. Here
each device multiplies its part by the scale. Then XLA adds the products first, and devices send each other one sum.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Float, Float32

from .._jax.after_partitioning import knows_devices, lower_after_partitioning, lower_with_devices
from .._jax.compiled_alone import compile_alone
from .._jax.mapped_axis import to_front
from .._jax.xla import lowered_for_cuda
from .._numerics.quantized_array import QuantizedArray
from .dimensions import DotDimensions
from .divided_product import DividedProduct
from .scaled_product import aval_of, multiplied
from .scales import is_exact


def scaled_by_each_device(
    a: QuantizedArray,
    b: QuantizedArray,
    scale: Float32[Array, ""],
    dimensions: DotDimensions,
    precision: lax.PrecisionLike,
    dtype: np.dtype,
) -> Float[Array, "..."]:
    """Like `scaled_product`, where devices add up their parts of the result.

    Args:
        a: The first operand.
        b: The second.
        scale: The product of their scales.
        dimensions: What is contracted.
        precision: The precision of the product.
        dtype: The dtype of the result.
    """
    params = {"dimensions": dimensions, "precision": precision, "dtype": dtype, "exact": is_exact(a, b, dtype)}
    return divided_sum_p.bind(a.data, b.data, lax.reshape(scale, (1,)), **params)


divided_sum_p = Primitive("fp8_divided_sum")


def _of_part(a: Array, b: Array, scale: Array, **params: Any) -> Array:
    """The product of what one device has."""
    return multiplied(a, b, lax.squeeze(scale, (0,)), **params)


def _batched(args: Any, axes: Any, *, dimensions: DotDimensions, exact: bool, **params: Any) -> tuple[Array, int]:
    """The mapped axis is a batch axis of both operands."""
    (a, b, scale), (*axes, of_scale) = args, axes
    if of_scale is not None:
        # Not in the dtype: for which platform is not known yet.
        each = functools.partial(_of_part, dimensions=dimensions, in_dtype=False, **params)
        return jax.vmap(each, in_axes=(*axes, of_scale))(a, b, scale), 0
    size = next(x.shape[axis] for x, axis in zip((a, b), axes, strict=True) if axis is not None)
    a, b = (to_front(x, axis, size, 0) for x, axis in zip((a, b), axes, strict=True))
    dimensions, out_axis = dimensions.with_batch_axis()
    return divided_sum_p.bind(a, b, scale, dimensions=dimensions, exact=exact, **params), out_axis


def _lowered(context: Any, *operands: Any, dimensions: DotDimensions, exact: bool, **params: Any) -> Any:
    # A switch between platforms, as on one device, would be divided with what surrounds it.
    in_dtype = exact and lowered_for_cuda(context)
    product = functools.partial(_of_part, dimensions=dimensions, in_dtype=in_dtype, **params)
    if not knows_devices(context):
        return mlir.lower_fun(product, multiple_results=False)(context, *operands)
    divided = DividedProduct(dimensions)
    return lower_after_partitioning(
        context,
        *operands,
        name="a product with one scale",
        function=product,
        part=product,
        rule=divided.rule,
        sizes=divided.named,
        partition=divided.partition,
        remedy="choose another recipe",
    )


compile_alone(divided_sum_p)
divided_sum_p.def_abstract_eval(aval_of)
mlir.register_lowering(divided_sum_p, _lowered)
batching.primitive_batchers[divided_sum_p] = _batched
lower_with_devices(divided_sum_p)
