"""Static scaling: scales that are given or calibrated, that training does not move, and that cost no amax."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import accumulation_error, assert_within, equations, fp8_products, unchecked
from matrix_product import MATRIX, loss, table

import haliax_fp8 as fp8
from haliax_fp8.recipes import E4M3, E5M2, CurrentScaling, Quantization, StaticScaling


OPERANDS = ("input", "kernel", "output_grad")
GIVEN = (0.25, 0.3, 3e-4)
RECIPE = fp8.Recipe(
    *(Quantization(format, StaticScaling(scale)) for format, scale in zip((E4M3, E4M3, E5M2), GIVEN, strict=True))
)


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    shapes = (12, 32), (32, 8), (12, 8)
    return tuple(jnp.asarray(rng.standard_normal(shape) * 2.0**seed, jnp.float32) for shape in shapes)


@pytest.mark.smoke
def test_products_use_the_given_scales():
    x, w, c = tensors()
    op = fp8.Fp8DotGeneral.init(RECIPE)
    assert [float(op.scale(operand)) for operand in OPERANDS] == [float(np.float32(scale)) for scale in GIVEN]
    out = op(x, w, MATRIX)
    dx, dw = jax.jit(jax.grad(loss, (1, 2)))(op, x, w, c)
    expected, error = (f(x, w, c, MATRIX, GIVEN) for f in (fp8_products, accumulation_error))
    for got, exact, tolerance in zip((out, dx, dw), expected, error, strict=True):
        assert_within(got, exact, tolerance)


@pytest.mark.parametrize("margin", [-2, 0, 3])
def test_calibration_takes_the_largest_amax_of_all_batches(margin):
    op = fp8.Fp8DotGeneral.init(StaticScaling(scale=5.0, margin=margin))
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


@pytest.mark.more
def test_calibration_of_an_operand_of_zeros_or_infinities_keeps_the_scale():
    x, w, c = tensors()
    op = fp8.calibrate(fp8.Fp8DotGeneral.init(RECIPE), loss, [(0.0 * x, w, c), (x.at[0, 0].set(-jnp.inf), w, c)])
    assert float(op.scale("input")) == GIVEN[0]
    assert float(op.scale("kernel")) != GIVEN[1]


@pytest.mark.more
def test_calibrated_scales_clip_nothing_and_margins_leave_room():
    x, w, c = tensors()
    for margin, room in ((0, 1.0), (1, 2.0)):
        op = fp8.calibrate(fp8.Fp8DotGeneral.init(StaticScaling(margin=margin)), loss, [(x, w, c)])
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


@pytest.mark.more
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
    for before, after in zip(fp8.training.fp8_states(model), fp8.training.fp8_states(new), strict=True):
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
    assert reductions(StaticScaling()) == []
    # The reader of programs, on what it has to find: an amax for each operand, and the history's.
    assert reductions(fp8.DelayedScaling()) == ["reduce_max"] * 4
    assert len(reductions(CurrentScaling())) == 3


# --- Before calibration -----------------------------------------------------------------------------------------------


def uses(op, x, w, c):
    out = op(x, w, MATRIX)
    return out, *jax.grad(loss, (1, 2))(op, x, w, c)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("without", OPERANDS)
def test_an_unknown_scale_makes_every_product_that_uses_it_nan(transform, without):
    given = fp8.Recipe.of(StaticScaling(0.25))
    unknown = dataclasses.replace(getattr(given, without), scaling=StaticScaling())
    op = fp8.Fp8DotGeneral.init(dataclasses.replace(given, **{without: unknown}))
    arrays, static = eqx.partition(op, eqx.is_array)
    found = transform(lambda arrays, *args: uses(eqx.combine(arrays, static), *args))(arrays, *tensors())
    affected = {"input": (True, False, True), "kernel": (True, True, False), "output_grad": (False, True, True)}
    for array, is_nan in zip(found, affected[without], strict=True):
        assert np.isnan(array).all() if is_nan else np.isfinite(array).all()


def mean_square(model, x):
    return ((jax.vmap(model)(x) - x) ** 2).mean()


def mlp(recipe="static"):
    return fp8.fp8_linear_layers(eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0)), fp8.Fp8Config(recipe=recipe))


X = jax.random.normal(jax.random.key(1), (16, 8))
UNCALIBRATED = r"static scales that are not calibrated, in 2 layers: layers.0 \(input, kernel, output_grad\), layers.1"


@pytest.mark.more
def test_a_step_without_calibration_is_an_error():
    step, model = fp8.TrainStep(mean_square, optax.sgd(0.1)), mlp()
    opt_state = step.init(model)  # which may come first
    with pytest.raises(ValueError, match=UNCALIBRATED + r".*model = step.calibrate\(model, \*batch\)"):
        step(model, opt_state, X)
    model, _, metrics = step(step.calibrate(model, X), opt_state, X)
    assert np.isfinite(metrics["loss"])
    with pytest.raises(ValueError, match=UNCALIBRATED):
        fp8.quantization_statistics(mlp(), mean_square, X)
    fp8.quantization_statistics(model, mean_square, X)


def test_a_loop_of_ones_own_without_calibration_gives_nan():
    @eqx.filter_jit
    def step(model):
        value, gradients = fp8.filter_value_and_grad(mean_square)(model, X)
        overwrites, gradients = fp8.partition_for_grad_overwrite(gradients)
        return fp8.apply_updates(model, gradients, overwrites), value

    assert np.isnan(step(mlp())[1])


def test_describe_says_what_is_not_calibrated():
    model = mlp()
    described = fp8.describe(model)
    assert [layer.uncalibrated for layer in described] == [OPERANDS, OPERANDS]
    assert described.summary.endswith("2 to be calibrated first")
    assert "calibrate first: no scale for input, kernel, output_grad" in " ".join(str(described).split())
    for fine in (fp8.calibrate(model, mean_square, [X]), mlp(RECIPE), eqx.filter_eval_shape(mlp)):
        described = fp8.describe(fine)
        assert not any(layer.uncalibrated for layer in described) and "calibrate" not in described.summary


def test_operands_that_calibration_did_not_see_are_named():
    """Nothing is known of zeros, of what is not finite, and of layers that the loss does not reach."""
    first, second = mlp().layers
    zeros = eqx.tree_at(lambda layer: layer.weight, first, 0.0 * first.weight)
    model = {"zeros": zeros, "fine": second, "unused": first}
    loss = lambda model, x: (jax.vmap(model["fine"])(jax.vmap(model["zeros"])(x)) ** 2).mean()
    step = fp8.TrainStep(loss, optax.sgd(0.1))
    calibrated = step.calibrate(model, X)
    waiting = {layer.path: layer.uncalibrated for layer in fp8.describe(calibrated)}
    assert waiting == {"zeros": ("kernel",), "fine": (), "unused": OPERANDS}
    with pytest.raises(ValueError, match=r"in 2 layers: unused.*the loss did not reach"):
        step(calibrated, step.init(model), X)
    with pytest.raises(ValueError, match=r"batches\[0\] holds NaN or infinities"):
        fp8.calibrate(mlp(), mean_square, [X.at[0, 0].set(jnp.inf)])


@pytest.mark.parametrize("order", [1, -1])
def test_a_microbatch_of_zeros_does_not_undo_what_another_one_found(order):
    x = jnp.concatenate([X, 0.0 * X][::order])
    step = fp8.TrainStep(lambda model, x: jax.vmap(model)(x).sum(), optax.sgd(0.1), microbatches=2)
    model = step.calibrate(mlp().layers[0], x)
    assert float(model.dot_general.scale("input")) == pytest.approx(float(jnp.abs(X).max()) / 448.0)


@pytest.mark.more
def test_stacks_are_calibrated_layer_by_layer():
    Layers, In = hax.make_axes(layers=3, input=8)
    stack = hax.nn.Stacked.init(Layers, hax.nn.Linear)(
        In, In.alias("output"), key=jax.random.split(jax.random.key(0), 3)
    )
    fold = lambda stack, x: stack.scan_via(lambda layer, x: (layer(x).rename({"output": "input"}), None))(x)[0]
    loss = lambda stack, x: hax.mean(hax.square(fold(stack, hax.named(x, ("batch", In))))).scalar()
    stack = fp8.fp8_linear_layers(stack, fp8.Fp8Config(recipe="static"))
    assert fp8.describe(stack)["stacked"].uncalibrated == OPERANDS
    assert np.isnan(loss(stack, X))
    stack = fp8.TrainStep(loss, optax.sgd(0.1), microbatches=2).calibrate(stack, X)
    scales = stack.stacked.dot_general.scale("input")
    assert scales.shape == (3,) and np.isfinite(scales).all() and np.isfinite(loss(stack, X))


def test_uncalibrated_models_are_saved_and_restored(tmp_path):
    """The skeleton that a checkpoint is read into is not calibrated; what is read is as it was."""
    for name, model in (("before", mlp()), ("after", fp8.calibrate(mlp(), mean_square, [X]))):
        eqx.tree_serialise_leaves(tmp_path / name, model)
        again = eqx.tree_deserialise_leaves(tmp_path / name, mlp())
        assert bool(eqx.tree_equal(again, model))
        restored = fp8.restore_linear_layers(again)
        assert bool(eqx.tree_equal(fp8.fp8_linear_layers(restored, fp8.Fp8Config(recipe="static")), mlp()))
        assert bool(eqx.tree_equal(fp8.fp8_linear_layers(again, fp8.Fp8Config(recipe="static")), again))


def test_conversion_with_debug_nans():
    """What JAX's debugging stops at is the use of a scale that is not there, not the conversion."""
    with jax.debug_nans(True):
        model = mlp()
        calibrated = fp8.calibrate(model, mean_square, [X])
        with pytest.raises(FloatingPointError):
            mean_square(model, X)
    assert np.isfinite(mean_square(calibrated, X))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_that_are_none_are_refused(scale):
    with pytest.raises(ValueError, match=r"scale=.* of StaticScaling must be (positive and|a) finite"):
        StaticScaling(scale=scale)


@pytest.mark.parametrize("margin", [1.5, True, "1"])
def test_margins_that_are_no_integers_are_refused(margin):
    with unchecked(), pytest.raises(ValueError, match=r"margin=.* of StaticScaling must be an integer"):
        StaticScaling(margin=margin)
