"""The states of all layers, updated in one go: each with the formats, shared input and measurements of its own op."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import FNUZ, OCP, OPERANDS, DelayedScalingReference, amax, assert_state_is

import haliax_fp8 as fp8
from haliax_fp8._jax.xla import side_by_side
from haliax_fp8._state.update import record_states
from haliax_fp8.recipes import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ


HISTORY = 2
Batch, In, Out = hax.make_axes(batch=8, input=8, output=8)
both_gradients = pytest.mark.parametrize("gradient", [fp8.filter_grad, eqx.filter_grad], ids=["ours", "equinox"])


class Two(eqx.Module):
    """Layers that read the same input, or multiples of it."""

    first: hnn.Linear
    second: hnn.Linear

    @staticmethod
    def init():
        return Two(*(hnn.Linear.init(In, Out, key=jax.random.key(seed), use_bias=False) for seed in range(2)))

    def __call__(self, x, factor):
        return self.first(x), self.second(factor * x)

    @property
    def layers(self):
        return self.first, self.second


def tensor(seed, *axes):
    return hax.random.normal(jax.random.key(seed), axes)


def after_a_step(model, factor, x, g, gradient):
    """The model after a step that leaves its weights as they are."""

    def loss(model):
        return sum(hax.sum(out * g).scalar() for out in model(x, factor))

    overwrites, gradients = fp8.partition_for_grad_overwrite(eqx.filter_jit(gradient(loss))(model))
    return fp8.apply_updates(model, jax.tree.map(jnp.zeros_like, gradients), overwrites)


@pytest.mark.smoke
@both_gradients
@pytest.mark.parametrize(
    "formats",
    [
        [(E4M3, E5M2, OCP), (E4M3FNUZ, E5M2FNUZ, FNUZ)],
        [
            (E5M2, E5M2, dict.fromkeys(OPERANDS, 57344.0)),
            (E4M3, E5M2, OCP),
        ],
    ],
    ids=["fnuz second", "E5M2 first"],
)
def test_layers_in_other_formats_take_the_limits_of_their_own(gradient, formats):
    """The same scaling everywhere, so that all states change in one go; 448, 240 and 57344 are the formats' maxima."""
    scaling = fp8.DelayedScaling(amax_history_length=HISTORY)
    recipes = [fp8.Recipe.of(scaling, forward=forward, backward=backward) for forward, backward, _ in formats]
    config = fp8.Fp8Config(overrides=dict(zip(("first", "second"), recipes, strict=True)))
    model = fp8.fp8_linear_layers(Two.init(), config)
    x, g = tensor(1, Batch, In), tensor(2, Batch, Out)
    expected = [DelayedScalingReference(HISTORY, limits) for *_, limits in formats]
    for _ in range(2):
        model = after_a_step(model, 1.0, x, g, gradient)
        for layer, reference in zip(model.layers, expected, strict=True):
            reference.record(input=amax(x), kernel=amax(layer.weight), output_grad=amax(g))
            assert_state_is(layer.dot_general, reference)


@pytest.mark.more
def test_the_largest_scale_of_a_shared_input_serves_all():
    """Where inputs differ, after all: nothing that one layer's scale would hold is clipped by another's.

    The input of the second layer is 10 times the first one's, and so is its scale. With that scale, both give what the
    layer alone gives with it, bit for bit.
    """
    scaling = fp8.DelayedScaling(amax_history_length=1)
    model = fp8.fp8_linear_layers(Two.init(), fp8.Fp8Config(recipe=fp8.Recipe.of(scaling)))
    factor, x, g = 10.0, tensor(1, Batch, In), tensor(2, Batch, Out)
    model = after_a_step(model, factor, x, g, fp8.filter_grad)
    scales = [np.float32(layer.dot_general.scale("input")) for layer in model.layers]
    assert scales[1] == pytest.approx(10 * scales[0], rel=1e-6)

    # Value and state leave the differentiated function; outside, every layer has the scale of its own.
    outputs = lambda model: (jnp.float32(0.0), [out.array for out in model(x, factor)])
    _, shared = fp8.filter_grad(outputs, has_aux=True)(fp8.memory.share_input_scales(model, [("first", "second")]))
    _, apart = fp8.filter_grad(outputs, has_aux=True)(model)

    def with_scale(layer, scale):
        state = layer.dot_general.state
        return eqx.tree_at(lambda l: l.dot_general.state, layer, state.with_scale(state.scale.at[0].set(scale)))

    np.testing.assert_array_equal(shared[0], with_scale(model.layers[0], scales[1])(x).array)
    np.testing.assert_array_equal(shared[1], apart[1])
    assert not np.array_equal(shared[0], apart[0]), "the scales differ, and so must what is rounded with them"


def test_calibration_and_statistics_of_a_shared_input_keep_it():
    """Both run the model with other recipes for a while."""
    model = fp8.fp8_linear_layers(Two.init(), fp8.Fp8Config(amax_history_length=HISTORY))
    model = fp8.memory.share_input_scales(model, [("first", "second")])
    other = model.first.dot_general.with_recipe(model.first.dot_general.recipe.measured)
    assert other.state.shared_input == model.first.dot_general.state.shared_input == "first+second"


def test_arrays_are_joined_side_by_side():
    rng = np.random.default_rng(0)
    for widths in [(3,), (2, 0, 1), (0, 3), (1, 1, 7, 2, 2), (2, 9), (9, 2)]:
        parts = [rng.standard_normal((3, width)).astype(np.float32) for width in widths]
        np.testing.assert_array_equal(side_by_side([jnp.asarray(x) for x in parts]), np.concatenate(parts, 1))


def test_layers_that_share_an_input_may_record_other_numbers():
    """Such as one whose operands are measured, and one whose operands are not."""
    model = fp8.memory.share_input_scales(fp8.fp8_linear_layers(Two.init()), [("first", "second")])
    first, second = (layer.dot_general for layer in model.layers)
    states = [first.with_recipe(first.recipe.measured).state, second.state]
    assert all(record.shared is not None for record in eqx.filter_eval_shape(record_states, states))


def test_a_step_of_zeros_is_recorded_as_zeros():
    """As in Flax: what a step reached is not read from what it measured."""
    x, g = tensor(1, Batch, In), tensor(2, Batch, Out)
    model = fp8.fp8_linear_layers(Two.init(), fp8.Fp8Config(amax_history_length=HISTORY))
    for grad in (fp8.filter_grad, eqx.filter_grad):
        before = after_a_step(model, 1.0, x, g, grad)
        op = before.first.dot_general
        zeros = eqx.tree_at(lambda m: m.first.weight.array, before, replace_fn=jnp.zeros_like)
        after = after_a_step(zeros, 1.0, 0.0 * x, 0.0 * g, grad).first.dot_general
        for operand in OPERANDS:
            history = op.amax_history(operand)
            assert history[0] > 0.0
            np.testing.assert_array_equal(after.amax_history(operand), jnp.roll(history, -1).at[0].set(0.0))


@pytest.mark.more
@pytest.mark.parametrize("zero", OPERANDS)
def test_one_operand_of_zeros_does_not_hide_the_others(zero):
    """Delayed scaling records one number of each operand, statistics record several: of each, every one is looked at.

    What is all zero in a step is an input behind a ReLU, or a gradient behind a mask; the kernel is measured still.
    """
    x, g = tensor(1, Batch, In), tensor(2, Batch, Out)
    model = Two.init()
    if zero == "input":
        x = 0.0 * x
    elif zero == "output_grad":
        g = 0.0 * g
    else:
        model = jax.tree.map(jnp.zeros_like, model)
    converted = fp8.fp8_linear_layers(model, fp8.Fp8Config(amax_history_length=HISTORY))
    op = after_a_step(converted, 1.0, x, g, fp8.filter_grad).first.dot_general
    amaxes = {"input": amax(x), "kernel": amax(model.first.weight), "output_grad": amax(g)}
    assert [op.amax_history(operand)[0] for operand in OPERANDS] == [amaxes[operand] for operand in OPERANDS]

    loss = lambda model: hax.sum(model(x, 1.0)[0] * g).scalar()
    statistics = fp8.quantization_statistics(converted, loss)["first"]
    np.testing.assert_array_equal(statistics.amax, [amaxes[operand] for operand in OPERANDS])
