"""Quantizes a kernel for all of its products."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from .._jax.max_grad import to_float32
from .._jax.meshes import divided
from .._jax.xla import gathered_once, transposed_once
from .._numerics.quantized_array import QuantizedArray
from .._numerics.stored_array import StoredArray, bits_of
from .._state.record import in_product
from .._state.table import numbers_of
from ..recipes.recipe import USES, ProductName
from ..recipes.scaling import FolderScales, HadamardScaling
from .kernel_for_products import KernelForProducts
from .operands import measured_parts, quantize_operand, round_to, scales_of
from .spec import ProductSpec


def quantize_kernel(
    kernel: Float[Array, "..."],
    record: Array | None,
    spec: ProductSpec,
    gathered: PartitionSpec | None = None,
    scale_dtype: np.dtype | None = None,
    folder: FolderScales[Array] | None = None,
) -> KernelForProducts[Array] | None:
    """A kernel as its products take it; None if none of them quantizes it, or one rotates or randomly rounds it.

    Bit for bit what the products would quantize. Nothing is differentiated: gradients reach the kernel itself.

    Args:
        kernel: The kernel; the axes of members come first.
        record: The scales of its op; None for a stateless recipe.
        spec: What is static about its products; the contraction of the kernel's axes alone has to be right.
        gathered: How the data are divided over the mesh, by the kernel's axes; None leaves that to XLA.
        scale_dtype: The dtype of the state that the scales come from, see `dtype_of_scales`.
        folder: The scales that a published folder has for it.
    """
    uses = [spec.recipe.uses["kernel", product] for product in USES["kernel"]]
    is_made_in_products = any(use.rounding.needs_key or isinstance(use.scaling, HadamardScaling) for use in uses)
    if is_made_in_products or not any(use.scaling.quantizes for use in uses):
        return None
    record = None if record is None else lax.stop_gradient(in_product(record))
    quantized = _quantized_for_all(lax.stop_gradient(kernel), record, folder, spec=spec, gathered=gathered)
    return dataclasses.replace(quantized, scale_dtype=scale_dtype)


@functools.partial(jax.jit, static_argnames=("spec", "gathered"))
def _quantized_for_all(
    kernel: Array,
    record: Array | None,
    folder: FolderScales[Array] | None,
    *,
    spec: ProductSpec,
    gathered: PartitionSpec | None,
) -> KernelForProducts[Array]:
    kernel = round_to(kernel, spec.compute_dtype)
    scales = scales_of(record, spec)
    members = spec.batched.members("kernel", kernel.shape, None, spec.ensemble)
    arrays: dict[ProductName, QuantizedArray] = {}
    operands: list[StoredArray[Array] | None] = []
    for product in USES["kernel"]:
        quantized_for = spec.recipe.quantized_for["kernel", product]
        if quantized_for not in arrays:
            quantized = quantize_operand(kernel, "kernel", product, scales, None, members, spec, folder=folder)
            if gathered is not None:
                # Both operands come from what was gathered: after a transposition, XLA would gather bfloat16.
                data = divided(gathered_once(quantized.data), gathered)
                quantized = dataclasses.replace(quantized, data=data)
            arrays[quantized_for] = quantized
        operands.append(_operand(arrays[quantized_for], product, spec))
    measured = None
    if record is not None and numbers_of(spec.recipe.scalings):
        parts = measured_parts(kernel, arrays["fprop"], "kernel", members, spec, record)
        measured = bits_of(to_float32(jnp.max(parts, axis=-1, keepdims=True)))
    per_axis = any(spec.recipe.uses["kernel", use].scaling.per_axis for use in USES["kernel"])
    contracted = tuple(spec.contraction.contracted(product)[1] for product in USES["kernel"]) if per_axis else None
    return KernelForProducts(operands[0], operands[1], measured, kernel.dtype, spec.exact_scales, contracted, None)


def _operand(quantized: QuantizedArray, product: ProductName, spec: ProductSpec) -> StoredArray[Array] | None:
    scaling, leading = spec.recipe.uses["kernel", product].scaling, spec.ensemble
    if not scaling.quantizes:
        return None
    contracted = spec.contraction.contracted(product)[1]
    free = [axis for axis in range(quantized.data.ndim - leading) if axis not in contracted]
    # In the order of the kernel, so that axes which lie last already stay where they are.
    order = (*free, *sorted(contracted))
    data = quantized.data
    if order != tuple(range(len(order))):
        permutation = (*range(leading), *(leading + axis for axis in order))
        data = transposed_once(data, permutation)
    scale = None if scaling.stores_scale else bits_of(quantized.scale)
    block = None if quantized.block is None else quantized.block[leading:]
    tensor_scale = None if quantized.tensor_scale is None else bits_of(quantized.tensor_scale)
    return StoredArray(
        bits_of(data),
        scale,
        tensor_scale,
        dtype=np.dtype(data.dtype),
        order=order,
        block=block,
        scale_bits=quantized.scale_bits,
        tensor_scale_bits=quantized.tensor_scale_bits,
    )
