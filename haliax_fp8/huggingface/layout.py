"""Layout: how a checkpoint names and shapes FP8 weights and their scales; read from `config.json` and written to it."""

import dataclasses
import fnmatch
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from .._files.strict_json import BrokenCheckpoint
from .._numerics.checks import nearest
from .folder import CONFIG, TensorFolder
from .scaled_matrix import ScaledMatrix


E4M3, E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
FLOATS = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
EXPONENTS = (np.dtype(np.uint8), E8M0)

# Names of a layer's scales, the usual one first; and those of what attention caches.
WEIGHT_SCALES, INPUT_SCALES = ("weight_scale", "weight_scale_inv"), ("input_scale", "activation_scale")
SCALES = (*WEIGHT_SCALES, *INPUT_SCALES)
CACHE_SCALES = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale")

KEY, MODELOPT = "quantization_config", "hf_quant_config.json"

# How entries of the configuration's lists begin that are regular expressions; longer ones are not read.
REGEX, _LONGEST_PATTERN = "re:", 2_000


class NotSupported(ValueError):
    """A folder has a layout that is known, and not read here.

    Args:
        layout: The layout's name.
        remedy: Which tool converts it.
    """

    def __init__(self, layout: str, remedy: str) -> None:
        self.layout, self.remedy = layout, remedy
        super().__init__(f"{CONFIG}: {KEY}: the layout {layout} is not supported here; {remedy}")


@dataclasses.dataclass(frozen=True)
class Inputs:
    """How the inputs of layers are quantized.

    Args:
        strategy: What shares a scale: `"tensor"`, `"token"` or `"group"`.
        dynamic: Whether engines compute the scales as they run; otherwise each layer has one.
        size: The elements of a group.
    """

    strategy: str
    dynamic: bool = True
    size: int = 0

    def __str__(self) -> str:
        what = {"tensor": "a scale for all", "token": "a scale for each token"}
        each = what.get(self.strategy, f"a scale for {self.size} elements")
        return f"{each}, {'dynamic' if self.dynamic else 'static'}"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How FP8 weights are stored; of a checkpoint, also what its configuration says of its layers.

    Args:
        method: `"compressed-tensors"`, Hugging Face's `"fp8"`, or NVIDIA's `"modelopt"`; of folders that are only read,
            also `"fbgemm_fp8"`, `"torchao"`, or ComfyUI's `"scale_weight"`.
        strategy: What shares a scale of the weights: `"tensor"`, `"channel"`, `"block"` or `"group"`.
        size: The rows and columns of a block or group.
        inputs: How inputs are quantized; None if they are not.
        exponents: Whether scales are powers of two, E8M0.
        ignore: The layers left alone: names, or with `re:` regular expressions.
        targets: The layers meant: classes, names, or regular expressions.
        cached: Whether keys and values are kept in FP8, with scales.
        status: What compressed-tensors says of the weights: `"compressed"` if they are stored in FP8.
        groups: The layouts of different layers, each with its targets; empty if all layers have this one.

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
        return next(found, f"{self.method}, {self.strategy} weights")

    @property
    def _kind(self) -> tuple[Any, ...]:
        inputs = self.inputs and (self.inputs.strategy, self.inputs.dynamic)
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
    def scale_names(self) -> tuple[str, ...]:
        """The last part of the name of a weight's scales: one of these, the first where they are written."""
        # Blocks have one name for all engines. Without, AutoFP8 and vLLM have the first, Transformers the second.
        return WEIGHT_SCALES[:1] if self.method != "fp8" else WEIGHT_SCALES[self.size is not None :]

    @property
    def input_scale_names(self) -> tuple[str, ...]:
        """The last part of the name of an input's scale: one of these."""
        return INPUT_SCALES if self.method == "fp8" else INPUT_SCALES[:1]

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
        found: dict[str, tuple[np.dtype, tuple[int, ...]]]
        found = {"weight": (E4M3, shape), self.scale_names[0]: (scale, self.scale_shapes(shape)[0])}
        of_input = () if self.method == "modelopt" else (1,)
        return found | ({INPUT_SCALES[0]: (FLOATS[0], of_input)} if self.is_static else {})

    def encode(self, matrix: ScaledMatrix) -> dict[str, np.ndarray]:
        """A layer's tensors."""
        scale = np.ascontiguousarray(matrix.scale, np.float32)
        scale = (scale.view(np.uint32) >> 23).astype(np.uint8) if self.exponents else scale
        parts = matrix.data, scale, np.asarray(matrix.input_scale if self.is_static else 0, np.float32)
        described = self.tensors((matrix.shape[0], matrix.shape[1]))
        return {name: x.reshape(shape) for (name, (_, shape)), x in zip(described.items(), parts, strict=False)}

    def config_files(self, ignore: Sequence[str]) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]:
        """What `config.json` gets, and the content of other files.

        Args:
            ignore: The linear layers that stay in high precision.
        """
        left = list(ignore)
        if self.groups or self.method in _ONLY_READ or (self.method == "modelopt" and self.strategy != "tensor"):
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
        microscaled = {"scale_dtype": "torch.uint8"} if self.exponents else {}
        weights = {**common, "dynamic": False, "strategy": self.strategy}
        if self.strategy == "block":
            weights["block_structure"] = list(self.size or ())
        if self.strategy == "group" and self.size:
            weights |= {"group_size": self.size[1], **microscaled}
        inputs = self.inputs and {**common, "dynamic": self.inputs.dynamic, "strategy": self.inputs.strategy}
        if inputs and self.inputs and self.inputs.size:
            inputs |= {"group_size": self.inputs.size, **microscaled}
        config = {
            "quant_method": "compressed-tensors",
            "format": "mxfp8-quantized" if self.exponents else "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
            "ignore": left,
            "kv_cache_scheme": {**common, "dynamic": False, "strategy": "tensor"} if self.cached else None,
        }
        return {KEY: config}, {}


# Methods of folders that others write.
_ONLY_READ = ("fbgemm_fp8", "torchao", "scale_weight")

_COMPRESSED, _STATIC = "compressed-tensors", Inputs("tensor", False)

named: dict[str, Layout] = {
    "FP8_DYNAMIC": Layout(_COMPRESSED, "channel", None, Inputs("token")),
    "HF_FP8": Layout("fp8", "block", (128, 128), Inputs("group", size=128)),
    "FP8_BLOCK": Layout(_COMPRESSED, "block", (128, 128), Inputs("group", size=128)),
    "MXFP8": Layout(_COMPRESSED, "group", (1, 32), Inputs("group", size=32), exponents=True),
    "FP8": Layout(_COMPRESSED, "channel", None, _STATIC),
    "FP8_TENSOR": Layout(_COMPRESSED, "tensor", None, _STATIC),
    "W8A16": Layout(_COMPRESSED, "channel", None, None),
    "modelopt": Layout("modelopt", "tensor", None, _STATIC),
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


# More rows or columns than any weight has.
_LARGEST_BLOCK = 2**31

# --- Reading a configuration: strictly, as engines accept nearly anything without a word ------------------------------


def read_layout(folder: TensorFolder) -> Layout | None:
    """What a folder's configuration says of its layers, or else the names of its scales; None if nothing is quantized.

    Raises:
        BrokenCheckpoint: As in `layout_of`.
        NotSupported: As in `layout_of`.
    """
    found = layout_of(folder.config, folder.json_beside(MODELOPT))
    last = {stored.name.rpartition(".")[2] for stored in folder.tensors.values()}
    if found is None and "scale_weight" in last:
        return Layout("scale_weight", "tensor", None, Inputs("tensor", "scale_input" not in last), targets=())
    return found


def presented(folder: TensorFolder) -> TensorFolder:
    """A folder whose weights and scales have the usual names, whatever its library calls them."""
    tensors = {}
    for name, stored in folder.tensors.items():
        layer, dot, last = name.rpartition(".")
        if name != _MARKER:
            tensors[f"{layer}{dot}{_PRESENTED.get(last, last)}"] = stored
    return dataclasses.replace(folder, tensors=tensors)


# What torchao and ComfyUI call weights and scales, and a tensor of ComfyUI's whose dtype alone matters.
_PRESENTED = {
    "_weight_qdata": "weight",
    "_weight_scale": "weight_scale",
    "scale_weight": "weight_scale",
    "scale_input": "input_scale",
}
_MARKER = "scaled_fp8"


def layout_of(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> Layout | None:
    """What a configuration says; None if nothing is quantized.

    Args:
        config: What `config.json` holds.
        beside: What `hf_quant_config.json` holds, where older exports of ModelOpt say it.

    Raises:
        BrokenCheckpoint: If it is of an unknown method, format or strategy, or contradicts itself.
        NotSupported: If it is of a layout that is known, and not read here.

    Example:
        >>> layout_of({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}).name
        'HF_FP8'
    """
    found = config.get(KEY, config.get("compression_config"))
    if found is None and beside is not None:
        if not isinstance(inner := beside.get("quantization"), Mapping):
            raise BrokenCheckpoint(MODELOPT, "it has no object 'quantization'; copy it from the original folder")
        found = {**inner, "ignore": inner.get("exclude_modules"), "quant_method": "modelopt"}
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise _wrong(f"it is a {type(found).__name__}, but must be a JSON object", "copy it from the original folder")
    method = found.get("quant_method")
    if isinstance(method, str) and method in _CONVERTERS and method not in _READERS:
        raise NotSupported(method, _CONVERTERS[method])
    if not isinstance(method, str) or method not in _READERS:
        raise _wrong(f"quant_method={method!r:.60} is unknown", f"it must be one of {', '.join(map(repr, _READERS))}")
    if config.get("expert_dtype", found.get("expert_dtype")) in ("fp4", "mxfp4"):
        remedy = "dequantize its experts with the scripts in the model's own repository, and save them in bfloat16"
        raise NotSupported(f"{method} with experts in MXFP4", remedy)
    return _READERS[method](found)


def _modelopt(found: Mapping[str, Any]) -> Layout:
    algorithm = str(found.get("quant_algo")).upper()
    if algorithm in ("NVFP4", "W4A16_NVFP4", "W4A16_AWQ", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL", "MIXED_PRECISION"):
        raise NotSupported(f"modelopt {algorithm}", _CONVERTERS["modelopt"])
    if algorithm not in _MODELOPT:
        raise _wrong(f"quant_algo={found.get('quant_algo')!r:.60} is unknown", f"it must be one of {list(_MODELOPT)}")
    cached = _cached(found, "kv_cache_quant_algo") or _cached(found, "kv_cache_scheme")
    ignore = _names(found, "ignore") or _names(found, "exclude_modules")
    return dataclasses.replace(_MODELOPT[algorithm], ignore=ignore, cached=cached)


def _hugging_face(found: Mapping[str, Any]) -> Layout:
    _one_of(found, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    static = _one_of(found, "activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    size = None if found.get("weight_block_size") is None else _pair(found, "weight_block_size")
    exponents = _one_of(found, "scale_fmt", ("float", "ue8m0"), "float") == "ue8m0"
    if size and static:
        problem = "activation_scheme='static' with weight_block_size; blocks have dynamic inputs"
        raise _wrong(problem, "write 'dynamic'")
    inputs = Inputs("group", size=size[1]) if size else Inputs("tensor", not static)
    return Layout("fp8", "block" if size else "tensor", size, inputs, exponents, _left_alone(found))


def _fbgemm(found: Mapping[str, Any]) -> Layout:
    return Layout("fbgemm_fp8", "channel", None, Inputs("token"), ignore=_left_alone(found))


def _torchao(found: Mapping[str, Any]) -> Layout:
    scheme = found.get("quant_type")
    scheme = scheme.get("default") if isinstance(scheme, Mapping) and len(scheme) == 1 else None
    kind = scheme.get("_type") if isinstance(scheme, Mapping) else found.get("quant_type")
    data = scheme.get("_data") if isinstance(scheme, Mapping) else None
    given = data.get("granularity") if isinstance(data, Mapping) else None
    each = given if isinstance(given, list) else [given]
    grains = {grain.get("_type") if isinstance(grain, Mapping) else grain for grain in each}
    weight_only = kind == "Float8WeightOnlyConfig"
    grains = grains if grains != {None} else {"PerRow" if weight_only else "PerTensor"}
    is_read = weight_only or kind == "Float8DynamicActivationFloat8WeightConfig"
    if not is_read or grains not in ({"PerRow"}, {"PerTensor"}):
        raise NotSupported(f"torchao {kind!s:.60} {', '.join(sorted(map(str, grains)))}", _CONVERTERS["torchao"])
    of_rows = grains == {"PerRow"}
    inputs = None if weight_only else Inputs("token" if of_rows else "tensor")
    return Layout("torchao", "channel" if of_rows else "tensor", None, inputs, ignore=_left_alone(found))


def _left_alone(found: Mapping[str, Any]) -> tuple[str, ...]:
    lists = (_names(found, key) for key in ("modules_to_not_convert", "ignored_layers"))
    return tuple(dict.fromkeys(itertools.chain(*lists)))


_READERS: dict[str, Callable[[Mapping[str, Any]], Layout]] = {
    "compressed-tensors": lambda found: _compressed_tensors(found),
    "fp8": _hugging_face,
    "modelopt": _modelopt,
    "fbgemm_fp8": _fbgemm,
    "torchao": _torchao,
}

_MODELOPT = {
    "FP8": named["modelopt"],
    "FP8_PER_CHANNEL_PER_TOKEN": Layout("modelopt", "channel", None, Inputs("token")),
    "FP8_PB_WO": Layout("modelopt", "block", (128, 128), None),
    "MXFP8": Layout("modelopt", "group", (1, 32), Inputs("group", size=32), exponents=True),
}

# Which tool makes weights in high precision of methods and formats that are not read here.
_SAVE = "and save the model in bfloat16"
_BY_LIBRARY = f"load it with Transformers and the library of that method, dequantize its weights, {_SAVE}"
_CONVERTERS = {
    "mxfp4": f"load it with Transformers and Mxfp4Config(dequantize=True), {_SAVE}",
    "bitsandbytes": f"load it with Transformers, call model.dequantize(), {_SAVE}",
    "compressed-tensors": f"load it with Transformers and CompressedTensorsConfig(run_compressed=False), {_SAVE}",
    "modelopt": "quantize the original model again with ModelOpt, in FP8 or MXFP8",
    "torchao": f"load it with Transformers and torchao, call dequantize() of each weight, {_SAVE}",
    "quanto": f"load it with optimum-quanto, call dequantize() of each weight, {_SAVE}",
    "gptq": f"load it with GPTQModel, dequantize its weights, {_SAVE}",
    "awq": f"load it with GPTQModel, dequantize its weights, {_SAVE}",
} | dict.fromkeys(
    ("auto-round", "aqlm", "bitnet", "eetq", "fp_quant", "higgs", "hqq", "quark", "quip", "spqr", "vptq"), _BY_LIBRARY
)

# Formats of compressed-tensors: those that are read, and the others.
_FORMATS = ("float-quantized", "naive-quantized", "mxfp8-quantized")
_OTHER_FORMATS = (
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "pack-quantized", "int-quantized", "marlin-24"),
    *("sparse-bitmask", "sparse-24-bitmask"),
)


def _compressed_tensors(found: Mapping[str, Any]) -> Layout:
    format, groups = found.get("format"), found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        problem = "config_groups is missing or empty; it says how the weights are stored"
        raise _wrong(problem, "copy it from the original folder")
    each = [group.get("format") if isinstance(group, Mapping) else None for group in groups.values()]
    formats = [format if other is None else other for other in each]
    if others := [name for name in dict.fromkeys(formats) if name in _OTHER_FORMATS]:
        rest = [name for name in dict.fromkeys(formats) if name in _FORMATS]
        name = f"compressed-tensors {' and '.join(map(str, (*others, *rest)))}"
        raise NotSupported(name, _CONVERTERS["compressed-tensors"])
    if format != "mixed-precision" or None in each:
        _one_of(found, "format", _FORMATS)
    chosen = [_one_of({"format": name}, "format", _FORMATS) for name in formats]
    read = [_group(str(name), group, kind) for (name, group), kind in zip(groups.items(), chosen, strict=True)]
    if twice := [target for target, count in Counter(t for group in read for t in group.targets).items() if count > 1]:
        raise _wrong(f"config_groups has {twice[0]!r:.60} in two groups", "name it in one of them")
    status = None if (status := found.get("quantization_status")) is None else str(status)
    common: dict[str, Any] = {"ignore": _names(found, "ignore"), "cached": _cached(found, "kv_cache_scheme")}
    common["status"] = status
    targets = tuple(target for group in read for target in group.targets)
    is_one = all(dataclasses.replace(other, targets=read[0].targets) == read[0] for other in read[1:])
    parts = () if is_one else tuple(dataclasses.replace(group, **common) for group in read)
    return dataclasses.replace(read[0], **common, targets=targets, groups=parts)


def _group(name: str, group: Any, format: str) -> Layout:
    where = f"config_groups.{name}"
    weights = _float8(group, "weights", where)
    strategy, size = _one_of(weights, "strategy", ("tensor", "channel", "block", "group")), None
    if strategy in ("block", "group"):
        size = _pair(weights, "block_structure") if strategy == "block" else (1, _positive(weights, "group_size"))
    exponents = format == "mxfp8-quantized"
    if exponents and (strategy, size) != ("group", (1, 32)):
        problem = f"format 'mxfp8-quantized' has groups of 32, and {where} has {strategy} {size}"
        raise _wrong(problem, "correct the format or the group_size")
    inputs = None
    if group.get("input_activations") is not None:
        given = _float8(group, "input_activations", where)
        kind, dynamic = _one_of(given, "strategy", ("tensor", "token", "group")), given.get("dynamic")
        if type(dynamic) is not bool:
            problem = f"{where}.input_activations has dynamic={dynamic!r:.20}"
            raise _wrong(problem, "it must be true or false")
        if not dynamic and kind != "tensor":
            problem = f"static inputs have one scale, and {where} has the strategy {kind!r}"
            raise _wrong(problem, "set dynamic to true, or the strategy to 'tensor'")
        inputs = Inputs(kind, dynamic, _positive(given, "group_size") if kind == "group" else 0)
    if not (targets := _names(group, "targets")):
        raise _wrong(f"{where} has no targets; engines would quantize nothing", "set them to ['Linear']")
    return Layout(_COMPRESSED, strategy, size, inputs, exponents, targets=targets)


def _float8(group: Any, key: str, where: str) -> Mapping[str, Any]:
    scheme = group.get(key) if isinstance(group, Mapping) else None
    if not isinstance(scheme, Mapping):
        raise _wrong(f"{where} has no object {key!r}", "copy it from the original folder")
    _require_float8(scheme, f"{where}.{key}")
    if scheme.get("symmetric", True) is not True:
        problem = f"{where}.{key} has symmetric={scheme['symmetric']!r:.20}, and FP8 has no zero points"
        raise _wrong(problem, "set it to true")
    return scheme


def _require_float8(scheme: Mapping[str, Any], where: str) -> None:
    bits, kind = scheme.get("num_bits"), scheme.get("type")
    if type(bits) is not int or (bits, kind) != (8, "float"):
        problem = f"{where} has num_bits={bits!r:.20}, type={kind!r:.20}"
        raise _wrong(f"{problem}; in this format it is 8 and 'float'", "set them to these, as whole numbers")


def _cached(found: Mapping[str, Any], key: str) -> bool:
    """Whether keys and values are in FP8."""
    scheme = found.get(key)
    if isinstance(scheme, Mapping):
        _require_float8(scheme, key)
    elif scheme is not None and not (isinstance(scheme, str) and scheme.upper() == "FP8"):
        raise _wrong(f"{key}={scheme!r:.40} is unknown", "write {'num_bits': 8, 'type': 'float'}, or null for none")
    return scheme is not None


def _one_of(scheme: Any, key: str, known: tuple[str, ...], default: str | None = None) -> str:
    value = scheme.get(key) if isinstance(scheme, Mapping) else None
    value = default if value is None else value
    if value not in known:
        raise _wrong(f"{key}={value!r:.60} is unknown", f"it must be one of {', '.join(map(repr, known))}")
    return str(value)


def _names(scheme: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = scheme.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _wrong(f"{key} is {names!r:.60}", "it must be a list of names")
    return tuple(names)


def _pair(scheme: Mapping[str, Any], key: str) -> tuple[int, int]:
    size = scheme.get(key)
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and 0 < n <= _LARGEST_BLOCK for n in size):
        return size[0], size[1]
    raise _wrong(f"{key} is {size!r:.60}", f"it must be two whole numbers from 1 to {_LARGEST_BLOCK}, as [128, 128]")


def _positive(scheme: Mapping[str, Any], key: str) -> int:
    if type(size := scheme.get(key)) is int and 0 < size <= _LARGEST_BLOCK:
        return size
    raise _wrong(f"{key} is {size!r:.60}", f"it must be a whole number from 1 to {_LARGEST_BLOCK}")


def _wrong(problem: str, remedy: str) -> BrokenCheckpoint:
    return BrokenCheckpoint(CONFIG, f"{problem}; {remedy}", KEY)


# --- The layers that a list of a configuration means ------------------------------------------------------------------


def matcher(key: str, entry: str, method: str) -> Callable[[str], Any]:
    """Tells whether an entry of a list means a layer: by its name, a pattern of ModelOpt's, or a regular expression.

    Args:
        key: The list.
        entry: The entry.
        method: The layout's method.

    Raises:
        BrokenCheckpoint: If it is not a regular expression, or a very long one.
    """
    if method == "modelopt" and "*" in entry:
        return lambda layer: fnmatch.fnmatchcase(layer, entry)
    if not entry.startswith(REGEX):
        # The lists of other methods name modules, and mean all layers in them.
        return lambda layer: layer == entry or (method != "compressed-tensors" and f".{entry}." in f".{layer}.")
    if len(entry) > _LONGEST_PATTERN:
        problem = f"a pattern of {len(entry)} characters; at most {_LONGEST_PATTERN} are read: write several"
        raise BrokenCheckpoint(CONFIG, problem, key)
    try:
        return re.compile(entry.removeprefix(REGEX)).match
    except (re.error, RecursionError, OverflowError) as error:
        problem = f"{entry!r:.80} is not a regular expression: {error}; correct or remove it"
        raise BrokenCheckpoint(CONFIG, problem, key) from None


# --- Reading a layer, whichever layout wrote it -----------------------------------------------------------------------


def decode(layer: str, tensors: Mapping[str, np.ndarray], size: tuple[int, int] | None) -> ScaledMatrix:
    """The FP8 data and scales of a layer.

    Scales may have the shapes `[]`, `[1]`, `[out]`, `[out, 1]` or one for each block, in float32, bfloat16 or float16,
    or be exponents in bytes (E8M0).

    Args:
        layer: The layer's name, for errors.
        tensors: Its tensors, by the last part of their names.
        size: The blocks that the configuration names; blocks may be cut by the edge.

    Raises:
        ValueError: If a scale is missing, not positive and finite, or does not fit; each names the tensor.
    """
    data = tensors["weight"]
    if (name := next((name for name in WEIGHT_SCALES if name in tensors), None)) is None:
        raise ValueError(f"{layer}.weight is in {data.dtype} and has no {' or '.join(WEIGHT_SCALES)}")
    if data.ndim != 2:
        raise ValueError(f"{layer}.weight has shape {data.shape}; FP8 weights have two axes, [out, in]")
    scale, block = _in_blocks(f"{layer}.{name}", _positive_scale(f"{layer}.{name}", tensors[name]), data.shape, size)
    inputs = next((tensors[name] for name in INPUT_SCALES if name in tensors), None)
    if inputs is not None and (inputs := _positive_scale(f"{layer}.input_scale", inputs)).size != 1:
        raise ValueError(f"{layer}.input_scale has shape {inputs.shape}; a static input has one scale")
    return ScaledMatrix(data, scale, block, "checkpoint", None if inputs is None else float(inputs.reshape(())))


def as_float32(scale: np.ndarray) -> np.ndarray:
    """Scales as they multiply; exponents in bytes become powers of two, and 255 NaN."""
    if scale.dtype not in EXPONENTS:
        return scale.astype(np.float32)
    bits = scale.view(np.uint8).astype(np.uint32)
    # 0 means 2**-127, which is subnormal in float32.
    bits = np.where(bits == 255, 0x7FC00000, np.where(bits == 0, 0x00400000, bits << np.uint32(23)))
    return bits.astype(np.uint32).view(np.float32)


def require_elements(weight: str, shape: tuple[int, ...]) -> None:
    """Raises a ValueError if a weight that is to be quantized has no elements: no scale would follow from them."""
    if 0 in shape:
        raise ValueError(f"{weight} has shape {shape}: it has no elements, and so no scale; leave it out")


def _positive_scale(name: str, scale: np.ndarray) -> np.ndarray:
    if scale.dtype not in (*EXPONENTS, *FLOATS, np.float64):
        raise ValueError(f"{name} is in {scale.dtype}, which is not a dtype of scales")
    values = as_float32(scale)
    if (wrong := ~(np.isfinite(values) & (values > 0))).any():
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
