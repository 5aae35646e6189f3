"""Checkpoints of plain and converted models, loaded into one another through every kind of file."""

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import pathlib
import zlib

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import haliax.state_dict as hsd
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from folders import file_of, header_of
from full_disk import full_disk
from helpers import unchecked
from jax.sharding import NamedSharding, PartitionSpec as P

from haliax_fp8 import DelayedScaling, Fp8DotGeneral, Recipe, TrainStep, calibrate, fp8_linear_layers, training
from haliax_fp8._state.op_state import OpState
from haliax_fp8._state.table import guarded
from haliax_fp8.checkpoints import load_into, save
from haliax_fp8.checkpoints.file import open_file
from haliax_fp8.checkpoints.names import is_saved, leaves_of
from haliax_fp8.experimental.attention import Fp8Attention
from haliax_fp8.folders.header import read_header
from haliax_fp8.huggingface import export_model, import_model
from haliax_fp8.recipes import (
    E2M1,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    CurrentScaling,
    HadamardScaling,
    MostRecent,
    Quantization,
    StaticScaling,
    named,
)
from haliax_fp8.serving import freeze, quantize_for_inference


Embed, Heads, Size, Key = hax.make_axes(embed=8, heads=2, size=3, key=4)


class Block(eqx.Module):
    q: hnn.Linear
    k: hnn.Linear
    up: eqx.nn.Linear


@functools.cache
def block(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k = hnn.Linear.init(Embed, (Heads, Size), key=keys[0]), hnn.Linear.init(Embed, Key, key=keys[1])
    up = eqx.nn.Linear(8, 4, key=keys[2])
    return Block(q, k, up)


RECIPES = {
    "delayed 8": DelayedScaling(amax_history_length=8),
    "delayed 64": DelayedScaling(amax_history_length=64),
    "current": "current",
    "static": StaticScaling(0.5),
}
MODELS = ("plain", *RECIPES)


def made(name, seed):
    """A model; its histories as after many steps, a different amax in each."""
    model = block(seed)
    if name == "plain":
        return model
    return trained(fp8_linear_layers(model, recipe=RECIPES[name]), np.random.default_rng(seed))


def trained(model, random):
    def state(node):
        if not isinstance(node, OpState) or not isinstance(node.scalings[0], DelayedScaling):
            return node
        history = np.exp(random.normal(size=node.array[..., 1:-1].shape)).astype(np.float32)
        # In the order of Flax's arithmetic, which the last bit depends on.
        scale = np.float32(1) / (np.float32(node.limits)[:, None] / history.max(-1, keepdims=True))
        return node.with_array(guarded(jnp.concatenate([scale, history], -1)))

    return jax.tree.map(state, model, is_leaf=lambda node: isinstance(node, OpState))


def arrays_of(model):
    return {leaf.name: np.asarray(leaf.value) for leaf in leaves_of(model) if is_saved(leaf.value)}


def through_save(model, path):
    save(path / "model.safetensors", model)
    return path / "model.safetensors"


def through_safetensors(model, path):
    safetensors.numpy.save_file(arrays_of(model), path / "model.safetensors")
    return path / "model.safetensors"


def through_state_dict(model, path):
    arrays = {name: np.asarray(array) for name, array in hsd.to_state_dict(model).items()}
    hsd.save_state_dict(arrays, path / "model.safetensors")
    return path / "model.safetensors"


def through_orbax(model, path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "orbax", eqx.filter(model, eqx.is_array))
    return path / "orbax"


KINDS = {f.__name__: f for f in (through_save, through_safetensors, through_state_dict, through_orbax)}


def weights(model):
    return {name: array for name, array in arrays_of(model).items() if ".state" not in name}


def tables(model):
    return {leaf.name: np.asarray(leaf.value) for leaf in leaves_of(model) if leaf.state is not None}


@pytest.mark.more
@pytest.mark.parametrize("kind", KINDS)
def test_every_pair(kind, tmp_path: pathlib.Path):
    saved = {name: made(name, seed=1) for name in MODELS}
    targets = {name: made(name, seed=2) for name in MODELS}
    for old, model in saved.items():
        (tmp_path / old).mkdir()
        path = KINDS[kind](model, tmp_path / old)
        for new, into in targets.items():
            loaded, report = load_into(into, path)
            assert jax.tree.structure(loaded) == jax.tree.structure(into)
            want, got = weights(model), weights(loaded)
            assert want.keys() == got.keys()
            for name in want:
                np.testing.assert_array_equal(got[name], want[name], err_msg=f"{old} -> {new}: {name}")
            check_states(old, new, tables(model), tables(loaded), report, with_states=kind != "through_state_dict")
            # Layers without state on either side, in FP8 on one.
            other = kind == "through_save" and {old, new} == {"plain", "current"}
            ops = [f"{name}.dot_general" for name in ("q", "k", "up")] if other else []
            assert sorted([*report.kept, *report.changed, *report.fresh]) == sorted([*arrays_of(into), *ops])


def check_states(old, new, stored, loaded, report, *, with_states):
    assert all(name in report.fresh for name in loaded.keys() - stored.keys())
    assert set(report.unused) == (set(stored) - set(loaded) if with_states else set())
    for name, table in loaded.items():
        source = stored.get(name) if with_states else None
        histories = "static" not in (old, new)
        if source is not None and source.shape == table.shape:
            assert name in report.kept
            np.testing.assert_array_equal(table, source)
        elif source is not None and histories:
            assert name in report.changed
            # The scale to the last bit, the newest amax, and the maximum, of which the scale was made.
            np.testing.assert_array_equal(table[:, :2], source[:, :2])
            np.testing.assert_array_equal(table[:, -1], source[:, -1])
            np.testing.assert_array_equal(table[:, 1:-1].max(-1), source[:, 1:-1].max(-1))
            both = min(table.shape[1], source.shape[1]) - 4
            np.testing.assert_array_equal(table[:, -1 - both : -1], source[:, -1 - both : -1])
        else:
            assert name in report.fresh
            first = 0.5 if new == "static" else 1.0
            np.testing.assert_array_equal(table[:, 0], np.full(3, first))
            np.testing.assert_array_equal(table[:, 1:-1], np.zeros_like(table[:, 1:-1]))


# --- Stacks, state dicts, dtypes --------------------------------------------------------------------------------------


Layers = hax.Axis("layers", 3)


class Body(eqx.Module):
    """A layer whose fields have other names in state dicts."""

    up: hnn.Linear

    def _state_dict_key_map(self):
        return {"up": "up_proj"}

    @staticmethod
    def init(key):
        return Body(hnn.Linear.init(Embed, (Heads, Size), key=key))


class Model(hsd.ModuleWithStateDictSerialization):
    blocks: hnn.Stacked[Body]

    def _state_dict_key_map(self):
        return {"blocks": "h"}


@functools.cache
def stacked(seed):
    keys = jax.random.split(jax.random.key(seed), Layers.size)
    return Model(hnn.Stacked.init(Layers, Body)(keys))


@pytest.mark.parametrize("flattened", [False, True])
def test_state_dict_of_a_stack(flattened, tmp_path):
    """Keys are renamed, and each layer has its own; other libraries' files have one axis for several."""
    model, into = stacked(1), fp8_linear_layers(stacked(2), recipe=DelayedScaling(amax_history_length=4))
    state_dict = hsd.to_torch_compatible_state_dict(model) if flattened else hsd.to_state_dict(model)
    state_dict = {name: np.asarray(array) for name, array in state_dict.items()}
    assert state_dict["h.2.up_proj.weight"].shape == ((6, 8) if flattened else (2, 3, 8))
    hsd.save_state_dict(state_dict, tmp_path / "model.safetensors")
    for source in (state_dict, tmp_path / "model.safetensors"):
        loaded, report = load_into(into, source)
        assert set(report.kept) == {"blocks.stacked.up.weight", "blocks.stacked.up.bias"} and not report.unused
        np.testing.assert_array_equal(loaded.blocks.stacked.up.weight.array, model.blocks.stacked.up.weight.array)
    missing = {name: array for name, array in state_dict.items() if name != "h.1.up_proj.bias"}
    loaded, report = load_into(into, missing, allow_fresh_weights=True)
    assert "blocks.stacked.up.bias" in report.fresh and report.unused == ("h.0.up_proj.bias", "h.2.up_proj.bias")


def test_two_keys_of_one_leaf_are_refused(tmp_path):
    """One would overwrite the other: a key of the state dict beside the name of the leaf, or of the stack."""
    into = stacked(2)
    state_dict = {name: np.asarray(array) for name, array in hsd.to_state_dict(stacked(1)).items()}
    whole = "blocks.stacked.up.bias"
    twice = state_dict | {whole: np.zeros((3, 2, 3), np.float32)}
    pattern = rf"two keys for {whole}, '{whole}' and 'h.0.up_proj.bias'; remove one"
    safetensors.numpy.save_file(twice, tmp_path / "twice.safetensors")
    for source in (twice, dict(reversed(twice.items())), tmp_path / "twice.safetensors"):
        with pytest.raises(ValueError, match=pattern):
            load_into(into, source)
    body, zeros = Body.init(jax.random.key(0)), {"weight": np.zeros((2, 3, 8)), "bias": np.zeros((2, 3))}
    with pytest.raises(ValueError, match=r"two keys for up.bias.*remove one"):
        load_into(body, {f"up_proj.{field}": x for field, x in zeros.items()} | {"up.bias": zeros["bias"]})
    # Nothing is renamed where the names are those of leaves.
    assert load_into(into, arrays_of(into) | {"h.0.up_proj.bias": state_dict["h.0.up_proj.bias"]})[1].unused
    # Haliax writes no zeros in front: it is another key.
    loaded, report = load_into(into, state_dict | {"h.00.up_proj.bias": np.zeros((2, 3), np.float32)})
    assert len(report.unused) == 1
    np.testing.assert_array_equal(loaded.blocks.stacked.up.bias.array[0], state_dict["h.0.up_proj.bias"])


def test_histories_of_a_stack_are_cut_layer_by_layer():
    model = fp8_linear_layers(stacked(1), recipe=DelayedScaling(amax_history_length=6))
    model = trained(model, np.random.default_rng(0))
    short = fp8_linear_layers(stacked(1), recipe=DelayedScaling(amax_history_length=2, update_interval=4))
    loaded, report = load_into(short, arrays_of(model))
    name = "blocks.stacked.up.dot_general.state.table"
    assert "cut to" in report.changed[name]
    old, new = arrays_of(model)[name], arrays_of(loaded)[name]
    # The source is taken to count steps as well, so its last column is not an amax; the count begins anew.
    np.testing.assert_array_equal(new[..., 1], old[..., 1])
    np.testing.assert_array_equal(new[..., 2], old[..., 2:6].max(-1))
    np.testing.assert_array_equal(new[..., 3], np.zeros((3, 3)))


def test_dtypes_are_the_models_and_fp8_weights_are_refused():
    model = block(1)
    half = {name: array.astype(jnp.bfloat16) for name, array in arrays_of(model).items()}
    loaded, report = load_into(block(2), half)
    assert report.changed["up.weight"] == "bfloat16 in the checkpoint, cast to float32"
    np.testing.assert_array_equal(loaded.up.weight, half["up.weight"].astype(np.float32))
    with pytest.raises(ValueError, match="up.weight is stored in float8_e4m3fn: FP8"):
        load_into(model, half | {"up.weight": half["up.weight"].astype(jnp.float8_e4m3fn)})
    with pytest.raises(ValueError, match="does not fit the model: up.weight: int32 in"):
        load_into(model, half | {"up.weight": np.zeros((4, 8), np.int32)})


def test_state_that_an_optimizer_moved_starts_fresh():
    arrays = arrays_of(made("delayed 8", 1))
    arrays["up.dot_general.state.table"] = arrays["up.dot_general.state.table"] * np.float32(0.9)
    loaded, report = load_into(made("delayed 8", 2), arrays)
    assert "other than their own update" in report.fresh["up.dot_general.state.table"]
    np.testing.assert_array_equal(loaded.up.dot_general.scale("kernel"), 1.0)


# --- Devices ----------------------------------------------------------------------------------------------------------


def test_arrays_land_where_the_models_are(tmp_path):
    """With arrays and without; from files that Equinox alone would put on the first device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    model, put = made("delayed 8", 1), lambda x: jax.device_put(x, rows if x.shape == (4, 8) else everywhere)
    concrete = jax.tree.map(lambda x: put(x) if eqx.is_array(x) else x, made("delayed 64", 2))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if eqx.is_array(x) else x, concrete
    )
    for through in (through_save, through_safetensors, through_orbax):
        path = through(model, tmp_path)
        for into in (concrete, abstract):
            loaded, report = load_into(into, path)
            assert loaded.up.weight.sharding == rows and len(loaded.up.weight.sharding.device_set) == 4
            assert loaded.up.dot_general.state.table.array.sharding == everywhere
            np.testing.assert_array_equal(loaded.up.weight, model.up.weight)
            assert len(report.kept) == 6 and len(report.changed) == 3


def test_an_abstract_model_needs_every_leaf_but_state():
    abstract = _abstract(made("delayed 8", 1))
    arrays = weights(made("delayed 8", 1))
    loaded, _ = load_into(abstract, arrays)
    np.testing.assert_array_equal(loaded.up.dot_general.scale("input"), 1.0)
    del arrays["q.bias"]
    with pytest.raises(ValueError, match="lacks leaves .* q.bias: not in the checkpoint"):
        load_into(abstract, arrays)


def _abstract(model):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x, model)


# --- Strict, errors ---------------------------------------------------------------------------------------------------


def test_strict_refuses_anything_but_the_same_model(tmp_path):
    path = through_save(made("delayed 8", 1), tmp_path)
    assert load_into(made("delayed 8", 2), path, strict=True)[1].is_complete
    for other, what in {
        "delayed 64": "up.dot_general.state.table changed: the history of 8 steps was padded to 64",
        "plain": "up.dot_general.state.table unused",
        "static": "up.dot_general.state.table fresh: the state in the checkpoint belongs to another scaling",
    }.items():
        with pytest.raises(ValueError, match="strict=True.*Convert the model with the recipe") as raised:
            load_into(made(other, 2), path, strict=True)
        assert what in str(raised.value)


def test_strict_says_where_only_the_state_of_the_optimizer_differs(tmp_path):
    """The model is as it was saved, and so is nothing to be done about it."""
    model = made("delayed 8", 1)
    state = lambda optimizer: optimizer.init(
        eqx.filter(eqx.filter(model, lambda x: x is model.up.weight), eqx.is_array)
    )
    adam = optax.adam(1e-3)
    save(tmp_path / "run.safetensors", (model, state(adam)))
    others = {
        optax.sgd(1e-3, 0.9): (
            r"1.0.trace.up.weight fresh: not in the checkpoint, float32\(4, 8\) here; "
            r"1.0.count unused: the model has no such leaf, int32\(\) in the checkpoint"
        ),
        optax.adam(1e-3, mu_dtype="bfloat16"): "1.0.mu.up.weight changed: float32 in the checkpoint, cast to bfloat16",
        optax.chain(optax.identity(), adam): r"1.1.0.count fresh: not in the checkpoint, int32\(\) here; 1.1.0.mu",
    }
    start = "the optimizer's state, 1 in the tree, does not match the saved one; everything else does"
    for optimizer, what in others.items():
        remedy = r"Make it with the same optimizer and options as the saved one"
        with pytest.raises(ValueError, match=rf"{start}.*: {what}.*\. {remedy}"):
            load_into((model, state(optimizer)), tmp_path / "run.safetensors", strict=True)
    assert load_into((model, state(adam)), tmp_path / "run.safetensors", strict=True)[1].is_complete
    quantized = training.quantized_state(adam, min_size=1)
    remedy = r".*quantized_state differs, load the saved kind and pass it to transfer_optimizer_state"
    with pytest.raises(ValueError, match=rf"(?s){start}.*{remedy}"):
        load_into((model, state(quantized)), tmp_path / "run.safetensors", strict=True)
    (loaded, moments), report = load_into((model, state(quantized)), tmp_path / "run.safetensors")
    assert eqx.tree_equal(loaded, model) and eqx.tree_equal(moments, state(quantized))
    assert all(name.startswith("1.") for name in (*report.fresh, *report.unused))
    # Where the model differs too, or there is no such state, the message is not about the optimizer.
    half = eqx.tree_at(lambda m: m.up.bias, model, jnp.ones(4, jnp.bfloat16))
    for tree, what in (((half, state(optax.sgd(1e-3))), "0.up.bias changed"), ((model, None), "1.0.count")):
        with pytest.raises(ValueError, match=f"the checkpoint does not belong to this model.*{what}"):
            load_into(tree, tmp_path / "run.safetensors", strict=True)


def test_a_model_of_other_sizes_is_named_as_such(tmp_path):
    """Otherwise it would go on with random weights, in which nobody looks for the checkpoint's."""
    narrow, wide = (fp8_linear_layers(eqx.nn.MLP(8, 4, width, 1, key=jax.random.key(0))) for width in (16, 32))
    path = tmp_path / "model.safetensors"
    save(path, narrow)
    weights = (
        r"layers.0.weight: shape \(16, 8\) in the checkpoint, \(32, 8\) here; layers.0.bias: shape .*"
        r"layers.1.weight: shape \(4, 16\) in the checkpoint, \(4, 32\) here\. Make the model with the sizes"
    )
    abstract = eqx.filter_eval_shape(lambda: wide)
    for tree, options in ((wide, {}), (wide, {"strict": True}), (abstract, {})):
        with pytest.raises(ValueError, match=rf"^path='.*model.safetensors' does not fit the model: {weights}"):
            load_into(tree, path, **options)
    with pytest.raises(ValueError, match="^the mapping does not fit the model: layers.0.bias"):
        load_into(wide, {"layers.0.bias": np.ones(16)})
    # An optimizer's state may begin anew.
    moments = lambda model, optimizer: (model, optimizer.init(eqx.filter(model.layers[0].weight, eqx.is_array)))
    save(path, moments(narrow, optax.trace(0.9)))
    (_, state), report = load_into(moments(narrow, optax.trace(0.9, accumulator_dtype="bfloat16")), path)
    assert list(report.changed) == ["1.trace"] and state.trace.dtype == jnp.bfloat16
    other = (narrow, optax.trace(0.9).init(wide.layers[0].weight))
    assert load_into(other, path)[1].fresh["1.trace"] == "shape (16, 8) in the checkpoint, (32, 8) here"


def test_a_part_that_stays_new_is_left_out_of_the_load(tmp_path):
    """What the error for other sizes advises."""
    old, new = (eqx.nn.MLP(8, labels, 16, 1, key=jax.random.key(labels)) for labels in (4, 5))
    save(tmp_path / "model.safetensors", old)
    head = lambda model: model.layers[1]
    with pytest.raises(ValueError, match=r"put None in its place and load the rest"):
        load_into(new, tmp_path / "model.safetensors")
    loaded, report = load_into(eqx.tree_at(head, new, None), tmp_path / "model.safetensors")
    assert report.unused == ("layers.1.bias", "layers.1.weight")
    loaded = eqx.tree_at(head, loaded, head(new), is_leaf=lambda node: node is None)
    assert eqx.tree_equal(loaded.layers, (old.layers[0], new.layers[1]))


def test_a_weight_that_the_checkpoint_lacks_is_an_error(tmp_path):
    """Unless it is asked for: the model would go on with numbers that nobody trained."""
    old, new = made("delayed 8", 1), made("current", 2)
    arrays = arrays_of(old)
    renamed = {("up_proj.weight" if name == "up.weight" else name): array for name, array in arrays.items()}
    message = r"^the mapping has nothing for up.weight, while the model has no leaf for up_proj.weight: .*renamed"
    with pytest.raises(ValueError, match=message):
        load_into(new, renamed)
    loaded, report = load_into(new, renamed, allow_fresh_weights=True)
    assert list(report.fresh) == ["up.weight"] and "up_proj.weight" in report.unused
    np.testing.assert_array_equal(loaded.up.weight, new.up.weight)
    missing = {name: array for name, array in arrays.items() if name != "up.weight"}
    empty = tmp_path / "empty.safetensors"
    empty.write_bytes(file_of({}))
    for lacking, what in ((missing, "up.weight: if"), (empty, "q.weight; q.bias; .*1 more: if")):
        with pytest.raises(ValueError, match=f"has nothing for {what} it is to stay"):
            load_into(new, lacking)
    report = load_into(new, missing, allow_fresh_weights=True)[1]
    assert list(report.fresh) == ["up.weight"] and len(report.unused) == 3
    # Entries alone; state that is unused, or fresh; an optimizer's state that is fresh.
    assert load_into(made("static", 2), arrays | {"old": np.ones(3)})[1].unused == ("old",)
    moments = lambda model, optimizer: (model, optimizer.init(eqx.filter(model.up.weight, eqx.is_array)))
    save(tmp_path / "run.safetensors", moments(old, optax.trace(0.9)))
    report = load_into(moments(old, optax.adam(1e-3)), tmp_path / "run.safetensors")[1]
    assert set(report.fresh) == {"1.0.count", "1.0.mu", "1.0.nu"} and report.unused == ("1.trace",)


class Trained(eqx.Module):
    """What a trainer keeps."""

    model: eqx.Module
    opt_state: object


def test_an_optimizers_state_may_be_anywhere_beside_a_model(tmp_path):
    """The model's weights have to fit there too."""
    adam = optax.adam(1e-3)
    both = lambda labels: (m := eqx.nn.Linear(4, labels, key=jax.random.key(0)), adam.init(eqx.filter(m, eqx.is_array)))
    for made, prefix in (
        (lambda model, state: Trained(model, state), ""),
        (lambda model, state: {"step": {"model": model, "opt_state": state}}, "step."),
        (lambda model, state: (Trained(model, state), 3), "0."),
        (lambda model, state: [[model, state]], "0."),
    ):
        save(tmp_path / "run.safetensors", made(*both(3)))
        weight, state = ("0.weight", "1") if isinstance(made(1, 2), list) else ("model.weight", "opt_state")
        with pytest.raises(ValueError, match=f"does not fit the model: {prefix}{weight}: shape"):
            load_into(made(*both(5)), tmp_path / "run.safetensors")
        mixed = made(both(3)[0], both(5)[1])
        assert all(
            name.startswith(f"{prefix}{state}.") for name in load_into(mixed, tmp_path / "run.safetensors")[1].fresh
        )
        with pytest.raises(ValueError, match=f"the optimizer's state, {prefix}{state} in"):
            load_into(mixed, tmp_path / "run.safetensors", strict=True)


def test_numbers_that_are_options_need_not_fit(tmp_path):
    """A rate of dropout is a leaf of its layer, and may be 0 in one model and 0.1 in the other."""
    model = lambda p: eqx.nn.Sequential([eqx.nn.Linear(4, 4, key=jax.random.key(0)), eqx.nn.Dropout(p)])
    for old, new in ((0, 0.1), (0.1, 0)):
        save(tmp_path / "model.safetensors", model(old))
        loaded, report = load_into(model(new), tmp_path / "model.safetensors")
        assert loaded.layers[1].p == new and set(report.fresh) == {"layers.1.p"}


def test_swapped_arguments_are_named(tmp_path):
    model = eqx.nn.Linear(32, 32, key=jax.random.key(0))
    calls = {
        "path is of type Linear, not a file.*use load_into\\(model, path\\)": lambda: load_into(tmp_path, model),
        "directory is of type Linear.*use export_model\\(model, directory\\)": lambda: export_model(tmp_path, model),
        "directory is of type Linear.*use import_model\\(directory, model\\)": lambda: import_model(model, tmp_path),
    }
    for message, call in calls.items():
        with unchecked(), pytest.raises(ValueError, match=message):
            call()


def test_files_of_equinox_without_names(tmp_path):
    model = made("delayed 8", 1)
    eqx.tree_serialise_leaves(tmp_path / "old.eqx", model)
    into = made("delayed 64", 2)
    with pytest.raises(ValueError, match="has no names.*made_from=old_model"):
        load_into(into, tmp_path / "old.eqx")
    loaded, report = load_into(into, tmp_path / "old.eqx", made_from=_abstract(model))
    assert len(report.kept) == 6 and len(report.changed) == 3
    np.testing.assert_array_equal(loaded.q.weight.array, model.q.weight.array)
    with pytest.raises(
        ValueError,
        match=r"(?s)old.eqx was not made from a tree like made_from.*\(3, 10\).*\(3, 66\)|\(3, 66\).*\(3, 10\)",
    ):
        load_into(into, tmp_path / "old.eqx", made_from=into)
    content = (tmp_path / "old.eqx").read_bytes()
    (tmp_path / "cut.eqx").write_bytes(content[:-5])
    with pytest.raises(ValueError, match="(?s)cut.eqx was not made from .* or is cut off"):
        load_into(into, tmp_path / "cut.eqx", made_from=model)
    with pytest.raises(ValueError, match="(?s)old.eqx was not made from .*more arrays than made_from has leaves"):
        load_into(into, tmp_path / "old.eqx", made_from=[])
    with pytest.raises(ValueError, match="made_from is the class MLP, but must be an instance"):
        load_into(into, tmp_path / "old.eqx", made_from=eqx.nn.MLP)
    (tmp_path / "no.eqx").write_bytes(b"not NumPy's")
    with pytest.raises(ValueError, match="(?s)no.eqx was not made from"):
        load_into(into, tmp_path / "no.eqx", made_from=model)
    with pytest.raises(ValueError, match="no.eqx' cannot be read: .*not a safetensors file"):
        load_into(into, tmp_path / "no.eqx")


def test_paths_that_are_no_checkpoint(tmp_path):
    model = block(1)
    with pytest.raises(ValueError, match=r"path='.*none.eqx' does not exist; give a file"):
        load_into(model, tmp_path / "none.eqx")
    with pytest.raises(ValueError, match=r"path='.*/9.safetensors'"):
        load_into(model, tmp_path / "9")
    (tmp_path / "10").mkdir()
    with pytest.raises(ValueError, match="holds a folder for each step.*/10'"):
        load_into(model, tmp_path)
    with pytest.raises(ValueError, match="a folder without a checkpoint.*but this one holds nothing"):
        load_into(model, tmp_path / "10")
    (tmp_path / "bad.safetensors").write_bytes(b"12345678")
    with pytest.raises(ValueError, match=r"path='.*bad.safetensors' cannot be read: .*truncated"):
        load_into(model, tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match="path is of type int, not a file"):
        load_into(model, 3)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(ValueError, match=r"path='.*pipe.safetensors' cannot be read: .*a pipe or a device"):
        load_into(model, tmp_path / "pipe.safetensors")
    for wrong in ("strict", "allow_fresh_weights"):
        with unchecked(), pytest.raises(ValueError, match=f"{wrong}='no' of load_into must be True or False"):
            load_into(model, {}, **{wrong: "no"})


def test_folders_that_are_no_checkpoint_are_told_apart(tmp_path, monkeypatch):
    """By what they hold, and named as they were given."""
    monkeypatch.chdir(tmp_path)
    model = block(1)
    for folder in ("run", "exported"):
        pathlib.Path(folder).mkdir()
    save("run/model.safetensors", model)
    safetensors.numpy.save_file({"a": np.ones(3)}, "exported/model.safetensors")
    pathlib.Path("exported/config.json").write_text("{}")
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        for step in (9, 10):
            items = {name: ocp.args.StandardSave({"a": jnp.ones(3)}) for name in ("ema", "model")}
            manager.save(step, args=ocp.args.Composite(**items))
    messages = {
        "run": "path='run' is a folder that Orbax did not write; name a file in it, such as 'run/model.safetensors'$",
        "exported": r"such as 'exported/model.safetensors', or import_model\('exported', model\), which reads",
        "steps": "path='steps' holds a folder for each step, 10, 9; name one, such as 'steps/10'$",
        "steps/9": "path='steps/9' holds several checkpoints of Orbax, ema, model; name one, such as 'steps/9/ema'$",
        "steps/9/model/d": "'steps/9/model/d' is a part of Orbax's checkpoint '/.*/steps/9/model'; give that folder",
        "steps/9/model": "nothing in path='steps/9/model' fits the model",
    }
    for path, message in messages.items():
        with pytest.raises(ValueError, match=message):
            load_into(model, path)


@pytest.fixture
def of_three(tmp_path):
    """A file with three leaves, and the tree."""
    random = np.random.default_rng(0)
    tree = {"a": jnp.arange(24.0).reshape(4, 6), "b": jnp.asarray(random.normal(size=(5, 7)), jnp.bfloat16), "n": 7}
    save(tmp_path / "good.safetensors", tree)
    return tree, tmp_path / "good.safetensors"


@pytest.mark.smoke
def test_a_changed_byte_is_found_wherever_it_is(of_three):
    """In data, in a header and in the index; a leaf that is not read is not looked at."""
    tree, path = of_three
    content = path.read_bytes()
    zeros = jax.tree.map(lambda x: 0 * x, tree)
    first = content.index(np.asarray(tree["a"]).tobytes())
    for i in [*range(0, len(content), 23), first, first + 95]:
        path.write_bytes(content[:i] + bytes([content[i] ^ 16]) + content[i + 1 :])
        with pytest.raises(ValueError, match="good.safetensors"):
            load_into(zeros, path, strict=True)
    path.write_bytes(content[:first] + bytes([content[first] ^ 1]) + content[first + 1 :])
    with pytest.raises(ValueError, match="good.safetensors is damaged: the bytes of a have"):
        load_into(zeros, path)
    loaded, _ = load_into(zeros | {"a": None}, path)
    np.testing.assert_array_equal(loaded["b"], tree["b"])
    path.write_bytes(content)
    assert eqx.tree_equal(load_into(zeros, path, strict=True)[0], tree)


LEAVES = ["[]", "{", '{"a": ' * 100_000, "{}", '{"leaves": []}', '{"leaves": {"b": {"crc32": "0"}}}']
LEAVES += [f'{{"leaves": {{"a": {entry}}}}}' for entry in ("1", "{}", '{"crc32": 1}')]
LEAVES += [f'{{"leaves": {{"a": {{"crc32": "0", "dtype": "{name}"}}}}}}' for name in ("int4", "nonsense")]
SCALING = '{"max": 1.0, "scaling": {"type": "DelayedScaling", %s}}'
BROKEN = ["1", "[1]", '[{"ops": ["a"]}]', '[{"ops": 1, "operands": {}}]', '[{"ops": [1], "operands": {}}]']
BROKEN += [
    f'[{{"ops": ["a"], "operands": {{"input": {operand}}}}}]'
    for operand in ("1", "{}", '{"max": 1.0}', '{"max": 1.0, "scaling": {}}', '{"max": 0.0, "scaling": {"type": "A"}}')
]
OPTIONS = ('"amax_history_length": 0', '"amax_history_length": true', '"update_interval": 1.5', '"margin": 1000')
BROKEN += [f'[{{"ops": ["a"], "operands": {{"input": {SCALING % options}}}}}]' for options in OPTIONS]
RUN = [f'"recipes": {recipes}' for recipes in BROKEN] + ['"microbatches": 0', '"microbatches": "1"']
LISTS = LEAVES + [f'{{"leaves": {{"a": {{"crc32": "0"}}}}, {run}}}' for run in RUN]


@pytest.mark.parametrize("text", LISTS, ids=range(len(LISTS)))
def test_a_broken_list_of_leaves_is_an_error(text, tmp_path):
    checksum = f"{zlib.crc32(json.dumps([text, {'a': ['F32', [3]]}]).encode()):08x}"
    metadata = {"haliax_fp8": text, "haliax_fp8_crc32": checksum}
    safetensors.numpy.save_file({"a": np.ones(3, np.float32)}, tmp_path / "x.safetensors", metadata)
    with pytest.raises(ValueError, match=r"path='.*x\.safetensors' cannot be read: x\.safetensors(?!.*has changed)"):
        load_into({"a": jnp.zeros(3)}, tmp_path / "x.safetensors")


def test_no_flipped_bit_is_silent(tmp_path):
    """Most of them in the header: names, shapes, checksums, names of optional leaves, and names that are not ASCII."""
    path = tmp_path / "run.safetensors"
    layer = fp8_linear_layers(eqx.nn.Linear(3, 2, key=jax.random.key(0)), recipe=DelayedScaling(amax_history_length=2))
    run = lambda seed: {"é": layer, "four": np.full(3, seed, jnp.int4), "none": np.zeros((0, 3))}
    save(path, run(1))
    content = path.read_bytes()
    random, header, whole = np.random.default_rng(0), 8 * int.from_bytes(content[:8], "little"), 8 * len(content)
    into = run(2)
    for bit in [*range(0, 64, 3), *random.integers(64, header, 150), *random.integers(64, whole, 50)]:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"run\.safetensors"):
            load_into(into, path)


def test_the_header_needs_its_checksum(tmp_path):
    """A leaf that a model has no use for would hide that the list of leaves is lost, or another file's."""
    path, tree = tmp_path / "x.safetensors", {"a": jnp.ones(3)}
    save(path, tree)
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    for wrong in ({**metadata, "haliax_fp8_crc32": "0" * 8}, *({key: metadata[key]} for key in metadata)):
        safetensors.numpy.save_file({"a": np.ones(3, np.float32)}, path, wrong)
        with pytest.raises(ValueError, match=r"x\.safetensors: its (header has changed|index (has None|is not JSON))"):
            load_into(tree, path)


def test_leaves_are_aligned_and_other_tools_read_them(tmp_path):
    path = tmp_path / "x.safetensors"
    tree = {"flags": np.array([True]), "half": np.ones(3, ml_dtypes.bfloat16), "wide": np.ones(3), "x": np.float32([2])}
    save(path, tree)
    assert all(stored.offset % stored.dtype.itemsize == 0 for stored in read_header(path).values())
    for name, array in safetensors.numpy.load_file(path).items():
        np.testing.assert_array_equal(array, tree[name])


def test_a_changed_name_is_not_another_leaf(tmp_path):
    """One bit makes w7 or w1 of w3: the numbers of all have the same shape."""
    save(tmp_path / "w.safetensors", {"w1": jnp.zeros(3), "w3": jnp.ones(3)})
    content = (tmp_path / "w.safetensors").read_bytes()
    assert content.count(b'"w3"') == 1
    messages = {
        b"w7": "w3: its index and its tensors do not both have this name",
        b"w1": "w1: its header has this name twice",
    }
    for name, message in messages.items():
        (tmp_path / "w.safetensors").write_bytes(content.replace(b'"w3"', b'"' + name + b'"'))
        with pytest.raises(ValueError, match=f"w.safetensors.* {message}"):
            load_into({"w1": jnp.zeros(3), "w7": jnp.zeros(3)}, tmp_path / "w.safetensors")


def test_a_damaged_folder_of_orbax_is_named(tmp_path):
    tree = {"a": jnp.ones(3)}
    path = through_orbax(tree, tmp_path)
    content = (path / "_METADATA").read_bytes()
    for bad in (content[:-9], content.replace(b"value_metadata", b"value_metadatb"), content.replace(b'"', b"\xff")):
        (path / "_METADATA").write_bytes(bad)
        with pytest.raises(ValueError, match=r"path='.*; copy it again"):
            load_into(tree, path)


# --- The recipe of the run -------------------------------------------------------------------------------------------


OF_FNUZ = {
    name: Recipe(*(Quantization(fp8_format, scaling) for fp8_format in (E4M3FNUZ, E4M3FNUZ, E5M2FNUZ)))
    for name, scaling in (("delayed", DelayedScaling(amax_history_length=4)), ("static", StaticScaling()))
}
X = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)


def mean_square(model, x):
    return (jax.vmap(model)(x) ** 2).mean()


@pytest.mark.parametrize("scaling", OF_FNUZ)
def test_scales_are_converted_to_another_format(scaling, tmp_path):
    """Otherwise what fills E4M3 is clipped at 240, for ever with static scaling."""
    plain = eqx.nn.Linear(16, 16, use_bias=False, key=jax.random.key(0))
    of_e4m3 = fp8_linear_layers(plain, recipe=OF_FNUZ[scaling].input.scaling, emulate=True)
    model = calibrate(of_e4m3, mean_square, [X])
    save(tmp_path / "run.safetensors", model)
    into = fp8_linear_layers(plain, recipe=OF_FNUZ[scaling], emulate=True)
    what = "input, kernel: E4M3 in the checkpoint, E4M3FNUZ here; output_grad: E5M2 in the checkpoint, E5M2FNUZ here"
    with pytest.raises(ValueError, match=rf"strict=True.*dot_general.state.table changed: {what}; the scales were"):
        load_into(into, tmp_path / "run.safetensors", strict=True)
    loaded, report = load_into(into, tmp_path / "run.safetensors")
    assert report.kept == ("weight",) and report.changed["dot_general.state.table"].startswith(what)
    amaxes = {"input": np.abs(X).max(), "kernel": np.abs(np.asarray(plain.weight)).max()}
    for operand, amax in amaxes.items():
        np.testing.assert_allclose(loaded.dot_general.scale(operand), amax / 240, rtol=1e-6)
    np.testing.assert_array_equal(*(m.dot_general.scale("output_grad") for m in (loaded, model)))
    anew = calibrate(into, mean_square, [X])
    np.testing.assert_allclose(tables(loaded)["dot_general.state.table"], tables(anew)["dot_general.state.table"], 1e-6)


HISTORY = np.array([3.0, 8.0, 1.0, 2.0], np.float32)
OTHERS = {
    "margin": (dict(margin=9), "margin 0 in the checkpoint, 9 here", 8 * 2**9, HISTORY),
    "rule": (
        dict(amax_compute=MostRecent()),
        r"amax_compute MaxOfHistory\(\) in the checkpoint, MostRecent\(\) here",
        3,
        HISTORY,
    ),
    "interval": (dict(update_interval=3), "update_interval 1 in the checkpoint, 3 here", 8, [*HISTORY, 0]),
    "both": (
        dict(amax_history_length=3, update_interval=3),
        "the history of 4 steps was cut to 3; its maximum is the same; update_interval 1 in",
        8,
        [3, 8, 2, 0],
    ),
    "power_of_two": (dict(power_of_two=True), "power_of_two False in the checkpoint, True here", 14, HISTORY),
}


@pytest.mark.parametrize("changed", OTHERS)
def test_another_recipe_is_refused_when_strict_and_converted_otherwise(changed, tmp_path):
    """The expected scale is the amax that the new recipe takes, over 448; a power of two is the next above."""
    options, what, amax, columns = OTHERS[changed]
    made = lambda **options: Fp8DotGeneral.init(DelayedScaling(**{"amax_history_length": 4, **options}))
    old, new = made(), made(**options)
    limits = np.array([448, 448, 57344], np.float32)[:, None]
    table = np.concatenate([np.float32(8) / limits, np.tile(HISTORY, (3, 1))], -1)
    path = tmp_path / "run.safetensors"
    save(path, {"op": eqx.tree_at(lambda op: op.state, old, old.state.with_array(guarded(jnp.asarray(table))))})
    assert load_into({"op": old}, path, strict=True)[1].is_complete
    with pytest.raises(ValueError, match=f"strict=True.*op.state.table changed: {what}.*Convert the model with"):
        load_into({"op": new}, path, strict=True)
    loaded, report = load_into({"op": new}, path)
    assert list(report.changed) == ["op.state.table"]
    loaded_table = np.asarray(loaded["op"].state.table.array)
    np.testing.assert_allclose(loaded_table[:, :1], amax / limits, rtol=1e-6)
    np.testing.assert_array_equal(loaded_table[:, 1:-1], np.tile(columns, (3, 1)))
    np.testing.assert_array_equal(loaded["op"].scale("kernel"), loaded_table[1, 0])


def test_each_row_of_a_table_has_its_own_meaning(tmp_path):
    """A static scale stays where the history beside it gets longer; what has no use for a history is named."""
    path, current = tmp_path / "run.safetensors", Quantization(E4M3, CurrentScaling())
    made = lambda input, length: Fp8DotGeneral.init(
        Recipe(Quantization(E4M3, input), current, Quantization(E5M2, DelayedScaling(amax_history_length=length)))
    )
    static, table = made(StaticScaling(), 4), np.zeros((3, 5), np.float32)
    table[:, 0], table[0, 1], table[2, 1:] = [0.5, 1.0, 8 / 57344], 7.0, HISTORY
    with_table = lambda op: eqx.tree_at(lambda op: op.state, op, op.state.with_array(guarded(jnp.asarray(table))))
    save(path, {"op": with_table(static)})
    loaded, report = load_into({"op": made(StaticScaling(), 6)}, path)
    resized = "output_grad: the history of 4 steps was padded to 6; its maximum is the same"
    assert report.changed == {"op.state.table": resized}
    loaded_table = np.asarray(loaded["op"].state.table.array)
    np.testing.assert_array_equal(loaded_table[0, :6], [0.5, 7, 0, 0, 0, 0])
    np.testing.assert_array_equal(loaded_table[2, :-1], [table[2, 0], 3, 0, 0, 8, 1, 2])
    delayed = made(DelayedScaling(amax_history_length=4), 4)
    save(path, {"op": with_table(delayed)})
    loaded, report = load_into({"op": static}, path)
    what = "input: DelayedScaling in the checkpoint, StaticScaling here"
    assert report.changed["op.state.table"].startswith(what)
    assert report.changed["op.state.table"].endswith("input starts fresh: calibrate the model")
    np.testing.assert_array_equal(loaded["op"].state.scale, [np.inf, 1, table[2, 0]])


@pytest.mark.parametrize("old, new", [("delayed", "nvfp4_delayed"), ("nvfp4_delayed", "delayed")])
def test_the_history_of_a_tensor_scale_is_that_of_a_tensor(old, new, tmp_path):
    """NVFP4 with a delayed tensor scale and delayed scaling take up each other's histories, and those of themselves."""
    layer, path = eqx.nn.Linear(16, 16, key=jax.random.key(0)), tmp_path / "run.safetensors"
    made = lambda recipe, length: fp8_linear_layers(layer, recipe=recipe, amax_history_length=length)
    saved = made(old, 4)
    table = np.ones((3, 5), np.float32)
    table[:, 1:] = HISTORY
    state = saved.dot_general.state.with_array(guarded(jnp.asarray(table)))
    save(path, eqx.tree_at(lambda m: m.dot_general.state, saved, state), microbatches=1)
    resized = "the history of 4 steps was padded to 6; its maximum is the same"
    for recipe in (old, new):
        loaded, report = load_into(made(recipe, 6), path, microbatches=1)
        op, how = loaded.dot_general, report.changed["dot_general.state.table"]
        np.testing.assert_array_equal(op.amax_history("kernel"), [3, 0, 0, 8, 1, 2])
        np.testing.assert_allclose(op.scale("kernel"), 8 / op.recipe.kernel.format.max, rtol=1e-6)
        assert resized in how if recipe == old else "fresh" not in how
    assert "microbatches" in load_into(made(new, 6), path)[1].not_compared


def test_options_of_a_rotated_operand_are_compared(tmp_path):
    layer, path = eqx.nn.Linear(16, 16, key=jax.random.key(0)), tmp_path / "run.safetensors"
    recipe = named["nvfp4"]
    rotated = HadamardScaling(dataclasses.replace(recipe.input_for_wgrad.scaling.scaling, four_over_six=True))
    other = dataclasses.replace(recipe, input_for_wgrad=Quantization(E2M1, rotated))
    save(path, fp8_linear_layers(layer, recipe=recipe))
    changed = fp8_linear_layers(layer, recipe=other)
    assert "input_for_wgrad: four_over_six False in the checkpoint, True here" in str(
        load_into(changed, path)[1].changed
    )
    with pytest.raises(ValueError, match="four_over_six"):
        load_into(changed, path, strict=True)


def test_recipes_without_state_are_compared_too(tmp_path):
    """Layer by layer; a checkpoint that does not say what they are loads as it did."""
    path, model = tmp_path / "run.safetensors", block(1)
    moments = lambda model: (model, optax.adam(1e-3).init(eqx.filter(model, eqx.is_inexact_array)))
    run = {name: moments(fp8_linear_layers(model, recipe=name)) for name in ("current", "rowwise")}
    save(path, run["current"])
    assert load_into(run["current"], path, strict=True)[1].is_complete
    with safetensors.safe_open(path, "np") as file:
        (recorded,) = json.loads(file.metadata()["haliax_fp8"])["recipes"]
    assert recorded["ops"] == [f"0.{layer}.dot_general" for layer in ("q", "k", "up")]
    assert recorded["operands"]["output_grad"]["format"] == "E5M2"
    assert recorded["operands"]["kernel"]["scaling"]["type"] == "CurrentScaling"
    for other, what in (
        (run["rowwise"], "CurrentScaling in the checkpoint, RowwiseScaling here; output_grad: E5M2 in the checkpoint"),
        (moments(model), "in FP8 in the checkpoint alone"),
    ):
        with pytest.raises(ValueError, match=f"strict=True.*0.up.dot_general changed: {what}.*Convert the model with"):
            load_into(other, path, strict=True)
        report = load_into(other, path)[1]
        assert set(report.changed) == set(recorded["ops"]) and report.changed["0.up.dot_general"].startswith(what)
        assert load_into(other, arrays_of(run["current"]), strict=True)[1].is_complete
    # A layer that only one of them has is not one whose recipe has changed.
    report = load_into(
        {"up": run["current"][0].up, "new": run["current"][0].q}, arrays_of({"up": model.up}), allow_fresh_weights=True
    )[1]
    assert not report.changed


def test_amaxes_of_gradients_follow_the_number_of_microbatches(tmp_path):
    """To the numbers that the new step itself measures of the same batch; where a number is not known, they stay."""
    path, plain = tmp_path / "run.safetensors", eqx.nn.Linear(16, 16, key=jax.random.key(0))
    start = fp8_linear_layers(plain, recipe=DelayedScaling(amax_history_length=4))
    model = {n: TrainStep(mean_square, optax.sgd(0.1), microbatches=n).calibrate(start, X) for n in (1, 4)}
    table = {n: tables(m)["dot_general.state.table"] for n, m in model.items()}
    assert (table[4][2, 1] / table[1][2, 1]).item() == 4.0
    save(path, model[1], microbatches=1)
    loaded, report = load_into(start, path, microbatches=4)
    np.testing.assert_array_equal(tables(loaded)["dot_general.state.table"], table[4])
    what = "1 microbatch in the checkpoint, 4 here: the amaxes of gradients were multiplied by 4"
    assert report.changed == {"dot_general.state.table": what}
    with pytest.raises(ValueError, match=f"strict=True.*{what}.*as many microbatches"):
        load_into(start, path, strict=True, microbatches=4)
    report = load_into(start, path, strict=True, microbatches=1)[1]
    assert report.is_complete and not report.not_compared
    with pytest.raises(ValueError, match="strict=True, and the run was saved with microbatches=1, while load_into got"):
        load_into(start, path, strict=True)
    save(path, model[4])
    for n, who in ((1, "save got"), (None, "save and load_into got")):
        report = load_into(start, path, strict=True, microbatches=n)[1]
        assert (
            report.is_complete and who in report.not_compared and report.not_compared in " ".join(str(report).split())
        )
    current = fp8_linear_layers(plain, recipe="current")
    save(path, current)
    assert not load_into(current, path, strict=True)[1].not_compared
    for wrong in (0, 2.5, True):
        for call in (lambda n: save(path, model[1], microbatches=n), lambda n: load_into(start, path, microbatches=n)):
            with (
                unchecked(),
                pytest.raises(ValueError, match=f"microbatches={wrong} of .*; .*step.microbatches|integer"),
            ):
                call(wrong)


def test_the_state_of_attention_follows_its_recipe(tmp_path):
    """It has ten tensors, of which the last five are gradients."""
    op = lambda **options: Fp8Attention.init(scaling=DelayedScaling(amax_history_length=2, **options), emulate=True)
    old, path = op(), tmp_path / "run.safetensors"
    rows = jnp.tile(jnp.array([[1.0, 448.0, 448.0]]), (10, 1))
    save(path, eqx.tree_at(lambda op: op.state, old, old.state.with_array(guarded(rows))), microbatches=1)
    loaded, report = load_into(op(margin=1), path, microbatches=8)
    assert report.changed["state.table"].startswith("margin 0 in the checkpoint, 1 here")
    np.testing.assert_array_equal(loaded.state.table.array[:, 0], [2.0] * 5 + [16.0] * 5)


# --- Saving -----------------------------------------------------------------------------------------------------------


def test_safetensors_reads_what_save_writes(tmp_path):
    model = {"half": jnp.ones(3, jnp.bfloat16), "model": made("delayed 8", 1), "step": 7, "rate": 0.5, "f": jax.nn.relu}
    save(tmp_path / "model", model)
    loaded, report = load_into(model | {"step": 0, "rate": 0.0}, tmp_path / "model", strict=True)
    assert eqx.tree_equal(loaded, model) and {"step", "rate", "half"} <= set(report.kept)
    again = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(again["model.q.weight"], model["model"].q.weight.array)


FORMATS = ("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int4", "bfloat16")


def test_leaves_in_every_format_come_back(tmp_path):
    """Of any rank, on devices and in NumPy; those of E5M2 too, whose name in NumPy's files NumPy does not read."""
    for name in FORMATS:
        values = np.array([[1, 2, 4], [2, 1, 1]], np.float32).astype(np.dtype(jnp.dtype(name)))
        tree = {"a": jnp.asarray(values), "host": values, "one": values[0, 1], "turned": values.T, "none": values[:0]}
        save(tmp_path / f"{name}.eqx", tree)
        loaded, _ = load_into(
            jax.tree.map(lambda x: (0 * x).astype(x.dtype), tree), tmp_path / f"{name}.eqx", strict=True
        )
        for leaf, array in tree.items():
            restored = np.asarray(loaded[leaf])
            assert (restored.dtype, restored.shape, restored.tobytes()) == (
                array.dtype,
                array.shape,
                np.asarray(array).tobytes(),
            )


def test_a_file_of_another_dtype_than_made_from_is_refused(tmp_path):
    """Of the same size, it would be read as other numbers."""
    for stored, wanted in (("<i4", jnp.float32), ("<f4", jnp.int32)):
        eqx.tree_serialise_leaves(tmp_path / "old.eqx", {"x": np.ones(3, stored)})
        with pytest.raises(ValueError, match="(?s)old.eqx was not made from"):
            load_into({"x": jnp.zeros(3, wanted)}, tmp_path / "old.eqx", made_from={"x": jnp.zeros(3, wanted)})


class Wrapped:
    """What JAX takes for an array, and NumPy for an object."""

    def __jax_array__(self):
        return jnp.ones(2)


def test_what_no_file_holds_is_not_saved(tmp_path):
    """NumPy would pickle it, which is never read, or write numbers that are read as others."""
    refused = {
        "object": np.array([1, None], object),
        "object, one": np.array(None, object),
        "text": np.array(["a", "bc"]),
        "fields": np.zeros(2, [("a", "<f4"), ("b", "<i4")]),
        "days": np.zeros(2, "datetime64[D]"),
        "large": 2**64,
        "small": -(2**63) - 1,
    }
    for value in refused.values():
        with pytest.raises(ValueError, match=r"^b\.1 (is|has dtype) .*; keep it out of the tree"):
            save(tmp_path / "model.safetensors", {"a": jnp.ones(2), "b": [1, value]})
    with pytest.raises(ValueError, match=r"^b\.1 is a Wrapped; keep it out of the tree"):
        save(tmp_path / "model.safetensors", {"a": jnp.ones(2), "b": [1, Wrapped()]})
    with pytest.raises(ValueError, match=r"^b\.1 has dtype >f4,.*not this machine's; save"):
        save(tmp_path / "model.safetensors", {"a": jnp.ones(2), "b": [1, np.ones(2, ">f4")]})
    assert not list(tmp_path.iterdir())
    tree = {"a": 2**64 - 1, "b": -(2**63), "c": True, "d": 1.5}
    save(tmp_path / "model.safetensors", tree)
    assert load_into({"a": 2**63, "b": 0, "c": False, "d": 0.0}, tmp_path / "model.safetensors", strict=True)[0] == tree


@pytest.mark.parametrize("dtype", [np.float64, np.longdouble, np.clongdouble])
def test_numbers_of_numpy_that_jax_does_not_hold_are_saved(dtype, tmp_path):
    """They are finite, although they are not in JAX's dtypes."""
    array = np.array([1e300, 1 / dtype(3)], dtype)
    save(tmp_path / "model.safetensors", {"a": array})
    loaded = load_into({"a": np.zeros(2, dtype)}, tmp_path / "model.safetensors", strict=True)[0]["a"]
    assert loaded.dtype == dtype and np.array_equal(loaded, array)
    with pytest.raises(ValueError, match=r"a has an element that is infinite or NaN, at \[1\]"):
        save(tmp_path / "model.safetensors", {"a": np.array([1, np.inf], dtype)})


class Named(eqx.Module):
    layers: dict


TWICE = [
    ({"a.b": 1.0, "a": {"b": 2.0}}, "a.b"),
    (Named({"0.weight": 1.0, "0": {"weight": 2.0}}), "layers.0.weight"),
]


@pytest.mark.parametrize(("tree", "name"), TWICE)
def test_two_leaves_of_one_name_are_refused(tree, name, tmp_path):
    """One of them would get the other's numbers: when saved, when loaded from anything, and in files of old."""
    tree = jax.tree.map(lambda x: jnp.full(2, x), tree)
    with pytest.raises(ValueError, match=f"^tree has two leaves called '{name}'; rename one"):
        save(tmp_path / "model.safetensors", tree)
    assert not list(tmp_path.iterdir())
    for path in ({name: np.ones(2)}, through_safetensors({name: jnp.ones(2)}, tmp_path)):
        with pytest.raises(ValueError, match=f"^model has two leaves called '{name}'; rename one"):
            load_into(tree, path)
    eqx.tree_serialise_leaves(tmp_path / "old.eqx", tree)
    other = {name: jnp.zeros(2)}
    with pytest.raises(ValueError, match=f"^made_from has two leaves called '{name}'; rename one"):
        load_into(other, tmp_path / "old.eqx", made_from=tree)
    if isinstance(tree, dict):
        with pytest.raises(ValueError, match=f"orbax' has two leaves called '{name}'; rename one"):
            load_into(other, through_orbax(tree, tmp_path))


def test_integers_that_do_not_fit_are_refused(tmp_path):
    """The leaf is named, with the number; those that fit are cast."""
    model = {"step": jnp.zeros((), jnp.int32), "ids": np.zeros(3, np.uint8)}
    fits = {"step": np.int64(2**31 - 1), "ids": np.array([0, 3, 255])}
    loaded, report = load_into(model, fits)
    assert int(loaded["step"]) == 2**31 - 1 and loaded["ids"].tolist() == [0, 3, 255]
    assert report.changed["ids"] == "int64 in the checkpoint, cast to uint8"
    wrong = {"step": (np.int64(2**40), 2**40), "ids": (np.array([0, -1, 255]), -1)}
    for name, (array, number) in wrong.items():
        with pytest.raises(ValueError, match=rf"^{name} is {number}.*{name} is int64"):
            load_into(model, fits | {name: array})
    small = np.array([0, 7, 3], jnp.int4)
    assert load_into(model, fits | {"ids": small, "step": 5})[0]["ids"].tolist() == [0, 7, 3]
    assert load_into({"n": 0}, {"n": np.uint64(2**64 - 1)})[0] == {"n": 2**64 - 1}
    empty, _ = load_into({"x": jnp.zeros((0,), jnp.int32)}, {"x": np.zeros(0, np.int64)})
    assert empty["x"].shape == (0,)


@pytest.mark.parametrize(
    ("dtype", "number"), [("float16", 65520.0), ("bfloat16", 3.4e38), ("float8_e4m3fn", 500.0), ("float32", -1e39)]
)
def test_numbers_that_overflow_in_the_models_dtype_are_refused(dtype, number):
    """A weight would become infinite, or NaN, without a word; the last number below the limit is rounded to it."""
    model, limit = {"w": jnp.zeros((2, 2), dtype)}, float(jnp.finfo(dtype).max)
    stored = np.array([[0.0, np.inf], [np.nan, 1.0]], np.float64)
    if dtype != "float8_e4m3fn":  # It has no infinity.
        assert np.array_equal(load_into(model, {"w": stored})[0]["w"], stored, equal_nan=True)
    stored[0, 1], stored[1, 0] = np.nextafter(limit, np.inf), -limit
    loaded = np.asarray(load_into(model, {"w": stored})[0]["w"])
    assert loaded.astype(np.float64).tolist() == [[0.0, limit], [-limit, 1.0]]
    stored[1, 0] = number
    for source in (stored, stored.astype(np.float32) if dtype != "float32" else stored):
        with pytest.raises(ValueError, match=rf"^w is.*{dtype}"):
            load_into(model, {"w": source})
    with pytest.raises(ValueError, match=r"^w is -?\S+ in the checkpoint,.*; load it into a model"):
        load_into({"w": model["w"][0, 0]}, {"w": np.array(number)})


@contextlib.contextmanager
def failing_disk():
    """Takes what is written, and says that it failed when asked whether it will last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda file: (_ for _ in ()).throw(OSError("input/output error")))
        yield


def test_interrupted_save_leaves_the_last_good_one(tmp_path):
    save(tmp_path / "model.safetensors", {"x": jnp.ones(3)})
    # A small tree fails when it is flushed, a large one within a leaf.
    for disk, size, reason in (
        (full_disk(64), 3, "too large"),
        (full_disk(50_000), 10**5, "too large"),
        (failing_disk(), 3, "input/output error"),
    ):
        with disk, pytest.raises(ValueError, match=rf"model.safetensors' cannot be written: .*{reason}"):
            save(tmp_path / "model.safetensors", {"x": jnp.zeros(size)})
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    np.testing.assert_array_equal(load_into({"x": jnp.zeros(3)}, tmp_path / "model.safetensors")[0]["x"], np.ones(3))
    with pytest.raises(ValueError, match="x is a random key"):
        save(tmp_path / "model.safetensors", {"x": jax.random.key(0)})
    with pytest.raises(ValueError, match="abstract: x has no numbers"):
        save(tmp_path / "model.safetensors", {"x": jax.ShapeDtypeStruct((3,), jnp.float32)})


def test_what_killed_writers_left_is_removed_by_the_next_save(tmp_path):
    """Neither what another save is still writing, nor files of other names."""
    left, written, other = (
        tmp_path / f".{name}.{digit * 32}.tmp" for name, digit in (("m.eqx", "0"), ("m.eqx", "1"), ("m", "2"))
    )
    others = [other, tmp_path / ".m.eqx.backup.tmp", tmp_path / ".m.eqx.2.eqx.tmp"]
    for path in (left, written, *others):
        path.write_bytes(b"part")
    with written.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        save(tmp_path / "m.eqx", {"x": jnp.ones(3)})
        assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (written, *others)} | {"m.eqx"}
    save(tmp_path / "m.eqx", {"x": jnp.ones(3)})
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in others} | {"m.eqx"}


def test_a_file_is_locked_from_its_first_byte_until_it_has_its_name(tmp_path, monkeypatch):
    """Otherwise a second save at the same time would remove it as one that was left."""
    locked, replace = [], pathlib.Path.replace

    def look():
        (temporary,) = [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]
        with temporary.open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked.append(False)
            except BlockingIOError:
                locked.append(True)

    monkeypatch.setattr("os.fsync", lambda file: look() if not locked else None)
    monkeypatch.setattr(pathlib.Path, "replace", lambda path, target: (look(), replace(path, target))[1])
    save(tmp_path / "m.safetensors", {"x": jnp.ones(3)})
    assert locked == [True, True]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    """Of folders that are read-only, root may write to most; its name is too long for anyone."""
    path = tmp_path / ("x" * 300 + ".eqx")
    with pytest.raises(ValueError, match=f"path={str(path)!r} cannot be.*; choose another file"):
        save(path, {"x": jnp.ones(3)})
    (tmp_path / "folder.safetensors").mkdir()
    for path in (tmp_path / "folder", tmp_path / "folder.safetensors"):
        with pytest.raises(ValueError, match=r"path='.*folder.safetensors/m"):
            save(path, {"x": jnp.ones(3)})
    assert [path.name for path in tmp_path.iterdir()] == ["folder.safetensors"]


@pytest.mark.smoke
def test_resume_is_bit_for_bit(tmp_path):
    """Model, state and optimizer through a file and through Orbax, in the middle of a run."""
    x = jax.random.normal(jax.random.key(3), (16, 8))
    step = TrainStep(lambda model, x: (jax.vmap(model)(x) ** 2).mean(), optax.adamw(1e-2))
    model = fp8_linear_layers(eqx.nn.Linear(8, 8, key=jax.random.key(0)), recipe=DelayedScaling(amax_history_length=4))
    fresh = model, step.init(model)

    def run(state, steps):
        for i in steps:
            with jax.numpy_dtype_promotion("standard"):  # which optax needs
                *state, metrics = step(*state, x * (1 + i))
        return tuple(state), float(metrics["loss"])

    half, _ = run(fresh, range(3))
    whole, loss = run(half, range(3, 6))
    assert not eqx.tree_equal(whole, half)
    for through in (through_save, through_orbax):
        resumed, _ = load_into(fresh, through(half, tmp_path), strict=True)
        assert eqx.tree_equal(run(resumed, range(3, 6)), (whole, loss))


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
        ("F8_E4M3FNUZ", ml_dtypes.float8_e4m3fnuz),
        ("F8_E5M2FNUZ", ml_dtypes.float8_e5m2fnuz),
        ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
        ("BF16", ml_dtypes.bfloat16),
        ("C64", np.complex64),
    ],
)
def test_safetensors_of_every_type_load_to_the_bit(name, dtype, tmp_path):
    """Also where a tensor's bytes are not aligned, as after a single one, and where it has none."""
    dtype = np.dtype(dtype)
    words = np.random.default_rng(0).integers(0, 256, 12 * dtype.itemsize, np.uint8)
    tensors = {"one": np.ones(1, np.int8), "whole": words.view(dtype).reshape(3, 4), "nothing": np.zeros((0, 3), dtype)}
    names, offsets = ("I8", name, name), (0, 1, 1 + words.size)
    header = {
        key: {"dtype": of_key, "shape": array.shape, "data_offsets": [begin, begin + array.nbytes]}
        for (key, array), of_key, begin in zip(tensors.items(), names, offsets, strict=True)
    }
    (tmp_path / "x.safetensors").write_bytes(file_of(tensors, header))
    into = {name: jnp.zeros(array.shape, array.dtype) for name, array in tensors.items()}
    loaded, report = load_into(into, tmp_path / "x.safetensors")
    assert set(report.kept) == set(tensors)
    for name, array in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert np.asarray(loaded[name]).tobytes() == array.tobytes()


def test_safetensors_of_an_unknown_type_are_refused(tmp_path):
    """Where they are asked for, as a weight or as state; what else the file holds is loaded."""
    path, state = tmp_path / "x.safetensors", "up.dot_general.state.table"
    tensors = arrays_of(made("delayed 8", 1))
    for name in ("packed", "up.weight", state, "q.weight"):
        with_packed = tensors | {"packed": np.zeros(8, np.float32)}
        header = header_of(with_packed)
        header[name] |= {"dtype": "F4"}
        path.write_bytes(file_of(with_packed, header))
        if name == "packed":
            loaded, report = load_into(made("delayed 8", 2), path)
            assert report.unused == ("packed",) and not report.fresh
            continue
        with pytest.raises(ValueError, match=rf"x.safetensors: {name}: its dtype 'F4' is"):
            load_into(made("delayed 8", 2), path)


def test_a_safetensors_file_may_be_replaced_while_it_is_read(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(file_of({"a": np.arange(4, dtype=np.float32)}))
    with (tmp_path / "x.safetensors").open("rb") as file:
        opened = open_file(tmp_path / "x.safetensors", file)
    (tmp_path / "new").write_bytes(file_of({"a": np.zeros(4, np.float32)}))
    (tmp_path / "new").replace(tmp_path / "x.safetensors")
    assert opened.read({"a": None})["a"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_wrong_arguments_of_save_and_files_of_other_trees(tmp_path):
    model = eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"path is of type MLP, .*save\(path, model\)"):
        save(model, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"a folder that does not exist; create '.*missing' first"):
        save(tmp_path / "missing/model.safetensors", model)
    assert not list(tmp_path.iterdir())
    save(tmp_path / "both.safetensors", (model, optax.adam(1e-3).init(eqx.filter(model, eqx.is_array))))
    message = r"it holds 0.layers.*; the model expects layers.0.weight, .*load_into\(\(model, None\), path\)"
    with pytest.raises(ValueError, match=rf"nothing in path='.*both.safetensors' fits the model: {message}"):
        load_into(model, tmp_path / "both.safetensors")
    zeros = jax.tree.map(lambda x: 0 * x if eqx.is_array(x) else x, model)
    (alone, _), report = load_into((zeros, None), tmp_path / "both.safetensors")
    assert eqx.tree_equal(alone, model) and not report.fresh and report.unused
    save(tmp_path / "alone.safetensors", model)
    with pytest.raises(ValueError, match="the model expects 0.layers.*. Give the model that was"):
        load_into((model, None), tmp_path / "alone.safetensors")
    converted = fp8_linear_layers(model)
    moved = jax.tree.map(lambda x: x - 1e-3 if eqx.is_inexact_array(x) else x, converted)
    with pytest.raises(ValueError, match="was changed by something other"):
        save(tmp_path / "moved.safetensors", moved)
    assert not (tmp_path / "moved.safetensors").exists()


def test_frozen_layers_under_their_former_names(tmp_path):
    """Data and scales were the kernel's; those of experts, whose order was another, stay as the model has them."""
    Experts, In, Out = hax.make_axes(experts=2, inputs=32, outputs=64)
    plain = {
        "up": eqx.nn.Linear(32, 64, key=jax.random.key(0)),
        "down": hnn.Linear.init(Out, In, key=jax.random.key(1)),
    }
    export_model(plain, tmp_path / "folder", "NVFP4A16")
    model = import_model(tmp_path / "folder", plain, weights="frozen")
    before = {"up.kernel.stored.tensor_scale": "up.kernel.unit", "down.kernel.stored.tensor_scale": "down.kernel.unit"}
    arrays = {name: np.asarray(x) for name, x in arrays_of(model).items()}
    old = {before.get(name, name.replace(".stored.", ".")): x for name, x in arrays.items()}
    assert {"up.kernel.data", "up.kernel.scale", "down.kernel.unit", "down.bias"} <= set(old)
    safetensors.numpy.save_file(old, tmp_path / "old.safetensors")
    zeros = jax.tree.map(jnp.zeros_like, model)
    loaded, report = load_into(zeros, tmp_path / "old.safetensors", strict=True)
    assert bool(eqx.tree_equal(loaded, model)) and report.is_complete

    experts = freeze(
        quantize_for_inference({"up": hnn.MoELinear.init(Experts, In, Out, key=jax.random.key(2))}, "FP8_DYNAMIC")
    )
    old = {name.replace(".stored.", "."): np.asarray(x) for name, x in arrays_of(experts).items()}
    with pytest.raises(ValueError, match=r"nothing for up\.kernel\.stored\.data.*allow_fresh_weights=True"):
        load_into(experts, old)
