"""Gradients that each device adds up for itself, and all reduce once per step."""

import dataclasses
import functools

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import haliax_fp8 as fp8
from haliax_fp8.training import ReduceOnce


Batch, Position, Embed, Mlp = hax.make_axes(batch=8, position=4, embed=32, mlp=64)
MESH = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
RATE = 0.1
FEATURES, DATA = {"mlp": "model"}, {"batch": "data"}
# What is divided of parameters, of activations, and the rows.
LAYOUTS = {
    "data": ({}, DATA, "data"),
    "sharded": ({"embed": "data"}, DATA, "data"),
    "sharded and features": ({"embed": "data", **FEATURES}, {**DATA, **FEATURES}, "data"),
    "over both": ({"embed": ("data", "model")}, {"batch": ("data", "model")}, ("data", "model")),
}


class Net(eqx.Module):
    """Two layers, between which features are divided, and one of Equinox."""

    up: hnn.Linear
    down: hnn.Linear
    last: eqx.nn.Linear

    @staticmethod
    def init():
        keys = jax.random.split(jax.random.key(0), 3)
        linear = functools.partial(hnn.Linear.init, use_bias=False)
        return Net(
            linear(Embed, Mlp, key=keys[0]),
            linear(Mlp, Embed, key=keys[1]),
            eqx.nn.Linear(Embed.size, 16, key=keys[2]),
        )

    def __call__(self, x):
        x = self.down(hax.auto_sharded(hax.tanh(self.up(x))))
        return jax.vmap(jax.vmap(self.last))(x.rearrange((..., "batch", "position", "embed")).array)


def loss_fn(model, x, target):
    return ((model(x) - target) ** 2).mean()


def batch(seed=0, scale=1.0):
    """Rows of very different sizes: the maximum is that of one of them."""
    keys = jax.random.split(jax.random.key(seed))
    x = hax.random.normal(keys[0], (Batch, Position, Embed)) * hax.named(scale * jnp.exp2(jnp.arange(8.0)), Batch)
    return x, jax.random.normal(keys[1], (Batch.size, Position.size, 16))


def parts_of(x, target, microbatches, devices):
    """The rows of each microbatch and device: devices hold neighbouring rows, microbatches take every n-th."""
    for i in range(microbatches):
        rows = np.arange(i, Batch.size, microbatches).reshape(devices, -1)
        for own in rows:
            yield hax.named(x.array[own], (Batch.resize(len(own)), Position, Embed)), target[own]


def expected_step(model, x, target, microbatches, devices):
    """The step from the mean of the parts' gradients, and the maximum of their state."""
    total, losses = None, []
    for part in parts_of(x, target, microbatches, devices):
        loss, gradients = eqx.filter_jit(fp8.filter_value_and_grad(loss_fn))(model, *part)
        total = fp8.accumulate_gradients(total, gradients)
        losses.append(float(loss))
    overwrites, gradients = fp8.partition_for_grad_overwrite(total)
    gradients = jax.tree.map(lambda g: g / len(losses), gradients)
    updates = jax.tree.map(lambda g: -RATE * g, gradients)
    return fp8.apply_updates(model, updates, overwrites), np.mean(losses), gradients


def on_mesh(tree, mapping):
    def put(node):
        names = node.axis_names if isinstance(node, hax.NamedArray) else ()
        return jax.device_put(node, NamedSharding(MESH, P(*(mapping.get(name) for name in names))))

    return jax.tree.map(put, tree, is_leaf=lambda node: isinstance(node, hax.NamedArray))


def states(model):
    return jax.tree.leaves(fp8.partition_for_grad_overwrite(model)[0])


@pytest.mark.parametrize("microbatches", (1, pytest.param(2, marks=pytest.mark.more)))
@pytest.mark.parametrize("recipe", ("delayed", pytest.param("current", marks=pytest.mark.more)))
@pytest.mark.parametrize("layout", ("sharded and features", *(pytest.param(x, marks=pytest.mark.more) for x in ("data", "sharded", "over both"))))
def test_a_step_is_that_of_the_parts(layout, recipe, microbatches):
    parameters, activations, over = LAYOUTS[layout]
    devices = int(np.prod([MESH.shape[axis] for axis in ((over,) if isinstance(over, str) else over)]))
    model = fp8.fp8_linear_layers(Net.init(), recipe=recipe)
    model = fp8.TrainStep(loss_fn, optax.sgd(RATE)).calibrate(model, *batch())
    x, target = batch(1)
    expected, loss, gradients = expected_step(model, x, target, microbatches, devices)
    step = fp8.TrainStep(loss_fn, optax.sgd(RATE), microbatches=microbatches, reduce_gradients=ReduceOnce(over=over))
    with jax.set_mesh(MESH), hax.axis_mapping(activations):
        sharded = on_mesh(model, parameters)
        rows = on_mesh(x, activations), jax.device_put(target, NamedSharding(MESH, P(over)))
        found, _, metrics = step(sharded, step.init(sharded), *rows)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(gradients), rtol=1e-3)
    for a, b, g in zip(*map(jax.tree.leaves, (fp8.trainable(found), fp8.trainable(expected), gradients)), strict=True):
        error = np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(RATE * np.asarray(g))
        assert error < 5e-3, a.shape
    for a, b in zip(states(found), states(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2 * 2**-23)
