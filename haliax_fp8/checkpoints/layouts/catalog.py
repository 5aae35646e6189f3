"""The layouts by name, and the one that a configuration describes."""

from collections.abc import Mapping
from typing import Any

from ..._numerics.require import nearest
from .base import AbstractLayout
from .compressed_tensors import CompressedTensors, Strategy
from .hugging_face import HuggingFaceFp8
from .modelopt import ModelOptFp8


_CHANNEL, _TENSOR = Strategy.CHANNEL, Strategy.TENSOR

named: dict[str, AbstractLayout] = {
    "FP8_DYNAMIC": CompressedTensors(_CHANNEL, Strategy.TOKEN),
    "fp8": HuggingFaceFp8(),
    "FP8_BLOCK": CompressedTensors(Strategy.BLOCK, Strategy.GROUP),
    "MXFP8": CompressedTensors(Strategy.GROUP, Strategy.GROUP, size=32),
    "FP8": CompressedTensors(_CHANNEL, _TENSOR, dynamic=False),
    "FP8_TENSOR": CompressedTensors(_TENSOR, _TENSOR, dynamic=False),
    "W8A16": CompressedTensors(_CHANNEL, None),
    "modelopt": ModelOptFp8(),
}
"""In the order of who loads them."""

PLAIN = "BF16"


def as_layout(layout: str | AbstractLayout) -> AbstractLayout | None:
    """A layout by its name; None for `"BF16"`, which quantizes nothing.

    Args:
        layout: The name, or the layout.

    Raises:
        ValueError: If there is none of that name.
    """
    if isinstance(layout, AbstractLayout):
        return layout
    if layout == PLAIN:
        return None
    if not isinstance(layout, str) or layout not in named:
        near = ", ".join(repr(name) for name in nearest(str(layout), [*named, PLAIN], 3))
        raise ValueError(f"layout={layout!r} is unknown; the nearest are {near or 'none'}; all are {[*named, PLAIN]}")
    return named[layout]


def layout_of_config(config: Mapping[str, Any]) -> tuple[tuple[int, int] | None, bool]:
    """The blocks that a configuration names for weights, and whether it describes any FP8 weights at all.

    Args:
        config: What `config.json` holds.

    Raises:
        ValueError: If it names a method, format or strategy that is none of FP8 weights.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None, False
    if not isinstance(quantization, Mapping):
        raise ValueError(f"quantization_config is a {type(quantization).__name__}, but must be a JSON object")
    method = quantization.get("quant_method")
    match method:
        case "compressed-tensors":
            return _of_groups(quantization), True
        case "fp8":
            size = quantization.get("weight_block_size")
            return None if size is None else _pair("weight_block_size", size), True
        case "modelopt":
            algorithm = quantization.get("quant_algo")
            if algorithm != "FP8":
                raise ValueError(f"quant_algo={algorithm!r} of quantization_config is not FP8, which alone is read")
            return None, True
    raise ValueError(
        f"quant_method={method!r} of quantization_config is unknown; read are 'compressed-tensors', 'fp8', 'modelopt'"
    )


def _of_groups(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError("quantization_config has no config_groups")
    blocks = set()
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise ValueError(f"{name} of config_groups has no weights")
        if (weights.get("num_bits"), weights.get("type")) != (8, "float"):
            raise ValueError(
                f"{name} has weights of {weights.get('num_bits')} bits, {weights.get('type')}; 8, float is read"
            )
        match weights.get("strategy"):
            case "tensor" | "channel":
                blocks.add(None)
            case "block":
                blocks.add(_pair("block_structure", weights.get("block_structure")))
            case "group":
                blocks.add(_pair("group_size", [1, weights.get("group_size")]))
            case strategy:
                raise ValueError(f"{name} has the strategy {strategy!r}; read are tensor, channel, block and group")
    if len(blocks) > 1:
        raise ValueError(f"config_groups have blocks of different sizes: {sorted(map(str, blocks))}; one is read")
    return blocks.pop()


def _pair(name: str, size: Any) -> tuple[int, int]:
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    raise ValueError(f"{name}={size!r} of quantization_config must be two positive numbers, such as [128, 128]")
