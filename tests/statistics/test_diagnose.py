"""`diagnose`: planted problems are named with layer, operand and remedy; healthy models are left in peace."""

import dataclasses
import logging

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haliax_fp8 as fp8
from haliax_fp8._state.table import guarded
from haliax_fp8.recipes import (
    E4M3,
    E5M2,
    DelayedScaling,
    MostRecent,
    MovingAverage,
    Percentile,
    Recipe,
    RecoveringMax,
    StaticScaling,
)
from haliax_fp8.statistics import (
    Diagnosis,
    Problem,
    Remedy,
    Thresholds,
    apply_remedies,
    diagnose,
    every,
)
from haliax_fp8.statistics.diagnose import check
from haliax_fp8.statistics.history import History
from haliax_fp8.statistics.operand import Operand


WIDTH, DEPTH, ROWS, STEPS, HISTORY = 32, 3, 64, 12, 16
KEY = jax.random.key(0)


class Net(eqx.Module):
    """Residual blocks with a normalization before each, and a head."""

    layers: list[eqx.nn.Linear]
    head: eqx.nn.Linear

    def __init__(self, key):
        *keys, last = jax.random.split(key, DEPTH + 1)
        self.layers = [eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in keys]
        self.head = eqx.nn.Linear(WIDTH, WIDTH, key=last)

    def __call__(self, x, blow=0.0, gain=1.0):
        """`blow` multiplies the input of the third layer by `1 + blow`, `gain` the gradients behind the second."""
        for i, layer in enumerate(self.layers):
            x = _with_gain(x, gain) if i == 2 else x
            normal = x / jnp.sqrt(jnp.mean(x**2) + 1e-6)
            normal = normal * (1.0 + blow) if i == 2 else normal
            x = x + jax.nn.silu(layer(normal)) / (1.0 + (blow if i == 2 else 0.0))
        return self.head(x)


@jax.custom_vjp
def _with_gain(x, gain):
    return x


_with_gain.defvjp(lambda x, gain: (x, gain), lambda gain, g: (g * gain, None))


def loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def batch(seed):
    x = jax.random.normal(jax.random.fold_in(KEY, seed), (ROWS, WIDTH))
    return x, jnp.roll(x, 1, axis=-1)


def trained(recipe="delayed", *, calibrate=True, rate=0.1, steps=STEPS, seed=0):
    if recipe == "delayed":
        recipe = DelayedScaling(amax_history_length=HISTORY)
    model = fp8.fp8_linear_layers(Net(jax.random.fold_in(KEY, 100 + seed)), recipe=recipe)
    step = fp8.TrainStep(loss, optax.sgd(rate, momentum=0.9))
    if calibrate:
        model = step.calibrate(model, *batch(999))
    opt_state = step.init(model)
    for i in range(steps):
        model, opt_state, metrics = step(model, opt_state, *batch(i))
        assert np.isfinite(float(metrics["loss"]))
    return model


@pytest.fixture(scope="module")
def healthy():
    return trained()


_measure = eqx.filter_jit(fp8.quantization_statistics)


def diagnosis_of(model, loss_fn=loss, data=None, thresholds=None):
    measured = _measure(model, loss_fn, *(batch(STEPS) if data is None else data))
    return diagnose(model, measured, thresholds)


def only(diagnosis, problem):
    """The findings of a kind, which are all there are."""
    assert diagnosis and {finding.problem for finding in diagnosis.findings} == {problem}, diagnosis
    return diagnosis.findings


def findings(diagnosis):
    """What each finding names: layer, operand, problem and remedy."""
    return [(f.layer, f.operand, f.problem, f.remedy) for f in diagnosis.findings]


def at(model, i):
    return model.layers[i].dot_general


def operand(layer, name, scaling, history=None, *, recipe=None, **numbers):
    """An operand that nothing is wrong with, but for the given numbers and the amaxes of its history."""
    recipe = Recipe.of(scaling) if recipe is None else recipe
    usual = {"amax": 1.0, "scale": 1.0 / getattr(recipe, name).format.max, "active": 1.0, "kurtosis": 3.0}
    usual["wide_rows"] = 0.0
    numbers = {**usual, **dict.fromkeys(("saturation", "underflow", "error", "nonfinite"), 0.0), **numbers}
    past = None if history is None else History(np.asarray(history), numbers["scale"])
    return Operand(layer, (), name, numbers, past, recipe)


def checked(*operands, thresholds=None):
    return check(list(operands), Thresholds() if thresholds is None else thresholds)


def with_weight(model, i, weight):
    return eqx.tree_at(lambda m: m.layers[i].weight, model, weight)


# --- Healthy models ---------------------------------------------------------------------------------------------------


def test_histories_are_read_in_the_order_of_time():
    op = fp8.Fp8DotGeneral.init(DelayedScaling(amax_history_length=4))
    # The scale, the newest amax, and the others from the oldest on.
    row = jnp.asarray([2.0, 16.0, 2.0, 4.0, 8.0])
    op = eqx.tree_at(lambda op: op.state.table.array, op, guarded(jnp.stack([row] * 3)))
    history = History.of(op, 0, ())
    assert history is not None and history.amaxes.tolist() == [2.0, 4.0, 8.0, 16.0]
    assert (history.scale, history.newest, history.largest, history.age) == (2.0, 16.0, 16.0, 0)
    assert [history.growth(steps) for steps in (1, 2, 3)] == [2.0, 4.0, 8.0]
    # Nobody knows what was before.
    assert history.growth(4) == 1.0
    assert History(np.asarray([16.0, 2.0, 4.0]), 1.0).age == 2


@pytest.mark.parametrize("kernels", [2, 3])
@pytest.mark.parametrize("factor", [16.0, 1 / 16])
def test_kernels_that_are_not_those_of_the_last_step(kernels, factor):
    """Smaller or larger; most of several were moved by one step, which is said once. Of two it tells nothing."""
    amaxes = [factor if i < 2 else 1.0 for i in range(kernels)]
    all = [operand(f"layers.{i}", "kernel", DelayedScaling(), [1.0], amax=amax) for i, amax in enumerate(amaxes)]
    reported = checked(*all)
    assert [f.problem for f in reported] == ([Problem.JUMP] if kernels >= 3 else [])
    for finding in reported:
        assert finding.seen["kernel_jump"] == 16.0 and finding.limits == {"kernel_jump": Thresholds().kernel_jump}
        assert (finding.seen["amax"], finding.seen["recorded"]) == (factor, 1.0)


def test_a_percentile_is_no_amax():
    """Its history holds another number than `amax`, so nothing follows from comparing them."""
    scaling = DelayedScaling(amax_compute=Percentile(99.0))
    assert not checked(*(operand(str(i), "kernel", scaling, [1.0], amax=8.0) for i in range(4)))


@pytest.mark.more
@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "delayed"},
        {"recipe": "current"},
        {"recipe": "mxfp8"},
        {"recipe": "rowwise"},
        {"recipe": "delayed", "seed": 1, "rate": 0.5},
        {"recipe": DelayedScaling(amax_history_length=4), "seed": 2, "steps": 40},
    ],
    ids=["delayed", "current", "mxfp8", "rowwise", "larger_rate", "longer"],
)
def test_healthy_models_are_left_in_peace(options):
    model = trained(**options)
    diagnosis = diagnosis_of(model)
    assert not diagnosis, diagnosis
    assert str(diagnosis) == "No problem found."


def test_four_bits_flush_some_of_a_healthy_tensor_to_zero():
    """A normal distribution loses 7 % in NVFP4, which costs what rounding does; more than that is reported."""
    model = fp8.with_rounding_keys(fp8.fp8_linear_layers(Net(KEY), recipe="nvfp4"), KEY)
    measured = _measure(model, loss, *batch(0))
    assert float(measured.underflow) > Thresholds().underflow
    diagnosis = diagnose(model, measured)
    assert not diagnosis, diagnosis
    recipe = fp8.recipes.named["nvfp4"]
    lost = spiked(recipe.input.scaling, 1.0, recipe=recipe)
    assert checked(lost) == ()
    lost.numbers["error"] = 0.1
    (finding,) = checked(lost)
    assert (finding.problem, finding.remedy) == (Problem.UNDERFLOW, Remedy.SCALE_PER_ROW)


Layers, Width, Up, Experts = hax.make_axes(layers=3, width=WIDTH, up=64, experts=3)


class Block(eqx.Module):
    """A residual block of two layers."""

    norm: hnn.RmsNorm
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        up, down = jax.random.split(key)
        return Block(
            hnn.RmsNorm.init(Width, use_bias=False),
            hnn.Linear.init(Width, Up, key=up, use_bias=False),
            hnn.Linear.init(Up, Width, key=down, use_bias=False),
        )

    def __call__(self, x):
        return x + self.down(hnn.silu(self.up(self.norm(x))))


class Mixture(eqx.Module):
    """Experts with as many rows each, and a head."""

    up: hnn.MoELinear
    down: hnn.MoELinear
    head: hnn.Linear

    @staticmethod
    def init(*, key):
        up, down, head = jax.random.split(key, 3)
        return Mixture(
            hnn.MoELinear.init(Experts, Width, Up, key=up, use_bias=False),
            hnn.MoELinear.init(Experts, Up, Width, key=down, use_bias=False),
            hnn.Linear.init(Width, Width.alias("out"), key=head, use_bias=False),
        )

    def __call__(self, x, sizes=(20, 16, 28)):
        rows = hax.named(jnp.asarray(sizes), Experts)
        return self.head(x + self.down(hnn.silu(self.up(x, rows)), rows))


def of_named(model, x, y, *args):
    out = model.fold(hax.named(x, ("rows", Width))) if isinstance(model, hnn.Stacked) else model(_rows(x), *args)
    return jnp.mean((out.array - y) ** 2)


def _rows(x):
    return hax.named(x, ("rows", Width))


def stack(key):
    return hnn.Stacked.init(Layers, Block)(key=jax.random.split(key, Layers.size))


MODELS = {"stack": stack, "experts": lambda key: Mixture.init(key=key)}


@pytest.mark.more
@pytest.mark.parametrize(
    "model, options",
    [
        ("stack", {"recipe": "delayed"}),
        ("stack", {"recipe": "rowwise"}),
        ("experts", {"recipe": "delayed"}),
        ("experts", {"recipe": "delayed", "scale_per_expert": True}),
    ],
    ids=["stack", "rowwise", "experts", "scale_per_expert"],
)
def test_healthy_models_are_left_in_peace_at_every_step(model, options):
    """From calibration on, with Adam, whose first steps are large."""
    model = fp8.fp8_linear_layers(MODELS[model](KEY), **options)
    step = fp8.TrainStep(of_named, optax.adam(3e-3))
    model = step.calibrate(model, *batch(999))
    opt_state = step.init(model)
    for i in range(21):
        if i in (0, 1, 2, 5, 10, 20):
            diagnosis = diagnosis_of(model, of_named, batch(i))
            assert not diagnosis, (i, diagnosis)
        with jax.numpy_dtype_promotion("standard"):  # as Optax's Adam needs
            model, opt_state, _ = step(model, opt_state, *batch(i))


# --- Planted problems -------------------------------------------------------------------------------------------------


@pytest.mark.more
def test_activations_of_one_layer_ten_thousand_times_larger(healthy):
    blown = lambda m, x, y: jnp.mean((jax.vmap(lambda row: m(row, blow=1e4))(x) - y) ** 2)
    diagnosis = diagnosis_of(healthy, blown)
    assert findings(diagnosis) == [("layers.2", "input", Problem.JUMP, Remedy.SCALE_PER_ROW)]
    (finding,) = diagnosis.findings
    assert finding.seen["jump"] > finding.limits["jump"] == 4.0
    assert "times the largest of the history" in finding.seen_in_words


@pytest.mark.more
def test_nan_in_one_microbatch(healthy):
    """`TrainStep(microbatches=4)` measures in its own step: the number of microbatches with NaN does not matter."""
    x, y = batch(STEPS)
    step = fp8.TrainStep(loss, optax.sgd(0.0), microbatches=4, monitor=every(1))
    _, _, metrics = step(healthy, step.init(healthy), x.at[20, 3].set(jnp.nan), y)
    assert float(metrics["fp8/layers.0/input/nonfinite"]) == WIDTH
    assert float(metrics["fp8/layers.0/kernel/nonfinite"]) == 0

    in_parts = lambda a: a.reshape(4, ROWS // 4, WIDTH)
    accumulated = lambda m, x, y: jnp.mean(jax.lax.map(lambda part: loss(m, *part), (in_parts(x), in_parts(y))))
    diagnosis = diagnosis_of(healthy, accumulated, (x.at[20, 3].set(jnp.nan), y))
    assert findings(diagnosis) == [("layers.0", "input", Problem.NOT_FINITE, Remedy.NONE)]
    (finding,) = diagnosis.findings
    assert "apply_if_finite" in finding.advice and "fprop" in finding.seen_in_words


@pytest.mark.more
def test_nan_in_a_kernel_is_the_cause_not_the_inputs_behind_it(healthy):
    spoiled = with_weight(healthy, 1, healthy.layers[1].weight.at[0, 0].set(jnp.inf))
    (finding,) = only(diagnosis_of(spoiled), Problem.NOT_FINITE)
    assert (finding.layer, finding.operand) == ("layers.1", "kernel")


@pytest.mark.more
def test_a_dead_layer(healthy):
    dead = eqx.tree_at(lambda m: m.layers[1].bias, healthy, jnp.full(WIDTH, -1e4))
    diagnosis = diagnosis_of(dead)
    assert findings(diagnosis) == [("layers.1", "output_grad", Problem.DEAD, Remedy.NONE)]
    assert "look for activations that are zero for every input, a mask" in diagnosis.findings[0].advice


@pytest.mark.more
def test_state_that_no_step_has_written():
    """Scales of 1 that happen to fit: training without the write-back."""
    model = fp8.fp8_linear_layers(eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 2, key=KEY))
    square = lambda model, x: (jax.vmap(model)(x) ** 2).mean() * 1e3
    diagnosis = diagnosis_of(model, square, (4 * jax.random.normal(KEY, (64, WIDTH)),))
    (finding,) = only(diagnosis, Problem.NOT_CALIBRATED)
    assert finding.seen["all_operands"] == 9 and "those of all 9 operands" in finding.seen_in_words
    assert "apply the overwrites" in finding.advice


@pytest.mark.more
def test_formats_swapped():
    swapped = Recipe.of(DelayedScaling(amax_history_length=HISTORY), forward=E5M2, backward=E4M3)
    model = trained(swapped, steps=0)
    findings = only(diagnosis := diagnosis_of(model), Problem.FORMATS_SWAPPED)
    assert [f.layer for f in findings] == [*(f"layers.{i}" for i in range(DEPTH)), "head"]
    assert all(f.operand == "input" and f.remedy is Remedy.STANDARD_FORMATS for f in findings)
    # One report of them all, and a remedy for each.
    lines = [" ".join(line.split()) for line in str(diagnosis).splitlines()]
    assert lines[0] == "formats swapped (4 findings)" and sum(line.startswith("remedy ") for line in lines) == 1
    assert "where layers.0-2, input" in lines and "head, input" in lines
    mended = apply_remedies(model, diagnosis)
    for op in (*(at(mended, i) for i in range(DEPTH)), mended.head.dot_general):
        assert op.recipe == Recipe.of(DelayedScaling(amax_history_length=HISTORY))


def test_clipped_gradients(healthy):
    """The margin of a scale set by hand is too small for the gradients alone."""
    state = at(healthy, 1).state
    small = dataclasses.replace(at(healthy, 1), state=state.with_scale(state.scale.at[2].multiply(1 / 64)))
    model = eqx.tree_at(lambda m: m.layers[1].dot_general, healthy, small)
    (finding,) = only(diagnosis_of(model), Problem.SATURATION)
    assert (finding.layer, finding.operand, finding.remedy) == ("layers.1", "output_grad", Remedy.MARGIN)
    assert at(apply_remedies(model, diagnosis_of(model)), 1).recipe.output_grad.scaling.margin == 1


def test_drift(healthy):
    """Weights that grow by a quarter in each step, as a loss without normalization lets them."""
    model, step = healthy, fp8.TrainStep(loss, optax.sgd(0.0))
    for i in range(9):
        model = with_weight(model, 2, model.layers[2].weight * 1.25)
        model, _, _ = step(model, step.init(model), *batch(i))
    diagnosis = diagnosis_of(model)
    assert findings(diagnosis) == [("layers.2", "kernel", Problem.GROWTH, Remedy.MARGIN)]
    (finding,) = diagnosis.findings
    assert finding.seen["growth"] > 4 and finding.others == ("output_grad",)
    assert "and so did that of output_grad" in finding.seen_in_words


def experts(options):
    """An expert without rows, in a layer of Haliax."""
    model = fp8.fp8_linear_layers(Mixture.init(key=KEY), **options)
    idle = lambda m, x, y: of_named(m, x, y, (36, 0, 28))
    if fp8.recipes.named[options["recipe"]].is_stateful:
        model = fp8.calibrate(model, of_named, [batch(0)])
    return diagnosis_of(model, idle, batch(0))


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("mxfp8", marks=pytest.mark.more)])
def test_an_expert_that_never_runs(recipe):
    """Experts with one state for all: how many got no rows."""
    diagnosis = experts({"recipe": recipe})
    assert findings(diagnosis) == [(name, "input", Problem.NO_ROWS, Remedy.NONE) for name in ("up", "down")]
    first = diagnosis.findings[0]
    assert first.seen["active"] == pytest.approx(2 / 3)
    assert (
        first.seen_in_words == "33.3% of the experts of up received no rows" and "scale_per_expert=True" in first.advice
    )


@pytest.mark.more
def test_an_expert_that_never_runs_by_its_number():
    """Experts with a state each: which."""
    diagnosis = experts({"recipe": "delayed", "scale_per_expert": True})
    assert findings(diagnosis) == [(name, "input", Problem.NO_ROWS, Remedy.NONE) for name in ("up", "down")]
    assert [f.seen["expert"] for f in diagnosis.findings] == [1, 1]
    assert diagnosis.findings[0].seen_in_words == "expert 1 of up received no rows"
    assert [f.index for f in diagnosis.findings] == [(1,), (1,)] and "balance the router" in str(diagnosis)


@pytest.mark.more
def test_experts_that_the_loss_does_not_reach():
    """One finding for the layer, not one for each expert."""
    model = fp8.fp8_linear_layers(Mixture.init(key=KEY), recipe="delayed", scale_per_expert=True)
    model = fp8.calibrate(model, of_named, [batch(0)])
    head = lambda m, x, y: jnp.mean((m.head(_rows(x)).array - y) ** 2)
    diagnosis = diagnosis_of(model, head)
    assert findings(diagnosis) == [(name, "input", Problem.DEAD, Remedy.NONE) for name in ("up", "down")]


@pytest.mark.more
def test_an_expert_of_a_list_that_never_runs():
    experts = [eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in jax.random.split(KEY, 3)]
    model = fp8.fp8_linear_layers(experts, recipe="current")
    x, y = batch(0)
    routed = x[:, 0] > 0.0

    def loss(model, x, y):
        rows = jnp.where(routed[:, None], x, 0.0), jnp.where(routed[:, None], 0.0, x), jnp.zeros_like(x)
        return jnp.mean((sum(jax.vmap(e)(r) for e, r in zip(model, rows, strict=True)) - y) ** 2)

    (finding,) = only(diagnosis_of(model, loss, (x, y)), Problem.DEAD)
    assert (finding.layer, finding.operand) == ("2", "input") and "expert" in finding.advice
    unused = lambda model, x, y: jnp.mean((jax.vmap(model[0])(x) - y) ** 2)
    assert [f.layer for f in only(diagnosis_of(model, unused, (x, y)), Problem.DEAD)] == ["1", "2"]


def test_scales_left_at_one():
    small = lambda m, x, y: 1e-9 * loss(m, x, y)
    # Nothing passes the head, so the layers before it have no gradient at all.
    (finding,) = only(diagnosis_of(trained(calibrate=False, steps=0), small), Problem.NOT_CALIBRATED)
    assert (finding.layer, finding.operand, finding.remedy) == ("head", "output_grad", Remedy.NONE)
    assert "model = step.calibrate(model, *batch)" in finding.advice


def test_a_spike_of_the_learning_rate(healthy):
    """The cause alone: every scale of every layer is wrong after it."""
    moved = jax.tree.map(
        lambda x: x + jax.random.normal(KEY, x.shape) if eqx.is_inexact_array(x) and x.ndim == 2 else x,
        fp8.trainable(healthy),
    )
    (finding,) = diagnosis_of(eqx.combine(moved, healthy)).findings
    assert (finding.operand, finding.problem, finding.remedy) == ("kernel", Problem.JUMP, Remedy.NONE)
    factors = {}
    for layer in [*range(DEPTH), "head"]:
        of = lambda m, layer=layer: m.head if layer == "head" else m.layers[layer]
        after, before = (float(jnp.abs(of(m).weight).max()) for m in (moved, healthy))
        factors["head" if layer == "head" else f"layers.{layer}"] = after / before
    assert finding.layer == max(factors, key=factors.get)
    # The last step recorded the amax of the weights before its update.
    assert finding.seen["kernel_jump"] == pytest.approx(max(factors.values()), rel=0.05)
    assert f"{DEPTH + 1} of {DEPTH + 1} kernels" in finding.seen_in_words and "learning rate" in finding.advice


def test_a_step_that_moves_most_kernels_by_less_than_a_factor_of_two(healthy):
    """As Adam's at a learning rate close to the weights."""

    def moved(x):
        step = jax.random.rademacher(KEY, x.shape, jnp.float32) * jnp.abs(x).max()
        return x + jnp.float32(0.6) * step

    params = jax.tree.map(lambda x: moved(x) if eqx.is_inexact_array(x) and x.ndim == 2 else x, fp8.trainable(healthy))
    (finding,) = diagnosis_of(eqx.combine(params, healthy)).findings
    assert (finding.operand, finding.problem) == ("kernel", Problem.JUMP) and "learning rate" in finding.advice
    assert finding.limits == {"kernel_jump": 1.4} and "1.4 in most kernels" in finding.threshold_in_words


@pytest.mark.more
def test_underflow_of_deep_gradients(healthy):
    """Gradients of the first layers are suddenly far below what the history remembers; they come from the second."""
    weak = lambda m, x, y: jnp.mean((jax.vmap(lambda row: m(row, gain=1e-10))(x) - y) ** 2)
    diagnosis = diagnosis_of(healthy, weak)
    assert findings(diagnosis)[0] == ("layers.1", "output_grad", Problem.OLD_SPIKE, Remedy.SCALE_PER_ROW)
    assert [(f.layer, f.operand) for f in diagnosis.findings[1:]] == [("layers.0", "output_grad")]


@pytest.mark.more
def test_underflow_of_gradients_that_one_scale_cannot_hold():
    """Each example's gradient is half that of the one before: 64 binades, of which E5M2 holds 32."""
    fading = lambda m, x, y: jnp.sum(jnp.exp2(-jnp.arange(64.0))[:, None] * (jax.vmap(m)(x) - y) ** 2)
    findings = only(diagnosis_of(trained("current", steps=1), fading), Problem.UNDERFLOW)
    # Half of the rows end there; the layers before it get what is left.
    assert findings[0].layer == "head" and findings[0].seen["format_dynamic_range"] == pytest.approx(32, abs=0.5)
    assert {(f.operand, f.remedy) for f in findings} == {("output_grad", Remedy.SCALE_PER_ROW)}


UP = {"up": eqx.nn.Linear(256, 16, use_bias=False, key=KEY)}


def squares(model, x):
    return jnp.mean(jax.vmap(model["up"])(x) ** 2)


def share_flushed(model, x):
    """Of the layer's input, where fprop reads it."""
    return float(_measure(model, squares, x)["up"].underflow[0])


def test_an_outlier_token_has_its_own_scale_and_an_outlier_channel_lies_in_every_row():
    """Each remedy lowers what it is for; a scale per row would not help the channel, but blocks do."""
    x = jax.random.normal(KEY, (64, 256))
    token, channel = x.at[5].multiply(1e6), x.at[:, 5].multiply(1e6)
    converted = lambda recipe: fp8.fp8_linear_layers(UP, recipe=recipe)
    current = converted("current")
    assert share_flushed(current, token) > 0.9 and share_flushed(current, channel) > 0.9

    diagnosis = diagnosis_of(current, squares, (token,))
    assert findings(diagnosis) == [("up", "input", Problem.OUTLIERS, Remedy.SCALE_PER_ROW)]
    assert share_flushed(apply_remedies(current, diagnosis), token) < 0.001

    diagnosis = diagnosis_of(current, squares, (channel,))
    assert findings(diagnosis) == [("up", "input", Problem.OUTLIERS, Remedy.HIGH_PRECISION)]
    assert "mxfp8" in diagnosis.findings[0].advice and "of the rows" in diagnosis.findings[0].seen_in_words
    assert share_flushed(converted("rowwise"), channel) > 0.5
    assert share_flushed(converted("mxfp8"), channel) < 1 / 8  # one of its eight blocks has the channel
    mended = apply_remedies(current, diagnosis)
    np.testing.assert_array_equal(jax.vmap(mended["up"])(channel), jax.vmap(UP["up"])(channel))


@pytest.mark.parametrize("scaling", [DelayedScaling(amax_history_length=1), DelayedScaling(amax_compute=MostRecent())])
def test_a_history_that_is_too_short_for_alternating_batches(scaling):
    """Every other batch is a hundred times as large; the remedy remembers one of these.

    The gradient of the first is itself that of a clipped output.
    """
    x = jax.random.normal(KEY, (64, 256))
    step = fp8.TrainStep(squares, optax.sgd(0.0))

    def after(model, *factors):
        opt_state = step.init(model)
        for factor in factors:
            model, opt_state, _ = step(model, opt_state, factor * x)
        return model

    model = after(fp8.fp8_linear_layers(UP, recipe=scaling), 1.0, 100.0, 1.0)
    diagnosis = diagnosis_of(model, squares, (100.0 * x,))
    assert ("up", "input", Problem.SHORT_HISTORY, Remedy.LONGER_HISTORY) in findings(diagnosis)
    mended = after(apply_remedies(model, diagnosis), 100.0, 1.0, 100.0, 1.0)
    assert mended["up"].dot_general.recipe.input.scaling.amax_history_length >= 16
    error = lambda model: float(_measure(model, squares, 100.0 * x)["up"].error[0])
    # Of an amax of a hundred, what fits into the scale for one; then rounding alone.
    assert error(model) > 0.9 and error(mended) < 0.002
    assert not diagnosis_of(mended, squares, (100.0 * x,)) and not diagnosis_of(mended, squares, (x,))


def test_what_grows_or_is_young_has_no_short_history():
    clipped = {"amax": 64.0, "saturation": 0.5, "error": 0.9}
    problem = lambda length, past: checked(operand("0", "input", DelayedScaling(length), past, **clipped))[0].problem
    assert problem(4, [2.0, 1.0, 4.0, 8.0]) is Problem.SHORT_HISTORY
    assert problem(4, [1.0, 2.0, 4.0, 8.0]) is Problem.JUMP, "no history is long enough for what grows"
    assert problem(4, [0.0, 1.0, 1.0, 1.0]) is Problem.JUMP, "three steps are all there were"
    assert problem(16, [1.0] * 16) is Problem.JUMP


def test_rows_that_are_all_wide_gain_nothing_from_scales():
    """Unless their scale is made for other steps."""
    flushed = {"underflow": 0.5, "error": 0.01, "dynamic_range": 40.0}
    remedy = lambda **of: checked(operand("0", "input", StaticScaling(scale=1.0), **flushed, **of))[0].remedy
    assert remedy(wide_rows=0.1) is Remedy.SCALE_PER_ROW and remedy(wide_rows=0.9) is Remedy.HIGH_PRECISION
    assert remedy(wide_rows=0.9, scale=100 / 448) is Remedy.SCALE_PER_ROW


def test_the_last_layer_whose_gradient_is_flushed_is_named_first():
    """The gradient comes from there; forward, it is the first layer."""
    numbers = {"underflow": 0.5, "error": 0.01, "dynamic_range": 40.0}
    flushed = lambda layer, name: operand(layer, name, StaticScaling(scale=1.0), **numbers)
    diagnosis = checked(*[flushed(layer, name) for layer in "012" for name in ("input", "output_grad")])
    assert [(f.layer, f.operand) for f in diagnosis] == [
        *[(layer, "input") for layer in "012"],
        *[(layer, "output_grad") for layer in "210"],
    ]


def test_which_share_of_clipped_elements_is_a_problem():
    """A thousandth, if it costs more than rounding: in E4M3 with its three bits of mantissa, at most 2**-4 squared."""
    problems = lambda **of: [f.problem for f in checked(operand("0", "input", StaticScaling(scale=1.0), **of))]
    assert problems(saturation=0.0011, error=2.0**-7) == [Problem.SATURATION]
    assert problems(saturation=0.0009, error=2.0**-7) == problems(saturation=0.5, error=2.0**-9) == []


@pytest.mark.parametrize("share, is_problem", [(0.03, False), (0.08, True)])
def test_printed_statistics_and_the_diagnosis_have_one_threshold(share, is_problem):
    x = jax.random.normal(KEY, (64, 256)).ravel()
    x = x.at[: int(share * x.size)].set(1e-12).reshape(64, 256)
    measured = _measure(model := fp8.fp8_linear_layers(UP, recipe="current"), squares, x)
    assert bool(diagnose(model, measured)) == is_problem
    line = " ".join(str(measured).split())
    assert ("none underflows by more than 5%" in line) != is_problem
    assert ("1 of 3 operands underflows by more than 5%" in line) == is_problem


def spiked(scaling, scale_of, *, kurtosis=3.0, name="input", recipe=None):
    """An operand flushed to zero: of an amax of 1 now, of 1e6 two steps ago, and with a scale made for a given amax."""
    largest = getattr(Recipe.of(scaling) if recipe is None else recipe, name).format.max
    numbers = {
        "underflow": 0.5,
        "error": 0.01,
        "dynamic_range": 15.0,
        "kurtosis": kurtosis,
        "scale": scale_of / largest,
    }
    history = [1.0, 1e6, 1.0, 1.0] if isinstance(scaling, DelayedScaling) else None
    return operand("0", name, scaling, history, recipe=recipe, **numbers)


def test_an_old_spike_is_told_by_the_scale():
    """The scale follows it, or has another reason: another amax of the history, or an update that is yet to come."""
    (finding,) = checked(spiked(DelayedScaling(), 1e6))
    assert (finding.problem, finding.remedy) == (Problem.OLD_SPIKE, Remedy.SHORTER_HISTORY)
    for scaling, amax in (
        (DelayedScaling(amax_compute=RecoveringMax()), 256.0),
        (DelayedScaling(amax_compute=MovingAverage()), 1e4),
        (DelayedScaling(update_interval=8), 1e7),
        (StaticScaling(scale=1.0), 100.0),
    ):
        (finding,) = checked(spiked(scaling, amax))
        assert finding.problem is Problem.UNDERFLOW, scaling
        assert finding.seen["amax_of_scale"] == pytest.approx(amax)
        assert f"its scale is made for an amax of {amax:.2g}, but this step's is 1" in finding.seen_in_words
    (finding,) = checked(spiked(DelayedScaling(amax_compute=MostRecent()), 1.0))
    assert finding.problem is Problem.UNDERFLOW and "its values span 15 bits" in finding.seen_in_words


def test_outliers_are_not_blamed_for_a_scale_that_follows_a_spike():
    reported = lambda scaling, amax: checked(spiked(scaling, amax, kurtosis=99.0))
    blamed = lambda *of: [finding for finding in reported(*of) if finding.problem is Problem.OUTLIERS]
    assert blamed(DelayedScaling(), 1.0) and blamed(DelayedScaling(margin=4), 16.0)
    assert not blamed(DelayedScaling(), 1e6) and not blamed(StaticScaling(scale=1.0), 100.0)


def test_a_short_history_is_not_made_longer():
    for length in (4, HISTORY):
        (finding,) = checked(spiked(DelayedScaling(amax_history_length=length), 1e6))
        assert (finding.problem, finding.remedy) == (Problem.OLD_SPIKE, Remedy.SCALE_PER_ROW)
    long, short = (Recipe.of(DelayedScaling(amax_history_length=length)) for length in (64, 4))
    recipe = dataclasses.replace(long, kernel=short.kernel)
    diagnosis = Diagnosis(tuple(checked(spiked(DelayedScaling(), 1e6, recipe=recipe))))
    model = {"0": eqx.nn.Linear(WIDTH, WIDTH, key=KEY)}
    mended = apply_remedies(fp8.fp8_linear_layers(model, recipe=recipe), diagnosis)
    lengths = [q.scaling.amax_history_length for q in mended["0"].dot_general.recipe.operands]
    assert lengths[:3] == [HISTORY, 4, HISTORY]


@pytest.mark.parametrize(
    "recipe, remedy",
    [
        ("current", Remedy.SCALE_PER_ROW),
        ("rowwise", Remedy.HIGH_PRECISION),
        ("mxfp8", Remedy.HIGH_PRECISION),
        ("deepseek", Remedy.HIGH_PRECISION),
    ],
)
def test_scales_of_rows_and_blocks_are_not_made_coarser(recipe, remedy):
    recipe = fp8.recipes.named[recipe]
    (finding,) = checked(spiked(recipe.input.scaling, 1.0, recipe=recipe))
    assert (finding.problem, finding.remedy) == (Problem.UNDERFLOW, remedy)
    assert ("rowwise" in finding.advice) == (remedy is Remedy.SCALE_PER_ROW)


@pytest.mark.parametrize(
    "scaling, fits",
    [
        (DelayedScaling(), True),
        (DelayedScaling(amax_compute=RecoveringMax()), True),
        (DelayedScaling(amax_compute=MovingAverage()), False),
        (DelayedScaling(amax_compute=Percentile(99.0)), False),
        (DelayedScaling(update_interval=8), False),
    ],
)
def test_a_jump_fits_in_the_next_step_only_if_the_scale_follows_it(scaling, fits):
    numbers = {"amax": 1e3, "saturation": 0.5, "error": 0.9}
    (finding,) = checked(operand("0", "input", scaling, [1.0], scale=1 / 448, **numbers))
    assert ("the next step's scale will fit" in finding.advice) == fits


# --- What surrounds them ----------------------------------------------------------------------------------------------


@pytest.mark.more
def test_the_zero_matrices_of_lora_are_not_dead():
    class Adapted(eqx.Module):
        base: eqx.nn.Linear
        lora: dict[str, eqx.nn.Linear]

        def __call__(self, x):
            return self.base(x) + self.lora["B"](self.lora["A"](x))

    a, b, c = jax.random.split(KEY, 3)
    up = eqx.nn.Linear(8, WIDTH, use_bias=False, key=b)
    up = eqx.tree_at(lambda m: m.weight, up, jnp.zeros_like(up.weight))
    lora = {"A": eqx.nn.Linear(WIDTH, 8, use_bias=False, key=a), "B": up}
    model = fp8.fp8_linear_layers(Adapted(eqx.nn.Linear(WIDTH, WIDTH, key=c), lora), recipe="current")
    assert not diagnosis_of(model)


@pytest.mark.more
def test_layers_of_a_stack_are_told_apart_and_an_old_spike_gets_a_shorter_history(caplog):
    Layers, Width = hax.Axis("layers", 3), hax.Axis("width", WIDTH)

    class Block(eqx.Module):
        linear: hnn.Linear

        @staticmethod
        def init(*, key):
            return Block(hnn.Linear.init(Width, Width.alias("out"), key=key))

        def __call__(self, x):
            return x + hax.rename(self.linear(x), {"out": "width"})

    stacked = hnn.Stacked.init(Layers, Block)(key=jax.random.split(KEY, 3))
    model = fp8.fp8_linear_layers(stacked, recipe=DelayedScaling(amax_history_length=4 * HISTORY))
    x = hax.random.normal(KEY, (hax.Axis("rows", 8), Width))
    square = lambda m, x: hax.mean(m.fold(x) ** 2).scalar()
    model = fp8.calibrate(model, square, [(x,)])
    op = model.stacked.linear.dot_general
    # Layer 1 remembers a gradient that was 1e12 times as large.
    state = op.state.with_array(op.state.array.at[1, 2, 3].set(1e12))
    state = state.with_scale(op.state.scale.at[1, 2].set(1e12 / 57344))
    model = eqx.tree_at(lambda m: m.stacked.linear.dot_general, model, dataclasses.replace(op, state=state))
    diagnosis = diagnosis_of(model, square, (x,))
    (finding,) = only(diagnosis, Problem.OLD_SPIKE)
    assert (finding.layer, finding.index, finding.operand) == ("stacked.linear", (1,), "output_grad")
    assert finding.seen["age"] == 4 * HISTORY - 2
    with caplog.at_level(logging.INFO, logger="haliax_fp8"):
        mended = apply_remedies(model, diagnosis)
    assert "stacked.linear (output_grad, old spike): a history of 16 steps" in caplog.text
    np.testing.assert_array_equal(mended.stacked.linear.dot_general.state.scale, state.scale)
    assert mended.stacked.linear.dot_general.recipe.input.scaling.amax_history_length == HISTORY
    text = str(diagnosis)
    assert "stacked.linear[1], output_grad: old spike" in text and max(map(len, text.splitlines())) <= 80


@pytest.mark.more
def test_what_apply_does_can_be_chosen(healthy):
    blown = lambda m, x, y: jnp.mean((jax.vmap(lambda row: m(row, blow=1e4))(x) - y) ** 2)
    diagnosis = diagnosis_of(healthy, blown)
    untouched = apply_remedies(healthy, diagnosis, [Remedy.MARGIN])
    assert at(untouched, 2).recipe == at(healthy, 2).recipe
    assert at(apply_remedies(healthy, diagnosis), 2).recipe == fp8.recipes.named["rowwise"]


def test_what_apply_cannot_change_is_said(healthy, caplog):
    """An op in a class without a rule is logged; a layer that the model has not got is an error."""
    (clipped,) = checked(operand("", "input", DelayedScaling(), saturation=0.5, error=0.9))
    model = {"own": fp8.Fp8DotGeneral.init(DelayedScaling()), "layer": fp8.fp8_linear_layers(Net(KEY)).head}
    of_layer = lambda layer: dataclasses.replace(clipped, layer=layer)
    with caplog.at_level(logging.INFO, logger="haliax_fp8"):
        mended = apply_remedies(model, Diagnosis((of_layer("own"), of_layer("layer"))))
    assert mended["layer"].dot_general.recipe.input.scaling.margin == 1
    assert mended["own"].recipe == model["own"].recipe
    assert "own: not changed, because its layer's class has no LayerRule" in caplog.text
    with pytest.raises(ValueError, match="diagnosis names 'head', where the model has no FP8 product"):
        apply_remedies(model, Diagnosis((of_layer("head"),)))


def test_a_changed_state_is_not_carried_over(healthy):
    blown = lambda m, x, y: jnp.mean((jax.vmap(lambda row: m(row, blow=1e4))(x) - y) ** 2)
    diagnosis = diagnosis_of(healthy, blown)
    doubled = jax.tree.map(lambda x: 2 * x if eqx.is_inexact_array(x) else x, healthy)
    with pytest.raises(ValueError, match="was changed by something other than its own update"):
        apply_remedies(doubled, diagnosis)


def test_thresholds_decide(healthy):
    assert diagnosis_of(healthy, thresholds=Thresholds(growth=0.5, growth_steps=1, underflow=-1.0))


def test_what_is_not_of_the_model_is_refused(healthy):
    measured = _measure(healthy, loss, *batch(0))
    with pytest.raises(ValueError, match="statistics do not belong to this model"):
        diagnose(healthy.layers, measured)
    with pytest.raises(ValueError, match="statistics=dict must be what quantization_statistics"):
        diagnose(healthy, {})
    with pytest.raises(ValueError, match=r"swapped; use diagnose\(model, statistics\)"):
        diagnose(measured, healthy)
    with pytest.raises(ValueError, match="model has no FP8 product to diagnose"):
        diagnose(fp8.restore_linear_layers(healthy), measured)


@pytest.mark.parametrize(
    "limits, message",
    [
        ({"saturation": "0.1"}, r"saturation='0.1' of Thresholds must be a"),
        ({"underflow": float("nan")}, "underflow=nan of Thresholds must be a"),
        ({"growth_steps": 2.5}, "growth_steps=2.5 of Thresholds must be an integer"),
        ({"growth_steps": 0}, "growth_steps=0 of Thresholds must be"),
        ({"kernel_jump": 0.0}, "kernel_jump=0.0 of Thresholds must be"),
        ({"over_noise": -1.0}, "over_noise=-1.0 of Thresholds must be"),
    ],
)
def test_thresholds_are_numbers(limits, message):
    with pytest.raises(ValueError, match=message):
        Thresholds(**limits)


def test_an_infinite_threshold_turns_a_check_off(healthy):
    thresholds = Thresholds(**{name: np.inf for name in ("growth", "kernel_jump", "kurtosis")})
    assert not diagnosis_of(healthy, thresholds=thresholds)


def test_statistics_without_numbers_or_of_another_stack_are_refused(healthy):
    traced = lambda model, x, y: len(diagnose(model, fp8.quantization_statistics(model, loss, x, y)).findings)
    with pytest.raises(ValueError, match="statistics are traced or.*call diagnose outside jit"):
        eqx.filter_jit(traced)(healthy, *batch(0))
    with pytest.raises(ValueError, match="statistics are traced or.*call diagnose outside jit"):
        diagnose(healthy, eqx.filter_eval_shape(fp8.quantization_statistics, healthy, loss, *batch(0)))
    ensemble = lambda count: fp8.fp8_linear_layers(
        eqx.filter_vmap(lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key))(jax.random.split(KEY, count))
    )
    square = lambda model, x: jnp.mean(eqx.filter_vmap(lambda m: jax.vmap(m)(x))(model) ** 2)
    measured = _measure(ensemble(3), square, batch(0)[0])
    for count in (2, 4):
        with pytest.raises(ValueError, match=rf"a stack of \({count},\) layers, the"):
            diagnose(ensemble(count), measured)
    assert diagnose(ensemble(3), measured).findings


def test_what_is_neither_thresholds_nor_a_diagnosis_nor_remedies_is_refused(healthy):
    measured = _measure(healthy, loss, *batch(0))
    with pytest.raises(ValueError, match=r"thresholds=0.1 of diagnose is not a"):
        diagnose(healthy, measured, 0.1)
    with pytest.raises(ValueError, match="diagnosis=ModelStatistics of apply_remedies"):
        apply_remedies(healthy, measured)
    diagnosis = diagnose(healthy, measured)
    for remedies in ("margin", ["margin"], Remedy.MARGIN, None):
        with pytest.raises(ValueError, match=r"remedies=.* of apply_remedies .* use \[Remedy\.MARGIN\]"):
            apply_remedies(healthy, diagnosis, remedies)


def test_statistics_on_the_host_are_numbers(healthy):
    measured = _measure(healthy, loss, *batch(0))
    on_host = jax.device_get(measured)
    assert str(on_host) == str(measured) and diagnose(healthy, on_host) == diagnose(healthy, measured)
