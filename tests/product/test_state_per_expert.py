"""A state for each expert: each has the state, the output and the gradients that it has alone."""

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haliax_fp8 as fp8
from haliax_fp8 import DelayedScaling, Fp8DotGeneral, apply_updates, fp8_linear_layers, partition_for_grad_overwrite


Experts, Rows, In, Out = hax.make_axes(experts=3, rows=12, inputs=16, outputs=8)
SIZES = (5, 0, 4)
RECIPE = DelayedScaling(amax_history_length=4)
LINE = (((1,), (0,)), ((), ()))


def data(step):
    rng = np.random.default_rng(step)
    # Experts whose rows and kernels differ by orders of magnitude.
    size = np.repeat([1.0, 1e-3, 1e3, 7.0], [5, 0, 4, 3])[:, None]
    x = (rng.normal(size=(12, 16)) * size).astype(np.float32)
    g = (rng.normal(size=(12, 8)) / size).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(g)


KERNELS = jnp.asarray((np.random.default_rng(9).normal(size=(3, 16, 8)) * [[[1.0]], [[50.0]], [[1e-2]]]), jnp.float32)


def grouped(op, x, w, g):
    def loss(args):
        op, x, w = args
        return (op.ragged_dot(x, w, jnp.array(SIZES)) * g).sum()

    return loss, (op, x, w)


def overwritten(op, gradient):
    overwrites, updates = partition_for_grad_overwrite(gradient)
    return apply_updates(op, updates, overwrites)


@pytest.mark.more
@pytest.mark.parametrize("filter_grad", [fp8.filter_grad, eqx.filter_grad], ids=["ours", "equinox"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_each_expert_is_as_if_it_were_alone(filter_grad, wrap):
    ops = [Fp8DotGeneral.init(RECIPE) for _ in SIZES]
    together = Fp8DotGeneral.init(RECIPE, groups=Experts)
    ends = np.cumsum(SIZES)
    for step in range(3):
        x, g = data(step)
        loss, args = grouped(together, x, KERNELS, g)
        out = together.ragged_dot(x, KERNELS, jnp.array(SIZES))
        gradients = eqx.filter_jit(filter_grad(lambda args, loss=loss: wrap(loss)(args)))(args)
        together = overwritten(together, gradients[0])
        for expert, (end, size) in enumerate(zip(ends, SIZES, strict=True)):
            own = slice(end - size, end)
            state = together.state.table.array[expert]
            if not size:
                # Nothing reached it: as it was before the first step.
                np.testing.assert_array_equal(state, Fp8DotGeneral.init(RECIPE).state.table.array)
                assert (gradients[2][expert] == 0).all()
                continue
            op, w = ops[expert], KERNELS[expert]
            alone = lambda args, g=g[own]: (args[0](args[1], args[2], LINE) * g).sum()
            np.testing.assert_array_equal(out[own], op(x[own], w, LINE))
            expected = eqx.filter_jit(filter_grad(alone))((op, x[own], w))
            ops[expert] = overwritten(op, expected[0])
            np.testing.assert_array_equal(state, ops[expert].state.table.array)
            np.testing.assert_allclose(gradients[1][own], expected[1], rtol=1e-6)
            np.testing.assert_allclose(
                gradients[2][expert], expected[2], rtol=1e-6, atol=1e-6 * jnp.abs(expected[2]).max()
            )
        assert (out[sum(SIZES) :] == 0).all()


@pytest.mark.parametrize("filter_grad", [eqx.filter_grad, fp8.filter_grad], ids=["equinox", "ours"])
def test_experts_whose_kernels_have_the_same_amax_are_told_apart(filter_grad):
    """Of the first step nothing but the kernels tells experts apart; their amaxes coincide mostly in bfloat16."""
    kernels, sizes = KERNELS.at[:, 0, 0].set(256.0), (5, 3, 4)
    x, g = data(0)
    for dtype in (jnp.float32, jnp.bfloat16):
        op = Fp8DotGeneral.init(RECIPE, groups=Experts)
        rows, weights, factors = (a.astype(dtype) for a in (x, kernels, g))
        loss = lambda op, a=rows, b=weights, c=factors: (op.ragged_dot(a, b, jnp.array(sizes)) * c).sum()
        gradient = eqx.filter_jit(filter_grad(loss))(op)
        ends = np.cumsum(sizes)[:-1]
        for operand, array in (("input", rows), ("output_grad", factors)):
            expected = [np.abs(part).max() for part in np.split(np.asarray(array, np.float32), ends)]
            np.testing.assert_array_equal(gradient.amax_history(operand)[:, 0], expected, err_msg=f"{dtype}, {operand}")


@pytest.mark.more
def test_forward_mode_has_the_scales_of_experts():
    x, g = data(0)
    op = Fp8DotGeneral.init(RECIPE, groups=Experts)
    state = op.state.with_scale(jnp.array([[0.5, 2.0, 1.0], [1.0, 1.0, 1.0], [16.0, 2.0**-6, 1.0]]))
    op = dataclasses.replace(op, state=state)
    product = lambda x, w: op.ragged_dot(x, w, jnp.array(SIZES))
    dx, dw = jnp.ones_like(x), jnp.ones_like(KERNELS)
    _, found = jax.jvp(product, (x, KERNELS), (dx, dw))
    plain = lambda x, w: jax.lax.ragged_dot(x, w, jnp.array(SIZES))
    _, expected = jax.jvp(plain, (x, KERNELS), (dx, dw))
    # Operands are rounded to E4M3, with relative errors of 2**-4 at most.
    assert jnp.linalg.norm(found - expected) <= 2.0**-4 * jnp.linalg.norm(expected)


def test_a_converted_layer_trains_and_keeps_the_state_of_idle_experts():
    layer = hnn.MoELinear.init(Experts, In, Out, key=jax.random.key(0))
    layer = fp8_linear_layers(layer, recipe=RECIPE, scale_per_expert=True)
    assert layer.dot_general.state.table.array.shape[0] == Experts.size

    def loss(layer, x, g):
        return (layer(hax.named(x, (Rows, In)), hax.named(jnp.array(SIZES), Experts)).array * g).sum()

    step = fp8.TrainStep(loss, optax.sgd(1e-3))
    before, opt_state = layer.dot_general.state.table.array, step.init(layer)
    layer, opt_state, _ = step(layer, opt_state, *data(0))
    after = layer.dot_general.state.table.array
    np.testing.assert_array_equal(after[1], before[1])
    assert (after[0] != before[0]).any() and (after[2] != before[2]).any()


def test_who_cannot_have_a_state_per_expert():
    layer = hnn.MoELinear.init(Experts, In, Out, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"scale_per_expert=True needs a recipe that"):
        fp8_linear_layers(layer, recipe="current", scale_per_expert=True)
    op, (x, _) = Fp8DotGeneral.init(RECIPE, groups=Experts), data(0)
    with pytest.raises(ValueError, match="call it once for the rows of all examples"):
        jax.vmap(lambda x: op.ragged_dot(x, KERNELS, jnp.array(SIZES)))(jnp.stack([x, x]))
    with pytest.raises(ValueError, match="state of .* layers"):
        op(x, KERNELS[0], LINE)
