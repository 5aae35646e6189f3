"""Folders in four bits: imported bit for bit, frozen in four bits, converted and exported."""

import dataclasses
import json

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from folders import E2M1_VALUES, FOUR_BITS, HIDDEN, INNER, VOCABULARY, four_bits, plain, write

from haliax_fp8 import Fp8Config, fp8_linear_layers
from haliax_fp8.folders.folder import TensorFolder
from haliax_fp8.folders.four_bits import packed, unpacked
from haliax_fp8.huggingface import (
    check_folder,
    convert_folder,
    export_model,
    import_model,
    names,
    serving_tensors,
)
from haliax_fp8.layers.quantized import is_quantized_layer
from haliax_fp8.models import Transformer, TransformerConfig
from haliax_fp8.recipes import E2M1, MXFP8Scaling, NVFP4Scaling, OperandUse, Quantization, by_name
from haliax_fp8.serving import dequantize, quantize_for_inference


LLAMA = TransformerConfig(layers=2, hidden=HIDDEN, heads=4, kv_heads=2, head_dim=32, mlp=INNER, vocab=VOCABULARY)
OF_LLAMA = [kind for kind in FOUR_BITS if "FP4" in kind and "weights" not in kind]
GPT_OSS = "mxfp4, MXFP4 weights"


def abstract():
    return eqx.filter_eval_shape(lambda: Transformer.init(LLAMA, key=jax.random.key(0)))


def folder_of(kind, tmp_path):
    tensors, config, meant = four_bits(kind)
    return write(tmp_path / "in", tensors, config), tensors, meant


def stored(folder):
    """The tensors of a folder as its file has them."""
    return {x.name: x.array() for x in TensorFolder.open(folder).tensors.values()}


def test_codes_are_packed_low_half_first():
    bytes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    codes = unpacked(bytes)
    assert codes.shape == (2, 256) and codes.dtype == ml_dtypes.float4_e2m1fn
    low, high = E2M1_VALUES[bytes & 15], E2M1_VALUES[bytes >> 4]
    np.testing.assert_array_equal(codes.astype(np.float64), np.stack([low, high], -1).reshape(2, 256))
    np.testing.assert_array_equal(packed(codes), bytes)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * k.endswith("A16")) for k in OF_LLAMA])
def test_imports_are_bit_for_bit(kind, tmp_path):
    """Dequantized, and frozen at no more than 0.6 bytes a weight; exported again, every byte."""
    folder, tensors, meant = folder_of(kind, tmp_path)
    dequantized = import_model(folder, abstract(), names=names.LLAMA)
    exported = dict(serving_tensors(dequantized, "BF16", names=names.LLAMA, dtype=None))
    for name, values in meant.items():
        np.testing.assert_array_equal(exported[name], values)
    frozen = import_model(folder, abstract(), names=names.LLAMA, weights="frozen")
    assert bool(eqx.tree_equal(dequantize(frozen), dequantized))
    kernels = jax.tree.leaves(frozen.blocks.stacked, is_leaf=lambda x: is_quantized_layer(x))
    bytes = sum(x.nbytes for k in kernels if is_quantized_layer(k) for x in jax.tree.leaves(k.kernel))
    assert bytes <= 0.6 * sum(x.size for x in meant.values())
    if kind.startswith("modelopt"):
        return  # It is read, and not written.
    again = dict(serving_tensors(frozen, kind, names=names.LLAMA))
    assert again.keys() == tensors.keys()
    assert all(x.dtype == tensors[name].dtype and x.tobytes() == tensors[name].tobytes() for name, x in again.items())
    with pytest.raises(ValueError, match="no product for inference takes weights in four bits"):
        import_model(folder, abstract(), names=names.LLAMA, weights="served")


def test_gradients_reach_inputs_through_four_bits(tmp_path):
    tensors, config, meant = four_bits("NVFP4")
    layer = "model.layers.0.mlp.up_proj"
    of_layer = {name.replace(layer, "up"): x for name, x in tensors.items() if name.startswith(layer)}
    write(tmp_path / "in", of_layer, {"quantization_config": config["quantization_config"]})
    model = {"up": eqx.nn.Linear(HIDDEN, INNER, use_bias=False, key=jax.random.key(0))}
    frozen = import_model(tmp_path / "in", model, weights="frozen")["up"]
    gradient = jax.grad(lambda x: jnp.sum(frozen(x)))(jnp.ones(HIDDEN))
    np.testing.assert_allclose(gradient, meant[f"{layer}.weight"].sum(0), rtol=1e-4, atol=1e-4)
    assert not jax.tree.leaves(eqx.filter(frozen, eqx.is_inexact_array))


def test_experts_of_gpt_oss(tmp_path):
    """All experts in one array; gates and others in turn."""
    folder, _, meant = folder_of(GPT_OSS, tmp_path)
    Experts, In, Mlp = hax.make_axes(Experts=3, In=HIDDEN, Mlp=32)
    mapped = {f"{part}.{{e}}": f"model.layers.0.mlp.experts.{{e}}.{part}_proj" for part in ("gate", "up", "down")}
    init = lambda a, b: hax.nn.MoELinear.init(Experts, a, b, use_bias=False, key=jax.random.key(0))
    model = {"gate": init(In, Mlp), "up": init(In, Mlp), "down": init(Mlp, In)}
    gate_up = meant["model.layers.0.mlp.experts.gate_up_proj.weight"]
    expected = {"gate": gate_up[:, 0::2], "up": gate_up[:, 1::2]}
    expected["down"] = meant["model.layers.0.mlp.experts.down_proj.weight"]
    for weights in ("dequantized", "frozen"):
        loaded = dequantize(import_model(folder, model, names=mapped, weights=weights, strict=False))
        for part, values in expected.items():
            axes = (Experts, In, Mlp) if part == "down" else (Experts, Mlp, In)
            np.testing.assert_array_equal(loaded[part].weight.rearrange(axes).array, values)


@pytest.mark.parametrize("kind", ["MXFP4", "MXFP4A16", GPT_OSS])
def test_mxfp4_is_fp8_in_blocks_and_back(kind, tmp_path):
    """Exact there, and back with the bytes of the original."""
    folder, tensors, meant = folder_of(kind, tmp_path)
    there = convert_folder(folder, tmp_path / "fp8", "HF_FP8")
    assert there.is_exact and len(there.weights) == len(meant) and "the same values" in str(there)
    back = convert_folder(tmp_path / "fp8", tmp_path / "back", "MXFP4A16" if kind == GPT_OSS else kind)
    assert back.is_exact
    written = stored(tmp_path / "back")
    for name in meant:
        layer = name.removesuffix(".weight")
        codes, scale = written[f"{layer}.weight_packed"], written[f"{layer}.weight_scale"]
        if kind == GPT_OSS:
            assert codes.tobytes() == tensors[f"{layer}_blocks"].tobytes()
            assert scale.tobytes() == tensors[f"{layer}_scales"].tobytes()
        else:
            assert codes.tobytes() == tensors[f"{layer}.weight_packed"].tobytes()
            assert scale.tobytes() == tensors[f"{layer}.weight_scale"].tobytes()


def test_exponents_too_far_apart_for_fp8_are_rounded_and_said(tmp_path):
    tensors, config, _ = four_bits("MXFP4A16")
    name = "model.layers.0.self_attn.k_proj.weight_scale"
    tensors[name] = tensors[name].copy()
    tensors[name][0, 0] -= 20
    write(tmp_path / "in", tensors, config)
    rounded = [w for w in convert_folder(tmp_path / "in", tmp_path / "fp8", "HF_FP8").weights if not w.is_exact]
    assert [w.name for w in rounded] == ["model.layers.0.self_attn.k_proj.weight"]


def test_conversions(tmp_path):
    """Between layouts in four bits, from high precision, and of DeepSeek-V4 a layout for each layer."""
    nv, tensors, _ = folder_of("NVFP4", tmp_path)
    done = convert_folder(nv, tmp_path / "a16", "NVFP4A16")
    assert done.is_exact and done.after == "NVFP4A16"
    for name, x in stored(tmp_path / "a16").items():
        assert x.tobytes() == tensors[name].tobytes()
    assert not any(name.endswith("input_global_scale") for name in stored(tmp_path / "a16"))
    # Scales of inputs become those of FP8: the same largest input.
    convert_folder(nv, tmp_path / "fp8", "FP8_TENSOR")
    scale = stored(tmp_path / "fp8")["model.layers.0.mlp.up_proj.input_scale"]
    np.testing.assert_allclose(scale * 448, 2688 / tensors["model.layers.0.mlp.up_proj.input_global_scale"], rtol=1e-6)
    inner = write(tmp_path / "modelopt", *four_bits("modelopt, NVFP4")[:2])
    # Its scale of the tensor multiplies; written as one that divides, it is rounded to float32.
    done = convert_folder(inner, tmp_path / "ct", "NVFP4")
    assert 0 < done.error < 1e-6
    # Attention as it is, experts in larger blocks.
    tensors, config, _ = four_bits("DeepSeek-V4")
    done = convert_folder(write(tmp_path / "v4", tensors, config), tmp_path / "v4fp8", "HF_FP8")
    assert done.is_exact and len(done.weights) == 5
    attention = "layers.0.attn.wq_a.weight"
    assert stored(tmp_path / "v4fp8")[attention].tobytes() == tensors[attention].tobytes()
    bf16 = write(
        tmp_path / "bf16", plain(), {name: x for name, x in four_bits("MXFP4")[1].items() if "quant" not in name}
    )
    for layout, limit in (("MXFP4", 0.13), ("NVFP4A16", 0.11)):
        assert 0.05 < convert_folder(bf16, tmp_path / layout, layout).error < limit
    units = {name: x for name, x in stored(tmp_path / "NVFP4A16").items() if name.endswith("global_scale")}
    of = lambda part: units[f"model.layers.0.{part}_proj.weight_global_scale"]
    assert of("self_attn.q") == of("self_attn.k") == of("self_attn.v") and of("mlp.gate") == of("mlp.up")
    amax = max(
        float(np.abs(plain()[f"model.layers.0.mlp.{p}_proj.weight"].astype(np.float32)).max()) for p in ("gate", "up")
    )
    np.testing.assert_array_equal(of("mlp.gate"), np.float32(2688) / np.float32(amax))


PARTS = ("query", "key", "value", "out")


def layers():
    """Layers of which engines make three one."""
    return {
        name: eqx.nn.Linear(64, 64, use_bias=False, key=key)
        for name, key in zip(PARTS, jax.random.split(jax.random.key(0), 4), strict=True)
    }


@pytest.mark.parametrize("rule", ["up", "nearest", "down"])
def test_exports_round_scales_as_training_did(rule):
    recipe = by_name("mxfp4_mxfp8")
    kernel = dataclasses.replace(recipe.kernel, scaling=MXFP8Scaling(scale_rounding=rule))
    trained = fp8_linear_layers(layers(), Fp8Config(recipe=dataclasses.replace(recipe, kernel=kernel)))
    tensors = dict(serving_tensors(trained, "MXFP4", dtype=None))
    amax = np.abs(np.asarray(layers()["out"].weight, np.float64)).reshape(64, 2, 32).max(-1)
    limit, round = {"up": (6, np.ceil), "nearest": (3.5, np.floor), "down": (4, np.floor)}[rule]
    np.testing.assert_array_equal(tensors["out.weight_scale"], round(np.log2(amax / limit)) + 127)
    quantized = kernel.scaling.quantize(layers()["out"].weight, OperandUse(E2M1, contracted=(1,)))
    codes = tensors["out.weight_packed"]
    values = E2M1_VALUES[np.stack([codes & 15, codes >> 4], -1)].reshape(64, 64)
    np.testing.assert_array_equal(values, np.asarray(quantized.data, np.float64))


def test_what_folders_of_nvfp4_cannot_hold(tmp_path):
    """A scale for each token: named, whether a model trains or is served with it; its weights fit, bit for bit."""
    rows = dataclasses.replace(by_name("nvfp4"), input=Quantization(E2M1, NVFP4Scaling(per_row=True)))
    plain = eqx.nn.MLP(96, 64, 64, 1, key=jax.random.key(0))
    trained = fp8_linear_layers(plain, recipe=rows)
    served = quantize_for_inference(trained, "NVFP4_DYNAMIC")
    for model in (trained, served):
        with pytest.raises(ValueError, match=r"layers\.0 has a scale for each token.*layout='NVFP4' one.*'NVFP4A16'"):
            export_model(model, tmp_path / "out", "NVFP4")
        with pytest.raises(
            ValueError, match=r"layout='NVFP4_DYNAMIC' has a scale for each token.*layers\.0.*'NVFP4A16'"
        ):
            export_model(model, tmp_path / "out", "NVFP4_DYNAMIC")
    export_model(served, tmp_path / "out", "NVFP4A16", dtype=None)
    back = import_model(tmp_path / "out", plain)
    for layer, expected in zip(back.layers, dequantize(served).layers, strict=True):
        # compressed-tensors has the reciprocal of the tensor's scale.
        np.testing.assert_allclose(layer.weight, expected.weight, rtol=3e-7)
    with pytest.raises(ValueError, match="layout='NVFP4_DYNAMIC' has a scale for each token"):
        convert_folder(tmp_path / "out", tmp_path / "new", "NVFP4_DYNAMIC")


@pytest.mark.parametrize("recipe", ["static", "nvfp4_delayed"])
def test_nvfp4_has_the_largest_of_what_engines_make_one(recipe, tmp_path):
    """Scales of tensors from the weights, and those of inputs from training."""
    trained = fp8_linear_layers(layers(), recipe=recipe)
    inputs = dict(zip(PARTS, (1.0, 3.1, 2.7, 0.9), strict=True))
    is_state = lambda node: hasattr(node, "with_scale")
    for name, amax in inputs.items():
        scale = jnp.float32(amax / by_name(recipe).input.format.max)
        scaled = lambda x, scale=scale: x.with_scale(jnp.full(x.scale.shape, scale)) if is_state(x) else x
        trained[name] = jax.tree.map(scaled, trained[name], is_leaf=is_state)
    export_model(trained, tmp_path / "out", "NVFP4", dtype=None)
    assert not check_folder(tmp_path / "out").faults
    tensors, plain = stored(tmp_path / "out"), layers()
    amaxes = {name: np.abs(np.asarray(plain[name].weight)).max() for name in PARTS}
    for name in PARTS:
        alike = [name] if name == "out" else PARTS[:3]
        unit = np.float32(2688) / np.float32(max(amaxes[other] for other in alike))
        np.testing.assert_array_equal(tensors[f"{name}.weight_global_scale"], [unit])
        of_input = 2688 / max(inputs[other] for other in alike)
        np.testing.assert_allclose(tensors[f"{name}.input_global_scale"], [of_input], rtol=1e-6)
    described = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert described["format"] == "nvfp4-pack-quantized"
    assert described["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    with pytest.raises(ValueError, match=r"has no scale for its input.*'NVFP4A16' needs none"):
        export_model(layers(), tmp_path / "plain", "NVFP4")
