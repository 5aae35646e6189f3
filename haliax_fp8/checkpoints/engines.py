"""Which engine loads which layout, what multiplies there, and how that is known."""

import dataclasses
import enum


class EngineVerdict(enum.Enum):
    """What becomes of a checkpoint in an engine."""

    FP8 = "multiplies in FP8"
    EMULATED = "rounds as FP8 does, multiplies in high precision"
    DEQUANTIZED = "dequantizes"
    REFUSED = "refuses"
    GARBAGE = "computes garbage, silently"


class Evidence(enum.Enum):
    """How a row of the table is known."""

    RUN = "seen running"
    LOADED = "seen loading"
    CODE = "its source"
    DOCUMENTATION = "its documentation"


@dataclasses.dataclass(frozen=True)
class Engine:
    """An engine and a layout.

    Args:
        layouts: The layouts, by their names.
        engine: The engine and its version.
        hardware: Where it runs.
        verdict: What becomes of the checkpoint.
        detail: What multiplies, or what is missing.
        evidence: How that is known.
    """

    layouts: tuple[str, ...]
    engine: str
    hardware: str
    verdict: EngineVerdict
    detail: str
    evidence: Evidence


_VLLM_CPU = "vLLM 0.32.0", "CPU, AVX-512 without AMX"
_VLLM_GPU = "vLLM 0.32.0"
_HOPPER = "NVIDIA from 8.9 on"
_TRANSFORMERS = "Transformers 5.23.0, compressed-tensors 0.20.0", "CPU"
_TPU = "tpu-inference b8692ff, flax_nnx", "TPU"
_SGLANG_JAX = "sglang-jax cddbf6f", "TPU, GPU"

engines = (
    Engine(
        ("FP8_DYNAMIC",),
        *_VLLM_CPU,
        EngineVerdict.FP8,
        "ChannelWiseTorchFP8ScaledMMLinearKernel, torch._scaled_mm",
        Evidence.RUN,
    ),
    Engine(
        ("FP8",),
        *_VLLM_CPU,
        EngineVerdict.REFUSED,
        "loads; its CPU kernel fails on an input scale without axes",
        Evidence.LOADED,
    ),
    Engine(
        ("FP8_TENSOR", "modelopt"),
        *_VLLM_CPU,
        EngineVerdict.REFUSED,
        "loads; static_scaled_fp8_quant is missing in this build",
        Evidence.LOADED,
    ),
    Engine(("FP8_BLOCK", "HF_FP8"), *_VLLM_CPU, EngineVerdict.REFUSED, "needs AMX", Evidence.RUN),
    Engine(("W8A16", "MXFP8"), *_VLLM_CPU, EngineVerdict.REFUSED, "no CPU kernel", Evidence.RUN),
    Engine(
        ("FP8", "FP8_TENSOR", "FP8_DYNAMIC", "FP8_BLOCK"),
        *_TRANSFORMERS,
        EngineVerdict.EMULATED,
        "rounds inputs too; in bfloat16 it casts scales to bfloat16",
        Evidence.RUN,
    ),
    Engine(
        ("W8A16",),
        *_TRANSFORMERS,
        EngineVerdict.DEQUANTIZED,
        "in bfloat16 it casts scales to bfloat16 before",
        Evidence.RUN,
    ),
    Engine(
        ("MXFP8",), *_TRANSFORMERS, EngineVerdict.EMULATED, "in bfloat16 alone: dtype=float32 is an error", Evidence.RUN
    ),
    Engine(
        ("HF_FP8",),
        "Transformers 5.23.0, accelerate 1.15.0",
        "CPU",
        EngineVerdict.DEQUANTIZED,
        "to bfloat16 alone: dtype=float32 is an error",
        Evidence.RUN,
    ),
    Engine(
        ("modelopt",),
        "Transformers 5.23.0",
        "CPU",
        EngineVerdict.GARBAGE,
        "loads the data without their scales",
        Evidence.RUN,
    ),
    Engine(
        ("FP8", "FP8_TENSOR", "FP8_DYNAMIC", "FP8_BLOCK", "HF_FP8", "modelopt"),
        _VLLM_GPU,
        _HOPPER,
        EngineVerdict.FP8,
        "",
        Evidence.DOCUMENTATION,
    ),
    Engine(
        ("W8A16",),
        _VLLM_GPU,
        "NVIDIA from 8.0 on",
        EngineVerdict.DEQUANTIZED,
        "Marlin, in the GPU kernel",
        Evidence.DOCUMENTATION,
    ),
    Engine(("MXFP8",), _VLLM_GPU, "NVIDIA Blackwell", EngineVerdict.FP8, "", Evidence.DOCUMENTATION),
    Engine(
        ("FP8", "FP8_TENSOR", "FP8_DYNAMIC", "FP8_BLOCK", "HF_FP8", "modelopt"),
        "SGLang",
        _HOPPER,
        EngineVerdict.FP8,
        "",
        Evidence.DOCUMENTATION,
    ),
    Engine(("modelopt",), "TensorRT-LLM", _HOPPER, EngineVerdict.FP8, "", Evidence.DOCUMENTATION),
    Engine(
        ("FP8_DYNAMIC", "HF_FP8"),
        *_TPU,
        EngineVerdict.FP8,
        "layers of Qwen2, Qwen3, Gemma 4, DeepSeek; not Llama's",
        Evidence.CODE,
    ),
    Engine(
        ("FP8_BLOCK",),
        *_TPU,
        EngineVerdict.REFUSED,
        "blocks of merged layers (gate and up) are an error",
        Evidence.CODE,
    ),
    Engine(("FP8_TENSOR",), *_TPU, EngineVerdict.REFUSED, "a scale is reshaped to one for each output", Evidence.CODE),
    Engine(("W8A16", "MXFP8"), *_TPU, EngineVerdict.REFUSED, "NotImplementedError", Evidence.CODE),
    Engine(
        ("FP8_DYNAMIC", "HF_FP8"),
        *_SGLANG_JAX,
        EngineVerdict.FP8,
        "needs format float-quantized, or fp8",
        Evidence.CODE,
    ),
    Engine(("MXFP8",), *_SGLANG_JAX, EngineVerdict.GARBAGE, "ignores other formats, with a warning", Evidence.CODE),
    Engine(
        ("HF_FP8",),
        "MaxText, from 2026-08 on",
        "TPU, GPU",
        EngineVerdict.DEQUANTIZED,
        "reads files with PyTorch",
        Evidence.DOCUMENTATION,
    ),
)
"""Findings of November 2026; other versions of engines may differ."""


def engines_for(layout: str) -> tuple[Engine, ...]:
    """The rows of a layout.

    Args:
        layout: Its name, such as `"FP8_DYNAMIC"`.

    Example:
        >>> [row.engine for row in engines_for("FP8_DYNAMIC") if row.evidence is Evidence.RUN]
        ['vLLM 0.32.0', 'Transformers 5.23.0, compressed-tensors 0.20.0']
    """
    return tuple(row for row in engines if layout in row.layouts)
