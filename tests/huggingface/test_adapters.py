"""Low-rank adapters: what is trained, the gradients against NumPy, what is merged and what is written."""

import functools
import json
import re
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import float64, unchecked
from safetensors.numpy import load_file, save_file

import haliax_fp8 as fp8
from haliax_fp8._cli.main import main
from haliax_fp8.checkpoints import load_into, save
from haliax_fp8.folders.folder import TensorFolder
from haliax_fp8.huggingface import check_folder, export_adapter, export_model, import_adapter, import_model, load
from haliax_fp8.layers.frozen_array import FrozenArray
from haliax_fp8.layouts import named
from haliax_fp8.models import (
    LoraLinear,
    MixtureOfExperts,
    Transformer,
    TransformerConfig,
    add_lora,
    merge_lora,
    with_dropout_keys,
)
from haliax_fp8.serving import quantize_for_inference


KEY = jax.random.key(0)
CONFIG = TransformerConfig(layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, mlp=128, vocab=64, unroll=1)
TOKENS = hax.named(jax.random.randint(KEY, (2, 8), 0, 64), ("batch", "position"))
ADAPTED = ("query", "down")


def loss_fn(model, tokens=TOKENS, key=None):
    model = model if key is None else with_dropout_keys(model, key)
    # A method and a field of the model.
    assert model.config.hidden == 128
    logits = model.logits(model.activations(tokens)).array
    return -jax.nn.log_softmax(logits, axis=-1)[..., 0].mean()


@functools.cache
def base(kind):
    plain = Transformer.init(CONFIG, key=KEY)
    if kind == "plain":
        return plain
    return fp8.calibrate(fp8.fp8_linear_layers(plain, exclude="head", amax_history_length=4), loss_fn, [()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("folder") / "fp8"
    export_model(base("plain"), path, "FP8_DYNAMIC")
    return path


def model_of(kind, folder):
    return load(folder, weights="frozen", dtype="float32") if kind == "frozen" else base(kind)


def with_noise(model):
    """With a `B` that is not zero."""
    noise = lambda x, i: 0.1 * jax.random.normal(jax.random.fold_in(KEY, i), x.shape, x.dtype)
    is_lora = lambda node: isinstance(node, LoraLinear)

    def changed(i, node):
        if not is_lora(node):
            return node
        return eqx.tree_at(lambda n: n.B, node, jax.tree.map(lambda w: noise(w, i), node.B))

    leaves, structure = jax.tree.flatten(model, is_leaf=is_lora)
    return jax.tree.unflatten(structure, [changed(i, node) for i, node in enumerate(leaves)])


class Two(eqx.Module):
    """Two layers of either library, the second stacked or an ensemble of one."""

    first: Any
    second: Any

    def __call__(self, x):
        if isinstance(x, hax.NamedArray):
            return self.second(hax.tanh(self.first(x)))
        return jax.vmap(self.second)(jnp.tanh(jax.vmap(self.first)(x)))


def two(library):
    keys = jax.random.split(KEY)
    if library == "equinox":
        return Two(eqx.nn.Linear(64, 48, key=keys[0]), eqx.nn.Linear(48, 32, key=keys[1]))
    In, Mid = hax.Axis("in", 64), hax.make_axes(head=3, width=16)
    return Two(hnn.Linear.init(In, Mid, key=keys[0]), hnn.Linear.init(Mid, hax.Axis("out", 32), key=keys[1]))


@pytest.mark.parametrize("library", ["equinox", "haliax"])
def test_gradients_through_fp8_weights_are_exact(library, tmp_path):
    """Against the chain rule in float64 NumPy, with data * scale from the file."""
    export_model(two(library), tmp_path / "two", "FP8_DYNAMIC", dtype=None)
    frozen = import_model(tmp_path / "two", two(library), weights="frozen")
    model = with_noise(add_lora(frozen, rank=4, alpha=6, key=jax.random.key(1)))
    x = jax.random.normal(KEY, (8, 64))
    named_x = hax.named(x, ("batch", "in")) if library == "haliax" else x
    square = lambda y: jnp.square(y.array if library == "haliax" else y).sum() / 2
    gradient = eqx.filter_grad(lambda m: square(m(named_x)))(model)
    stored = TensorFolder.open(tmp_path / "two")
    W = [float64(stored[f"{n}.weight"]) * float64(stored[f"{n}.weight_scale"]) for n in ("first", "second")]
    b = [float64(stored[f"{n}.bias"]).reshape(-1) for n in ("first", "second")]
    matrices = lambda tree: [
        [float64(half.weight).reshape((4, -1) if half is layer.A else (-1, 4)) for half in (layer.A, layer.B)]
        for layer in (tree.adapted.first, tree.adapted.second)
    ]
    (A1, B1), (A2, B2) = matrices(model)
    x = float64(x)
    hidden = np.tanh(x @ (W[0] + 1.5 * B1 @ A1).T + b[0])
    out = hidden @ (W[1] + 1.5 * B2 @ A2).T + b[1]
    g = (out @ (W[1] + 1.5 * B2 @ A2)) * (1 - hidden**2)
    of_first, of_second = 1.5 * g.T @ x, 1.5 * out.T @ hidden
    expected = (B1.T @ of_first, of_first @ A1.T), (B2.T @ of_second, of_second @ A2.T)
    for ours, theirs in zip(jax.tree.leaves(matrices(gradient)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())
    assert len(jax.tree.leaves(eqx.filter(gradient, eqx.is_inexact_array))) == 4


@pytest.mark.parametrize("kind", ["frozen", "plain", "converted"])
def test_both_loops_train_adapters_alone(kind, folder, standard_promotion):
    optimizer = optax.adamw(0.01, weight_decay=0.1)
    start = add_lora(model_of(kind, folder), rank=4, targets=ADAPTED, key=jax.random.key(1))
    assert loss_fn(start) == loss_fn(model_of(kind, folder))
    expected = {(2, 4, 128), (2, 2, 2, 32, 4), (2, 128, 4)}
    assert {x.shape for x in jax.tree.leaves(fp8.trainable(start))} == expected

    step = fp8.TrainStep(loss_fn, optimizer)
    by_step, state = start, step.init(start)
    assert {x.shape for x in jax.tree.leaves(state) if x.ndim} == expected

    # The loop of the training guide.
    @eqx.filter_jit
    def guide(model, opt_state):
        grads = eqx.filter_grad(loss_fn)(model)
        overwrites, grads = fp8.partition_for_grad_overwrite(grads)
        _, params = fp8.partition_for_grad_overwrite(model)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(params, eqx.is_inexact_array))
        return fp8.apply_updates(model, updates, overwrites), opt_state

    _, params = fp8.partition_for_grad_overwrite(start)
    by_guide, opt_state = start, optimizer.init(eqx.filter(params, eqx.is_inexact_array))
    for _ in range(3):
        by_step, state, _ = step(by_step, state, TOKENS)
        by_guide, opt_state = guide(by_guide, opt_state)
    assert loss_fn(by_step) < loss_fn(start) - 0.1
    for ours, theirs, old in zip(*map(jax.tree.leaves, (by_step, by_guide, start)), strict=True):
        if not eqx.is_inexact_array(ours):
            assert np.array_equal(ours, old) and np.array_equal(theirs, old)
        elif ours.shape in expected:
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
            assert not np.array_equal(ours, old)
        else:
            # FP8 state, which learns the amaxes of the steps.
            assert kind == "converted" and not np.array_equal(ours, old)


@pytest.mark.parametrize("kind", ["frozen", "plain"])
def test_merged_weights_compute_the_same(kind, folder):
    model = with_noise(add_lora(model_of(kind, folder), rank=4, alpha=8, key=jax.random.key(1)))
    merged = merge_lora(model)
    assert type(merged) is Transformer
    np.testing.assert_allclose(merged(TOKENS).array, model(TOKENS).array, atol=1e-4)
    assert np.abs(merged(TOKENS).array - model_of(kind, folder)(TOKENS).array).max() > 0.1
    assert {x.dtype for x in jax.tree.leaves(merged)} == {np.dtype("float32")}
    assert merge_lora(model, dtype="bfloat16").blocks.stacked.mlp.up.weight.dtype == (
        jnp.bfloat16 if kind == "frozen" else jnp.float32
    )


def test_adapters_are_merged_in_float32():
    """Whatever their own dtype is: that of a step which casts its parameters."""
    layer = eqx.nn.Linear(8, 4, key=KEY)
    model = fp8.cast_params(with_noise(add_lora(layer, rank=2, alpha=3, key=KEY)), jnp.bfloat16)
    expected = float64(layer.weight) + 1.5 * float64(model.adapted.B.weight) @ float64(model.adapted.A.weight)
    merged = merge_lora(model)
    assert merged.weight.dtype == jnp.float32
    np.testing.assert_allclose(merged.weight, expected, atol=1e-6)


@pytest.mark.more
def test_merges_what_is_not_a_plain_matrix():
    """An ensemble, muP's factor, and axes in another order."""
    In, Out = hax.Axis("in", 8), hax.Axis("out", 4)
    mup = hnn.Linear.init(In, Out, key=KEY, out_first=False, reparam_cls=hnn.Linear.output_reparam())
    ensemble = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 4, key=key))(jax.random.split(KEY, 3))
    named = eqx.filter_vmap(lambda key: hnn.Linear.init(In, Out, key=key))(jax.random.split(KEY, 3))
    x = jax.random.normal(KEY, (8,))
    calls = (
        (mup, lambda layer: layer(hax.named(x, In)).array),
        (ensemble, eqx.filter_vmap(lambda layer: layer(x))),
        (named, eqx.filter_vmap(lambda layer: layer(hax.named(x, In)).array)),
    )
    for layer, call in calls:
        model = with_noise(add_lora(layer, rank=2, key=KEY))
        merged = merge_lora(model)
        assert type(merged) is type(layer)
        np.testing.assert_allclose(call(merged), call(model), atol=1e-5)
        assert np.abs(call(merged) - call(layer)).max() > 1e-3


def test_dropout_needs_keys_in_training_alone():
    model = with_noise(add_lora(base("plain"), rank=4, targets=ADAPTED, dropout=0.5, key=KEY))
    with pytest.raises(Exception, match="requires a key"):
        loss_fn(model)
    losses = [float(loss_fn(model, TOKENS, jax.random.key(seed))) for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    without = with_noise(add_lora(base("plain"), rank=4, targets=ADAPTED, key=KEY))
    assert loss_fn(eqx.nn.inference_mode(model)) == loss_fn(without)
    keys = jax.random.key_data(with_dropout_keys(model, KEY).adapted.blocks.stacked.attention.query.key)
    assert keys.shape[0] == 2 and not np.array_equal(*keys)
    step = fp8.TrainStep(loss_fn, optax.sgd(0.1), microbatches=2)
    trained, _, _ = step(model, step.init(model), TOKENS, loss_key=KEY)
    assert jax.tree.structure(trained) == jax.tree.structure(model)


@pytest.mark.more
def test_experts_and_routers_have_no_adapters():
    config = TransformerConfig(layers=1, feed_forward=functools.partial(MixtureOfExperts.init, experts=4, chosen=2))
    plain = Transformer.init(config, key=KEY)
    model = add_lora(plain, rank=2, key=KEY)
    assert len([x for x in jax.tree.leaves(fp8.trainable(model))]) == 8
    assert np.array_equal(model(TOKENS).array, plain(TOKENS).array)
    # A router that is named, whose axes the model reads.
    assert add_lora(plain, rank=2, targets="router", key=KEY)(TOKENS).array.shape == (2, 8, 256)
    with pytest.raises(ValueError, match=r"targets selects blocks.stacked.mlp.up, a MoELinear"):
        add_lora(plain, rank=2, targets="up", key=KEY)


@pytest.mark.more
def test_optimizers_hold_moments_of_adapters_alone(standard_promotion):
    """In the program: what AdamW takes more than plain descent is two numbers for each of the adapters'."""

    def taken(optimizer):
        step = fp8.TrainStep(loss_fn, optimizer)
        model = add_lora(base("plain"), rank=4, key=KEY)
        run = eqx.filter_jit(lambda model, state, tokens: step(model, state, tokens))
        memory = run.lower(model, step.init(model), TOKENS).compile().compiled.memory_analysis()
        adapters = sum(x.size for x in jax.tree.leaves(fp8.trainable(model)))
        return memory.argument_size_in_bytes, adapters

    (adam, adapters), (descent, _) = taken(optax.adamw(0.1)), taken(optax.sgd(0.1))
    # And the number of steps.
    assert adam - descent == 2 * 4 * adapters + 4


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 0},
        {"rank": 2.0},
        {"alpha": -1.0},
        {"dropout": 1.0},
        {"targets": "querry"},
        {"targets": []},
        {"targets": "embedding"},
        {"model": [1.0]},
        {"key": 0},
    ],
    ids=str,
)
def test_mistakes(changes):
    (name,) = changes
    arguments: Any = {"model": base("plain"), "rank": 4, "key": KEY} | changes
    with unchecked(), pytest.raises(ValueError, match=name) as caught:
        add_lora(arguments.pop("model"), **arguments)
    if changes == {"targets": "querry"}:
        assert "blocks.stacked.attention.query" in str(caught.value)


def test_mistakes_with_models(folder, tmp_path):
    model = add_lora(base("plain"), rank=2, key=KEY)
    with pytest.raises(ValueError, match=r"adapters already; merge_lora"):
        add_lora(model, rank=2, key=KEY)
    with pytest.raises(ValueError, match=r"weights='frozen'"):
        add_lora(load(folder, weights="served"), rank=2, key=KEY)
    for call in (merge_lora, lambda m: with_dropout_keys(m, KEY), lambda m: export_adapter(m, tmp_path / "a")):
        with unchecked(), pytest.raises(ValueError, match="without adapters"):
            call(base("plain"))
    with unchecked(), pytest.raises(ValueError, match="key=0 is not a single random key"):
        with_dropout_keys(model, 0)
    with unchecked(), pytest.raises(ValueError, match="base=None is not the name of a folder"):
        export_adapter(model, tmp_path / "a", base=None)
    for call in (lambda: export_model(model, tmp_path / "b", "BF16"), lambda: quantize_for_inference(model, "dynamic")):
        with pytest.raises(ValueError, match="merge_lora"):
            call()


def test_what_peft_reads(tmp_path):
    model = with_noise(add_lora(base("plain"), rank=4, alpha=8, dropout=0.1, targets=ADAPTED, key=KEY))
    export_adapter(model, tmp_path / "adapter", base="org/base")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    layers = [f"model.layers.{i}.{name}" for name in ("self_attn.q_proj", "mlp.down_proj") for i in range(2)]
    assert config == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "org/base",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "target_modules": layers,
        "bias": "none",
        "inference_mode": True,
    }
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert tensors.keys() == {f"base_model.model.{layer}.lora_{half}.weight" for layer in layers for half in "AB"}
    query = model.adapted.blocks.stacked.attention.query
    prefix = "base_model.model.model.layers.1.self_attn.q_proj"
    np.testing.assert_array_equal(tensors[f"{prefix}.lora_A.weight"], query.A.weight.array[1])
    np.testing.assert_array_equal(tensors[f"{prefix}.lora_B.weight"], query.B.weight.array[1].reshape(128, 4))


@pytest.mark.parametrize("kind", ["plain", "frozen"])
def test_adapters_come_back_bit_for_bit(kind, folder, tmp_path):
    model = with_noise(add_lora(model_of(kind, folder), rank=4, alpha=8, dropout=0.1, targets=ADAPTED, key=KEY))
    export_adapter(model, tmp_path / "adapter", base="org/base")
    imported = import_adapter(tmp_path / "adapter", model_of(kind, folder))
    assert eqx.tree_equal(imported, model)
    report = check_folder(tmp_path / "adapter")
    assert report.is_sound and "adapter: adapter of org/base, rank 4, 8 tensors; sound" in str(report)
    for call in (load, lambda path: import_model(path, base("plain"))):
        with pytest.raises(
            ValueError, match=r"this is an adapter and not a model; .*import_adapter\('.*adapter', base\)"
        ):
            call(tmp_path / "adapter")


@pytest.mark.more
@pytest.mark.parametrize("kind", ["plain", "frozen"])
def test_a_resumed_run_has_the_same_bits(kind, folder, tmp_path, standard_promotion):
    """From the exported adapter, the base and the optimizer's state; two steps before it, two after."""
    step = fp8.TrainStep(loss_fn, optax.adamw(0.01))
    trained = add_lora(model_of(kind, folder), rank=4, alpha=8, targets=ADAPTED, key=KEY)
    state = step.init(trained)
    for _ in range(2):
        trained, state, _ = step(trained, state)
    export_adapter(trained, tmp_path / "adapter")
    save(tmp_path / "state", state)
    resumed = import_adapter(tmp_path / "adapter", model_of(kind, folder))
    resumed_state, _ = load_into(step.init(resumed), tmp_path / "state", strict=True)
    for _ in range(2):
        trained, state, _ = step(trained, state)
        resumed, resumed_state, _ = step(resumed, resumed_state)
    assert eqx.tree_equal((resumed, resumed_state), (trained, state))


@pytest.mark.more
def test_folders_are_merged_on_the_command_line(tmp_path):
    """As in a program, byte for byte."""
    published, adapter = tmp_path / "base", tmp_path / "adapter"
    export_model(Transformer.init(CONFIG, key=jax.random.key(0)), published, "BF16")
    adapted = with_noise(add_lora(load(published), rank=4, key=jax.random.key(1)))
    export_adapter(adapted, adapter)
    export_model(merge_lora(adapted), tmp_path / "expected", "FP8_DYNAMIC", like=published)
    new = tmp_path / "new"
    assert (
        main(["checkpoint", "merge", *map(str, (published, adapter)), "--to", "FP8_DYNAMIC", "--output", str(new)]) == 0
    )
    for file in ("model.safetensors", "config.json"):
        assert (new / file).read_bytes() == (tmp_path / "expected" / file).read_bytes()


def test_adapters_that_are_broken_or_do_not_fit(tmp_path):
    model = add_lora(base("plain"), rank=4, targets=ADAPTED, key=KEY)
    export_adapter(model, tmp_path / "good")
    tensors = load_file(tmp_path / "good" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "good" / "adapter_config.json").read_text())
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    fewer = {key: x for key, x in tensors.items() if key != name}
    other = {key.replace("layers.1.mlp.down", "layers.7.mlp.down"): x for key, x in tensors.items()}
    of_one = {key: x for key, x in tensors.items() if "layers.1." not in key}
    wide = tensors | {name: np.zeros((64, 4), np.float32)}
    for i, (arrays, options, says, is_seen) in enumerate(
        (
            (fewer, {}, "layers.1.mlp.down_proj.lora_B.weight: it is missing", True),
            (tensors | {name: tensors[name] * np.nan}, {}, "512 of its elements are infinite or NaN", True),
            (tensors, {"r": 8}, r"r=8: it must be \[8, in\]", True),
            (tensors, {"use_dora": True}, "use_dora: it is True, which is not supported", True),
            (tensors, {"peft_type": "IA3"}, "peft_type: it is 'IA3'", True),
            (tensors, {"lora_dropout": 1.5}, "lora_dropout: it is 1.5", True),
            (other, {}, "adapter for model.layers.7.mlp.down_proj, which base lacks; .*layers.1.mlp.down_proj", False),
            (of_one, {}, "no adapter for model.layers.1.*merge it with PEFT", False),
            (wide, {}, r"it has shape \(64, 4\), and base needs \(128, 4\)", False),
        )
    ):
        path = tmp_path / str(i)
        path.mkdir()
        save_file(arrays, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(config | options))
        report = check_folder(path)
        assert report.is_sound != is_seen and (not is_seen or re.search(says, str(report.errors[0])))
        if "NaN" not in says:
            with pytest.raises(ValueError, match=says):
                import_adapter(path, base("plain"))


@pytest.mark.more
@pytest.mark.parametrize("layout", [*(name for name in named if name != "NVFP4_DYNAMIC"), "BF16"])
def test_merged_models_are_exported_in_every_layout(layout, tmp_path):
    """Those of a model that was trained in FP8, whose layouts with static inputs have its scales."""
    merged = merge_lora(with_noise(add_lora(base("converted"), rank=4, targets=ADAPTED, key=KEY)))
    export_model(merged, tmp_path / layout, layout)
    assert check_folder(tmp_path / layout).is_sound
    loaded, weight = (float64(m.blocks.stacked.mlp.down.weight) for m in (load(tmp_path / layout), merged))
    # Rounding moves a normal number by half a unit of its last place at most.
    error = 2.0**-8 if layout == "BF16" else named[layout].format.relative_error
    assert np.linalg.norm(loaded - weight) < error * np.linalg.norm(weight)


class Tied(eqx.Module):
    """A linear layer that has its weight from an embedding, or the reverse, and one of its own."""

    shared: eqx.nn.Shared
    up: eqx.nn.Linear

    def __call__(self, x):
        table, last = self.shared()
        return last(self.up(table(x)))


@pytest.mark.parametrize("gives", [False, True])
def test_layers_that_share_their_weight_have_no_adapters(gives):
    embedding, last, up = (f(8, 8, key=KEY) for f in (eqx.nn.Embedding, eqx.nn.Linear, eqx.nn.Linear))
    ways = (lambda pair: pair[1].weight, lambda pair: pair[0].weight)
    model = Tied(eqx.nn.Shared((embedding, last), *(ways[::-1] if gives else ways)), up)
    adapted = add_lora(model, rank=2, key=KEY)
    assert len(jax.tree.leaves(fp8.trainable(adapted))) == 2
    np.testing.assert_array_equal(adapted(3), model(3))
    assert eqx.tree_equal(merge_lora(adapted)(3), model(3))
    with pytest.raises(ValueError, match=r"targets selects shared\S*, whose weight eqx.nn.Shared shares"):
        add_lora(model, rank=2, targets=lambda path, layer: "shared" in path, key=KEY)


@pytest.mark.parametrize("library", ["equinox", "haliax"])
def test_frozen_kernels_are_quantized_once(library, standard_promotion):
    """As in `test_kernel_quantization`, with the numbers of quantizing them in each microbatch."""
    model = add_lora(fp8.fp8_linear_layers(two(library), recipe="current"), rank=4, key=KEY)
    x = jax.random.normal(KEY, (8, 64))
    x = hax.named(x, ("batch", "in")) if library == "haliax" else x
    square = lambda model, x: jnp.square(getattr(y := model(x), "array", y)).mean()
    trained = []
    for choice in ("in_each_microbatch", "once"):
        step = fp8.TrainStep(square, optax.sgd(0.1), microbatches=2, quantize_kernels=choice)
        trained.append(step(model, step.init(model), x)[0])
    assert eqx.tree_equal(*trained) and not eqx.tree_equal(trained[0], model)


def test_frozen_arrays_keep_every_bit():
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.complex64):
        x = jnp.array([1.5, -0.0, jnp.nan, 3.0], dtype)
        frozen = FrozenArray.of(x)
        assert frozen.array.dtype == dtype and np.asarray(frozen.array).tobytes() == np.asarray(x).tobytes()
        assert frozen.shape == (4,) and not jax.tree.leaves(eqx.filter(frozen, eqx.is_inexact_array))
