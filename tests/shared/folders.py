"""Small checkpoints of a Llama in every layout, quantized in float64 and written without the package."""

import itertools
import json
import struct

import ml_dtypes
import numpy as np


E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
NAMES = {
    E4M3: "F8_E4M3",
    BF16: "BF16",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int8): "I8",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(ml_dtypes.float8_e4m3fnuz): "F8_E4M3FNUZ",
    E8M0: "F8_E8M0",
}
HIDDEN, INNER, VOCABULARY, LAYERS = 128, 384, 64, 2
LAYOUTS = ("FP8", "FP8_TENSOR", "FP8_DYNAMIC", "FP8_BLOCK", "W8A16", "MXFP8", "HF_FP8", "modelopt")
BLOCKS = {"FP8_TENSOR": None, "modelopt": None, "FP8_BLOCK": (128, 128), "HF_FP8": (128, 128), "MXFP8": (1, 32)}
STATIC = ("FP8", "FP8_TENSOR", "modelopt")
LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


def plain():
    """The tensors of a model in bf16."""
    random = np.random.default_rng(0)
    normal = lambda *shape: (random.standard_normal(shape) / 8).astype(BF16)
    tensors = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        for name, shape in LINEAR.items():
            # Rows of different sizes, so that their scales differ.
            rows = np.exp2(random.uniform(-3, 3, (shape[0], 1)))
            tensors[f"model.layers.{i}.{name}.weight"] = (normal(*shape).astype(np.float64) * rows).astype(BF16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = np.ones(HIDDEN, BF16)
    return tensors | {"model.norm.weight": np.ones(HIDDEN, BF16), "lm_head.weight": normal(VOCABULARY, HIDDEN)}


def config():
    """What `config.json` says of the model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": False,
    }


def quantization(layout):
    """Its `quantization_config`, as the libraries that define the layouts write it."""
    if layout == "HF_FP8":
        method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return method | {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    if layout == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "kv_cache_scheme": None}
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**common, "dynamic": False, "strategy": "channel"}
    inputs = {**common, "dynamic": layout not in STATIC, "strategy": "tensor" if layout in STATIC else "token"}
    if layout == "FP8_TENSOR":
        weights["strategy"] = "tensor"
    if layout == "FP8_BLOCK":
        weights |= {"strategy": "block", "block_structure": [128, 128]}
        inputs |= {"strategy": "group", "group_size": 128}
    if layout == "MXFP8":
        weights |= {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
        inputs |= {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None if layout == "W8A16" else inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized" if layout == "MXFP8" else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def quantize(weight, layout):
    """A weight's data, and its scales as the layout has them."""
    values, (rows, columns) = weight.astype(np.float64), weight.shape
    block = BLOCKS.get(layout, (1, columns)) or weight.shape
    amax = np.abs(values)
    for axis in (0, 1):
        amax = np.maximum.reduceat(amax, np.arange(0, weight.shape[axis], block[axis]), axis=axis)
    scale = (amax / 448).astype(np.float32)
    if layout == "MXFP8":
        scale = np.exp2(np.ceil(np.log2(amax / 448))).astype(np.float32)
    full = np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[:rows, :columns].astype(np.float64)
    data = np.clip(values / full, -448, 448).astype(E4M3)
    if layout == "MXFP8":
        return data, (np.log2(scale) + 127).astype(np.uint8)
    return data, scale.reshape({"modelopt": (), "FP8_TENSOR": (1,)}.get(layout, scale.shape))


def checkpoint(layout):
    """The tensors and the configuration of a good checkpoint; of the plain one for None."""
    tensors = {}
    for name, weight in plain().items():
        tensors[name] = weight
        if layout is not None and "_proj" in name:
            layer = name.removesuffix(".weight")
            data, scale = quantize(weight, layout)
            tensors[name] = data
            tensors[f"{layer}.weight_scale{'_inv' * (layout == 'HF_FP8')}"] = scale
            if layout in STATIC:
                value = np.float32(0.01)
                tensors[f"{layer}.input_scale"] = np.array(value if layout == "modelopt" else [value], np.float32)
    return tensors, config() | ({} if layout is None else {"quantization_config": quantization(layout)})


def packed(config):
    """A checkpoint whose linear layers are in integers, as many libraries pack them; with this configuration."""
    tensors = {}
    for name, weight in plain().items():
        if "_proj" in name:
            tensors[name.replace("weight", "qweight")] = np.zeros((weight.shape[0], weight.shape[1] // 2), np.uint8)
            tensors[name.replace("weight", "scales")] = np.ones((weight.shape[0], 1), np.float16)
        else:
            tensors[name] = weight
    return tensors, config


def stacked_experts():
    """A checkpoint with all experts of a block in one array, and no other layer in FP8."""
    random, tensors = np.random.default_rng(0), {"model.embed_tokens.weight": plain()["model.embed_tokens.weight"]}
    for part, shape in {"up_proj": (64, HIDDEN), "down_proj": (HIDDEN, 64)}.items():
        pairs = [quantize(random.standard_normal(shape).astype(BF16), "FP8_DYNAMIC") for _ in range(3)]
        for name, arrays in zip(("weight", "weight_scale"), zip(*pairs, strict=True), strict=True):
            tensors[f"model.layers.0.mlp.experts.{part}.{name}"] = np.stack(arrays)
    return tensors, {"quantization_config": quantization("FP8_DYNAMIC") | {"ignore": []}}


def in_groups():
    """A checkpoint whose attention has other scales than its MLPs: in two groups, of which one has patterns."""
    (rows, config), (blocks, other) = checkpoint("FP8_DYNAMIC"), checkpoint("FP8_BLOCK")
    groups = [x["quantization_config"]["config_groups"]["group_0"] for x in (config, other)]
    config["quantization_config"]["config_groups"] = {
        "group_0": groups[0],
        "group_1": groups[1] | {"targets": ["re:.*mlp.*"]},
    }
    return {name: (blocks if "mlp" in name else rows)[name] for name in rows}, config


def _renamed(layout, names, scheme, reshape=lambda scale: scale):
    tensors, config = checkpoint(layout)
    renamed = {}
    for name, array in tensors.items():
        layer, _, last = name.rpartition(".")
        array = reshape(array) if last == "weight_scale" else array
        if (last := names.get(last, last) if "_proj" in layer else last) is not None:
            renamed[f"{layer}.{last}"] = array
    return renamed, {name: x for name, x in config.items() if name != "quantization_config"} | scheme


def _method(method, **scheme):
    return {"quantization_config": {"quant_method": method, "modules_to_not_convert": ["lm_head"]} | scheme}


def _torchao(kind, *grains):
    data = {"granularity": [{"_type": grain, "_data": {}} for grain in grains]} if grains else {}
    return _method("torchao", quant_type={"default": {"_type": kind, "_version": 2, "_data": data}})


def _modelopt(algorithm):
    return {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}}


_TORCHAO = {"weight": "_weight_qdata", "weight_scale": "_weight_scale"}
_COMFY = {"weight_scale": "scale_weight", "input_scale": "scale_input"}


def _fbgemm():
    """As Meta wrote it: with the bound of the configuration beside each weight."""
    tensors, config = _renamed("FP8_DYNAMIC", {}, _method("fbgemm_fp8", activation_scale_ub=1200.0))
    layers = [name.removesuffix("weight_scale") for name in tensors if name.endswith("weight_scale")]
    return tensors | {f"{layer}input_scale_ub": np.array([1200], np.float32) for layer in layers}, config


def _comfy():
    tensors, config = _renamed("FP8_TENSOR", _COMFY, {}, lambda scale: scale.reshape(()))
    return tensors | {"scaled_fp8": np.zeros(2, E4M3)}, config


FAMILIES = {
    "fbgemm_fp8, channel": lambda: _fbgemm(),
    "modelopt, channel": lambda: _renamed(
        "FP8_DYNAMIC", {}, _modelopt("FP8_PER_CHANNEL_PER_TOKEN"), lambda scale: scale.reshape(-1)
    ),
    "modelopt, group": lambda: _renamed("MXFP8", {}, _modelopt("MXFP8")),
    "modelopt, block": lambda: _renamed("FP8_BLOCK", {}, _modelopt("fp8_pb_wo"), lambda scale: scale[:, None, :, None]),
    "torchao, channel": lambda: _renamed("FP8_DYNAMIC", _TORCHAO, _torchao("Float8WeightOnlyConfig")),
    "torchao, tensor": lambda: _renamed(
        "FP8_TENSOR",
        _TORCHAO | {"input_scale": None},
        _torchao("Float8DynamicActivationFloat8WeightConfig", "PerTensor", "PerTensor"),
        lambda scale: scale.reshape(1, 1),
    ),
    "scale_weight, tensor": _comfy,
    "FP8_DYNAMIC and FP8_BLOCK": in_groups,
    "FP8_DYNAMIC": stacked_experts,
}
"""Checkpoints that are read and not written, by the name of their layout."""


def header_of(tensors):
    """The header of a safetensors file."""
    header, offset = {}, 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    return header


def file_of(tensors, header=None):
    """The bytes of a safetensors file; with another header, if there is one: an object, or bytes."""
    header = header_of(tensors) if header is None else header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in tensors.values())


def write(folder, tensors, config, shards=None):
    """A folder, and a file like a tokenizer's; with an index if `shards` maps files to names."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    if shards is None:
        (folder / "model.safetensors").write_bytes(file_of(tensors))
        return folder
    for file, names in shards.items():
        (folder / file).write_bytes(file_of({name: tensors[name] for name in names}))
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": sum(array.nbytes for array in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# --- Four bits, made by hand from a table of values -------------------------------------------------------------------

# The codes with an even mantissa come first: they win ties.
_CODES = np.array(sorted(range(16), key=lambda code: code % 2))
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FOUR_BITS = ("MXFP4", "MXFP4A16", "NVFP4", "NVFP4A16", "modelopt, NVFP4", "mxfp4, MXFP4 weights", "DeepSeek-V4")


def in_four_bits(values, size, unit=None):
    """Codes, two in a byte, scales of blocks as they are stored, and what both mean, in float32.

    Scales are exponents, so that the largest is in [3.5, 7) as in compressed-tensors; or those in E4M3 with
    `unit(scale)` to give the scale in float32.
    """
    blocks = values.astype(np.float64).reshape(*values.shape[:-1], -1, size)
    amax = np.abs(blocks).max(axis=-1)
    if unit is None:
        stored = (np.floor(np.log2(np.maximum(amax, 1e-30) / 3.5)) + 127).astype(np.uint8)
        scale = np.exp2(stored.astype(np.float64) - 127).astype(np.float32)
    else:
        stored = np.maximum(amax / 6 / np.asarray(unit(np.float32(1)), np.float64), 2.0**-9).astype(E4M3)
        scale = unit(stored.astype(np.float32))
    codes = _CODES[np.abs(blocks[..., None] / scale[..., None, None] - E2M1_VALUES[_CODES]).argmin(-1)].reshape(
        values.shape
    )
    meant = E2M1_VALUES[codes].astype(np.float32) * np.repeat(scale, size, -1)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8), stored, meant


def four_bit_config(kind):
    """The `quantization_config` of a layout in four bits."""
    if kind == "modelopt, NVFP4":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    if kind == "mxfp4, MXFP4 weights":
        left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": left}
    if kind == "DeepSeek-V4":
        described = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
        return described | {"activation_scheme": "dynamic", "expert_dtype": "fp4"}
    is_nv, size = kind.startswith("NV"), 16 if kind.startswith("NV") else 32
    common = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": size}
    common |= {"strategy": "tensor_group" if is_nv else "group"}
    common |= {"scale_dtype": "torch.float8_e4m3fn" if is_nv else "torch.uint8"}
    inputs = None if kind.endswith("A16") else {**common, "dynamic": "local" if is_nv else True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind[:5].lower()}-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {**common, "dynamic": False}, "input_activations": inputs}
        },
        "ignore": ["lm_head"],
    }


def four_bits(kind):
    """A checkpoint in four bits: its tensors, its configuration, and what its weights mean, by the names of weights."""
    tensors, meant, random = {}, {}, np.random.default_rng(0)
    if kind == "mxfp4, MXFP4 weights":
        experts = {"gate_up_proj": (3, 64, HIDDEN), "down_proj": (3, HIDDEN, 32)}
        for part, shape in experts.items():
            name = f"model.layers.0.mlp.experts.{part}"
            codes, scale, meant[f"{name}.weight"] = in_four_bits(random.standard_normal(shape) / 8, 32)
            tensors |= {f"{name}_blocks": codes.reshape(*scale.shape, 16), f"{name}_scales": scale}
            tensors[f"{name}_bias"] = np.ones(shape[:2], BF16)
        attention = "model.layers.0.self_attn.q_proj.weight"
        tensors |= {attention: plain()[attention], "model.embed_tokens.weight": plain()["model.embed_tokens.weight"]}
        return tensors, {"model_type": "gpt_oss", "quantization_config": four_bit_config(kind)}, meant
    if kind == "DeepSeek-V4":
        for i, part in itertools.product(range(2), ("w1", "w2")):
            layer = f"layers.0.ffn.experts.{i}.{part}"
            codes, scale, meant[f"{layer}.weight"] = in_four_bits(random.standard_normal((64, HIDDEN)) / 8, 32)
            tensors |= {f"{layer}.weight": codes.view(np.int8), f"{layer}.scale": scale.view(E8M0)}
        data, scale = quantize(plain()["model.layers.0.self_attn.q_proj.weight"], "HF_FP8")
        scale = np.exp2(np.ceil(np.log2(scale)))
        tensors |= {"layers.0.attn.wq_a.weight": data, "layers.0.attn.wq_a.scale": scale.astype(E8M0)}
        meant["layers.0.attn.wq_a.weight"] = data.astype(np.float32) * scale
        tensors["layers.0.attn.compressor.wkv.weight"] = random.standard_normal((64, HIDDEN)).astype(BF16)
        return tensors, {"model_type": "deepseek_v4", "quantization_config": four_bit_config(kind)}, meant
    units = {}
    for name, weight in plain().items():
        layer = name.removesuffix(".weight")
        if "_proj" not in name:
            tensors[name] = weight
            continue
        if kind.startswith("MX"):
            codes, scale, meant[name] = in_four_bits(weight, 32)
            tensors |= {f"{layer}.weight_packed": codes, f"{layer}.weight_scale": scale}
            continue
        # One for all layers that engines make one.
        parent = layer.rpartition(".")[0] if not layer.endswith(("o_proj", "down_proj")) else layer
        alike = [w for n, w in plain().items() if n.startswith(parent) and ("o_proj" in n) == ("o_proj" in name)]
        alike = alike if parent != layer else [weight]
        amax = units.setdefault(parent, max(float(np.abs(w.astype(np.float64)).max()) for w in alike))
        if kind == "modelopt, NVFP4":
            unit = np.float32(amax / 2688)
            codes, scale, meant[name] = in_four_bits(weight, 16, lambda scale, unit=unit: scale * unit)
            tensors |= {f"{layer}.weight": codes, f"{layer}.weight_scale": scale, f"{layer}.weight_scale_2": unit}
            tensors |= {f"{layer}.input_scale": np.array(0.003, np.float32)}
        else:
            unit = np.array([2688 / amax], np.float32)
            codes, scale, meant[name] = in_four_bits(weight, 16, lambda scale, unit=unit: scale / unit)
            tensors |= {f"{layer}.weight_packed": codes, f"{layer}.weight_scale": scale}
            tensors |= {f"{layer}.weight_global_scale": unit}
            if kind == "NVFP4":
                tensors[f"{layer}.input_global_scale"] = np.array([321.7], np.float32)
    return (
        {name: np.asarray(x) for name, x in tensors.items()},
        config() | {"quantization_config": four_bit_config(kind)},
        meant,
    )
