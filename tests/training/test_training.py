"""State through training steps: what becomes of it where peers sum it, erase it, freeze it or round it."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import EPS, assert_within, float64, quantize, rounded_up, rounding_error
from numpy_reference import OCP, OPERANDS, DelayedScalingReference, amax, assert_state_is

from haliax_fp8 import (
    Fp8Config,
    TrainStep,
    accumulate_gradients,
    apply_updates,
    filter_grad,
    filter_value_and_grad,
    fp8_linear_layers,
    partition_for_grad_overwrite,
    trainable,
)
from haliax_fp8.recipes import E4M3, E5M2


f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
HISTORY = 3
Batch, In, Out, Block = hax.make_axes(batch=8, input=8, output=4, block=3)

by_name = pytest.mark.parametrize
both_gradients = by_name("grad", [filter_grad, eqx.filter_grad], ids=["ours", "equinox"])
jitted_or_not = by_name("transform", [eqx.filter_jit, lambda f: f], ids=["jit", "eager"])


def fp8(module, **options):
    return fp8_linear_layers(module, Fp8Config(amax_history_length=HISTORY, **options))


def new_linear(seed=0, Out=Out, **options):
    return hnn.Linear.init(In, Out, key=jax.random.key(seed), **options)


def cast(tree, dtype):
    """All floating-point arrays of a tree, as mixed-precision policies do it."""
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


@pytest.fixture
def layer():
    return fp8(new_linear())


def batch_of(seed):
    x_key, g_key = jax.random.split(jax.random.key(seed))
    return hax.random.normal(x_key, (Batch, In)), hax.random.normal(g_key, (Batch, Out))


def once(layer, x, g):
    """`g` is the gradient of the layer's output."""
    return hax.sum(layer(x) * g).scalar()


def twice(layer, x, g):
    """Two uses: of `x` with gradient `2 g`, of `3 x` with gradient `g`."""
    return hax.sum(layer(x) * (2.0 * g) + layer(3.0 * x) * g).scalar()


def step(model, gradients, rate=0.1):
    """A step of gradient descent."""
    overwrites, gradients = partition_for_grad_overwrite(gradients)
    updates = jax.tree.map(lambda g: (-rate * g.astype(f32)).astype(g.dtype), gradients)
    return apply_updates(model, updates, overwrites)


def state_of(model):
    return partition_for_grad_overwrite(model)[0]


# --- Partition, apply, accumulate ------------------------------------------------------------------------------------


def test_partition_leaves_the_parameters_of_the_plain_model():
    plain = new_linear()
    overwrites, params = partition_for_grad_overwrite(fp8(plain))
    assert jax.tree.leaves(overwrites)
    assert all(ours is theirs for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(plain), strict=True))


def test_partition_of_a_plain_model_finds_no_state():
    overwrites, params = partition_for_grad_overwrite(new_linear())
    assert not jax.tree.leaves(overwrites)
    assert eqx.tree_equal(params, new_linear())


def test_partition_splits_gradients_like_the_model(layer):
    parts = partition_for_grad_overwrite(eqx.filter_grad(once)(layer, *batch_of(0)))
    for part, expected in zip(parts, partition_for_grad_overwrite(layer), strict=True):
        assert jax.tree.structure(part) == jax.tree.structure(expected)


@pytest.mark.smoke
def test_apply_updates_adds_to_parameters(layer):
    overwrites, gradients = partition_for_grad_overwrite(eqx.filter_grad(once)(layer, *batch_of(0)))
    updated = apply_updates(layer, gradients, overwrites)
    expected = np.asarray(layer.weight.array) + np.asarray(gradients.weight.array)
    np.testing.assert_array_equal(updated.weight.array, expected)


@by_name("dtype", [bf16, f16])
def test_apply_updates_rounds_a_sum_once_to_the_parameter(dtype):
    """An update in float32 is not rounded before it is added."""
    layer = cast(fp8(new_linear()), dtype)
    overwrites, params = partition_for_grad_overwrite(layer)
    updates = jax.tree.map(lambda p: jax.random.normal(jax.random.key(1), p.shape, f32), params)
    updated = apply_updates(layer, updates, overwrites)
    exact = np.asarray(layer.weight.array).astype(np.float32) + np.asarray(updates.weight.array)
    np.testing.assert_array_equal(updated.weight.array, exact.astype(dtype), strict=True)


def test_apply_updates_without_overwrites_keeps_state(layer):
    layer = step(layer, eqx.filter_grad(once)(layer, *batch_of(0)))
    no_overwrites, _ = partition_for_grad_overwrite(trainable(layer))
    updated = apply_updates(layer, trainable(layer), no_overwrites)
    assert eqx.tree_equal(state_of(updated), state_of(layer))


def test_apply_updates_without_updates_keeps_parameters(layer):
    """A frozen layer, whose gradient is None, still follows its operands."""
    overwrites, _ = partition_for_grad_overwrite(eqx.filter_grad(once)(layer, *batch_of(0)))
    _, no_updates = partition_for_grad_overwrite(overwrites)
    updated = apply_updates(layer, no_updates, overwrites)
    assert eqx.tree_equal(trainable(updated), trainable(layer))
    assert updated.dot_general.amax_history("input")[0] == amax(batch_of(0)[0])


class WithBuffers(eqx.Module):
    """A layer beside what has no gradient: integers, named and not, and a function."""

    linear: hnn.Linear
    positions: hax.NamedArray
    counts: jax.Array
    activation: object

    def __call__(self, x):
        return self.activation(self.linear(x))


@pytest.fixture
def with_buffers(layer):
    return WithBuffers(layer, hax.arange(In), jnp.arange(3), hnn.relu)


@both_gradients
def test_a_step_leaves_integers_and_functions_alone(with_buffers, grad):
    updated = step(with_buffers, grad(once)(with_buffers, *batch_of(0)))
    for name in ("positions", "counts", "activation"):
        assert eqx.tree_equal(getattr(updated, name), getattr(with_buffers, name))
    assert not eqx.tree_equal(updated.linear.weight, with_buffers.linear.weight)


@by_name("microbatches", [1, 2])
def test_train_step_leaves_integers_and_functions_alone(with_buffers, microbatches):
    train = TrainStep(once, optax.sgd(0.1), microbatches=microbatches)
    updated, _, _ = train(with_buffers, train.init(with_buffers), *batch_of(0))
    for name in ("positions", "counts", "activation"):
        assert eqx.tree_equal(getattr(updated, name), getattr(with_buffers, name))


@pytest.mark.smoke
@both_gradients
def test_accumulation_takes_the_maximum_over_microbatches(layer, grad):
    """Over several steps, the state is as if the microbatches had been one batch."""
    expected = DelayedScalingReference(HISTORY)
    for seed in range(4):
        batches = [batch_of(10 * seed + i) for i in range(3)]
        expected.record(
            input=max(amax(x) for x, _ in batches),
            kernel=amax(layer.weight),
            output_grad=max(amax(g) for _, g in batches),
        )
        total = None
        for batch in batches:
            total = accumulate_gradients(total, grad(once)(layer, *batch))
        layer = step(layer, total)
        assert_state_is(layer.dot_general, expected)


def test_accumulation_sums_parameters(layer):
    parts = [eqx.filter_grad(once)(layer, *batch_of(seed)) for seed in range(2)]
    total = accumulate_gradients(*parts).weight.array
    np.testing.assert_array_equal(total, np.asarray(parts[0].weight.array) + np.asarray(parts[1].weight.array))


def test_accumulation_of_the_gradients_of_another_model_is_an_error(layer):
    ours, other = (eqx.filter_grad(once)(layer, *batch_of(0)) for layer in (layer, new_linear()))
    with pytest.raises(ValueError, match="gradients do not have the structure of the model"):
        accumulate_gradients(ours, other)


# --- filter_grad, filter_value_and_grad ------------------------------------------------------------------------------


@jitted_or_not
def test_gradients_of_single_uses_are_equinoxs(layer, transform):
    """State included, bit for bit."""
    ours, theirs = (transform(grad(once))(layer, *batch_of(0)) for grad in (filter_grad, eqx.filter_grad))
    assert eqx.tree_equal(ours, theirs)


def test_value_and_auxiliary_output(layer):
    """Their order is Equinox's."""
    x, g = batch_of(0)
    with_aux = lambda layer: (once(layer, x, g), g)
    without = lambda layer: once(layer, x, g)
    gradients = filter_grad(without)(layer)
    (value_1, aux_1), gradients_1 = filter_value_and_grad(with_aux, has_aux=True)(layer)
    value_2, gradients_2 = filter_value_and_grad(without)(layer)
    gradients_3, aux_3 = filter_grad(with_aux, has_aux=True)(layer)
    assert eqx.tree_equal(gradients, gradients_1, gradients_2, gradients_3)
    assert eqx.tree_equal(g, aux_1, aux_3)
    np.testing.assert_allclose([value_1, value_2], without(layer), rtol=1e-6)


@by_name("microbatches", [1, 2])
@by_name("dtype", [bf16, f16])
def test_train_step_keeps_dtypes(dtype, microbatches):
    """Parameters keep theirs, state is float32; also in a program that allows no implicit promotion."""
    layer = cast(fp8(new_linear()), dtype)
    train = TrainStep(once, optax.sgd(0.1), microbatches=microbatches)
    updated, _, _ = train(layer, train.init(layer), *(cast(array, dtype) for array in batch_of(0)))
    assert {leaf.dtype for leaf in jax.tree.leaves(trainable(updated))} == {np.dtype(dtype)}
    assert {leaf.dtype for leaf in jax.tree.leaves(state_of(updated))} == {np.dtype(f32)}


@by_name("dtype", [bf16, f16])
def test_gradients_of_many_microbatches_are_not_summed_in_the_parameters_dtype(dtype):
    """In bfloat16 a sum of ones ends at 256, in float16 at 2048: the next one is half of what separates numbers there.

    So 512 equal gradients would have a mean of one half, and 4096 likewise.
    """
    count = 512 if dtype == bf16 else 4096
    model = {"weight": jnp.zeros(2, dtype), "layer": cast(fp8(new_linear()), dtype)}
    loss = lambda model, x: jnp.sum(model["weight"][0] * x).astype(f32)
    train = TrainStep(loss, optax.sgd(1.0), microbatches=count)
    new, _, _ = train(model, train.init(model), jnp.ones(count, dtype))
    np.testing.assert_array_equal(new["weight"], jnp.array([-1.0, 0.0], dtype))


def test_losses_of_many_microbatches_are_not_summed_in_their_own_dtype():
    """A sum of ones ends at 256 in bfloat16, so that 512 of them had a mean of one half; in float16 128 losses of 1000
    were infinite. The mean has the dtype of the loss."""
    for dtype, count, value in [(bf16, 512, 1.0), (f16, 4096, 1.0), (f16, 128, 1000.0)]:
        model = {"weight": jnp.ones(2, dtype), "layer": cast(fp8(new_linear()), dtype)}
        train = TrainStep(lambda model, x: jnp.mean(model["weight"] * x), optax.sgd(0.0), microbatches=count)
        _, _, metrics = train(model, train.init(model), jnp.full(count, value, dtype))
        assert metrics["loss"].dtype == dtype and float(metrics["loss"]) == value, (dtype, value)


def test_the_loss_and_the_norm_of_microbatches_are_those_of_the_batch():
    """Means of their means, not sums: here of four microbatches with losses of 1 to 4."""
    model = {"weight": jnp.array([3.0, 4.0]), "layer": fp8(new_linear())}
    loss = lambda model, x: jnp.mean(x) * jnp.sum(model["weight"] ** 2) / 25
    train = TrainStep(loss, optax.sgd(0.1), microbatches=4)
    _, _, metrics = train(model, train.init(model), jnp.repeat(jnp.arange(1.0, 5.0), 2))
    np.testing.assert_allclose([metrics["loss"], metrics["grad_norm"]], [2.5, 2.5 * 2 / 5], rtol=1e-6)


@pytest.mark.more
def test_the_norm_of_gradients_is_computed_in_float32():
    """Squares leave float16 for gradients below 2e-4 and above 256, and a sum of 600 equal ones bfloat16."""
    for dtype, count, value in [
        (f32, 600, 1.0),
        (bf16, 600, 1.0),
        (f16, 600, 1.0),
        (f16, 2, 2.0**-14),
        (f16, 2, 1024.0),
    ]:
        model = {"weights": [jnp.zeros((), dtype)] * count, "layer": cast(fp8(new_linear()), dtype)}
        train = TrainStep(lambda model, x: sum(w.astype(f32) * x for w in model["weights"]), optax.sgd(0.0))
        _, _, metrics = train(model, train.init(model), jnp.float32(value))
        assert metrics["grad_norm"].dtype == f32
        np.testing.assert_allclose(metrics["grad_norm"], value * np.sqrt(count), rtol=1e-6, err_msg=f"{dtype}, {value}")


# --- Trees of another model ------------------------------------------------------------------------------------------


class Two(eqx.Module):
    first: hnn.Linear
    second: hnn.Linear


def trees_of_another_model(name):
    """Updates or overwrites of a model with other layers; the other tree fits."""
    layer, other = fp8(new_linear()), Two(fp8(new_linear(1)), fp8(new_linear(2)))
    trees = {}
    overwrites, trees["updates"] = partition_for_grad_overwrite(eqx.filter_grad(once)(layer, *batch_of(0)))
    trees["overwrites"] = overwrites
    others = eqx.filter_grad(lambda two, x, g: once(two.first, x, g))(other, *batch_of(0))
    trees[name] = partition_for_grad_overwrite(others)[name == "updates"]
    return layer, trees["updates"], trees["overwrites"]


@by_name("name", ["updates", "overwrites"])
def test_trees_of_another_model_are_an_error_that_changes_nothing(name):
    layer, updates, overwrites = trees_of_another_model(name)
    before = jax.tree.map(lambda x: np.array(x), layer)
    with pytest.raises(ValueError, match=f"{name} do not have the structure of the model"):
        apply_updates(layer, updates, overwrites)
    assert eqx.tree_equal(jax.tree.map(np.asarray, layer), before)


def test_updates_of_other_shapes_are_an_error(layer):
    overwrites, params = partition_for_grad_overwrite(layer)
    updates = jax.tree.map(lambda p: jnp.zeros((8, *p.shape)), params)
    with pytest.raises(ValueError, match=r"shape \(8, 4, 8\) for a parameter of shape \(4, 8\)"):
        apply_updates(layer, updates, overwrites)


# --- Layers used several times, or not at all ------------------------------------------------------------------------


@pytest.mark.smoke
@jitted_or_not
def test_layer_used_twice_records_the_exact_maximum(layer, transform):
    gradients_of = transform(filter_grad(twice))
    expected = DelayedScalingReference(HISTORY)
    for seed in range(5):
        x, g = batch_of(seed)
        expected.record(input=amax(3.0 * x), kernel=amax(layer.weight), output_grad=amax(2.0 * g))
        layer = step(layer, gradients_of(layer, x, g))
        assert_state_is(layer.dot_general, expected)


@jitted_or_not
def test_layer_used_twice_under_a_plain_gradient_records_a_sum_of_newest_amaxes(layer, transform):
    """Nothing else is off: scales follow that sum, and older entries of the history are not added to themselves."""
    gradients_of = transform(eqx.filter_grad(twice))
    expected = DelayedScalingReference(HISTORY)
    for seed in range(5):
        x, g = batch_of(seed)
        kernel = amax(layer.weight)
        expected.record(input=amax(x) + amax(3.0 * x), kernel=kernel + kernel, output_grad=amax(2.0 * g) + amax(g))
        layer = step(layer, gradients_of(layer, x, g))
        assert_state_is(layer.dot_general, expected)


def first_only(two, x, g):
    return once(two.first, x, g)


def second_in_a_branch_not_taken(two, x, g):
    branches = [lambda x: two.second(x), lambda x: two.first(x)]
    return hax.sum(jax.lax.cond(jnp.any(x.array != x.array), *branches, x) * g).scalar()


@pytest.mark.more
@both_gradients
@by_name(
    ("loss", "transform"),
    [
        (first_only, eqx.filter_jit),
        (first_only, lambda f: f),
        (second_in_a_branch_not_taken, eqx.filter_jit),
    ],
    ids=["unused-jit", "unused-eager", "branch-jit"],
)
def test_layer_not_reached_keeps_its_state(loss, transform, grad):
    model = Two(fp8(new_linear(0)), fp8(new_linear(1)))
    model = step(model, grad(lambda two: once(two.second, *batch_of(0)))(model))
    gradients_of = transform(grad(loss))
    expected = DelayedScalingReference(HISTORY)
    for seed in range(3):
        x, g = batch_of(seed)
        expected.record(input=amax(x), kernel=amax(model.first.weight), output_grad=amax(g))
        updated = step(model, gradients_of(model, x, g))
        assert eqx.tree_equal(state_of(updated).second, state_of(model).second)
        assert_state_is(updated.first.dot_general, expected)
        model = updated


class Residual(eqx.Module):
    """A block with a layer of its own, and one that it is handed."""

    inner: hnn.Linear

    @staticmethod
    def init(seed):
        return Residual(hnn.Linear.init(In, In.alias("hidden"), key=jax.random.key(seed)))

    def __call__(self, x, shared):
        return x + hax.tanh(shared(self.inner(x).rename({"hidden": "input"}))).rename({"hidden": "input"})


def blocks_with_a_shared_layer():
    blocks = hnn.Stacked.init(Block, Residual)(jnp.arange(Block.size))
    return fp8((blocks, hnn.Linear.init(In, In.alias("hidden"), key=jax.random.key(9))))


def folded(model, x):
    blocks, shared = model
    return hax.sum(blocks.fold(x, shared)).scalar()


def unrolled(model, x):
    blocks, shared = model
    for block in blocks.unstacked():
        x = block(x, shared)
    return hax.sum(x).scalar()


@pytest.mark.more
@both_gradients
def test_layer_can_be_an_extra_argument_of_fold(grad):
    """It is not taken for data to scan over; output and gradients are those of the blocks one after the other."""
    model, (x, _) = blocks_with_a_shared_layer(), batch_of(0)
    out, gradients = eqx.filter_jit(lambda model, x: (folded(model, x), grad(folded)(model, x)))(model, x)
    np.testing.assert_allclose(out, unrolled(model, x), rtol=1e-6)
    expected = eqx.filter_jit(eqx.filter_grad(unrolled))(model, x)
    leaves = (jax.tree.leaves(trainable(tree)) for tree in (gradients, expected))
    for ours, reference in zip(*leaves, strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.more
def test_layer_can_be_an_extra_argument_of_fold_outside_jit():
    model, (x, _) = blocks_with_a_shared_layer(), batch_of(0)
    np.testing.assert_allclose(folded(model, x), unrolled(model, x), rtol=1e-6)


@pytest.mark.more
def test_layer_in_fold_records_the_exact_maximum_over_blocks():
    model, (x, _) = blocks_with_a_shared_layer(), batch_of(0)
    _, shared = step(model, eqx.filter_jit(filter_grad(folded))(model, x), rate=0.0)
    inputs, stream = [], x
    for block in model[0].unstacked():
        inputs.append(block.inner(stream).rename({"hidden": "input"}))
        stream = block(stream, model[1])
    largest = max(map(amax, inputs))
    np.testing.assert_allclose(shared.dot_general.amax_history("input")[0], largest, rtol=1e-6)
    np.testing.assert_array_equal(shared.dot_general.amax_history("kernel")[0], amax(model[1].weight))


@pytest.mark.smoke
def test_per_example_loss_under_vmap_trains_like_a_batched_one(layer):
    """The plain Equinox style, `vmap` over a function of one example: the same model, bit for bit."""

    def mapped(layer, x, g):
        return jnp.sum(jax.vmap(lambda x, g: hax.sum(layer(hax.named(x, In)) * hax.named(g, Out)).scalar())(x, g))

    steps = TrainStep(once, optax.sgd(0.1)), TrainStep(mapped, optax.sgd(0.1))
    models = [layer, layer]
    for seed in range(3):
        x, g = batch_of(seed)
        models[0], _, _ = steps[0](models[0], steps[0].init(models[0]), x, g)
        models[1], _, _ = steps[1](models[1], steps[1].init(models[1]), x.array, g.array)
        assert eqx.tree_equal(*models)


# --- Amaxes that are not finite, tiny or zero ------------------------------------------------------------------------


def with_value(array, value):
    return hax.named(array.array.at[(0,) * array.array.ndim].set(value), array.axes)


@pytest.mark.smoke
@both_gradients
@by_name("value", [np.inf, -np.inf, np.nan])
@by_name("operand", OPERANDS)
def test_amax_that_is_not_finite_is_not_recorded(layer, operand, value, grad):
    """That operand's state waits for the next step, the others' go on; no scale is frozen afterwards."""
    expected = DelayedScalingReference(HISTORY)
    for seed in range(4):
        x, g = batch_of(seed)
        amaxes = {"input": amax(x), "kernel": amax(layer.weight), "output_grad": amax(g)}
        trained = layer
        if seed == 1:
            del amaxes[operand]
            match operand:
                case "input":
                    x = with_value(x, value)
                case "kernel":
                    trained = eqx.tree_at(lambda layer: layer.weight, layer, with_value(layer.weight, value))
                case "output_grad":
                    g = with_value(g, value)
        expected.record(**amaxes)
        overwrites, gradients = partition_for_grad_overwrite(grad(once)(trained, x, g))
        layer = apply_updates(layer, jax.tree.map(jnp.zeros_like, gradients), overwrites)
        assert_state_is(layer.dot_general, expected)


@both_gradients
@by_name("magnitude", [1e-38, 1e-36, 1e-45])
@by_name("operand", OPERANDS)
def test_tiny_amax_gives_no_nan(layer, operand, magnitude, grad):
    """Its scale would be zero, and zero divided by it NaN."""
    x, g = batch_of(0)
    tiny = lambda array: hax.named(jnp.full_like(array.array, magnitude).at[0].set(0.0), array.axes)
    match operand:
        case "input":
            x = tiny(x)
        case "kernel":
            layer = eqx.tree_at(lambda layer: layer.weight, layer, tiny(layer.weight))
        case "output_grad":
            g = tiny(g)
    for _ in range(3):
        gradients = grad(once)(layer, x, g)
        layer = step(layer, gradients, rate=0.0)
        assert np.isfinite(once(layer, x, g))
        for array in (*jax.tree.leaves(trainable(gradients)), *jax.tree.leaves(state_of(layer))):
            assert np.all(np.isfinite(array))
        assert all(layer.dot_general.scale(o) > 0 for o in OPERANDS)


@by_name("magnitude", [1e-30, 1e-36, 1e-37])
def test_tiny_amax_gives_the_smallest_scale_that_is_not_flushed_to_zero(layer, magnitude):
    x, g = batch_of(0)
    x = hax.full_like(x, magnitude)
    layer = step(layer, filter_grad(once)(layer, x, g))
    smallest = np.finfo(np.float32).tiny
    np.testing.assert_allclose(layer.dot_general.scale("input"), max(magnitude / 448, smallest), rtol=1e-6)


@both_gradients
def test_amax_of_zero_keeps_the_scale(layer, grad):
    expected = DelayedScalingReference(HISTORY)
    for seed in range(5):
        x, g = batch_of(seed)
        if seed > 0:  # for longer than the history remembers
            x = hax.zeros_like(x)
        expected.record(input=amax(x), kernel=amax(layer.weight), output_grad=amax(g))
        layer = step(layer, grad(once)(layer, x, g))
        assert_state_is(layer.dot_general, expected)
    assert layer.dot_general.scale("input") == np.float32(1) / (np.float32(448) / amax(batch_of(0)[0]))


# --- Element types ---------------------------------------------------------------------------------------------------


@pytest.mark.more
@both_gradients
def test_state_of_a_model_cast_to_bf16_is_float32_after_the_step(layer, grad):
    """And from there on exact, though bfloat16 holds hardly any of these scales."""
    layer = cast(layer, bf16)
    expected = DelayedScalingReference(HISTORY)
    for seed in range(4):
        x, g = (cast(array, bf16) for array in batch_of(seed))
        expected.record(input=amax(x), kernel=amax(layer.weight), output_grad=amax(g))
        layer = step(layer, grad(once)(layer, x, g))
        assert {leaf.dtype for leaf in jax.tree.leaves(state_of(layer))} == {np.dtype(np.float32)}
        assert {leaf.dtype for leaf in jax.tree.leaves(trainable(layer))} == {np.dtype(bf16)}
        assert_state_is(layer.dot_general, expected)
    scale = np.float32(layer.dot_general.scale("input"))
    assert scale != scale.astype(bf16).astype(np.float32)


@by_name(
    ("loss", "grad"),
    [(once, filter_grad), (once, eqx.filter_grad), (twice, filter_grad)],
    ids=["ours", "equinox", "ours-twice"],
)
def test_model_cast_to_bf16_inside_the_loss_keeps_exact_state(layer, loss, grad):
    """Mixed precision as policies do it: float32 parameters, cast in the differentiated function."""
    mixed = lambda layer, x, g: loss(*(cast(tree, bf16) for tree in (layer, x, g))).astype(f32)
    expected = DelayedScalingReference(HISTORY)
    for seed in range(4):
        x, g = batch_of(seed)
        low_x, low_g = cast(x, bf16), cast(g, bf16)
        operands = (low_x, low_g) if loss is once else (3.0 * low_x, 2.0 * low_g)
        amaxes = map(amax, (*operands, cast(layer.weight, bf16)))
        expected.record(**dict(zip(("input", "output_grad", "kernel"), amaxes, strict=True)))
        gradients = grad(mixed)(layer, x, g)
        assert {leaf.dtype for leaf in jax.tree.leaves(trainable(gradients))} == {np.dtype(f32)}
        layer = step(layer, gradients)
        assert_state_is(layer.dot_general, expected)


@pytest.mark.smoke
@both_gradients
@by_name("compute_dtype", [f16, None, f32, bf16])
@by_name("dtype", [bf16, f32, f16])
def test_gradients_have_the_dtypes_of_what_they_belong_to(dtype, compute_dtype, grad):
    layer = fp8(cast(new_linear(), dtype), compute_dtype=compute_dtype)
    x, g = (cast(array, dtype) for array in batch_of(0))
    with jax.numpy_dtype_promotion("standard"):  # Haliax adds a bias in one dtype to an output in another
        dlayer, dx = eqx.filter_eval_shape(
            grad(lambda args: hax.sum(args[0](args[1]).astype(dtype) * g).scalar()), (layer, x)
        )
    assert {leaf.dtype for leaf in jax.tree.leaves((trainable(dlayer), dx))} == {np.dtype(dtype)}


@pytest.mark.more
@by_name(("dtype", "compute_dtype"), [(bf16, None), (f16, None), (bf16, f32), (f16, bf16), (f32, f16)])
def test_low_precision_parameters_train(dtype, compute_dtype):
    """Output and gradients are the products of what the operands are rounded to: no overflow, no gain error.

    Operands are rounded to the compute dtype, then to FP8 with the scales of this batch. Products are accumulated in
    float32 and rounded once to each dtype that they pass through.
    """
    layer = fp8(cast(new_linear(), dtype), compute_dtype=compute_dtype)
    x, g = (cast(array, dtype) for array in batch_of(0))
    gradients_of = eqx.filter_jit(filter_grad(lambda layer: hax.sum(layer(x).astype(dtype) * g).scalar()))
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(2):  # the second step has scales that fill the formats' range
            gradients = gradients_of(layer)
            layer = step(layer, gradients, rate=0.0)
        out = layer(x)
    through = dtype if compute_dtype is None else compute_dtype
    formats = (("input", E4M3), ("kernel", E4M3), ("output_grad", E5M2))
    # Of products that are rounded to bfloat16, whose scales it has to hold.
    bits = (1, 7, 1) if through == bf16 else (24, 24, 24)
    x, w, g = (
        quantize(a.array.astype(through), rounded_up(layer.dot_general.scale(operand), width), format.dtype)
        for a, (operand, format), width in zip((x, layer.weight, g), formats, bits, strict=True)
    )
    for ours, left, right in ((out, x, w.T), (gradients.weight, g.T, x)):
        exact, terms = left @ right, left.shape[1] + 2
        tolerance = terms * EPS * (np.abs(left) @ np.abs(right))
        assert_within(ours, exact, tolerance + sum(rounding_error(exact, to) for to in {through, dtype}))


# --- A long run ------------------------------------------------------------------------------------------------------


def recurrent(layer, x, y):
    """A layer used three times, as in a recurrent network."""
    for _ in range(3):
        x = hax.tanh(layer(x)).rename({"hidden": "input"})
    return hax.mean(hax.sum((x - y) ** 2, In), Batch).scalar()


class RecurrentReference:
    """The same network in float64, trained without rounding, with the amaxes of its operands."""

    def __init__(self, weight, bias):
        self.weight, self.bias = float64(weight), float64(bias)

    def step(self, x, y, rate, combine):
        inputs, outputs, grads = [], [], []
        for _ in range(3):
            inputs.append(x)
            x = np.tanh(x @ self.weight.T + self.bias)
            outputs.append(x)
        grad_out, grad_weight, grad_bias = 2 * (x - y) / len(x), 0.0, 0.0
        for before, after in zip(reversed(inputs), reversed(outputs), strict=True):
            grad = grad_out * (1 - after**2)
            grads.append(grad)
            grad_weight, grad_bias = grad_weight + grad.T @ before, grad_bias + grad.sum(axis=0)
            grad_out = grad @ self.weight
        amaxes = {
            "input": combine(list(map(amax, inputs))),
            "kernel": combine([amax(self.weight)] * 3),
            "output_grad": combine(list(map(amax, grads))),
        }
        self.weight, self.bias = self.weight - rate * grad_weight, self.bias - rate * grad_bias
        return amaxes


@by_name(("grad", "combine"), [(filter_grad, max), (eqx.filter_grad, sum)], ids=["ours", "equinox"])
def test_scales_of_a_layer_used_three_times_stay_right_for_100_steps(grad, combine):
    """Within one power of two of the scales of training in float64; peers' are infinite by then."""
    length, rate = 16, 0.05
    plain = hnn.Linear.init(In, In.alias("hidden"), key=jax.random.key(0))
    layer = fp8_linear_layers(plain, Fp8Config(amax_history_length=length))
    reference, expected = RecurrentReference(plain.weight, plain.bias), DelayedScalingReference(length, OCP, np.float64)
    train = eqx.filter_jit(lambda layer, x, y: step(layer, grad(recurrent)(layer, x, y), rate))
    for x, y in np.random.default_rng(0).uniform(-1, 1, size=(100, 2, Batch.size, In.size)).astype(np.float32):
        layer = train(layer, hax.named(x, (Batch, In)), hax.named(y, (Batch, In)))
        expected.record(**reference.step(float64(x), float64(y), rate, combine))
        for operand in OPERANDS:
            assert 0.5 <= layer.dot_general.scale(operand) / expected.scale[operand] <= 2.0
