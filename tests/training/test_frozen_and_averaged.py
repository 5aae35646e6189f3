"""Freezing and averaging in Equinox's and Optax's own way: what would lose or spoil state says so."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haliax_fp8 as fp8
from haliax_fp8.training import exact_gradients, incremental_update


X = jax.random.normal(jax.random.key(1), (32, 8))
PLAIN = eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))
MODEL = fp8.fp8_linear_layers(PLAIN)
WARNING = "the gradient of an FP8 layer's weight was taken without that of its state"


def loss_fn(model, x=X):
    return jnp.mean((jax.vmap(model)(x) - x) ** 2)


def spec_of(model, *, with_state):
    is_state = lambda node: with_state and isinstance(node, fp8.OverwriteWithGradient)
    spec = jax.tree.map(is_state, model, is_leaf=is_state)
    return eqx.tree_at(lambda m: m.layers[0].weight, spec, True)


def checkpointed(model, x=X):
    return eqx.filter_checkpoint(loss_fn)(model, x)


class Scanned(eqx.Module):
    layers: eqx.nn.Linear

    def __call__(self, x):
        arrays, rest = eqx.partition(self.layers, eqx.is_array)
        return jax.lax.scan(lambda x, layer: (eqx.combine(layer, rest)(x), None), x, arrays)[0]


@pytest.mark.parametrize("loss", [loss_fn, checkpointed])
@pytest.mark.parametrize("take", [eqx.filter_grad, fp8.filter_grad], ids=["equinox", "ours"])
@pytest.mark.parametrize("jit", [False, True])
def test_state_with_the_frozen_weights_is_noticed_in_every_trace(loss, take, jit):
    params, frozen = eqx.partition(MODEL, spec_of(MODEL, with_state=False))
    gradient = take(lambda params, x: loss(eqx.combine(params, frozen), x))
    gradient = eqx.filter_jit(gradient) if jit else gradient
    for x in (X, X[:16]):
        with pytest.warns(UserWarning, match=WARNING) as caught:
            gradient(params, x)
        # The user's line, not one of a library.
        assert {warning.filename for warning in caught} == {__file__}
        assert "OverwriteWithGradient" in str(caught[0].message)


def test_so_it_is_in_a_scan_over_layers():
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 8, key=key))(jax.random.split(jax.random.key(0), 3))
    model = fp8.fp8_linear_layers(Scanned(layers))
    with pytest.warns(UserWarning, match=WARNING):
        jax.grad(lambda w: loss_fn(eqx.tree_at(lambda m: m.layers.weight, model, w)))(model.layers.weight)


def test_every_cause_is_named():
    """State in the frozen part; a conversion inside the loss; an op that each call makes."""

    def converts(model):
        return loss_fn(fp8.fp8_linear_layers(model))

    def makes_an_op(model):
        op = fp8.Fp8DotGeneral.init()
        return jnp.sum(op(X, model.layers[0].weight, (((1,), (1,)), ((), ()))))

    for loss in (converts, makes_an_op):
        with pytest.warns(UserWarning, match=WARNING) as caught:
            eqx.filter_grad(loss)(PLAIN)
        for cause in ("inside the loss: convert it once", "inside __call__: make it a field", "eqx.partition"):
            assert cause in str(caught[0].message)


def test_what_is_right_is_silent():
    trained, frozen = eqx.partition(MODEL, spec_of(MODEL, with_state=True))
    base = fp8.fp8_linear_layers(PLAIN, recipe="rowwise")
    static = fp8.calibrate(fp8.fp8_linear_layers(PLAIN, recipe="static"), loss_fn, [()])
    bias = lambda b: loss_fn(eqx.tree_at(lambda m: m.layers[0].bias, MODEL, b))
    weights = lambda model: lambda w: loss_fn(eqx.tree_at(lambda m: m.layers[0].weight, model, w))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for take in (eqx.filter_grad, fp8.filter_grad):
            take(lambda trained: loss_fn(eqx.combine(trained, frozen)))(trained)
            take(loss_fn)(MODEL)
        # Saliency, a frozen base, recipes that record nothing, forward mode; an analysis or a line search.
        jax.grad(lambda x: loss_fn(MODEL, x))(X)
        jax.grad(bias)(MODEL.layers[0].bias)
        jax.grad(weights(base))(PLAIN.layers[0].weight)
        jax.grad(weights(static))(PLAIN.layers[0].weight)
        weight = PLAIN.layers[0].weight
        jax.jvp(weights(MODEL), (weight,), (weight,))
        exact = lambda w: exact_gradients(loss_fn)(eqx.tree_at(lambda m: m.layers[0].weight, MODEL, w))
        jax.grad(exact)(weight)


def trained(steps):
    step, model = fp8.TrainStep(loss_fn, optax.sgd(0.1)), MODEL
    state, models = step.init(model), []
    for _ in range(steps):
        model, state, _ = step(model, state, X)
        models.append(model)
    return models


def test_an_average_of_whole_models_is_told_the_line_for_averages():
    first, second = trained(2)
    average = jax.tree.map(lambda a, b: 0.99 * a + 0.01 * b if eqx.is_inexact_array(a) else a, first, second)
    with pytest.raises(ValueError, match=r"training\.incremental_update\(model, average, step_size=0\.01\)"):
        fp8.describe(average)


def test_averages():
    models = trained(4)
    average = models[0]
    for n, model in enumerate(models[1:], 1):
        average = incremental_update(model, average, step_size=1 / (n + 1))
    weights = [np.asarray(model.layers[1].weight) for model in models]
    np.testing.assert_allclose(average.layers[1].weight, np.mean(weights, axis=0), rtol=1e-5, atol=1e-7)
    ops = average.layers[1].dot_general, models[-1].layers[1].dot_general
    assert ops[0].state is ops[1].state
    assert np.isfinite(loss_fn(average))
    # Inside a compiled step, and of plain models.
    target = eqx.filter_jit(incremental_update)(models[3], models[0], 0.25)
    np.testing.assert_allclose(target.layers[0].bias, 0.25 * models[3].layers[0].bias + 0.75 * models[0].layers[0].bias)
    for step_size, end in ((0, models[0]), (jnp.float32(1.0), models[3])):
        moved = incremental_update(models[3], models[0], step_size)
        np.testing.assert_array_equal(moved.layers[0].weight, end.layers[0].weight)
    assert jax.tree.structure(incremental_update(PLAIN, PLAIN, 0.5)) == jax.tree.structure(PLAIN)


@pytest.mark.parametrize("step_size", [2, -0.1, np.nan, np.inf, None, "0.5", True, jnp.float32(1.5)])
def test_an_average_moves_by_a_share(step_size):
    with pytest.raises(ValueError, match="step_size=.*from 0 to 1"):
        incremental_update(MODEL, MODEL, step_size)


def test_mistakes_in_averages():
    with pytest.raises(ValueError, match="old .*structure|structure .*old"):
        incremental_update(MODEL, PLAIN, 0.5)
    spoiled = jax.tree.map(lambda x: 0.5 * x if eqx.is_inexact_array(x) else x, trained(1)[0])
    with pytest.raises(ValueError, match="incremental_update"):
        incremental_update(spoiled, MODEL, 0.5)
    with pytest.raises(ValueError, match="new is None"):
        incremental_update(None, MODEL, 0.5)


@pytest.mark.parametrize("optimizer", [optax.adam(0.1), optax.contrib.schedule_free_sgd(0.1)])
def test_an_optimizer_that_was_given_the_whole_model(optimizer):
    state = optimizer.init(eqx.filter(MODEL, eqx.is_inexact_array))
    with pytest.raises(ValueError, match="opt_state .*whole model instead of trainable"):
        fp8.TrainStep(loss_fn, optimizer)(MODEL, state, X)
    with pytest.raises(ValueError, match=r"optimizer\.init\(trainable\(old_model\)\)"):
        fp8.transfer_optimizer_state(state, MODEL, PLAIN)
