"""What the configuration of a folder says of its layers: a `Layout`; read strictly, as engines accept anything."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ..formats import E2M1, E4M3
from ..layouts import Inputs, Layout, named
from . import four_bits
from .folder import CONFIG, TensorFolder
from .layout import KEY, MODELOPT
from .strict_json import BrokenCheckpoint


class NotSupported(ValueError):
    """A folder has a layout that is known, and not read here.

    Args:
        layout: The layout's name.
        remedy: Which tool converts it.
    """

    def __init__(self, layout: str, remedy: str) -> None:
        self.layout, self.remedy = layout, remedy
        super().__init__(f"{CONFIG}: {KEY}: the layout {layout} is not supported here; {remedy}")


# More rows or columns than any weight has.
_LARGEST_BLOCK = 2**31


def read_layout(folder: TensorFolder) -> Layout | None:
    """What a folder's configuration says of its layers, or else the names of its scales; None if nothing is quantized.

    Raises:
        BrokenCheckpoint: As in `layout_of`.
        NotSupported: As in `layout_of`.
    """
    layout = layout_of(folder.config, folder.json_beside(MODELOPT))
    last = {stored.name.rpartition(".")[2] for stored in folder.tensors.values()}
    if layout is None and "scale_weight" in last:
        return Layout("tensor", Inputs("tensor", "scale_input" not in last), method="scale_weight", targets=())
    return layout


def presented(folder: TensorFolder) -> TensorFolder:
    """A folder whose weights and scales have the usual names, whatever its library calls them.

    Those of weights in four bits are presented one code for each element.
    """
    tensors = {}
    for name, stored in four_bits.presented(folder.tensors).items():
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
    quantization = config.get(KEY, config.get("compression_config"))
    if quantization is None and beside is not None:
        if not isinstance(inner := beside.get("quantization"), Mapping):
            raise BrokenCheckpoint(MODELOPT, "it has no object 'quantization'; copy it from the original folder")
        quantization = {**inner, "ignore": inner.get("exclude_modules"), "quant_method": "modelopt"}
    if quantization is None:
        return None
    if not isinstance(quantization, Mapping):
        problem = f"it is a {type(quantization).__name__}, but must be a JSON object"
        raise _wrong(problem, "copy it from the original folder")
    method = quantization.get("quant_method")
    if isinstance(method, str) and method in _CONVERTERS and method not in _READERS:
        raise NotSupported(method, _CONVERTERS[method])
    if not isinstance(method, str) or method not in _READERS:
        raise _wrong(f"quant_method={method!r:.60} is unknown", f"it must be one of {', '.join(map(repr, _READERS))}")
    layout, experts = _READERS[method](quantization), quantization.get("expert_dtype", config.get("expert_dtype"))
    return _with_experts(layout) if method == "fp8" and experts in ("fp4", "mxfp4") else layout


def _with_experts(layout: Layout) -> Layout:
    """The layout of DeepSeek-V4: its code says which layers are in FP8, and the experts of routers are in MXFP4."""
    every = dataclasses.replace(layout, targets=())
    inputs = Inputs("group", size=layout.size[1]) if layout.size else layout.inputs
    experts = dataclasses.replace(
        every, strategy="group", size=(1, 32), inputs=inputs, exponents=True, format=E2M1, targets=(_EXPERTS,)
    )
    return dataclasses.replace(every, groups=(every, experts))


# The layers of experts of a router; others have other names.
_EXPERTS = r"re:.*\bexperts\."


def _modelopt(quantization: Mapping[str, Any]) -> Layout:
    name = quantization.get("quant_algo")
    algorithm = str(name).upper()
    if algorithm in ("W4A16_AWQ", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL", "MIXED_PRECISION"):
        raise NotSupported(f"modelopt {algorithm}", _CONVERTERS["modelopt"])
    if algorithm not in _MODELOPT:
        raise _wrong(f"quant_algo={name!r:.60} is unknown", f"it must be one of {list(_MODELOPT)}")
    cached = _cached(quantization, "kv_cache_quant_algo") or _cached(quantization, "kv_cache_scheme")
    ignore = _names(quantization, "ignore") or _names(quantization, "exclude_modules")
    return dataclasses.replace(_MODELOPT[algorithm], ignore=ignore, cached=cached)


def _hugging_face(quantization: Mapping[str, Any]) -> Layout:
    _one_of(quantization, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    static = _one_of(quantization, "activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    size = None if quantization.get("weight_block_size") is None else _pair(quantization, "weight_block_size")
    exponents = _one_of(quantization, "scale_fmt", ("float", "ue8m0"), "float") == "ue8m0"
    if size and static:
        problem = "activation_scheme='static' with weight_block_size; blocks have dynamic inputs"
        raise _wrong(problem, "write 'dynamic'")
    inputs = Inputs("group", size=size[1]) if size else Inputs("tensor", not static)
    return Layout("block" if size else "tensor", inputs, size, "fp8", exponents, ignore=_left_alone(quantization))


def _fbgemm(quantization: Mapping[str, Any]) -> Layout:
    bound = quantization.get("activation_scale_ub")
    if bound is not None and not (type(bound) in (int, float) and 0 < bound < math.inf):
        raise _wrong(f"activation_scale_ub is {bound!r:.40}", "it must be a positive number, or null for none")
    return Layout("channel", Inputs("token", bound=bound), method="fbgemm_fp8", ignore=_left_alone(quantization))


def _gpt_oss(quantization: Mapping[str, Any]) -> Layout:
    ignore = _left_alone(quantization)
    return Layout("group", None, (1, 32), "mxfp4", exponents=True, format=E2M1, ignore=ignore, targets=(_EXPERTS,))


def _torchao(quantization: Mapping[str, Any]) -> Layout:
    scheme = quantization.get("quant_type")
    scheme = scheme.get("default") if isinstance(scheme, Mapping) and len(scheme) == 1 else None
    kind = scheme.get("_type") if isinstance(scheme, Mapping) else quantization.get("quant_type")
    data = scheme.get("_data") if isinstance(scheme, Mapping) else None
    granularity = data.get("granularity") if isinstance(data, Mapping) else None
    each = granularity if isinstance(granularity, list) else [granularity]
    grains = {grain.get("_type") if isinstance(grain, Mapping) else grain for grain in each}
    weight_only = kind == "Float8WeightOnlyConfig"
    grains = grains if grains != {None} else {"PerRow" if weight_only else "PerTensor"}
    is_read = weight_only or kind == "Float8DynamicActivationFloat8WeightConfig"
    if not is_read or grains not in ({"PerRow"}, {"PerTensor"}):
        raise NotSupported(f"torchao {kind!s:.60} {', '.join(sorted(map(str, grains)))}", _CONVERTERS["torchao"])
    of_rows = grains == {"PerRow"}
    inputs = None if weight_only else Inputs("token" if of_rows else "tensor")
    return Layout("channel" if of_rows else "tensor", inputs, method="torchao", ignore=_left_alone(quantization))


def _left_alone(quantization: Mapping[str, Any]) -> tuple[str, ...]:
    lists = (_names(quantization, key) for key in ("modules_to_not_convert", "ignored_layers"))
    return tuple(dict.fromkeys(itertools.chain(*lists)))


_READERS: dict[str, Callable[[Mapping[str, Any]], Layout]] = {
    "compressed-tensors": lambda quantization: _compressed_tensors(quantization),
    "fp8": _hugging_face,
    "modelopt": _modelopt,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _gpt_oss,
    "torchao": _torchao,
}

_MODELOPT = {
    "FP8": named["modelopt"],
    "FP8_PER_CHANNEL_PER_TOKEN": Layout("channel", Inputs("token"), method="modelopt"),
    "FP8_PB_WO": Layout("block", None, (128, 128), "modelopt"),
    "MXFP8": Layout("group", Inputs("group", size=32), (1, 32), "modelopt", exponents=True),
    "NVFP4": dataclasses.replace(named["NVFP4"], method="modelopt"),
    "W4A16_NVFP4": dataclasses.replace(named["NVFP4A16"], method="modelopt"),
}

# Which tool makes weights in high precision of methods and formats that are not read here.
_SAVE = "and save the model in bfloat16"
_BY_LIBRARY = f"load it with Transformers and the library of that method, dequantize its weights, {_SAVE}"
_CONVERTERS = {
    "bitsandbytes": f"load it with Transformers, call model.dequantize(), {_SAVE}",
    "compressed-tensors": f"load it with Transformers and CompressedTensorsConfig(run_compressed=False), {_SAVE}",
    "modelopt": "quantize the original model again with ModelOpt, in FP8, MXFP8 or NVFP4",
    "torchao": f"load it with Transformers and torchao, call dequantize() of each weight, {_SAVE}",
    "quanto": f"load it with optimum-quanto, call dequantize() of each weight, {_SAVE}",
    "gptq": f"load it with GPTQModel, dequantize its weights, {_SAVE}",
    "awq": f"load it with GPTQModel, dequantize its weights, {_SAVE}",
} | dict.fromkeys(
    ("auto-round", "aqlm", "bitnet", "eetq", "fp_quant", "higgs", "hqq", "quark", "quip", "spqr", "vptq"), _BY_LIBRARY
)

# Formats of compressed-tensors: those that are read, and the others.
_FORMATS = ("float-quantized", "naive-quantized", "mxfp8-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized")
_OTHER_FORMATS = ("pack-quantized", "int-quantized", "marlin-24", "sparse-bitmask", "sparse-24-bitmask")


def _compressed_tensors(quantization: Mapping[str, Any]) -> Layout:
    format, groups = quantization.get("format"), quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        problem = "config_groups is missing or empty; it says how the weights are stored"
        raise _wrong(problem, "copy it from the original folder")
    each = [group.get("format") if isinstance(group, Mapping) else None for group in groups.values()]
    formats = [format if other is None else other for other in each]
    names = dict.fromkeys(map(str, formats))
    if others := [name for name in names if name in _OTHER_FORMATS]:
        rest = [name for name in names if name in _FORMATS]
        name = f"compressed-tensors {' and '.join((*others, *rest))}"
        raise NotSupported(name, _CONVERTERS["compressed-tensors"])
    if format != "mixed-precision" or None in each:
        _one_of(quantization, "format", _FORMATS)
    chosen = [_one_of({"format": name}, "format", _FORMATS) for name in formats]
    read = [_group(str(name), group, kind) for (name, group), kind in zip(groups.items(), chosen, strict=True)]
    if twice := [target for target, count in Counter(t for group in read for t in group.targets).items() if count > 1]:
        raise _wrong(f"config_groups has {twice[0]!r:.60} in two groups", "name it in one of them")
    status = None if (status := quantization.get("quantization_status")) is None else str(status)
    common: dict[str, Any] = {"ignore": _names(quantization, "ignore"), "status": status}
    common["cached"] = _cached(quantization, "kv_cache_scheme")
    targets = tuple(target for group in read for target in group.targets)
    is_one = all(dataclasses.replace(other, targets=read[0].targets) == read[0] for other in read[1:])
    parts = () if is_one else tuple(dataclasses.replace(group, **common) for group in read)
    return dataclasses.replace(read[0], **common, targets=targets, groups=parts)


def _group(name: str, group: Any, format: str) -> Layout:
    where, in_four = f"config_groups.{name}", format.endswith("fp4-pack-quantized")
    weights = _floats(group, "weights", where, (4,) if in_four else (8,))
    strategy, size = _one_of(weights, "strategy", _STRATEGIES["weights"]), None
    strategy = "group" if strategy == "tensor_group" and in_four else strategy
    if strategy in ("block", "group", "tensor_group"):
        size = _pair(weights, "block_structure") if strategy == "block" else (1, _positive(weights, "group_size"))
    exponents = format.startswith("mx")
    of_format = {"mxfp8-quantized": 32, "mxfp4-pack-quantized": 32, "nvfp4-pack-quantized": 16}.get(format)
    if strategy == "tensor_group" or (of_format and (strategy, size) != ("group", (1, of_format))):
        problem = f"format {format!r} has {f'groups of {of_format}' if of_format else 'scales in one level'}"
        raise _wrong(f"{problem}, and {where} has {strategy} {size}", "correct the format or the group_size")
    inputs = None
    if group.get("input_activations") is not None:
        scheme = _floats(group, "input_activations", where, (4, 8) if in_four else (8,))
        kind, dynamic = _one_of(scheme, "strategy", _STRATEGIES["inputs"]), scheme.get("dynamic")
        bits, is_local = scheme["num_bits"], kind == "tensor_group" and dynamic == "local"
        if type(dynamic) is not bool and not is_local:
            problem = f"{where}.input_activations has dynamic={dynamic!r:.20}"
            raise _wrong(problem, "it must be true or false, or 'local' with the strategy 'tensor_group'")
        if not dynamic and kind != "tensor":
            problem = f"static inputs have one scale, and {where} has the strategy {kind!r}"
            raise _wrong(problem, "set dynamic to true, or the strategy to 'tensor'")
        of_group = _positive(scheme, "group_size") if kind in ("group", "tensor_group") else 0
        kind = "group" if kind == "tensor_group" else kind
        inputs = Inputs(kind, bool(dynamic) and not is_local, of_group, E2M1 if bits == 4 else E4M3)
    if not (targets := _names(group, "targets")):
        raise _wrong(f"{where} has no targets; engines would quantize nothing", "set them to ['Linear']")
    return Layout(strategy, inputs, size, exponents=exponents, format=E2M1 if in_four else E4M3, targets=targets)


_STRATEGIES = {
    "weights": ("tensor", "channel", "block", "group", "tensor_group"),
    "inputs": ("tensor", "token", "group", "tensor_group"),
}


def _floats(group: Any, key: str, where: str, bits: tuple[int, ...]) -> Mapping[str, Any]:
    scheme = group.get(key) if isinstance(group, Mapping) else None
    if not isinstance(scheme, Mapping):
        raise _wrong(f"{where} has no object {key!r}", "copy it from the original folder")
    _require_float(scheme, f"{where}.{key}", bits)
    if scheme.get("symmetric", True) is not True:
        problem = f"{where}.{key} has symmetric={scheme['symmetric']!r:.20}, and floating point has no zero points"
        raise _wrong(problem, "set it to true")
    return scheme


def _require_float(scheme: Mapping[str, Any], where: str, allowed: tuple[int, ...] = (8,)) -> None:
    bits, kind = scheme.get("num_bits"), scheme.get("type")
    if type(bits) is not int or bits not in allowed or kind != "float":
        problem = f"{where} has num_bits={bits!r:.20}, type={kind!r:.20}"
        right = " or ".join(map(str, allowed))
        raise _wrong(f"{problem}; in this format it is {right} and 'float'", "set them to these, as whole numbers")


def _cached(quantization: Mapping[str, Any], key: str) -> bool:
    """Whether keys and values are in FP8."""
    scheme = quantization.get(key)
    if isinstance(scheme, Mapping):
        _require_float(scheme, key)
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
