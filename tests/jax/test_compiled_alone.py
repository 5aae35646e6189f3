"""Primitives outside of `jit`, and under `jax.disable_jit`."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import haliax_fp8 as fp8
from haliax_fp8._jax.primitives import compile_alone
from haliax_fp8.experimental.attention import Fp8Attention


def scaled(traced):
    """A primitive that notes each lowering."""
    primitive = Primitive("scaled")
    primitive.def_abstract_eval(lambda x, **_: x)

    def multiply(x, *, factor):
        traced.append(factor)
        return x * factor

    mlir.register_lowering(primitive, mlir.lower_fun(multiply, multiple_results=False))
    compile_alone(primitive)
    return primitive


def test_evaluated_without_jit():
    primitive = scaled([])
    np.testing.assert_array_equal(primitive.bind(jnp.arange(3.0), factor=2.0), [0.0, 2.0, 4.0])
    with jax.disable_jit():
        np.testing.assert_array_equal(primitive.bind(jnp.arange(3.0), factor=3.0), [0.0, 3.0, 6.0])


def test_compiled_once_for_each_choice():
    primitive = scaled(traced := [])
    for factor in (2.0, 2.0, 3.0, 2.0):
        primitive.bind(jnp.arange(4.0), factor=factor)
    assert traced == [2.0, 3.0]


def dense():
    layer = fp8.fp8_linear_layers(eqx.nn.Linear(16, 16, key=jax.random.key(0), dtype=jnp.bfloat16), recipe="current")
    return lambda x: jax.vmap(layer)(x), jnp.ones((16, 16), jnp.bfloat16)


def experts():
    axes = Experts, In, Out = hax.make_axes(expert=2, input=16, output=16)
    config = fp8.Fp8Config(recipe="current", allow_dense_groups=True)
    layer = fp8.fp8_linear_layers(hnn.MoELinear.init(*axes, key=jax.random.key(0), use_bias=False), config)
    sizes = hax.named(jnp.array([8, 8]), Experts)
    return lambda x: layer(hax.named(x, ("rows", In)), sizes).array, jnp.ones((16, 16))


def blocks():
    layer = fp8.fp8_linear_layers(eqx.nn.Linear(64, 16, key=jax.random.key(0)), recipe="mxfp8")
    return lambda x: jax.vmap(layer)(x), jnp.ones((16, 64))


def attention():
    attend = Fp8Attention.init(emulate=True)
    return lambda x: attend(x, x, x), jax.random.normal(jax.random.key(1), (1, 16, 2, 64))


@pytest.mark.parametrize("made", [dense, experts, blocks, attention])
def test_products_without_jit(made):
    """As one debugs: every equation is evaluated alone."""
    function, x = made()
    square = lambda x: (function(x).astype(jnp.float32) ** 2).mean()
    expected = jax.grad(square)(x)
    with jax.disable_jit():
        got = jax.grad(square)(x)
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), rtol=2**-7)
    assert np.any(np.asarray(got, np.float32))


def test_sums_over_a_mesh_without_jit():
    function, x = dense()
    square = lambda x: (function(x).astype(jnp.float32) ** 2).mean()
    expected = jax.grad(square)(x)
    with jax.disable_jit(), jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        np.testing.assert_array_equal(jax.grad(square)(x), expected)
