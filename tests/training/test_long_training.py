"""A hundred steps with a tied layer, a layer that most steps skip, and a recurrent one, against float64."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import haliax_fp8 as fp8


WIDTH, BATCH, STEPS, LENGTH, TIMES = 16, 32, 100, 8, 4
LIMITS = np.array([448.0, 448.0, 57344.0])
RATE = 0.3


class Model(eqx.Module):
    recurrent: eqx.nn.Linear
    tied: eqx.nn.Linear
    skipped: eqx.nn.Linear

    def __call__(self, x, use_skipped):
        h = lax.scan(lambda h, _: (jnp.tanh(self.recurrent(h)), None), x, None, length=TIMES)[0]
        z = self.tied(jnp.tanh(self.tied(h)))
        return lax.cond(use_skipped, lambda z: z + self.skipped(z), lambda z: z, z)


def loss_fn(model, x, target, use_skipped):
    out = jax.vmap(model, in_axes=(0, None))(x, use_skipped)
    return ((out - target) ** 2).mean()


class Float64Layer:
    """`y = x @ w.T`, its amaxes of the step, and the state of delayed scaling."""

    def __init__(self, weight):
        self.weight = np.asarray(weight, np.float64)
        self.history, self.scale = np.zeros((3, LENGTH)), np.ones(3)
        self.begin_step()

    def begin_step(self):
        self.amaxes, self.gradient, self.used = np.zeros(3), np.zeros_like(self.weight), False

    def forward(self, x):
        self.amaxes[:2] = np.maximum(self.amaxes[:2], [np.abs(x).max(), np.abs(self.weight).max()])
        self.used = True
        return x @ self.weight.T

    def backward(self, x, g):
        self.amaxes[2] = max(self.amaxes[2], np.abs(g).max())
        self.gradient += g.T @ x
        return g @ self.weight

    def end_step(self):
        self.weight -= RATE * self.gradient
        if self.used:
            self.history = np.concatenate([self.amaxes[:, None], self.history[:, 2:], self.history[:, :1]], axis=1)
            self.scale = self.history.max(axis=1) / LIMITS


def float64_step(layers, x, target, use_skipped):
    recurrent, tied, skipped = layers
    for layer in layers:
        layer.begin_step()
    states = [x]
    for _ in range(TIMES):
        states.append(np.tanh(recurrent.forward(states[-1])))
    middle = np.tanh(tied.forward(states[-1]))
    z = tied.forward(middle)
    out = z + skipped.forward(z) if use_skipped else z
    loss, g = ((out - target) ** 2).mean(), 2 * (out - target) / out.size
    if use_skipped:
        g = g + skipped.backward(z, g)
    g = tied.backward(middle, g) * (1 - middle**2)
    g = tied.backward(states[-1], g)
    for before, after in zip(reversed(states[:-1]), reversed(states[1:]), strict=True):
        g = recurrent.backward(before, g * (1 - after**2))
    for layer in layers:
        layer.end_step()
    return loss


@pytest.mark.more
@pytest.mark.parametrize("gradient", ["maximum", "plain"])
def test_scales_stay_within_a_power_of_two_of_float64(gradient):
    keys = jax.random.split(jax.random.key(0), 5)
    linear = lambda key: eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=key)
    model = Model(*map(linear, keys[:3]))
    x, target = (np.asarray(jax.random.normal(key, (BATCH, WIDTH))) for key in keys[3:])
    reference = [Float64Layer(layer.weight) for layer in (model.recurrent, model.tied, model.skipped)]
    model = fp8.fp8_linear_layers(model, fp8.Fp8Config(amax_history_length=LENGTH))
    optimizer = optax.sgd(RATE)
    opt_state = optimizer.init(fp8.trainable(model))
    take = fp8.filter_grad if gradient == "maximum" else eqx.filter_grad

    @eqx.filter_jit
    def step(model, opt_state, use_skipped):
        gradients = take(loss_fn)(model, jnp.asarray(x), jnp.asarray(target), use_skipped)
        overwrites, gradients = fp8.partition_for_grad_overwrite(gradients)
        updates, opt_state = optimizer.update(gradients, opt_state, fp8.trainable(model))
        return fp8.apply_updates(model, updates, overwrites), opt_state

    # Plain gradients sum a layer's amaxes over its uses: the scale is at most that many times too large.
    uses = {"maximum": (1, 1, 1), "plain": (TIMES, 2, 1)}[gradient]
    losses = []
    for i in range(STEPS):
        use_skipped = i % 7 == 3
        model, opt_state = step(model, opt_state, jnp.asarray(use_skipped))
        losses.append(float64_step(reference, x, target, use_skipped))
        layers = (model.recurrent, model.tied, model.skipped)
        for layer, expected, count in zip(layers, reference, uses, strict=True):
            ratio = np.asarray(layer.dot_general.state.scale) / expected.scale
            assert (ratio > 0.5).all() and (ratio < 2.0 * count).all(), (i, ratio)
    assert losses[-1] < 0.95 * losses[0]
    assert float(loss_fn(model, jnp.asarray(x), jnp.asarray(target), jnp.asarray(False))) < 1.05 * losses[-1]


@pytest.mark.more
def test_a_layer_that_no_step_reaches_keeps_its_first_state():
    keys = jax.random.split(jax.random.key(1), 3)
    model = fp8.fp8_linear_layers(Model(*(eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in keys)))
    x = jnp.ones((BATCH, WIDTH))
    step = fp8.TrainStep(lambda model, x: loss_fn(model, x, x, jnp.asarray(False)), optax.sgd(RATE))
    trained, _, _ = step(model, step.init(model), x)
    np.testing.assert_array_equal(trained.skipped.dot_general.state.array, model.skipped.dot_general.state.array)
    assert float(trained.tied.dot_general.amax_history("input")[0]) > 0.0
