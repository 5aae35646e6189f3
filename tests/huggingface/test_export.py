"""Exports: the numbers of training under the names of engines, in every layout, and back."""

import dataclasses
import functools
import json
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from folders import E2M1_VALUES
from full_disk import full_disk
from haliax.state_dict import to_torch_compatible_state_dict
from helpers import rounded_up

from haliax_fp8 import Recipe, calibrate, fp8_linear_layers
from haliax_fp8.folders.beside import write_config
from haliax_fp8.folders.configuration import layout_of
from haliax_fp8.folders.layout import written
from haliax_fp8.huggingface import (
    check_folder,
    export_model,
    hugging_face_config,
    import_model,
    names,
    serving_tensors,
)
from haliax_fp8.huggingface.training_scales import quantized_as_in_training as quantized
from haliax_fp8.layers import Kernel, LayerRule, default_rules
from haliax_fp8.layouts import Inputs, Layout, named as layouts
from haliax_fp8.models import MixtureOfExperts, Transformer, TransformerConfig
from haliax_fp8.recipes import E4M3, E4M3FNUZ, E5M2FNUZ
from haliax_fp8.recipes.scaling import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
    OperandUse,
    RowwiseScaling,
    StaticScaling,
)
from haliax_fp8.serving import dequantize, quantize_for_inference


CONFIG = TransformerConfig(layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, mlp=96, vocab=64)
BF16, FP8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


@pytest.fixture(scope="module")
def plain():
    return Transformer.init(CONFIG, key=jax.random.key(0))


@pytest.fixture(scope="module")
def trained(plain):
    """Converted, with a state as after some steps: scales that differ, and are not powers of two."""
    model = fp8_linear_layers(plain, exclude="head")

    def scaled(node):
        if not hasattr(node, "with_scale"):
            return node
        shape = node.scale.shape
        return node.with_scale(jnp.asarray(np.random.default_rng(shape).uniform(1e-3, 2e-3, shape), jnp.float32))

    return jax.tree.map(scaled, model, is_leaf=lambda node: hasattr(node, "with_scale"))


def read(path: Path) -> dict[str, np.ndarray]:
    """An independent reader of safetensors."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    kinds = {"F8_E4M3": FP8, "BF16": BF16, "F32": np.float32, "U8": np.uint8}
    tensors = {}
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            first, last = (8 + length + offset for offset in entry["data_offsets"])
            assert first % np.dtype(kinds[entry["dtype"]]).itemsize == (8 + length) % 8 == 0
            tensors[name] = np.frombuffer(raw[first:last], kinds[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def test_layouts_without_a_name_of_their_own_are_written_and_read(tmp_path):
    """Hugging Face's, with a scale for a tensor, other blocks, and powers of two."""
    model, dynamic = eqx.nn.MLP(64, 64, 128, 1, key=jax.random.key(0)), Inputs("group", size=64)
    unnamed = {
        "fp8, tensor weights": Layout("tensor", Inputs("tensor"), method="fp8"),
        "HF_FP8": Layout("block", dynamic, (64, 64), "fp8", exponents=True),
    }
    for name, layout in unnamed.items():
        report = export_model(model, tmp_path / name, layout)
        assert report.layout == name and not check_folder(tmp_path / name).faults
        described = layout_of(json.loads((tmp_path / name / "config.json").read_text()))
        assert dataclasses.replace(described, status="compressed", ignore=()) == layout
        loaded = import_model(tmp_path / name, model)
        np.testing.assert_allclose(loaded.layers[0].weight, model.layers[0].weight, rtol=0.0725, atol=1e-3)


def bytes_of(tensors) -> dict[str, tuple]:
    return {name: (x.dtype.name, x.shape, np.ascontiguousarray(x).tobytes()) for name, x in dict(tensors).items()}


@pytest.mark.smoke
@pytest.mark.parametrize("layout", written)
def test_round_trip(trained, plain, layout, tmp_path):
    """Exported, imported frozen, exported again: every byte. Dequantized, it is `data * scale`. Streamed, the same."""
    options = {"names": names.LLAMA, "hf_config": hugging_face_config(plain)}
    report = export_model(trained, tmp_path / "first", layout, **options)
    frozen = import_model(tmp_path / "first", eqx.filter_eval_shape(lambda: plain), names=names.LLAMA, weights="frozen")
    export_model(frozen, tmp_path / "second", layout, **options)
    first, second = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("first", "second"))
    assert first == second
    assert (tmp_path / "first/config.json").read_text() == (tmp_path / "second/config.json").read_text()
    assert report.quantized == 14 and report.ignore == ("model.embed_tokens", "lm_head")
    tensors = read(tmp_path / "first/model.safetensors")
    assert bytes_of(tensors) == bytes_of(serving_tensors(trained, layout, names=names.LLAMA))
    dequantized = import_model(tmp_path / "first", plain, names=names.LLAMA)
    assert bool(eqx.tree_equal(dequantized, dequantize(frozen)))
    weight = np.asarray(dequantized.blocks.stacked.mlp.down.weight.array[1])
    assert_dequantized(tensors, "model.layers.1.mlp.down_proj", weight, layout)


def assert_dequantized(tensors, layer, weight, layout):
    """`data * scale` in float64 from the bytes, by the documentation of each layout."""
    scale = tensors.get(f"{layer}.weight_scale", tensors.get(f"{layer}.weight_scale_inv"))
    if layout.startswith(("MXFP4", "NVFP4")):
        bytes = tensors[f"{layer}.weight_packed"]
        data = E2M1_VALUES[np.stack([bytes & 15, bytes >> 4], -1)].reshape(len(bytes), -1)
        if layout.startswith("NVFP4"):
            scale = (scale.astype(np.float32) / tensors[f"{layer}.weight_global_scale"]).astype(np.float64)
            scale = np.repeat(scale, 16, axis=1)
    else:
        data = tensors[f"{layer}.weight"].astype(np.float64)
    if scale.dtype == np.uint8:
        scale = np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=1)
    elif scale.ndim == 2 and scale.shape[1] == -(-data.shape[1] // 128) and scale.shape[0] == -(-data.shape[0] // 128):
        scale = np.kron(scale.astype(np.float64), np.ones((128, 128)))[: data.shape[0], : data.shape[1]]
    np.testing.assert_array_equal(weight, (data * scale.astype(np.float64)).astype(np.float32))
    assert any("input_" in name and "scale" in name for name in tensors) == layouts[layout].is_static


def test_a_changed_bit_is_a_fault_and_no_import(tmp_path):
    """Wherever it is in the file; `test_files` tries each byte."""
    model = {"up": eqx.nn.Linear(64, 32, key=jax.random.key(0)), "norm": eqx.nn.LayerNorm(32)}
    export_model(model, tmp_path / "out")
    path = tmp_path / "out/model.safetensors"
    content, random = path.read_bytes(), np.random.default_rng(0)
    for position in random.integers(len(content), size=40):
        changed = bytearray(content)
        changed[position] ^= 1 << random.integers(8)
        path.write_bytes(changed)
        errors = check_folder(tmp_path / "out").errors
        with pytest.raises(ValueError) as error:
            import_model(tmp_path / "out", model)
        assert any(str(fault).startswith(str(error.value)) for fault in errors), position


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", (7, 1)), ("float32", (24, 24))])
def test_static_layouts_have_the_numbers_of_training(trained, dtype, bits):
    """The next step's scales, in bfloat16 with as few bits as a step multiplies by; and so the bytes of the step."""
    tensors = dict(serving_tensors(trained, "FP8", names=names.LLAMA, bf16_scales=False, dtype=dtype))
    layer = trained.blocks.stacked.attention.query

    for i in range(2):
        kernel = np.asarray(layer.weight.array[i].astype(dtype).astype(jnp.float32)).reshape(64, 64)
        of_kernel, of_input = (
            rounded_up(layer.dot_general.scale(operand)[i], n).astype(np.float32)
            for operand, n in zip(("kernel", "input"), bits, strict=True)
        )
        expected = np.clip(kernel / of_kernel, -448, 448).astype(FP8)
        name = f"model.layers.{i}.self_attn.q_proj"
        assert tensors[f"{name}.weight"].tobytes() == expected.tobytes()
        np.testing.assert_array_equal(tensors[f"{name}.weight_scale"], np.full((64, 1), of_kernel))
        np.testing.assert_array_equal(tensors[f"{name}.input_scale"], [of_input])


def test_scales_for_bfloat16(trained):
    """Rounded up, by less than one part in 128, and the kernel is quantized with the rounded scale."""
    rounded, exact = (
        dict(serving_tensors(trained, "FP8", names={}, bf16_scales=choice, dtype="float32")) for choice in (True, False)
    )
    kernel = np.asarray(trained.blocks.stacked.mlp.up.weight.array[0])
    for name, scale in rounded.items():
        if name.endswith("_scale"):
            assert (scale == scale.astype(BF16).astype(np.float32)).all()
            assert (scale >= exact[name]).all() and (scale < exact[name] * (1 + 2**-7)).all()
    data, scale = rounded["blocks.0.mlp.up.weight"], rounded["blocks.0.mlp.up.weight_scale"]
    assert data.tobytes() == np.clip(kernel / scale, -448, 448).astype(FP8).tobytes()


@pytest.mark.parametrize(
    ("scaling", "block"),
    [
        (RowwiseScaling(), (1, 300)),
        (RowwiseScaling(power_of_two=False), (1, 300)),
        (CurrentScaling(), (200, 300)),
        (BlockScaling(square=True), (128, 128)),
        (BlockScaling(square=True, power_of_two=False), (128, 128)),
        (MXFP8Scaling(), (1, 32)),
    ],
    ids=str,
)
def test_kernels_are_those_of_the_scaling(scaling, block):
    """What is computed in NumPy is what the products compute, bit for bit, zeros and cut blocks included."""
    kernel = np.random.default_rng(0).normal(size=(200, 300)).astype(np.float32)
    kernel[3], kernel[5:9, :64] = 0.0, 1e-30
    expected = scaling.quantize(jnp.asarray(kernel), OperandUse(E4M3, (1,)))
    exponents = "up" if isinstance(scaling, MXFP8Scaling) else ""
    ours = quantized(kernel, block, scaling=scaling, bf16_scales=False, exponents=exponents)
    assert ours.data.tobytes() == np.asarray(expected.data).tobytes()
    np.testing.assert_array_equal(ours.scale.ravel(), np.asarray(expected.scale).ravel())


def test_one_scale_of_training_is_repeated():
    """A layout with finer blocks holds the numbers of a step with one scale per kernel."""
    kernel = np.random.default_rng(0).normal(size=(200, 300)).astype(np.float32)
    whole = quantized(kernel, (200, 300), scaling=CurrentScaling())
    for block in ((1, 300), (128, 128)):
        part = quantized(kernel, block, scaling=CurrentScaling())
        assert part.data.tobytes() == whole.data.tobytes() and (part.scale == whole.scale).all()
    fresh = quantized(kernel, (1, 300), scaling=None, bf16_scales=False)
    np.testing.assert_array_equal(fresh.scale[:, 0], np.abs(kernel).max(1) / np.float32(448))


def test_rows_of_32_are_not_taken_for_those_of_mxfp8():
    kernel = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
    fresh = quantized(kernel, (1, 32), bf16_scales=False)
    np.testing.assert_array_equal(fresh.scale[:, 0], np.abs(kernel).max(1) / np.float32(448))
    of_training = quantized(kernel, (1, 32), scaling=DelayedScaling(), stored=0.0123, bf16_scales=False)
    assert (of_training.scale == np.float32(0.0123)).all() and of_training.origin == "state of training"


def test_state_that_no_step_has_written_is_refused(tmp_path):
    model = fp8_linear_layers(eqx.nn.MLP(32, 32, 64, 1, key=jax.random.key(0)))
    with pytest.raises(ValueError, match=r"layers.0 has no scale of its.*training_scales=False"):
        export_model(model, tmp_path / "out")
    with pytest.raises(ValueError, match=r"layers.0 has no scale of its input yet.*calibrate"):
        export_model(model, tmp_path / "out", "FP8", training_scales=False)
    export_model(model, tmp_path / "out", training_scales=False)
    state = model.layers[0].dot_general.state
    changed = eqx.tree_at(lambda m: m.layers[0].dot_general.state, model, state.with_array(state.array - 1e-3))
    with pytest.raises(ValueError, match=r"layers.0 was changed by something other"):
        export_model(changed, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_names_are_those_of_state_dicts(plain):
    """With no rule, every entry of Haliax's state dict, with its values."""
    expected = {name: np.asarray(x) for name, x in to_torch_compatible_state_dict(plain).items()}
    assert bytes_of(serving_tensors(plain, "BF16", names={}, dtype=None)) == bytes_of(expected)


@pytest.mark.parametrize("name", ["lm_head", "classifier", "score", "embed_out"])
@pytest.mark.parametrize("exclude", [(), "up"])
def test_heads_stay_in_high_precision_whatever_is_excluded(name, exclude, getkey):
    """As in models for inference, and by the same names; a pattern names one all the same."""
    model = {"up": eqx.nn.Linear(32, 32, key=getkey()), "down": eqx.nn.Linear(32, 32, key=getkey())}
    model[name] = eqx.nn.Linear(32, 32, key=getkey())
    for trained in (model, fp8_linear_layers(model, recipe="current")):
        made = dict(serving_tensors(trained, exclude=exclude))
        assert made[f"{name}.weight"].dtype == BF16 and made["down.weight"].dtype == FP8
        assert dict(serving_tensors(trained, targets=name))[f"{name}.weight"].dtype == FP8
    served = quantize_for_inference(model, "FP8_DYNAMIC", exclude=exclude)
    assert isinstance(served[name], eqx.nn.Linear) and type(served[name]) is type(model[name])


def test_a_head_that_is_the_embedding_is_written_once(plain, tmp_path):
    """`eqx.nn.Shared`: the matrix once, and the configuration says so; into a model that shares it and one that does
    not. A head that trains in FP8, and two layers that share, are written each."""
    where, get = lambda model: model.head.weight, lambda model: model.embedding.weight
    for sharing in ((where, get), (lambda model: where(model).array, lambda model: get(model).array)):
        shared = eqx.nn.Shared(plain, *sharing)
        for model in (shared, fp8_linear_layers(shared, exclude="head", recipe="current")):
            out = tmp_path / f"{len(list(tmp_path.iterdir()))}"
            report = export_model(model, out, names=names.LLAMA, hf_config=hugging_face_config(plain))
            tensors = read(out / "model.safetensors")
            assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] and report.quantized == 14
            assert "lm_head.weight" not in tensors and report.ignore == ("model.embed_tokens", "lm_head")
            assert bytes_of(tensors) == bytes_of(serving_tensors(model, names=names.LLAMA))
            for into in (shared, plain):
                back = import_model(out, eqx.filter_eval_shape(lambda into=into: into), names=names.LLAMA)
                back = back() if into is shared else back
                np.testing.assert_array_equal(back.head.weight.array, back.embedding.weight.array)
    in_fp8 = fp8_linear_layers(eqx.nn.Shared(plain, where, get), recipe="current", targets=["head", "*.mlp.*"])
    in_fp8 = dict(serving_tensors(in_fp8, names=names.LLAMA, targets=["head", "*.mlp.*"]))
    assert in_fp8["lm_head.weight"].dtype == FP8 and in_fp8["model.embed_tokens.weight"].dtype == BF16
    keys = jax.random.split(jax.random.key(0))
    layers = [eqx.nn.Linear(8, 8, use_bias=False, key=key) for key in keys]
    shared = eqx.nn.Shared(layers, lambda m: m[1].weight, lambda m: m[0].weight)
    twice = dict(serving_tensors(shared, "BF16"))
    assert list(twice) == ["0.weight", "1.weight"] and twice["0.weight"].tobytes() == twice["1.weight"].tobytes()
    export_model(shared, tmp_path / "twice", "W8A16", dtype=None)
    back = import_model(tmp_path / "twice", shared)()
    np.testing.assert_array_equal(back[0].weight, back[1].weight)
    with pytest.raises(ValueError, match=r"1\.weight is that of another.*in both places, model\("):
        import_model(tmp_path / "twice", shared, weights="frozen")
    export_model(layers, tmp_path / "apart", "BF16", dtype=None)
    with pytest.raises(ValueError, match=r"no array for 1\.weight"):
        import_model(tmp_path / "apart", shared)


@pytest.mark.more
def test_experts_and_routers(tmp_path):
    """Each expert by itself; the router stays; BlockSeq and Stacked are the same checkpoint; and back."""
    experts = functools.partial(MixtureOfExperts.init, experts=3, chosen=2)
    config = dataclasses.replace(CONFIG, layers=1, feed_forward=experts)
    model = Transformer.init(config, key=jax.random.key(1))
    seq = Transformer.init(dataclasses.replace(config, stacked=False), key=jax.random.key(1))
    report = export_model(model, tmp_path / "out", "FP8_BLOCK", names=names.QWEN3_MOE)
    assert report.ignore == ("model.embed_tokens", "model.layers.0.mlp.gate", "lm_head")
    tensors = read(tmp_path / "out/model.safetensors")
    assert tensors["model.layers.0.mlp.experts.2.gate_proj.weight"].shape == (96, 64)
    assert tensors["model.layers.0.mlp.gate.weight"].dtype == BF16
    assert bytes_of(tensors) == bytes_of(serving_tensors(seq, "FP8_BLOCK", names=names.QWEN3_MOE))
    weight = np.asarray(import_model(tmp_path / "out", model, names=names.QWEN3_MOE).blocks.stacked.mlp.up.weight.array)
    assert_dequantized(tensors, "model.layers.0.mlp.experts.1.up_proj", weight[0, 1].T, "FP8_BLOCK")
    frozen = import_model(tmp_path / "out", model, names=names.QWEN3_MOE, weights="frozen")
    again = serving_tensors(frozen, "FP8_BLOCK", names=names.QWEN3_MOE)
    assert bytes_of(tensors) == bytes_of(again)
    rows, sizes = hax.random.normal(jax.random.key(2), (hax.Axis("row", 4), config.Hidden)), jnp.array([1, 0, 3])
    outputs = frozen.blocks.get_layer(0).mlp.up(rows, hax.named(sizes, experts.keywords and "experts"))
    expected = np.concatenate([np.asarray(rows.array)[:1] @ weight[0, 0], np.asarray(rows.array)[1:] @ weight[0, 2]])
    np.testing.assert_allclose(outputs.array, expected, rtol=1e-5, atol=1e-5)


class Dense(eqx.Module):
    """A class of one's own, with its weight `[in, out]`."""

    kernel: jax.Array
    op: object = None


class DenseRule(LayerRule):
    layer_type = Dense

    def refusal(self, layer):
        return None

    def kernel(self, layer):
        return Kernel(layer.kernel, *layer.kernel.shape[-2:], contracted=(0,))

    def op(self, layer):
        return layer.op

    def with_op(self, layer, op):
        return Dense(layer.kernel, op)


@pytest.mark.more
def test_equinox_and_own_classes(tmp_path):
    """Equinox's layers, an ensemble of them, and a class with a rule, whose weight lies the other way."""
    keys = jax.random.split(jax.random.key(0), 3)
    ensemble = eqx.filter_vmap(lambda key: eqx.nn.Linear(32, 16, key=key))(keys)
    dense = Dense(jax.random.normal(keys[0], (32, 48)))
    model = {"ensemble": ensemble, "mlp": eqx.nn.MLP(8, 8, 16, 1, key=keys[0]), "own": (dense, None)}
    rules = (DenseRule(), *default_rules)
    export_model(model, tmp_path / "out", "BF16", dtype=None, rules=rules)
    tensors = read(tmp_path / "out/model.safetensors")
    np.testing.assert_array_equal(tensors["own.0.weight"], dense.kernel.T)
    np.testing.assert_array_equal(tensors["ensemble.2.weight"], ensemble.weight[2])
    np.testing.assert_array_equal(tensors["ensemble.2.bias"], ensemble.bias[2])
    zeros = jax.tree.map(lambda x: 0 * x if eqx.is_array(x) else x, model)
    assert bool(eqx.tree_equal(import_model(tmp_path / "out", zeros, rules=rules), model))
    export_model(model, tmp_path / "fp8", rules=rules)
    frozen = import_model(tmp_path / "fp8", {**zeros, "own": ()}, weights="frozen", rules=rules, strict=False)
    x = jax.random.normal(keys[1], (32,))
    outputs = eqx.filter_vmap(lambda layer: layer(x))(frozen["ensemble"])
    expected = eqx.filter_vmap(lambda layer: layer(x))(dequantize(frozen["ensemble"]))
    np.testing.assert_array_equal(outputs, expected)


def test_shards(plain, tmp_path):
    """Several files and an index: each tensor in one of them, none larger than asked for, the same tensors."""
    export_model(plain, tmp_path / "one", names=names.LLAMA)
    export_model(plain, tmp_path / "many", names=names.LLAMA, shard_bytes=20_000)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
    tensors = {}
    for file in files:
        part = read(tmp_path / "many" / file)
        assert all(index["weight_map"][name] == file for name in part)
        assert sum(x.nbytes for x in part.values()) <= 20_000
        tensors |= part
    assert bytes_of(tensors) == bytes_of(read(tmp_path / "one/model.safetensors"))
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    loaded = [import_model(tmp_path / folder, plain, names=names.LLAMA) for folder in ("one", "many")]
    assert bool(eqx.tree_equal(*loaded))


class Words(eqx.Module):
    """One layer of each class that has a matrix, by names that say nothing of it; all take the same input."""

    a: eqx.nn.Linear
    b: eqx.nn.Linear
    emb: eqx.nn.Embedding
    words: hax.nn.Embedding
    wte: eqx.nn.Embedding
    smooth: eqx.nn.Conv1d
    patch: eqx.nn.Conv2d
    scale: eqx.nn.LayerNorm
    shift: eqx.nn.LayerNorm
    embed: eqx.nn.Linear

    def __init__(self):
        keys = iter(jax.random.split(jax.random.key(0), 8))
        self.a, self.b, self.embed = (eqx.nn.Linear(64, 64, key=next(keys)) for _ in range(3))
        self.emb, self.wte = (eqx.nn.Embedding(16, 64, key=next(keys)) for _ in range(2))
        self.words = hax.nn.Embedding.init(hax.Axis("vocab", 16), hax.Axis("in", 64), key=next(keys))
        self.smooth, self.patch = eqx.nn.Conv1d(4, 8, 3, key=next(keys)), eqx.nn.Conv2d(4, 8, 3, key=next(keys))
        self.scale, self.shift = eqx.nn.LayerNorm((4, 16)), eqx.nn.LayerNorm(64)

    def __call__(self, x):
        return self.embed(self.b(self.a(x)))


IGNORED = {"b", "emb", "words", "wte", "smooth", "patch", "scale"}


@pytest.fixture(scope="module")
def words():
    model = fp8_linear_layers(Words(), exclude="b")
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    return calibrate(model, loss, [jax.random.normal(jax.random.key(1), (4, 64))])


@pytest.mark.parametrize("layout", written)
def test_matrices_in_high_precision_are_ignored_by_class_not_by_name(words, layout, tmp_path):
    """Embeddings, convolutions, a norm with two axes, an excluded layer; and FP8 in a layer called `embed`."""
    report = export_model(words, tmp_path / "out", layout)
    assert set(report.ignore) == IGNORED and report.quantized == 2
    described = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    keys = ("modules_to_not_convert", "ignored_layers") if layout == "HF_FP8" else ("ignore",)
    assert all(sorted(described[key]) == sorted(IGNORED) for key in keys)
    assert check_folder(tmp_path / "out").is_sound


def test_an_export_that_engines_would_misread_is_refused(words, trained, tmp_path):
    """Its own check comes before the folder gets its name: confused names, half of a fused layer, wrong sizes, NaN."""
    emb, mlp = words.emb, eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0))
    half = fp8_linear_layers(
        Transformer.init(CONFIG, key=jax.random.key(0)), exclude=["head", "*.key"], recipe="current"
    )
    broken = eqx.tree_at(lambda m: m.shift.bias, words, words.shift.bias.at[0].set(jnp.nan))
    cases = [
        # An entry "0" of Hugging Face's list means the layer 1.layers.0 as well.
        (
            lambda out: export_model([emb, mlp], out, "HF_FP8"),
            r"1.layers.0.weight: .*`ignore` lists the layer.*Give names=",
        ),
        (lambda out: export_model(half, out, names={}), "query, key, value are in FP8 and some are not"),
        (
            lambda out: export_model(trained, out, names=names.LLAMA, hf_config={"num_hidden_layers": 3}),
            "no tensor is named model.layers.2",
        ),
        (lambda out: export_model(broken, out), "shift.bias: 1 of its elements"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=f"would read the checkpoint.*{message}"):
            call(tmp_path / "out")
        assert list(tmp_path.iterdir()) == []
    export_model([emb, mlp], tmp_path / "out", "HF_FP8", names={"0": "table"})


def test_what_cannot_be_exported(plain, tmp_path):
    """Errors name the tensor, and leave nothing behind."""
    broken = eqx.tree_at(
        lambda m: m.blocks.stacked.mlp.up.weight.array, plain, replace_fn=lambda x: x.at[1].set(jnp.nan)
    )
    empty, odd = ({"up": eqx.nn.Linear(*n, use_bias=False, key=jax.random.key(0))} for n in ((64, 0), (33, 8)))
    uncalibrated = fp8_linear_layers(plain, recipe=Recipe.of(StaticScaling()), exclude="head")
    cases = [
        (lambda: export_model(broken, tmp_path / "a"), r"blocks\.1\.mlp\.up .* infinity or NaN"),
        (
            lambda: export_model(plain, tmp_path / "a", "FP8"),
            r"blocks\.0\.attention\.query has no scale for its input.*FP8_DYN",
        ),
        (lambda: export_model(uncalibrated, tmp_path / "a", "FP8"), "calibrate the model"),
        (lambda: export_model(plain, tmp_path / "a", "FP8_DYNAMC"), "the nearest are 'FP8_DYNAMIC'"),
        (lambda: export_model(plain, tmp_path / "a", exclude="*"), "no layer to quantize"),
        (
            lambda: export_model(plain, tmp_path / "a", names={"embedding": "head"}),
            "gives 'head.weight' to two tensors",
        ),
        (lambda: names.NameMap.of({"a.{i}": "b"}), "different placeholders"),
        (lambda: export_model(plain, tmp_path / "a", names=3), "names=3 is not a NameMap.*use one"),
        (lambda: export_model(empty, tmp_path / "a"), r"up has shape \(0, 64\): it has no elements"),
        (lambda: export_model(odd, tmp_path / "a", "MXFP4A16"), r"up has shape \(8, 33\).*'MXFP4A16'.*exclude="),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(ValueError, match="not empty"):
        export_model(plain, tmp_path / "full")


@pytest.mark.parametrize("how", ["served", "frozen"])
def test_fp8_that_a_layout_does_not_hold_is_refused(how, tmp_path):
    """Another format, and scales that are no exponents: streamed, engines would read other numbers."""
    layer = {"a": eqx.nn.Linear(64, 48, key=jax.random.key(0))}
    recipe = Recipe.of(StaticScaling(0.5), forward=E4M3FNUZ, backward=E5M2FNUZ)
    served = quantize_for_inference(fp8_linear_layers(layer, recipe=recipe), "FP8")
    if how == "frozen":
        export_model(layer, tmp_path / "in", "FP8_DYNAMIC")
        served = import_model(tmp_path / "in", layer, weights="frozen")
        stored = dataclasses.replace(served["a"].kernel.stored, dtype=np.dtype(ml_dtypes.float8_e4m3fnuz))
        served = eqx.tree_at(lambda m: m["a"].kernel.stored, served, stored)
    message = "a is in float8_e4m3fnuz in the model, and the layout has float8_e4m3fn; export serving.dequantize"
    # Before anything is streamed.
    with pytest.raises(ValueError, match=message):
        serving_tensors(served, "FP8_DYNAMIC")
    with pytest.raises(ValueError, match=message):
        export_model(served, tmp_path / "out", "FP8_DYNAMIC")
    export_model(layer, tmp_path / "rows", "FP8_DYNAMIC")
    rows = import_model(tmp_path / "rows", layer, weights=how)
    message = r"a has scales that the layout cannot store: it takes powers of two, 2\*\*-127 or larger.* imported from"
    with pytest.raises(ValueError, match=message):
        dict(serving_tensors(rows, "MXFP8"))
    with pytest.raises(ValueError, match=message):
        export_model(rows, tmp_path / "out", "MXFP8")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "tensor, named",
    [
        ("blocks.1.mlp.up.weight", "blocks.1.mlp.up"),
        ("blocks.1.mlp.up.weight_scale", "blocks.1.mlp.up"),
        ("blocks.0.mlp_norm.weight", "blocks.0.mlp_norm.weight"),
    ],
)
def test_what_reads_back_otherwise_is_no_export(plain, tmp_path, monkeypatch, tensor, named):
    """One bit of a weight, of its scale, of what is not quantized, once the tensors are on the disk."""

    def lose_a_bit(folder, *arguments):
        path = folder / "model.safetensors"
        raw = bytearray(path.read_bytes())
        (length,) = struct.unpack("<Q", raw[:8])
        raw[8 + length + json.loads(raw[8 : 8 + length])[tensor]["data_offsets"][0]] ^= 1
        path.write_bytes(raw)
        write_config(folder, *arguments)

    monkeypatch.setattr("haliax_fp8.huggingface.exporting.write_config", lose_a_bit)
    with pytest.raises(ValueError, match=f"^{named} did not read back as it was"):
        export_model(plain, tmp_path / "out", names={})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_no_export(plain, tmp_path):
    export_model(plain, tmp_path / "whole")
    size = (tmp_path / "whole/model.safetensors").stat().st_size
    with full_disk(size // 2), pytest.raises(OSError, match="too large"):
        export_model(plain, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


@pytest.mark.more
def test_memory():
    """Beside the model, an export takes little more than its largest tensor."""
    code = """
        import resource, tempfile, jax, jax.numpy as jnp, equinox as eqx
        from haliax_fp8.huggingface import export_model
        linear = eqx.nn.Linear(8, 8, use_bias=False, key=jax.random.key(0))
        model = [eqx.tree_at(lambda l: l.weight, linear, jnp.full((2048, 2048), i + 1.0)) for i in range(24)]
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        export_model(model[:1], tempfile.mkdtemp() + "/warm")
        before = peak()
        export_model(model, tempfile.mkdtemp() + "/out")
        print(peak() - before)
    """
    run = [sys.executable, "-c", textwrap.dedent(code)]
    extra = float(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    # 24 kernels of 4 MiB each in FP8; the whole would be 96.
    assert extra < 40
