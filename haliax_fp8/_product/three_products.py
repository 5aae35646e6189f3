"""fprop, dgrad and wgrad: quantize, multiply, apply the scales; and what the backward pass keeps for that."""

import contextlib
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

from .._jax.meshes import automatic_axes, manual_axes
from .._jax.opaque import opaque
from .._jax.xla import (
    gathered_once,
    operand_per_sharer,
    precision_per_sharer,
    prevent_cse_with_forward,
    read_by_activation,
    transposed_from_fp8,
    transposed_separately,
    transposed_separately_on_one,
)
from .._numerics.quantized_array import QuantizedArray
from .._numerics.stored_array import StoredArray
from .._state.record import StateResiduals, in_product, measured_in_product, pack, unpack
from .._state.table import numbers_of, record_length
from ..recipes.recipe import OPERANDS, USES, OperandName, ProductName
from ..scopes import DGRAD, FP4, FP8_KERNEL, FP8_OPERAND, FP8_OUTPUT, FPROP, WGRAD
from .kernel_for_products import KernelForProducts
from .operands import (
    Scales,
    from_residual,
    in_high_precision,
    measured_parts,
    quantize_operand,
    residual_of,
    round_to,
    scaled_values,
    scales_of,
)
from .partition import recomputed_unless_sent
from .spec import DgradKernel, ProductSpec


# What `_fprop` returns of an operand to keep; None for the operand itself.
type Residual = Array | QuantizedArray | None


class Residuals(NamedTuple):
    """What the backward pass keeps.

    Args:
        input: The input as quantized for wgrad, its data alone where the state has its scale; the input itself where
            wgrad is in high precision.
        kernel: The kernel as quantized for dgrad, its data alone where the state has its scale; the kernel itself where
            it is quantized again or dgrad is in high precision; what was quantized before, if it was.
        record: The scales, and below them what was measured of input and kernel, see `pack`; None for a stateless
            recipe.
        key: What random rounding draws from.
        sent_kernel: Beside a kernel that is quantized again, or was quantized for both products before: what fprop
            multiplied by, for programs whose devices would send each other the kernel twice; else None.
    """

    input: Array | QuantizedArray
    kernel: Array | QuantizedArray | StoredArray[Array]
    record: Array | None
    key: Array | None
    sent_kernel: Array | None = None

    def stored(self, spec: ProductSpec) -> tuple[Array | None, StateResiduals | None]:
        """The scales, and with what was measured; None if there are none, or nothing is."""
        if self.record is None or not numbers_of(spec.recipe.scalings):
            return self.record, None
        state = unpack(self.record, record_length(spec.recipe.scalings))
        # Without this, XLA quantizes experts' kernels for both passes at once, and keeps both.
        scales = prevent_cse_with_forward(state.scales) if spec.contraction.is_grouped else state.scales
        return scales, state

    def operand(
        self, operand: OperandName, scales: Scales | None, group_sizes: Array | None, spec: ProductSpec
    ) -> QuantizedArray:
        """Input or kernel as quantized for the backward pass."""
        residual = self.input if operand == "input" else self.kernel
        product = spec.recipe.quantized_for[operand, USES[operand][1]]
        if operand not in spec.residuals_in_high_precision:
            quantized = from_residual(residual, operand, product, scales, spec)
        else:
            assert not isinstance(residual, QuantizedArray | StoredArray)
            if operand == "kernel":
                residual = prevent_cse_with_forward(residual)
            x = round_to(residual, spec.compute_dtype)
            members = spec.batched.members(operand, x.shape, group_sizes, spec.ensemble)
            quantized = quantize_operand(x, operand, product, scales, self.key, members, spec)
        if operand == "kernel" and self.sent_kernel is not None:
            data = recomputed_unless_sent(self.sent_kernel, quantized.data, in_blocks=quantized.block is not None)
            quantized = dataclasses.replace(quantized, data=data)
        return quantized


def residual_array(residual: Any) -> Any:
    """The array of an operand's residual, with the operand's axes in front; the others may be in another order."""
    return residual.data if isinstance(residual, QuantizedArray | StoredArray) else residual


def forward(
    input: Any,
    kernel: Any,
    group_sizes: Any,
    record: Array | None,
    key: Array | None,
    quantized_kernel: KernelForProducts[Array] | None,
    spec: ProductSpec,
    *,
    rematerialized: bool,
) -> tuple[Array, Residuals]:
    """The output, and the residuals of the backward pass.

    Args:
        input: The layer's input; JAX may hand over literals.
        kernel: The layer's kernel, which may be a literal too.
        group_sizes: As in `fp8_dot_general`, possibly literals.
        record: The scales; None for a stateless recipe.
        key: The random key for stochastic rounding.
        quantized_kernel: The kernel, if it was quantized before; else None.
        spec: What is static.
        rematerialized: Whether this is recomputed right before the backward pass.
    """
    sent_kernel = None
    if spec.dgrad_kernel.may_be_sent and not manual_axes():
        if quantized_kernel is None:
            sent_kernel = _kernel_to_send(kernel, record, key, spec=spec)
        else:
            assert quantized_kernel.fprop is not None
            sent_kernel = quantized_kernel.fprop.values_of_data
    out, quantized, packed = _fprop(
        input, kernel, group_sizes, record, key, quantized_kernel, sent_kernel, spec=spec, differentiated=True
    )
    quantized_input, kernel_for_dgrad = quantized
    # Where nothing new is kept, the argument itself is: routed through `_fprop`, JAX would store it as a result.
    if quantized_input is not None:
        if rematerialized:
            # Recomputed right before wgrad transposes it: XLA would do both in one launch.
            quantized_input = transposed_separately(quantized_input)
        input = checkpoint_name(quantized_input, FP8_OPERAND)
    if quantized_kernel is not None and quantized_kernel.dgrad is not None:
        kernel = quantized_kernel.dgrad
    elif kernel_for_dgrad is not None:
        kernel = transposed_separately_on_one(kernel_for_dgrad)
        if rematerialized and spec.dgrad_kernel is DgradKernel.SAVED:
            kernel = checkpoint_name(kernel, FP8_KERNEL)
    return checkpoint_name(out, FP8_OUTPUT), Residuals(input, kernel, packed, key, sent_kernel)


def fprop_alone(
    input: Array,
    kernel: Array,
    group_sizes: Array | None,
    record: Array | None,
    key: Array | None,
    quantized_kernel: KernelForProducts[Array] | None,
    spec: ProductSpec,
) -> Array:
    """The output, if no gradient is requested."""
    return _fprop(input, kernel, group_sizes, record, key, quantized_kernel, None, spec=spec, differentiated=False)[0]


@opaque
def _kernel_to_send(kernel: Array, record: Array | None, key: Array | None, *, spec: ProductSpec) -> Array:
    """The data of the kernel as fprop takes it.

    Apart from fprop: in a loop that uses one kernel in every step, JAX keeps it once.
    """
    scales = scales_of(None if record is None else in_product(record), spec)
    with _scope(FPROP, spec):
        kernel = round_to(kernel, spec.compute_dtype)
        members = spec.batched.members("kernel", kernel.shape, None, spec.ensemble)
        return quantize_operand(kernel, "kernel", "fprop", scales, key, members, spec).data


@opaque
def _fprop(
    input: Array,
    kernel: Array,
    group_sizes: Array | None,
    record: Array | None,
    key: Array | None,
    quantized_kernel: KernelForProducts[Array] | None,
    sent_kernel: Array | None,
    *,
    spec: ProductSpec,
    differentiated: bool,
) -> tuple[Array, tuple[Residual, Residual], Array | None]:
    """The output; what the backward pass needs of input and kernel, None for the operand itself; and the record
    with what was measured."""
    record = None if record is None else in_product(record)
    operands: dict[OperandName, Array] = {
        "input": round_to(input, spec.compute_dtype),
        "kernel": round_to(kernel, spec.compute_dtype),
    }
    scales = scales_of(record, spec)
    members = {name: spec.batched.members(name, x.shape, group_sizes, spec.ensemble) for name, x in operands.items()}
    with _scope(FPROP, spec):
        is_saved = spec.dgrad_kernel in (DgradKernel.SAVED, DgradKernel.SAVED_UNLESS_RECOMPUTED)
        for_both = {
            "input": differentiated and "input" not in spec.residuals_in_high_precision,
            "kernel": differentiated and is_saved,
        }
        quantized = {
            operand: quantize_operand(
                x, operand, "fprop", scales, key, members[operand], spec, quantized_kernel, for_both=for_both[operand]
            )
            if operand == "input" or sent_kernel is None or quantized_kernel is not None
            else from_residual(sent_kernel, operand, "fprop", scales, spec)
            for operand, x in operands.items()
        }
        if sent_kernel is not None and quantized_kernel is not None:
            quantized["kernel"] = dataclasses.replace(quantized["kernel"], data=sent_kernel)
        if differentiated and is_saved and "kernel" in spec.recipe.quantized_once:
            whole = quantized["kernel"]
            quantized["kernel"] = dataclasses.replace(whole, data=gathered_once(whole.data))
        if differentiated and "input" not in spec.residuals_in_high_precision and "input" in spec.recipe.quantized_once:
            whole = quantized["input"]
            quantized["input"] = dataclasses.replace(whole, data=transposed_from_fp8(whole.data))
        dtype, scale = spec.compute_dtype or spec.out_dtype, scales.of_product("fprop", spec) if scales else None
        unshared_scale = quantized["kernel"].scale if scale is None else scale
        pair = _input_per_sharer(quantized["input"], unshared_scale, spec), quantized["kernel"]
        out = round_to(spec.batched.product("fprop", pair, group_sizes, spec.precision, dtype, scale), spec.out_dtype)
        # Other scales are applied behind the product, by the launch that reads its result.
        if differentiated and group_sizes is None and all(x.scale.size == 1 for x in pair):
            out = read_by_activation(out, input)
    if not differentiated:
        return out, (None, None), None
    if record is not None and numbers_of(spec.recipe.scalings):
        parts = [
            measured_parts(x, quantized[operand], operand, members[operand], spec, record)
            if operand == "input" or quantized_kernel is None or quantized_kernel.measured is None
            else lax.bitcast_convert_type(quantized_kernel.measured, np.float32)
            for operand, x in operands.items()
        ]
        record = pack(record, parts)
    residuals: list[Residual] = []
    for operand, x in operands.items():
        product = spec.recipe.quantized_for[operand, USES[operand][1]]
        if operand in spec.residuals_in_high_precision or (operand == "kernel" and quantized_kernel is not None):
            residuals.append(None)
            continue
        if product != "fprop" or quantized[operand].swizzled is not None:
            # 1-D blocks run along what is contracted, so the other product needs the operand quantized anew; now,
            # while it is there in high precision. And what a GPU kernel has written lies as one product reads it.
            product = USES[operand][1]
            quantized[operand] = quantize_operand(
                x, operand, product, scales, key, members[operand], spec, for_both=True
            )
        residuals.append(residual_of(quantized[operand], operand, product, spec))
    return out, (residuals[0], residuals[1]), record


def _input_per_sharer(input: QuantizedArray, unshared_scale: Array, spec: ProductSpec) -> QuantizedArray:
    """The input of fprop, kept apart from other layers' products of it by a scale that only this product takes."""
    if spec.index_among_sharers is None or automatic_axes():
        # With a barrier for each product, devices would send each other the operand for each.
        return input
    return dataclasses.replace(input, data=operand_per_sharer(input.data, unshared_scale))


@opaque
def backward(
    grad: Array,
    residuals: Residuals,
    group_sizes: Array | None,
    *,
    spec: ProductSpec,
    dtypes: tuple[np.dtype | None, np.dtype | None],
    update: bool,
) -> tuple[tuple[Array | None, Array | None], Array | None]:
    """The gradients of input and kernel in the dtypes given (None: not asked for), and what was measured if asked for.

    Args:
        grad: The output's gradient.
        residuals: What the forward pass kept.
        group_sizes: How many rows each group has; None without groups.
        spec: What is static.
        dtypes: The dtypes of the gradients.
        update: Whether to return what was measured.
    """
    grad = round_to(grad, spec.compute_dtype)
    record, state = residuals.stored(spec)
    scales, quantized = scales_of(record, spec), {}
    members = spec.batched.members("output_grad", grad.shape, group_sizes, spec.ensemble)

    def grad_for(product: ProductName) -> QuantizedArray:
        product = spec.recipe.quantized_for["output_grad", product]
        if product not in quantized:
            key, for_both = residuals.key, None not in dtypes
            quantized_grad = quantize_operand(
                grad, "output_grad", product, scales, key, members, spec, for_both=for_both
            )
            if "output_grad" in spec.recipe.quantized_once and None not in dtypes:
                quantized_grad = dataclasses.replace(quantized_grad, data=gathered_once(quantized_grad.data))
            quantized[product] = quantized_grad
        return quantized[product]

    def gradient(product: ProductName, other: OperandName, dtype: np.dtype | None) -> Array | None:
        if dtype is None:
            return None
        operand, quantized_grad = residuals.operand(other, scales, group_sizes, spec), grad_for(product)
        if product not in spec.recipe.quantized_products:
            operand = in_high_precision(operand, other, product, grad.dtype, spec)
        if product == "wgrad" and "output_grad" in spec.recipe.quantized_once:
            # cuBLASLt wants it transposed here. What was gathered for both products has a barrier already.
            separately = transposed_separately if None in dtypes else transposed_separately_on_one
            quantized_grad = dataclasses.replace(quantized_grad, data=separately(quantized_grad.data))
        pair = (quantized_grad, operand) if product == "dgrad" else (operand, quantized_grad)
        precision = precision_per_sharer(spec.index_among_sharers) if product == "wgrad" else lax.Precision.HIGHEST
        scale = scales.of_product(product, spec) if scales else None
        out = spec.batched.product(product, pair, group_sizes, precision, spec.compute_dtype or dtype, scale)
        return round_to(out, dtype)

    with _scope(DGRAD, spec):
        input_grad = gradient("dgrad", "kernel", dtypes[0])
    with _scope(WGRAD, spec):
        kernel_grad = gradient("wgrad", "input", dtypes[1])
    gradients = input_grad, kernel_grad
    if record is None or not update:
        return gradients, None
    if state is None:
        return gradients, lax.full(record.shape, 0.0, np.float32)
    grad_parts = measured_parts(grad, grad_for("dgrad"), "output_grad", members, spec, record)
    return gradients, members.reached(measured_in_product(state, grad_parts))


def _scope(product: ProductName, spec: ProductSpec) -> contextlib.AbstractContextManager[Any]:
    return jax.named_scope(f"{product}/{FP4}" if spec.recipe.precisions[product] == "FP4" else product)


@functools.partial(jax.jit, static_argnames=("spec", "linear"))
def tangent(
    tangents: Sequence[Array],
    residuals: Residuals,
    group_sizes: Array | None,
    *,
    spec: ProductSpec,
    linear: tuple[bool, bool],
) -> Array:
    """The output's tangent, `dot(dx, w) + dot(x, dw)`, rounding taken as the identity."""
    scales = scales_of(residuals.stored(spec)[0], spec)
    x, w = (residuals.operand(operand, scales, group_sizes, spec) for operand in OPERANDS["fprop"])
    remaining = iter(tangents)
    dx, dw = (next(remaining) if is_linear else None for is_linear in linear)
    terms = []
    if dx is not None:
        members = spec.batched.members("kernel", w.shape, group_sizes, spec.ensemble)
        kernel_values = scaled_values(w, "kernel", scales, members, spec)
        terms.append(spec.batched.dot(dx.astype(jnp.float32), kernel_values, group_sizes, lax.Precision.HIGHEST))
    if dw is not None:
        members = spec.batched.members("input", x.shape, group_sizes, spec.ensemble)
        input_values = scaled_values(x, "input", scales, members, spec)
        terms.append(spec.batched.dot(input_values, dw.astype(jnp.float32), group_sizes, lax.Precision.HIGHEST))
    if not terms:
        return jnp.zeros(spec.batched.out_shape(x.shape, w.shape), spec.out_dtype)
    return sum(terms[1:], start=terms[0]).astype(spec.out_dtype)
