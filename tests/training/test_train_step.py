"""What people expect of a training step: auxiliary results, keys for the loss, statistics, errors with the remedy."""

import dataclasses
import os
import re
import sys

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import unchecked

import haliax_fp8
from haliax_fp8 import (
    DelayedScaling,
    Fp8Config,
    OverwriteWithGradient,
    TrainStep,
    accumulate_gradients,
    apply_updates,
    calibrate,
    describe,
    filter_grad,
    fp8_linear_layers,
    partition_for_grad_overwrite,
    quantization_statistics,
    trainable,
)
from haliax_fp8.statistics import every
from haliax_fp8.training import fp8_states


KEY = jax.random.key(0)
PLAIN = eqx.nn.MLP(8, 8, 16, 1, key=KEY)
MODEL = fp8_linear_layers(PLAIN, amax_history_length=4)
X = jax.random.normal(jax.random.key(1), (4, 8))
MOMENTUM = optax.sgd(0.1, momentum=0.9)


def loss_fn(model, x):
    return jnp.mean(jnp.square(jax.vmap(model)(x)))


def with_dropout(model, x, key):
    """A loss with auxiliary results of every kind."""
    loss = loss_fn(model, x) * jax.random.uniform(key)
    aux = {"sum": x.sum(), "rows": hax.named(x, ("batch", "feature")), "draw": jax.random.uniform(key), "name": "text"}
    return hax.named(loss, ()), aux | {"number": 1.5}


# --- Auxiliary results and keys --------------------------------------------------------------------------------------


def test_auxiliary_results_and_the_losss_key():
    step = TrainStep(with_dropout, MOMENTUM, has_aux=True)
    _, _, metrics = step(MODEL, step.init(MODEL), X, loss_key=KEY)
    draw, aux = float(jax.random.uniform(KEY)), metrics["aux"]
    np.testing.assert_allclose(float(metrics["loss"]), draw * float(loss_fn(MODEL, X)), rtol=1e-5)
    assert (aux["name"], aux["number"], float(aux["draw"])) == ("text", 1.5, draw)
    np.testing.assert_array_equal(aux["rows"].array, X)
    # Calibration takes the same arguments.
    assert bool((step.calibrate(MODEL, X, loss_key=KEY).layers[0].dot_general.scale("input") != 1.0).all())


@pytest.mark.more
def test_each_microbatch_has_its_own_key_and_its_own_results():
    step = TrainStep(with_dropout, MOMENTUM, has_aux=True, microbatches=2)
    _, _, metrics = step(MODEL, step.init(MODEL), X, loss_key=KEY)
    parts, draws = (X[0::2], X[1::2]), [float(jax.random.uniform(key)) for key in jax.random.split(KEY, 2)]
    aux = metrics["aux"]
    np.testing.assert_array_equal(aux["draw"], np.float32(draws))
    np.testing.assert_allclose(aux["sum"], [float(part.sum()) for part in parts], rtol=1e-5)
    assert [axis.name for axis in aux["rows"].axes] == ["microbatch", "batch", "feature"]
    np.testing.assert_array_equal(aux["rows"].array, parts)
    assert (aux["name"], aux["number"]) == ("text", 1.5)
    expected = np.mean([draw * float(loss_fn(MODEL, part)) for draw, part in zip(draws, parts, strict=True)])
    np.testing.assert_allclose(float(metrics["loss"]), expected, rtol=1e-5)


# --- State --------------------------------------------------------------------------------------------------------


class SecondAlone(eqx.Module):
    """The loss reaches the second layer, and only that."""

    layers: eqx.nn.MLP

    def __call__(self, x):
        return self.layers.layers[1](jnp.tile(x, 2))


@pytest.mark.smoke
@pytest.mark.parametrize(
    "microbatches, update_interval, ruined", [(2, 3, slice(0, None, 2)), (2, 1, slice(None)), (1, 1, None)]
)
def test_a_step_writes_the_state_that_apply_updates_computes(microbatches, update_interval, ruined):
    """The step takes scales and histories from its gradients; `apply_updates` computes them again, from the amaxes.

    Also where the loss does not reach a layer, and where a whole batch, or one of its microbatches, is not finite.
    """
    scaling = DelayedScaling(amax_history_length=4, update_interval=update_interval)
    model = fp8_linear_layers(SecondAlone(PLAIN), recipe=scaling)
    step = TrainStep(loss_fn, MOMENTUM, microbatches=microbatches, donate=False)
    opt_state = step.init(model)

    @eqx.filter_jit
    def by_hand(model, opt_state, x):
        gradients = None
        for part in range(microbatches):
            gradients = accumulate_gradients(gradients, filter_grad(loss_fn)(model, x[part::microbatches]))
        overwrites, gradients = partition_for_grad_overwrite(gradients)
        updates, _ = MOMENTUM.update(gradients, opt_state, trainable(model))
        return apply_updates(model, updates, overwrites)

    untouched = model.layers.layers[0].dot_general.state.array
    for i in range(5):
        x = (i + 1.0) * X
        if i == 2 and ruined is not None:
            x = x.at[ruined].set(jnp.inf)
        expected = by_hand(model, opt_state, x)
        got, new_opt_state, _ = step(model, opt_state, x)
        for state, wanted in zip(fp8_states(got), fp8_states(expected), strict=True):
            np.testing.assert_array_equal(state.array, wanted.array)
        if i == 2 and ruined is not None:
            of_input = [fp8_states(tree)[1].array[0] for tree in (got, model)]
            assert np.array_equal(*of_input) == (ruined == slice(None)), "one finite microbatch is enough"
            continue
        model, opt_state = got, new_opt_state
    np.testing.assert_array_equal(model.layers.layers[0].dot_general.state.array, untouched)
    assert model.layers.layers[1].dot_general.amax_history("input")[0] == 5 * jnp.abs(X).max()


def assembling(model, x):
    """A loss in which state cannot be a record: it is put together with a whole model's."""
    other = fp8_linear_layers(SecondAlone(PLAIN), amax_history_length=4)
    return loss_fn(jax.tree.map(lambda new, old: new if eqx.is_array(old) else old, model, other), x)


@pytest.mark.parametrize("loss", [loss_fn, assembling])
@pytest.mark.parametrize("value", [0.0, np.inf])
def test_a_microbatch_without_an_amax_does_not_keep_the_first_scale(value, loss):
    """Its own scale stays at 1, which is larger than the one that follows from the others' amaxes."""
    model = fp8_linear_layers(SecondAlone(PLAIN), amax_history_length=4)
    x, states = 0.01 * X, []
    for batch in (x.at[::2].set(value), x.at[::2].set(x[1::2])):
        step = TrainStep(loss, MOMENTUM, microbatches=2, donate=False)
        after = step(model, step.init(model), batch)[0].layers.layers[1].dot_general
        states.append((float(after.scale("input")), float(after.amax_history("input")[0])))
    assert states[0] == states[1] and states[0][0] < 1e-3


# --- Work on the host -------------------------------------------------------------------------------------------------


def calls_in_the_package(function):
    """How often functions of this package are called while a function runs."""
    package, count = os.path.dirname(haliax_fp8.__file__), 0

    def profile(frame, event, argument):
        nonlocal count
        code = frame.f_code
        # A generator expression counts as called for each item.
        count += event == "call" and code.co_filename.startswith(package) and code.co_name != "<genexpr>"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_second_step_does_not_look_at_layers_again(recipe):
    """What the structure of a model decides is known from the first step: more layers take no more calls."""
    counts = []
    for depth in (1, 7):
        model = fp8_linear_layers(eqx.nn.MLP(8, 8, 8, depth, key=KEY), recipe=recipe)
        model, opt_state, _ = STEP(model, STEP.init(model), X)
        counts.append(calls_in_the_package(lambda model=model, opt_state=opt_state: STEP(model, opt_state, X)))
    assert counts[0] == counts[1] > 0


@jax.numpy_dtype_promotion("standard")
def test_state_is_checked_in_every_step():
    """Unlike structure, numbers may change between two steps. One layer is in bfloat16, with its state."""
    times = lambda factor, tree: jax.tree.map(lambda x: factor * x if eqx.is_inexact_array(x) else x, tree)
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, MODEL.layers[1])
    model = eqx.tree_at(lambda m: m.layers[1], MODEL, cast)
    model, opt_state, _ = STEP(model, STEP.init(model), X)
    changed = eqx.tree_at(lambda m: m.layers[0], model, times(0.9, model.layers[0]))
    with pytest.raises(ValueError, match=r"FP8 state of layers\.0 was changed"):
        STEP(changed, opt_state, X)
    STEP(model, opt_state, X)


# --- Statistics in the step's own pass -------------------------------------------------------------------------------


def leaves(tree):
    words = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(words(x)) for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


@pytest.mark.more
@pytest.mark.parametrize(
    "recipe, microbatches, kernels",
    [("delayed", 1, "in_each_microbatch"), ("current", 2, "once"), ("nvfp4", 1, "in_each_microbatch")],
)
def test_a_step_that_measures_trains_as_one_that_does_not(recipe, microbatches, kernels):
    model = fp8_linear_layers(PLAIN, recipe=recipe)
    plain = TrainStep(loss_fn, MOMENTUM, microbatches=microbatches, quantize_kernels=kernels)
    monitored = dataclasses.replace(plain, monitor=every(2))
    state, expected_state, trained, expected = monitored.init(model), plain.init(model), model, model
    for i in range(3):
        before, key = trained, jax.random.key(i)
        trained, state, metrics = monitored(trained, state, X, key=key)
        expected, expected_state, without = plain(expected, expected_state, X, key=key)
        assert jax.tree.structure(trained) == jax.tree.structure(expected)
        for got, wanted in zip(leaves(trained), leaves(expected), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6)
        ratio = {"output_grad_amax_ratio"} if recipe == "delayed" else set()
        assert set(without) == {"loss", "grad_norm", *ratio} and int(state.steps) == i + 1
        measured = {name: value for name, value in metrics.items() if name.startswith("fp8/")}
        assert bool(measured) == (i % 2 == 0) and set(metrics) == set(without) | set(measured)
        if recipe == "nvfp4" or not measured:
            continue
        parts = [X[part::microbatches] for part in range(microbatches)]
        of_parts = [eqx.filter_jit(quantization_statistics)(before, loss_fn, part).flat() for part in parts]
        for name, value in measured.items():
            # The worst of the microbatches; of a ratio to the noise, that is the smallest.
            worst = min if name.endswith(("sqnr", "over_noise")) else max
            np.testing.assert_allclose(value, worst(float(part[name]) for part in of_parts), rtol=1e-4, err_msg=name)


def test_between_the_steps_that_measure_runs_the_program_of_a_step_without_a_monitor():
    """The same program: JAX traces the loss for the first step that measures, once more for the next, then never."""
    traced = []

    def loss(model, x):
        traced.append(x)
        return jnp.mean(jnp.square(jax.vmap(model)(x)))

    model = fp8_linear_layers(eqx.nn.Linear(8, 8, key=KEY), amax_history_length=4)
    plain = TrainStep(loss, MOMENTUM)
    monitored = dataclasses.replace(plain, monitor=every(3, prefix="q"))
    state, traces, measured = monitored.init(model), [], []
    for _ in range(5):
        _, state, metrics = monitored(model, state, X)
        traces.append(len(traced))
        measured.append(any(name.startswith("q/") for name in metrics))
    assert measured == [True, False, False, True, False]
    assert 0 < traces[0] < traces[1] == traces[4]
    plain(model, plain.init(model), X)
    assert len(traced) == traces[1]
    # A monitor like it has its program too.
    dataclasses.replace(plain, monitor=every(3, prefix="q"))(model, plain.init(model), X)
    assert len(traced) == traces[1]


@pytest.mark.more
def test_a_monitor_can_come_and_go():
    """A state with a count serves a step without a monitor, which counts on; one without a count begins at 0."""
    measured = lambda metrics: any(name.startswith("fp8/") for name in metrics)
    plain, monitored = TrainStep(loss_fn, MOMENTUM), TrainStep(loss_fn, MOMENTUM, monitor=every(2))
    model, state, metrics = monitored(MODEL, plain.init(MODEL), X)
    assert measured(metrics)
    model, state, metrics = plain(model, state, X)
    assert int(state.steps) == 2 and not measured(metrics)
    assert measured(monitored(model, state, X)[2])
    with pytest.raises(ValueError, match="inside jit there is only one.*quantization_statistics"):
        eqx.filter_jit(monitored)(model, state, X)


# --- Errors ----------------------------------------------------------------------------------------------------------


def other_model():
    return fp8_linear_layers(eqx.nn.MLP(8, 8, 32, 1, key=KEY), amax_history_length=4)


def of_parts(trained, frozen, x):
    return loss_fn(eqx.combine(trained, frozen), x)


def part_and_state():
    """A part without state, with the optimizer's state for its weights."""
    part = eqx.filter(MODEL, WEIGHTS)
    return part, MOMENTUM.init(trainable(part))


WEIGHTS = eqx.tree_at(lambda m: m.layers[0].weight, jax.tree.map(lambda _: False, MODEL), True)
PARTED = r"state of layers.0, layers.1 is not in this part of the model.* eqx.partition\(model, spec\)"
STEP = TrainStep(loss_fn, MOMENTUM)
MISTAKES = {
    "each 0 steps": (lambda: every(0), "steps=0 must be an integer of at least 1"),
    "a device as configuration": (lambda: describe(MODEL, "h100"), r"describe\(model, config=\.\.\., device="),
    "a configuration as model": (lambda: describe(Fp8Config()), r"model is an Fp8Config"),
    "a class as model": (lambda: describe(eqx.nn.MLP), r"model is the class MLP"),
    "a function as model": (lambda: describe(loss_fn), r"model is a function, and has no layers; use describe\(model"),
    "a text as model": (lambda: describe("model"), "model is of type str, and has no layers"),
    "an array as model": (lambda: describe(X), "model is of type .*, and has no layers"),
    "a part without state": (lambda: STEP.init(eqx.filter(MODEL, WEIGHTS)), PARTED),
    "a part without state to step": (
        lambda: TrainStep(of_parts, MOMENTUM)(*part_and_state(), eqx.filter(MODEL, WEIGHTS, inverse=True), X),
        PARTED,
    ),
    "a part without state to calibrate": (
        lambda: calibrate(eqx.filter(MODEL, WEIGHTS), of_parts, [(eqx.filter(MODEL, WEIGHTS, inverse=True), X)]),
        PARTED,
    ),
    "of the plain model": (
        lambda: STEP(MODEL, STEP.init(PLAIN), X),
        "made for a plain model.*transfer_optimizer_state",
    ),
    "of a converted model": (
        lambda: STEP(PLAIN, STEP.init(MODEL), X),
        "made for a model with recipe DelayedScaling.*this model is plain.*transfer_optimizer_state",
    ),
    "of another recipe": (
        lambda: STEP(MODEL, STEP.init(fp8_linear_layers(PLAIN, recipe="current")), X),
        "recipe CurrentScaling.* this model has DelayedScaling.*transfer_optimizer_state",
    ),
    "of another size": (lambda: STEP(MODEL, STEP.init(other_model()), X), r"shape \(32, 8\) at .*\(16, 8\) belongs"),
    "of no optimizer": (
        lambda: STEP(MODEL, (), X),
        r"opt_state does not belong to this model and optimizer: it has nothing at .*step.init\(model\)",
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_explained(case):
    mistake, message = MISTAKES[case]
    with unchecked(), pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        mistake()


def test_memory_that_a_step_reused_is_named():
    """After `donate=True`, old model and old state are each named; the new ones go on."""
    step = TrainStep(loss_fn, MOMENTUM, donate=True)
    copied = lambda tree: jax.tree.map(lambda x: jnp.array(x) if eqx.is_array(x) else x, tree)
    old = copied(MODEL)
    old_state = step.init(old)
    model, opt_state, _ = step(old, old_state, X)
    with pytest.raises(ValueError, match=r"^opt_state cannot be used again:.*that it returned"):
        step(copied(model), old_state, X)
    with pytest.raises(ValueError, match="^model cannot be used again"):
        step(old, opt_state, X)


def test_a_part_of_a_model_trains_with_its_state():
    """What the error advises: the state is that of a step of the whole model, and only the chosen weight changes.

    Static scales need no update, so they may stay with the frozen weights.
    """
    is_state = lambda node: isinstance(node, OverwriteWithGradient)
    spec = jax.tree.map(is_state, MODEL, is_leaf=is_state)
    trained, frozen = eqx.partition(MODEL, eqx.tree_at(lambda m: m.layers[1].weight, spec, True))
    step = TrainStep(of_parts, MOMENTUM)
    new = eqx.combine(step(trained, step.init(trained), frozen, X)[0], frozen)
    whole, _, _ = STEP(MODEL, STEP.init(MODEL), X)
    assert eqx.tree_equal(fp8_states(new), fp8_states(whole))
    assert eqx.tree_equal(new.layers[1].weight, whole.layers[1].weight)
    assert eqx.tree_equal((new.layers[0].weight, new.layers[1].bias), (MODEL.layers[0].weight, MODEL.layers[1].bias))

    static = calibrate(fp8_linear_layers(PLAIN, recipe="static"), loss_fn, [(X,)])
    weights = eqx.tree_at(lambda m: m.layers[1].weight, jax.tree.map(lambda _: False, static), True)
    trained, frozen = eqx.partition(static, weights)
    new = eqx.combine(step(trained, step.init(trained), frozen, X)[0], frozen)
    assert eqx.tree_equal(fp8_states(new), fp8_states(static))
    assert not eqx.tree_equal(new.layers[1].weight, static.layers[1].weight)
    assert "Fp8DotGeneral" in str(trained)
