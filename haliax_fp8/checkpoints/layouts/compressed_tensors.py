"""The layouts of compressed-tensors, which vLLM, SGLang and Transformers load."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

from .base import AbstractLayout


class Strategy(enum.Enum):
    """What shares a scale, by compressed-tensors' names."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    BLOCK = "block"
    GROUP = "group"
    TOKEN = "token"


@dataclasses.dataclass(frozen=True)
class CompressedTensors(AbstractLayout):
    """A preset of compressed-tensors.

    Args:
        weights: What shares a scale of the weights.
        inputs: What shares one of the inputs; None leaves them in high precision.
        dynamic: Whether engines compute the scales of inputs as they run.
        size: The elements of a block or group along the inputs.

    References:
        `compressed_tensors.quantization.quant_scheme`, version 0.20.
    """

    weights: Strategy
    inputs: Strategy | None
    dynamic: bool = True
    size: int = 128

    @property
    def is_static(self) -> bool:
        """Whether inputs are quantized with a scale of the checkpoint."""
        return self.inputs is not None and not self.dynamic

    @property
    def is_microscaled(self) -> bool:
        """Whether this is MXFP8."""
        return self.weights is Strategy.GROUP

    @property
    def cache_scales(self) -> tuple[str, str]:
        """Names of attention's own scales, next to its projections."""
        return "k_scale", "v_scale"

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The blocks of a kernel."""
        match self.weights:
            case Strategy.TENSOR:
                return shape
            case Strategy.BLOCK:
                return self.size, self.size
            case Strategy.GROUP:
                return 1, self.size
            case _:
                return 1, shape[1]

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """The number of blocks along each axis; one scale for a tensor is a vector."""
        return (1,) if self.weights is Strategy.TENSOR else super().scale_shape(shape)

    def config_files(
        self, ignore: Sequence[str], *, cached: bool = False
    ) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]:
        """A `quantization_config` with one group of all linear layers."""
        common = {"num_bits": 8, "type": "float", "symmetric": True}
        weights: dict[str, Any] = {**common, "dynamic": False, "strategy": self.weights.value}
        inputs: dict[str, Any] | None = None
        if self.inputs is not None:
            inputs = {**common, "dynamic": self.dynamic, "strategy": self.inputs.value}
        if self.weights is Strategy.BLOCK:
            weights["block_structure"] = [self.size, self.size]
        if self.weights is Strategy.GROUP:
            weights |= {"group_size": self.size, "scale_dtype": "torch.uint8"}
        if inputs is not None and self.inputs is Strategy.GROUP:
            inputs["group_size"] = self.size
            if self.is_microscaled:
                inputs["scale_dtype"] = "torch.uint8"
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        config = {
            "quant_method": "compressed-tensors",
            "format": "mxfp8-quantized" if self.is_microscaled else "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
            "kv_cache_scheme": {**common, "dynamic": False, "strategy": "tensor"} if cached else None,
        }
        return {"quantization_config": config}, {}
