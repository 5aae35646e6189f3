"""An operand of a product: with which scale it is quantized, what the backward pass keeps, and what is measured."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .._jax.meshes import axes_of_parts, varying_axes
from .._jax.opaque import opaque
from .._jax.xla import computed_together, divided_as_made, keep_cast
from .._numerics.quantized_array import QuantizedArray, factors_out
from .._numerics.stored_array import StoredArray
from .._state.record import operand_scales
from .._state.table import numbers_of
from ..recipes.recipe import OPERAND_NAMES, OPERANDS, USES, OperandName, ProductName
from ..recipes.scaling import FolderScales, Members, OperandUse, of_all_elements
from ..recipes.scaling.high_precision import unscaled
from .blackwell.quantize import BlockUse, in_one_pass
from .kernel_for_products import KernelForProducts
from .scaled_product import FLOAT32, each_row_scaled
from .spec import ProductSpec


def round_to(x: Array, dtype: np.dtype | None) -> Array:
    """The array in a dtype; None returns it unchanged."""
    return x if dtype is None else lax.convert_element_type(x, dtype)


class Scales(NamedTuple):
    """The stored scales, and values computed from them.

    Args:
        operands: The scale of each operand, `[*ensemble]`.
        pairs: The scales of each product's operands, multiplied; None where nothing is gained by computing them
            together.
    """

    operands: dict[OperandName, Array]
    pairs: dict[ProductName, Array] | None

    def of_product(self, product: ProductName, spec: ProductSpec) -> Array | None:
        """The product of two operands' scales, where it is computed already, or the contraction applies it."""
        if spec.contraction.applies_scales:
            first, second = (
                self.operands[operand] if spec.takes_stored_scale(operand, product) else jnp.float32(1.0)
                for operand in OPERANDS[product]
            )
            return jnp.broadcast_to(jnp.multiply(first, second), self.operands["kernel"].shape)
        if self.pairs is None or not all(spec.takes_stored_scale(x, product) for x in OPERANDS[product]):
            return None
        return self.pairs[product]


def scales_of(record: Array | None, spec: ProductSpec) -> Scales | None:
    """The scale of each operand as products take it; None if nothing is stored."""
    if record is None:
        return None
    is_shared = spec.index_among_sharers is not None
    return _scales_of(record, stacked=spec.stacked, is_shared=is_shared, exact=spec.exact_scales)


# Opaque, so that ops of all shapes share one trace.
@opaque
def _scales_of(record: Array, *, stacked: bool, is_shared: bool, exact: bool) -> Scales:
    input_scale, kernel_scale, grad_scale = operand_scales(record, exact=exact)
    pairs: dict[ProductName, Array] | None = None
    if stacked and not input_scale.ndim:
        # A scan slices them out of its stack, in a launch for each number that is wanted, unless they are wanted
        # together.
        fprop, dgrad, wgrad = (
            lax.mul(input_scale, kernel_scale),
            lax.mul(kernel_scale, grad_scale),
            lax.mul(input_scale, grad_scale),
        )
        if not is_shared:
            input_scale, kernel_scale, grad_scale, dgrad, wgrad, fprop = computed_together(
                (input_scale, kernel_scale, grad_scale, dgrad, wgrad, fprop)
            )
        else:
            # Other layers have the very same scale of their input, by which XLA finds that all quantize alike.
            kernel_scale, grad_scale, dgrad, wgrad, fprop = computed_together(
                (kernel_scale, grad_scale, dgrad, wgrad, fprop)
            )
        pairs = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}
    return Scales({"input": input_scale, "kernel": kernel_scale, "output_grad": grad_scale}, pairs)


def quantize_operand(
    x: Array,
    operand: OperandName,
    product: ProductName,
    scales: Scales | None,
    key: Array | None,
    members: Members,
    spec: ProductSpec,
    quantized_kernel: KernelForProducts[Array] | None = None,
    folder: FolderScales[Array] | None = None,
    *,
    for_both: bool = False,
) -> QuantizedArray:
    """An operand in the format that a product takes it in.

    Args:
        x: The operand, rounded to the compute dtype.
        operand: Which it is.
        product: The product.
        scales: What the state stores.
        key: What random rounding draws from.
        members: Which parts of the operand have a scale each.
        spec: What is static about the product.
        quantized_kernel: The kernel, if it was quantized before.
        folder: Its scales in a published folder, if it has any.
        for_both: Whether it is now quantized for its other product too.
    """
    if operand == "kernel" and quantized_kernel is not None:
        quantized_before = quantized_kernel.operand(product)
        if quantized_before is not None:
            return from_residual(quantized_before, operand, product, scales, spec)
    quantization = spec.recipe.uses[operand, product]
    scaling = quantization.scaling
    use = OperandUse(
        format=quantization.format,
        contracted=spec.batched.contracted(product)[OPERANDS[product].index(operand)],
        # Devices are for the amax, which a stored scale does not need.
        members=members if scaling.stores_scale else members.over(axes_of_parts(x)),
        stored_scale=None if scales is None or scaling.memory is None else members.of_state(scales.operands[operand]),
        rounding=quantization.rounding,
        key=_key_of(x, key, operand, product, spec) if quantization.rounding.needs_key else None,
        contiguous_sum=product not in spec.contraction.groups,
        scale_bits=spec.scale_bits[operand],
        folder=folder,
    )
    if spec.one_pass:
        first, second = USES[operand]
        products = (product, second if product == first else first) if for_both else (product,)
        uses = [_block_use(operand, one, spec) for one in products]
        drawn = zip(products, uses, strict=True)
        keys = [_key_of(x, key, operand, one, spec) for one, block_use in drawn if block_use.rounding.needs_key]
        quantized = in_one_pass(x, use, uses[0], uses[1] if for_both else None, keys)
        if quantized is not None:
            return quantized
    quantized = scaling.quantize(x, use)
    return dataclasses.replace(quantized, scale=jnp.float32(1.0)) if spec.contraction.applies_scales else quantized


def _block_use(operand: OperandName, product: ProductName, spec: ProductSpec) -> BlockUse:
    quantization, contracted = spec.recipe.uses[operand, product], spec.batched.contracted(product)
    axes = contracted[OPERANDS[product].index(operand)]
    return BlockUse(quantization.scaling, quantization.format, quantization.rounding, axes, spec.scale_bits[operand])


def _key_of(x: Array, key: Array | None, operand: OperandName, product: ProductName, spec: ProductSpec) -> Array:
    """A key for each member, unlike those of other operands, products and devices."""
    if key is None:
        raise ValueError(
            f"key is missing: the recipe ({spec.recipe}) draws random numbers here. Give the model's ops their keys "
            "inside the loss, with_rounding_keys(model, key), with a new key in each step; TrainStep takes one as key="
        )
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    fold_in = jax.random.fold_in
    for _ in range(spec.ensemble):
        fold_in = jax.vmap(fold_in, (0, None))
    key = fold_in(key, 3 * OPERAND_NAMES.index(operand) + tuple(OPERANDS).index(product))
    for axis in sorted(varying_axes(x) - varying_axes(key)):
        # Devices round different parts of the operand.
        key = fold_in(key, lax.axis_index(axis))
    return key


def residual_of(
    quantized: QuantizedArray, operand: OperandName, product: ProductName, spec: ProductSpec
) -> Array | QuantizedArray:
    """What is kept of an operand that was quantized for a product: not its amax, nor its scale if the state has it."""
    is_known = spec.recipe.uses[operand, product].scaling.stores_scale
    return quantized.data if is_known else dataclasses.replace(quantized, amax=None)


def from_residual(
    residual: Array | QuantizedArray | StoredArray[Array],
    operand: OperandName,
    product: ProductName,
    scales: Scales | None,
    spec: ProductSpec,
) -> QuantizedArray:
    """The inverse of `residual_of`; or a kernel that was quantized before, as if it were one."""
    if isinstance(residual, StoredArray):
        residual = residual.values_of_data if residual.scale is None else residual.quantized
    if isinstance(residual, QuantizedArray):
        return residual
    assert spec.takes_stored_scale(operand, product) and scales is not None
    scale = (
        jnp.float32(1.0)
        if spec.contraction.applies_scales
        else of_all_elements(scales.operands[operand], residual.ndim)
    )
    return QuantizedArray(residual, scale, scale_bits=spec.scale_bits[operand])


def in_high_precision(
    x: QuantizedArray, operand: OperandName, product: ProductName, dtype: np.dtype, spec: ProductSpec
) -> QuantizedArray:
    """An operand for a product in high precision: what fprop quantized is dequantized to a dtype, the rest unchanged.

    Args:
        x: The operand.
        operand: Which it is.
        product: The product.
        dtype: The dtype that the product computes in.
        spec: What is static about the product.
    """
    if not spec.recipe.uses[operand, product].scaling.quantizes:
        return x
    contracted = spec.batched.contracted(product)[OPERANDS[product].index(operand)]
    if factors_out(x, contracted) and x.rotation is None:
        # Every format's values are exact in bfloat16 and float16; the scale is applied behind the product.
        return dataclasses.replace(x, data=lax.convert_element_type(keep_cast(x.data), dtype))
    return unscaled(lax.convert_element_type(x.dequantize(), dtype), spec.ensemble)


def scaled_values(
    x: QuantizedArray, operand: OperandName, scales: Scales | None, members: Members, spec: ProductSpec
) -> Array:
    """An operand's values in float32, also if the contraction applies their scales."""
    values = x.dequantize()
    if not spec.contraction.applies_scales or scales is None:
        return values
    return each_row_scaled(values, members.of_state(scales.operands[operand]), FLOAT32)


def measured_parts(
    x: Float[Array, "..."],
    quantized: QuantizedArray,
    operand: OperandName,
    members: Members,
    spec: ProductSpec,
    record: Array,
) -> Float[Array, "*ensemble numbers parts"]:
    """What the state records of parts of an operand, padded with zeros to the largest record.

    Args:
        x: The operand.
        quantized: What it was quantized to.
        operand: Which it is.
        members: Which parts of the operand are measured each.
        spec: What is static about the product.
        record: The scales. Inside `shard_map` each device measures its own part.
    """
    scalings = spec.recipe.scalings
    memory, count = scalings[OPERAND_NAMES.index(operand)].memory, numbers_of(scalings)
    if memory is None or not memory.numbers:
        return jnp.zeros((*record.shape[: spec.ensemble], count, 1), x.dtype)
    if spec.contraction.applies_scales and (scales := scales_of(record, spec)) is not None:
        scale = of_all_elements(members.of_state(scales.operands[operand]), x.ndim)
        quantized = dataclasses.replace(quantized, scale=scale)
    values = memory.measure_members(x, quantized, members.over(axes_of_parts(x, record)))
    if (missing := count - values.shape[-2]) > 0:
        values = jnp.pad(values, [(0, 0)] * spec.ensemble + [(0, missing), (0, 0)])
    return divided_as_made(values)
