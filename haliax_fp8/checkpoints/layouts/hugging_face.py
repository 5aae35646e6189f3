"""The layout that DeepSeek-V3 and Qwen3-FP8 have, Hugging Face's `fp8`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .base import WEIGHT_SCALES, AbstractLayout


@dataclasses.dataclass(frozen=True)
class HuggingFaceFp8(AbstractLayout):
    """Weights in square blocks, with `weight_scale_inv`, which multiplies them despite its name.

    Args:
        size: The rows and columns of a block.

    References:
        `transformers.FineGrainedFP8Config`, version 5.23.
    """

    size: int = 128

    @property
    def is_static(self) -> bool:
        """False: engines compute the scales of inputs, one for 128 elements of a row."""
        return False

    @property
    def scale_name(self) -> str:
        """`weight_scale_inv`, by which engines multiply."""
        return WEIGHT_SCALES[1]

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Squares of `size` rows and columns."""
        return self.size, self.size

    def config_files(
        self, ignore: Sequence[str], *, cached: bool = False
    ) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]:
        """A `quantization_config`; engines read the layers left alone under one of two names."""
        del cached
        config = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [self.size, self.size],
            "modules_to_not_convert": list(ignore),
            "ignored_layers": list(ignore),
        }
        return {"quantization_config": config}, {}
