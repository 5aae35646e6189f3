"""Small checkpoints of a Llama in every layout, quantized in float64 and written without the package."""

import json
import struct

import ml_dtypes
import numpy as np


E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
NAMES = {
    E4M3: "F8_E4M3",
    BF16: "BF16",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.uint8): "U8",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(ml_dtypes.float8_e4m3fnuz): "F8_E4M3FNUZ",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
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
    """A folder; with an index if `shards` maps files to names."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards is None:
        (folder / "model.safetensors").write_bytes(file_of(tensors))
        return folder
    for file, names in shards.items():
        (folder / file).write_bytes(file_of({name: tensors[name] for name in names}))
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": sum(array.nbytes for array in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
