"""What folders hold beside weights: heads that have none, configurations, tokenizers, and what ends a text."""

import dataclasses
import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import checkpoint, write

from haliax_fp8 import fp8_linear_layers
from haliax_fp8.folders.folder import TensorFolder
from haliax_fp8.huggingface import check_folder, convert_folder, export_model, load, serving_tensors
from haliax_fp8.layouts import named
from haliax_fp8.models import Transformer, TransformerConfig


SIZES = TransformerConfig(layers=1, hidden=64, heads=2, kv_heads=1, head_dim=32, mlp=96, vocab=64, unroll=1)
TIED = dataclasses.replace(SIZES, tied_head=True)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def left_alone(folder):
    """Every list of layers that engines read, by where it is."""
    of_config = config_of(folder).get("quantization_config", {})
    keys = ("ignore", "modules_to_not_convert", "ignored_layers")
    lists = {key: of_config[key] for key in keys if key in of_config}
    if (folder / "hf_quant_config.json").exists():
        beside = json.loads((folder / "hf_quant_config.json").read_text())
        lists["exclude_modules"] = beside["quantization"]["exclude_modules"]
    return lists


# --- Tied heads -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tied():
    """With scales of inputs, which some layouts need."""
    model = fp8_linear_layers(Transformer.init(TIED, key=jax.random.key(0)))
    has_scale = lambda node: hasattr(node, "with_scale")
    scaled = lambda node: node.with_scale(jnp.full(node.scale.shape, 2e-3)) if has_scale(node) else node
    return jax.tree.map(scaled, model, is_leaf=has_scale)


def bytes_of(folder):
    stored = TensorFolder.open(folder)
    return {name: stored[name].tobytes() for name in stored.tensors}


@pytest.mark.parametrize("layout", [name for name in named if name != "NVFP4_DYNAMIC"])
def test_a_tied_head_is_left_alone(layout, tied, tmp_path):
    """In exports and conversions, in each list that engines read: Transformers would take its scales from nowhere."""
    report = export_model(tied, tmp_path / "made", layout)
    export_model(tied, tmp_path / "plain", "BF16")
    folders = [tmp_path / "made", tmp_path / "same", tmp_path / "back"]
    convert_folder(folders[0], folders[1], layout)
    if not named[layout].is_static:
        convert_folder(tmp_path / "plain", tmp_path / "new", layout)
        folders.append(tmp_path / "new")
    convert_folder(folders[0], folders[2], "W8A16")
    for folder in folders:
        assert left_alone(folder) and all("lm_head" in names for names in left_alone(folder).values()), folder
        assert config_of(folder)["tie_word_embeddings"] is True
        assert not any("lm_head" in name for name in bytes_of(folder))
        assert check_folder(folder).is_sound and not [f for f in check_folder(folder).faults if f.tensor == "ignore"]
    assert "lm_head" in report.ignore
    # What was frozen goes back with every byte.
    frozen = serving_tensors(load(folders[0], weights="frozen"), layout)
    assert {name: x.tobytes() for name, x in frozen} == bytes_of(folders[0])


# What a configuration says of its head, whether the folder has one, and whether it has to be left alone.
HEADS = {
    "tied": ({"tie_word_embeddings": True}, False, True),
    "tied, and written": ({"tie_word_embeddings": True}, True, True),
    "not tied": ({"tie_word_embeddings": False}, True, True),
    "no word of it": (
        {"tie_word_embeddings": None, "model_type": "gemma", "architectures": ["GemmaForCausalLM"]},
        False,
        True,
    ),
    "an encoder": ({"tie_word_embeddings": None, "architectures": ["LlamaModel"]}, False, False),
}


@pytest.mark.parametrize("case", HEADS)
def test_heads_of_converted_folders(case, tmp_path):
    """Gemma's configuration says nothing of its tied head; an encoder has none."""
    says, is_written, expected = HEADS[case]
    tensors, config = checkpoint("FP8_DYNAMIC")
    if is_written and "tied," in case:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors = {name: x for name, x in tensors.items() if is_written or "lm_head" not in name}
    says = {**config, **says}
    source = write(tmp_path / "source", tensors, {name: x for name, x in says.items() if x is not None})
    convert_folder(source, tmp_path / "new", "FP8_BLOCK")
    assert ("lm_head" in left_alone(tmp_path / "new")["ignore"]) == expected
    assert not [fault for fault in check_folder(tmp_path / "new").faults if fault.tensor == "ignore"]


# --- What came from a folder goes back to one -------------------------------------------------------------------------


FILES = {
    "generation_config.json": '{"eos_token_id": [2, 7], "temperature": 0.6}',
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"chat_template": "x"}',
    "chat_template.jinja": "{{ x }}",
    "special_tokens_map.json": "{}",
    "LICENSE": "free",
}
# Of weights that are not in the new folder.
STALE = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "adapter_config.json")


def published(folder, model, layout="BF16", **changes):
    """A folder as it is published: a Mistral with a window, ids, a tokenizer and older weights."""
    export_model(model, folder, layout)
    ours = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768}
    ours |= {"sliding_window": 4096, "bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 0, **changes}
    config = {name: value for name, value in {**config_of(folder), **ours}.items() if name != "attention_bias"}
    config.pop("mlp_bias")
    (folder / "config.json").write_text(json.dumps(config))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name in STALE:
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize("sizes", [SIZES, TIED], ids=["own head", "tied"])
def test_a_folder_goes_back_as_it_came(sizes, tmp_path):
    """Its configuration but for layout and dtype, and every file but those of weights; as in a conversion."""
    source = published(tmp_path / "source", Transformer.init(sizes, key=jax.random.key(0)), torch_dtype="float16")
    expected = config_of(source)
    export_model(load(source), tmp_path / "fp8", "FP8_DYNAMIC", like=source)
    convert_folder(source, tmp_path / "converted", "FP8_DYNAMIC")
    export_model(load(tmp_path / "fp8", weights="frozen"), tmp_path / "frozen", "FP8_DYNAMIC", like=tmp_path / "fp8")
    export_model(load(tmp_path / "fp8"), tmp_path / "plain", "BF16", like=tmp_path / "fp8", dtype="float32")
    for name, dtype in {"fp8": "bfloat16", "frozen": "bfloat16", "plain": "float32"}.items():
        config = config_of(tmp_path / name)
        assert ("quantization_config" in config) == (name != "plain")
        config.pop("quantization_config", None)
        assert config == expected | {"dtype": dtype, "torch_dtype": dtype}
        assert check_folder(tmp_path / name).faults == ()
    for name in ("fp8", "converted", "frozen", "plain"):
        for file, text in FILES.items():
            assert (tmp_path / name / file).read_text() == text
        others = {path.name for path in (tmp_path / name).iterdir()} - set(FILES)
        assert others == {"config.json", "model.safetensors"}
    assert left_alone(tmp_path / "fp8") == left_alone(tmp_path / "frozen")


def test_another_architecture_is_refused_by_name(tmp_path):
    model = Transformer.init(SIZES, key=jax.random.key(0))
    source = published(tmp_path / "source", model)
    theirs = load(source).config
    others = {
        "vocab_size=64, and model has 80": {"vocab": 80},
        "rope_theta=10000.0, and model has 500.0": {"rope_theta": 500.0},
        "tie_word_embeddings=False, and model has True": {"tied_head": True},
        "['MistralForCausalLM'], and model has ['Qwen3ForCausalLM']": {"query_key_norm": True},
        "max_position_embeddings=32768, and model has 128": {"max_length": 128},
        "learned positions": {"rope_theta": None, "windows": ()},
    }
    for message, parts in others.items():
        other = Transformer.init(dataclasses.replace(theirs, **parts), key=jax.random.key(0))
        with pytest.raises(ValueError, match=rf"like=.*source.*{re.escape(message)}"):
            export_model(other, tmp_path / "out", like=source)
    unknown = published(tmp_path / "unknown", model, model_type="gemma9")
    with pytest.raises(ValueError, match="like=.*unknown.*model_type='gemma9'"):
        export_model(model, tmp_path / "out", like=unknown)
    with pytest.raises(ValueError, match="like=.*nowhere.*not a folder"):
        export_model(model, tmp_path / "out", like=tmp_path / "nowhere")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "unknown"]


def test_a_model_that_was_trained_elsewhere_takes_a_tokenizer_alone(tmp_path):
    """With a configuration of its own; and one of another class takes the folder's configuration as it is."""
    source = published(tmp_path / "source", Transformer.init(SIZES, key=jax.random.key(0)))
    other = Transformer.init(dataclasses.replace(SIZES, vocab=80), key=jax.random.key(0))
    export_model(other, tmp_path / "other", "BF16", hf_config={"model_type": "mine"}, like=source)
    assert config_of(tmp_path / "other") == {"model_type": "mine"}
    assert (tmp_path / "other" / "chat_template.jinja").exists()
    (source / "config.json").write_text('{"model_type": "mlp", "eos_token_id": 3}')
    export_model(eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0)), tmp_path / "mlp", "BF16", like=source)
    assert config_of(tmp_path / "mlp") == {"model_type": "mlp", "eos_token_id": 3, "dtype": "bfloat16"}


def test_files_that_are_links_out_of_the_folder_are_not_copied_unasked(tmp_path):
    """As in the cache of Hugging Face's hub, or where someone wants a file of another user to be published."""
    model = Transformer.init(SIZES, key=jax.random.key(0))
    source = published(tmp_path / "source", model)
    (tmp_path / "secret").write_text("secret")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    for write_to in (
        lambda to, **options: export_model(load(source), to, like=source, **options),
        lambda to, **options: convert_folder(source, to, "FP8_DYNAMIC", **options),
    ):
        with pytest.raises(ValueError, match="notes.txt: it is a link out of the folder; .*follow_links=True"):
            write_to(tmp_path / "out")
        write_to(tmp_path / "out", follow_links=True)
        assert (tmp_path / "out" / "notes.txt").read_text() == "secret"
        (tmp_path / "out").rename(tmp_path / "before" if not (tmp_path / "before").exists() else tmp_path / "last")


def test_a_model_that_cannot_speak_or_stop_is_a_remark(tmp_path):
    """Not of models that write no text."""
    tensors, config = checkpoint("FP8_DYNAMIC")
    about = lambda folder: [(fault.file, fault.tensor, fault.is_error) for fault in check_folder(folder).faults]
    silent = write(tmp_path / "silent", tensors, {**config, "eos_token_id": None, "bos_token_id": None})
    (silent / "tokenizer.json").unlink()
    assert about(silent) == [("tokenizer.json", "", False), ("config.json", "eos_token_id", False)]
    assert check_folder(silent).is_sound
    (silent / "tekken.json").write_text("{}")
    (silent / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert about(silent) == []
    (silent / "generation_config.json").write_text('{"eos_token_id": 2')
    assert about(silent) == [("generation_config.json", "", False)]
    encoder = write(tmp_path / "encoder", tensors, {**config, "architectures": ["LlamaModel"], "eos_token_id": None})
    (encoder / "tokenizer.json").unlink()
    assert about(encoder) == []


def test_what_is_written_says_its_dtype(tmp_path):
    """Also without a folder to be like: engines cast weights to what the configuration says."""
    model = Transformer.init(SIZES, key=jax.random.key(0))
    for dtype, expected in {"float32": "float32", "float16": "float16", None: "float32"}.items():
        export_model(model, tmp_path / str(dtype), "BF16", dtype=dtype)
        assert {config_of(tmp_path / str(dtype))[key] for key in ("dtype", "torch_dtype")} == {expected}
    export_model(model, tmp_path / "fp8", dtype="float16")
    for layout, dtype in {"W8A16": "float16", "BF16": "float32"}.items():
        convert_folder(tmp_path / "fp8", tmp_path / layout, layout, dtype="float32")
        assert {config_of(tmp_path / layout)[key] for key in ("dtype", "torch_dtype")} == {dtype}
    assert TensorFolder.open(tmp_path / "float16")["lm_head.weight"].dtype == np.float16
