"""What a `config.json` says about FP8 weights: read strictly, as engines accept nearly anything without a word."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..files import BrokenCheckpoint, TensorFolder


CONFIG = "config.json"
KEY = "quantization_config"
MODELOPT = "hf_quant_config.json"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """How the inputs of layers are quantized.

    Args:
        strategy: What shares a scale: `"tensor"`, `"token"` or `"group"`.
        dynamic: Whether engines compute the scales as they run; otherwise each layer has one.
        size: The elements of a group.
    """

    strategy: str
    dynamic: bool
    size: int = 0

    def __str__(self) -> str:
        what = {"tensor": "a scale for all", "token": "a scale for each token"}
        return (
            f"{what.get(self.strategy, f'a scale for {self.size} elements')}, {'dynamic' if self.dynamic else 'static'}"
        )


@dataclasses.dataclass(frozen=True)
class CheckpointQuantization:
    """What a configuration says of the layers that are in FP8.

    Args:
        method: `"compressed-tensors"`, `"fp8"` or `"modelopt"`.
        strategy: What shares a scale of the weights: `"tensor"`, `"channel"`, `"block"` or `"group"`.
        block: The rows and columns that share one, for blocks and groups.
        inputs: How inputs are quantized; None if they are not.
        ignore: The layers left alone: names, or with `re:` regular expressions.
        targets: The layers meant: classes, names, or regular expressions.
        exponents: Whether scales are powers of two, E8M0: in bytes, or with the method `"fp8"` in floats too.
        cached: Whether keys and values are kept in FP8, with scales.
        status: What compressed-tensors says of the weights: `"compressed"` if they are stored in FP8.
    """

    method: str
    strategy: str
    block: tuple[int, int] | None
    inputs: Inputs | None
    ignore: tuple[str, ...]
    targets: tuple[str, ...] = ("Linear",)
    exponents: bool = False
    cached: bool = False
    status: str | None = None

    @property
    def scale_names(self) -> tuple[str, ...]:
        """The last part of the name of a weight's scales: one of these."""
        if self.method != "fp8":
            return ("weight_scale",)
        # Blocks have one name for all engines. Without, AutoFP8 and vLLM have the first, Transformers the second.
        return ("weight_scale", "weight_scale_inv")[self.block is not None :]

    @property
    def input_scale_names(self) -> tuple[str, ...]:
        """The last part of the name of an input's scale: one of these."""
        return ("input_scale", "activation_scale") if self.method == "fp8" else ("input_scale",)

    @property
    def is_static(self) -> bool:
        """Whether each layer has a scale of its input."""
        return self.inputs is not None and not self.inputs.dynamic

    @property
    def name(self) -> str:
        """The layout's name in this package; a description if it has none."""
        match self.method, self.strategy, self.inputs:
            case ("modelopt", _, _):
                return "modelopt"
            case ("fp8", "block", _):
                return "HF_FP8"
            case ("compressed-tensors", "channel", Inputs("token", True)):
                return "FP8_DYNAMIC"
            case ("compressed-tensors", "channel", Inputs("tensor", False)):
                return "FP8"
            case ("compressed-tensors", "tensor", Inputs("tensor", False)):
                return "FP8_TENSOR"
            case ("compressed-tensors", "block", Inputs("group", True)):
                return "FP8_BLOCK"
            case ("compressed-tensors", "group", _) if self.exponents and self.inputs is not None:
                return "MXFP8"
            case ("compressed-tensors", _, None):
                return "W8A16"
        return f"{self.method}, {self.strategy} weights"

    def scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes that the scales of a weight may have; experts in one array have theirs in front.

        Args:
            shape: The shape of the weight, `[out, in]`.
        """
        front, (rows, columns) = shape[:-2], shape[-2:]
        match self.strategy:
            case "tensor":
                return ((), (1,), (1, 1), front) if not front else (front, (*front, 1), (*front, 1, 1))
            case "channel":
                return ((*front, rows, 1), (*front, rows))
        height, width = self.block or (rows, columns)
        return ((*front, -(-rows // height), -(-columns // width)),)


def read_quantization(folder: TensorFolder) -> CheckpointQuantization | None:
    """What the configuration of a folder says; None if nothing is quantized.

    Args:
        folder: The folder.

    Raises:
        BrokenCheckpoint: As in `quantization_of`.
    """
    return quantization_of(folder.config, folder.json_beside(MODELOPT))


def quantization_of(
    config: Mapping[str, Any], beside: Mapping[str, Any] | None = None
) -> CheckpointQuantization | None:
    """What a configuration says; None if nothing is quantized.

    Args:
        config: What `config.json` holds.
        beside: What `hf_quant_config.json` holds, where older exports of ModelOpt say it.

    Raises:
        BrokenCheckpoint: If it is of an unknown method, format or strategy, or contradicts itself.

    Example:
        >>> config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        >>> quantization_of(config).name
        'HF_FP8'
    """
    found = config.get(KEY, config.get("compression_config"))
    if found is None and beside is not None:
        inner = beside.get("quantization")
        if not isinstance(inner, Mapping):
            raise BrokenCheckpoint(MODELOPT, "it has no object 'quantization'")
        renamed = {"exclude_modules": "ignore"}
        found = {renamed.get(name, name): value for name, value in inner.items()} | {"quant_method": "modelopt"}
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise _wrong(f"it is a {type(found).__name__}, but must be a JSON object")
    match found.get("quant_method"):
        case "compressed-tensors":
            return _compressed_tensors(found)
        case "fp8":
            return _hugging_face(found)
        case "modelopt":
            algorithm = _one_of(found, "quant_algo", ("FP8",))
            cached = found.get("kv_cache_quant_algo", found.get("kv_cache_scheme")) is not None
            ignore = _names(found, "ignore") or _names(found, "exclude_modules")
            assert algorithm == "FP8"
            return CheckpointQuantization("modelopt", "tensor", None, Inputs("tensor", False), ignore, cached=cached)
    method = f"quant_method={found.get('quant_method')!r:.60}"
    raise _wrong(f"{method} is unknown; the known ones are 'compressed-tensors', 'fp8' and 'modelopt'")


def _compressed_tensors(found: Mapping[str, Any]) -> CheckpointQuantization:
    formats = ("float-quantized", "naive-quantized", "mxfp8-quantized")
    format = _one_of(found, "format", formats)
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _wrong("config_groups is missing or empty; it says how the weights are stored")
    read = [_group(str(name), group, _one_of(group, "format", formats, format)) for name, group in groups.items()]
    (strategy, block, inputs, _, exponents), *others = read
    if any(other[:3] != (strategy, block, inputs) for other in others):
        raise _wrong("config_groups has groups of different schemes; only one scheme for all layers is supported")
    targets = tuple(target for _, _, _, targets, _ in read for target in targets)
    ignore, cached = _names(found, "ignore"), found.get("kv_cache_scheme") is not None
    status = found.get("quantization_status")
    status = None if status is None else str(status)
    return CheckpointQuantization(
        "compressed-tensors", strategy, block, inputs, ignore, targets, exponents, cached, status
    )


def _group(
    name: str, group: Any, format: str
) -> tuple[str, tuple[int, int] | None, Inputs | None, tuple[str, ...], bool]:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _wrong(f"config_groups.{name} has no object 'weights'")
    _require_float8(f"config_groups.{name}.weights", weights)
    strategy = _one_of(weights, "strategy", ("tensor", "channel", "block", "group"))
    block = None
    if strategy == "block":
        block = _pair(weights, "block_structure")
    if strategy == "group":
        block = 1, _positive(weights, "group_size")
    exponents = format == "mxfp8-quantized"
    if exponents and (strategy != "group" or block != (1, 32)):
        raise _wrong(f"format 'mxfp8-quantized' has groups of 32, and config_groups.{name} has {strategy} {block}")
    given = group.get("input_activations")
    inputs = None
    if given is not None:
        if not isinstance(given, Mapping):
            raise _wrong(f"config_groups.{name}.input_activations is not an object")
        _require_float8(f"config_groups.{name}.input_activations", given)
        kind = _one_of(given, "strategy", ("tensor", "token", "group"))
        dynamic = given.get("dynamic")
        if type(dynamic) is not bool:
            raise _wrong(f"dynamic={dynamic!r:.20} of config_groups.{name}.input_activations must be true or false")
        if not dynamic and kind != "tensor":
            raise _wrong(f"static inputs have one scale, and config_groups.{name} has the strategy {kind!r}")
        inputs = Inputs(kind, dynamic, _positive(given, "group_size") if kind == "group" else 0)
    targets = _names(group, "targets")
    if not targets:
        raise _wrong(f"config_groups.{name} has no targets; engines would quantize nothing")
    return strategy, block, inputs, targets, exponents


def _require_float8(where: str, scheme: Mapping[str, Any]) -> None:
    if (scheme.get("num_bits"), scheme.get("type")) != (8, "float"):
        found = f"num_bits={scheme.get('num_bits')!r:.20}, type={scheme.get('type')!r:.20}"
        raise _wrong(f"{where} has {found}; only weights and inputs in 8-bit float are supported")


def _hugging_face(found: Mapping[str, Any]) -> CheckpointQuantization:
    _one_of(found, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    scheme = _one_of(found, "activation_scheme", ("dynamic", "static"), "dynamic")
    block = None if found.get("weight_block_size") is None else _pair(found, "weight_block_size")
    exponents = _one_of(found, "scale_fmt", ("float", "ue8m0"), "float") == "ue8m0"
    lists = ("modules_to_not_convert", "ignored_layers")
    ignore = tuple(dict.fromkeys(name for key in lists for name in _names(found, key)))
    if block is None:
        return CheckpointQuantization(
            "fp8", "tensor", None, Inputs("tensor", scheme == "dynamic"), ignore, exponents=exponents
        )
    if scheme == "static":
        raise _wrong("activation_scheme='static' with weight_block_size; blocks have dynamic inputs")
    return CheckpointQuantization("fp8", "block", block, Inputs("group", True, block[1]), ignore, exponents=exponents)


def _one_of(scheme: Any, key: str, known: tuple[str, ...], default: str | None = None) -> str:
    value = scheme.get(key, default) if isinstance(scheme, Mapping) else default
    value = default if value is None else value
    if value not in known:
        raise _wrong(f"{key}={value!r:.60} is unknown; the known ones are {', '.join(map(repr, known))}")
    return str(value)


def _names(scheme: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = scheme.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _wrong(f"{key}={names!r:.60} must be a list of names")
    return tuple(names)


def _pair(scheme: Mapping[str, Any], key: str) -> tuple[int, int]:
    size = scheme.get(key)
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    raise _wrong(f"{key}={size!r:.60} must be two positive whole numbers, such as [128, 128]")


def _positive(scheme: Mapping[str, Any], key: str) -> int:
    size = scheme.get(key)
    if type(size) is int and size > 0:
        return size
    raise _wrong(f"{key}={size!r:.60} must be a positive whole number")


def _wrong(problem: str) -> BrokenCheckpoint:
    return BrokenCheckpoint(CONFIG, problem, KEY)
