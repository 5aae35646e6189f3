"""The quantizer of a folder as a recipe: what products multiply, what an export writes, and what is refused."""

import dataclasses
import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from folders import E2M1_VALUES, E4M3, HIDDEN, INNER, VOCABULARY, checkpoint, four_bits, write
from helpers import unchecked

from haliax_fp8 import Fp8DotGeneral, TrainStep, describe, fp8_linear_layers, quantize_kernels
from haliax_fp8.checkpoints import load_into, save
from haliax_fp8.folders.folder import TensorFolder
from haliax_fp8.huggingface import export_model, fp8_config_of, load, with_folder_scales
from haliax_fp8.layouts import Inputs, Layout
from haliax_fp8.models import MixtureOfExperts, Transformer, TransformerConfig
from haliax_fp8.recipes import E4M3 as E4M3_FORMAT, FolderScaling, OperandUse
from haliax_fp8.recipes.scaling import FolderScales


# Of the four-bit ones, and of E4M3, a block of each kind.
KINDS = ("FP8", "FP8_TENSOR", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "HF_FP8", "modelopt", "MXFP4", "NVFP4")
MORE = {"FP8_TENSOR", "FP8_DYNAMIC", "MXFP8", "HF_FP8", "modelopt", "MXFP4"}
KINDS_MARKED = [pytest.param(kind, marks=[pytest.mark.more] * (kind in MORE)) for kind in KINDS]
SIZES = {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1e4}
UP = "model.layers.1.mlp.up_proj"
TOKENS = hax.named(jax.random.randint(jax.random.key(0), (2, 8), 0, VOCABULARY), ("batch", "position"))


def loss_fn(model, tokens):
    return hax.mean(hax.square(model(tokens).astype(jnp.float32))).scalar()


def written(kind, folder):
    """A folder whose scales have all bits of float32 where its layout has them, and what one layer of it holds."""
    tensors, config = four_bits(kind)[:2] if "FP4" in kind else checkpoint(kind)
    return write(folder, tensors, config | SIZES), tensors


def converted(folder, **options):
    model = load(folder, **options)
    return with_folder_scales(folder, fp8_linear_layers(model, fp8_config_of(folder, model)))


def codes_and_scales(tensors, kind, layer=UP):
    """The values of a weight's codes, and the scale of each, in float32: from the bytes, by definition."""
    if "FP4" not in kind:
        data = tensors[f"{layer}.weight"].astype(np.float32)
        scale = next(
            tensors[name] for name in (f"{layer}.weight_scale", f"{layer}.weight_scale_inv") if name in tensors
        )
    else:
        bytes = tensors[f"{layer}.weight_packed"]
        data = E2M1_VALUES[np.stack([bytes & 15, bytes >> 4], -1).reshape(len(bytes), -1)].astype(np.float32)
        scale = tensors[f"{layer}.weight_scale"]
    if scale.dtype == np.uint8:
        scale = np.exp2(scale.astype(np.float32) - 127)
    if kind == "NVFP4":
        scale = scale.astype(np.float32) / tensors[f"{layer}.weight_global_scale"]
    scale = scale.reshape(scale.shape if scale.ndim == 2 else (1, 1))
    rows, columns = (-(-n // count) for n, count in zip(data.shape, scale.shape, strict=True))
    return data, np.repeat(np.repeat(scale, rows, 0), columns, 1)[: data.shape[0], : data.shape[1]]


@pytest.mark.parametrize("kind", KINDS_MARKED)
def test_products_multiply_the_data_and_scales_of_the_folder_and_exports_have_its_bytes(kind, tmp_path):
    folder, tensors = written(kind, tmp_path / "published")
    model = converted(folder)
    assert model.blocks.stacked.mlp.up.weight.dtype == jnp.bfloat16  # most scales have more bits
    kernel = quantize_kernels(model).blocks.stacked.mlp.up.dot_general.quantized_kernel.fprop
    kernel = jax.tree.map(lambda x: x.array, kernel, is_leaf=lambda x: isinstance(x, hax.NamedArray)).quantized
    ours = np.asarray(kernel.data.astype(jnp.float32))[1], np.asarray(kernel.scale)[1]
    ours = [x.T if x.shape[0] != INNER and kernel.data.shape[1] != INNER else x for x in ours]
    data, scale = codes_and_scales(tensors, kind)
    np.testing.assert_array_equal(ours[0], data)
    repeats = [-(-n // count) for n, count in zip(data.shape, ours[1].shape, strict=True)]
    np.testing.assert_array_equal(np.repeat(np.repeat(ours[1], repeats[0], 0), repeats[1], 1), scale)
    export_model(model, tmp_path / "again", kind, like=folder)
    again = TensorFolder.open(tmp_path / "again").tensors
    assert again.keys() == tensors.keys()
    differ = [name for name in tensors if again[name].array().tobytes() != np.asarray(tensors[name]).tobytes()]
    assert not differ


@pytest.mark.parametrize(("kind", "block"), [("FP8_BLOCK", (128, 128)), ("NVFP4", (1, 16)), ("FP8_DYNAMIC", (1, 128))])
def test_where_one_weight_moved_only_its_block_changes(kind, block, tmp_path):
    folder, tensors = written(kind, tmp_path / "published")
    model = converted(folder)
    at = lambda model: model.blocks.stacked.mlp.up.weight.array
    row, column = 130, 70
    moved = eqx.tree_at(at, model, at(model).at[(1, row, column)].multiply(1.5))
    export_model(moved, tmp_path / "again", kind, like=folder)
    again = {name: x.array() for name, x in TensorFolder.open(tmp_path / "again").tensors.items()}
    differ = {name for name in tensors if again[name].tobytes() != np.asarray(tensors[name]).tobytes()}
    assert differ and all(name.startswith(UP) for name in differ)
    assert not any(name.endswith("global_scale") for name in differ)
    changed = np.zeros((INNER, HIDDEN), bool)
    changed[row // block[0] * block[0] :, column // block[1] * block[1] :][: block[0], : block[1]] = True
    for new, old in zip(codes_and_scales(again, kind), codes_and_scales(tensors, kind), strict=True):
        np.testing.assert_array_equal(new[~changed], old[~changed])
    # The weight itself is what its block rounds it to, with the scale of the folder's rule.
    data, scale = codes_and_scales(again, kind)
    assert abs(data * scale - np.asarray(at(moved)[1], np.float32))[row, column] <= 0.25 * abs(
        float(at(moved)[1, row, column])
    )


def test_two_folders_decode_to_the_same_values_so_a_block_has_to_know_its_scale():
    x = jnp.array([[224.0, -7.5] + 30 * [0.25]])
    quantize = lambda folder: FolderScaling((1, 32), "e8m0_up").quantize(
        x, OperandUse(E4M3_FORMAT, contracted=(1,), folder=folder)
    )
    known = lambda scale: FolderScales(jnp.full((1, 1), scale, jnp.float32).view(jnp.uint32))
    results = [quantize(folder) for folder in (None, known(1.0), known(0.5), known(0.03))]
    # The last one clips 224, so that the block is no multiple of it.
    assert [float(q.scale[0, 0]) for q in results] == [0.5, 1.0, 0.5, 0.5]
    assert [float(q.data[0, 0]) for q in results] == [448, 224, 448, 448]
    assert all((q.dequantize() == x).all() for q in results)


def test_blocks_of_zeros_and_negative_zeros_keep_their_bytes():
    x = jnp.array([[0.0, -0.0], [0.0, 0.0]])
    for scale in (2.0**-127, 0.0, 3.0):
        folder = FolderScales(jnp.full((2, 1), scale, jnp.float32).view(jnp.uint32))
        q = FolderScaling((1, 0)).quantize(x, OperandUse(E4M3_FORMAT, contracted=(1,), folder=folder))
        assert np.asarray(q.data).view(np.uint8).tolist() == [[0, 0x80], [0, 0]]
        assert np.asarray(q.scale).view(np.uint32).tolist() == 2 * [[int(np.float32(scale).view(np.uint32))]]


def test_static_inputs_have_the_scale_of_the_folder_also_in_bfloat16(tmp_path):
    """Elsewhere a stored scale is rounded up to a power of two, for products in bfloat16."""
    folder, tensors = written("FP8", tmp_path / "published")
    layer = converted(folder).blocks.unstacked()[1].mlp.up
    x = jax.random.normal(jax.random.key(0), (4, HIDDEN), jnp.bfloat16)
    out = eqx.filter_jit(layer)(hax.named(x, ("batch", layer.In.name))).array
    scale, (data, scales) = np.float32(0.01), codes_and_scales(tensors, "FP8")
    rounded = np.clip(np.asarray(x, np.float32) / scale, -448, 448).astype(E4M3).astype(np.float64)
    expected = rounded @ data.astype(np.float64).T * float(scale) * scales[:, 0].astype(np.float64)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2**-8)


def test_it_trains_is_described_and_resumes_as_any_other(tmp_path):
    folder, _ = written("FP8_BLOCK", tmp_path / "published")
    model, step = converted(folder), TrainStep(loss_fn, optax.sgd(1e-2, momentum=0.9))
    text = str(describe(model))
    assert "FolderScaling" in text and "7 of 8 linear layers" in text
    at = lambda model: model.blocks.stacked.mlp.up
    scales = np.asarray(at(model).dot_general.folder_scales.scale.array)
    before = float(loss_fn(model, TOKENS))
    run = model, step.init(model)
    run = step(*run, TOKENS)[:2]
    save(tmp_path / "run.safetensors", run)
    fresh = converted(folder)
    loaded, _ = load_into((fresh, step.init(fresh)), tmp_path / "run.safetensors", strict=True)
    np.testing.assert_array_equal(at(loaded[0]).dot_general.folder_scales.scale.array, scales)
    runs = [step(*each, TOKENS)[:2] for each in (run, loaded)]
    same = jax.tree.map(lambda a, b: bool((a == b).all()), *(eqx.filter(run, eqx.is_array) for run in runs))
    assert jax.tree.all(same)
    assert float(loss_fn(runs[0][0], TOKENS)) < before


@pytest.mark.more
def test_experts_keep_their_scales(tmp_path):
    experts = functools.partial(MixtureOfExperts.init, experts=2, chosen=1)
    sizes = TransformerConfig(layers=1, hidden=128, mlp=128, vocab=VOCABULARY, feed_forward=experts)
    model = Transformer.init(sizes, key=jax.random.key(0))
    for layout in ("FP8_DYNAMIC", "FP8_BLOCK"):
        first, second = tmp_path / f"{layout}-1", tmp_path / f"{layout}-2"
        export_model(model, first, layout)
        again = converted(first)
        assert jnp.isfinite(loss_fn(again, TOKENS))
        export_model(again, second, layout, like=first)
        one, two = (TensorFolder.open(folder).tensors for folder in (first, second))
        assert all(x.array().tobytes() == two[name].array().tobytes() for name, x in one.items())


def test_layers_that_the_folder_left_alone_stay_so(tmp_path):
    tensors, config = checkpoint("FP8_DYNAMIC")
    plain = checkpoint(None)[0]
    for name in [name for name in tensors if "down_proj" in name]:
        del tensors[name]
    tensors |= {name: x for name, x in plain.items() if "down_proj" in name}
    config["quantization_config"]["ignore"].append("re:.*down_proj")
    model = converted(write(tmp_path / "published", tensors, config | SIZES))
    is_op = lambda layer: isinstance(layer.dot_general, Fp8DotGeneral)
    mlp = model.blocks.stacked.mlp
    assert [is_op(layer) for layer in (mlp.gate, mlp.up, mlp.down)] == [True, True, False]


@pytest.mark.more
def test_experts_with_one_scale_each_and_blocks_across_axes_are_refused(tmp_path):
    experts = functools.partial(MixtureOfExperts.init, experts=2, chosen=1)
    sizes = {"layers": 1, "hidden": 128, "mlp": 128, "vocab": VOCABULARY}
    of_experts = Transformer.init(TransformerConfig(feed_forward=experts, **sizes), key=jax.random.key(0))
    config = dataclasses.replace(TransformerConfig(**sizes), heads=4, kv_heads=2, head_dim=96)
    across = Transformer.init(config, key=jax.random.key(0))
    one = Layout("tensor", Inputs("tensor"))
    for name, model, layout, words in (
        ("experts", of_experts, one, "experts of .* have a scale each.*FP8_DYNAMIC"),
        ("across", across, "FP8_BLOCK", r"query: the axes .*96\).*lie across them: exclude"),
    ):
        export_model(model, tmp_path / name, layout)
        with pytest.raises(ValueError, match=f"(?s){words}"):
            fp8_config_of(tmp_path / name, load(tmp_path / name))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("W8A16", "inputs in high precision.*frozen"),
        ("NVFP4A16", "inputs in high precision"),
        ("modelopt, NVFP4", "nvfp4"),
    ],
)
def test_what_no_recipe_expresses_is_refused_by_name(kind, words, tmp_path):
    folder, _ = written(kind, tmp_path / "published")
    with pytest.raises(ValueError, match=rf"(?s)(query|up|gate).*{words}"):
        fp8_config_of(folder, load(folder))


def test_wrong_calls_name_the_remedy(tmp_path):
    folder, _ = written("FP8_DYNAMIC", tmp_path / "published")
    model = load(folder)
    with pytest.raises(ValueError, match="fp8_config_of"):
        with_folder_scales(folder, model)
    with pytest.raises(ValueError, match="fp8_config_of"):
        with_folder_scales(folder, fp8_linear_layers(model))
    with pytest.raises(ValueError, match="before its conversion"):
        fp8_config_of(folder, converted(folder))
    with pytest.raises(ValueError, match="dequantized"):
        fp8_config_of(folder, load(folder, weights="frozen"))
    with pytest.raises(ValueError, match="by name"):
        fp8_config_of(write(tmp_path / "plain", *checkpoint(None)), model)
    with unchecked(), pytest.raises(ValueError, match=r"block=\(1,\)"):
        FolderScaling((1,))
    with unchecked(), pytest.raises(ValueError, match="scales='fp32'"):
        FolderScaling(scales="fp32")
    with pytest.raises(ValueError, match=r"\(3, 96\).*lie across"):
        x = jnp.ones((3, 96, 128))
        FolderScaling((128, 128)).quantize(x, OperandUse(E4M3_FORMAT, contracted=(2,)))
