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

from .._jax.max_grad import to_float32
from .._jax.opaque import opaque
from .._numerics.quantized_array import QuantizedArray
from .._state.table import measures
from ..recipes.scaling import AbstractStatefulScaling, stores_scale
from .contraction import ProductName
from .names import DGRAD, FP8_OPERAND, FP8_OUTPUT, FPROP, WGRAD
from .next_state import next_state
from .operands import (
    OTHER_PRODUCT,
    Scales,
    kept_as_is,
    measured_parts,
    of_operands,
    product_of,
    quantize_operand,
    quantized_once,
    round_to,
    scale_of_both,
    scales_of,
    stored_scale,
    whole,
    with_stored_scale,
)
from .spec import ProductSpec


# What `_forward` returns of an operand to keep; None for the operand itself.
type Saved = Array | QuantizedArray | None


class Residuals(NamedTuple):
    """What the backward pass keeps.

    Args:
        lhs: The operand as quantized for the gradient of rhs, its data alone where the state has its scale; the
            operand itself where it is a kernel that is quantized again, or in high precision there.
        rhs: The operand as quantized for the gradient of lhs, likewise.
        measured: What the state records of parts of lhs and rhs, `[*ensemble, 2 * measures, parts]`;
            None if nothing. Where the state is scales alone, they and the mark are rows in front of it: a scan stacks
            one array.
        state: The state, from which the next one is made; None where it is within `measured`.
        key: What random rounding draws from.
    """

    lhs: Array | QuantizedArray
    rhs: Array | QuantizedArray
    measured: Array | None
    state: Array | None
    key: Array | None

    def numbers(self, spec: ProductSpec) -> tuple[Array | None, Array | None]:
        """The state without its mark; and what was measured, behind the mark where the state has one."""
        if self.measured is None or not spec.records:
            return _scales_alone(self.state, spec), self.measured
        axis, count = spec.ensemble, spec.record_length
        state, measured = lax.split(self.measured, (count, self.measured.shape[axis] - count), axis)
        if state.shape[axis + 1] > 1:
            state = lax.slice_in_dim(state, 0, 1, axis=axis + 1)
        return lax.squeeze(state, (axis + 1,)), measured

    def operand(self, role: int, scales: Scales | None, spec: ProductSpec) -> QuantizedArray:
        """Lhs (role 0) or rhs (1) as quantized for the gradient of the other."""
        saved = (self.lhs, self.rhs)[role]
        if isinstance(saved, QuantizedArray):
            return saved
        if kept_as_is(role, spec):
            if role == (0 if spec.kernel_is_lhs else 1):
                # Else XLA would find that the forward pass quantized a kernel too, and keep that.
                saved = lax.optimization_barrier(saved)
            x = round_to(saved, spec.compute_dtype)
            product = product_of(role, spec)
            contracted = spec.contraction.with_batch_axes(spec.ensemble).contracted(product, *self.ranks)
            return quantize_operand(
                x, role, product, contracted[role if product == "product" else 1], scales, self.key, spec
            )
        scaling = spec.quantization(role, OTHER_PRODUCT[role]).scaling
        assert isinstance(scaling, AbstractStatefulScaling)
        return with_stored_scale(scaling.with_scale(saved, stored_scale(role, scales, spec), spec.ensemble), spec)

    @property
    def ranks(self) -> tuple[int, int]:
        """Of lhs and rhs."""
        lhs, rhs = (x.data if isinstance(x, QuantizedArray) else x for x in (self.lhs, self.rhs))
        return lhs.ndim, rhs.ndim


def forward(
    lhs: Any,
    rhs: Any,
    extras: tuple[Array, ...],
    state: Array | None,
    key: Array | None,
    spec: ProductSpec,
    *,
    rematerialized: bool,
) -> tuple[Array, Residuals]:
    """The output, and the residuals of the backward pass.

    Args:
        lhs: An operand; JAX may hand over literals.
        rhs: The other.
        extras: As in `fp8_dot_general`; likewise what follows.
        state: None for a stateless recipe.
        key: The random key for stochastic rounding.
        spec: What is static.
        rematerialized: Whether this is recomputed right before the backward pass.
    """
    out, saved, measured = _forward(lhs, rhs, extras, state, key, spec=spec, differentiated=True)
    kept_lhs, kept_rhs = (
        _kept(x, copy, is_kernel=is_kernel, rematerialized=rematerialized)
        for x, copy, is_kernel in zip((lhs, rhs), saved, (spec.kernel_is_lhs, not spec.kernel_is_lhs), strict=True)
    )
    apart = measured is None or not spec.records
    return checkpoint_name(out, FP8_OUTPUT), Residuals(kept_lhs, kept_rhs, measured, state if apart else None, key)


def _kept(x: Any, copy: Saved, *, is_kernel: bool, rematerialized: bool) -> Any:
    """What the backward pass keeps of an operand, under the name that checkpoint policies use."""
    if copy is None:
        # An argument goes past `_forward`: JAX would take it for a result that has to be stored.
        return x
    if is_kernel or rematerialized:
        # Transposed by a separate kernel, as wgrad and dgrad need it on NVIDIA GPUs. One that casts and
        # transposes takes no amax, so that another reads all that the operand is computed from: worth it only where
        # what is kept from the forward to the backward pass is then transposed already.
        copy = lax.optimization_barrier(copy)
    # A kernel has no name: it is kept to be quantized again.
    return copy if is_kernel else checkpoint_name(copy, FP8_OPERAND)


def product(
    lhs: Array, rhs: Array, extras: tuple[Array, ...], state: Array | None, key: Array | None, spec: ProductSpec
) -> Array:
    """The output, if no gradient is requested."""
    return _forward(lhs, rhs, extras, state, key, spec=spec, differentiated=False)[0]


@opaque("spec", "differentiated")
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
    lhs, rhs = (round_to(x, spec.compute_dtype) for x in (lhs, rhs))
    scales = scales_of(state, spec)
    with jax.named_scope(FPROP):
        contraction = spec.contraction.with_batch_axes(spec.ensemble)
        axes = contraction.contracted("product", lhs.ndim, rhs.ndim)
        quantized = [
            quantize_operand(x, role, "product", axes[role], scales, key, spec) for role, x in enumerate((lhs, rhs))
        ]
        dtype = spec.compute_dtype or spec.out_dtype
        a, b = quantized
        scale = scale_of_both(a, b, (0, 1), scales, spec)
        a, b = _for_one_product(quantized, axes, spec)
        out = round_to(contraction.product(a, b, extras, spec.precision, dtype, scale), spec.out_dtype)
    if not differentiated:
        return out, (None, None), None
    measured = None
    if state is not None and measures(spec.recipe.scalings):
        both = [measured_parts(x, quantized[role], role, spec, state) for role, x in enumerate((lhs, rhs))]
        of_state = [lax.expand_dims(to_float32(state), (state.ndim,))] if spec.records else []
        measured = of_operands([*of_state, *both])
    saved: list[Saved] = [None, None]
    for role, x in enumerate((lhs, rhs)):
        if kept_as_is(role, spec):
            continue
        product = product_of(role, spec)
        if product != "product":
            # 1-D blocks run along what is contracted, so the other product needs the operand quantized anew; now,
            # while it is there in high precision.
            contracted = contraction.contracted(product, lhs.ndim, rhs.ndim)[1]
            quantized[role] = quantize_operand(x, role, product, contracted, scales, key, spec)
        # Not the scale, if the state has it.
        stored = stores_scale(spec.quantization(role, product).scaling)
        saved[role] = quantized[role].data if stored else quantized[role]
    return out, (saved[0], saved[1]), measured


def _for_one_product(
    operands: Sequence[QuantizedArray], contracted: tuple[tuple[int, ...], tuple[int, ...]], spec: ProductSpec
) -> Sequence[QuantizedArray]:
    """Operands of fprop, if other layers multiply the same input.

    XLA merges small products that share an operand; it then has to split the concatenated result, and apply separate
    scales. A barrier over the input and this layer's kernel gives this product its own input. In wgrad, it would
    separate the input from its transposition; see `ProductSpec.wgrad_precision`.
    """
    if spec.group_place is None:
        return operands
    of_kernel = 0 if spec.kernel_is_lhs else 1
    kernel, shared = operands[of_kernel], operands[1 - of_kernel]
    # The kernel's data, if the product reads them as they are stored; else its scale, for which they need not be there.
    ndim, axes = kernel.data.ndim, contracted[of_kernel]
    own = kernel.data if axes == tuple(range(ndim - len(axes), ndim)) else kernel.scale
    data, _ = lax.optimization_barrier((shared.data, own))
    shared = dataclasses.replace(shared, data=data)
    return (kernel, shared) if spec.kernel_is_lhs else (shared, kernel)


@opaque("spec", "dtypes", "update")
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
    grad = round_to(grad, spec.compute_dtype)
    contraction = spec.contraction.with_batch_axes(spec.ensemble)
    state, measured = residuals.numbers(spec)
    scales, quantized = scales_of(state, spec), {}
    once = quantized_once(2, ("gradient_of_lhs", "gradient_of_rhs"), spec)
    dgrad, wgrad = (
        ("gradient_of_rhs", "gradient_of_lhs") if spec.kernel_is_lhs else ("gradient_of_lhs", "gradient_of_rhs")
    )

    def quantized_for(product: ProductName) -> QuantizedArray:
        name = "both" if once else product
        if name not in quantized:
            contracted = contraction.contracted(product, *residuals.ranks)[0]
            quantized[name] = quantize_operand(grad, 2, product, contracted, scales, residuals.key, spec)
        return quantized[name]

    def gradient(product: ProductName, other: int, dtype: np.dtype | None) -> Array | None:
        if dtype is None:
            return None
        operand, of_grad = residuals.operand(other, scales, spec), quantized_for(product)
        if once and product == wgrad:
            # cuBLASLt wants it transposed here. Apart from the cast, the transposition reads one byte per element,
            # and the cast is one pass with the amax.
            of_grad = dataclasses.replace(of_grad, data=lax.optimization_barrier(of_grad.data))
        scale = scale_of_both(of_grad, operand, (2, other), scales, spec)
        precision = spec.wgrad_precision if product == wgrad else lax.Precision.HIGHEST
        out = getattr(contraction, product)(of_grad, operand, extras, precision, spec.compute_dtype or dtype, scale)
        return round_to(out, dtype)

    names = (WGRAD, DGRAD) if spec.kernel_is_lhs else (DGRAD, WGRAD)
    with jax.named_scope(names[0]):
        grad_lhs = gradient("gradient_of_lhs", 1, dtypes[0])
    with jax.named_scope(names[1]):
        grad_rhs = gradient("gradient_of_rhs", 0, dtypes[1])
    gradients = grad_lhs, grad_rhs
    if state is None or not update:
        return gradients, None
    if measured is None and spec.records:
        return gradients, lax.full((*state.shape[:-1], state.shape[-1] + 1), 0.0, np.float32)
    if measured is None:
        return gradients, next_state(state, lax.full((*state.shape[:-2], 0), 0.0, np.float32), grad, spec)
    of_grad = measured_parts(grad, quantized_for(dgrad), 2, spec, state)
    # In the order of the state, from that of lhs, rhs and output gradient.
    axis, count = spec.ensemble, measures(spec.recipe.scalings)
    mark, *operands = lax.split(measured, (int(spec.records), count, count), axis)
    operands = [*operands, of_grad]
    last = []
    if spec.records:
        missing = spec.record_length - 3 * count
        last = [jnp.zeros((*of_grad.shape[:-2], missing, 1), of_grad.dtype), mark] if missing else [mark]
    measured = whole(of_operands([*(operands[row] for row in spec.state_rows), *last]))
    return gradients, measured if spec.records else next_state(state, measured, grad, spec)


def _scales_alone(state: Array | None, spec: ProductSpec) -> Array | None:
    """The state without the mark that one of scales alone has."""
    if state is None or not spec.records:
        return state
    return lax.slice_in_dim(state, 0, state.shape[-1] - 1, axis=state.ndim - 1)


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
    scales = scales_of(residuals.numbers(spec)[0], spec)
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
