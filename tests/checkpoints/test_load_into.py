"""Checkpoints of plain and converted models, loaded into one another through every kind of file."""

import pathlib

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import haliax.state_dict as hsd
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec as P

from haliax_fp8 import DelayedScaling, TrainStep, fp8_linear_layers
from haliax_fp8._state.op_state import OpState
from haliax_fp8._state.table import guarded
from haliax_fp8.checkpoints import load_into, save
from haliax_fp8.checkpoints.interchange.names import is_saved, leaves_of
from haliax_fp8.memory import join_linear
from haliax_fp8.recipes import StaticScaling


Embed, Heads, Size, Key = hax.make_axes(embed=8, heads=2, size=3, key=4)


class Apart(eqx.Module):
    q: hnn.Linear
    k: hnn.Linear
    up: eqx.nn.Linear


class Together(eqx.Module):
    qk: eqx.Module
    up: eqx.nn.Linear


def block(seed, *, joined=False):
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k = hnn.Linear.init(Embed, (Heads, Size), key=keys[0]), hnn.Linear.init(Embed, Key, key=keys[1])
    up = eqx.nn.Linear(8, 4, key=keys[2])
    return Together(join_linear([q, k]), up) if joined else Apart(q, k, up)


RECIPES = {
    "delayed 8": DelayedScaling(amax_history_length=8),
    "delayed 64": DelayedScaling(amax_history_length=64),
    "current": "current",
    "static": StaticScaling(0.5),
    "joined": DelayedScaling(amax_history_length=8),
}
MODELS = ("plain", *RECIPES)


def made(name, seed):
    """A model; its histories as after many steps, a different amax in each."""
    model = block(seed, joined=name == "joined")
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


def through_equinox(model, path):
    save(path / "model.eqx", model)
    return path / "model.eqx"


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


KINDS = {f.__name__: f for f in (through_equinox, through_safetensors, through_state_dict, through_orbax)}


def weights(model):
    """The weights of the layers apart, in NumPy: rows of a joined one are those of its layers."""
    arrays = {name: array for name, array in arrays_of(model).items() if ".state" not in name}
    if isinstance(model, Apart):
        return arrays
    for end in ("weight", "bias"):
        whole = arrays.pop(f"qk.linear.{end}")
        arrays |= {f"q.{end}": whole[:6].reshape(2, 3, *whole.shape[1:]), f"k.{end}": whole[6:]}
    return arrays


def tables(model):
    return {leaf.name: np.asarray(leaf.value) for leaf in leaves_of(model) if leaf.state is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_every_pair(kind, tmp_path: pathlib.Path):
    saved = {name: made(name, seed=1) for name in MODELS}
    given = {name: made(name, seed=2) for name in MODELS}
    for old, model in saved.items():
        (tmp_path / old).mkdir()
        path = KINDS[kind](model, tmp_path / old)
        for new, into in given.items():
            loaded, report = load_into(into, path, joined={"qk": ("q", "k")})
            jax.tree.map(lambda a, b: None, loaded, into)
            assert jax.tree.structure(loaded) == jax.tree.structure(into)
            want, got = weights(model), weights(loaded)
            assert want.keys() == got.keys()
            for name in want:
                np.testing.assert_array_equal(got[name], want[name], err_msg=f"{old} -> {new}: {name}")
            check_states(old, new, tables(model), tables(loaded), report, with_states=kind != "through_state_dict")
            assert sorted([*report.kept, *report.changed, *report.fresh]) == sorted(arrays_of(into))


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
