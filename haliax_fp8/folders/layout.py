"""Layout: how a checkpoint names and shapes quantized weights and scales; read from `config.json`, written to it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from .. import formats
from .._arguments import nearest
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


@dataclasses.dataclass(frozen=True)
class Inputs:
    """How the inputs of layers are quantized.

    Args:
        strategy: What shares a scale: `"tensor"`, `"token"` or `"group"`.
        dynamic: Whether engines compute the scales as they run; otherwise each layer has one.
        size: The elements of a group.
        format: Their format: E4M3 or E2M1.
        bound: The largest amax that makes a scale, so that larger elements are clipped; None for any.
    """

    strategy: str
    dynamic: bool = True
    size: int = 0
    format: formats.Format = formats.E4M3
    bound: float | None = None

    def __str__(self) -> str:
        what = {"tensor": "a scale for all", "token": "a scale for each token"}
        each = what.get(self.strategy, f"a scale for {self.size} elements")
        if self.strategy == "group" and not self.dynamic:  # NVFP4
            return f"{each}, dynamic, and one for all, static"
        clipped = "" if self.bound is None else f", clipped at {self.bound:g}"
        return f"{each}, {'dynamic' if self.dynamic else 'static'}{clipped}"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How quantized weights are stored; of a checkpoint, also what its configuration says of its layers.

    Args:
        method: `"compressed-tensors"`, Hugging Face's `"fp8"`, or NVIDIA's `"modelopt"`; of folders that are only read,
            also `"fbgemm_fp8"`, `"torchao"`, gpt-oss' `"mxfp4"`, or ComfyUI's `"scale_weight"`.
        strategy: What shares a scale of the weights: `"tensor"`, `"channel"`, `"block"` or `"group"`.
        size: The rows and columns of a block or group.
        inputs: How inputs are quantized; None if they are not.
        exponents: Whether scales are powers of two, E8M0.
        ignore: The layers left alone: names, or with `re:` regular expressions.
        targets: The layers meant: classes, names, or regular expressions.
        cached: Whether keys and values are kept in FP8, with scales.
        status: What compressed-tensors says of the weights: `"compressed"` if they are stored quantized.
        groups: The layouts of different layers, each with its targets; empty if all layers have this one.
        format: The format of the weights: E4M3, or E2M1, of which two are in a byte.

    References:
        `compressed_tensors.quantization.quant_scheme` 0.20; `transformers.FineGrainedFP8Config` 5.23; ModelOpt.
    """

    method: str
    strategy: str
    size: tuple[int, int] | None = None
    inputs: Inputs | None = None
    exponents: bool = False
    ignore: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("Linear",)
    cached: bool = False
    status: str | None = "compressed"
    groups: tuple["Layout", ...] = ()
    format: formats.Format = formats.E4M3

    def of(self, layer: str) -> "Layout":
        """The layout of one layer: of the group that has its name, or else of the one that has its class."""
        means = lambda group: any(matcher("targets", target, self.method)(layer) for target in group.targets)
        return next(filter(means, self.groups), self._of_classes)

    @property
    def _of_classes(self) -> "Layout":
        return next((group for group in self.groups if "Linear" in group.targets), (*self.groups, self)[0])

    @property
    def name(self) -> str:
        """Its name in `named`; a description if it has none. The sizes of blocks do not count."""
        if self.groups:
            return " and ".join(dict.fromkeys(group.name for group in self.groups))
        key = self._kind
        found = (name for name, layout in named.items() if layout._kind == key)
        kind = f"{self.strategy} weights"
        if self.format is formats.E2M1:
            kind = f"{'NVFP4' if self.has_units else 'MXFP4'}{'' if self.inputs else ' weights'}"
        return next(found, f"{self.method}, {kind}")

    @property
    def _kind(self) -> tuple[Any, ...]:
        inputs = self.inputs and (self.inputs.strategy, self.inputs.dynamic)
        if self.format is formats.E2M1:
            in_bits = None if self.inputs is None else self.inputs.format.bits
            return (self.method, self.format.name, self.exponents, in_bits, self.is_static)
        if self.method != "compressed-tensors":
            return (self.method, self.strategy == "block" if self.method == "fp8" else self.strategy)
        if inputs is None or (self.strategy == "group" and self.exponents):
            return (self.method, inputs and "microscaled")
        return (self.method, self.strategy, inputs)

    @property
    def is_static(self) -> bool:
        """Whether each layer has a scale for its input."""
        return self.inputs is not None and not self.inputs.dynamic

    @property
    def has_units(self) -> bool:
        """Whether a weight has a scale of its own beside those of its blocks, as in NVFP4."""
        return self.format is formats.E2M1 and not self.exponents

    @property
    def exponent_rounding(self) -> str:
        """How powers of two are rounded in E8M0, as in compressed-tensors; empty for other scales."""
        return "" if not self.exponents else "nearest" if self.format == formats.E2M1 else "up"

    @property
    def scale_names(self) -> tuple[str, ...]:
        """The last part of the name of a weight's scales: one of these, the first where they are written."""
        # Blocks have one name for all engines. Without, AutoFP8 and vLLM have the first, Transformers the second.
        return WEIGHT_SCALES[:1] if self.method != "fp8" else WEIGHT_SCALES[self.size is not None :]

    @property
    def input_scale_names(self) -> tuple[str, ...]:
        """The last part of the name of an input's scale: one of these."""
        return INPUT_SCALES if self.method == "fp8" else INPUT_SCALES[:1]

    @property
    def file_format(self) -> str:
        """What compressed-tensors calls the format."""
        if self.format is formats.E2M1:
            return "mxfp4-pack-quantized" if self.exponents else "nvfp4-pack-quantized"
        return "mxfp8-quantized" if self.exponents else "float-quantized"

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The rows and columns of a kernel `[out, in]` that share a scale."""
        return self.size or {"tensor": shape, "channel": (1, shape[1])}[self.strategy]

    def scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes that the scales of a weight may have, first the written one; experts have theirs in front."""
        front, (rows, columns) = shape[:-2], shape[-2:]
        if self.strategy == "tensor":
            one = [(*front, *(1,) * axes) for axes in ((0, 1, 2) if self.method == "modelopt" or front else (1, 0, 2))]
            return tuple(one)
        if self.strategy == "channel":
            return (*front, rows, 1), (*front, rows)
        height, width = self.block((rows, columns))
        blocks = -(-rows // height), -(-columns // width)
        more = ((*front, blocks[0], 1, blocks[1], 1),) if self.method == "modelopt" and self.strategy == "block" else ()
        return (*front, *blocks), *more

    def tensors(self, shape: tuple[int, int]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """The tensors of a layer with a kernel of this shape: by the last part of their names, dtype and shape."""
        scale = EXPONENTS[0] if self.exponents else FLOATS[0]
        if self.format is formats.E2M1:
            one, blocks = (FLOATS[0], (1,)), self.scale_shapes(shape)[0]
            found = {PACKED: (EXPONENTS[0], (shape[0], shape[1] // 2))}
            found |= {WEIGHT_SCALES[0]: (E4M3 if self.has_units else scale, blocks)}
            found |= {UNIT: one} if self.has_units else {}
            return found | ({INPUT_UNIT: one} if self.is_static else {})
        found: dict[str, tuple[np.dtype, tuple[int, ...]]]
        found = {"weight": (E4M3, shape), self.scale_names[0]: (scale, self.scale_shapes(shape)[0])}
        of_input = () if self.method == "modelopt" else (1,)
        return found | ({INPUT_SCALES[0]: (FLOATS[0], of_input)} if self.is_static else {})

    def encode(self, matrix: ScaledMatrix) -> dict[str, np.ndarray]:
        """A layer's tensors."""
        if (unit := matrix.unit) is not None and self.has_units:
            assert unit.divides
            inputs = np.float32(0 if matrix.input_scale is None else 1.0 / matrix.input_scale)
            parts = packed(matrix.data), unit.blocks(matrix.scale), np.float32(unit.value), inputs
            shapes = self.tensors((matrix.shape[0], matrix.shape[1])).items()
            return {name: np.reshape(x, shape) for (name, (_, shape)), x in zip(shapes, parts, strict=False)}
        scale = np.ascontiguousarray(matrix.scale, np.float32)
        scale = (scale.view(np.uint32) >> 23).astype(np.uint8) if self.exponents else scale
        data = packed(matrix.data) if self.format is formats.E2M1 else matrix.data
        parts = data, scale, np.asarray(matrix.input_scale if self.is_static else 0, np.float32)
        described = self.tensors((matrix.shape[0], matrix.shape[1]))
        return {name: x.reshape(shape) for (name, (_, shape)), x in zip(described.items(), parts, strict=False)}

    def config_files(self, ignore: Sequence[str]) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]:
        """What `config.json` gets, and the content of other files.

        Args:
            ignore: The linear layers that stay in high precision.
        """
        left = list(ignore)
        is_only_read = self.format is formats.E2M1 and self.method != COMPRESSED
        is_only_read |= self.method == "modelopt" and self.strategy != "tensor"
        if self.groups or self.method in _ONLY_READ or is_only_read:
            raise ValueError(f"layout={self.name!r} is only read; write one of {list(named)}")
        if self.method == "modelopt":
            producer = {"name": "haliax_fp8"}
            common = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8" if self.cached else None}
            files = {MODELOPT: {"producer": producer, "quantization": {**common, "exclude_modules": left}}}
            return {KEY: {"quant_method": "modelopt", **common, "ignore": left, "producer": producer}}, files
        if self.method == "fp8":
            # Engines read the layers left alone under one of two names.
            scheme = "static" if self.is_static else "dynamic"
            config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": scheme}
            config |= {"weight_block_size": list(self.size)} if self.size else {}
            config |= {"scale_fmt": "ue8m0"} if self.exponents else {}
            return {KEY: config | {"modules_to_not_convert": left, "ignored_layers": left}}, {}
        common = {"num_bits": 8, "type": "float", "symmetric": True}
        types = {"scale_dtype": "torch.uint8"} if self.exponents else {}
        types |= {"scale_dtype": "torch.float8_e4m3fn"} if self.has_units else {}
        kind = lambda strategy: "tensor_group" if self.has_units else strategy
        weights = {**common, "num_bits": self.format.bits, "dynamic": False, "strategy": kind(self.strategy)}
        if self.strategy == "block":
            weights["block_structure"] = list(self.size or ())
        if self.strategy == "group" and self.size:
            weights |= {"group_size": self.size[1], **types}
        inputs: dict[str, Any] | None = None
        if self.inputs is not None:
            dynamic = "local" if self.has_units and self.is_static else self.inputs.dynamic
            inputs = {**common, "num_bits": self.inputs.format.bits, "dynamic": dynamic}
            inputs |= {"strategy": kind(self.inputs.strategy)}
            inputs |= {"group_size": self.inputs.size, **types} if self.inputs.size else {}
        config = {
            "quant_method": "compressed-tensors",
            "format": self.file_format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
            "ignore": left,
            "kv_cache_scheme": {**common, "dynamic": False, "strategy": "tensor"} if self.cached else None,
        }
        return {KEY: config}, {}


# Methods of folders that others write.
_ONLY_READ = ("fbgemm_fp8", "torchao", "mxfp4", "scale_weight")

COMPRESSED, _STATIC = "compressed-tensors", Inputs("tensor", False)
_MX4, _NV4 = Inputs("group", size=32, format=formats.E2M1), Inputs("group", False, 16, formats.E2M1)

named: dict[str, Layout] = {
    "FP8_DYNAMIC": Layout(COMPRESSED, "channel", None, Inputs("token")),
    "HF_FP8": Layout("fp8", "block", (128, 128), Inputs("group", size=128)),
    "FP8_BLOCK": Layout(COMPRESSED, "block", (128, 128), Inputs("group", size=128)),
    "MXFP8": Layout(COMPRESSED, "group", (1, 32), Inputs("group", size=32), exponents=True),
    "FP8": Layout(COMPRESSED, "channel", None, _STATIC),
    "FP8_TENSOR": Layout(COMPRESSED, "tensor", None, _STATIC),
    "W8A16": Layout(COMPRESSED, "channel", None, None),
    "modelopt": Layout("modelopt", "tensor", None, _STATIC),
    "MXFP4": Layout(COMPRESSED, "group", (1, 32), _MX4, exponents=True, format=formats.E2M1),
    "MXFP4A16": Layout(COMPRESSED, "group", (1, 32), None, exponents=True, format=formats.E2M1),
    "NVFP4": Layout(COMPRESSED, "group", (1, 16), _NV4, format=formats.E2M1),
    "NVFP4A16": Layout(COMPRESSED, "group", (1, 16), None, format=formats.E2M1),
}
"""By name, in the order in which messages list them."""

PLAIN = "BF16"


def as_layout(layout: str | Layout) -> Layout | None:
    """A layout by its name; None for `"BF16"`, which quantizes nothing.

    Raises:
        ValueError: If no layout has that name.
    """
    if isinstance(layout, Layout) or layout == PLAIN:
        return layout if isinstance(layout, Layout) else None
    if not isinstance(layout, str) or layout not in named:
        near = ", ".join(repr(name) for name in nearest(str(layout), [*named, PLAIN], 3))
        raise ValueError(f"layout={layout!r} is unknown; the nearest are {near or 'none'}; all are {[*named, PLAIN]}")
    return named[layout]


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
    if 0 in shape:
        raise ValueError(f"{weight} has shape {shape}: it has no elements, and so no scale; leave it out")
    if layout.format is formats.E2M1 and shape[-1] % 2:
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
