"""Each family of published models, from its published `config.json`: a reference in NumPy computes the same logits.

The reference is written from the papers and with the published names, without the package and its rows.
"""

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from folders import write

from haliax_fp8 import Fp8Config, TrainStep, fp8_linear_layers
from haliax_fp8.folders import check_folder
from haliax_fp8.folders.families import FAMILIES
from haliax_fp8.huggingface import export_model, hugging_face_config, load
from tests.others.published import published


PUBLISHED = published()
TOKENS = np.random.default_rng(1).integers(0, 64, (2, 24))


def weights(config):
    """Random tensors by their published names, with small numbers of heads and layers."""
    random, kind = np.random.default_rng(0), config["model_type"]
    hidden, heads, keys, inner = 64, config["num_attention_heads"], config["num_key_value_heads"], 96
    width = config.get("head_dim", hidden // heads)
    query, key = heads * width, keys * width
    layers = {"self_attn.o_proj": (hidden, query)}
    if kind == "phi3":
        layers["self_attn.qkv_proj"] = (query + 2 * key, hidden)
    else:
        layers |= {
            f"self_attn.{name}_proj": (size, hidden) for name, size in zip("qkv", (query, key, key), strict=True)
        }
    if kind == "mixtral":
        layers["block_sparse_moe.gate"] = (4, hidden)
        for e in range(4):
            shapes = {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}
            layers |= {f"block_sparse_moe.experts.{e}.{name}": shape for name, shape in shapes.items()}
    else:
        layers["mlp.down_proj"] = (hidden, inner)
        if kind in ("phi3", "glm4"):
            layers["mlp.gate_up_proj"] = (2 * inner, hidden)
        else:
            layers |= dict.fromkeys(("mlp.up_proj", *["mlp.gate_proj"] * (kind != "arcee")), (inner, hidden))
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), hidden)
    if kind in ("olmo2", "olmo3"):
        norms = dict.fromkeys(("post_attention_layernorm", "post_feedforward_layernorm"), hidden)
        norms |= {"self_attn.q_norm": query, "self_attn.k_norm": key}
    if kind == "glm4":
        norms |= dict.fromkeys(("post_self_attn_layernorm", "post_mlp_layernorm"), hidden)
    if kind.startswith("gemma"):
        norms |= dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), hidden)
    if kind in ("qwen3", "gemma3_text"):
        norms |= {"self_attn.q_norm": width, "self_attn.k_norm": width}
    if kind == "hunyuan_v1_dense":
        norms |= {"self_attn.query_layernorm": width, "self_attn.key_layernorm": width}
    normal = lambda *shape: (random.standard_normal(shape) / 8).astype(np.float32)
    tensors = {"model.embed_tokens.weight": normal(64, hidden), "model.norm.weight": 1 + normal(hidden)}
    for i in range(config["num_hidden_layers"]):
        of_block = {name: normal(*shape) for name, shape in layers.items()}
        of_block |= {name: 1 + normal(size) for name, size in norms.items()}
        tensors |= {f"model.layers.{i}.{name}.weight": value for name, value in of_block.items()}
        if kind == "qwen2" or config.get("attention_bias"):
            for name, size in zip("qkv", (query, key, key), strict=True):
                tensors[f"model.layers.{i}.self_attn.{name}_proj.bias"] = normal(size)
    if not config.get("tie_word_embeddings", kind.startswith("gemma")):
        tensors["lm_head.weight"] = normal(64, hidden)
    return tensors


def frequencies(config, size, length, local):
    """RoPE's frequencies, and what cosine and sine are multiplied by."""
    theta = config.get("rope_theta", 1e6 if config["model_type"] == "mixtral" else 1e4)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", theta)
    if local:
        theta, rope = config.get("rope_local_base_freq", theta), {}
    i = np.arange(0, size, 2)
    base, kind, original = theta ** (-i / size), rope.get("rope_type", rope.get("type")), 16
    if kind == "llama3":
        wavelength, factor = 2 * np.pi / base, rope["factor"]
        smooth = np.clip((original / wavelength - 1) / (4 - 1), 0, 1)
        return (1 - smooth) * base / factor + smooth * base, 1.0
    if kind == "dynamic":
        return (theta * rope["alpha"] ** (size / (size - 2))) ** (-i / size), 1.0
    if kind == "longrope":
        factor = config["max_position_embeddings"] / original
        divided = base / np.array(rope["long_factor" if length > original else "short_factor"])
        return divided, np.sqrt(1 + np.log(factor) / np.log(original))
    if kind == "yarn":
        index = lambda turns: size * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(theta))
        low, high = max(np.floor(index(32)), 0), min(np.ceil(index(1)), size - 1)
        ramp = np.clip((np.arange(size // 2) - low) / max(high - low, 1e-3), 0, 1)
        factor, grown = rope["factor"], rope.get("attention_factor", 0.1 * np.log(rope["factor"]) + 1)
        return base / factor * ramp + base * (1 - ramp), 1.0 if "mscale_all_dim" in rope else grown
    return base, 1.0


def rotated(x, config, positions, local):
    """Query or key, `(batch, position, heads, width)`, with each pair of a head turned by its angle."""
    size = int(x.shape[-1] * config.get("partial_rotary_factor", 1.0))
    speeds, factor = frequencies(config, size, len(positions), local)
    turns = factor * np.exp(1j * positions[:, None, None] * speeds)
    turned, rest = x[..., :size], x[..., size:]
    if config["model_type"] in ("ernie4_5", "glm4"):
        pairs = (turned[..., 0::2] + 1j * turned[..., 1::2]) * turns
        turned = np.stack([pairs.real, pairs.imag], -1).reshape(turned.shape)
    else:
        pairs = (turned[..., : size // 2] + 1j * turned[..., size // 2 :]) * turns
        turned = np.concatenate([pairs.real, pairs.imag], -1)
    return np.concatenate([turned, rest], -1)


def attention(x, config, tensors, layer):
    """The attention of one layer."""
    kind, length = config["model_type"], x.shape[1]
    name = lambda part: f"model.layers.{layer}.self_attn.{part}"
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim", 64 // heads)
    linear = lambda part: x @ tensors[name(f"{part}.weight")].T + tensors.get(name(f"{part}.bias"), 0.0)
    if kind == "phi3":
        q, k, v = np.split(linear("qkv_proj"), [heads * width, (heads + keys) * width], -1)
    else:
        q, k, v = (linear(f"{part}_proj") for part in "qkv")
    if kind in ("olmo2", "olmo3"):
        q, k = (rms(y, config, tensors[name(f"{part}_norm.weight")]) for y, part in ((q, "q"), (k, "k")))
    q, k, v = (y.reshape(*y.shape[:2], -1, width) for y in (q, k, v))
    if kind in ("qwen3", "gemma3_text"):
        q, k = (rms(y, config, tensors[name(f"{part}_norm.weight")]) for y, part in ((q, "q"), (k, "k")))
    slides = {
        "mistral": True,
        "phi3": True,
        "olmo3": layer % 4 != 3,
        "gemma2": layer % 2 == 0,
        "gemma3_text": (layer + 1) % config.get("sliding_window_pattern", 6) != 0,
    }.get(kind, False)
    window = (config.get("sliding_window") or length) if slides else length
    positions = np.arange(length)
    if not (kind == "smollm3" and config["no_rope_layers"][layer] == 0):
        q, k = (rotated(y, config, positions, slides and kind in ("olmo3", "gemma3_text")) for y in (q, k))
    if kind == "hunyuan_v1_dense":
        q, k = (rms(y, config, tensors[name(f"{part}_layernorm.weight")]) for y, part in ((q, "query"), (k, "key")))
    if kind == "ministral3":
        q = q * (1 + 0.1 * np.log(1 + positions // 16))[:, None, None]
    k, v = (np.repeat(y, heads // keys, 2) for y in (k, v))
    scale = config.get("attention_multiplier", config.get("query_pre_attn_scalar", width) ** -0.5)
    scores = scale * np.einsum("bqhd,bkhd->bhqk", q, k)
    if cap := config.get("attn_logit_softcapping"):
        scores = cap * np.tanh(scores / cap)
    distance = positions[:, None] - positions
    scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("bhqk,bkhd->bqhd", shares / shares.sum(-1, keepdims=True), v)
    return out.reshape(*x.shape[:2], -1) @ tensors[name("o_proj.weight")].T


def feed_forward(x, config, tensors, layer):
    """The feed-forward layer of a block."""
    kind = config["model_type"]
    silu = lambda y: y / (1 + np.exp(-y))
    matrix = lambda part: tensors[f"model.layers.{layer}.{part}.weight"].T
    if kind == "mixtral":
        scores = x @ matrix("block_sparse_moe.gate")
        best = np.argsort(-scores, -1)[..., :2]
        shares = np.exp(np.take_along_axis(scores, best, -1))
        shares = shares / shares.sum(-1, keepdims=True)
        of_expert = lambda e, part: matrix(f"block_sparse_moe.experts.{e}.{part}")
        each = [silu(x @ of_expert(e, "w1")) * (x @ of_expert(e, "w3")) @ of_expert(e, "w2") for e in range(4)]
        return sum(np.where((best == e), shares, 0).sum(-1, keepdims=True) * out for e, out in enumerate(each))
    if kind == "arcee":
        return np.maximum(x @ matrix("mlp.up_proj"), 0) ** 2 @ matrix("mlp.down_proj")
    if kind in ("phi3", "glm4"):
        gate, up = np.split(x @ matrix("mlp.gate_up_proj"), 2, -1)
    else:
        gate, up = x @ matrix("mlp.gate_proj"), x @ matrix("mlp.up_proj")
    if kind.startswith("gemma"):
        gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    else:
        gate = silu(gate)
    return gate * up @ matrix("mlp.down_proj")


def rms(x, config, weight):
    """The norm of the last axis."""
    offset = 1.0 if config["model_type"].startswith("gemma") else 0.0
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * (offset + weight)


# Norms before and after attention, before and after the feed-forward layer.
USUAL = ("input_layernorm", None, "post_attention_layernorm", None)
GEMMA = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
OLMO = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
NORMS = {
    "glm4": ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    **{"gemma2": GEMMA, "gemma3_text": GEMMA, "olmo2": OLMO, "olmo3": OLMO},
}


def reference(config, tensors):
    """The logits."""
    kind = config["model_type"]
    tensors = {name: value.astype(np.float64) for name, value in tensors.items()}
    x = tensors["model.embed_tokens.weight"][TOKENS]
    x = x * (np.sqrt(x.shape[-1]) if kind.startswith("gemma") else config.get("embedding_multiplier", 1.0))
    normed = lambda y, layer, norm: (
        y if norm is None else rms(y, config, tensors[f"model.layers.{layer}.{norm}.weight"])
    )
    for layer in range(config["num_hidden_layers"]):
        before, after, before_mlp, after_mlp = NORMS.get(kind, USUAL)
        for part, first, last in ((attention, before, after), (feed_forward, before_mlp, after_mlp)):
            out = part(normed(x, layer, first), config, tensors, layer)
            x = x + config.get("residual_multiplier", 1.0) * normed(out, layer, last)
    x = rms(x, config, tensors["model.norm.weight"])
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    logits = x @ head.T / config.get("logits_scaling", 1.0)
    cap = config.get("final_logit_softcapping")
    return cap * np.tanh(logits / cap) if cap else logits


USUAL_RUN = ("Phi-4-mini", "Olmo-3-7B", "gemma-2-9b", "GLM-4-9B-0414", "granite-3.1-8b", "Mixtral-8x7B")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.more] * (n not in USUAL_RUN)) for n in PUBLISHED])
def test_a_family_computes_what_its_published_configuration_says(name, tmp_path):
    config, tokens = PUBLISHED[name], hax.named(jnp.array(TOKENS), ("batch", "position"))
    tensors = weights(config)
    folder = write(tmp_path / "folder", tensors, config)
    assert not check_folder(folder).errors
    with jax.default_matmul_precision("highest"):
        model = load(folder, dtype=jnp.float32)
        logits = model(tokens).rearrange(("batch", "position", "vocab")).array
    expected = reference(config, tensors)
    np.testing.assert_allclose(logits, expected, atol=2e-5 * np.abs(expected).max(), rtol=0)
    # Back with all its tensors, and read as the same model.
    export_model(model, tmp_path / "back", "BF16", dtype="float32")
    again = load(tmp_path / "back", dtype=jnp.float32)
    assert all(map(np.array_equal, jax.tree.leaves(model), jax.tree.leaves(again)))
    assert hugging_face_config(again) == hugging_face_config(model)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.more] * (n != "Phi-4-mini")) for n in PUBLISHED])
def test_a_family_trains_in_fp8_and_goes_to_engines(name, tmp_path):
    config, tokens = PUBLISHED[name], hax.named(jnp.array(TOKENS), ("batch", "position"))
    model = load(write(tmp_path / "folder", weights(config), config), dtype=jnp.float32)
    # Scaled by this step's amaxes: three steps are too few for those of a history.
    model = fp8_linear_layers(model, Fp8Config(recipe="current"))
    step = TrainStep(lambda model, tokens: (model(tokens) ** 2).mean().scalar(), optax.lion(1e-3))
    opt_state, losses = step.init(model), []
    for _ in range(3):
        model, opt_state, metrics = step(model, opt_state, tokens)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0]
    export_model(model, tmp_path / "fp8", "FP8_DYNAMIC")
    assert not check_folder(tmp_path / "fp8").errors


@pytest.mark.parametrize("name", PUBLISHED)
def test_check_knows_the_shapes_of_a_family(name, tmp_path):
    config = PUBLISHED[name]
    tensors = weights(config)
    of_block = [name for name in tensors if ".layers.1." in name and name.endswith("weight") and "moe.gate" not in name]
    for changed in (*of_block, "model.norm.weight", "model.embed_tokens.weight"):
        folder = write(tmp_path / "cut", tensors | {changed: tensors[changed][:-1]}, config)
        assert [error.tensor for error in check_folder(folder).errors] == [changed]
    for missing in (name for name in of_block if ".experts." not in name):
        folder = write(tmp_path / "cut", {name: x for name, x in tensors.items() if name != missing}, config)
        assert [error.tensor for error in check_folder(folder).errors] == [missing]


def test_a_row_that_lacks_a_part_is_an_error():
    row = FAMILIES["qwen3"]
    lacking = {part: name for part, name in row.names.items() if "key_norm" not in part}
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM needs names for \['blocks.\{i\}.attention.key_norm'\]"):
        dataclasses.replace(row, names=lacking)
    with pytest.raises(ValueError, match="unknown fields \\['query_norm'\\]"):
        dataclasses.replace(row, fixed={**row.fixed, "query_norm": True})
