"""Imports of checkpoints that others made, and training on frozen FP8 weights."""

import dataclasses
import functools
import json

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from folders import FAMILIES, checkpoint, write as write_folder
from safetensors.numpy import save_file
from test_check import BROKEN

from haliax_fp8 import describe, fp8_linear_layers
from haliax_fp8.checkpoints import BrokenCheckpoint
from haliax_fp8.folders.folder import TensorFolder
from haliax_fp8.huggingface import convert_folder, export_model, import_model, names
from haliax_fp8.models import Transformer, TransformerConfig
from haliax_fp8.recipes.scaling import BlockScaling, RowwiseScaling
from haliax_fp8.serving import dequantize


CONFIG = TransformerConfig(layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, mlp=96, vocab=64)
BF16, FP8, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def linear(inputs: int, outputs: int) -> dict[str, eqx.nn.Linear]:
    return {"up": eqx.nn.Linear(inputs, outputs, use_bias=False, key=jax.random.key(0))}


def write(folder, tensors, quantization=None, **config):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    content = config if quantization is None else {**config, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(content))


def compressed(strategy="channel", **weights):
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": strategy, **weights}}
    common = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
    return {**common, "config_groups": {"group_0": group}}


RNG = np.random.default_rng(0)
DATA = (4 * RNG.normal(size=(160, 192))).astype(FP8)
BLOCKS = compressed("block", block_structure=[128, 128])
SCALES = {
    "none": (np.float32(0.5), compressed("tensor")),
    "one": (np.array([0.5], np.float32), compressed("tensor")),
    "out": (RNG.uniform(1, 2, 160).astype(np.float32), compressed()),
    "column": (RNG.uniform(1, 2, (160, 1)).astype(BF16), compressed()),
    "cut blocks": (RNG.uniform(1, 2, (2, 2)).astype(np.float32), BLOCKS),
    "E8M0 in uint8": (
        RNG.integers(100, 120, (160, 6)).astype(np.uint8),
        compressed("group", group_size=32) | {"format": "mxfp8-quantized"},
    ),
    "weight_scale_inv": (
        RNG.uniform(1, 2, (2, 2)).astype(np.float32),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "modelopt": (np.float32(0.5), {"quant_method": "modelopt", "quant_algo": "FP8"}),
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", SCALES)
def test_shapes_of_scales(case, tmp_path):
    """Each way to write scales: `data * scale` in every element, and frozen, the very bytes."""
    scale, quantization = SCALES[case]
    name = "up.weight_scale_inv" if case == "weight_scale_inv" else "up.weight_scale"
    tensors = {"up.weight": DATA, name: np.asarray(scale)}
    if case == "modelopt":
        tensors["up.input_scale"] = np.asarray(np.float32(0.5))
    write(tmp_path / "in", tensors, quantization)
    values = np.asarray(scale)
    values = 2.0 ** (values.astype(np.float64) - 127) if values.dtype == np.uint8 else values.astype(np.float64)
    if case == "out":
        values = values[:, None]
    if values.shape == (2, 2):
        values = np.kron(values, np.ones((128, 128)))[:160, :192]
    if values.shape == (160, 6):
        values = np.repeat(values, 32, axis=1)
    expected = (DATA.astype(np.float64) * values).astype(np.float32)
    np.testing.assert_array_equal(import_model(tmp_path / "in", linear(192, 160))["up"].weight, expected)
    frozen = import_model(tmp_path / "in", linear(192, 160), weights="frozen")["up"]
    assert np.asarray(frozen.kernel.stored.data.array).tobytes() == DATA.tobytes()
    np.testing.assert_array_equal(frozen.dequantized(jnp.float32).weight, expected)


@pytest.mark.more
def test_fused_layers_and_tied_heads(tmp_path):
    """`qkv_proj` and `gate_up_proj` are taken apart, also within a block of scales; the head is the embedding."""
    config = dataclasses.replace(CONFIG, layers=1)
    model = Transformer.init(config, key=jax.random.key(0))
    layer = "model.layers.0."
    dense = lambda *shape: RNG.normal(size=shape).astype(BF16)
    qkv, scale = RNG.normal(size=(128, 64)).astype(FP8), RNG.uniform(1, 2, (2, 1)).astype(np.float32)
    tensors = {
        "model.embed_tokens.weight": dense(64, 64),
        "model.norm.weight": dense(64),
        f"{layer}input_layernorm.weight": dense(64),
        f"{layer}post_attention_layernorm.weight": dense(64),
        f"{layer}self_attn.qkv_proj.weight": qkv,
        f"{layer}self_attn.qkv_proj.weight_scale": scale,
        f"{layer}self_attn.o_proj.weight": dense(64, 64),
        f"{layer}self_attn.rotary_emb.inv_freq": np.ones(16, np.float32),
        f"{layer}mlp.gate_up_proj.weight": dense(192, 64),
        f"{layer}mlp.down_proj.weight": dense(64, 96),
    }
    # 96 rows share a scale: those of the query and half of the key's.
    quantization = compressed("block", block_structure=[96, 64]) | {"ignore": ["re:.*mlp.*", "re:.*o_proj", "lm_head"]}
    write(tmp_path / "in", tensors, quantization, tie_word_embeddings=True)
    loaded = import_model(tmp_path / "in", model, names=names.LLAMA)
    values = qkv.astype(np.float32) * np.repeat(scale, 96, axis=0)[:128]
    block = loaded.blocks.get_layer(0)
    for name, part in zip(("query", "key", "value"), np.split(values, [64, 96]), strict=True):
        np.testing.assert_array_equal(getattr(block.attention, name).weight.array.reshape(part.shape), part)
    gate, up = np.split(tensors[f"{layer}mlp.gate_up_proj.weight"].astype(np.float32), 2)
    np.testing.assert_array_equal(block.mlp.gate.weight.array, gate)
    np.testing.assert_array_equal(block.mlp.up.weight.array, up)
    np.testing.assert_array_equal(loaded.head.weight.array, loaded.embedding.weight.array)
    frozen = import_model(tmp_path / "in", model, names=names.LLAMA, weights="frozen").blocks.get_layer(0).attention
    np.testing.assert_array_equal(frozen.key.dequantized(jnp.float32).weight.array.reshape(32, 64), values[64:96])


class LoRA(eqx.Module):
    """An adapter of one's own: any layer, and a product of low rank beside it."""

    base: eqx.Module
    down: hax.NamedArray
    up: hax.NamedArray

    def __call__(self, x, *, key=None):
        return self.base(x) + x.dot(self.down, axis=self.base.In).dot(self.up, axis="rank")


@pytest.mark.more
def test_adapters_on_frozen_weights(tmp_path):
    """Gradients are those of the dequantized layer; only the adapter trains; merged, it is exported again."""
    model = Transformer.init(CONFIG, key=jax.random.key(0))
    export_model(model, tmp_path / "base", names=names.LLAMA)
    frozen = import_model(tmp_path / "base", model, names=names.LLAMA, weights="frozen")
    Rank = hax.Axis("rank", 2)
    gate = frozen.blocks.stacked.mlp.gate
    down = hax.random.normal(jax.random.key(1), (CONFIG.Layers, Rank, CONFIG.Hidden))
    up = hax.zeros((CONFIG.Layers, CONFIG.Mlp, Rank))
    adapted = eqx.tree_at(lambda m: m.blocks.stacked.mlp.gate, frozen, LoRA(gate, down, up))
    dense = dequantize(adapted)
    tokens = hax.named(jnp.arange(12) % 64, "position")

    @eqx.filter_jit
    def grads(model):
        return eqx.filter_grad(lambda m: jnp.sum(jnp.sin(m(tokens).array)))(model)

    gradient, expected = grads(adapted), grads(dense)
    adapter = lambda m: (m.blocks.stacked.mlp.gate.down, m.blocks.stacked.mlp.gate.up, m.embedding.weight)
    for ours, theirs in zip(jax.tree.leaves(adapter(gradient)), jax.tree.leaves(adapter(expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        assert np.abs(np.asarray(theirs)).max() > 0 or ours is gradient.blocks.stacked.mlp.gate.down.array
    # To optax and to gradients, data and scales are not parameters.
    params = eqx.filter(adapted, eqx.is_inexact_array)
    assert jax.tree.leaves(params.blocks.stacked.mlp.gate.base) == jax.tree.leaves(gradient.blocks.stacked.mlp.up) == []
    updates, _ = optax.sgd(0.1).update(gradient, optax.sgd(0.1).init(params))
    trained = eqx.apply_updates(adapted, updates)
    np.testing.assert_array_equal(
        trained.blocks.stacked.mlp.up.kernel.stored.data.array, frozen.blocks.stacked.mlp.up.kernel.stored.data.array
    )
    # Merged: the base dequantized, plus the product.
    layer = trained.blocks.stacked.mlp.gate
    plain = layer.base.dequantized(jnp.float32)
    delta = layer.up.dot(layer.down, axis="rank").rearrange(plain.weight.axes)
    merged = eqx.tree_at(
        lambda m: m.blocks.stacked.mlp.gate, trained, dataclasses.replace(plain, weight=plain.weight + delta)
    )
    report = export_model(merged, tmp_path / "merged", names=names.LLAMA, targets=("*.attention.*", "*.mlp.*"))
    assert report.origins == {"FP8 in the model": 12, "computed for the export": 2}
    with pytest.raises(ValueError, match=r"attention\.query is in FP8 .*dequantize\(model\)"):
        export_model(merged, tmp_path / "no", "BF16", names=names.LLAMA)
    with pytest.raises(ValueError, match=r"in FP8 in blocks of \(1, 64\).*blocks of \(128, 128\)"):
        export_model(frozen, tmp_path / "no", "FP8_BLOCK", names=names.LLAMA)


def test_the_backward_pass_keeps_fp8_only():
    """Of a frozen weight, bytes and scales are kept, and no copy in high precision; conversion leaves it alone."""
    import tempfile

    layer = {"up": eqx.nn.Linear(64, 96, use_bias=False, key=jax.random.key(0))}
    folder = tempfile.mkdtemp() + "/out"
    export_model(layer, folder)
    frozen = import_model(folder, layer, weights="frozen")
    out, pullback = jax.vjp(frozen["up"], jnp.ones(64))
    residuals = [leaf for leaf in jax.tree.leaves(pullback) if getattr(leaf, "size", 0) >= 64 * 96]
    assert {leaf.dtype for leaf in residuals} <= {np.dtype(np.uint8)}
    weight = frozen["up"].dequantized(jnp.float32).weight
    np.testing.assert_allclose(pullback(jnp.ones(96))[0], weight.sum(0), rtol=1e-5, atol=1e-5)
    mixed = [frozen, eqx.nn.Linear(64, 96, key=jax.random.key(0))]
    with pytest.warns(UserWarning, match="frozen"):
        converted = fp8_linear_layers(mixed)
    assert describe(converted)["0.up"].reason == "stored in E4M3, frozen"


def test_what_does_not_fit(tmp_path):
    """Errors name the tensor and what to do."""
    model = linear(192, 160)
    scale = np.ones((160, 1), np.float32)
    cases = {
        "no scale": ({"up.weight": DATA}, compressed(), r"up\.weight: .* has no up\.weight_scale"),
        "not said": ({"up.weight": DATA, "up.weight_scale": scale}, None, "no quantization_config"),
        "nan": ({"up.weight": DATA, "up.weight_scale": scale * np.nan}, compressed(), r"up\.weight_scale: .*NaN"),
        "infinite": (
            {"up.weight": DATA, "up.weight_scale": scale * np.inf},
            compressed(),
            r"up\.weight_scale: .* infinite",
        ),
        "zero": ({"up.weight": DATA, "up.weight_scale": scale * 0}, compressed(), r"up\.weight_scale: .* positive"),
        "shape": (
            {"up.weight": DATA, "up.weight_scale": scale[:5]},
            compressed(),
            r"up\.weight_scale: it has shape \(5, 1\)",
        ),
        "transposed": ({"up.weight": DATA.T.copy(), "up.weight_scale": scale[:1]}, compressed("tensor"), "transposed"),
        "missing": ({"down.weight": np.ones((160, 192), BF16)}, None, r"no up\.weight; the nearest are down\.weight"),
        "unused": ({"up.weight": np.ones((160, 192), BF16), "x": np.ones(3)}, None, "no array for x"),
    }
    for case, (tensors, quantization, message) in cases.items():
        write(tmp_path / case, tensors, quantization)
        with pytest.raises(ValueError, match=message):
            import_model(tmp_path / case, model)
    with pytest.raises(ValueError, match="'dequantized', 'frozen'"):
        import_model(tmp_path / "zero", model, weights="cold")


def test_weights_that_overflow_in_the_models_dtype_are_refused(tmp_path):
    """Also what data and scales make: in float16 they would be infinite."""
    model = jax.tree.map(lambda x: x.astype(np.float16), linear(192, 160))
    plain = np.ones((160, 192), BF16)
    plain[2, 3] = 65536
    write(tmp_path / "plain", {"up.weight": plain})
    # One large output is sound, as those of real models are: if all were, the scales would be wrong.
    scale = np.full((160, 1), 0.1, np.float32)
    scale[7] = 1e5
    # The range of E4M3 is used.
    data = (DATA.astype(np.float32) * 16).astype(FP8)
    write(tmp_path / "fp8", {"up.weight": data, "up.weight_scale": scale / 16}, compressed())
    for case in ("plain", "fp8"):
        with pytest.raises(ValueError, match=r"^up\.weight is -?\d\S+ at \[\d+.*; load it into"):
            import_model(tmp_path / case, model)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, FP8])
@pytest.mark.parametrize("weights", ["dequantized", "frozen", "served"])
def test_fp8_data_never_become_numbers_without_their_scales(dtype, weights, tmp_path):
    """Weights in other formats, and tensors that are no weights: the data alone would be far too large."""
    name, scale = np.dtype(dtype).name, np.full((160, 1), 2.0**-9, np.float32)
    data, plain = RNG.normal(size=(160, 192)).astype(dtype), RNG.normal(size=(160, 192)).astype(BF16)
    config = {"quantization_config": compressed()}
    if dtype is not FP8:
        configured, not_said = (
            rf"up\.weight: it is in {name}; .* float8_e4m3fn",
            r"up\.weight: it is in FP8, and config",
        )
        for case, described, message in (("configured", config, configured), ("not said", {}, not_said)):
            write_folder(tmp_path / case, {"up.weight": data, "up.weight_scale": scale}, described)
            with pytest.raises(ValueError, match=message):
                import_model(tmp_path / case, linear(192, 160), weights=weights)
    model = {"up": eqx.nn.Linear(192, 160, key=jax.random.key(0)), "down": linear(192, 160)["up"]}
    messages = "it is in FP8 without a scale" if dtype is FP8 else f"it is in {name}", "it is in FP8, and config"
    config = {"quantization_config": compressed() | {"ignore": ["up"]}}
    quantized = {"down.weight": (64 * RNG.normal(size=(160, 192))).astype(FP8), "down.weight_scale": scale}
    for case, described, message in zip(("bias", "bias, not said"), (config, {}), messages, strict=True):
        tensors = {"up.weight": plain, "up.bias": data[:, 0], **(quantized if described else {"down.weight": plain})}
        write_folder(tmp_path / case, tensors, described)
        with pytest.raises(ValueError, match=rf"up\.bias: {message}"):
            import_model(tmp_path / case, model, weights=weights)
    # What the model does not want is not looked at.
    write_folder(tmp_path / "other", {"up.weight": plain, "other": data, **quantized}, config)
    loaded = import_model(tmp_path / "other", {**model, "up": linear(192, 160)["up"]}, weights=weights, strict=False)
    np.testing.assert_array_equal(loaded["up"].weight, plain.astype(np.float32))


def test_layouts_that_are_only_read(tmp_path):
    """The same weights by the names and shapes of other libraries; each group of layers as it says."""
    config = TransformerConfig(layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, mlp=384, vocab=64)
    model = eqx.filter_eval_shape(lambda: Transformer.init(config, key=jax.random.key(0)))
    for family, layout in {
        "fbgemm_fp8, channel": "FP8_DYNAMIC",
        "modelopt, block": "FP8_BLOCK",
        "torchao, channel": "FP8_DYNAMIC",
        "scale_weight, tensor": "FP8_TENSOR",
    }.items():
        for name, (tensors, described) in {"same": checkpoint(layout), "other": FAMILIES[family]()}.items():
            write_folder(tmp_path / name, tensors, described)
        same, other = (import_model(tmp_path / name, model, names=names.LLAMA) for name in ("same", "other"))
        assert jax.tree.all(jax.tree.map(np.array_equal, *map(jax.tree.leaves, (same, other)))), family


def test_inputs_that_are_clipped_are_not_served_otherwise(tmp_path):
    """fbgemm's scales of inputs have a bound. It is no part of the weights, and converted folders have none."""
    config = TransformerConfig(layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, mlp=384, vocab=64)
    model = eqx.filter_eval_shape(lambda: Transformer.init(config, key=jax.random.key(0)))
    tensors, described = FAMILIES["fbgemm_fp8, channel"]()
    assert sum(name.endswith("input_scale_ub") for name in tensors) == 14
    read = functools.partial(import_model, model=model, names=names.LLAMA)
    bounded = write_folder(tmp_path / "bounded", tensors, described)
    read(bounded, weights="frozen")
    with pytest.raises(ValueError, match="no product clips inputs at activation_scale_ub=1200; a folder in FP8_DYN"):
        read(bounded, weights="served")
    assert convert_folder(bounded, tmp_path / "converted", "FP8_DYNAMIC").is_exact
    assert not [x for x in TensorFolder.open(tmp_path / "converted").tensors if x.endswith("input_scale_ub")]
    described["quantization_config"]["activation_scale_ub"] = None
    unbounded = write_folder(tmp_path / "unbounded", tensors, described)
    served = [read(folder, weights="served") for folder in (tmp_path / "converted", unbounded)]
    assert jax.tree.all(jax.tree.map(np.array_equal, *map(jax.tree.leaves, served)))
    described["quantization_config"]["activation_scale_ub"] = "1200"
    with pytest.raises(BrokenCheckpoint, match="activation_scale_ub is '1200'; it must be a positive number"):
        read(write_folder(tmp_path / "broken", tensors, described))


def test_groups_of_different_layouts_are_served_each_in_its_own(tmp_path):
    data, rows = (DATA.astype(np.float32) * 16).astype(FP8), np.full((160, 1), 2.0**-10, np.float32)
    scales = {"up": rows, "down": np.full((2, 2), 2.0**-9, np.float32)}
    tensors = {f"{layer}.weight": data for layer in scales}
    tensors |= {f"{layer}.weight_scale": scale for layer, scale in scales.items()}
    common = {"num_bits": 8, "type": "float", "dynamic": True}
    scheme = compressed()
    scheme["config_groups"]["group_0"]["input_activations"] = {**common, "strategy": "token"}
    blocks = BLOCKS["config_groups"]["group_0"] | {"targets": ["re:^down$"]}
    blocks["input_activations"] = {**common, "strategy": "group", "group_size": 64}
    scheme["config_groups"]["group_1"] = blocks
    write(tmp_path / "in", tensors, scheme)
    model = {layer: linear(192, 160)["up"] for layer in scales}
    served = import_model(tmp_path / "in", model, weights="served")
    assert served["up"].kernel.input.scaling == RowwiseScaling(power_of_two=True)
    assert served["down"].kernel.input.scaling == BlockScaling(64, power_of_two=True)
    plain = import_model(tmp_path / "in", model)
    for layer, factor in (("up", 2.0**-10), ("down", 2.0**-9)):
        np.testing.assert_array_equal(plain[layer].weight, data.astype(np.float32) * np.float32(factor))


def test_stacked_experts(tmp_path):
    """One array for all experts of a block; a model that has fewer of them leaves some unused."""
    Experts, In, Mlp = hax.make_axes(Experts=3, In=64, Mlp=32)
    data = (64 * RNG.normal(size=(3, 32, 64))).astype(FP8)
    scale = RNG.uniform(0.001, 0.002, (3, 32, 1)).astype(np.float32)
    layer, mapped = "mlp.experts.up_proj", {"up.{e}": "mlp.experts.{e}.up_proj"}
    write(tmp_path / "in", {f"{layer}.weight": data, f"{layer}.weight_scale": scale}, compressed())
    init = lambda axis: {"up": hax.nn.MoELinear.init(axis, In, Mlp, use_bias=False, key=jax.random.key(0))}
    loaded = import_model(tmp_path / "in", init(Experts), names=mapped)["up"]
    weight = np.asarray(loaded.weight.rearrange((Experts, Mlp, In)).array)
    np.testing.assert_array_equal(weight, data.astype(np.float32) * scale)
    frozen = import_model(tmp_path / "in", init(Experts), names=mapped, weights="frozen")
    thawed = dequantize(frozen["up"], jnp.bfloat16).weight.rearrange((Experts, Mlp, In)).array
    np.testing.assert_array_equal(thawed, weight.astype(BF16).astype(np.float32))
    with pytest.raises(ValueError, match=r"the model has no array for mlp\.experts\.2\.up_proj\.weight of"):
        import_model(tmp_path / "in", init(Experts.resize(2)), names=mapped)


WEIGHT = "model.layers.1.mlp.up_proj.weight"
SCALE = f"{WEIGHT}_scale"


def test_what_the_check_refuses_is_not_imported(tmp_path):
    """By the check's own error, unless the model has no place for the tensor. Scales of caches are not read."""
    config = TransformerConfig(layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, mlp=384, vocab=64)
    model = eqx.filter_eval_shape(lambda: Transformer.init(config, key=jax.random.key(0)))
    broken = {
        **BROKEN,
        "everything ignored": ("FP8", lambda t, c: c["quantization_config"].update(ignore=["re:.*"]), None, ""),
        "a huge scale": ("FP8_DYNAMIC", lambda t, c: t.update({SCALE: np.full_like(t[SCALE], 1e38)}), None, ""),
        "a huge size": ("FP8_DYNAMIC", lambda t, c: c.update(hidden_size=2**70), None, ""),
        "bytes": ("FP8_DYNAMIC", lambda t, c: t.update({WEIGHT: t[WEIGHT].view(np.uint8)}), None, ""),
        "signed bytes": ("FP8_DYNAMIC", lambda t, c: t.update({WEIGHT: t[WEIGHT].view(np.int8)}), None, ""),
    }
    in_other_words = {"cache scale zero", "no quantization_config", "router not ignored"}
    for i, (case, (layout, change, *_)) in enumerate(broken.items()):
        tensors, described = checkpoint(layout)
        change(tensors, described)
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(described))
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
        if case == "cache scale zero":
            import_model(folder, model, names=names.LLAMA)
            continue
        with pytest.raises(ValueError) as error:
            import_model(folder, model, names=names.LLAMA)
        assert isinstance(error.value, BrokenCheckpoint) or case in in_other_words, case


def test_whole_numbers_and_scales_that_nothing_reads(tmp_path):
    """Without a quantization_config, the check cannot know what they are."""
    plain, scale = RNG.normal(size=(160, 192)).astype(BF16), np.ones((160, 1), np.float32)
    for dtype in (np.uint8, np.int8, np.int32, np.bool_):
        write_folder(tmp_path / "whole", {"up.weight": DATA}, {})
        save_file({"up.weight": plain.astype(np.float32).astype(dtype)}, tmp_path / "whole" / "model.safetensors")
        with pytest.raises(ValueError, match=rf"^up\.weight is in {np.dtype(dtype)} in the checkpoint.*[dD]equantize"):
            import_model(tmp_path / "whole", linear(192, 160))
    for name, says in (
        ("up.weight_scale", "up.weight_scale: it is a scale, and"),
        ("down.weight_scale", "no array for"),
    ):
        write_folder(tmp_path / "scale", {"up.weight": plain, name: scale}, {})
        with pytest.raises(ValueError, match=says):
            import_model(tmp_path / "scale", linear(192, 160))
    # Not strict, the scale of a layer that the model does not have is not looked at.
    np.testing.assert_array_equal(
        import_model(tmp_path / "scale", linear(192, 160), strict=False)["up"].weight, plain.astype(np.float32)
    )


def test_a_layer_with_mups_factor_keeps_it(tmp_path):
    """A checkpoint has the factor in its weight, and the layer applies it again: whoever reads has to divide by it."""
    In, Out = hax.make_axes(In=64, Out=32)
    layer = {"up": hax.nn.Linear.init(In, Out, key=jax.random.key(0), reparam_cls=hax.nn.mup.OutputLinearMup)}
    assert layer["up"].reparam.active_scale == 1 / 64
    export_model(layer, tmp_path / "out", "FP8_DYNAMIC")
    x = hax.random.normal(jax.random.key(1), In)
    expected = layer["up"](x).array
    for weights in ("dequantized", "frozen", "served"):
        out = import_model(tmp_path / "out", layer, weights=weights)["up"](x).array
        # E4M3 rounds weights, and inputs of the served layer, to 4 bits.
        assert jnp.linalg.norm(out - expected) < 0.06 * jnp.linalg.norm(expected), weights
