"""After one step far too large, delayed scaling flushes everything to zero for as long as its rule says."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import unchecked

import haliax_fp8 as fp8
from haliax_fp8.recipes import MaxOfHistory, MostRecent, RecoveringMax


LENGTH, BEFORE, AFTER = 24, 6, 30
X = jax.random.normal(jax.random.key(1), (32, 16))


def loss(model, x):
    return ((jax.vmap(model)(x) - 1.0) ** 2).mean()


def accuracies(rule, factors, activation=jax.nn.relu, **options):
    """For each step the SQNR in dB of the worst layer's gradient; the weights stay, and scales move."""
    scaling = fp8.DelayedScaling(amax_history_length=LENGTH, amax_compute=rule, **options)
    # No biases: a layer behind one that is flushed to zero sees zeros.
    plain = eqx.nn.MLP(
        16, 16, 32, 3, activation=activation, use_bias=False, use_final_bias=False, key=jax.random.key(0)
    )
    model = fp8.fp8_linear_layers(plain, fp8.Fp8Config(recipe=scaling))
    arrays, static = eqx.partition(plain, eqx.is_array)
    exact = jax.jit(jax.grad(lambda arrays, x: loss(eqx.combine(arrays, static), x)))

    @eqx.filter_jit
    def step(model, x):
        overwrites, gradients = fp8.partition_for_grad_overwrite(fp8.filter_grad(loss)(model, x))
        return fp8.apply_updates(model, jax.tree.map(jnp.zeros_like, gradients), overwrites), gradients

    found = []
    for factor in factors:
        model, gradients = step(model, factor * X)
        found.append(
            min(
                float(10 * np.log10(np.sum(e**2) / np.sum((e - g) ** 2)))
                for e, g in zip(
                    (np.asarray(layer.weight, np.float64) for layer in exact(arrays, factor * X).layers),
                    (np.asarray(layer.weight, np.float64) for layer in gradients.layers),
                    strict=True,
                )
            )
        )
    return np.array(found), model


OUTLIER = [1.0] * BEFORE + [1e6] + [1.0] * AFTER


def dead_steps(found):
    """How many steps after the outlier have gradients that are no better than zeros, up to the last of them."""
    dead = np.flatnonzero(found[BEFORE + 1 :] < 3.0)
    return 0 if dead.size == 0 else int(dead[-1]) + 1


@pytest.mark.more
@pytest.mark.parametrize("steps", [1, 4, 16])
def test_steps_that_are_dead_after_an_outlier(steps):
    """All layers are back at once, although each sees zeros until the one before it is back; and as good as before."""
    found, _ = accuracies(RecoveringMax(steps), OUTLIER)
    assert dead_steps(found) <= steps
    assert found[BEFORE + 1] < 3.0
    # Within a few steps more, what is clipped meanwhile has grown to its size through all layers.
    assert np.abs(found[BEFORE + 1 + steps + 4 :] - found[BEFORE - 1]).max() < 1.0


@pytest.mark.more
def test_the_maximum_is_dead_for_the_history_and_the_most_recent_for_a_step():
    """What the rule is measured against; behind one layer another takes a step more."""
    assert dead_steps(accuracies(MaxOfHistory(), OUTLIER)[0]) >= LENGTH
    assert dead_steps(accuracies(MostRecent(), OUTLIER)[0]) <= 4


@pytest.mark.more
def test_an_update_interval_adds_to_it():
    found, _ = accuracies(RecoveringMax(4), OUTLIER, update_interval=3)
    assert dead_steps(found) <= 4 + 3


@pytest.mark.more
def test_within_the_factor_it_is_the_maximum_bit_for_bit():
    """A tensor that alternates: nobody's scale comes from the other's step."""
    factors = [1.0, 100.0, 0.5, 3.0, 90.0, 1.0] * 2
    states = [accuracies(rule, factors, jnp.tanh)[1] for rule in (MaxOfHistory(), RecoveringMax(2))]
    for a, b in zip(*map(fp8.training.fp8_states, states), strict=True):
        np.testing.assert_array_equal(a.array, b.array)


def parts(history):
    """The newest amax and the older ones."""
    return jnp.asarray(history[..., :1]), jnp.asarray(history[..., 1:])


@pytest.mark.parametrize("steps", [1, 3, 100])
def test_numbers_are_those_of_the_definition_and_never_fall_with_the_newest(steps):
    rng = np.random.default_rng(0)
    for length in (1, 2, 5, 20):
        rule = RecoveringMax(steps, factor=8.0)
        history = np.exp(rng.normal(0.0, 6.0, (40, length))).astype(np.float32)
        history[rng.random(history.shape) < 0.3] = 0.0
        history[rng.random(history.shape) < 0.1] = -np.inf
        got = np.asarray(rule.of_history(*parts(history)))[:, 0]
        for row, number in zip(history, got, strict=True):
            newest_first = np.concatenate([row[:1], row[:0:-1]])
            recent, positive = newest_first[:steps].max(), row[row > 0]
            recent = recent if recent > 0 else positive.min(initial=np.inf)
            assert number == min(row.max(), np.float32(8.0) * recent)
        larger = history.copy()
        larger[:, 0] = np.maximum(history[:, 0], 1e-30) * 2.0
        seen = history[:, 0] > 0.0
        assert (np.asarray(rule.of_history(*parts(larger)))[seen, 0] >= got[seen]).all()


def test_zeros_alone_keep_the_scale():
    assert float(RecoveringMax().of_history(*parts(np.zeros(5, np.float32)))[0]) == 0.0


def test_bad_options_are_refused():
    for steps in (0, -1, True):
        with pytest.raises(ValueError, match="steps=.*of RecoveringMax must be a"):
            RecoveringMax(steps)
    with unchecked(), pytest.raises(ValueError, match=r"steps=2.5 of RecoveringMax must be a positive integer"):
        RecoveringMax(2.5)
    for factor in (0.5, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="factor=.*of RecoveringMax must be"):
            RecoveringMax(factor=factor)
