"""Masters and moments in the host's memory: the numbers of Optax, and where they are."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from haliax_fp8 import (
    apply_updates,
    cast_params,
    filter_value_and_grad,
    fp8_linear_layers,
    partition_for_grad_overwrite,
    trainable,
)
from haliax_fp8.memory import HostOptimizer


Layers, Embed = hax.make_axes(layers=3, embed=16)


class Block(eqx.Module):
    linear: hnn.Linear

    @staticmethod
    def init(key):
        return Block(hnn.Linear.init(Embed, Embed.alias("out"), key=key))

    def __call__(self, x):
        return x + hax.tanh(self.linear(x).rename({"out": "embed"}))


class Model(eqx.Module):
    blocks: hnn.Stacked[Block]
    scale: jax.Array


def loss_fn(model, x):
    return hax.mean(hax.square(model.blocks.fold(x).array * model.scale[None])).astype(jnp.float32)


@pytest.mark.more
def test_update_is_that_of_optax_on_float32_masters():
    """Three steps of AdamW; the numbers of masters, moments and rounded parameters, bit for bit, but for fusions."""
    keys = jax.random.split(jax.random.key(0), Layers.size)
    plain = cast_params(Model(hnn.Stacked.init(Layers, Block)(keys), jnp.ones(16)), jnp.bfloat16)
    model, optimizer = fp8_linear_layers(plain), optax.adamw(1e-2)
    host = HostOptimizer(optimizer)
    state = host.init(trainable(model))
    masters = jax.tree.map(lambda p: p.astype(jnp.float32), trainable(model))
    x = hax.random.normal(jax.random.key(1), (hax.Axis("batch", 4), Embed), dtype=jnp.bfloat16)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, state):
        _, gradients = filter_value_and_grad(loss_fn)(model, batch)
        overwrites, gradients = partition_for_grad_overwrite(gradients)
        params, state = host.update(gradients, state, trainable(model))
        nothing = jax.tree.map(lambda _: None, gradients)
        return apply_updates(eqx.combine(params, model), nothing, overwrites), state, gradients

    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        expected = optimizer.init(masters)
        update = jax.jit(optimizer.update)
        for _ in range(3):
            model, state, gradients = step(x, model, state)
            updates, expected = update(jax.tree.map(lambda g: g.astype(jnp.float32), gradients), expected, masters)
            masters = optax.apply_updates(masters, updates)
    assert float(model.blocks.stacked.linear.dot_general.scale("input").max()) < 1.0, "state was overwritten"
    in_host = [*jax.tree.leaves(state.masters), *(state.optimizer[n][0][1:] for n in (0, 3))]
    assert {x.sharding.memory_kind for x in jax.tree.leaves(in_host)} == {"pinned_host"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(model) if eqx.is_array(x)} == {"device"}
    assert int(state.optimizer[3][0].count) == int(state.optimizer[0][0].count) == 3
    name, ulp = "blocks.stacked.linear.weight", 2.0**-23
    pairs = [
        (state.masters[3][name], masters.blocks.stacked.linear.weight.array),
        (state.masters[0]["scale"], masters.scale),
        (state.optimizer[3][0].mu[name], expected[0].mu.blocks.stacked.linear.weight.array),
        (state.optimizer[3][0].nu[name], expected[0].nu.blocks.stacked.linear.weight.array),
    ]
    for got, want in pairs:
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=8 * ulp, atol=8 * ulp * 1e-2)
    rounded = np.asarray(state.masters[3][name]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(model.blocks.stacked.linear.weight.array), rounded)


def test_other_parameters_are_refused():
    host = HostOptimizer(optax.sgd(0.1))
    state = host.init({"a": jnp.ones(2)})
    with pytest.raises(ValueError, match="gradients belong to other parameters"):
        host.update({"b": jnp.ones(2)}, state, {"a": jnp.ones(2)})
    with pytest.raises(ValueError, match="state belong to other parameters"):
        host.update({"b": jnp.ones(2)}, state, {"b": jnp.ones(2)})
    with pytest.raises(ValueError, match="params hold no arrays; pass trainable"):
        host.init({})


@pytest.mark.more
def test_masters_stay_divided_over_devices():
    """In the host's memory of the device that has their parameter; the numbers of one device, but for fusions."""
    model = cast_params(hnn.Stacked.init(Layers, Block)(jax.random.split(jax.random.key(0), 3)), jnp.bfloat16)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    host = HostOptimizer(optax.adamw(1e-2))
    gradients = jax.tree.map(lambda p: jnp.cos(100.0 * p.astype(jnp.float32)).astype(p.dtype), trainable(model))

    @eqx.filter_jit(donate="all-except-first")
    def step(gradients, params, state):
        return host.update(gradients, state, params)

    def put(node):
        spec = P(*("data" if name == "embed" else None for name in node.axis_names))
        return jax.device_put(node, NamedSharding(mesh, spec))

    found = []
    for put_layer in (lambda node: node, put):
        params, of_params = (
            jax.tree.map(put_layer, tree, is_leaf=lambda node: isinstance(node, hax.NamedArray))
            for tree in (jax.tree.map(jnp.copy, trainable(model)), gradients)
        )
        with jax.numpy_dtype_promotion("standard"):  # which optax needs
            state = host.init(params)
            for _ in range(2):
                params, state = step(of_params, params, state)
        found.append((params, state))
    master = found[1][1].masters[3]["stacked.linear.weight"]
    assert master.sharding.memory_kind == "pinned_host"
    assert master.sharding.shard_shape(master.shape) == (3, 16, 4)
    moment = found[1][1].optimizer[3][0].nu["stacked.linear.weight"]
    assert moment.sharding.memory_kind == "pinned_host" and moment.sharding.shard_shape(moment.shape) == (3, 16, 4)
    for one, several in zip(*(jax.tree.leaves(state) for _, state in found), strict=True):
        np.testing.assert_allclose(np.asarray(several), np.asarray(one), rtol=2.0**-20)
