"""The kernel of a layer, quantized as the next training step would quantize it, or with its own scales."""

import dataclasses
import functools
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float

from .._jax.max_grad import to_float32
from .._numerics.quantized_array import QuantizedArray
from .._numerics.stored_array import StoredArray, bits_of, codes_of
from .._op import Fp8DotGeneral
from .._product.blocks import NV, exponent_of
from .._product.grouped.contraction import RaggedContraction
from .._product.operands import quantize_operand, round_to, scales_of
from .._product.spec import ProductSpec
from .._state.op_state import OpState
from ..formats import E2M1
from ..layers.checks import table_on_host, uncalibrated_operands, unrecorded_operands
from ..layers.quantized_kernels import BoundKernel, bind_kernel, is_floating, with_names_of_stacks
from ..layers.rule import LayerRule
from ..layouts import Layout
from ..recipes.recipe import SCALE_BITS, OperandName, Quantization
from ..recipes.scaling import (
    AbstractScaling,
    CurrentScaling,
    Members,
    MXFP8Scaling,
    NVFP4Scaling,
    OperandUse,
    StaticScaling,
)
from .kernel import QuantizedKernel
from .layout import scaling_of_kernel


# What a static layout takes from the training state, and where the table has it.
_STORED: dict[OperandName, int] = {"input": 0, "kernel": 1}


def served_kernel(
    path: str, rule: LayerRule, layer: Any, stack: tuple[hax.Axis, ...], layout: Layout
) -> QuantizedKernel:
    """The kernel of a layer, quantized for inference.

    Args:
        path: The layer's path, for errors.
        rule: Its rule.
        layer: The layer, converted or not.
        stack: The axes of the stacks that it is in.
        layout: How it is quantized.

    Raises:
        ValueError: If the layout needs scales that the layer lacks, or the weight is not finite or not an array.
    """
    name = path or "the model itself"
    op, kernel = rule.op(layer), rule.kernel(layer)
    if not is_floating(kernel):
        raise ValueError(f"the weight of {name} is a {type(kernel.weight).__name__}, not an array of floating numbers")
    if kernel.Experts is not None and layout.inputs is None:
        raise ValueError(
            f"{name} multiplies each row by the kernel of an expert, which is not supported for FP8 kernels and "
            "high-precision inputs; exclude it, or use another layout"
        )
    per_expert = op is not None and op.state_per_group and layout.is_static
    is_whole = layout.is_static or layout.strategy == "tensor"
    scaling = scaling_of_kernel(layout, is_whole=is_whole, power_of_two=True)
    bound = bind_kernel(path, kernel, stack, per_axis=scaling.per_axis)
    _require_finite(name, bound.array)
    compute_dtype = None if op is None else op.compute_dtype
    spec, state = None, None
    if layout.is_static:
        op = _with_scales(name, op, layout)
        assert isinstance(op.state, OpState)
        contraction = RaggedContraction(state_per_group=True) if per_expert else bound.contraction
        spec, state = _spec_of(op, op.state, contraction, bound), to_float32(op.state.record)
    quantized, input_scale = _quantized(
        bound.array,
        state,
        spec=spec,
        quantization=Quantization(layout.format, scaling),
        contraction=bound.contraction,
        leading=bound.leading,
        compute_dtype=compute_dtype,
    )
    contracted = bound.contraction.contracted("fprop")[1]
    ndim = quantized.data.ndim - bound.leading
    order = (*(axis for axis in range(ndim) if axis not in contracted), *sorted(contracted))
    data = quantized.data
    if order != tuple(range(ndim)):
        data = jnp.transpose(data, (*range(bound.leading), *(bound.leading + axis for axis in order)))
    in_four = layout.format is E2M1
    if in_four and data.shape[-1] % 2:
        raise ValueError(
            f"{name} sums over an odd number of inputs, {data.shape[-1]}, and layout={layout.name!r} has two in each "
            "byte; exclude it, or take a layout in FP8"
        )
    named = functools.partial(with_names_of_stacks, stack=bound.stack, leading=bound.leading)
    stored = StoredArray(
        named(codes_of(data) if in_four else bits_of(data)),
        _named_scale(quantized, bound, scaling, per_expert=per_expert),
        _named_tensor_scale(quantized, bound),
        dtype=np.dtype(E2M1.dtype if in_four else data.dtype),
        order=order,
        block=None if quantized.block is None else quantized.block[bound.leading :],
        scale_bits=quantized.scale_bits,
        tensor_scale_bits=quantized.tensor_scale_bits,
    )
    stored_input = None if input_scale is None else named(bits_of(input_scale))
    dtype = np.dtype(bound.array.dtype)
    origin = "scales of input and kernel from the training state" if layout.is_static else "scales computed"
    return QuantizedKernel(stored, stored_input, layout, contracted, compute_dtype, dtype, origin)


def _named_scale(
    quantized: QuantizedArray, bound: BoundKernel, scaling: AbstractScaling, *, per_expert: bool
) -> hax.NamedArray:
    scale = quantized.scale
    if per_expert:
        scale = scale.reshape(scale.shape[: bound.leading + 1])
    elif isinstance(scaling, StaticScaling | CurrentScaling):
        # One scale per layer, whatever the rank of its kernel, so that a stack can be divided into layers.
        scale = scale.reshape(bound.array.shape[: bound.leading])
    if isinstance(scaling, MXFP8Scaling):
        scale = exponent_of(scale)
    elif isinstance(scaling, NVFP4Scaling):
        scale = NV.scale_bits(quantized)
    else:
        scale = bits_of(scale)
    return with_names_of_stacks(scale, bound.stack, bound.leading)


def _named_tensor_scale(quantized: QuantizedArray, bound: BoundKernel) -> hax.NamedArray | None:
    if (scale := quantized.tensor_scale) is None:
        return None
    return with_names_of_stacks(bits_of(scale.reshape(scale.shape[: bound.leading])), bound.stack, bound.leading)


def _spec_of(op: Fp8DotGeneral, state: OpState, contraction: Any, bound: BoundKernel) -> ProductSpec:
    """The product of the next step."""
    return ProductSpec(
        recipe=op.recipe,
        contraction=contraction,
        compute_dtype=op.compute_dtype,
        out_dtype=op.compute_dtype or np.dtype(bound.array.dtype),
        precision=lax.Precision.DEFAULT,
        # Experts that each have a state are members of an ensemble.
        ensemble=bound.leading + contraction.state_per_group,
    )


@functools.partial(jax.jit, static_argnames=("spec", "quantization", "contraction", "leading", "compute_dtype"))
def _quantized(
    array: Float[Array, "..."],
    state: Array | None,
    *,
    spec: ProductSpec | None,
    quantization: Quantization,
    contraction: Any,
    leading: int,
    compute_dtype: np.dtype | None,
) -> tuple[QuantizedArray, Array | None]:
    """The kernel, and the stored scale of the input."""
    in_bf16 = (compute_dtype or array.dtype) == jnp.bfloat16
    array = round_to(array, compute_dtype)
    scales = None if spec is None else scales_of(state, spec)
    if spec is not None:
        quantized = quantize_operand(array, "kernel", "fprop", scales, None, Members(spec.ensemble), spec)
        if spec.contraction.state_per_group:
            assert scales is not None
            of_experts = lax.expand_dims(scales.operands["kernel"], (leading + 1, leading + 2))
            quantized = dataclasses.replace(quantized, scale=of_experts)
    else:
        use = OperandUse(
            format=quantization.format,
            contracted=contraction.with_batch_axes(leading).contracted("fprop")[1],
            members=Members(leading),
            scale_bits=SCALE_BITS["kernel"] if in_bf16 else 24,
        )
        quantized = quantization.scaling.quantize(array, use)
    return quantized, None if scales is None else scales.operands["input"]


def _with_scales(name: str, op: Fp8DotGeneral | None, layout: Layout) -> Fp8DotGeneral:
    """The op of a layer; raises a ValueError unless its state has the scales that a layout needs."""
    remedy = (
        "use a layout that computes scales, such as 'FP8_DYNAMIC'; or calibrate the model first: model = "
        "calibrate(fp8_linear_layers(model, recipe='static'), loss_fn, batches)"
    )
    if op is None:
        raise ValueError(
            f"{name} has no training state, but layout={layout.name} takes the scales of input and kernel from there; "
            f"{remedy}"
        )
    for operand in _STORED:
        quantization = op.recipe.uses[operand, "fprop"]
        if not quantization.scaling.stores_scale:
            raise ValueError(
                f"the recipe of {name} ({op.recipe}) stores no scale of its {operand}, which layout={layout.name} "
                f"needs: scales of blocks, and current ones, are measured in each step; {remedy}"
            )
        if quantization.rounding.needs_key:
            raise ValueError(f"the recipe of {name} rounds its {operand} at random, which inference does not support")
    if op.recipe.input.format != op.recipe.kernel.format:
        raise ValueError(f"the recipe of {name} has input and kernel in two formats: {op.recipe}; use 'FP8_DYNAMIC'")
    first = (*uncalibrated_operands(op.state), *unrecorded_operands(op.state))
    missing = [operand for operand in _STORED if operand in first]
    if (table := table_on_host(op.state)) is not None and isinstance(op.state, OpState):
        scales = {operand: table[..., row, 0] for operand, row in _STORED.items()}
        missing += [name for name, scale in scales.items() if not (np.isfinite(scale) & (scale > 0.0)).all()]
    if missing:
        raise ValueError(
            f"the state of {name} has no scale of its {' and '.join(dict.fromkeys(missing))} yet, because no step was "
            f"taken; train a step, or {remedy}"
        )
    return op


def _require_finite(name: str, array: Array) -> None:
    if isinstance(array, Tracer | jax.ShapeDtypeStruct):
        return
    if not bool(jnp.all(jnp.isfinite(array))):
        raise ValueError(
            f"the weight of {name} holds an infinity or NaN, which would spread; quantize the model of an earlier step"
        )
