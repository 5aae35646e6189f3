"""A kernel that the backward pass quantizes again becomes what the forward pass made of it, bit for bit."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haliax_fp8 as fp8
from haliax_fp8.memory import KernelResidual
from haliax_fp8.recipes import E4M3, BlockScaling, CurrentScaling, HighPrecision, Quantization, RowwiseScaling


MATRIX = (((1,), (0,)), ((), ()))
SCALINGS = {
    "delayed": fp8.DelayedScaling(amax_history_length=2),
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "squares": BlockScaling(size=4, square=True),
    "1-D blocks": BlockScaling(size=4),
}
# numbers, shapes of lhs and rhs: kernels of three axes, of which the middle one is contracted or two of them are
LAYOUTS = {
    "kernel first": ((((1,), (1,)), ((), ())), (3, 10, 9), (7, 10)),
    "kernel first, two contracted": ((((0, 2), (2, 0)), ((), ())), (6, 10, 9), (9, 7, 6)),
    "kernel second": ((((1,), (1,)), ((), ())), (7, 10), (3, 10, 9)),
    "kernel second, two contracted": ((((2, 0), (0, 2)), ((), ())), (9, 7, 6), (6, 10, 9)),
}


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise"])
def test_the_kernel_is_rounded_to_the_compute_dtype_first_both_times(name):
    """`1 + 1/16 + 1/512` is above the middle of 1 and 1.125, bfloat16 makes that middle of it, and E4M3 then 1.

    Quantized without bfloat16 in between it would be 1.125. Elements of 448 make every scale 1.
    """
    w = np.full((16, 8), 1 + 1 / 16 + 1 / 512, np.float32)
    w[0, :] = w[:, 0] = 448.0
    x, recipe = jnp.full((4, 16), 448.0), fp8.Recipe.of(SCALINGS[name])
    for choice in (KernelResidual.KEEP, KernelResidual.REQUANTIZE):
        op = fp8.Fp8DotGeneral.init(recipe, kernel_shape=(8,), compute_dtype=jnp.bfloat16)
        op = dataclasses.replace(op, kernel_residual=choice)
        out, pullback = jax.vjp(lambda x, op=op: op(x, jnp.asarray(w), MATRIX), x)
        np.testing.assert_array_equal(out[:, 1:], jnp.full((4, 7), 448.0 * (448 + 15), out.dtype))
        # One element of the output's gradient: dgrad is one column of the kernel.
        (dx,) = pullback(jnp.zeros_like(out).at[0, 1].set(448.0))
        np.testing.assert_array_equal(dx[0], np.where(np.arange(16) == 0, 448.0, 1.0) * 448, err_msg=str(choice))


@pytest.mark.parametrize("gradient", [fp8.filter_grad, eqx.filter_grad])
def test_a_loop_keeps_the_kernel_that_all_its_steps_use_once(gradient):
    layer = fp8.fp8_linear_layers(eqx.nn.Linear(8, 8, use_bias=False, key=jax.random.key(0)))
    arrays, rest = eqx.partition(layer, eqx.is_array)

    def loss(layer, x):
        step = lambda x, _: (jnp.tanh(jax.vmap(layer)(x)), None)
        return jax.lax.scan(step, x, length=3)[0].sum()

    def gradients(arrays, x):
        return eqx.filter(gradient(loss)(eqx.combine(arrays, rest), x), eqx.is_array)

    program = str(jax.make_jaxpr(gradients)(arrays, jnp.ones((4, 8))))
    assert "f8_e4m3fn[3,4,8]" in program and "f8_e4m3fn[8,8]" in program and "[3,8,8]" not in program


@pytest.mark.parametrize("high", ["fprop", "wgrad"])
def test_an_input_is_kept_as_wgrad_takes_it(high):
    """Whatever fprop does: its FP8 copy if wgrad runs in FP8, and itself, not a copy, if not."""
    base, precise = (
        fp8.Recipe.of(CurrentScaling()),
        Quantization(E4M3, HighPrecision()),
    )
    if high == "wgrad":
        recipe = dataclasses.replace(base, input_for_wgrad=precise, output_grad_for_wgrad=precise)
    else:
        seconds = {"input_for_wgrad": base.input, "kernel_for_dgrad": base.kernel}
        recipe = dataclasses.replace(base, input=precise, kernel=precise, **seconds)
    op, x, w = fp8.Fp8DotGeneral.init(recipe), jnp.ones((6, 16)), jnp.ones((16, 8))
    _, pullback = jax.vjp(lambda w: op(x, w, MATRIX), w)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if getattr(leaf, "shape", None) == x.shape]
    if high == "wgrad":
        assert [leaf is x for leaf in kept] == [True]
    else:
        assert [leaf.dtype for leaf in kept] == [np.dtype(jnp.float8_e4m3fn)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["rowwise", "squares", "1-D blocks"])
def test_kernels_of_three_axes(name, layout):
    """Rows and blocks run along what is contracted, wherever that is: wide spreads tell one axis from another."""
    numbers, *shapes = LAYOUTS[layout]
    rng = np.random.default_rng(0)
    spread = lambda shape: (rng.standard_normal(shape) * np.exp2(rng.integers(-12, 4, shape))).astype(np.float32)
    kernel, axes = (shapes[0], numbers[0][0]) if layout.startswith("kernel first") else (shapes[1], numbers[0][1])
    free = tuple(size for axis, size in enumerate(kernel) if axis not in axes)
    op = fp8.Fp8DotGeneral.init(fp8.Recipe.of(SCALINGS[name]), kernel_shape=free)

    def gradients(choice, lhs, rhs):
        chosen = dataclasses.replace(op, kernel_residual=choice)
        out, pullback = jax.vjp(lambda lhs, rhs: chosen(lhs, rhs, numbers), lhs, rhs)
        return pullback(jnp.linspace(-1, 1, out.size).reshape(out.shape))

    both = jax.jit(
        lambda *args: [gradients(choice, *args) for choice in (KernelResidual.KEEP, KernelResidual.REQUANTIZE)]
    )
    for kept, again in zip(*both(*map(spread, shapes)), strict=True):
        np.testing.assert_array_equal(kept, again)


def test_replicas_whose_kernels_are_rounded_at_random_record_the_maximum():
    """Each example has a key of its own, so that one layer's kernel is rounded in as many ways."""
    recipe = fp8.recipes.by_name("delayed")
    recipe = dataclasses.replace(
        recipe, kernel=dataclasses.replace(recipe.kernel, rounding=fp8.recipes.Rounding.STOCHASTIC)
    )
    plain = eqx.nn.Linear(8, 8, use_bias=False, key=jax.random.key(0))
    layer = fp8.fp8_linear_layers(plain, recipe=recipe, kernel_residual=KernelResidual.KEEP)
    x, keys = jax.random.normal(jax.random.key(1), (4, 8)), jax.random.split(jax.random.key(2), 4)
    loss = lambda layer: jax.vmap(lambda x, key: fp8.with_rounding_keys(layer, key)(x))(x, keys).sum()
    for gradient in (fp8.filter_grad, eqx.filter_grad):
        op = eqx.filter_jit(gradient(loss))(layer).dot_general
        amaxes = [op.amax_history(operand)[0] for operand in ("input", "kernel", "output_grad")]
        np.testing.assert_array_equal(amaxes, [jnp.abs(x).max(), jnp.abs(plain.weight).max(), 1.0])
