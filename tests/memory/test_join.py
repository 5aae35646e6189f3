"""Layers joined into one: the same numbers as the layers apart, in one product; and apart again, bit for bit."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, equations

import haliax_fp8 as fp8
from haliax_fp8 import Fp8Config, describe, fp8_linear_layers
from haliax_fp8.memory import JoinedLinear, join_linear, split_linear


Embed, Heads, Head, Rows = hax.make_axes(embed=32, heads=4, head=16, rows=16)
Mid, Blocks = Embed.alias("mid"), hax.Axis("block", 3)


def of_haliax(key, outputs=((Heads, Head), Head, ()), **options):
    """Layers of two output axes, of one, and of none."""
    keys = jax.random.split(key, len(outputs))
    return [hnn.Linear.init(Embed, Out, key=key, **options) for Out, key in zip(outputs, keys, strict=True)]


def of_equinox(key, outputs=(64, 16, "scalar"), **options):
    keys = jax.random.split(key, len(outputs))
    return [eqx.nn.Linear(Embed.size, out, key=key, **options) for out, key in zip(outputs, keys, strict=True)]


LAYERS = {
    "haliax": of_haliax,
    "haliax, input axes first": lambda key: of_haliax(key, ((Heads, Head), Head, Heads), out_first=False),
    "haliax, no bias": lambda key: of_haliax(key, use_bias=False),
    "haliax, muP": lambda key: of_haliax(key, reparam_cls=hnn.Linear.output_reparam()),
    "equinox": of_equinox,
    "equinox, no bias": lambda key: of_equinox(key, use_bias=False),
}
each = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def integers(tree):
    """From -4 to 4: in whatever order a product is summed, and in FP8 too, it is exact."""
    return jax.tree.map(lambda x: jnp.clip(jnp.round(8 * x), -4, 4) if eqx.is_inexact_array(x) else x, tree)


def inputs():
    return jax.random.normal(jax.random.key(1), (Rows.size, Embed.size))


def outputs(layers, x):
    """Of a list of layers or of joined ones, as arrays."""
    first = layers[0] if isinstance(layers, list) else layers.linear
    call = layers if callable(layers) else lambda x: tuple(layer(x) for layer in layers)
    if isinstance(first, hnn.Linear):
        return tuple(out.array for out in call(hax.named(x, (Rows, Embed))))
    return jax.vmap(call)(x)


def loss(layers, x):
    return sum(jnp.sum(i * out**2) for i, out in enumerate(outputs(layers, x), start=1))


def products(function, *args):
    """The products in all that a function calls."""
    jaxpr = eqx.filter_make_jaxpr(function)(*args)[0]
    return sum(equation.primitive.name in ("fp8_dot", "dot_general") for equation in equations(jaxpr))


@each
@pytest.mark.parametrize("convert", [lambda model: model, fp8_linear_layers], ids=["float32", "fp8"])
def test_the_same_outputs_in_one_product(make, convert):
    """Bit for bit where sums are exact, in FP8 too while all scales are 1."""
    layers, x = integers(make(jax.random.key(0))), integers(inputs())
    joined = convert(join_linear(layers))
    assert (products(outputs, convert(layers), x), products(outputs, joined, x)) == (3, 1)
    assert_same(outputs(joined, x), tuple(outputs(convert(layers), x)))


@each
def test_axes_and_shapes_are_those_of_the_layers(make):
    layers = make(jax.random.key(0))
    x = hax.ones((Rows, Embed)) if isinstance(layers[0], hnn.Linear) else jnp.ones(Embed.size)
    shape = lambda out: out.axes if isinstance(out, hax.NamedArray) else out.shape
    assert [shape(out) for out in join_linear(layers)(x)] == [shape(layer(x)) for layer in layers]


def test_a_matrix_of_examples_in_columns():
    """As Equinox's layers take it without a bias; the outputs are rows."""
    layers, x = integers(of_equinox(jax.random.key(0), (32, 8), use_bias=False)), integers(inputs()).T
    for model in (join_linear(layers), fp8_linear_layers(join_linear(layers))):
        assert_same(model(x), tuple(layer(x) for layer in layers))


@pytest.mark.more
@each
def test_the_same_gradients(make):
    """Of weights, biases and the input, bit for bit where sums are exact."""
    layers, x = integers(make(jax.random.key(0))), integers(inputs())
    gradients = lambda layers: eqx.filter_grad(lambda args: loss(*args))((layers, x))
    (expected, dx), (joined, joined_dx) = gradients(layers), gradients(join_linear(layers))
    assert_same(split_linear(joined), expected)
    np.testing.assert_array_equal(joined_dx, dx)


@each
def test_layers_come_apart_as_they_were(make):
    layers = make(jax.random.key(0))
    assert_same(split_linear(join_linear(layers)), layers)
    assert_same(split_linear(fp8_linear_layers(join_linear(layers))), layers)


@pytest.mark.more
@each
def test_a_trained_layer_comes_apart_without_state(make):
    """In parts of the weight that it has learned; these make the same numbers in high precision as they do joined."""
    model = fp8_linear_layers(join_linear(make(jax.random.key(0))), Fp8Config(amax_history_length=4))
    for _ in range(2):
        overwrites, gradients = fp8.partition_for_grad_overwrite(fp8.filter_grad(loss)(model, inputs()))
        model = fp8.apply_updates(model, jax.tree.map(lambda g: -0.01 * g, gradients), overwrites)
    assert float(model.linear.dot_general.scale("kernel")) != 1.0
    layers = split_linear(model)
    assert not fp8.training.fp8_states(layers)
    assert_same(join_linear(layers), fp8.restore_linear_layers(model))
    assert [type(layer) for layer in layers] == [type(layer) for layer in make(jax.random.key(0))]


class Attention(eqx.Module):
    """As an author writes it."""

    qkv: JoinedLinear

    @staticmethod
    def init(*, key):
        return Attention(join_linear(of_haliax(key, (Mid, Mid, Mid))))

    def __call__(self, x):
        q, k, v = self.qkv(x)
        return x + (hax.tanh(q) * k + v).rename({"mid": "embed"})


class Separate(eqx.Module):
    """The same with separate layers, as a checkpoint has them."""

    q: hnn.Linear
    k: hnn.Linear
    v: hnn.Linear

    @staticmethod
    def init(*, key):
        return Separate(*of_haliax(key, (Mid, Mid, Mid)))

    def __call__(self, x):
        return x + (hax.tanh(self.q(x)) * self.k(x) + self.v(x)).rename({"mid": "embed"})


@pytest.mark.more
def test_stacked_layers():
    """Joined before they are stacked or after, each block by itself."""
    keys = jax.random.split(jax.random.key(0), Blocks.size)
    separate = hnn.Stacked.init(Blocks, Separate)(key=keys)
    stacked = hnn.Stacked.init(Blocks, Attention)(key=keys)
    layers = list(vars(separate.stacked).values())
    assert_same(join_linear(layers), stacked.stacked.qkv)
    assert_same(split_linear(stacked.stacked.qkv), layers)
    x = hax.named(inputs(), (Rows, Embed))
    np.testing.assert_allclose(stacked.fold(x).array, separate.fold(x).array, rtol=1e-5, atol=1e-5)
    model = fp8_linear_layers(stacked)
    row = describe(model)["stacked.qkv.linear"]
    assert (row.shape, row.stacked, row.is_fp8) == ("embed 32 -> joined 96", "block 3", True)
    assert model.stacked.qkv.linear.dot_general.amax_history("kernel").shape == (Blocks.size, 1024)
    assert_same(split_linear(model.stacked.qkv), layers)


@pytest.mark.more
@pytest.mark.parametrize("make", [of_haliax, of_equinox])
def test_ensembles(make):
    keys = jax.random.split(jax.random.key(0), 3)
    ensemble = eqx.filter_vmap(lambda key: fp8_linear_layers(join_linear(make(key))))(keys)
    layers = eqx.filter_vmap(lambda key: make(key))(keys)
    assert_same(eqx.filter_vmap(split_linear)(ensemble), layers)
    out = eqx.filter_vmap(lambda joined: outputs(joined, inputs()))(integers(ensemble))
    expected = eqx.filter_vmap(lambda layers: outputs(layers, inputs()))(integers(fp8_linear_layers(layers)))
    assert_same(out, expected)


def test_layers_of_equinox_with_leading_axes():
    keys = jax.random.split(jax.random.key(0), 3)
    layers = eqx.filter_vmap(lambda key: of_equinox(key))(keys)
    joined = join_linear(layers)
    assert joined.linear.weight.shape == (3, 81, 32) and joined.linear.bias.shape == (3, 81)
    assert_same(split_linear(joined), layers)


def test_outputs_are_sharded_as_those_of_the_layers():
    """As the mapping says of their axes; it says nothing of the joined one."""
    mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    joined = join_linear(of_haliax(jax.random.key(0), ((Heads, Head), Head)))
    with jax.set_mesh(mesh), hax.axis_mapping({"heads": "model"}):
        queries, _ = eqx.filter_jit(lambda joined, x: joined(x))(joined, hax.named(inputs(), (Rows, Embed)))
    expected = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    assert queries.array.sharding.is_equivalent_to(expected, 3)


def _haliax(In=Embed, Out=Head, **options):
    return hnn.Linear.init(In, Out, key=jax.random.key(0), **options)


def _equinox(inputs=32, outputs=8, **options):
    return eqx.nn.Linear(inputs, outputs, key=jax.random.key(0), **options)


class Doubled(eqx.nn.Linear):
    def __call__(self, x, *, key=None):
        return 2 * super().__call__(x, key=key)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: [], "is empty; pass a sequence of them"),
        (lambda: [_haliax(), hnn.RmsNorm.init(Embed)], r"layers\[1\] of join_linear is a RmsNorm"),
        (
            lambda: [_haliax(), fp8_linear_layers(_haliax())],
            r"layers\[1\] of join_linear.*converted already",
        ),
        (
            lambda: [_equinox(), fp8_linear_layers(_equinox())],
            r"layers\[1\] of join_linear.*converted already",
        ),
        (lambda: [Doubled(8, 8, key=jax.random.key(0))], "Doubled is a subclass of Linear"),
        (lambda: [_haliax(), _equinox()], r"differ in class: .*haliax.*Linear.*equinox.*Linear"),
        (lambda: [_haliax(), _haliax(In=Heads)], "differ in input axes: .*heads"),
        (lambda: [_haliax(), _haliax(use_bias=False)], r"differ in bias: \['yes', 'no'\]"),
        (lambda: [_haliax(), _haliax(out_first=False)], "differ in axes of the weight"),
        (
            lambda: [_haliax(), _haliax(reparam_cls=hnn.Linear.output_reparam())],
            "differ in reparametrization: .*OutputLinearMup",
        ),
        (lambda: [_equinox(), _equinox(inputs=16)], r"differ in input features: \[32, 16\]"),
        (lambda: [_equinox(), _equinox(dtype=jnp.bfloat16)], r"differ in dtype: \['float32', 'bfloat16'\]"),
    ],
)
def test_layers_that_do_not_make_one(make, words):
    with pytest.raises(ValueError, match=words):
        join_linear(make())
