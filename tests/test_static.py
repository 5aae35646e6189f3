"""Static scaling: scales that are given or calibrated, that training does not move, and that cost no amax."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import accumulation_error, assert_within, equations, fp8_products, unchecked

import haliax_fp8 as fp8


MATRIX = (((1,), (0,)), ((), ()))
OPERANDS = ("input", "kernel", "output_grad")
GIVEN = (0.25, 0.3, 3e-4)
RECIPE = fp8.Recipe(
    *(
        fp8.Quantization(format, fp8.StaticScaling(scale))
        for format, scale in zip((fp8.E4M3, fp8.E4M3, fp8.E5M2), GIVEN, strict=True)
    )
)


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    shapes = (12, 32), (32, 8), (12, 8)
    return tuple(jnp.asarray(rng.standard_normal(shape) * 2.0**seed, jnp.float32) for shape in shapes)


def loss(op, x, w, c):
    return (c * op(x, w, MATRIX)).sum()


def table(op):
    return np.asarray(op.state.array)


def test_products_use_the_given_scales():
    x, w, c = tensors()
    op = fp8.Fp8DotGeneral.init(RECIPE)
    assert [float(op.scale(operand)) for operand in OPERANDS] == [float(np.float32(scale)) for scale in GIVEN]
    out = op(x, w, MATRIX)
    dx, dw = jax.jit(jax.grad(loss, (1, 2)))(op, x, w, c)
    expected, error = (f(x, w, c, MATRIX, GIVEN) for f in (fp8_products, accumulation_error))
    for got, exact, tolerance in zip((out, dx, dw), expected, error, strict=True):
        assert_within(got, exact, tolerance)


@pytest.mark.parametrize("margin", [0, 3, -2])
def test_calibration_takes_the_largest_amax_of_all_batches(margin):
    op = fp8.Fp8DotGeneral.init(fp8.StaticScaling(scale=5.0, margin=margin))
    batches = [tensors(1), tensors(4), tensors(2)]
    op = fp8.calibrate(op, loss, batches)
    for row, (operand, limit) in enumerate(zip(OPERANDS, (448.0, 448.0, 57344.0), strict=True)):
        largest = max(float(jnp.abs(batch[row]).max()) for batch in batches)
        np.testing.assert_allclose(float(op.scale(operand)), largest / limit * 2.0**margin, rtol=1e-6)
    # A later calibration goes on where this one ended: the largest of all that was seen.
    again = fp8.calibrate(op, loss, [tensors(0)])
    np.testing.assert_array_equal(table(again), table(op))
    larger = fp8.calibrate(op, loss, [tensors(6)])
    assert (table(larger)[:, 0] > table(op)[:, 0]).all()


def test_calibration_of_an_operand_of_zeros_or_infinities_keeps_the_scale():
    x, w, c = tensors()
    op = fp8.calibrate(fp8.Fp8DotGeneral.init(RECIPE), loss, [(0.0 * x, w, c), (x.at[0, 0].set(jnp.inf), w, c)])
    assert float(op.scale("input")) == GIVEN[0]
    assert float(op.scale("kernel")) != GIVEN[1]


def test_calibrated_scales_clip_nothing_and_margins_leave_room():
    x, w, c = tensors()
    for margin, room in ((0, 1.0), (1, 2.0)):
        op = fp8.calibrate(fp8.Fp8DotGeneral.init(fp8.StaticScaling(margin=margin)), loss, [(x, w, c)])
        used = float(jnp.abs(x).max() / (op.scale("input") * 448.0))
        assert used == pytest.approx(1.0 / room)
        measured = fp8.quantization_statistics(op, loss, x, w, c)
        assert float(measured.saturation) == 0.0


@pytest.mark.parametrize("grad", [fp8.filter_grad, eqx.filter_grad], ids=["max", "plain"])
def test_training_never_moves_the_scale(grad):
    """Neither a use, nor several, nor a layer that is not reached, nor an amax that is not finite."""
    x, w, c = tensors()
    op = fp8.calibrate(fp8.Fp8DotGeneral.init(RECIPE), loss, [(x, w, c)])
    losses = {
        "once": loss,
        "twice": lambda op, x, w, c: loss(op, x, w, c) + loss(op, 9.0 * x, w, c),
        "never": lambda op, x, w, c: jnp.float32(0.0),
        "infinite": lambda op, x, w, c: loss(op, x * jnp.inf, w, c),
    }
    for name, function in losses.items():
        gradients = grad(function)(op, x, w, c)
        overwrites, rest = fp8.partition_for_grad_overwrite(gradients)
        np.testing.assert_array_equal(table(fp8.apply_updates(op, rest, overwrites)), table(op), err_msg=name)
        overwrites, rest = fp8.partition_for_grad_overwrite(fp8.accumulate_gradients(gradients, gradients))
        np.testing.assert_array_equal(table(fp8.apply_updates(op, rest, overwrites)), table(op), err_msg=name)


def test_a_training_step_moves_parameters_only():
    model = fp8.fp8_linear_layers(eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0)), fp8.Fp8Config(recipe="static"))
    x = jax.random.normal(jax.random.key(1), (16, 8))
    mean_square = lambda model, x: ((jax.vmap(model)(x) - x) ** 2).mean()
    model = fp8.calibrate(model, mean_square, [x])
    step = fp8.TrainStep(mean_square, optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)), microbatches=2)
    new, opt_state = model, step.init(model)
    for _ in range(3):
        new, opt_state, metrics = step(new, opt_state, x)
    assert metrics["loss"] < mean_square(model, x)
    for before, after in zip(fp8.fp8_states(model), fp8.fp8_states(new), strict=True):
        np.testing.assert_array_equal(before.array, after.array)
    assert not np.array_equal(model.layers[0].weight, new.layers[0].weight)


REDUCTIONS = {"reduce_max", "reduce_min", "argmax", "sort", "reduce_and", "reduce_or", "cummax"}


def reductions(scaling):
    x, w, c = tensors()
    op = fp8.Fp8DotGeneral.init(scaling)
    arrays, static = eqx.partition(op, eqx.is_array)
    gradient = lambda arrays, x, w: eqx.filter(
        fp8.filter_grad(lambda params: loss(*params, c))((eqx.combine(arrays, static), x, w)), eqx.is_array
    )
    names = [equation.primitive.name for equation in equations(jax.make_jaxpr(gradient)(arrays, x, w))]
    return [name for name in names if name in REDUCTIONS]


def test_no_amax_is_taken():
    assert reductions(fp8.StaticScaling()) == []
    # The reader of programs, on what it has to find: an amax for each operand, and the history's.
    assert reductions(fp8.DelayedScaling()) == ["reduce_max"] * 4
    assert len(reductions(fp8.CurrentScaling())) == 3


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_that_are_none_are_refused(scale):
    with pytest.raises(ValueError, match=r"scale=.* of StaticScaling must be positive and finite"):
        fp8.StaticScaling(scale=scale)


@pytest.mark.parametrize("margin", [1.5, True, "1"])
def test_margins_that_are_no_integers_are_refused(margin):
    with unchecked(), pytest.raises(ValueError, match=r"margin=.* of StaticScaling must be an integer"):
        fp8.StaticScaling(margin=margin)
