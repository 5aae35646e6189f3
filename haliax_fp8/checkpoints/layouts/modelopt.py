"""NVIDIA ModelOpt's layout, which TensorRT-LLM and vLLM load. Transformers loads it without its scales."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..scaled_matrix import ScaledMatrix
from .base import FLOAT32, FP8, INPUT_SCALES, WEIGHT_SCALES, AbstractLayout


@dataclasses.dataclass(frozen=True)
class ModelOptFp8(AbstractLayout):
    """One scale for each weight and each input, without axes.

    References:
        `hf_quant_config.json` of ModelOpt's exports.
    """

    @property
    def is_static(self) -> bool:
        """True: each layer has a scale for its input."""
        return True

    @property
    def cache_scales(self) -> tuple[str, str]:
        """Names of scales within the projections of keys and values."""
        return "k_proj.k_scale", "v_proj.v_scale"

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The whole kernel, which has one scale."""
        return shape

    def tensors(self, shape: tuple[int, int]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """A weight and two numbers."""
        return {"weight": (FP8, shape), WEIGHT_SCALES[0]: (FLOAT32, ()), INPUT_SCALES[0]: (FLOAT32, ())}

    def encode(self, matrix: ScaledMatrix) -> dict[str, np.ndarray]:
        """A layer's weight and its two scales, as numbers without axes."""
        scales = {WEIGHT_SCALES[0]: matrix.scale.reshape(()), INPUT_SCALES[0]: np.float32(matrix.input_scale)}
        return {"weight": matrix.data} | {name: np.asarray(scale, np.float32) for name, scale in scales.items()}

    def config_files(
        self, ignore: Sequence[str], *, cached: bool = False
    ) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]:
        """`hf_quant_config.json`, and the same in `config.json`, where newer engines look."""
        producer = {"name": "haliax_fp8"}
        cache = "FP8" if cached else None
        quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": cache, "exclude_modules": list(ignore)}
        config = {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "kv_cache_quant_algo": cache,
            "ignore": list(ignore),
            "producer": producer,
        }
        files = {"hf_quant_config.json": {"producer": producer, "quantization": quantization}}
        return {"quantization_config": config}, files
