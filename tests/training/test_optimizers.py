"""Every optimizer trains a converted model as it trains a plain one, and never touches FP8 state."""

import functools
import itertools

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import unchecked
from numpy_reference import DelayedScalingReference, amax, assert_state_is

from haliax_fp8 import (
    Fp8Config,
    TrainStep,
    apply_updates,
    fp8_linear_layers,
    partition_for_grad_overwrite,
    restore_linear_layers,
    trainable,
    transfer_optimizer_state,
)


HISTORY = 3
Batch, In, Out, Layers = hax.make_axes(batch=8, input=8, output=4, layers=2)

OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-2, weight_decay=0.5),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4, weight_decay_rate=0.1),
    "lamb": optax.lamb(1e-2, weight_decay=0.5),
    "muon": optax.contrib.muon(1e-2, weight_decay=0.5),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "multi_steps": optax.MultiSteps(optax.adamw(1e-2, weight_decay=0.5), every_k_schedule=2),
}
by_name = pytest.mark.parametrize


@pytest.fixture(autouse=True)
def _promotion_for_optax():
    """Optax divides floats by integer step counts."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Model(eqx.Module):
    """Two FP8 layers whose three operands are all known: each takes an array of the batch, and gets the other one."""

    first: hnn.Linear
    second: hnn.Linear
    gain: hax.NamedArray

    @staticmethod
    def init(key):
        keys = jax.random.split(key, 2)
        return Model(
            first=hnn.Linear.init(In, Out, key=keys[0]),
            second=hnn.Linear.init(Out, In, key=keys[1], use_bias=False),
            gain=hax.ones(Out),
        )


def loss_fn(model, x, g):
    """Its gradient with respect to the first layer's output is `g` over the batch's size; the second's, `x`."""
    first, second = model.first(x) * g, model.second(g) * x
    per_example = hax.sum(first, Out) + hax.sum(second, In) + hax.sum(model.gain * g, Out)
    return hax.mean(per_example, Batch.name).scalar()


def batch_of(seed):
    keys = jax.random.split(jax.random.key(seed))
    return hax.random.normal(keys[0], (Batch, In)), hax.random.normal(keys[1], (Batch, Out))


@functools.cache
def converted_model():
    return fp8_linear_layers(Model.init(jax.random.key(0)), Fp8Config(amax_history_length=HISTORY))


@pytest.fixture
def model():
    return converted_model()


class References:
    """The states that the two layers should have."""

    def __init__(self):
        self.first, self.second = DelayedScalingReference(HISTORY), DelayedScalingReference(HISTORY)

    def record(self, model, batch, batch_size=Batch.size):
        x, g = map(amax, batch)
        size = np.float32(batch_size)  # a power of two: the mean's gradient is exact
        self.first.record(input=x, kernel=amax(model.first.weight), output_grad=g / size)
        self.second.record(input=g, kernel=amax(model.second.weight), output_grad=x / size)

    def assert_is_state_of(self, model):
        assert_state_is(model.first.dot_general, self.first)
        assert_state_is(model.second.dot_general, self.second)


def parameters(model):
    return [model.first.weight.array, model.first.bias.array, model.second.weight.array, model.gain.array]


gradient = eqx.filter_jit(eqx.filter_grad(loss_fn))
update_of = functools.cache(lambda optimizer: jax.jit(optimizer.update))


def step_by_hand(optimizer):
    """The step that the package documents, and the state that it starts from."""

    def init(model):
        _, params = partition_for_grad_overwrite(model)
        return optimizer.init(eqx.filter(params, eqx.is_inexact_array))

    def step(model, opt_state, *batch):
        overwrites, grads = partition_for_grad_overwrite(gradient(model, *batch))
        updates, opt_state = update_of(optimizer)(grads, opt_state, trainable(model))
        return apply_updates(model, updates, overwrites), opt_state

    return init, step


def step_of_class(optimizer):
    step = TrainStep(loss_fn, optimizer)
    return step.init, lambda *args: step(*args)[:2]


STEPS = {"by_hand": step_by_hand, "TrainStep": step_of_class}
BY_HAND = [("multi_steps", "by_hand"), ("adamw", "by_hand")]
of_every_optimizer = by_name("name, how", [*BY_HAND, *((name, "TrainStep") for name in OPTIMIZERS)])


@functools.cache
def trajectory(name, how, steps=5):
    """The models that a run goes through, the first one included."""
    init, step = STEPS[how](OPTIMIZERS[name])
    model = converted_model()
    models, opt_state = [model], init(model)
    for seed in range(steps):
        model, opt_state = step(model, opt_state, *batch_of(seed))
        models.append(model)
    return models


# --- Every optimizer -------------------------------------------------------------------------------------------------


@pytest.mark.more
@of_every_optimizer
def test_state_is_the_recursion_of_the_amaxes(name, how):
    """Never decayed, clipped, averaged or held back: bit for bit what the amaxes of each step say."""
    models, expected = trajectory(name, how), References()
    for seed, (before, after) in enumerate(itertools.pairwise(models)):
        expected.record(before, batch_of(seed))
        expected.assert_is_state_of(after)


@pytest.mark.more
@of_every_optimizer
def test_parameters_change_as_in_a_plain_tree(name, how):
    """The same gradients, given to the optimizer in a list of arrays, give the same parameters."""
    models, optimizer = trajectory(name, how), OPTIMIZERS[name]
    plain = parameters(models[0])
    plain_state = optimizer.init(plain)
    for seed, (before, after) in enumerate(itertools.pairwise(models)):
        grads = parameters(gradient(before, *batch_of(seed)))
        updates, plain_state = update_of(optimizer)(grads, plain_state, plain)
        plain = optax.apply_updates(plain, updates)
        for ours, expected in zip(parameters(after), plain, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


# --- Norms, clipping, averages ---------------------------------------------------------------------------------------


def test_grad_norm_is_that_of_the_parameters(model):
    step = TrainStep(loss_fn, optax.sgd(0.1))
    _, _, metrics = step(model, step.init(model), *batch_of(0))
    grads = parameters(gradient(model, *batch_of(0)))
    expected = np.sqrt(sum(np.sum(np.square(np.asarray(g, np.float64))) for g in grads))
    np.testing.assert_allclose(metrics["grad_norm"], expected, rtol=1e-6)


def test_clipping_by_global_norm_does_not_count_state(model):
    """What clipping leaves of the parameters' gradients has just the norm asked for."""
    step = TrainStep(loss_fn, optax.chain(optax.clip_by_global_norm(0.25), optax.sgd(1.0)))
    updated, _, metrics = step(model, step.init(model), *batch_of(0))
    assert metrics["grad_norm"] > 0.25
    changes = [np.asarray(a, np.float64) - b for a, b in zip(parameters(updated), parameters(model), strict=True)]
    np.testing.assert_allclose(np.sqrt(sum(np.sum(np.square(c)) for c in changes)), 0.25, rtol=1e-5)


def test_moving_average_of_parameters_keeps_the_live_state(model):
    """Average the trainable part only; put it together with the model, whose state is the newest there is."""
    step = TrainStep(loss_fn, optax.adam(1e-2))
    opt_state, ema = step.init(model), trainable(model)
    expected = [np.asarray(p, np.float64) for p in parameters(model)]
    for seed in range(4):
        model, opt_state, _ = step(model, opt_state, *batch_of(seed))
        ema = optax.incremental_update(trainable(model), ema, step_size=0.25)
        expected = [0.75 * old + 0.25 * np.asarray(p) for old, p in zip(expected, parameters(model), strict=True)]
    averaged = eqx.combine(ema, model)

    for ours, reference in zip(parameters(averaged), expected, strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-5)
    states, _ = partition_for_grad_overwrite(averaged)
    live_states, _ = partition_for_grad_overwrite(model)
    assert eqx.tree_equal(states, live_states)


# --- TrainStep -------------------------------------------------------------------------------------------------------


@pytest.mark.more
@by_name("microbatches", [2, 8])
def test_microbatches_take_the_maximum_of_amaxes(model, microbatches):
    """Each part's mean is over fewer examples, so its output gradients are larger; else it is as one batch."""
    step = TrainStep(loss_fn, optax.sgd(0.1), microbatches=microbatches)
    opt_state, expected = step.init(model), References()
    for seed in range(4):
        batch = batch_of(seed)
        expected.record(model, batch, Batch.size // microbatches)
        model, opt_state, _ = step(model, opt_state, *batch)
        expected.assert_is_state_of(model)


@pytest.mark.more
def test_microbatches_average_gradients(model):
    x, g = batch_of(0)
    step = TrainStep(loss_fn, optax.sgd(1.0), microbatches=4)
    updated, _, metrics = step(model, step.init(model), x, g)

    parts = [(x[Batch, i::4], g[Batch, i::4]) for i in range(4)]
    losses = [loss_fn(model, *part) for part in parts]
    grads = [parameters(gradient(model, *part)) for part in parts]
    expected = [np.mean(np.asarray(leaves, np.float64), axis=0) for leaves in zip(*grads, strict=True)]
    for before, after, mean in zip(parameters(model), parameters(updated), expected, strict=True):
        np.testing.assert_allclose(before - after, mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-5)
    norm = np.sqrt(sum(np.sum(np.square(e)) for e in expected))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)


def test_microbatches_that_do_not_divide_the_batch_are_an_error(model):
    step = TrainStep(loss_fn, optax.sgd(0.1), microbatches=3)
    with pytest.raises(ValueError, match="microbatches=3 does not divide"):
        step(model, step.init(model), *batch_of(0))


def test_microbatches_of_a_scalar_are_an_error(model):
    step = TrainStep(lambda model, x, g, weight: weight * loss_fn(model, x, g), optax.sgd(0.1), microbatches=2)
    with pytest.raises(ValueError, match=r"microbatches=2 does not divide .* of shape \(\)"):
        step(model, step.init(model), *batch_of(0), jnp.float32(1.0))


@by_name("choice", ["donate", "has_aux", "recompute_in_scans"])
def test_choices_that_would_count_as_true_are_an_error(choice):
    with unchecked(), pytest.raises(ValueError, match=f"{choice}='no' of TrainStep must be True or False"):
        TrainStep(loss_fn, optax.sgd(0.1), **{choice: "no"})


class Doubling:
    """Not of optax, and an optimizer all the same."""

    def init(self, params):
        return ()

    def update(self, updates, state, params=None):
        return params, state


def test_any_object_with_init_and_update_is_an_optimizer(model):
    with unchecked():
        step = TrainStep(loss_fn, Doubling())
    updated, _, _ = step(model, step.init(model), *batch_of(0))
    np.testing.assert_array_equal(updated.gain.array, 2 * model.gain.array)


@pytest.mark.more
@by_name("microbatches", [1, 4])
def test_losses_that_are_named_scalars(model, microbatches):
    """The usual slip of a Haliax user, `.scalar()` forgotten, changes nothing."""
    named = lambda model, x, g: hax.named(loss_fn(model, x, g), ())
    results = []
    for loss in (loss_fn, named):
        step = TrainStep(loss, optax.sgd(0.1), microbatches=microbatches)
        results.append(step(model, step.init(model), *batch_of(0)))
    assert eqx.tree_equal(*results)


def with_key(model, x, g, key=None):
    """A loss with a drop-out that is off without a key."""
    factor = 1.0 if key is None else jax.random.uniform(key if key.ndim == 0 else key[0])
    return factor * loss_fn(model, x, g)


@pytest.mark.more
def test_a_key_that_the_loss_would_not_get_is_an_error(model):
    """`key=` is the ops'. A loss whose drop-out is off in silence is not what was asked for."""
    step, key = TrainStep(with_key, optax.sgd(0.1)), jax.random.key(0)
    args = model, step.init(model), *batch_of(0)
    with pytest.raises(ValueError, match=r"does not reach loss_fn, which.*as loss_key="):
        step(*args, key=key)
    losses = [float(step(*args, *rest, **options)[2]["loss"]) for rest, options in KEY_ARGUMENTS]
    whole = float(loss_fn(model, *batch_of(0)))
    factor = float(jax.random.uniform(key))
    np.testing.assert_allclose(losses, [whole, factor * whole, factor * whole, whole], rtol=1e-5)


KEY_ARGUMENTS = (
    ((), {}),
    ((jax.random.key(0),), {}),
    ((jax.random.key(0),), {"key": jax.random.key(1)}),
    ((None,), {"key": jax.random.key(1)}),
)


@pytest.mark.more
def test_a_key_among_the_batch_needs_parts_for_microbatches(model):
    step, keys = TrainStep(with_key, optax.sgd(0.1), microbatches=4), jax.random.split(jax.random.key(0), 4)
    args = model, step.init(model), *batch_of(0)
    with pytest.raises(ValueError, match="single random key.*microbatches=4.*loss_key="):
        step(*args, keys[0])
    x, g = batch_of(0)
    parts = [loss_fn(model, x[Batch, i::4], g[Batch, i::4]) for i in range(4)]
    expected = np.mean([float(jax.random.uniform(key)) * float(part) for key, part in zip(keys, parts, strict=True)])
    np.testing.assert_allclose(step(*args, keys)[2]["loss"], expected, rtol=1e-5)


@by_name("name", ["adamw", "multi_steps", "adafactor"])
def test_optimizer_state_of_the_plain_model_is_an_error(model, name):
    plain, step = restore_linear_layers(model), TrainStep(loss_fn, OPTIMIZERS[name])
    opt_state = step.init(plain)
    with pytest.raises(ValueError, match=r"made for a plain model, and.*transfer_optimizer_state\(opt_state,"):
        step(model, opt_state, *batch_of(0))
    step(model, transfer_optimizer_state(opt_state, plain, model), *batch_of(0))


def test_an_optimizers_own_error_reaches_the_caller(model):
    def fail(updates, state, params=None):
        raise ValueError("its own")

    step = TrainStep(loss_fn, optax.GradientTransformation(optax.sgd(0.1).init, fail))
    with pytest.raises(ValueError, match="^its own"):
        step(model, step.init(model), *batch_of(0))


@pytest.mark.more
@by_name("microbatches", [1, 2, 8])
def test_calibration_records_what_the_first_step_records(model, microbatches):
    """Bit for bit: here no operand depends on what was rounded before it."""
    step, expected = TrainStep(loss_fn, optax.sgd(0.1), microbatches=microbatches), References()
    calibrated = step.calibrate(model, *batch_of(0))
    expected.record(model, batch_of(0), Batch.size // microbatches)
    expected.assert_is_state_of(calibrated)
    stepped, _, _ = step(model, step.init(model), *batch_of(0))
    assert eqx.tree_equal(*(partition_for_grad_overwrite(m)[0] for m in (calibrated, stepped)))
    assert eqx.tree_equal(trainable(calibrated), trainable(model))


@pytest.mark.more
@by_name("microbatches", [1, 2])
def test_donation_changes_no_number(model, microbatches):
    """And frees what it was given: the old model's arrays are gone."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    keep = TrainStep(loss_fn, optimizer, microbatches=microbatches)
    donate = TrainStep(loss_fn, optimizer, microbatches=microbatches, donate=True)
    expected, expected_state = model, keep.init(model)
    donated = jax.tree.map(jnp.copy, model)
    donated_state = donate.init(donated)
    for seed in range(3):
        before = donated
        expected, expected_state, expected_metrics = keep(expected, expected_state, *batch_of(seed))
        donated, donated_state, metrics = donate(donated, donated_state, *batch_of(seed))
    assert eqx.tree_equal((donated, donated_state, metrics), (expected, expected_state, expected_metrics))
    assert before.first.weight.array.is_deleted()


# --- Optimizer state across a conversion -----------------------------------------------------------------------------


class DeepModel(eqx.Module):
    """Layers in a stack, a layer apart, and a parameter that is in no linear layer."""

    blocks: hnn.Stacked
    head: hnn.Linear
    gain: hax.NamedArray

    @staticmethod
    def init(key):
        stack = hnn.Stacked.init(Layers, hnn.Linear)(In, Out, key=jax.random.split(key, Layers.size), use_bias=False)
        return DeepModel(stack, hnn.Linear.init(In, Out, key=key), hax.ones(Out))


def state_after(optimizer, model, steps=3):
    """The optimizer's state after gradients that are the same for each parameter, whatever tree it is in."""
    params = trainable(model)
    opt_state = optimizer.init(params)
    leaves, structure = jax.tree.flatten(params)
    for step in range(steps):
        grads = [np.random.default_rng([step, i]).normal(size=x.shape) for i, x in enumerate(leaves)]
        grads = jax.tree.unflatten(structure, [jnp.asarray(g, jnp.float32) for g in grads])
        _, opt_state = update_of(optimizer)(grads, opt_state, params)
    return opt_state


@by_name("direction", ["into_fp8", "out_of_fp8"])
@by_name("name", ["adamw", "muon", "multi_steps", "adafactor"])
def test_transfer_gives_the_state_of_an_uninterrupted_run(name, direction):
    """Converted in mid-training: the same tree, bit by bit, as if the model had been of the new kind from the start."""
    plain = DeepModel.init(jax.random.key(0))
    converted = fp8_linear_layers(plain, Fp8Config(amax_history_length=HISTORY))
    if direction == "into_fp8":
        old, new = plain, converted
    else:
        old, new = converted, restore_linear_layers(converted)
    transferred = transfer_optimizer_state(state_after(OPTIMIZERS[name], old), old, new)
    assert eqx.tree_equal(transferred, state_after(OPTIMIZERS[name], new))


def test_transfer_refuses_a_model_with_other_parameters(model):
    opt_state = optax.adam(1e-2).init(trainable(model))
    with pytest.raises(ValueError, match="new_model and old_model have different parameters"):
        transfer_optimizer_state(opt_state, model, model.first)


def test_transfer_refuses_the_state_of_another_model(model):
    opt_state = optax.adam(1e-2).init(trainable(model.first))
    with pytest.raises(ValueError, match="opt_state holds no tree with the structure of old_model"):
        transfer_optimizer_state(opt_state, model, restore_linear_layers(model))
