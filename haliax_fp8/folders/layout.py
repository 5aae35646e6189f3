"""How a layout lies in files: what its tensors are called, their shapes and bits; and the configuration it writes."""

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ..formats import E2M1
from ..layouts import Layout, named
from .four_bits import packed
from .patterns import matcher
from .scaled_matrix import ScaledMatrix, Unit


E4M3, E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
FLOATS = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
EXPONENTS = (np.dtype(np.uint8), E8M0)

# Names of a layer's scales, the usual one first; and those of what attention caches.
WEIGHT_SCALES, INPUT_SCALES = ("weight_scale", "weight_scale_inv"), ("input_scale", "activation_scale")
SCALES = (*WEIGHT_SCALES, *INPUT_SCALES)
INPUT_BOUND = "input_scale_ub"  # fbgemm_fp8's, which the configuration has too
CACHE_SCALES = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale")

KEY, MODELOPT = "quantization_config", "hf_quant_config.json"

# What compressed-tensors calls weights in four bits, and the scales of their tensors and inputs.
PACKED, UNIT, INPUT_UNIT = "weight_packed", "weight_global_scale", "input_global_scale"


written = [name for name, layout in named.items() if layout.inputs != named["NVFP4_DYNAMIC"].inputs]
"""The names of layouts that folders may have. No configuration has scales of each token beside those of its groups."""

# Methods of folders that others write.
_ONLY_READ = ("fbgemm_fp8", "torchao", "mxfp4", "scale_weight")


def layout_of_layer(layout: Layout, layer: str) -> Layout:
    """The layout of one layer: of the group that has its name, or else of the one that has its class."""
    means = lambda group: any(matcher("targets", target, layout.method)(layer) for target in group.targets)
    of_classes = next((group for group in layout.groups if "Linear" in group.targets), (*layout.groups, layout)[0])
    return next(filter(means, layout.groups), of_classes)


def exponent_rounding(layout: Layout) -> str:
    """How powers of two are rounded in E8M0, as in compressed-tensors; empty for other scales."""
    return "" if not layout.exponents else "nearest" if layout.format == E2M1 else "up"


def scale_names(layout: Layout) -> tuple[str, ...]:
    """The last part of the name of a weight's scales: one of these, the first where they are written."""
    # Blocks have one name for all engines. Without, AutoFP8 and vLLM have the first, Transformers the second.
    return WEIGHT_SCALES[:1] if layout.method != "fp8" else WEIGHT_SCALES[layout.size is not None :]


def input_scale_names(layout: Layout) -> tuple[str, ...]:
    """The last part of the name of an input's scale: one of these."""
    return INPUT_SCALES if layout.method == "fp8" else INPUT_SCALES[:1]


def _file_format(layout: Layout) -> str:
    """What compressed-tensors calls the format."""
    if layout.format is E2M1:
        return "mxfp4-pack-quantized" if layout.exponents else "nvfp4-pack-quantized"
    return "mxfp8-quantized" if layout.exponents else "float-quantized"


def scale_shapes(layout: Layout, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The shapes that the scales of a weight may have, first the written one; experts have theirs in front."""
    front, (rows, columns) = shape[:-2], shape[-2:]
    if layout.strategy == "tensor":
        one = [(*front, *(1,) * axes) for axes in ((0, 1, 2) if layout.method == "modelopt" or front else (1, 0, 2))]
        return tuple(one)
    if layout.strategy == "channel":
        return (*front, rows, 1), (*front, rows)
    height, width = layout.block((rows, columns))
    blocks = -(-rows // height), -(-columns // width)
    more = ((*front, blocks[0], 1, blocks[1], 1),) if layout.method == "modelopt" and layout.strategy == "block" else ()
    return (*front, *blocks), *more


def arrays_of(layout: Layout, shape: tuple[int, int]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """The tensors of a layer with a kernel of this shape: by the last part of their names, dtype and shape."""
    scale = EXPONENTS[0] if layout.exponents else FLOATS[0]
    if layout.format is E2M1:
        one, blocks = (FLOATS[0], (1,)), scale_shapes(layout, shape)[0]
        arrays = {PACKED: (EXPONENTS[0], (shape[0], shape[1] // 2))}
        arrays |= {WEIGHT_SCALES[0]: (E4M3 if layout.has_units else scale, blocks)}
        arrays |= {UNIT: one} if layout.has_units else {}
        return arrays | ({INPUT_UNIT: one} if layout.is_static else {})
    arrays: dict[str, tuple[np.dtype, tuple[int, ...]]]
    arrays = {"weight": (E4M3, shape), scale_names(layout)[0]: (scale, scale_shapes(layout, shape)[0])}
    of_input = () if layout.method == "modelopt" else (1,)
    return arrays | ({INPUT_SCALES[0]: (FLOATS[0], of_input)} if layout.is_static else {})


def encode(layout: Layout, matrix: ScaledMatrix) -> dict[str, np.ndarray]:
    """A layer's tensors."""
    if (unit := matrix.unit) is not None and layout.has_units:
        assert unit.divides
        inputs = np.float32(0 if matrix.input_scale is None else 1.0 / matrix.input_scale)
        parts = packed(matrix.data), unit.blocks(matrix.scale), np.float32(unit.value), inputs
        shapes = arrays_of(layout, (matrix.shape[0], matrix.shape[1])).items()
        return {name: np.reshape(x, shape) for (name, (_, shape)), x in zip(shapes, parts, strict=False)}
    scale = np.ascontiguousarray(matrix.scale, np.float32)
    scale = (scale.view(np.uint32) >> 23).astype(np.uint8) if layout.exponents else scale
    data = packed(matrix.data) if layout.format is E2M1 else matrix.data
    parts = data, scale, np.asarray(matrix.input_scale if layout.is_static else 0, np.float32)
    described = arrays_of(layout, (matrix.shape[0], matrix.shape[1]))
    return {name: x.reshape(shape) for (name, (_, shape)), x in zip(described.items(), parts, strict=False)}


def config_files(layout: Layout, ignore: Sequence[str]) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]:
    """What `config.json` gets, and the content of other files.

    Args:
        layout: The layout.
        ignore: The linear layers that stay in high precision.
    """
    left = list(ignore)
    is_only_read = layout.inputs is not None and layout.inputs.bound is not None
    is_only_read |= layout.format is E2M1 and layout.method != "compressed-tensors"
    is_only_read |= layout.method == "modelopt" and layout.strategy != "tensor"
    if layout.groups or layout.method in _ONLY_READ or is_only_read:
        raise ValueError(f"layout={layout.name!r} is only read; write one of {written}")
    if layout.method == "modelopt":
        producer = {"name": "haliax_fp8"}
        common = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8" if layout.cached else None}
        files = {MODELOPT: {"producer": producer, "quantization": {**common, "exclude_modules": left}}}
        return {KEY: {"quant_method": "modelopt", **common, "ignore": left, "producer": producer}}, files
    if layout.method == "fp8":
        # Engines read the layers left alone under one of two names.
        scheme = "static" if layout.is_static else "dynamic"
        config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": scheme}
        config |= {"weight_block_size": list(layout.size)} if layout.size else {}
        config |= {"scale_fmt": "ue8m0"} if layout.exponents else {}
        return {KEY: config | {"modules_to_not_convert": left, "ignored_layers": left}}, {}
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    types = {"scale_dtype": "torch.uint8"} if layout.exponents else {}
    types |= {"scale_dtype": "torch.float8_e4m3fn"} if layout.has_units else {}
    kind = lambda strategy: "tensor_group" if layout.has_units else strategy
    weights = {**common, "num_bits": layout.format.bits, "dynamic": False, "strategy": kind(layout.strategy)}
    if layout.strategy == "block":
        weights["block_structure"] = list(layout.size or ())
    if layout.strategy == "group" and layout.size:
        weights |= {"group_size": layout.size[1], **types}
    inputs: dict[str, Any] | None = None
    if layout.inputs is not None:
        dynamic = "local" if layout.has_units and layout.is_static else layout.inputs.dynamic
        inputs = {**common, "num_bits": layout.inputs.format.bits, "dynamic": dynamic}
        inputs |= {"strategy": kind(layout.inputs.strategy)}
        inputs |= {"group_size": layout.inputs.size, **types} if layout.inputs.size else {}
    config = {
        "quant_method": "compressed-tensors",
        "format": _file_format(layout),
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": left,
        "kv_cache_scheme": {**common, "dynamic": False, "strategy": "tensor"} if layout.cached else None,
    }
    return {KEY: config}, {}


# --- Reading a layer, whichever layout wrote it -----------------------------------------------------------------------


def decode(
    layer: str, tensors: Mapping[str, np.ndarray], size: tuple[int, int] | None, unit: Unit | None = None
) -> ScaledMatrix:
    """The quantized data and scales of a layer.

    Scales may have the shapes `[]`, `[1]`, `[out]`, `[out, 1]` or one for each block, in float32, bfloat16 or float16,
    or be exponents in bytes (E8M0).

    Args:
        layer: The layer's name, for errors.
        tensors: Its tensors, by the last part of their names.
        size: The blocks that the configuration names; blocks may be cut by the edge.
        unit: The scale of the tensor, which those of its blocks include; these may be 0 then.

    Raises:
        ValueError: If a scale is missing, not positive and finite, or does not fit; each names the tensor.
    """
    data = tensors["weight"]
    if (name := next((name for name in WEIGHT_SCALES if name in tensors), None)) is None:
        raise ValueError(f"{layer}.weight is in {data.dtype} and has no {' or '.join(WEIGHT_SCALES)}")
    if data.ndim != 2:
        raise ValueError(f"{layer}.weight has shape {data.shape}; quantized weights have two axes, [out, in]")
    positive = _positive_scale(f"{layer}.{name}", tensors[name], or_zero=unit is not None)
    scale, block = _in_blocks(f"{layer}.{name}", positive, data.shape, size)
    inputs = next((tensors[name] for name in INPUT_SCALES if name in tensors), None)
    if inputs is not None and _positive_scale(f"{layer}.input_scale", inputs).size != 1:
        raise ValueError(f"{layer}.input_scale has shape {inputs.shape}; a static input has one scale")
    of_input = None if inputs is None else float(inputs.reshape(()))
    return ScaledMatrix(data, scale, block, "checkpoint", of_input, unit)


def as_float32(scale: np.ndarray) -> np.ndarray:
    """Scales as they multiply; exponents in bytes become powers of two, and 255 NaN."""
    if scale.dtype not in EXPONENTS:
        return scale.astype(np.float32)
    bits = scale.view(np.uint8).astype(np.uint32)
    # 0 means 2**-127, which is subnormal in float32.
    bits = np.where(bits == 255, 0x7FC00000, np.where(bits == 0, 0x00400000, bits << np.uint32(23)))
    return bits.astype(np.uint32).view(np.float32)


def require_quantizable(weight: str, shape: tuple[int, ...], layout: Layout) -> None:
    """Raises a ValueError if a layout has no place for a weight of a shape.

    Args:
        weight: Its name.
        shape: Its shape, `[..., out, in]`.
        layout: The layout.
    """
    if layout.name in named and layout.name not in written:
        raise ValueError(
            f"layout={layout.name!r} has a scale for each token of the input of {weight}, which no folder can say: "
            "serve the model in process, with quantize_for_inference, or write its weights as 'NVFP4A16'"
        )
    if 0 in shape:
        raise ValueError(f"{weight} has shape {shape}: it has no elements, and so no scale; leave it out")
    if layout.format is E2M1 and shape[-1] % 2:
        raise ValueError(
            f"{weight} has shape {shape}, an odd number of inputs, and layout={layout.name!r} has two in each byte; "
            "take a layout in FP8, or export the model with exclude=... for this layer"
        )


def _positive_scale(name: str, scale: np.ndarray, *, or_zero: bool = False) -> np.ndarray:
    if scale.dtype not in (*EXPONENTS, *FLOATS, np.float64):
        raise ValueError(f"{name} is in {scale.dtype}, which is not a dtype of scales")
    values = as_float32(scale)
    if (wrong := ~(np.isfinite(values) & ((values >= 0) if or_zero else (values > 0)))).any():
        what = "a NaN (255 in E8M0)" if scale.dtype in EXPONENTS else "a scale that is not positive and finite"
        raise ValueError(f"{name} holds {what}: {values[wrong].ravel()[:1]}")
    return values


def _in_blocks(
    name: str, scale: np.ndarray, shape: tuple[int, ...], size: tuple[int, int] | None
) -> tuple[np.ndarray, tuple[int, int]]:
    rows, columns = shape
    if scale.ndim == 4 and scale.shape[1::2] == (1, 1):  # as ModelOpt has those of blocks
        scale = scale[:, 0, :, 0]
    if scale.size == 1 and (size is None or rows * columns == 1 or scale.ndim < 2):
        return scale.reshape(1, 1), (rows, columns)
    if scale.shape in ((rows,), (rows, 1)) and (size is None or scale.ndim == 1):
        return scale.reshape(-1, 1), (1, columns)
    block = (1, 32) if size is None else (size[0] or rows, size[1] or columns)
    if (size or columns % 32 == 0) and scale.shape == (-(-rows // block[0]), -(-columns // block[1])):
        return scale, block
    blocks = f" in blocks of {size}" if size else "; the configuration names no blocks"
    raise ValueError(f"{name} has shape {scale.shape}, which fits no kernel of shape {shape}{blocks}")
