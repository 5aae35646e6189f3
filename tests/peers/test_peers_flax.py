"""Flax's tests of its FP8 layers, as black boxes for ours: same shapes, same steps, same tolerances.

Flax stores the scale that a step used, we the scale that the next step will use; so its scale after a step is ours
before it.
"""

from typing import Any

import equinox as eqx
import flax.linen as nn
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import fp8_ops
from numpy_reference import FNUZ, OCP, OPERANDS, DelayedScalingReference, amax

import haliax_fp8
from haliax_fp8 import DelayedScaling, Fp8Config, Fp8DotGeneral, Recipe, apply_updates, fp8_linear_layers
from haliax_fp8.recipes import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ


GENRES = {
    "OCP": (E4M3, E5M2, OCP),
    "NANOO": (E4M3FNUZ, E5M2FNUZ, FNUZ),
}
both_genres = pytest.mark.parametrize("genre", list(GENRES))


def recipe_of(genre, length=1024):
    forward, backward, _ = GENRES[genre]
    return Recipe.of(DelayedScaling(amax_history_length=length), forward=forward, backward=backward)


@both_genres
def test_fp8_train_state(genre):
    """Five steps of Adam: histories and scales are those of a computation by hand."""
    Batch, In, Out = hax.make_axes(batch=16, input=16, output=32)
    layer = fp8_linear_layers(hnn.Linear.init(In, Out, key=jax.random.key(123)), Fp8Config(recipe=recipe_of(genre)))
    optimizer = optax.adam(0.1)
    opt_state = optimizer.init(haliax_fp8.trainable(layer))

    @eqx.filter_jit
    def train(layer, opt_state, x, dy):
        grads = eqx.filter_grad(lambda layer: hax.sum(layer(x) * dy).scalar())(layer)
        overwrites, grads = haliax_fp8.partition_for_grad_overwrite(grads)
        with jax.numpy_dtype_promotion("standard"):  # for optax
            updates, opt_state = optimizer.update(grads, opt_state, haliax_fp8.trainable(layer))
        return apply_updates(layer, updates, overwrites), opt_state

    expected = DelayedScalingReference(1024, GENRES[genre][2])
    for step in range(5):
        key_x, key_g = jax.random.split(jax.random.key(step))
        x, g = hax.random.normal(key_x, (Batch, In)), hax.random.normal(key_g, (Batch, Out))
        for operand in OPERANDS:
            np.testing.assert_allclose(layer.dot_general.scale(operand), expected.scale[operand])
        expected.record(input=amax(x), kernel=amax(layer.weight), output_grad=amax(g))
        layer, opt_state = train(layer, opt_state, x, g)
        for operand in OPERANDS:
            history = layer.dot_general.amax_history(operand)
            np.testing.assert_allclose(history, expected.history[operand], rtol=1e-3, atol=1e-3)


@both_genres
def test_fp8_dot_general_injection(genre):
    """Where inputs are representable in FP8, output and gradients are those of the layer without FP8."""
    forward, backward, _ = GENRES[genre]
    Batch, In, Out = hax.make_axes(batch=16, input=32, output=64)
    rng = np.random.default_rng(123)
    x = rng.uniform(size=(16, 32)).astype(forward.dtype).astype(np.float32)
    dy = rng.uniform(size=(16, 64)).astype(backward.dtype).astype(np.float32)
    plain = hnn.Linear.init(In, Out, key=jax.random.key(123), out_first=False)
    w = np.asarray(plain.weight.array)

    def loss(layer, x):
        return hax.mean(layer(x) * hax.named(dy, (Batch, Out))).scalar()

    layer = fp8_linear_layers(plain, Fp8Config(recipe=recipe_of(genre)))
    out, (dlayer, dx) = eqx.filter_jit(eqx.filter_value_and_grad(lambda args: loss(*args)))(
        (layer, hax.named(x, (Batch, In)))
    )
    g = dy / dy.size
    np.testing.assert_allclose(out, np.mean((x @ w) * dy), rtol=0, atol=1e-2)
    np.testing.assert_allclose(dlayer.weight.array, x.T @ g, rtol=0, atol=1e-4)
    np.testing.assert_allclose(dx.array, g @ w.T, rtol=0, atol=1e-4)


@both_genres
def test_fp8_state_shapes(genre):
    """Three scales of 1 and three empty histories of 1024 steps, whatever the shape of the layer."""
    In, Out = hax.make_axes(input=32, output=64)
    layer = fp8_linear_layers(hnn.Linear.init(In, Out, key=jax.random.key(0)), Fp8Config(recipe=recipe_of(genre)))
    for operand in OPERANDS:
        np.testing.assert_array_equal(layer.dot_general.scale(operand), np.float32(1.0), strict=True)
        np.testing.assert_array_equal(layer.dot_general.amax_history(operand), np.zeros(1024, np.float32), strict=True)


@pytest.mark.parametrize("transform", [eqx.filter_jit, lambda f: f], ids=["jit", "eager"])
@both_genres
def test_fp8_meta_dtype(genre, transform):
    """State used three times in a `scan` accumulates by maximum, not by sum."""
    limit = GENRES[genre][2]["input"]
    op = Fp8DotGeneral.init(recipe_of(genre, length=3))
    identity = jnp.ones((1, 1))

    def outer(op, x):
        carry, _ = jax.lax.scan(
            lambda carry, _: (op(carry, identity, (((1,), (0,)), ((), ()))), None), x[None, None], None, length=3
        )
        return carry[0, 0]

    step = transform(haliax_fp8.filter_grad(outer))
    for x, history, used, following in (
        (2.0, [2.0, 0.0, 0.0], 1.0, 2.0 / limit),
        (3.0, [3.0, 0.0, 2.0], 2.0 / limit, 3.0 / limit),
        (4.0, [4.0, 2.0, 3.0], 3.0 / limit, 4.0 / limit),
    ):
        np.testing.assert_allclose(op.scale("input"), used)
        overwrites, no_updates = haliax_fp8.partition_for_grad_overwrite(step(op, jnp.float32(x)))
        op = apply_updates(op, no_updates, overwrites)
        np.testing.assert_allclose(op.amax_history("input"), history)
        np.testing.assert_allclose(op.scale("input"), following)


def test_flax_adds_the_amaxes_of_two_uses(standard_promotion):
    """Its guide says that its layers take the maximum. Of inputs of 1 and 2 they record 3, where ours record 2."""
    x = jnp.ones((16, 16))

    class TwoUses(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(16, use_bias=False, dot_general_cls=fp8_ops.Fp8DotGeneral)
            return dense(x) + dense(2 * x)

    variables: Any = TwoUses().init(jax.random.key(0), x)
    theirs = jax.grad(lambda variables: jnp.sum(jnp.asarray(TwoUses().apply(variables, x))))(variables)
    histories = theirs[fp8_ops.OVERWRITE_WITH_GRADIENT]["Dense_0"]["Fp8DirectDotGeneralOp_0"]
    assert histories["input_amax_history"][0] == 1 + 2

    ours = fp8_linear_layers(eqx.nn.Linear(16, 16, use_bias=False, key=jax.random.key(0)))
    grads = haliax_fp8.filter_grad(lambda layer: jnp.sum(jax.vmap(layer)(x) + jax.vmap(layer)(2 * x)))(ours)
    assert grads.dot_general.amax_history("input")[0] == 2
