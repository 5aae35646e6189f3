"""The options of delayed scaling against a simulation in float64, and recipes whose operands scale differently."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import state_is_constant, unchecked
from matrix_product import MATRIX, table
from numpy_reference import DelayedOptionsReference, moving_average, percentile

import haliax_fp8 as fp8
from haliax_fp8.recipes import (
    E4M3,
    E5M2,
    CurrentScaling,
    MaxOfHistory,
    MostRecent,
    MovingAverage,
    Percentile,
    Quantization,
    StaticScaling,
)


OPERANDS = ("input", "kernel", "output_grad")
STEPS = 50
# A scale is three float32 divisions away from float64's; a moving average some 16 sums more.
RTOL = 1e-5


def last(amaxes):
    return amaxes[-1]


# For each operand of a recipe, a scaling and its simulation.
RECIPES = {
    "rules": [
        (
            fp8.DelayedScaling(amax_history_length=4, amax_compute=MostRecent()),
            lambda limit: DelayedOptionsReference(limit, 4, last),
        ),
        (
            fp8.DelayedScaling(amax_history_length=16, amax_compute=MovingAverage()),
            lambda limit: DelayedOptionsReference(limit, 16, moving_average(0.9)),
        ),
        (
            fp8.DelayedScaling(amax_history_length=8, amax_compute=Percentile(90.0)),
            lambda limit: DelayedOptionsReference(limit, 8, measure=percentile(90.0)),
        ),
    ],
    "margins, intervals and powers of two": [
        (
            fp8.DelayedScaling(amax_history_length=8, margin=2, update_interval=5),
            lambda limit: DelayedOptionsReference(limit, 8, margin=2, interval=5),
        ),
        (
            fp8.DelayedScaling(amax_history_length=1, margin=-1, power_of_two=True),
            lambda limit: DelayedOptionsReference(limit, 1, margin=-1, power_of_two=True),
        ),
        (
            fp8.DelayedScaling(
                amax_history_length=5, amax_compute=MovingAverage(0.5), update_interval=3, power_of_two=True
            ),
            lambda limit: DelayedOptionsReference(limit, 5, moving_average(0.5), interval=3, power_of_two=True),
        ),
    ],
}


def recipe_of(scalings):
    formats = E4M3, E4M3, E5M2
    return fp8.Recipe(*(Quantization(f, s) for f, s in zip(formats, scalings, strict=True)))


def tensors(step):
    """Input, kernel and output gradient of a step: magnitudes that jump, zeros, and now and then an infinity."""
    rng = np.random.default_rng(step)
    x, w, c = (
        (rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12))).astype(np.float32)
        for shape in ((6, 16), (16, 8), (6, 8))
    )
    if step % 11 == 7:
        x[:] = 0.0
    if step % 13 == 5:
        x[0, 0] = np.inf
    if step % 17 == 9:
        w[3, 3] = np.nan
    return x, w, c


def plain(op, x, w, c):
    return (c * op(x, w, MATRIX)).sum() + (2.0 * c * op(3.0 * x, w, MATRIX)).sum()


def rowwise(op, w, x):
    return jax.vmap(lambda row: op(row, w, (((0,), (0,)), ((), ()))))(x)


# Each uses the op on x with gradient c and on 3x with gradient 2c.
PROGRAMS = {
    "called twice": plain,
    "vmap": lambda op, x, w, c: (jnp.concatenate([c, 2.0 * c]) * rowwise(op, w, jnp.concatenate([x, 3.0 * x]))).sum(),
    "scan": lambda op, x, w, c: jax.lax.scan(
        lambda total, factor: (total + (factor[1] * c * op(factor[0] * x, w, MATRIX)).sum(), None),
        jnp.float32(0.0),
        jnp.array([[1.0, 1.0], [3.0, 2.0]]),
    )[0],
}


def stepping(loss):
    @eqx.filter_jit
    def step(op, *args):
        overwrites, rest = fp8.partition_for_grad_overwrite(fp8.filter_grad(loss)(op, *args))
        return fp8.apply_updates(op, rest, overwrites)

    return step


def scales(op):
    return [float(op.scale(operand)) for operand in OPERANDS]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", RECIPES)
def test_scales_are_those_of_the_simulation(name, program):
    scalings, simulations = zip(*RECIPES[name], strict=True)
    recipe = recipe_of(scalings)
    op, step = fp8.Fp8DotGeneral.init(recipe), stepping(PROGRAMS[program])
    references = [make(limit) for make, limit in zip(simulations, recipe.limits, strict=True)]
    moved = set()
    for i in range(STEPS):
        x, w, c = tensors(i)
        op = step(op, x, w, c)
        if program == "vmap":  # one tensor, of which a percentile is taken
            uses = [np.concatenate([x, 3.0 * x])], [w], [np.concatenate([c, 2.0 * c])]
        else:
            uses = [x, 3.0 * x], [w], [c, 2.0 * c]
        for reference, of_operand in zip(references, uses, strict=True):
            reference.record(*of_operand)
        np.testing.assert_allclose(scales(op), [r.scale for r in references], rtol=RTOL, err_msg=f"step {i}")
        moved.add(tuple(scales(op)))
    assert len(moved) > STEPS // 2


def test_most_recent_is_transformer_engines():
    """`amax_compute_algo="most_recent"`: `amax_history[0]`, where TransformerEngine writes the newest amax; a zero, an
    infinity or a NaN there keeps the scale."""
    memory = fp8.DelayedScaling(amax_history_length=3, amax_compute=MostRecent(), margin=1).memory
    rows, scale, limit = jnp.asarray([memory.first_row], jnp.float32), 1.0, 448.0
    for amax in (2.0, 7.0, 0.0, 3.0, np.inf, np.nan, 1e-3, 5.0):
        rows = memory.update(rows, jnp.array([[amax]], jnp.float32), (limit,))
        if np.isfinite(amax) and amax > 0:
            scale = 1.0 / ((limit / amax) / 2.0)
        np.testing.assert_allclose(rows[0, 0], scale, rtol=1e-6)


@pytest.mark.parametrize("size", [1000, 10, 8, 1])
def test_percentiles_count_exactly(size):
    for percent in (50.0, 62.5, 83.3, 90.0, 99.9, 99.99, 100.0):
        x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
        got = Percentile(percent).measure(jnp.asarray(x), 0)
        assert float(got[0, 0]) == float(percentile(percent)(x))


@pytest.mark.parametrize(
    "rule",
    [
        MaxOfHistory(),
        MovingAverage(0.7),
        MostRecent(),
        Percentile(75.0),
    ],
)
def test_rules_take_members_apart(rule):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 5)), jnp.float32)
    whole = lambda parts: parts.max(axis=-1)
    np.testing.assert_array_equal(whole(rule.measure(x, 1)), jnp.stack([whole(rule.measure(m, 0)) for m in x]))
    history = jnp.abs(x)
    each = [[rule.of_history(row[:1], row[1:]) for row in member] for member in history]
    np.testing.assert_allclose(rule.of_history(history[..., :1], history[..., 1:]), np.asarray(each), rtol=1e-6)
    np.testing.assert_array_equal(rule.measure(jnp.zeros((2, 0)), 1), [[[0.0]], [[0.0]]])


def test_a_moving_average_is_below_a_spike_and_without_bias():
    average = lambda newest, *older: float(MovingAverage(0.5).of_history(jnp.array([newest]), jnp.array(older))[0])
    assert average(3.0, 0.0, 0.0, 0.0) == 3.0  # the first step counts in full
    assert average(0.0, 0.0, 0.0, 0.0) == 0.0
    assert average(-jnp.inf, 2.0, 2.0, 2.0) == 2.0
    assert 1.0 < average(1.0, 1.0, 1.0, 100.0) < 100.0


# --- A scaling for each operand ---------------------------------------------------------------------------------------

MIXED = recipe_of([fp8.DelayedScaling(amax_history_length=3), StaticScaling(0.5), CurrentScaling()])
LENGTHS = recipe_of(
    [
        fp8.DelayedScaling(amax_history_length=2),
        fp8.DelayedScaling(amax_history_length=6, margin=1),
        fp8.DelayedScaling(amax_history_length=4, update_interval=2),
    ]
)


def one_use(op, x, w, c):
    return (c * op(x, w, MATRIX)).sum()


def finite_tensors(seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(np.float32) * (seed + 1) for shape in ((6, 16), (16, 8), (6, 8)))


@pytest.mark.more
def test_delayed_input_static_kernel_current_gradient():
    """Each operand is quantized by its own scaling, and only the delayed one is remembered."""
    op, step = fp8.Fp8DotGeneral.init(MIXED), stepping(one_use)
    singles = {
        operand: fp8.Fp8DotGeneral.init(fp8.Recipe.of(scaling, backward=E5M2))
        for operand, scaling in zip(OPERANDS, MIXED.scalings, strict=True)
    }
    for i in range(4):
        x, w, c = map(jnp.asarray, finite_tensors(i))
        # Against units, which are quantized without error by every scale here that is a power of two, or by their own.
        history = op.amax_history("input")
        op = step(op, x, w, c)
        assert float(op.amax_history("input")[0]) == float(jnp.abs(x).max())
        np.testing.assert_array_equal(op.amax_history("input")[1:], np.roll(np.asarray(history), -1)[1:])
        assert float(op.scale("kernel")) == 0.5 and float(op.scale("output_grad")) == 1.0
        kernel = op(jnp.eye(16) * 448.0 * op.scale("input"), w, MATRIX) / (448.0 * op.scale("input"))
        expected = singles["kernel"](jnp.eye(16), w, MATRIX)
        np.testing.assert_allclose(kernel, expected, rtol=1e-6)
        grads = [
            jax.vjp(lambda x, op=o: op(x, jnp.eye(8), MATRIX), jnp.zeros((6, 8)))[1](c)[0]
            for o in (op, singles["output_grad"])
        ]
        np.testing.assert_allclose(*grads, rtol=1e-6)


@pytest.mark.parametrize("recipe", [MIXED, LENGTHS], ids=["mixed", "lengths"])
def test_state_of_operands_that_scale_differently(recipe):
    """Every operand's row is what an op with its scaling alone would have."""
    op, step = fp8.Fp8DotGeneral.init(recipe), stepping(one_use)
    alone = {
        row: fp8.Fp8DotGeneral.init(recipe_of([q.scaling] * 3))
        for row, q in enumerate(recipe.operands)
        if isinstance(q.scaling, fp8.DelayedScaling)
    }
    for i in range(7):
        args = finite_tensors(i)
        op = step(op, *args)
        alone = {row: step(single, *args) for row, single in alone.items()}
        for row, single in alone.items():
            # The guard is the last column of a table, however wide.
            width = table(single).shape[-1] - 1
            np.testing.assert_array_equal(table(op)[row, :width], table(single)[row, :-1])
            np.testing.assert_array_equal(table(op)[row, -1], table(single)[row, -1])
            np.testing.assert_array_equal(table(op)[row, width:-1], 0.0)


@pytest.mark.more
@pytest.mark.parametrize("recipe", [MIXED, LENGTHS], ids=["mixed", "lengths"])
def test_microbatches_skipped_layers_and_amaxes_that_are_not_finite(recipe):
    op, step = fp8.Fp8DotGeneral.init(recipe), stepping(one_use)
    op = step(op, *finite_tensors(0))
    gradient = eqx.filter_jit(fp8.filter_grad(one_use))
    small, large = finite_tensors(1), finite_tensors(2)
    small = (small[0], large[1], small[2])
    update = lambda gradients: fp8.apply_updates(op, *reversed(fp8.partition_for_grad_overwrite(gradients)))
    accumulated = update(fp8.accumulate_gradients(gradient(op, *small), gradient(op, *large)))
    both = np.concatenate([small[0], large[0]]), large[1], np.concatenate([small[2], large[2]])
    np.testing.assert_array_equal(table(accumulated), table(step(op, *both)))
    # A layer that the loss does not reach, with either gradient.
    for grad in (fp8.filter_grad, eqx.filter_grad):
        np.testing.assert_array_equal(table(update(grad(lambda op: jnp.float32(0.0))(op))), table(op))
    # An operand that is not finite leaves its own row alone, and no other.
    for row, bad in enumerate((np.inf, np.nan)):
        args = [a.copy() for a in large]
        args[row][0, 0] = bad
        new, fine = table(update(gradient(op, *args))), table(step(op, *large))
        np.testing.assert_array_equal(new[row], table(op)[row])
        np.testing.assert_array_equal(new[2], fine[2])


@pytest.mark.parametrize("recipe", [MIXED, LENGTHS], ids=["mixed", "lengths"])
def test_a_plain_gradient_of_a_layer_used_twice_does_not_corrupt(recipe):
    """The newest amax is the sum over the uses; all else is what it should be."""
    op = fp8.Fp8DotGeneral.init(recipe)
    x, w, c = map(jnp.asarray, finite_tensors(3))

    @eqx.filter_jit
    def step(op):
        overwrites, rest = fp8.partition_for_grad_overwrite(eqx.filter_grad(plain)(op, x, w, c))
        return fp8.apply_updates(op, rest, overwrites)

    for count in range(1, 6):
        op = step(op)
        amax = np.abs(x).max()
        assert float(op.amax_history("input")[0]) == pytest.approx(4.0 * amax)  # x and 3x
        assert 3.0 * amax <= float(op.scale("input")) * 448.0 <= 4.0 * amax * (1 + 1e-6)
        history = op.amax_history("input")
        assert np.count_nonzero(history) == min(count, history.size)


@pytest.mark.more
@pytest.mark.parametrize("recipe", [MIXED, LENGTHS], ids=["mixed", "lengths"])
def test_calibration_of_operands_that_scale_differently(recipe):
    """Scales that divide by the largest amax of all batches, whatever `update_interval` is."""
    batches = [finite_tensors(i) for i in (1, 3, 2)]
    # `batches` of a loss that takes the tensors as its arguments.
    op = fp8.calibrate(fp8.Fp8DotGeneral.init(recipe), one_use, batches)
    for row, q in enumerate(recipe.operands):
        amaxes = [np.abs(batch[row]).max() for batch in batches]
        if isinstance(q.scaling, fp8.DelayedScaling):
            amax = max(amaxes[-q.scaling.amax_history_length :]) * 2.0**q.scaling.margin
        elif isinstance(q.scaling, StaticScaling):
            amax = max(amaxes)
        else:
            amax = q.format.max
        np.testing.assert_allclose(float(op.scale(OPERANDS[row])), amax / q.format.max, rtol=1e-6)
    # The first step of training moves the scale too, and from then on the interval counts.
    if recipe is LENGTHS:
        step, seen = stepping(one_use), [float(op.scale("output_grad"))]
        for i in range(4, 8):
            op = step(op, *finite_tensors(i))
            seen.append(float(op.scale("output_grad")))
        assert [a != b for a, b in zip(seen, seen[1:], strict=False)] == [True, False, True, False]


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="update_interval=0 must be at least 1"):
        fp8.DelayedScaling(update_interval=0)
    with unchecked(), pytest.raises(ValueError, match=r"update_interval=1.5 of DelayedScaling must be an integer"):
        fp8.DelayedScaling(update_interval=1.5)
    with unchecked(), pytest.raises(ValueError, match=r"amax_compute='most_recent' is not a rule.*MostRecent\(\)"):
        fp8.DelayedScaling(amax_compute="most_recent")
    for decay in (0.0, 1.0, -1.0):
        with pytest.raises(ValueError, match=r"decay=.*of MovingAverage must lie"):
            MovingAverage(decay)
    for percent in (0.0, 100.1):
        with pytest.raises(ValueError, match=r"percent=.* of Percentile must be above 0 and at most 100"):
            Percentile(percent)
    for rule in (MovingAverage, Percentile):
        with pytest.raises(ValueError, match=f"=nan of {rule.__name__} must be a finite"):
            rule(float("nan"))


@state_is_constant
def test_a_second_use_with_state_of_its_own_is_refused():
    base = fp8.Recipe.of(CurrentScaling())
    delayed = Quantization(E4M3, fp8.DelayedScaling())
    with pytest.raises(ValueError, match="kernel_for_dgrad=.*leave kernel_for_dgrad as"):
        dataclasses.replace(base, kernel_for_dgrad=delayed)
    # The same again is what None means.
    same = dataclasses.replace(base, kernel=delayed, kernel_for_dgrad=delayed)
    op = fp8.Fp8DotGeneral.init(same)
    x, w, c = finite_tensors()
    plainly = fp8.Fp8DotGeneral.init(dataclasses.replace(same, kernel_for_dgrad=None))
    for a, b in zip(*(jax.grad(one_use, (1, 2))(o, x, w, c) for o in (op, plainly)), strict=True):
        np.testing.assert_array_equal(a, b)
