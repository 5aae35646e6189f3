"""calibrate: a pass in high precision after which training starts with scales that fit."""

import functools

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import EPS, equations, sqnr, unchecked
from numpy_reference import OPERANDS, DelayedScalingReference, amax, assert_state_is

from haliax_fp8 import (
    DelayedScaling,
    Fp8Config,
    Fp8DotGeneral,
    Fp8Einsum,
    TrainStep,
    apply_updates,
    calibrate,
    filter_grad,
    filter_value_and_grad,
    fp8_linear_layers,
    partition_for_grad_overwrite,
    trainable,
)
from haliax_fp8.training import OpState, fp8_states


Batch, In, Mid, Out = hax.make_axes(batch=12, input=8, mid=10, output=6)
Layers = hax.Axis("layers", 3)
SHORT = Fp8Config(amax_history_length=4)


def normal(seed: int, shape, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


class MLP(eqx.Module):
    """Two layers of Haliax with a rectifier between them."""

    first: hnn.Linear
    second: hnn.Linear

    def __call__(self, x):
        return self.second(hnn.relu(self.first(x)))


def layer(seed: int, In, Out) -> hnn.Linear:
    return hnn.Linear(hax.named(normal(seed, (Out.size, In.size)), (Out, In)), None, In, Out)


def mlp() -> MLP:
    return MLP(layer(0, In, Mid), layer(1, Mid, Out))


def weighted_sum(model, x, g):
    """A loss whose gradient with respect to the output is g."""
    return hax.sum(model(hax.named(x, (Batch, In))) * hax.named(g, (Batch, Out))).scalar()


def batches(count: int, g_scale: float = 1.0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and output gradients whose magnitudes rise and fall."""
    factors = [1.0, 5.0, 0.2, 3.0, 0.5][:count]
    return [(f * normal(10 + i, (12, 8)), f * g_scale * normal(20 + i, (12, 6))) for i, f in enumerate(factors)]


def numpy_amaxes(model: MLP, x, g) -> dict[str, dict[str, float]]:
    """Of both layers in high precision, by hand."""
    w1, w2 = (np.asarray(layer.weight.array, np.float64) for layer in (model.first, model.second))
    hidden = x @ w1.T
    positive = np.maximum(hidden, 0.0)
    hidden_grad = (g @ w2) * (hidden > 0)
    return {
        "first": {"input": amax(x), "kernel": amax(w1), "output_grad": amax(hidden_grad)},
        "second": {"input": amax(positive), "kernel": amax(w2), "output_grad": amax(g)},
    }


def histories(op: Fp8DotGeneral) -> dict[str, np.ndarray]:
    return {operand: np.asarray(op.amax_history(operand)) for operand in OPERANDS}


# --- What is recorded -------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("count", [3, 1, 5])
def test_histories_hold_the_amaxes_of_the_model_in_high_precision(count):
    """One for each batch, newest first, then oldest to newest; the oldest fall out; scales follow from them.

    No operand was rounded to FP8 on its way, or amaxes would be off by percents.
    """
    model = mlp()
    calibrated = calibrate(fp8_linear_layers(model, SHORT), weighted_sum, batches(count))
    for name in ("first", "second"):
        amaxes = [numpy_amaxes(model, *batch)[name] for batch in batches(count)]
        op = getattr(calibrated, name).dot_general
        for operand, limit in zip(OPERANDS, (448.0, 448.0, 57344.0), strict=True):
            recorded = [of_batch[operand] for of_batch in amaxes][-4:]
            expected = np.zeros(4)
            expected[[0, *range(4 - len(recorded) + 1, 4)]] = [recorded[-1], *recorded[:-1]]
            # Sums of ten terms in float32, twice.
            np.testing.assert_allclose(op.amax_history(operand), expected, rtol=32 * EPS, err_msg=f"{name} {operand}")
            np.testing.assert_allclose(op.scale(operand), max(recorded) / limit, rtol=32 * EPS)


def test_what_needs_no_sum_is_recorded_bit_for_bit():
    model = mlp()
    calibrated = calibrate(fp8_linear_layers(model, SHORT), weighted_sum, batches(3))
    expected = DelayedScalingReference(4), DelayedScalingReference(4)
    for x, g in batches(3):
        expected[0].record(input=amax(x), kernel=amax(model.first.weight))
        expected[1].record(kernel=amax(model.second.weight), output_grad=amax(g))
    for reference, op, operands in (
        (expected[0], calibrated.first.dot_general, ("input", "kernel")),
        (expected[1], calibrated.second.dot_general, ("kernel", "output_grad")),
    ):
        for operand in operands:
            np.testing.assert_array_equal(op.amax_history(operand), reference.history[operand])
            np.testing.assert_array_equal(op.scale(operand), reference.scale[operand])


def test_only_state_changes():
    """Parameters are the same arrays, the recipe is that of before, and the model that was given is as it was."""
    model = fp8_linear_layers(mlp(), SHORT)
    before = jax.tree.map(np.array, fp8_states(model))
    calibrated = calibrate(model, weighted_sum, batches(2))
    assert jax.tree.structure(calibrated) == jax.tree.structure(model)
    for ours, theirs in zip(*(jax.tree.leaves(trainable(m)) for m in (calibrated, model)), strict=True):
        assert ours is theirs
    assert all(map(np.array_equal, jax.tree.leaves(fp8_states(model)), jax.tree.leaves(before)))
    assert not np.array_equal(*(jax.tree.leaves(fp8_states(m))[0] for m in (calibrated, model)))


@pytest.mark.more
def test_more_batches_later_are_more_entries():
    """Calibration goes on from the state that it finds, as training does after it."""
    model = fp8_linear_layers(mlp(), SHORT)
    apart = calibrate(calibrate(model, weighted_sum, batches(3)[:1]), weighted_sum, iter(batches(3)[1:]))
    assert bool(eqx.tree_equal(apart, calibrate(model, weighted_sum, batches(3))))
    x, g = batches(4)[-1]
    overwrites, _ = partition_for_grad_overwrite(eqx.filter_grad(weighted_sum)(apart, x, g))
    history = apply_updates(apart, None_like(apart), overwrites).first.dot_general.amax_history("input")
    np.testing.assert_array_equal(history, [amax(batches(4)[i][0]) for i in (3, 0, 1, 2)])


def None_like(model):
    """No updates."""
    return jax.tree.map(lambda _: None, partition_for_grad_overwrite(model)[1])


def test_no_product_is_rounded():
    """The pass multiplies float32 operands only, in all three products of each layer; recording is on."""
    model = fp8_linear_layers(mlp(), SHORT)
    x, g = batches(1)[0]
    jaxpr = jax.make_jaxpr(lambda model, x, g: fp8_states(calibrate(model, weighted_sum, [(x, g)])))(model, x, g)
    products = [equation for equation in equations(jaxpr) if equation.primitive.name == "dot_general"]
    assert len(products) == 5  # the first layer's input is not differentiated
    assert {v.aval.dtype for product in products for v in product.invars} == {np.dtype(np.float32)}


def test_batches_of_one_argument_need_no_tuple():
    x = normal(0, (12, 8))
    loss = lambda model, x: weighted_sum(model, x, jnp.ones((12, 6)))
    model = fp8_linear_layers(mlp(), SHORT)
    assert bool(eqx.tree_equal(calibrate(model, loss, [x, 2 * x]), calibrate(model, loss, [(x,), (2 * x,)])))


def test_a_second_calibration_compiles_nothing():
    """Seeds, sweeps and conversions in mid-training calibrate models of the same shapes again and again."""
    traced = []

    def loss(model, x, g):
        traced.append(1)
        return weighted_sum(model, x, g)

    for model in (mlp(), jax.tree.map(lambda x: 2 * x, mlp())):
        calibrate(fp8_linear_layers(model, SHORT), loss, batches(3))
    assert len(traced) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_models(dtype):
    """Amaxes are those of the operands in their dtype; state is float32, also where the whole model was cast."""
    cast = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
    model, (batch,) = cast(mlp()), cast(batches(1))
    op = calibrate(fp8_linear_layers(model, SHORT), weighted_sum, [batch]).first.dot_general
    assert op.amax_history("input")[0] == amax(batch[0]).astype(np.float32)
    assert op.amax_history("kernel")[0] == amax(model.first.weight).astype(np.float32)
    assert op.scale("input").dtype == jnp.float32
    whole = cast(fp8_linear_layers(mlp(), SHORT))
    assert calibrate(whole, weighted_sum, [batch]).first.dot_general.amax_history("input").dtype == jnp.float32


# --- What it is for ---------------------------------------------------------------------------------------------------


TINY = 1e-6  # gradients of a mean over a few thousand tokens are of this magnitude, and below


Wide = hax.Axis("w0", 32)
DEEP_BATCH = normal(0, (32, 32)), normal(1, (32, 32), TINY)


def deep(layers: int = 4):
    """Layers of equal width in a row; each passes gradients on at about the same magnitude."""
    return [layer(i, Wide.alias(f"w{i}"), Wide.alias(f"w{i + 1}")) for i in range(layers)]


def deep_loss(layers, x, g):
    out = hax.named(x, ("batch", "w0"))
    for layer in layers:
        out = layer(out) * 32**-0.5
    return jnp.sum(out.array * g)


deep_gradients = eqx.filter_jit(filter_grad(deep_loss))


def weight_gradients(layers):
    gradients = deep_gradients(layers, *DEEP_BATCH)
    overwrites, _ = partition_for_grad_overwrite(gradients)
    return [layer.weight.array for layer in gradients], apply_updates(layers, None_like(layers), overwrites)


@pytest.mark.more
def test_without_it_the_first_gradients_are_zero():
    """E5M2's smallest number is 1.5e-5: under a scale of 1 everything is flushed. Layers wake up one by one."""
    layers = fp8_linear_layers(deep(), SHORT)
    awake = []
    for _ in range(6):
        gradients, layers = weight_gradients(layers)
        awake.append([bool(np.any(g)) for g in gradients])
    assert awake == [[step + i > 3 for i in range(4)] for step in range(6)]


@pytest.mark.more
def test_with_it_all_layers_train_from_the_first_step():
    """And with the gradients of high precision, but for the noise of FP8."""
    layers = calibrate(fp8_linear_layers(deep(), SHORT), deep_loss, [DEEP_BATCH])
    gradients, _ = weight_gradients(layers)
    expected = [layer.weight.array for layer in deep_gradients(deep(), *DEEP_BATCH)]
    for i, (actual, reference) in enumerate(zip(gradients, expected, strict=True)):
        # Its noise is that of i products forward, 3 - i backward, and its own: four times that of one, at 24 dB.
        assert sqnr(reference, actual) >= 24 - 10 * np.log10(4), f"layer {i}"


def test_a_training_step_after_it():
    """`TrainStep` moves every weight in its first step; without calibration only what is next to the loss."""
    step = TrainStep(deep_loss, optax.sgd(1e3))
    for start, moved in (
        (fp8_linear_layers(deep(), SHORT), [False] * 4),
        (calibrate(fp8_linear_layers(deep(), SHORT), deep_loss, [DEEP_BATCH]), [True] * 4),
    ):
        model, _, _ = step(start, step.init(start), *map(jnp.asarray, DEEP_BATCH))
        changed = [bool(np.any(new.weight.array != old.weight.array)) for new, old in zip(model, start, strict=True)]
        assert changed == moved


# --- The microbatches of a step ---------------------------------------------------------------------------------------


def mean_loss(model, x, g):
    """A mean over examples, whose gradients are the larger the fewer there are."""
    return hax.sum(model(hax.named(x, ("batch", "input"))) * hax.named(g, ("batch", "output"))).scalar() / x.shape[0]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_step_records_the_amaxes_of_its_own_microbatches(microbatches):
    """One entry, whatever their number: the largest of what each sees, with the model in high precision."""
    step = TrainStep(mean_loss, optax.sgd(0.1), microbatches=microbatches)
    plain, (x, g) = mlp(), batches(1)[0]
    model = step.calibrate(fp8_linear_layers(plain, SHORT), x, g)
    parts = [(x[i::microbatches], (g * microbatches / np.float32(12))[i::microbatches]) for i in range(microbatches)]
    seen = [numpy_amaxes(plain, *part) for part in parts]
    for name in ("first", "second"):
        for operand, history in histories(getattr(model, name).dot_general).items():
            expected = [max(part[name][operand] for part in seen), 0.0, 0.0, 0.0]
            np.testing.assert_allclose(history, expected, rtol=32 * EPS, err_msg=f"{name} {operand}")


def test_a_second_batch_is_a_second_entry():
    step = TrainStep(mean_loss, optax.sgd(0.1), microbatches=2)
    start = fp8_linear_layers(mlp(), SHORT)
    once = step.calibrate(start, *batches(2)[0])
    twice = step.calibrate(once, *batches(2)[1])
    newest, _, _, before = histories(twice.first.dot_general)["input"]
    assert (newest, before) == (amax(batches(2)[1][0]), amax(batches(2)[0][0]))
    assert bool(eqx.tree_equal(start, fp8_linear_layers(mlp(), SHORT)))  # what was given is as it was


@pytest.mark.more
def test_the_first_step_is_not_clipped():
    """Calibrated on the whole batch, the scales of output gradients are too small for microbatches by their number."""
    plain, (x, g) = mlp(), DEEP_BATCH
    x, g = x[:, :8], x[:, 8:14] / np.abs(x[:, 8:14]) + 0.01 * g[:, :6]  # gradients of about equal size: all would clip
    step = TrainStep(mean_loss, optax.sgd(0.0), microbatches=4)
    norm = lambda model: float(step(model, step.init(model), x, g)[2]["grad_norm"])
    start, true = fp8_linear_layers(plain, SHORT), norm(plain)
    # Rounding to E4M3 and E5M2 moves each element by 2**-3 at most, in random directions.
    assert norm(step.calibrate(start, x, g)) == pytest.approx(true, rel=2.0**-3 / 2)
    assert norm(calibrate(start, mean_loss, [(x, g)])) < 0.5 * true


@pytest.mark.more
@pytest.mark.parametrize("microbatches", [1, 2])
def test_keys_reach_the_loss_and_the_ops(microbatches):
    """As in a step: the state is the one that a step leaves where operands do not depend on rounding."""
    model = {"delayed": Fp8DotGeneral.init(DelayedScaling(4)), "random": Fp8DotGeneral.init("nvfp4")}
    x, w, c = map(jnp.asarray, (normal(0, (12, 16)), normal(1, (16, 6)), normal(2, (12, 6))))

    def loss(model, x, c, keys):
        x = x * jax.random.uniform(keys[0])
        return sum(jnp.sum(c * op(x, w, (((1,), (0,)), ((), ())))) for op in model.values())

    keys = jax.random.split(jax.random.key(1), microbatches)
    step = TrainStep(loss, optax.sgd(0.1), microbatches=microbatches)
    args = (model, step.init(model)), (x, c, keys)
    calibrated = step.calibrate(model, *args[1], key=jax.random.key(2))
    stepped = step(*args[0], *args[1], key=jax.random.key(2))[0]
    for operand, history in histories(calibrated["delayed"]).items():
        np.testing.assert_array_equal(history, stepped["delayed"].amax_history(operand))
    with pytest.raises((ValueError, TypeError), match="single random key|PRNG key"):
        with unchecked():
            step.calibrate(model, *args[1], key=3)


# --- Models of all kinds ----------------------------------------------------------------------------------------------


class Block(eqx.Module):
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        return Block(hnn.Linear.init(In, Mid, key=key), hnn.Linear.init(Mid, In, key=key))

    def __call__(self, x):
        return x + self.down(hax.tanh(self.up(x)))


@pytest.mark.more
@pytest.mark.parametrize("container", [hnn.Stacked, hnn.BlockSeq])
def test_stacks(container):
    """Each layer of a stack has amaxes of its own: those of the same layer in a loop."""
    stack = container.init(Layers, Block)(key=jax.random.split(jax.random.key(0), 3))
    x, g = normal(0, (12, 8)), normal(1, (12, 8), 1e-5)
    loss = lambda stack, x, g: jnp.sum(stack.fold(hax.named(x, (Batch, In))).array * g)
    stack = calibrate(fp8_linear_layers(stack, SHORT), loss, [(x, g), (2 * x, g)])
    blocks = stack.unstacked() if container is hnn.Stacked else stack.blocks

    def looped(blocks, x, g):
        x = hax.named(x, (Batch, In))
        for block in blocks:
            x = block(x)
        return jnp.sum(x.array * g)

    plain = container.init(Layers, Block)(key=jax.random.split(jax.random.key(0), 3))
    plain = list(plain.unstacked() if container is hnn.Stacked else plain.blocks)
    alone = calibrate(fp8_linear_layers(plain, SHORT), looped, [(x, g), (2 * x, g)])
    for block, expected in zip(blocks, alone, strict=True):
        for ours, theirs in ((block.up, expected.up), (block.down, expected.down)):
            for operand, history in histories(theirs.dot_general).items():
                np.testing.assert_allclose(ours.dot_general.amax_history(operand), history, rtol=64 * EPS)
                assert np.count_nonzero(history) == 2


def test_equinox_layers_under_vmap():
    """One amax over the batch, as NumPy computes it; not a sum over examples, nor the last one's."""
    model = eqx.nn.MLP(8, 6, 10, 1, activation=jax.nn.relu, key=jax.random.key(0))
    x, g = normal(0, (12, 8)), normal(1, (12, 6), 1e-5)
    loss = lambda model, x, g: jnp.sum(jax.vmap(model)(x) * g)
    first, second = calibrate(fp8_linear_layers(model, SHORT), loss, [(x, g)]).layers
    w1, b1, w2 = map(np.asarray, (model.layers[0].weight, model.layers[0].bias, model.layers[1].weight))
    hidden = x @ w1.T + b1
    hidden_grad = (g @ w2) * (hidden > 0)
    expected = [
        [amax(x), amax(w1), amax(hidden_grad)],
        [amax(np.maximum(hidden, 0)), amax(w2), amax(g)],
    ]
    newest = [[history[0] for history in histories(layer.dot_general).values()] for layer in (first, second)]
    np.testing.assert_allclose(newest, expected, rtol=32 * EPS)


@pytest.mark.parametrize("mapped", [False, True], ids=["batched", "vmap"])
def test_a_layer_used_twice(mapped):
    """The larger of both uses, exactly, not their sum."""
    shared = layer(0, In, Out)
    x, g = normal(0, (12, 8)), normal(1, (12, 6))

    def both(layer, x, g):
        return hax.sum((layer(x) + 2.0 * layer(-3.0 * x)) * g).scalar()

    def loss(layer, x, g):
        if mapped:
            one = lambda x, g: both(layer, hax.named(x, In), hax.named(g, Out))
            return jnp.sum(jax.vmap(one)(x, g))
        return both(layer, hax.named(x, (Batch, In)), hax.named(g, (Batch, Out)))

    calibrated = calibrate(fp8_linear_layers(shared, SHORT), loss, [(x, g)])
    expected = DelayedScalingReference(4)
    expected.record(input=amax(-3.0 * x), kernel=amax(shared.weight), output_grad=amax(2.0 * g))
    assert_state_is(calibrated.dot_general, expected)


def test_a_layer_in_a_scan():
    """A recurrent use: the largest amax over all steps."""
    cell = layer(0, In, In.alias("out"))
    x = normal(0, (8,), 3.0)

    def loss(cell, x):
        step = lambda h, _: (0.1 * cell(h).rename({"out": "input"}), h)
        last, seen = jax.lax.scan(step, hax.named(x, In), None, length=5)
        return jnp.sum(last.array)

    op = calibrate(fp8_linear_layers(cell, SHORT), loss, [(x,)]).dot_general
    h, seen = x.astype(np.float64), []
    for _ in range(5):
        seen.append(amax(h))
        h = 0.1 * (cell.weight.array @ h)
    np.testing.assert_allclose(op.amax_history("input")[0], max(seen), rtol=32 * EPS)


def test_einsums_and_ops_without_a_layer():
    """Whatever holds state is calibrated, in any tree."""
    model = {"einsum": Fp8Einsum.init(SHORT.resolve(DelayedScaling())), "ops": [Fp8DotGeneral.init(DelayedScaling(4))]}
    x, w = normal(0, (12, 8)), normal(1, (8, 6))

    def loss(model, x, w):
        out = model["einsum"]("bi,io->bo", x, w)
        return jnp.sum(model["ops"][0](out, w, (((1,), (1,)), ((), ()))))

    calibrated = calibrate(model, loss, [(x, w)])
    assert calibrated["einsum"].dot_general.amax_history("kernel")[0] == amax(w)
    np.testing.assert_allclose(calibrated["ops"][0].amax_history("input")[0], amax(x @ w), rtol=32 * EPS)


def test_a_layer_that_the_loss_does_not_reach():
    """Its state stays as it was, scale and all."""
    model = {"used": layer(0, In, Out), "unused": layer(1, In, Out)}
    loss = lambda model, x, g: weighted_sum(model["used"], x, g)
    start = fp8_linear_layers(model, SHORT)
    calibrated = calibrate(start, loss, batches(2))
    assert bool(eqx.tree_equal(calibrated["unused"], start["unused"]))
    assert np.all(histories(calibrated["used"].dot_general)["input"][[0, 3]] > 0)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_amaxes_that_are_not_finite_are_not_recorded(value):
    """What the model itself makes of a batch leaves the operands that it spoils as they were, and no others."""
    x, g = batches(1)[0]
    where = np.zeros(x.shape, bool)
    where[3, 4] = True
    loss = lambda layer, x, g, is_bad: weighted_sum(layer, jnp.where(is_bad & where, np.float32(value), x), g)
    calls = [(x, g, np.bool_(is_bad)) for is_bad in (False, True, False)]
    calibrated = calibrate(fp8_linear_layers(layer(0, In, Out), SHORT), loss, calls)
    counts = {operand: np.count_nonzero(history) for operand, history in histories(calibrated.dot_general).items()}
    assert counts == {"input": 2, "kernel": 3, "output_grad": 3}
    assert np.isfinite(calibrated.dot_general.scale("input"))
    assert calibrated.dot_general.amax_history("input")[0] == amax(x)


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_models_that_were_not_converted():
    """Calibrated first and converted afterwards, all would be lost."""
    for model in (mlp(), {}):
        with pytest.raises(ValueError, match="no FP8 layer to calibrate; convert it first"):
            calibrate(model, weighted_sum, batches(1))


def test_recipes_without_state_have_nothing_to_calibrate():
    """A script with an option for the recipe needs no special case."""
    model = fp8_linear_layers(mlp(), Fp8Config(recipe="rowwise"))
    assert calibrate(model, weighted_sum, batches(1)) is model
    step = TrainStep(weighted_sum, optax.sgd(0.1))
    assert step.calibrate(model, *batches(1)[0]) is model
    # A step trains models without FP8 too.
    assert step.calibrate(plain := mlp(), *batches(1)[0]) is plain


class Both(eqx.Module):
    x: np.ndarray
    g: np.ndarray


X, G = batches(1)[0]


@pytest.mark.parametrize(
    "batch",
    [
        X,
        jnp.asarray(X),
        hax.named(X, (Batch, In)),
        {"x": X, "g": G},
        (X, G),
        (hax.named(X, (Batch, In)),),
        Both(X, G),
        3,
    ],
    ids=lambda batch: type(batch).__name__,
)
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_a_batch_in_place_of_a_list(batch, recipe):
    model = fp8_linear_layers(mlp(), Fp8Config(recipe=recipe))
    with (
        unchecked(),
        pytest.raises(ValueError, match=r"batches is an?.*calibrate\(model, loss_fn"),
    ):
        calibrate(model, weighted_sum, batch)


def test_tuples_and_iterators_of_batches():
    model = fp8_linear_layers(mlp(), SHORT)
    expected = calibrate(model, weighted_sum, batches(2))
    for iterable in (tuple(batches(2)), iter(batches(2)), (batch for batch in batches(2))):
        assert bool(eqx.tree_equal(calibrate(model, weighted_sum, iterable), expected))


def test_losses_with_names():
    model = fp8_linear_layers(mlp(), SHORT)
    named = lambda model, x, g: hax.named(weighted_sum(model, x, g), ())
    expected = calibrate(model, weighted_sum, batches(1))
    assert bool(eqx.tree_equal(calibrate(model, named, batches(1)), expected))


@pytest.mark.parametrize("empty", [[], iter([]), ()], ids=["list", "iterator", "tuple"])
def test_no_batches(empty):
    with pytest.raises(ValueError, match="batches is empty; calibration needs at least one batch"):
        calibrate(fp8_linear_layers(mlp(), SHORT), weighted_sum, empty)


def test_errors_of_the_loss_reach_the_caller():
    def loss(model, x):
        return weighted_sum(model, x)

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'g'"):
        calibrate(fp8_linear_layers(mlp(), SHORT), loss, [normal(0, (12, 8))])


def test_fp8_states_are_found_in_any_tree():
    model = fp8_linear_layers({"a": mlp(), "b": [layer(0, In, Out)]}, SHORT)
    assert [type(state) for state in fp8_states(model)] == [OpState] * 3
    assert fp8_states(mlp()) == fp8_states(None) == []
    assert fp8_states(functools.partial(print)) == []


# --- Batches that calibrate nothing -----------------------------------------------------------------------------------


GOOD = jax.random.normal(jax.random.key(3), (8, 16))
BATCHES = {
    "NaN": ([GOOD * jnp.nan], r"batches\[0\] holds NaN or infinities"),
    "one NaN among good ones": ([GOOD, GOOD.at[3, 2].set(jnp.nan)], r"batches\[1\] holds NaN or infinities"),
    "an infinity": ([GOOD, GOOD, GOOD.at[0, 0].set(jnp.inf)], r"batches\[2\] holds NaN or infinities"),
    "zeros": ([0.0 * GOOD], r"batches\[0\] is zero everywhere"),
    "zeros later": ([GOOD, 0.0 * GOOD], r"batches\[1\] is zero everywhere"),
    "NumPy's": ([np.full((8, 16), np.nan, np.float32)], r"batches\[0\] holds NaN"),
    "what overflows": ([-jnp.inf * jnp.ones((8, 16))], "calibration recorded the input of no layer"),
}


def of_batch(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


@pytest.mark.parametrize("recipe", ["delayed", "static"])
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_calibrates_nothing_is_an_error(name, recipe):
    batches, message = BATCHES[name]
    model = fp8_linear_layers(eqx.nn.Linear(16, 16, key=jax.random.key(0)), recipe=recipe)
    with pytest.raises(ValueError, match=message):
        calibrate(model, of_batch, batches)
    if len(batches) == 1:
        with pytest.raises(ValueError, match=message.replace(r"batches\[0\]", "batch")):
            TrainStep(of_batch, optax.sgd(0.1)).calibrate(model, *batches)


def test_a_mask_of_infinities_and_zero_labels_are_fine():
    model = fp8_linear_layers(eqx.nn.Linear(16, 16, key=jax.random.key(0)))
    masked = lambda model, x, mask, y: jnp.mean((jax.nn.softmax(jax.vmap(lambda x: model(x) + mask)(x)) - y) ** 2)
    mask = jnp.where(jnp.arange(16) < 8, 0.0, -jnp.inf)
    calibrated = calibrate(model, masked, [(GOOD, mask, jnp.zeros((8, 16)))])
    assert float(calibrated.dot_general.scale("input")) != 1.0


@pytest.mark.parametrize("wrap", [filter_grad, filter_value_and_grad])
def test_static_scales_that_are_not_calibrated_in_a_loop_of_ones_own(wrap):
    """Wherever the model is seen: before the gradient, or inside `jit` before the update."""
    model = fp8_linear_layers(eqx.nn.Linear(16, 16, key=jax.random.key(0)), recipe="static")
    with pytest.raises(ValueError, match="model has static scales that are not calibrated"):
        wrap(of_batch)(model, GOOD)
    overwrites, grads = partition_for_grad_overwrite(eqx.filter_jit(filter_grad(of_batch))(model, GOOD))
    with pytest.raises(ValueError, match="model has static scales that are not calibrated"):
        apply_updates(model, grads, overwrites)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("switch", [jax.debug_infs, jax.debug_nans])
def test_under_the_switches_that_look_for_nan_and_infinity(switch, x64):
    """Also with a layer that the loss leaves out, whose gradient is `-inf`, and a mask in the batch."""
    model = fp8_linear_layers({"used": layer(0, In, Out), "unused": layer(1, In, Out)}, SHORT)
    x = hax.named(normal(1, (Batch.size, In.size)), (Batch, In))
    mask = np.where(np.arange(Batch.size) % 2, -np.inf, 0.0).astype(np.float32)
    loss = lambda model, x, mask: hax.sum(model["used"](x)).scalar() + jnp.exp(jnp.asarray(mask)).sum()
    step = TrainStep(loss, optax.sgd(0.1), microbatches=2)
    with switch(True), jax.enable_x64(x64):
        for calibrated in (calibrate(model, loss, [(x, mask)]), step.calibrate(model, x, mask)):
            scale = calibrated["used"].dot_general.scale("input")
            np.testing.assert_allclose(scale, amax(x) / np.float32(448.0), rtol=EPS)
            np.testing.assert_array_equal(calibrated["unused"].dot_general.state.scale, 1.0)
