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
from haliax_fp8.huggingface import export_model, hugging_face_config, load
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
    assert type(blocks.mlp.up).__name__ == {"frozen": "FrozenLinear", "served": "ServedLinear"}[weights]
    assert loaded.embedding.weight.dtype == jnp.bfloat16


@pytest.mark.parametrize("weights", ["frozen", "served"])
def test_what_would_freeze_nothing_is_refused(weights, tmp_path):
    folder = written(tmp_path / "folder", trained())
    with pytest.raises(ValueError, match=f"weights='{weights}' needs weights in FP8"):
        load(folder, weights=weights)


# Key of config.json, its value, and what the error says.
REFUSED = {
    "model_type": ("gemma3", "gemma3"),
    "architectures": (["LlamaForSequenceClassification"], "LlamaForSequenceClassification"),
    "hidden_act": ("gelu", "hidden_act='gelu'"),
    "attention_dropout": (0.1, "attention_dropout=0.1"),
    "rms_norm_eps": (None, "no rms_norm_eps"),
    "num_attention_heads": (True, "True for num_attention_heads"),
    "attention_bias": ("no", "'no' for attention_bias"),
    "rope_parameters": ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, "rope_type='yarn'"),
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


def test_a_window_limits_the_length(tmp_path):
    folder = written(tmp_path / "folder", trained())
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mistral", "sliding_window": 8}
    config |= {"architectures": ["MistralForCausalLM"]}
    # Mistral has no such keys.
    for key in ("attention_bias", "mlp_bias"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="max_length=8"):
        load(folder)(TOKENS)
    (folder / "config.json").write_text(json.dumps(config | {"use_sliding_window": False}))
    assert load(folder).config.max_length == 32


@pytest.mark.parametrize(
    "parts", [{"biases": ("query",)}, {"rope_theta": None}, {"biases": ("up", "gate", "down"), "query_key_norm": True}]
)
def test_a_model_that_no_config_describes_is_refused(parts):
    with pytest.raises(ValueError, match="biases|learned positions"):
        hugging_face_config(trained(**parts))
    with pytest.raises(ValueError, match="model is a Linear, not a haliax_fp8.models.Transformer"):
        hugging_face_config(trained().head)
