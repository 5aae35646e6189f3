"""What `filter_grad` returns: gradients of ordinary element types, whatever the differentiated function has inside."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, state_is_constant
from jax.experimental import checkify

import haliax_fp8 as fp8


In, Out, Batch = hax.make_axes(embed=8, out=4, batch=8)


class TwoLayers(eqx.Module):
    """One of Haliax, one of Equinox; the first is used twice."""

    first: hnn.Linear
    second: eqx.nn.Linear

    def __call__(self, x):
        h = self.first(x) + hax.tanh(self.first(0.5 * x))
        return self.second(h.array) if h.ndim == 1 else jax.vmap(self.second)(h.array)


def two_layers(recipe):
    first, second = jax.random.split(jax.random.key(0))
    model = TwoLayers(hnn.Linear.init(In, Out, key=first), eqx.nn.Linear(4, 2, key=second))
    return fp8.fp8_linear_layers(model, recipe=recipe)


def loss(model, x):
    return (model(x) ** 2).mean()


def mapped(model, x):
    return jax.vmap(lambda row: loss(model, hax.named(row, In)))(x.array).mean()


X = hax.random.normal(jax.random.key(1), (Batch, In))

# How a gradient is taken, and of what.
WAYS = {
    "alone": lambda model: fp8.filter_grad(loss)(model, X),
    "jit": lambda model: eqx.filter_jit(fp8.filter_grad(loss))(model, X),
    "vmap in the loss": lambda model: eqx.filter_jit(fp8.filter_grad(mapped))(model, X),
    "vmap around": lambda model: eqx.filter_jit(
        lambda model: eqx.filter_vmap(lambda row: fp8.filter_grad(loss)(model, hax.named(row, In)))(X.array)
    )(model),
    "checkpoint": lambda model: eqx.filter_jit(fp8.filter_grad(eqx.filter_checkpoint(loss)))(model, X),
}


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize(
    "way", [pytest.param("alone", marks=pytest.mark.more), *(way for way in WAYS if way != "alone")]
)
def test_no_leaf_of_a_gradient_has_an_extended_type(way, recipe):
    """Optimizers, checkpoints and NumPy know nothing of `fp32_max_grad`."""
    model = two_layers(recipe)
    gradients = WAYS[way](model)
    leaves = jax.tree.leaves(eqx.filter(gradients, eqx.is_array))
    assert len(leaves) == len(jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))
    assert not any(jnp.issubdtype(leaf.dtype, jax.dtypes.extended) for leaf in leaves)
    assert all(np.isfinite(leaf).all() for leaf in leaves)


def test_inside_the_differentiated_function_state_has_one():
    """Or the test above would hold by itself."""
    seen = []

    def observed(model, x):
        arrays = jax.tree.leaves(fp8.partition_for_grad_overwrite(model)[0])
        seen.append([jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in arrays])
        return loss(model, x)

    eqx.filter_jit(fp8.filter_grad(observed))(two_layers("delayed"), X)
    assert seen and all(all(flags) and len(flags) == 2 for flags in seen)


@pytest.mark.more
def test_several_uses_outside_jit():
    layer = fp8.fp8_linear_layers(eqx.nn.Linear(4, 2, key=jax.random.key(0)))
    uses = lambda layer, x: (layer(x) + layer(3.0 * x)).sum()
    gradients = fp8.filter_grad(uses)(layer, jnp.ones(4))
    assert float(gradients.dot_general.amax_history("input")[0]) == 3.0
    assert_same(gradients, eqx.filter_jit(fp8.filter_grad(uses))(layer, jnp.ones(4)))


@state_is_constant
def test_meta_learning_takes_gradients_around_an_inner_step():
    """First-order MAML: the outer gradient is that at the weights after the inner step, and state is constant."""
    model = fp8.fp8_linear_layers(eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0)))
    x = jax.random.normal(jax.random.key(1), (4, 8))
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)

    def after_inner_step(model):
        stopped = jax.tree.map(lambda a: jax.lax.stop_gradient(a) if eqx.is_array(a) else a, model)
        overwrites, gradients = fp8.partition_for_grad_overwrite(fp8.filter_grad(loss)(stopped, x))
        return fp8.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients), overwrites)

    expected = eqx.filter_grad(loss)(after_inner_step(model), 2 * x)
    for wrap in (lambda f: f, eqx.filter_jit):
        outer = wrap(eqx.filter_grad(lambda model: loss(after_inner_step(model), 2 * x)))(model)
        for got, wanted in zip(outer.layers, expected.layers, strict=True):
            np.testing.assert_allclose(got.weight, wanted.weight, rtol=1e-6)


def test_a_function_of_ones_own_takes_the_maximum():
    """`with_max_gradients` at the top of a function that Equinox differentiates; its state must not be left out."""
    model = two_layers("delayed")
    one = lambda model, x: (model.first(x).array ** 2).mean() + (model.first(3.0 * x).array ** 2).mean()
    plain = eqx.filter_jit(eqx.filter_grad(lambda model, x: one(fp8.training.with_max_gradients(model), x)))(model, X)
    exact = eqx.filter_jit(fp8.filter_grad(one))(model, X)
    assert_same(plain.first, exact.first)


def test_a_layer_behind_stop_gradient_keeps_its_state():
    """Its state has no gradient, and was not lost: the loss does not change with it."""
    model = two_layers("delayed")

    def stopped(model, x):
        return (jax.vmap(model.second)(jax.lax.stop_gradient(model.first(x)).array) ** 2).mean()

    overwrites, _ = fp8.partition_for_grad_overwrite(fp8.filter_grad(stopped)(model, X))
    new = fp8.apply_updates(model, jax.tree.map(lambda _: None, model), overwrites)
    assert_same(new.first.dot_general, model.first.dot_general)
    assert new.second.dot_general.amax_history("input")[0] > 0


@pytest.mark.parametrize("gradient", [fp8.filter_grad, eqx.filter_grad], ids=["ours", "equinox"])
@pytest.mark.parametrize("kind", ["alone", "ensemble", "stack"])
def test_a_use_whose_output_gradient_is_zero_is_recorded(kind, gradient):
    """A masked loss multiplies one use by 0: its input counts in a layer, in each member, and in each layer of a stack.

    The plain gradient sums: 1 of the first use and 6 of the second, or what the layers before made of them.
    """
    keys = jax.random.split(jax.random.key(0), 2)
    make = lambda key: eqx.nn.Linear(4, 4, use_bias=False, key=key)
    layers = fp8.fp8_linear_layers(make(keys[0]) if kind == "alone" else eqx.filter_vmap(make)(keys))
    small, big = jnp.ones(4), jnp.full(4, 6.0)

    def out(layers, x):
        if kind == "alone":
            return layers(x)
        if kind == "ensemble":
            return eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(eqx.if_array(0), None))(layers, x)
        arrays, rest = eqx.partition(layers, eqx.is_array)
        # The input of each layer is that of the first.
        return jax.lax.scan(lambda carry, layer: (carry + eqx.combine(layer, rest)(x), None), 0.0 * x, arrays)[0]

    grads = gradient(lambda layers: out(layers, small).sum() + (0.0 * out(layers, big)).sum())(layers)
    newest = np.asarray(grads.dot_general.amax_history("input"))[..., 0]
    largest = 6.0 if gradient is fp8.filter_grad else 7.0
    np.testing.assert_array_equal(newest, np.full(() if kind == "alone" else (2,), largest))
    recorded = np.asarray(grads.dot_general.amax_history("output_grad"))[..., 0]
    np.testing.assert_array_equal(recorded, np.ones_like(newest))


@pytest.mark.parametrize("gradient", [fp8.filter_grad, eqx.filter_grad], ids=["ours", "equinox"])
@pytest.mark.parametrize("errors", ["user_checks", "float_checks"])
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_checkify(gradient, errors, recipe):
    """Checks of the user's and of JAX see what is around the products; gradients are the same.

    Without `jit` checkify runs operation by operation, and the error for a gradient of ours says to add it.
    """
    model, x = two_layers(recipe), hax.ones((Batch, In))

    @jax.jit
    def checked(x):
        checkify.check(x.sum().scalar() < 1e9, "too large")
        return eqx.filter(gradient(loss)(model, x), eqx.is_array)

    error, grads = checkify.checkify(checked, errors=getattr(checkify, errors))(x)
    error.throw()
    # The same program, except for what XLA fuses.
    wanted = eqx.filter(eqx.filter_jit(gradient(loss))(model, x), eqx.is_array)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), grads, wanted)
    if errors == "user_checks":
        error, _ = checkify.checkify(checked, errors=checkify.user_checks)(1e9 * x)
        with pytest.raises(ValueError, match="too large"):
            error.throw()
    else:
        error, _ = checkify.checkify(
            jax.jit(lambda x: gradient(loss)(model, x).second.bias), errors=checkify.float_checks
        )(jnp.nan * x)
        with pytest.raises(ValueError, match="nan"):
            error.throw()
