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
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32

from .._jax.after_partitioning import knows_devices, lower_after_partitioning, lower_with_devices
from .._jax.mapped_axis import to_front
from .._jax.xla import lowered_for_cuda
from .dimensions import DotDimensions
from .divided_product import DividedProduct
from .scales import one_scale


def scaled_by_each_device(
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    scale: Float32[Array, ""],
    dimensions: DotDimensions,
    precision: lax.PrecisionLike,
    dtype: np.dtype,
    *,
    exact: bool,
) -> Float[Array, "..."]:
    """`dot(a, b) * scale` in a dtype, in which devices add up their parts of it.

    Args:
        a: The first operand, in FP8.
        b: The second.
        scale: What the product is multiplied by.
        dimensions: What is contracted.
        precision: Of the product.
        dtype: Of the result.
        exact: Whether the dtype holds the scale. Then NVIDIA GPUs multiply in it, see `scales.py`.
    """
    one = lax.reshape(scale, (1,))
    return scaled_product_p.bind(a, b, one, dimensions=dimensions, precision=precision, dtype=dtype, exact=exact)


scaled_product_p = Primitive("fp8_scaled_product")


def _scaled_product(
    a: Array, b: Array, scale: Array, *, dimensions: DotDimensions, precision: Any, dtype: np.dtype, exact: bool
) -> Array:
    """The product of what one device has."""

    def dot(x: Array, y: Array, dtype: np.dtype) -> Array:
        return lax.dot_general(x, y, dimensions.numbers, precision=precision, preferred_element_type=dtype)

    return one_scale(dot, a, b, lax.squeeze(scale, (0,)), dtype, in_dtype=exact)


def _aval(a: Any, b: Any, scale: Any, *, dimensions: DotDimensions, dtype: np.dtype, **params: Any) -> Any:
    del scale, params
    shape = dimensions.out_shape(a.shape, b.shape)
    return a.update(shape=shape, dtype=dtype, weak_type=False, sharding=a.sharding.update(spec=P(*[None] * len(shape))))


def _batched(args: Any, axes: Any, *, dimensions: DotDimensions, **params: Any) -> tuple[Array, int]:
    """The mapped axis is a batch axis of both operands."""
    (a, b, scale), (*axes, of_scale) = args, axes
    if of_scale is not None:
        # Not in the dtype: for which platform is not known yet.
        each = functools.partial(_scaled_product, dimensions=dimensions, **{**params, "exact": False})
        return jax.vmap(each, in_axes=(*axes, of_scale))(a, b, scale), 0
    size = next(x.shape[axis] for x, axis in zip((a, b), axes, strict=True) if axis is not None)
    a, b = (to_front(x, axis, size, 0) for x, axis in zip((a, b), axes, strict=True))
    dimensions, out_axis = dimensions.with_batch_axis()
    return scaled_product_p.bind(a, b, scale, dimensions=dimensions, **params), out_axis


def _lowered(context: Any, *operands: Any, dimensions: DotDimensions, exact: bool, **params: Any) -> Any:
    # A switch between platforms, as on one device, would be divided with what surrounds it.
    exact = exact and lowered_for_cuda(context)
    product = functools.partial(_scaled_product, dimensions=dimensions, exact=exact, **params)
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


scaled_product_p.def_impl(lambda *args, **params: jax.jit(functools.partial(scaled_product_p.bind, **params))(*args))
scaled_product_p.def_abstract_eval(_aval)
mlir.register_lowering(scaled_product_p, _lowered)
batching.primitive_batchers[scaled_product_p] = _batched
lower_with_devices(scaled_product_p)
