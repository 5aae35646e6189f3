"""Writes checkpoints with other people's code alone: PyTorch, Transformers, compressed-tensors. Neither JAX nor us.

    python tests/others/write_checkpoints.py FOLDER

Then `haliax-fp8 checkpoint check FOLDER/FP8_DYNAMIC`, and that of the other presets, has to find them sound. The
interpreter is Python 3.11 with the packages of `requirements.txt`.
"""

import pathlib
import sys

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from transformers import LlamaConfig, LlamaForCausalLM


PRESETS = ("FP8_DYNAMIC", "FP8", "FP8_BLOCK", "MXFP8")
LIMIT = 448.0


def scales(weight: torch.Tensor, strategy: str, stored: torch.Tensor) -> torch.Tensor:
    """The scales of a weight, shaped and typed as the library wants them."""
    rows, columns = weight.shape
    magnitudes = weight.float().abs()
    if strategy == "channel":
        scale = magnitudes.amax(1, keepdim=True) / LIMIT
    elif strategy == "tensor":
        scale = magnitudes.max() / LIMIT
    elif strategy == "block":
        scale = magnitudes.reshape(rows // 128, 128, columns // 128, 128).amax((1, 3)) / LIMIT
    else:
        exponent = torch.ceil(torch.log2(magnitudes.reshape(rows, -1, 32).amax(-1) / LIMIT))
        scale = exponent + 127 if stored.dtype == torch.uint8 else torch.exp2(exponent)
    return scale.reshape(stored.shape).to(stored.dtype)


def write(preset: str, folder: pathlib.Path) -> None:
    """A small Llama in one of the library's presets."""
    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(torch.bfloat16)
    groups = {"group_0": preset_name_to_scheme(preset, ["Linear"])}
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head"], quantization_status="initialized")
    apply_quantization_config(model, config)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            module.weight_scale.data.copy_(scales(module.weight.data, scheme.weights.strategy, module.weight_scale))
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.02)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in PRESETS:
        write(name, pathlib.Path(sys.argv[1]) / name)
