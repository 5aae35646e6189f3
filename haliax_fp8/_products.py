"""The numerics of fprop, dgrad and wgrad: quantize, multiply, rescale; and the state of the next step."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from ._checkpoint import FP8_OPERAND, FP8_OUTPUT
from ._contraction import ProductName
from ._first_order import first_order
from ._measures import measured_parts, of_operands, whole
from ._mesh_axes import varying_axes
from ._product_spec import ProductSpec
from ._quantized_array import QuantizedArray
from ._recipe import Recipe
from ._scaling import (
    AbstractStatefulScaling,
    OperandUse,
    measures,
    stores_scale,
    updated,
    usable,
)
from ._state import to_float32


def _round_to(x: Array, dtype: np.dtype | None) -> Array:
    return x if dtype is None else lax.convert_element_type(x, dtype)


type Scales = tuple[Array, ...] | None


# Apart from `forward` and `backward`, so that ops of all shapes share one trace; as `_next_state` below.
@functools.partial(jax.jit, static_argnames="records")
def _scales(state: Array | None, *, records: bool) -> Scales:
    """The stored scale of each operand, `[*ensemble]`."""
    if state is None:
        return None
    if not records:
        scales = usable(to_float32(lax.index_in_dim(state, 0, axis=state.ndim - 1, keepdims=False)))
    elif state.shape[-1] == 3:
        scales = to_float32(state)
    else:
        scales = to_float32(lax.slice_in_dim(state, 0, None, state.shape[-1] // 3, axis=state.ndim - 1))
    axis = scales.ndim - 1
    return tuple(lax.squeeze(x, (axis,)) for x in lax.split(scales, (1, 1, 1), axis))


def _stored(role: int, scales: Scales, spec: ProductSpec) -> Array:
    """The stored scale of lhs (role 0), rhs (1) or the output's gradient (2)."""
    assert scales is not None
    return scales[spec.state_rows[role]]


def _quantize(
    x: Array,
    role: int,
    product: ProductName,
    contracted: tuple[int, ...],
    scales: Scales,
    key: Array | None,
    spec: ProductSpec,
) -> QuantizedArray:
    quantization = spec.quantization(role, product)
    use = OperandUse(
        format=quantization.format,
        contracted=contracted,
        ensemble=spec.ensemble,
        stored=_stored(role, scales, spec) if isinstance(quantization.scaling, AbstractStatefulScaling) else None,
        rounding=quantization.rounding,
        key=_key_of(x, key, role, product, spec) if quantization.rounding.needs_key else None,
        mixable=product not in spec.contraction.groups,
    )
    return quantization.scaling.quantize(x, use)


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


def _shared(role: int, products: tuple[ProductName, ProductName], spec: ProductSpec) -> bool:
    """Whether an operand is quantized once for two products."""
    first, second = (spec.quantization(role, product) for product in products)
    return first == second and not first.scaling.directional


def _kept_as_is(role: int, spec: ProductSpec) -> bool:
    """Whether the backward pass keeps an operand itself: a kernel to quantize again, or one in high precision."""
    if spec.requantizes and role == (0 if spec.kernel_is_lhs else 1):
        return True
    return not spec.quantization(role, _OTHER_PRODUCT[role]).scaling.quantizes


_PRODUCTS: tuple[ProductName, ...] = ("product", "gradient_of_lhs", "gradient_of_rhs")

# The product beside fprop that lhs and rhs are operands of.
_OTHER_PRODUCT: tuple[ProductName, ProductName] = ("gradient_of_rhs", "gradient_of_lhs")


def _product_of(role: int, spec: ProductSpec) -> ProductName:
    """The product that lhs (role 0) or rhs (1) is quantized for, to be used in its second."""
    return "product" if _shared(role, ("product", _OTHER_PRODUCT[role]), spec) else _OTHER_PRODUCT[role]


class Residuals(NamedTuple):
    """What the backward pass keeps.

    Args:
        lhs: The operand as quantized for the gradient of rhs, its data alone where the state has its scale; the
            operand itself where it is a kernel that is quantized again, or in high precision there.
        rhs: The operand as quantized for the gradient of lhs, likewise.
        measured: What the state records of parts of lhs and rhs, `[*ensemble, 2 * measures, parts]`;
            None if nothing. Where the state is scales alone, they are rows in front of it: a scan stacks one array.
        state: The state, from which the next one is made; None where it is within `measured`.
        key: What random rounding draws from.
    """

    lhs: Array | QuantizedArray
    rhs: Array | QuantizedArray
    measured: Array | None
    state: Array | None
    key: Array | None

    def numbers(self, spec: ProductSpec) -> tuple[Array | None, Array | None]:
        """The state, and what was measured."""
        if self.measured is None or not spec.records:
            return self.state, self.measured
        axis, count = spec.ensemble, 3 * measures(spec.recipe.scalings)
        state, measured = lax.split(self.measured, (count, self.measured.shape[axis] - count), axis)
        return lax.squeeze(lax.slice_in_dim(state, 0, 1, axis=axis + 1), (axis + 1,)), measured

    def operand(self, role: int, scales: Scales, spec: ProductSpec) -> QuantizedArray:
        """Lhs (role 0) or rhs (1) as quantized for the gradient of the other."""
        saved = (self.lhs, self.rhs)[role]
        if role == (0 if spec.kernel_is_lhs else 1):
            # Else XLA would find that the forward pass quantized a kernel too, and keep that; or transpose it there.
            saved = lax.optimization_barrier(saved)
        if isinstance(saved, QuantizedArray):
            return saved
        if _kept_as_is(role, spec):
            x = _round_to(first_order(saved)[0], spec.compute_dtype)
            product = _product_of(role, spec)
            contracted = spec.contraction.with_batch_axes(spec.ensemble).contracted(product, *self.ranks)
            return _quantize(x, role, product, contracted[role if product == "product" else 1], scales, self.key, spec)
        scaling = spec.quantization(role, _OTHER_PRODUCT[role]).scaling
        assert isinstance(scaling, AbstractStatefulScaling)
        return scaling.with_scale(saved, _stored(role, scales, spec), spec.ensemble)

    @property
    def ranks(self) -> tuple[int, int]:
        """Of lhs and rhs."""
        lhs, rhs = (x.data if isinstance(x, QuantizedArray) else x for x in (self.lhs, self.rhs))
        return lhs.ndim, rhs.ndim


def forward(
    lhs: Any, rhs: Any, extras: tuple[Array, ...], state: Array | None, key: Array | None, spec: ProductSpec
) -> tuple[Array, Residuals]:
    """The output, and the residuals of the backward pass; JAX may hand over literals as operands."""
    out, saved, measured = _forward(lhs, rhs, extras, state, key, spec=spec, differentiated=True)
    # What is an argument goes past the jitted function: JAX would take it for a result that has to be stored.
    kept_lhs, kept_rhs = (x if kept is None else kept for x, kept in zip((lhs, rhs), saved, strict=True))
    apart = measured is None or not spec.records
    return out, Residuals(kept_lhs, kept_rhs, measured, state if apart else None, key)


def product(
    lhs: Array, rhs: Array, extras: tuple[Array, ...], state: Array | None, key: Array | None, spec: ProductSpec
) -> Array:
    """The output, where no gradient is asked for."""
    return _forward(lhs, rhs, extras, state, key, spec=spec, differentiated=False)[0]


type Saved = Array | QuantizedArray | None


@functools.partial(jax.jit, static_argnames=("spec", "differentiated"))
def _forward(
    lhs: Array,
    rhs: Array,
    extras: tuple[Array, ...],
    state: Array | None,
    key: Array | None,
    *,
    spec: ProductSpec,
    differentiated: bool,
) -> tuple[Array, tuple[Saved, Saved], Array | None]:
    """The output; what the backward pass needs of lhs and rhs, None for the operand itself; and what was measured."""
    lhs, rhs = (_round_to(x, spec.compute_dtype) for x in first_order(lhs, rhs))
    scales = _scales(state, records=spec.records)
    with jax.named_scope("fprop"):
        contraction = spec.contraction.with_batch_axes(spec.ensemble)
        axes = contraction.contracted("product", lhs.ndim, rhs.ndim)
        quantized = [_quantize(x, role, "product", axes[role], scales, key, spec) for role, x in enumerate((lhs, rhs))]
        dtype = spec.compute_dtype or spec.out_dtype
        out = _round_to(contraction.product(quantized[0], quantized[1], extras, spec.precision, dtype), spec.out_dtype)
    if not differentiated:
        return out, (None, None), None
    measured = None
    if state is not None and measures(spec.recipe.scalings):
        both = [measured_parts(x, quantized[role], role, spec, state) for role, x in enumerate((lhs, rhs))]
        of_state = [lax.expand_dims(to_float32(state), (state.ndim,))] if spec.records else []
        measured = of_operands([*of_state, *both])
    saved: list[Saved] = [None, None]
    for role, x in enumerate((lhs, rhs)):
        if _kept_as_is(role, spec):
            continue
        product = _product_of(role, spec)
        if product != "product":
            # 1-D blocks run along what is contracted, so the other product needs the operand quantized anew; now,
            # while it is there in high precision.
            contracted = contraction.contracted(product, lhs.ndim, rhs.ndim)[1]
            quantized[role] = _quantize(x, role, product, contracted, scales, key, spec)
        # Not the scale, if the state has it.
        kept = quantized[role].data if stores_scale(spec.quantization(role, product).scaling) else quantized[role]
        # A kernel has no name for a policy to keep it by: it is there to be quantized again.
        saved[role] = kept if role == (0 if spec.kernel_is_lhs else 1) else checkpoint_name(kept, FP8_OPERAND)
    return checkpoint_name(out, FP8_OUTPUT), (saved[0], saved[1]), measured


@functools.partial(jax.jit, static_argnames=("spec", "dtypes", "update"))
def backward(
    grad: Array,
    residuals: Residuals,
    extras: tuple[Array, ...],
    *,
    spec: ProductSpec,
    dtypes: tuple[np.dtype | None, np.dtype | None],
    update: bool,
) -> tuple[tuple[Array | None, Array | None], Array | None]:
    """The gradients of lhs and rhs in the dtypes given (None: not wanted), and if wanted the next step's state."""
    grad = _round_to(first_order(grad)[0], spec.compute_dtype)
    contraction = spec.contraction.with_batch_axes(spec.ensemble)
    state, measured = residuals.numbers(spec)
    scales, quantized = _scales(state, records=spec.records), {}
    once = _shared(2, ("gradient_of_lhs", "gradient_of_rhs"), spec)
    dgrad, wgrad = (
        ("gradient_of_rhs", "gradient_of_lhs") if spec.kernel_is_lhs else ("gradient_of_lhs", "gradient_of_rhs")
    )

    def quantized_for(product: ProductName) -> QuantizedArray:
        name = "both" if once else product
        if name not in quantized:
            contracted = contraction.contracted(product, *residuals.ranks)[0]
            quantized[name] = _quantize(grad, 2, product, contracted, scales, residuals.key, spec)
        return quantized[name]

    def gradient(product: ProductName, other: int, dtype: np.dtype | None) -> Array | None:
        if dtype is None:
            return None
        operand, of_grad = residuals.operand(other, scales, spec), quantized_for(product)
        if once and product == wgrad:
            # cuBLASLt wants it transposed here. Apart from the cast, the transposition reads one byte per element,
            # and the cast is one pass with the amax.
            of_grad = dataclasses.replace(of_grad, data=lax.optimization_barrier(of_grad.data))
        out = getattr(contraction, product)(of_grad, operand, extras, spec.compute_dtype or dtype)
        return _round_to(out, dtype)

    names = ("wgrad", "dgrad") if spec.kernel_is_lhs else ("dgrad", "wgrad")
    with jax.named_scope(names[0]):
        grad_lhs = gradient("gradient_of_lhs", 1, dtypes[0])
    with jax.named_scope(names[1]):
        grad_rhs = gradient("gradient_of_rhs", 0, dtypes[1])
    gradients = grad_lhs, grad_rhs
    if state is None or not update:
        return gradients, None
    if measured is None:
        return gradients, lax.full_like(state, 0.0, np.float32) if spec.records else to_float32(state)
    of_grad = measured_parts(grad, quantized_for(dgrad), 2, spec, state)
    measured = whole(of_operands([measured, of_grad]))
    # From the order lhs, rhs, output gradient into that of the state.
    if spec.kernel_is_lhs:
        operands = lax.split(measured, (measured.shape[-1] // 3,) * 3, spec.ensemble)
        measured = lax.concatenate([operands[row] for row in spec.state_rows], spec.ensemble)
    return gradients, measured if spec.records else _next_state(state, measured, recipe=spec.recipe)


@functools.partial(jax.jit, static_argnames="recipe")
def _next_state(state: Array, measured: Array, *, recipe: Recipe) -> Array:
    measured = lax.reshape(measured, (*state.shape[:-1], measured.shape[-1] // 3))
    return updated(to_float32(state), measured, recipe.scalings, recipe.limits)


@functools.partial(jax.jit, static_argnames=("spec", "linear"))
def tangent(
    tangents: Sequence[Array],
    residuals: Residuals,
    extras: tuple[Array, ...],
    *,
    spec: ProductSpec,
    linear: tuple[bool, bool],
) -> Array:
    """The output's tangent, `dot(dlhs, rhs) + dot(lhs, drhs)`, rounding taken as the identity."""
    scales = _scales(residuals.numbers(spec)[0], records=spec.records)
    lhs, rhs = (residuals.operand(role, scales, spec) for role in (0, 1))
    contraction = spec.contraction.with_batch_axes(spec.ensemble)
    given = iter(tangents)
    dlhs, drhs = (next(given) if is_linear else None for is_linear in linear)
    terms = []
    if dlhs is not None:
        terms.append(contraction.dot(dlhs.astype(jnp.float32), rhs.dequantize(), extras, lax.Precision.HIGHEST))
    if drhs is not None:
        terms.append(contraction.dot(lhs.dequantize(), drhs.astype(jnp.float32), extras, lax.Precision.HIGHEST))
    if not terms:
        return jnp.zeros(contraction.out_shape(lhs.shape, rhs.shape), spec.out_dtype)
    return sum(terms[1:], start=terms[0]).astype(spec.out_dtype)
