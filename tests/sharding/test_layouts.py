"""Every layout computes what one device does: each step is taken from the one-device model, and compared."""

import functools

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import haliax_fp8 as fp8
from haliax_fp8._jax.xla import divided_as_made


Batch, Position, Embed, Mlp = hax.make_axes(batch=4, position=8, embed=64, mlp=128)
MESH = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
RATE, KEY = 0.1, jax.random.key(2)


class Gated(eqx.Module):
    """Two layers that read one tensor, whose gradient is wanted too, and one that reads both."""

    gain: hax.NamedArray
    gate: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init():
        keys = jax.random.split(jax.random.key(0), 3)
        linear = functools.partial(hnn.Linear.init, use_bias=False)
        shapes = (Embed, Mlp), (Embed, Mlp), (Mlp, Embed)
        return Gated(hax.ones(Embed), *(linear(*shape, key=key) for shape, key in zip(shapes, keys, strict=True)))

    def __call__(self, x):
        """Positions are called `sequence` where they are divided: not inside, where features are."""
        inside = (x * self.gain).rename({"sequence": "position"})
        h = hax.tanh(self.gate(inside)) * self.up(inside)
        return x + self.down(h.rename({"position": "sequence"}))


FEATURES, DATA, SEQUENCES = {"mlp": "model"}, {"batch": "data"}, {"sequence": "model"}
# What is divided of parameters, and of activations.
LAYOUTS = {
    "sharded, features and sequences": ({"embed": "data", **FEATURES}, {**DATA, **FEATURES, **SEQUENCES}),
    "features": (FEATURES, FEATURES),
    "data": ({}, DATA),
    "sharded": ({"embed": "data"}, DATA),
    "sharded and features": ({"embed": "data", **FEATURES}, {**DATA, **FEATURES}),
    "sequences": ({}, {**DATA, **SEQUENCES}),
}
RECIPES = ("delayed", "current", "rowwise", "deepseek", "mxfp8", "nvfp4", "nvfp4_delayed")
# Of the loss, and of gradients in norm. Sums in another order differ in last bits, and some elements then round to the
# next value. Where scales are powers of two, an ulp of an amax next to one doubles the scale of its block: its largest
# element then loses an eighth in E4M3 if it was above 448. Other blocks than one device's would give the rounding
# errors of two formats, 2.6e-2 * sqrt(2) in E4M3 and four times that in E2M1.
LIMITS = {
    **dict.fromkeys(("rowwise", "deepseek", "mxfp8"), (1e-4, 2e-2)),
    **dict.fromkeys(("nvfp4", "nvfp4_delayed"), (1e-4, 3e-2)),
}


def gradients(models, x):
    """Loss and gradients, the new state among them, of the model of each recipe."""

    def loss_fn(model, x):
        return (fp8.with_rounding_keys(model, KEY)(x) ** 2).mean().scalar()

    return {recipe: fp8.filter_value_and_grad(loss_fn)(model, x) for recipe, model in models.items()}


@eqx.filter_jit
def on_one_device(models, x):
    """Gradients, and the models of the next step."""
    by_recipe, new = gradients(models, x), {}
    for recipe, (_, gradient) in by_recipe.items():
        overwrites, rest = fp8.partition_for_grad_overwrite(gradient)
        updates = jax.tree.map(lambda g: -RATE * g, rest)
        new[recipe] = fp8.apply_updates(models[recipe], updates, overwrites)
    return by_recipe, new


@functools.cache
def steps(recipes, count):
    """The models before each step, its batch, and what one device computes of them."""
    models, reference = {recipe: fp8.fp8_linear_layers(Gated.init(), recipe=recipe) for recipe in recipes}, []
    for i in range(count):
        x = hax.random.normal(jax.random.key(i), (Batch, Position.alias("sequence"), Embed)) * (1.0 + i)
        expected, new = on_one_device(models, x)
        reference.append((models, x, expected))
        models = new
    return reference


def on_mesh(tree, mapping):
    """Arrays divided as a mapping says; state on every device."""

    def put(node):
        names = node.axis_names if isinstance(node, hax.NamedArray) else ()
        return jax.device_put(node, NamedSharding(MESH, P(*(mapping.get(name) for name in names))))

    return jax.tree.map(put, tree, is_leaf=lambda node: isinstance(node, hax.NamedArray))


def check(layout, recipes, count):
    parameters, activations = LAYOUTS[layout]
    run = eqx.filter_jit(gradients)
    for models, x, expected in steps(recipes, count):
        with jax.set_mesh(MESH), hax.axis_mapping(activations):
            by_recipe = run(on_mesh(models, parameters), on_mesh(x, activations))
        for recipe in recipes:
            (loss, gradient), (expected_loss, wanted) = by_recipe[recipe], expected[recipe]
            assert np.isfinite(loss)
            limit, distance = LIMITS.get(recipe, (2e-6, 5e-3))
            np.testing.assert_allclose(loss, expected_loss, rtol=limit, err_msg=recipe)
            (state, rest), (wanted_state, wanted) = map(fp8.partition_for_grad_overwrite, (gradient, wanted))
            for got, one in zip(jax.tree.leaves(rest), jax.tree.leaves(wanted), strict=True):
                error = np.linalg.norm(np.asarray(got) - np.asarray(one)) / np.linalg.norm(np.asarray(one))
                assert error <= distance, (recipe, one.shape)
            for got, one in zip(jax.tree.leaves(state), jax.tree.leaves(wanted_state), strict=True):
                np.testing.assert_array_max_ulp(np.asarray(got), np.asarray(one), 2)


@pytest.mark.more
@pytest.mark.parametrize("layout", list(LAYOUTS)[:2])
def test_layouts_agree_with_one_device(layout):
    check(layout, ("delayed", "current"), 2)


@pytest.mark.more
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_recipes_agree_in_every_layout(layout):
    check(layout, RECIPES, 10)


@pytest.mark.parametrize("identity, divided", [(divided_as_made, False), (lambda x: x, True)])
def test_amaxes_do_not_divide_what_they_are_taken_of(identity, divided):
    """Rows of a kernel are divided; its amaxes are joined with those of tokens, which every device has."""

    def run(x, w):
        activation = jnp.tanh(x)
        rows = identity(jnp.max(jnp.abs(activation), axis=1)), jnp.max(jnp.abs(w), axis=1)
        return activation, jnp.stack(rows)

    x, w = (jax.device_put(jnp.ones((8, 16)), NamedSharding(MESH, spec)) for spec in (P(), P("model")))
    activation, _ = jax.jit(run)(x, w)
    assert (activation.sharding.spec == P("model")) == divided
