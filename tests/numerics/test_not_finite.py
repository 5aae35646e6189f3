"""An infinity or NaN in an operand: every result that shows it in high precision shows it in every recipe."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import state_is_constant

import haliax_fp8 as fp8
from haliax_fp8.recipes import E4M3, E5M2, CurrentScaling, OperandUse, Quantization, StaticScaling


MATRIX = (((1,), (0,)), ((), ()))
KEY = jax.random.key(3)
VALUES = [np.inf, -np.inf, np.nan]
# Recipes whose scales belong to what one element of a result sums over: nothing else is lost.
LOCAL = ["delayed", "static", "rowwise", "mxfp8"]


# Without calibration there is no scale, and nothing is finite.
CALIBRATED = {**fp8.recipes.named, "static": fp8.Recipe.of(StaticScaling(1e-5))}


def keyed(recipe):
    return fp8.with_rounding_keys(fp8.Fp8DotGeneral.init(CALIBRATED[recipe]), KEY)


def operands():
    """Input, kernel, and output gradients as small as they are in training."""
    rng = np.random.default_rng(0)
    sizes = ((20, 150), 1.0), ((150, 40), 0.1), ((20, 40), 1e-6)
    return [(rng.standard_normal(shape) * size).astype(np.float32) for shape, size in sizes]


def spoiled():
    """The operands with one element that is not finite, each in turn."""
    for index in range(3):
        for value in VALUES:
            arrays = operands()
            arrays[index][5, 7] = value
            yield index, value, arrays


def high_precision(x, w, g):
    x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
    with np.errstate(invalid="ignore"):
        return x @ w, g @ w.T, x.T @ g


def assert_shown(recipe, results, arrays, message):
    for name, got, exact in zip(("y", "dx", "dw"), results, high_precision(*arrays), strict=True):
        shown, expected = ~np.isfinite(np.asarray(got, np.float64)), ~np.isfinite(exact)
        assert shown[expected].all(), (message, name)
        if recipe in LOCAL:
            np.testing.assert_array_equal(shown, expected, err_msg=f"{message}, {name}")


@state_is_constant
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("recipe", fp8.recipes.named)
def test_results_that_are_not_finite_in_high_precision_are_not_here(recipe, dtype):
    op = keyed(recipe)

    def batched(x, w, g):
        out, pullback = jax.vjp(lambda x, w: op(x, w, MATRIX), x, w)
        return out, *pullback(g)

    def by_rows(x, w, g):
        row = lambda x, w: op(x, w, (((0,), (0,)), ((), ())))
        out, pullback = jax.vjp(lambda x, w: jax.vmap(row, (0, None))(x, w), x, w)
        return out, *pullback(g)

    # Compiled once each: what decides is the same program in both dtypes.
    programs = {"jit": jax.jit(batched)} if dtype == jnp.float32 else {"vmap": jax.jit(by_rows)}
    for index, value, arrays in spoiled():
        arrays = [jnp.asarray(a, dtype) for a in arrays]
        for name, program in programs.items():
            assert_shown(recipe, program(*arrays), arrays, (name, index, value))
    if dtype == jnp.float32:
        assert_shown(recipe, batched(*arrays), arrays, "eager")
    for clean in programs.values():
        assert all(jnp.isfinite(x).all() for x in clean(*(jnp.asarray(a, dtype) for a in operands())))


def test_a_scale_of_something_not_finite_makes_all_it_scales_nan():
    """A scale of zero instead would make rows zero that have nothing to do with the NaN."""
    op = keyed("current")
    for dtype in (jnp.float32, jnp.bfloat16):
        for index, value, arrays in spoiled():
            x, w, _ = (jnp.asarray(a, dtype) for a in arrays)
            if index < 2:
                assert jnp.isnan(op(x, w, MATRIX)).all(), (dtype, index, value)


@pytest.mark.parametrize("recipe", fp8.recipes.named)
def test_apply_if_finite_skips_the_step(recipe):
    """One example's loss overflows; all parameters stay, and the next step trains."""
    model = fp8.fp8_linear_layers(
        eqx.nn.Linear(8, 8, use_bias=False, key=KEY), fp8.Fp8Config(recipe=CALIBRATED[recipe])
    )
    x = jax.random.normal(jax.random.key(1), (16, 8))
    optimizer = optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=3)
    opt_state = optimizer.init(fp8.trainable(model))

    @eqx.filter_jit
    def step(model, opt_state, weights):
        loss = lambda model: (weights * jax.vmap(fp8.with_rounding_keys(model, KEY))(x)).sum()
        overwrites, gradients = fp8.partition_for_grad_overwrite(fp8.filter_grad(loss)(model))
        updates, opt_state = optimizer.update(gradients, opt_state, fp8.trainable(model))
        return fp8.apply_updates(model, updates, overwrites), opt_state

    finite = jnp.full((16, 8), 1e-3)
    for value in VALUES:
        after, state = step(model, opt_state, finite.at[3, 2].set(value))
        assert int(state.total_notfinite) == 1
        for old, new in zip(*(jax.tree.leaves(fp8.trainable(m)) for m in (model, after)), strict=True):
            np.testing.assert_array_equal(old, new)
        trained, state = step(after, state, finite)
        assert int(state.total_notfinite) == 1
        assert not np.array_equal(trained.weight, model.weight)


def test_a_finite_value_that_overflows_when_it_is_divided_is_clipped():
    """Under a scale that was made for something much smaller, as any other value beyond the range."""
    x = jnp.array([3.0, -3e38, jnp.inf, jnp.nan, 1e-36])
    data = fp8.recipes.quantize(x, jnp.full((1,), 1e-37), E4M3).data.astype(jnp.float32)
    np.testing.assert_array_equal(data, [448.0, -448.0, np.nan, np.nan, 10.0])


@pytest.mark.parametrize("recipe", [name for name in fp8.recipes.named if name != "current"])
def test_other_rows_keep_what_they_had(recipe):
    """With one scale for the tensor, taken from the tensor itself, there is nothing to keep."""
    q = fp8.recipes.named[recipe].output_grad
    x = operands()[2]
    bad = x.copy()
    bad[5, 7] = np.inf
    use = OperandUse(q.format, (1,), stored_scale=jnp.float32(1e-8), rounding=q.rounding, key=KEY)
    clean, spoilt = (np.asarray(q.scaling.quantize(jnp.asarray(a), use).dequantize()) for a in (x, bad))
    others = np.arange(20) != 5
    np.testing.assert_array_equal(clean[others], spoilt[others])
    assert not np.isfinite(spoilt[5, 7])


# --- Very small tensors -----------------------------------------------------------------------------------------------

TINY = float(np.finfo(np.float32).tiny)
STATELESS = [name for name in fp8.recipes.named if not fp8.recipes.named[name].is_stateful]


@pytest.mark.parametrize("recipe", STATELESS)
def test_scales_down_to_the_smallest_normal_number_are_not_flushed(recipe):
    """Nor are the values: they are off by what the format rounds, or by half of its smallest value under their scale.

    What is itself below the smallest normal number may be flushed. Random rounding is off by up to a whole step.
    """
    unit = np.random.default_rng(0).uniform(-1, 1, (16, 64)).astype(np.float32)
    unit[3, 5] = 1.0
    for q in dict.fromkeys(
        (
            *fp8.recipes.named[recipe].operands,
            Quantization(E5M2, CurrentScaling()),
        )
    ):
        use = OperandUse(q.format, (1,), rounding=q.rounding, key=KEY)
        quantize = jax.jit(lambda x, q=q, use=use: q.scaling.quantize(x, use))
        for amax in (1e-30, 7e-34, 1e-35, 1e-37, 1.2e-38):
            x = unit * np.float32(amax)
            got = quantize(x)
            scale = spread(np.asarray(got.scale, np.float64), x.shape)
            normal = np.abs(x) >= TINY
            assert (scale[normal] >= TINY).all(), (q, amax)
            assert (scale[normal] <= max(2.0 * amax / q.format.max, 4.0 * TINY)).all(), (q, amax)
            steps = 1.0 if q.rounding.needs_key else 0.5
            rounding = (
                2.0 * steps * np.maximum(q.format.relative_error * np.abs(x), q.format.smallest_subnormal * scale)
            )
            error = np.abs(np.asarray(got.data, np.float64) * scale - x)
            assert (error <= np.where(normal, rounding, TINY)).all(), (q, amax)


def spread(scale, shape):
    """The scale of each element, of blocks of any shape."""
    for axis, (count, size) in enumerate(zip(scale.shape, shape, strict=True)):
        if count not in (1, size):
            block = 1 << (-(-size // count) - 1).bit_length()
            scale = np.repeat(scale, block, axis=axis)[tuple(slice(n) for n in shape)]
    return np.broadcast_to(scale, shape)
