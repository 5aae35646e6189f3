"""Layers that are joined into one: the same numbers as the layers apart, in any function and under any transformation;
and back again."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax.quantization import Fp8DotGeneralOp
from haliax.state_dict import (
    from_state_dict,
    from_torch_compatible_state_dict,
    to_state_dict,
    to_torch_compatible_state_dict,
)
from helpers import unchecked

import haliax_fp8 as fp8
from haliax_fp8 import Fp8Config, OneProduct, fp8_linear_layers, fuse_projections, separate_projections


Embed, Mlp, Heads, Head, Rows = hax.make_axes(embed=32, mlp=64, heads=4, head=16, rows=16)


class Block(eqx.Module):
    """Projections of one, two and three output axes, with and without a bias, and what is no projection."""

    q_proj: hnn.Linear
    k_proj: hnn.Linear
    gate: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear
    norm: hnn.RmsNorm

    @staticmethod
    def init(*, key, out_first=True):
        keys = iter(jax.random.split(key, 5))
        linear = lambda In, Out, bias: hnn.Linear.init(In, Out, key=next(keys), use_bias=bias, out_first=out_first)
        q, k = linear(Embed, (Heads, Head), True), linear(Embed, Head, True)
        norm = hnn.RmsNorm.init(Embed, use_bias=False)
        return Block(q, k, linear(Embed, Mlp, False), linear(Embed, Mlp, False), linear(Mlp, Embed, False), norm)

    def __call__(self, x):
        scores = hax.dot(self.q_proj(x), self.k_proj(x), axis=Head).sum(Heads)
        return x + self.norm(scores * self.down(hnn.silu(self.gate(x)) * self.up(x)))


class Checkpointed(Block):
    """Its layers are out of reach: inside a program of its own."""

    def __call__(self, x):
        return jax.checkpoint(super().__call__)(x)


def stacked():
    Blocks = hax.Axis("block", 3)
    return hnn.Stacked.init(Blocks, Block)(key=jax.random.split(jax.random.key(0), Blocks.size))


MODELS = {
    "one": lambda: Block.init(key=jax.random.key(0)),
    "input axes first": lambda: Block.init(key=jax.random.key(0), out_first=False),
    "stacked": stacked,
    "checkpointed": lambda: Checkpointed(**vars(Block.init(key=jax.random.key(0)))),
}
# Of one application; `Stacked` traces it once.
PRODUCTS = {"one": 3, "input axes first": 3, "stacked": 3, "checkpointed": 5}


def inputs():
    return hax.random.normal(jax.random.key(1), (Rows, Embed))


def integers(tree):
    """From -4 to 4: however a backend orders the sums of a product, and in FP8 too, they are exact."""
    return jax.tree.map(lambda x: jnp.clip(jnp.round(8 * x), -4, 4) if eqx.is_inexact_array(x) else x, tree)


def apply(model, x):
    return model.fold(x) if isinstance(model, hnn.Stacked) else model(x)


def loss(model, x):
    return (apply(model, x) ** 2).mean().scalar()


def assert_same(a, b):
    """Bit for bit, and of the same structure."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, eqx.filter(a, eqx.is_array), eqx.filter(b, eqx.is_array))


def products(function, *args):
    """How many products a function has, in all that it calls."""

    def count(jaxpr):
        inner = sum(map(count, jaxprs_in_params(jaxpr.eqns)))
        return inner + sum(eqn.primitive.name in ("fp8_dot", "dot_general") for eqn in jaxpr.eqns)

    def jaxprs_in_params(eqns):
        for eqn in eqns:
            for value in eqn.params.values():
                if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                    yield getattr(value, "jaxpr", value)

    return count(eqx.filter_make_jaxpr(function)(*args)[0].jaxpr)


def weights_of(gradients):
    return fp8.partition_for_grad_overwrite(separate_projections(gradients))[1]


CONVERSIONS = pytest.mark.parametrize("convert", [lambda model: model, fp8_linear_layers], ids=["float32", "fp8"])


@pytest.mark.parametrize("name", MODELS)
@CONVERSIONS
def test_the_same_output_in_fewer_products(name, convert):
    """Bit for bit, in FP8 too while all scales are 1; only a second block's inputs are no integers any more."""
    model, x = convert(integers(MODELS[name]())), integers(inputs())
    fused = fuse_projections(model, how=OneProduct())
    # Beside those of the layers, one of two activations.
    assert (products(apply, model, x), products(apply, fused, x)) == (6, PRODUCTS[name] + 1)
    out, expected = apply(fused, x).array, apply(model, x).array
    if name != "stacked":
        np.testing.assert_array_equal(out, expected)
    elif convert is not fp8_linear_layers:
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("name", MODELS)
def test_the_same_gradients(name):
    """But for their last bits: the gradient of an input is one sum in place of a sum of sums.

    Of float64's sixteen digits, the derivative of the norm cancels a few.
    """
    with jax.enable_x64(True):
        as_float64 = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float64) if eqx.is_inexact_array(x) else x, tree)
        model, x = as_float64((MODELS[name](), inputs()))
        fused = fuse_projections(model, how=OneProduct())
        expected, got = (weights_of(eqx.filter_grad(loss)(m, x)) for m in (model, fused))
        assert jax.tree.structure(expected) == jax.tree.structure(got)
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
            assert float(jnp.abs(a - b).max()) <= 1e-10 * float(jnp.abs(a).max())


@pytest.mark.parametrize("name", MODELS)
def test_layers_come_apart_as_they_were(name):
    model = fp8_linear_layers(MODELS[name]())
    assert_same(separate_projections(fuse_projections(model, how=OneProduct())), model)
    converted_after = fp8_linear_layers(fuse_projections(MODELS[name](), how=OneProduct()))
    assert_same(converted_after, fuse_projections(model, how=OneProduct()))


class Joined(eqx.Module):
    """What `OneProduct` is to make of two layers, written by hand."""

    joined: hnn.Linear

    def __call__(self, x):
        both = self.joined(x)
        return hnn.silu(both["joined", : Mlp.size]) * both["joined", Mlp.size :]


class Gated(eqx.Module):
    gate: hnn.Linear
    up: hnn.Linear

    def __call__(self, x):
        gate, up = self.gate(x).rename({"mlp": "joined"}), self.up(x).rename({"mlp": "joined"})
        return hnn.silu(gate) * up


def gated():
    keys = jax.random.split(jax.random.key(0))
    gate, up = (hnn.Linear.init(Embed, Mlp, key=key, use_bias=False) for key in keys)
    # Of another size, so that one scale for both differs from two.
    return Gated(gate, hnn.Linear(3.7 * up.weight, None, Embed, Mlp))


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "mxfp8"])
@pytest.mark.parametrize("gradient", [fp8.filter_value_and_grad, eqx.filter_value_and_grad], ids=["ours", "equinox"])
def test_it_trains_as_a_layer_that_was_one_from_the_start(recipe, gradient):
    config = Fp8Config(recipe=recipe, amax_history_length=4 if recipe == "delayed" else None)
    one = gated()
    weight = jnp.concatenate([one.gate.weight.array, one.up.weight.array])
    Both = hax.Axis("joined", 2 * Mlp.size)
    by_hand = Joined(hnn.Linear(hax.named(weight, (Both, Embed)), None, Embed, Both))
    fused = fuse_projections(fp8_linear_layers(one, config), how=OneProduct())
    by_hand = fp8_linear_layers(by_hand, config)
    step = eqx.filter_jit(gradient(loss))
    for _ in range(3):
        models = []
        for model in (fused, by_hand):
            value, gradients = step(model, inputs())
            overwrites, gradients = fp8.partition_for_grad_overwrite(gradients)
            models.append((value, fp8.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients), overwrites)))
        assert models[0][0] == models[1][0]
        fused, by_hand = (model for _, model in models)
    leaves = [jax.tree.leaves(eqx.filter(model, eqx.is_array)) for model in (fused, by_hand)]
    for mine, theirs in zip(*leaves, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_trained_layers_join_with_the_largest_scale():
    model = fp8_linear_layers(gated(), Fp8Config(amax_history_length=4))
    overwrites, _ = fp8.partition_for_grad_overwrite(fp8.filter_grad(loss)(model, inputs()))
    none = jax.tree.map(lambda _: None, overwrites, is_leaf=lambda x: isinstance(x, fp8.OverwriteWithGradient))
    model = fp8.apply_updates(model, none, overwrites)
    ops = model.gate.dot_general, model.up.dot_general
    joined = fuse_projections(model, how=OneProduct()).joined["gate+up"].dot_general
    for operand in ("input", "kernel", "output_grad"):
        assert joined.scale(operand) == max(op.scale(operand) for op in ops)
        expected = jnp.maximum(*(op.amax_history(operand) for op in ops))
        np.testing.assert_array_equal(joined.amax_history(operand), expected)
    apart = separate_projections(fuse_projections(model, how=OneProduct()))
    assert apart.up.dot_general.scale("kernel") == joined.scale("kernel")
    assert apart.up.dot_general.kernel_shape == (Mlp.size,)


@CONVERSIONS
def test_attention_of_equinox(convert):
    """It maps its layers over the tokens; in cross-attention key and value alone read the same."""
    options = {"use_query_bias": True, "use_key_bias": True, "use_value_bias": True}
    attention = convert(eqx.nn.MultiheadAttention(2, 16, **options, key=jax.random.key(0)))
    fused = fuse_projections(attention, how=OneProduct())
    x, y = (jax.random.normal(key, (3, 5, 16)) for key in jax.random.split(jax.random.key(1)))
    to_itself = lambda model: jax.vmap(lambda x: model(x, x, x))(x)
    to_another = lambda model: jax.vmap(lambda x, y: model(x, y, y))(x, y)
    # The layers' products, and attention's own two.
    for function, count in ((to_itself, 2), (to_another, 3)):
        assert products(function, fused) == count + 2
        squares = eqx.filter_value_and_grad(lambda model, function=function: (function(model) ** 2).mean())
        (a, da), (b, db) = (eqx.filter_jit(squares)(model) for model in (attention, fused))
        np.testing.assert_allclose(a, b, rtol=1e-6)
        for left, right in zip(*map(jax.tree.leaves, map(weights_of, (da, db))), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def test_ensembles():
    """`vmap` over models, and over keys that make them."""
    make = lambda key: fp8_linear_layers(eqx.nn.MultiheadAttention(2, 16, key=key))
    models = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 3))
    x = jax.random.normal(jax.random.key(1), (5, 16))
    of_all = eqx.filter_vmap(lambda model: model(x, x, x))
    np.testing.assert_array_equal(of_all(models), of_all(fuse_projections(models, how=OneProduct())))


def test_state_dicts_do_not_know_of_it():
    model = fp8_linear_layers(MODELS["stacked"]())
    fused = fuse_projections(model, how=OneProduct())
    plain, ours = to_state_dict(model), to_state_dict(fused)
    assert plain.keys() == ours.keys()
    jax.tree.map(np.testing.assert_array_equal, plain, ours)
    zeros = jax.tree.map(lambda x: 0 * x if eqx.is_inexact_array(x) else x, fused)
    assert_same(weights_of(from_state_dict(zeros, plain)), weights_of(fused))


def test_state_dicts_of_pytorch_do_not_know_of_it():
    """Haliax flattens each layer's axes for them, those of the layers apart."""
    model = MODELS["one"]()
    fused = fuse_projections(model, how=OneProduct())
    plain, ours = map(to_torch_compatible_state_dict, (model, fused))
    assert plain["q_proj.weight"].shape == (Heads.size * Head.size, Embed.size)
    jax.tree.map(np.testing.assert_array_equal, plain, ours)
    # As JAX's arrays: with several devices, Haliax shards what is NumPy's.
    loaded = from_torch_compatible_state_dict(
        jax.tree.map(jnp.zeros_like, fused), {name: jnp.asarray(x) for name, x in plain.items()}
    )
    assert_same(loaded, fused)


class Backwards(eqx.Module):
    """Calls its layers in another order than it has them, and computes what they read each time."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear

    def __call__(self, x):
        out = self.value(x)
        for layer in (self.key, self.query):
            out = out * layer(jnp.sin(x) + 1.0)
        return out, jnp.zeros(()), jnp.float32(2)

    @staticmethod
    def init():
        return Backwards(*(eqx.nn.Linear(16, 32, key=key) for key in jax.random.split(jax.random.key(0), 3)))


@CONVERSIONS
def test_layers_called_in_another_order(convert):
    model = convert(Backwards.init())
    fused = fuse_projections(model, how=OneProduct())
    x = jnp.arange(16.0)
    assert (products(model, x), products(fused, x)) == (3, 2)
    for got, expected in zip(fused(x), model(x), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
        assert isinstance(got, jax.Array) and got.dtype == expected.dtype


def test_abstract_models():
    model = fp8_linear_layers(MODELS["stacked"]())
    fused = fuse_projections(model, how=OneProduct())
    abstract = fuse_projections(eqx.filter_eval_shape(lambda: model), how=OneProduct())
    assert jax.tree.structure(abstract) == jax.tree.structure(fused)
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    assert shapes(abstract) == shapes(fused)
    loaded = weights_of(from_state_dict(abstract, to_state_dict(model)))
    assert_same(jax.tree.map(jnp.asarray, loaded), weights_of(fused))


def test_what_equinox_does_to_modules():
    attention = eqx.nn.MultiheadAttention(2, 16, dropout_p=0.5, key=jax.random.key(0))
    fused = eqx.nn.inference_mode(fuse_projections(attention, how=OneProduct()))
    assert fused.dropout.inference
    x = jnp.ones((5, 16))
    np.testing.assert_allclose(fused(x, x, x), eqx.nn.inference_mode(attention)(x, x, x), rtol=1e-5)
    changed = eqx.tree_at(lambda model: model.output_proj.weight, fused, jnp.zeros((16, 16)))
    assert not changed(x, x, x).any()


def test_an_ensemble_comes_apart():
    make = lambda key: fuse_projections(fp8_linear_layers(Block.init(key=key)), how=OneProduct())
    apart = lambda key: fp8_linear_layers(Block.init(key=key))
    keys = jax.random.split(jax.random.key(0), 3)
    assert_same(separate_projections(eqx.filter_vmap(make)(keys)), eqx.filter_vmap(apart)(keys))


def test_a_program_with_shardings_of_its_own_keeps_them():
    class Sharded(Gated):
        def __call__(self, x):
            replicated = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            return jax.jit(lambda x: super(Sharded, self).__call__(x), out_shardings=replicated)(x)

    model = Sharded(*vars(gated()).values())
    fused = fuse_projections(model, how=OneProduct())
    assert products(fused, inputs()) == products(model, inputs()) == 2
    np.testing.assert_array_equal(fused(inputs()).array, model(inputs()).array)


def test_devices_that_share_the_weights():
    """Inside `shard_map`, where JAX marks a weight as varying."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = fp8_linear_layers(integers(Backwards.init()))
    fused = fuse_projections(model, how=OneProduct())
    x = jnp.round(4 * jax.random.normal(jax.random.key(0), (8, 16)))
    spec = jax.sharding.PartitionSpec("data")

    def apply(model, x):
        arrays, static = eqx.partition(model, eqx.is_array)
        of_shard = lambda arrays, x: jax.vmap(lambda x: eqx.combine(arrays, static)(x)[0])(x)
        return jax.shard_map(of_shard, mesh=mesh, in_specs=(jax.sharding.PartitionSpec(), spec), out_specs=spec)(
            arrays, x
        )

    assert products(apply, fused, x) == 2
    np.testing.assert_allclose(apply(fused, x), apply(model, x), rtol=1e-5)


def test_attributes_are_those_of_the_module():
    model = MODELS["one"]()
    fused = fuse_projections(model, how=OneProduct())
    assert_same(fused.q_proj, model.q_proj)
    assert_same(fused.norm, model.norm)
    with pytest.raises(AttributeError, match="no_such"):
        _ = fused.no_such
    with pytest.raises(ValueError, match="q_proj is part of a joined layer"):
        fused.module.q_proj(inputs())


def test_one_product_for_some_and_a_shared_input_for_others():
    model = fuse_projections(fp8_linear_layers(MODELS["one"]()), [("q_proj", "k_proj")], how=OneProduct())
    model = fuse_projections(model, [("gate", "up")])
    assert list(model.joined) == ["q_proj+k_proj"]
    assert model.module.gate.dot_general.state.input_group == "module.gate+up"
    apart = separate_projections(model)
    assert_same(apart, fp8_linear_layers(MODELS["one"]()))


def test_modules_within_modules():
    class Outer(eqx.Module):
        gate: hnn.Linear
        up: hnn.Linear
        inner: Block

        def __call__(self, x):
            return self.inner(x) * (self.gate(x) * self.up(x)).sum(Mlp)

    block = MODELS["one"]()
    model = Outer(block.gate, block.up, block)
    fused = fuse_projections(model, how=OneProduct())
    assert isinstance(fused, fp8.FusedProjections) and isinstance(fused.module.inner, fp8.FusedProjections)
    assert_same(separate_projections(fused), model)
    x = integers(inputs())
    np.testing.assert_array_equal(integers(fused)(x).array, integers(model)(x).array)


def _mixed(**changes):
    return fp8_linear_layers(MODELS["one"](), Fp8Config(**changes))


def _of_different_orders():
    gate, up = (hnn.Linear.init(Embed, Mlp, key=jax.random.key(0), out_first=first) for first in (True, False))
    return Gated(gate, up)


def _of_a_subclass():
    class Doubled(eqx.nn.Linear):
        def __call__(self, x, *, key=None):
            return 2 * super().__call__(x, key=key)

    return Gated(*(Doubled(16, 32, key=jax.random.key(0)) for _ in range(2)))


def _of_another_product():
    layer = hnn.Linear.init(Embed, Mlp, key=jax.random.key(0), dot_general=Fp8DotGeneralOp.init())
    return Gated(layer, gated().up)


@pytest.mark.parametrize(
    "make, groups, words",
    [
        (lambda: _mixed(overrides={"up": "current"}), [("gate", "up")], "their products differ"),
        (lambda: _mixed(targets="up"), [("gate", "up")], "their products differ"),
        (MODELS["one"], [("q_proj", "gate")], "differ in input axes, bias"),
        (MODELS["one"], [("gate", "down")], "differ in input axes, bias"),
        (MODELS["one"], [("gate", "up"), ("up", "down")], "in more than one group"),
        (_of_different_orders, [("gate", "up")], "weights differ in axes"),
        (_of_a_subclass, [("gate", "up")], "name no two layers"),
        (_of_another_product, [("gate", "up")], "name no two layers"),
        (MODELS["one"], [("no", "such")], "name no two layers"),
        (
            lambda: eqx.nn.MultiheadAttention(2, 16, key_size=8, key=jax.random.key(0)),
            fp8.projections,
            "input features",
        ),
    ],
)
def test_layers_that_do_not_make_one(make, groups, words):
    with pytest.raises(ValueError, match=words):
        fuse_projections(make(), groups, how=OneProduct())


def test_what_is_no_fusion_is_refused():
    with unchecked(), pytest.raises(ValueError, match="how='one'"):
        fuse_projections(fp8_linear_layers(MODELS["one"]()), how="one")
