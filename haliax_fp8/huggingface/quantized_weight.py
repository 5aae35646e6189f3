"""What an export writes of a layer's weight: its data and scales, from training, from a folder, or computed."""

import dataclasses
from collections.abc import Callable, Sequence

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from ..folders.layout import exponent_rounding, require_quantizable
from ..folders.scaled_matrix import (
    BF16,
    BF16_BITS,
    ScaledMatrix,
    Unit,
    are_exponents,
    in_two_levels,
    quantized_in_two_levels,
    rounded_up,
    spread,
)
from ..folders.tensors import Tensor
from ..formats import E2M1, E4M3, Format
from ..layers import Fp8DotGeneral
from ..layers.checks import unrecorded_operands
from ..layouts import Layout
from ..recipes import SCALE_BITS, AbstractScaling, FolderScaling, NVFP4Scaling, OperandName, OperandUse
from .training_scales import quantized_as_in_training


def require_exportable(tensor: Tensor, layout: Layout) -> None:
    """Raises a ValueError if a layout cannot hold a layer's weight, as far as that is known before it is read."""
    if tensor.layer is not None and tensor.dtype != layout.format.dtype:
        raise ValueError(
            f"{tensor.path} is in {tensor.dtype} in the model, and the layout has {layout.format.dtype}; export "
            "serving.dequantize(model), which quantizes it again"
        )
    if layout.is_static and _scales_tokens(tensor):
        raise ValueError(
            f"{tensor.path} has a scale for each token of its input, and layout={layout.name!r} one for all of it: "
            "write the weights alone, as 'NVFP4A16', or serve the model in process, with "
            "quantize_for_inference(model, 'NVFP4_DYNAMIC')"
        )
    if layout.is_static and not _has_input_scale(tensor, layout):
        delayed = "nvfp4_delayed, delayed" if layout.has_units else "delayed"
        raise ValueError(
            f"{tensor.path} has no scale for its input, which a static layout needs: it has to come from training "
            f"with {delayed} or static scaling, or from calibrate(fp8_linear_layers(model, recipe='static'), ...). "
            f"{'NVFP4A16' if layout.has_units else 'FP8_DYNAMIC'!r} needs none"
        )
    require_quantizable(tensor.path, tensor.shape, layout)


def _scales_tokens(tensor: Tensor) -> bool:
    """Whether its input has scales in two levels, one of them for each token."""
    if tensor.layer is not None:
        quantization = tensor.layer.kernel.input
    else:
        quantization = None if tensor.op is None else tensor.op.recipe.input
    scaling = None if quantization is None else quantization.scaling
    return isinstance(scaling, NVFP4Scaling) and scaling.per_row


def _has_input_scale(tensor: Tensor, layout: Layout) -> bool:
    if tensor.layer is not None:
        return tensor.layer.kernel.input_scale is not None
    if tensor.op is not None and tensor.op.folder_scales is not None and tensor.op.folder_scales.input is not None:
        return True
    return (_stored(tensor, "input") if not layout.has_units else _input_amax(tensor)) is not None


def _input_amax(tensor: Tensor) -> float | None:
    """The largest input that its scale of training holds: that of E4M3, or of a tensor in NVFP4."""
    for format in (E4M3, E2M1):
        if (scale := _stored(tensor, "input", format)) is not None:
            return scale * format.max
    return None


def _scaling(op: Fp8DotGeneral | None, operand: OperandName, format: Format = E4M3) -> AbstractScaling | None:
    """An operand's scaling in training; None if there is none that an export in a format can have."""
    if op is None:
        return None
    quantization = op.recipe.uses[operand, "fprop"]
    return quantization.scaling if quantization.format == format and quantization.scaling.quantizes else None


def _stored(tensor: Tensor, operand: OperandName, format: Format = E4M3) -> float | None:
    """The scale that the next step quantizes an operand with, if the state of training has it.

    In NVFP4 it is that of an input that has one scale, with the same amax.
    """
    scaling = _scaling(tensor.op, operand, format)
    if tensor.op is None or scaling is None or scaling.memory is None:
        return None
    if not scaling.stores_scale and (operand, format) != ("input", E2M1):
        return None
    if operand in unrecorded_operands(tensor.op.state):
        without = {
            "kernel": "training_scales=False computes the scales of kernels from the weights",
            "input": "'FP8_DYNAMIC' and, in four bits, 'NVFP4A16' need no scale of inputs",
        }
        raise ValueError(
            f"the state of {tensor.path} has no scale of its {operand} yet, as before the first step. Calibrate the "
            f"model, model = calibrate(model, loss_fn, batches), or train a step; or else {without[operand]}"
        )
    scale = np.asarray(tensor.op.scale(operand))
    return float(scale[tensor.index[: scale.ndim]])


def quantized(
    tensor: Tensor,
    layout: Layout,
    fused: Sequence[Tensor],
    amax: Callable[[], float],
    *,
    training_scales: bool,
    bf16_scales: bool,
) -> ScaledMatrix:
    """The data and scales of a layer's weight in a layout.

    Args:
        tensor: The weight.
        layout: The layout.
        fused: The weights that engines make one with it, itself included.
        amax: Gives the largest magnitude of these.
        training_scales: As in `export_model`.
        bf16_scales: As in `export_model`.
    """
    block = layout.block((tensor.shape[0], tensor.shape[1]))
    values = tensor.read()
    if isinstance(values, np.ndarray) and training_scales and _has_folder_scales(tensor, layout):
        made = _as_in_folder(tensor, values)
        values = made if spread(made, block) is not None else values
    if isinstance(values, ScaledMatrix):
        if (finer := spread(values, block)) is None:
            raise ValueError(
                f"{tensor.path} is in FP8 in blocks of {values.block}, which the layout's blocks of {block} cannot "
                "hold; choose the layout that it was imported from, or export serving.dequantize(model)"
            )
        if layout.exponents and not are_exponents(finer.scale):
            raise ValueError(
                f"{tensor.path} has scales that the layout cannot store: it takes powers of two, 2**-127 or larger. "
                "Choose the layout that it was imported from, or export serving.dequantize(model)"
            )
        if layout.has_units:
            if (two := in_two_levels(finer)) is None:
                raise ValueError(
                    f"{tensor.path} has one level of scales in the model, and the layout two; choose the layout that "
                    "it was imported from, or export serving.dequantize(model)"
                )
            finer = two
        return dataclasses.replace(finer, input_scale=values.input_scale if layout.is_static else None)
    # How many significant bits a scale has where the step multiplies: fewer in bfloat16.
    bits = {name: SCALE_BITS[name] if tensor.dtype == BF16 else 24 for name in ("kernel", "input")}
    is_trained = training_scales and not layout.has_units
    try:
        made = (
            quantized_in_two_levels(values, block, amax())
            if layout.has_units
            else quantized_as_in_training(
                values,
                block,
                scaling=_scaling(tensor.op, "kernel", layout.format) if is_trained else None,
                stored=_stored(tensor, "kernel", layout.format) if is_trained else None,
                scale_bits=bits["kernel"],
                bf16_scales=bf16_scales,
                exponents=exponent_rounding(layout),
                format=layout.format,
            )
        )
    except ValueError as error:
        raise ValueError(f"{tensor.path} cannot be exported: {error}") from None
    if not layout.is_static:
        return made
    # In NVFP4 of the same largest input, which blocks divide among their own scales.
    amaxes = map(_input_amax, fused) if layout.has_units else [_stored(tensor, "input")]
    of_input = max(np.float64(amax) for amax in amaxes)
    if not (np.isfinite(of_input) and of_input > 0):
        what = "largest input" if layout.has_units else "input scale"
        raise ValueError(f"{tensor.path} has the {what} {of_input}; calibrate the model, or train a step")
    if layout.has_units:
        # Its reciprocal is written.
        return dataclasses.replace(made, input_scale=1.0 / float(np.float32(made.input_limit / of_input)))
    scale = np.float32(of_input)
    scale = rounded_up(scale.reshape(1), min(bits["input"], BF16_BITS) if bf16_scales else bits["input"])[0]
    return dataclasses.replace(made, input_scale=float(scale))


def _has_folder_scales(tensor: Tensor, layout: Layout) -> bool:
    """Whether a layer has the quantizer of a folder, whose data and scales a layout can hold, as far as that shows."""
    if tensor.op is None or tensor.op.folder_scales is None:
        return False
    scaling, format = tensor.op.recipe.kernel.scaling, tensor.op.recipe.kernel.format
    assert isinstance(scaling, FolderScaling)
    is_alike = layout.has_units == (scaling.scales == "two_levels") and layout.format == format
    return is_alike and (not layout.exponents or scaling.scales.startswith("e8m0"))


def _as_in_folder(tensor: Tensor, values: np.ndarray) -> ScaledMatrix:
    """A kernel as the products of training quantize it, where it has the scales of a folder."""
    is_named = lambda x: isinstance(x, hax.NamedArray)
    of_layer = jax.tree.map(lambda x: np.asarray(x.array)[tensor.index], tensor.op.folder_scales, is_leaf=is_named)
    quantization = tensor.op.recipe.kernel
    use = OperandUse(quantization.format, contracted=(1,), folder=of_layer)
    made = jax.device_get(quantization.scaling.quantize(jnp.asarray(values), use))
    divisor = of_layer.divisor
    unit = None if divisor is None else Unit(divisor.view(np.float32), divides=True)
    # In float64 the reciprocal of a reciprocal has the bits of the original.
    of_input = _stored(tensor, "input") if of_layer.input is None else 1 / float(of_layer.input.view(np.float32))
    # Values of E2M1 come in another format that holds them.
    data = made.data.astype(np.float32).astype(quantization.format.dtype)
    return ScaledMatrix(data, made.scale, made.block, "folder", of_input, unit)
