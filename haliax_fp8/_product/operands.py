"""An operand of fprop, dgrad and wgrad: which of them it is quantized for, how, and what is measured of it."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .._jax.max_grad import to_float32
from .._jax.mesh_axes import axes_to_reduce, varying_axes
from .._numerics.quantized_array import QuantizedArray
from .._state.table import measures, scales_in
from ..recipes.scaling import AbstractStatefulScaling, OperandUse, stores_scale
from .contraction import ProductName
from .spec import ProductSpec


def round_to(x: Array, dtype: np.dtype | None) -> Array:
    """The array in a dtype; None returns it unchanged."""
    return x if dtype is None else lax.convert_element_type(x, dtype)


class Scales(NamedTuple):
    """The stored scales, and values computed from them.

    Args:
        operands: The scales of input, kernel and output gradient, `[*ensemble]`.
        products: Those of the products without the first, second and third of them; None where nothing is gained by
            computing them together.
    """

    operands: tuple[Array, Array, Array]
    products: tuple[Array, Array, Array] | None


def scales_of(state: Array | None, spec: ProductSpec) -> Scales | None:
    """The scale of each operand as products take it, from what is stored; None if nothing is."""
    if state is None:
        return None
    return _scales_of(
        state,
        limits=spec.recipe.limits,
        records=spec.records,
        stacked=spec.stacked,
        grouped=spec.group_place is not None,
        bits=spec.scale_bits,
    )


# Apart from `forward` and `backward`, so that ops of all shapes share one trace.
@functools.partial(jax.jit, static_argnames=("limits", "records", "stacked", "grouped", "bits"))
def _scales_of(
    state: Array, *, limits: tuple[float, ...], records: bool, stacked: bool, grouped: bool, bits: int
) -> Scales:
    if records:
        # One by one: XLA finds out that slices of two layers' are the same scale.
        first, axis = 0 if bits == 24 else 3, state.ndim - 1
        of_input, of_kernel, of_grad = (
            to_float32(lax.index_in_dim(state, first + i, axis, keepdims=False)) for i in range(3)
        )
    else:
        exact, rounded = scales_in(to_float32(state), limits)
        scales = exact if bits == 24 else rounded
        of_input, of_kernel, of_grad = (lax.index_in_dim(scales, i, scales.ndim - 1, keepdims=False) for i in range(3))
    if not stacked or of_input.ndim:
        return Scales((of_input, of_kernel, of_grad), None)
    # A scan slices them out of its stack, in a kernel for each number that is wanted, unless they are wanted together.
    products = lax.mul(of_kernel, of_grad), lax.mul(of_input, of_grad), lax.mul(of_input, of_kernel)
    if grouped:
        # Other layers have the very same scale of their input, by which XLA finds that all quantize alike.
        of_kernel, of_grad, products = lax.optimization_barrier((of_kernel, of_grad, products))
    else:
        of_input, of_kernel, of_grad, products = lax.optimization_barrier((of_input, of_kernel, of_grad, products))
    return Scales((of_input, of_kernel, of_grad), products)


def stored_scale(role: int, scales: Scales | None, spec: ProductSpec) -> Array:
    """The stored scale of lhs (role 0), rhs (1) or the output's gradient (2)."""
    assert scales is not None
    return scales.operands[spec.state_rows[role]]


def scale_of_both(
    a: QuantizedArray, b: QuantizedArray, roles: tuple[int, int], scales: Scales | None, spec: ProductSpec
) -> Array | None:
    """The product of two operands' scales, where it is computed already.

    Args:
        a: The first operand.
        b: The second.
        roles: Which they are: lhs (0), rhs (1) or the output's gradient (2).
        scales: What the state stores.
        spec: What is static.
    """
    if scales is None or scales.products is None:
        return None
    if not all(x.scale is stored_scale(role, scales, spec) for x, role in zip((a, b), roles, strict=True)):
        return None
    (left_out,) = {0, 1, 2} - {spec.state_rows[role] for role in roles}
    return scales.products[left_out]


def quantize_operand(
    x: Array,
    role: int,
    product: ProductName,
    contracted: tuple[int, ...],
    scales: Scales | None,
    key: Array | None,
    spec: ProductSpec,
) -> QuantizedArray:
    """An operand in the format that a product takes it in.

    Args:
        x: The operand, rounded to the compute dtype.
        role: Which it is: lhs (0), rhs (1) or the output's gradient (2).
        product: The product.
        contracted: The axes that the product sums over.
        scales: What the state stores.
        key: What random rounding draws from.
        spec: What is static about the product.
    """
    quantization = spec.quantization(role, product)
    use = OperandUse(
        format=quantization.format,
        contracted=contracted,
        ensemble=spec.ensemble,
        stored=stored_scale(role, scales, spec) if isinstance(quantization.scaling, AbstractStatefulScaling) else None,
        rounding=quantization.rounding,
        key=_key_of(x, key, role, product, spec) if quantization.rounding.needs_key else None,
        mixable=product not in spec.contraction.groups,
        scale_bits=spec.scale_bits,
    )
    quantized = quantization.scaling.quantize(x, use)
    return with_stored_scale(quantized, spec) if stores_scale(quantization.scaling) else quantized


def with_stored_scale(quantized: QuantizedArray, spec: ProductSpec) -> QuantizedArray:
    """What a scaling made with a scale of `scales_of`, which has so many significant bits."""
    return dataclasses.replace(quantized, scale_bits=spec.scale_bits)


def _key_of(x: Array, key: Array | None, role: int, product: ProductName, spec: ProductSpec) -> Array:
    """A key for each member, unlike those of other operands, products and devices."""
    if key is None or not spec.has_key:
        raise ValueError(
            f"key is missing: the recipe ({spec.recipe}) draws random numbers here. Give all ops of a model theirs "
            "inside the loss, with_rounding_keys(model, key), with another key in each step; TrainStep takes one as "
            "key="
        )
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    fold_in = jax.random.fold_in
    for _ in range(spec.ensemble):
        fold_in = jax.vmap(fold_in, (0, None))
    key = fold_in(key, 3 * role + _PRODUCTS.index(product))
    for axis in sorted(varying_axes(x) - varying_axes(key)):
        # Devices round different parts of the operand.
        key = fold_in(key, lax.axis_index(axis))
    return key


def quantized_once(role: int, products: tuple[ProductName, ProductName], spec: ProductSpec) -> bool:
    """Whether an operand is quantized once for two products."""
    first, second = (spec.quantization(role, product) for product in products)
    return first == second and not first.scaling.directional


def kept_as_is(role: int, spec: ProductSpec) -> bool:
    """Whether the backward pass keeps an operand itself: a kernel to quantize again, or one in high precision."""
    if spec.requantizes and role == (0 if spec.kernel_is_lhs else 1):
        return True
    return not spec.quantization(role, OTHER_PRODUCT[role]).scaling.quantizes


_PRODUCTS: tuple[ProductName, ...] = ("product", "gradient_of_lhs", "gradient_of_rhs")


# The product beside fprop that lhs and rhs are operands of.
OTHER_PRODUCT: tuple[ProductName, ProductName] = ("gradient_of_rhs", "gradient_of_lhs")


def product_of(role: int, spec: ProductSpec) -> ProductName:
    """The product that lhs (role 0) or rhs (1) is quantized for, to be used in its second."""
    return "product" if quantized_once(role, ("product", OTHER_PRODUCT[role]), spec) else OTHER_PRODUCT[role]


def measured_parts(
    x: Float[Array, "..."], quantized: QuantizedArray, role: int, spec: ProductSpec, state: Array
) -> Float[Array, "*ensemble measures parts"]:
    """What the state records of parts of an operand, padded with zeros to the largest record.

    Args:
        x: The operand.
        quantized: What it was quantized to.
        role: Which operand: lhs (0), rhs (1) or the output's gradient (2).
        spec: What is static about the product.
        state: The state; inside `shard_map` devices that share it take the maximum over theirs.
    """
    scaling, count = spec.quantizations[role].scaling, measures(spec.recipe.scalings)
    if not (isinstance(scaling, AbstractStatefulScaling) and scaling.measures):
        return jnp.zeros((*x.shape[: spec.ensemble], count, 1), x.dtype)
    values = scaling.measure_parts(x, quantized, spec.ensemble)
    if (missing := count - values.shape[-2]) > 0:
        values = jnp.pad(values, [(0, 0)] * spec.ensemble + [(0, missing), (0, 0)])
    axes = axes_to_reduce(x, state)
    return lax.pmax(values, axes) if axes else values


def of_operands(measured: Sequence[Array]) -> Float[Array, "*ensemble measures parts"]:
    """The measures of several operands, concatenated; those with fewer parts are padded with `-inf`."""
    if len({x.dtype for x in measured}) > 1:
        measured = [to_float32(x) for x in measured]
    axis, parts = measured[0].ndim - 2, max(x.shape[-1] for x in measured)
    none = [(0, 0, 0)] * (axis + 1)
    fill = lambda x: lax.pad(x, np.asarray(-np.inf, x.dtype), [*none, (0, parts - x.shape[-1], 0)])
    return lax.concatenate([x if x.shape[-1] == parts else fill(x) for x in measured], axis)


def whole(measured: Float[Array, "*ensemble measures parts"]) -> Float[Array, "*ensemble measures"]:
    """The measures of the operands as a whole, in float32."""
    axes = (measured.ndim - 1,)
    return to_float32(lax.squeeze(measured, axes) if measured.shape[-1] == 1 else lax.reduce_max(measured, axes))
