"""`load`: a folder's config.json decides the model, or names the key that it cannot take."""

import dataclasses
import json
from functools import partial

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_fp8 import cast_params
from haliax_fp8.huggingface import check_folder, export_model, hugging_face_config, load, names
from haliax_fp8.models import LinearRope, Llama3Rope, MixtureOfExperts, Transformer, TransformerConfig


SIZES = TransformerConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, mlp=48, vocab=64, max_length=32, unroll=1
)
EXPERTS = partial(MixtureOfExperts.init, experts=4, chosen=2)
MODELS = {
    "llama": {},
    "llama with biases": {"biases": ("query", "key", "value", "output", "gate", "up", "down")},
    "llama 3": {"rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 8), "tied_head": True},
    "llama, linear": {"rope_scaling": LinearRope(2.0), "rope_theta": 500.0, "norm_eps": 1e-3},
    "qwen2": {"biases": ("query", "key", "value")},
    "qwen3": {"query_key_norm": True},
    "mixtral": {"feed_forward": EXPERTS},
    "qwen3_moe": {"query_key_norm": True, "feed_forward": partial(EXPERTS, normalized=False)},
}
TOKENS = hax.named(jax.random.randint(jax.random.key(3), (2, 24), 0, 64), ("batch", "position"))


def trained(**parts):
    """A model whose vectors are not those of initialization, so that each matters."""
    model = Transformer.init(dataclasses.replace(SIZES, **parts), key=jax.random.key(0))
    vary = lambda x: x * jnp.linspace(0.5, 1.5, x.size).reshape(x.shape) + 0.1 if x.ndim < 3 and x.size < 300 else x
    return jax.tree.map(vary, model)


def written(folder, model, layout="BF16"):
    export_model(model, folder, layout)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_is_the_one_that_was_written(name, tmp_path):
    model = trained(**MODELS[name])
    loaded = load(written(tmp_path / "folder", model), dtype=jnp.float32)
    # As rounded as the file.
    expected = cast_params(cast_params(model, jnp.bfloat16), jnp.float32)(TOKENS)
    np.testing.assert_array_equal(loaded(TOKENS).array, expected.array)
    # A partial function is equal to itself alone.
    parts = {"feed_forward": model.config.feed_forward}
    assert dataclasses.replace(loaded.config, **parts) == model.config


def test_a_folder_of_the_hubs_cache(tmp_path):
    """Its files are links to elsewhere."""
    blobs, cached = written(tmp_path / "blobs", trained()), tmp_path / "cached"
    cached.mkdir()
    for file in blobs.iterdir():
        (cached / file.name).symlink_to(file)
    with pytest.raises(ValueError, match="allow that with follow_links=True"):
        load(cached)
    np.testing.assert_array_equal(load(cached, follow_links=True)(TOKENS).array, load(blobs)(TOKENS).array)


@pytest.mark.parametrize("weights", ["frozen", "served"])
def test_weights_in_fp8_stay_in_fp8(weights, tmp_path):
    folder = written(tmp_path / "folder", trained(), "FP8_DYNAMIC")
    loaded = load(folder, weights=weights)
    blocks = loaded.blocks.stacked if weights == "frozen" else loaded.blocks.blocks[0]
    assert type(blocks.mlp.up).__name__ == "QuantizedLinear"
    assert loaded.embedding.weight.dtype == jnp.bfloat16


@pytest.mark.parametrize("weights", ["frozen", "served"])
def test_what_would_freeze_nothing_is_refused(weights, tmp_path):
    folder = written(tmp_path / "folder", trained())
    with pytest.raises(ValueError, match=f"weights='{weights}' needs weights in FP8"):
        load(folder, weights=weights)


# Key of config.json, its value, and what the error says.
REFUSED = {
    "model_type": ("gpt_oss", "gpt_oss"),
    "architectures": (["LlamaForSequenceClassification"], "LlamaForSequenceClassification"),
    "hidden_act": ("gelu", "hidden_act='gelu'"),
    "rms_norm_eps": (None, "no rms_norm_eps"),
    "num_attention_heads": (True, "True for num_attention_heads"),
    "attention_bias": ("no", "'no' for attention_bias"),
    "rope_parameters": ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "rope_type='dynamic'"),
    # What SmolLM2's, Qwen2.5's and others' says is what their family does anyway; another value is not.
    "rope_interleaved": (True, "rope_interleaved=True"),
    "is_llama_config": (False, "is_llama_config=False"),
    "rope_theta": (77.0, "rope_theta=77.0"),
    "rope_scaling": ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "layer_types": (["chunked_attention"], "chunked_attention"),
    "logit_scale": (2.0, r"logit_scale.*without_effect=\('logit_scale',\)"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_load_does_not_compute_is_refused_by_name(key, tmp_path):
    folder = written(tmp_path / "folder", trained())
    value, message = REFUSED[key]
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load(folder)
    if key == "logit_scale":
        load(folder, without_effect=("logit_scale",))


def test_experts_are_counted_under_either_name(tmp_path):
    model = trained(**MODELS["qwen3_moe"])
    folder = written(tmp_path / "folder", model)
    config = json.loads((folder / "config.json").read_text())
    renamed = {"num_local_experts" if key == "num_experts" else key: value for key, value in config.items()}
    (folder / "config.json").write_text(json.dumps(renamed))
    assert load(folder).blocks.stacked.mlp.Experts.size == 4
    (folder / "config.json").write_text(json.dumps(renamed | {"num_experts": 8}))
    with pytest.raises(ValueError, match=r"num_experts and num_local_experts, \[4, 8\]"):
        load(folder)


def rewritten(folder, **keys):
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def test_a_key_that_is_not_there_is_its_familys_default(tmp_path):
    theta = {"rope_theta": "absent", "rope_parameters": "absent", "rope_scaling": "absent"}
    for name, default in (("llama", 10_000.0), ("mixtral", 1_000_000.0)):
        folder = written(tmp_path / name, trained(**MODELS[name]))
        rewritten(folder, **theta)
        assert load(folder).config.rope_theta == default


def test_names_are_compared_before_weights_are_read(tmp_path):
    """And no error recommends an argument that `load` does not have."""
    model, read = trained(), []
    for change in ({"head": "lm_head", "blocks.{i}.mlp.up": "model.layers.{i}.mlp.up"}, {"norm": "model.last"}):
        folder = tmp_path / f"folder {len(change)}"
        export_model(model, folder, "BF16", names=names.LLAMA | change, hf_config={})
        rewritten(folder, **hugging_face_config(model))
        with pytest.raises(ValueError, match="has no model|is missing|no file has it|no array for") as error:
            load(folder, progress=lambda name, *_: read.append(name))
        assert "strict" not in str(error.value).partition("import_model")[0]
    # A head that is not the embedding, in a model that says that it is.
    tied = written(tmp_path / "tied", model)
    rewritten(tied, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="lm_head.weight"):
        load(tied, progress=lambda name, *_: read.append(name))
    assert not read


@pytest.mark.parametrize("parent", ["block_sparse_moe", "mlp"])
def test_experts_of_mixtral_by_other_libraries_names(parent, tmp_path):
    model = trained(**MODELS["mixtral"])
    router = {"blocks.{i}.mlp.router": f"model.layers.{{i}}.{parent}.gate"}
    experts = {
        f"blocks.{{i}}.mlp.{part}.{{e}}": f"model.layers.{{i}}.{parent}.experts.{{e}}.{part}_proj"
        for part in ("gate", "up", "down")
    }
    export_model(model, tmp_path / "folder", "FP8_DYNAMIC", names=names.MIXTRAL | router | experts)
    rewritten(tmp_path / "folder", **hugging_face_config(model))
    expected = load(written(tmp_path / "usual", model, "FP8_DYNAMIC"))(TOKENS)
    np.testing.assert_array_equal(load(tmp_path / "folder")(TOKENS).array, expected.array)
    assert not check_folder(tmp_path / "folder").errors


@pytest.mark.parametrize(
    "parts", [{"biases": ("query",)}, {"rope_theta": None}, {"biases": ("up", "gate", "down"), "query_key_norm": True}]
)
def test_a_model_that_no_config_describes_is_refused(parts):
    with pytest.raises(ValueError, match="biases=|learned positions|query_key_norm=True"):
        hugging_face_config(trained(**parts))
    with pytest.raises(ValueError, match="model is a Linear, not a haliax_fp8.models.Transformer"):
        hugging_face_config(trained().head)
