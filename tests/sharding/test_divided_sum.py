"""Gradients of inputs on several CPUs are rounded where one CPU rounds them: once, after the scale."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import haliax_fp8 as fp8


MESH = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
Batch, In, Out, Member = hax.make_axes(batch=32, inputs=48, outputs=64, member=3)


def layer(key):
    linear = hnn.Linear.init(In, Out, key=key, use_bias=False)
    return fp8.fp8_linear_layers(fp8.cast_params(linear, jnp.bfloat16))


def one_layer():
    model, x = layer(jax.random.key(0)), hax.random.normal(jax.random.key(1), (Batch, In)).astype(jnp.bfloat16)
    return model, x, P("data"), lambda model, x: model(x).array


def members():
    """Each with scales of its own."""
    model = eqx.filter_vmap(layer)(jax.random.split(jax.random.key(0), Member.size))
    x = hax.random.normal(jax.random.key(1), (Member, Batch, In)).astype(jnp.bfloat16)

    def call(model, x):
        return eqx.filter_vmap(lambda m, x: m(hax.named(x, (Batch, In))).array)(model, x.array)

    return model, x, P(None, "data"), call


@pytest.mark.more
@pytest.mark.parametrize("case", [one_layer, members])
def test_gradients_of_inputs_have_the_bits_of_one_device(case):
    model, x, rows, call = case()

    def loss(args):
        model, x = args
        return (call(model, x).astype(jnp.float32) ** 2).mean()

    gradient = eqx.filter_jit(lambda model, x: fp8.filter_grad(loss)((model, x)))
    # Scales of the data, with four significant bits each: the first are 1.
    for _ in range(2):
        overwrites, rest = fp8.partition_for_grad_overwrite(gradient(model, x)[0])
        model = fp8.apply_updates(model, jax.tree.map(jnp.zeros_like, rest), overwrites)
    expected = gradient(model, x)[1]
    with jax.set_mesh(MESH):
        put = lambda node, spec: jax.device_put(node, NamedSharding(MESH, spec))
        divided = gradient(jax.tree.map(lambda a: put(a, P()), model), jax.tree.map(lambda a: put(a, rows), x))[1]
    np.testing.assert_array_equal(np.asarray(divided.array), np.asarray(expected.array))
