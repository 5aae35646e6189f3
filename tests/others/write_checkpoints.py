"""Writes checkpoints with other people's code alone: PyTorch, Transformers, compressed-tensors. Neither JAX nor us.

    python tests/others/write_checkpoints.py FOLDER

Then `haliax-fp8 checkpoint check FOLDER/FP8_DYNAMIC`, and that of the other presets, has to find them sound. The
interpreter is Python 3.11 with the packages of `requirements.txt`.
"""

import json
import pathlib
import sys
import types

import numpy as np
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from safetensors.torch import save_file
from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Quantize


PRESETS = ("FP8_DYNAMIC", "FP8", "FP8_BLOCK", "MXFP8", "W8A16")
FOUR_BITS = ("MXFP4", "MXFP4A16", "NVFP4", "NVFP4A16")
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


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    """A small Llama, whose head may be its embedding."""
    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)).to(torch.bfloat16)


def write(preset: str, folder: pathlib.Path, *, tied: bool = False) -> None:
    """A small Llama in one of the presets of compressed-tensors, or with weights in FP8 alone."""
    model = llama(tied=tied)
    if preset == "W8A16":
        weights = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"]).weights
        groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    else:
        groups = {"group_0": preset_name_to_scheme(preset, ["Linear"])}
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head"], quantization_status="initialized")
    apply_quantization_config(model, config)
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None and preset in FOUR_BITS:
            set_four_bits(model, name, module)
            module.quantization_status = QuantizationStatus.FROZEN
        elif scheme is not None:
            module.weight_scale.data.copy_(scales(module.weight.data, scheme.weights.strategy, module.weight_scale))
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.02)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def set_four_bits(model: LlamaForCausalLM, name: str, module: torch.nn.Module) -> None:
    """Scales by the library's own functions; those of tensors are one for the layers that engines make one."""
    parent, _, last = name.rpartition(".")
    alike = next((parts for parts in FUSED if last in parts), (last,))
    weights = [model.get_submodule(f"{parent}.{part}").weight.data for part in alike]
    args, unit = module.quantization_scheme.weights, None
    if hasattr(module, "weight_global_scale"):
        joined = torch.cat([weight.flatten() for weight in weights])
        unit = generate_gparam(joined.amin(), joined.amax())
        module.weight_global_scale.data.copy_(unit)
    blocks = module.weight.data.reshape(module.weight.shape[0], -1, args.group_size)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=unit)
    module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape).to(module.weight_scale.dtype))
    if hasattr(module, "input_global_scale"):
        module.input_global_scale.data.fill_(321.7)


FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def write_mixed(folder: pathlib.Path) -> None:
    """A small Llama with attention in FP8 and MLPs in NVFP4."""
    model = llama()
    groups = {
        "attention": preset_name_to_scheme("FP8_DYNAMIC", ["re:.*self_attn.*"]),
        "mlp": preset_name_to_scheme("NVFP4A16", ["re:.*mlp.*"]),
    }
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head"], quantization_status="initialized")
    apply_quantization_config(model, config)
    for name, module in model.named_modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is None:
            continue
        if scheme.weights.num_bits == 4:
            set_four_bits(model, name, module)
        else:
            module.weight_scale.data.copy_(scales(module.weight.data, scheme.weights.strategy, module.weight_scale))
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def write_scale_rounding(file: pathlib.Path) -> None:
    """Amaxes of random blocks, and on the edges of the rule, with the exponents of their scales."""
    random = torch.randn(1 << 16).abs() * torch.exp2(torch.randint(-30, 30, (1 << 16,)).float())
    edges = torch.tensor([1.0, 1.5, 1.75, 1.9999999, 3.4999998, 3.5, 6.9999995, 7.0])
    amax = torch.cat([random, edges])
    exponents = {f"bits{bits}": generate_mx_scales(amax, bits).numpy() for bits in (4, 8)}
    np.savez(file, amax=amax.numpy(), **exponents)


def write_hugging_face(folder: pathlib.Path, scale_fmt: str) -> None:
    """A small Llama in blocks of 128x128, quantized by Transformers."""
    model, tensors = llama(), {}
    config = FineGrainedFP8Config(modules_to_not_convert=["lm_head"], scale_fmt=scale_fmt)
    operation = Fp8Quantize(types.SimpleNamespace(quantization_config=config))
    for name, tensor in model.state_dict().items():
        tensors |= operation.convert({name: tensor}) if "_proj." in name else {name: tensor}
    model.config.quantization_config = config.to_dict()
    save(model, tensors, folder)


def write_modelopt(folder: pathlib.Path) -> None:
    """A small Llama with a scale for each weight and each input, as ModelOpt names them."""
    model, tensors = llama(), {}
    for name, tensor in model.state_dict().items():
        tensors[name] = tensor
        if "_proj." in name:
            layer, scale = name.removesuffix(".weight"), tensor.float().abs().max() / LIMIT
            tensors[name] = (tensor.float() / scale).clamp(-LIMIT, LIMIT).to(torch.float8_e4m3fn)
            tensors |= {f"{layer}.weight_scale": scale, f"{layer}.input_scale": torch.tensor(0.02)}
    save(model, tensors, folder)
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    described = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(described))


def save(model: LlamaForCausalLM, tensors: dict[str, torch.Tensor], folder: pathlib.Path) -> None:
    """Tensors and configuration."""
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


if __name__ == "__main__":
    torch.manual_seed(0)
    root = pathlib.Path(sys.argv[1])
    for name in (*PRESETS, *FOUR_BITS):
        write(name, root / name)
    for name in ("FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "W8A16", "NVFP4A16"):
        write(name, root / f"{name}-tied", tied=True)
    write_mixed(root / "mixed")
    write_scale_rounding(root / "scale_rounding.npz")
    write_hugging_face(root / "fp8", "float")
    write_hugging_face(root / "fp8-ue8m0", "ue8m0")
    write_modelopt(root / "modelopt")
