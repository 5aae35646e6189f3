"""Phases of precision: each has the bits of its recipe alone, none starts cold, and a resumed run is in its phase."""

import dataclasses
import functools
import logging

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same, unchecked
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import haliax_fp8 as fp8
from haliax_fp8 import DelayedScaling, Recipe, TrainStep, describe, fp8_linear_layers, restore_linear_layers
from haliax_fp8.checkpoints import load_into, save
from haliax_fp8.recipes import by_name
from haliax_fp8.statistics import every
from haliax_fp8.training import CountedState, Phase


PLAIN = eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))
DELAYED = fp8_linear_layers(PLAIN, amax_history_length=4)
X = jax.random.normal(jax.random.key(1), (8, 8))
# It counts steps, and has moments.
OPTIMIZER = optax.sgd(lambda count: jnp.float32(0.1) / (count + 1).astype(jnp.float32), momentum=0.9)
THREE = [Phase(0, None), Phase(2), Phase(4, Recipe.backward_only)]


def loss_fn(model, x):
    return jnp.mean(jnp.square(jax.vmap(model)(x) - jnp.sin(x)))


def run(step, model, opt_state, steps, batch=X):
    for _ in range(steps):
        model, opt_state, metrics = step(model, opt_state, *(batch if isinstance(batch, tuple) else (batch,)))
    return model, opt_state, metrics


def weights(model):
    return jax.tree.leaves(fp8.trainable(model))


# --- Each phase -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, "rowwise", pytest.param("mxfp8_bprop", marks=pytest.mark.more)])
def test_a_phase_has_the_bits_of_its_recipe_alone(recipe):
    """From the same weights, of a model that keeps no state: the layers of a plain model, or of one so converted."""
    phased = TrainStep(loss_fn, OPTIMIZER, phases=[Phase(0, recipe)])
    alone = PLAIN if recipe is None else fp8_linear_layers(PLAIN, recipe=recipe)
    ours, _, metrics = run(phased, DELAYED, phased.init(DELAYED), 3)
    step = TrainStep(loss_fn, OPTIMIZER)
    theirs, _, expected = run(step, alone, step.init(alone), 3)
    assert_same(weights(ours), weights(theirs))
    assert float(metrics["loss"]) == float(expected["loss"])


def test_a_recipe_with_state_has_its_bits_from_the_state_that_it_gets():
    """As converted and backward only, after a phase in high precision: from there as a step without phases."""
    step = TrainStep(loss_fn, OPTIMIZER, phases=THREE)
    model, opt_state, _ = run(step, DELAYED, step.init(DELAYED), 2)
    plain = TrainStep(loss_fn, OPTIMIZER)
    expected, its_state, _ = run(plain, model, opt_state.optimizer, 2)
    model, opt_state, _ = run(step, model, opt_state, 2)
    assert_same((model, opt_state.optimizer), (expected, its_state))
    # The same state, in a model that was converted with the recipe of the last phase.
    recipe = by_name("delayed_bprop").with_amax_history_length(4)
    last = fp8_linear_layers(PLAIN, recipe=recipe)
    last = jax.tree.unflatten(jax.tree.structure(last), jax.tree.leaves(model))
    expected, _, _ = run(plain, last, fp8.transfer_optimizer_state(opt_state.optimizer, model, last), 2)
    model, _, _ = run(step, model, opt_state, 2)
    assert_same(jax.tree.leaves(model), jax.tree.leaves(expected))


@pytest.mark.parametrize("recipe", [None, "rowwise", Recipe.backward_only])
def test_every_phase_records_what_the_state_needs(recipe):
    """In its first step, what calibration records; amaxes of gradients differ where the backward pass is quantized."""
    step = TrainStep(loss_fn, OPTIMIZER, phases=[Phase(0, recipe)], microbatches=2)
    calibrated = step.calibrate(DELAYED, X)
    model, _, _ = step(DELAYED, step.init(DELAYED), X)
    for ours, theirs in zip(model.layers, calibrated.layers, strict=True):
        for operand in ("kernel", "output_grad"):
            ratio = ours.dot_general.scale(operand) / theirs.dot_general.scale(operand)
            assert float(ratio) == 1.0 if recipe is None or operand == "kernel" else 0.2 < float(ratio) < 5.0
    first = [layers[0].dot_general.amax_history("input") for layers in (model.layers, calibrated.layers)]
    np.testing.assert_array_equal(*first)
    assert float(first[0][0]) == float(jnp.abs(X).max())


def test_layers_have_phases_of_their_own_and_random_rounding_a_key():
    """An override alone, over a recipe that needs no key; the metrics and the monitor's numbers are those of a step."""
    phase = Phase(0, overrides={"layers.1": "nvfp4"})
    step = TrainStep(loss_fn, OPTIMIZER, phases=[phase], monitor=every(2))
    opt_state = step.init(DELAYED)
    with pytest.raises(ValueError, match="key is missing"):
        step(DELAYED, opt_state, X)
    model, _, metrics = step(DELAYED, opt_state, X, key=jax.random.key(3))
    mixed = fp8_linear_layers(PLAIN, recipe=DelayedScaling(4), overrides={"layers.1": "nvfp4"})
    plain = TrainStep(loss_fn, OPTIMIZER, monitor=every(2))
    theirs, _, expected = plain(mixed, plain.init(mixed), X, key=jax.random.key(3))
    assert_same(weights(model), weights(theirs))
    names = [name for name in metrics if name.startswith("fp8/layers.1") and not name.endswith("scale_age")]
    assert names and all(np.array_equal(metrics[name], expected[name], equal_nan=True) for name in names)
    # With a weight of its own layer in NVFP4, the state of DelayedScaling went on.
    assert float(model.layers[1].dot_general.amax_history("kernel")[0]) == float(jnp.abs(PLAIN.layers[1].weight).max())


# --- A run ------------------------------------------------------------------------------------------------------------

Layers, Embed, Mlp, Rows = hax.make_axes(layers=2, embed=8, mlp=16, rows=8)


class Block(eqx.Module):
    """A residual block of two linear layers."""

    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key)
        return Block(hnn.Linear.init(Embed, Mlp, key=keys[0]), hnn.Linear.init(Mlp, Embed, key=keys[1]))

    def __call__(self, x):
        return x + self.down(hnn.relu(self.up(x)))


def stacked(**options):
    model = hnn.Stacked.init(Layers, Block)(key=jax.random.split(jax.random.key(0), Layers.size))
    return fp8_linear_layers(model, **options)


def stacked_loss(model, x):
    return hax.mean(hax.square(model.fold(x) - hax.sin(x))).scalar()


ROWS = hax.random.normal(jax.random.key(1), (Rows, Embed))


@pytest.mark.more
@pytest.mark.parametrize("quantization", ["in_each_microbatch", "once"])
def test_in_scans_with_microbatches_on_devices_that_divide_the_weights(quantization):
    """Each phase as its recipe alone there; a mesh of four devices, each with a part of rows and weights."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    make = functools.partial(TrainStep, stacked_loss, OPTIMIZER, microbatches=2, quantize_kernels=quantization)

    def divided(tree):
        def place(x):
            fits = eqx.is_inexact_array(x) and x.ndim > 1 and x.shape[-1] % 4 == 0
            spec = PartitionSpec(*(None,) * (x.ndim - 1), "data") if fits else PartitionSpec()
            return jax.device_put(x, NamedSharding(mesh, spec)) if eqx.is_array(x) else x

        return jax.tree.map(place, tree)

    batch = jax.device_put(ROWS, NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh):
        for phase, alone in (
            (Phase(0, None), None),
            (Phase(0), "delayed"),
            (Phase(0, "rowwise_bprop"), "rowwise_bprop"),
        ):
            step, plain = make(phases=[phase]), make()
            model = divided(stacked())
            theirs = divided(stacked(recipe=alone or "delayed"))
            theirs = restore_linear_layers(theirs) if alone is None else theirs
            ours, _, _ = run(step, model, step.init(model), 2, batch)
            theirs, _, _ = run(plain, theirs, plain.init(theirs), 2, batch)
            assert_same(weights(ours), weights(theirs))
            assert bool((ours.stacked.up.dot_general.amax_history("output_grad")[:, [0, -1]] > 0).all())


def batch_of(i):
    return hax.random.normal(jax.random.fold_in(jax.random.key(7), i), (Rows, Embed))


@pytest.mark.slow
def test_400_steps_in_three_phases_killed_and_resumed_in_each(tmp_path, standard_promotion):
    """The run that is stopped has nothing left but its file: model, step and programs are made anew."""
    phases = [Phase(0, None), Phase(100), Phase(300, Recipe.backward_only)]
    recipe = DelayedScaling(amax_history_length=16)

    def begin():
        step = TrainStep(stacked_loss, optax.adamw(optax.cosine_decay_schedule(1e-2, 400)), phases=phases)
        model = stacked(recipe=recipe)
        return step, model, step.init(model)

    def go_on(step, model, opt_state, stop):
        losses = []
        for i in range(int(opt_state.steps), stop):
            model, opt_state, metrics = step(model, opt_state, batch_of(i))
            losses.append(float(metrics["loss"]))
        return model, opt_state, losses

    *expected, losses = go_on(*begin(), 400)
    resumed, path = [], tmp_path / "run.safetensors"
    for stop in (50, 200, 350, 400):
        step, model, opt_state = begin()
        if path.exists():
            (model, opt_state), report = load_into((model, opt_state), path, strict=True)
            assert report.is_complete
        model, opt_state, more = go_on(step, model, opt_state, stop)
        save(path, (model, opt_state))
        resumed += more
        jax.clear_caches()
    assert resumed == losses
    assert_same((model, opt_state), tuple(expected))
    # The phases differ: their losses part where the next one begins.
    other = TrainStep(stacked_loss, optax.adamw(optax.cosine_decay_schedule(1e-2, 400)), phases=phases[:1])
    model = stacked(recipe=recipe)
    opt_state = CountedState(0, other.init(model))
    *_, in_one = go_on(other, model, opt_state, 104)
    assert in_one[:100] == losses[:100] and in_one[100] != losses[100]


def test_a_resumed_run_is_in_its_phase_and_strict_says_if_it_is_not(tmp_path):
    step, path = TrainStep(loss_fn, OPTIMIZER, phases=THREE), tmp_path / "run.safetensors"
    model, opt_state, _ = run(step, DELAYED, step.init(DELAYED), 3)
    save(path, (model, opt_state))
    loaded, report = load_into((DELAYED, step.init(DELAYED)), path, strict=True)
    assert report.is_complete and step.phase(loaded[1]) == THREE[1]
    assert_same(run(step, *loaded, 2)[0], run(step, model, opt_state, 2)[0])
    later = TrainStep(loss_fn, OPTIMIZER, phases=[Phase(0, None), Phase(10), Phase(20, Recipe.backward_only)])
    with pytest.raises(ValueError, match=r"as converted from step 2;.*from step 10;.*Give TrainStep the phases"):
        load_into((DELAYED, later.init(DELAYED)), path, strict=True)
    (_, opt_state), report = load_into((DELAYED, later.init(DELAYED)), path)
    assert "from step 10" in report.changed["phases"] and later.phase(opt_state) == later.phases[0]
    # A step without phases has another tree.
    without = TrainStep(loss_fn, OPTIMIZER)
    with pytest.raises(ValueError, match="strict=True.*optimizer"):
        load_into((DELAYED, without.init(DELAYED)), path, strict=True)


def test_the_plan_is_shown_and_the_log_names_each_phase(caplog):
    step = TrainStep(loss_fn, OPTIMIZER, phases=[*THREE, Phase(6, "rowwise", overrides={"layers.1": None})])
    described = describe(DELAYED, step=step)
    assert [line.partition(":")[0] for line in described.phases] == [f"From step {i}" for i in (0, 2, 4, 6)]
    assert "none of 2" in described.phases[0] and "1 of 2" in described.phases[3]
    assert all(line.split()[2] in str(described) for line in described.phases)
    assert str(step.phases[3]) == "rowwise, layers.1 high precision from step 6"
    with caplog.at_level(logging.INFO, "haliax_fp8"):
        run(step, DELAYED, step.init(DELAYED), 5)
    assert [record.getMessage() for record in caplog.records[1:]] == [str(phase) for phase in THREE]


# --- What does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "phases, message",
    [
        ([Phase(1)], r"steps \[1\].*the first of them 0"),
        ([Phase(0), Phase(5), Phase(5, None)], r"\[0, 5, 5\].*in the order"),
        ([Phase(0), "rowwise"], "holds 'rowwise'"),
        ("rowwise", "phases='rowwise'"),
    ],
)
def test_phases_are_in_order_from_0(phases, message):
    with unchecked(), pytest.raises(ValueError, match=message):
        TrainStep(loss_fn, OPTIMIZER, phases=phases)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((-1,), "start=-1"),
        ((1.5,), "start=1.5"),
        ((0, "rowwize"), "recipe='rowwize'.*'rowwise'"),
        ((0, None, {"layers.1": 8}), r"overrides\['layers.1'\]=8"),
        ((0, DelayedScaling), "is the class DelayedScaling"),
    ],
)
def test_a_phase_is_checked_where_it_is_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        Phase(*arguments)


@pytest.mark.parametrize(
    "model, phase, message",
    [
        (DELAYED, Phase(9, overrides={"layer.1": None}), "overrides of a phase='layer.1' selects no layer.*layers.1"),
        (DELAYED, Phase(9, "delayed"), r"step 9 gives layers.0 .*one state for all phases"),
        (DELAYED, Phase(9, DelayedScaling(4, margin=1)), "one state for all phases"),
        (DELAYED, Phase(9, Recipe.of(DelayedScaling(4), backward=fp8.recipes.E4M3)), "one state for all phases"),
        (fp8_linear_layers(PLAIN, recipe="rowwise"), Phase(9, "delayed"), "the layer has none.*Convert the layer with"),
        (PLAIN, Phase(9, None), "the model has none: convert it first"),
    ],
)
def test_a_later_phase_that_does_not_fit_the_model_raises_before_the_first_step(model, phase, message):
    step = TrainStep(loss_fn, OPTIMIZER, phases=[Phase(0), phase])
    opt_state = CountedState(0, TrainStep(loss_fn, OPTIMIZER).init(model))
    for call in (lambda: step.init(model), lambda: step(model, opt_state, X)):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_optimizers_state_says_which_step_it_is():
    step, plain = TrainStep(loss_fn, OPTIMIZER, phases=THREE), TrainStep(loss_fn, OPTIMIZER)
    model, opt_state, _ = run(plain, DELAYED, plain.init(DELAYED), 3)
    with pytest.raises(ValueError, match=r"opt_state does not say how many steps.*CountedState\(n, opt_state\)"):
        step(model, opt_state, X)
    with pytest.raises(ValueError, match=r"opt_state.steps=0, but its optimizer has counted 3"):
        step(model, CountedState(0, opt_state), X)
    with pytest.raises(ValueError, match="opt_state.steps=-1"):
        step(model, CountedState(-1, opt_state), X)
    _, opt_state, _ = step(model, CountedState(3, opt_state), X)
    assert int(opt_state.steps) == 4 and step.phase(opt_state) == THREE[2]


def test_inside_jit_one_phase_is_one_program_and_several_raise():
    step = TrainStep(loss_fn, OPTIMIZER, phases=THREE)
    opt_state = step.init(DELAYED)
    with pytest.raises(ValueError, match="phases have programs of their own.*inside jit"):
        eqx.filter_jit(lambda model, state: step(model, state, X))(DELAYED, opt_state)
    one = dataclasses.replace(step, phases=[Phase(0, None)])
    inside, _, _ = eqx.filter_jit(lambda model, state: one(model, state, X))(DELAYED, opt_state.optimizer)
    assert_same(weights(inside), weights(one(DELAYED, opt_state.optimizer, X)[0]))
