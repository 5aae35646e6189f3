"""Recipes in other formats, end to end: AMD's fnuz variants, and E4M3 for gradients too."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import recipe_reference as reference
from helpers import EPS, assert_within, products, state_is_constant, unchecked
from matrix_product import MATRIX, loss

import haliax_fp8 as fp8
from haliax_fp8.recipes import (
    E2M1,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    BlockScaling,
    CurrentScaling,
    MXFP8Scaling,
    OperandUse,
    RowwiseScaling,
)


FNUZ = {"forward": E4M3FNUZ, "backward": E5M2FNUZ}
E4M3 = {"forward": fp8.recipes.E4M3, "backward": fp8.recipes.E4M3}
FORMATS = {"fnuz": FNUZ, "E4M3": E4M3}
# scaling, and its reference for operands whose last axis is contracted
SCALINGS = {
    "current": (CurrentScaling(), reference.current),
    "rowwise": (RowwiseScaling(), reference.rowwise),
    "1x128": (BlockScaling(), reference.block),
    "mxfp8": (MXFP8Scaling(), reference.mxfp8),
}

over_formats = pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)


def tensors():
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in ((24, 160), (160, 32), (24, 32)))


@pytest.mark.parametrize("format", [E5M2, E4M3FNUZ, E5M2FNUZ], ids=repr)
@pytest.mark.parametrize("name", SCALINGS)
def test_data_and_scales_in_each_format_bit_for_bit(name, format):
    scaling, expected = SCALINGS[name]
    x = tensors()[0]
    x[0], x[1, 0], x[2, 5] = 0.0, -0.0, 1e-30
    data, scale = expected(x, format=format.name)
    got = jax.jit(lambda x: scaling.quantize(x, OperandUse(format, contracted=(1,))))(x)
    assert got.data.dtype == format.dtype
    np.testing.assert_array_equal(np.asarray(got.data).view(np.uint8), data.view(np.uint8))
    np.testing.assert_array_equal(got.scale, scale)


@pytest.mark.fast
@pytest.mark.parametrize("format", [E2M1, fp8.recipes.E4M3], ids=repr)
@pytest.mark.parametrize("rule", ["up", "nearest", "down"])
def test_scales_of_mxfp8_by_every_rule_of_rounding(rule, format):
    x = np.random.default_rng(0).standard_normal((200, 160)).astype(np.float32)
    x[0], x[1, :32], x[2, 40], x[3] = 0.0, 1e-30, np.inf, np.ldexp(x[3], 110)
    # Amaxes where the rules change over, and their neighbours.
    for row, edge in enumerate((1.0, 1.5, 1.75, 2.0), start=10):
        below, above = (np.nextafter(np.float32(edge), np.float32(towards)) for towards in (0.0, 3.0))
        x[row, :128] = np.repeat([edge, below, above, -edge], 32)
    scaling = MXFP8Scaling(scale_rounding=rule)
    got = jax.jit(lambda x: scaling.quantize(x, OperandUse(format, contracted=(1,))))(x)
    data, scale = reference.mxfp8(x, format=format.name, scale_rounding=rule)
    normal = ~(np.abs(scale) < np.finfo(np.float32).tiny)
    np.testing.assert_array_equal(np.asarray(got.scale)[normal], scale[normal])
    # E2M1 has no NaN.
    finite = np.repeat(np.isfinite(scale), 32, axis=1)
    np.testing.assert_array_equal(np.asarray(got.data, np.float32)[finite], data.astype(np.float32)[finite])


def test_an_unknown_rule_of_rounding_is_named():
    with unchecked(), pytest.raises(ValueError, match="scale_rounding='floor'.*'nearest'"):
        MXFP8Scaling(scale_rounding="floor")


@state_is_constant
@pytest.mark.more
@over_formats
def test_the_three_products_are_those_of_the_quantized_operands(formats):
    """Delayed scaling after one step: scales are amax over the format's largest value."""
    x, w, c = map(jnp.asarray, tensors())
    recipe = fp8.Recipe.of(fp8.DelayedScaling(amax_history_length=4), **formats)
    op = fp8.calibrate(fp8.Fp8DotGeneral.init(recipe), loss, [(x, w, c)])
    values = []
    for a, q, operand in zip((x, w, c), recipe.operands, ("input", "kernel", "output_grad"), strict=True):
        scale = np.asarray(op.scale(operand))
        np.testing.assert_allclose(scale, np.abs(a).max() / q.format.max, rtol=2 * EPS)
        values.append(reference.cast(np.asarray(a) / scale, q.format.name).astype(np.float64) * scale)
    out, pullback = jax.vjp(lambda x, w: op(x, w, MATRIX), x, w)
    expected, magnitudes = products(*values, MATRIX), products(*map(np.abs, values), MATRIX)
    for got, exact, magnitude in zip((out, *pullback(c)), expected, magnitudes, strict=True):
        assert_within(got, exact, (160 + 4) * EPS * magnitude)


@pytest.mark.parametrize("name, scaling", [("fnuz", fp8.DelayedScaling()), ("E4M3", RowwiseScaling())])
def test_a_model_trains(name, scaling):
    formats = FORMATS[name]
    recipe = fp8.Recipe.of(scaling, **formats)
    assert [q.format for q in recipe.operands] == [formats["forward"]] * 2 + [formats["backward"]]
    model = fp8.fp8_linear_layers(eqx.nn.MLP(16, 8, 32, 1, key=jax.random.key(0)), fp8.Fp8Config(recipe=recipe))
    x = jax.random.normal(jax.random.key(1), (32, 16))
    step = fp8.TrainStep(lambda model, x: ((jax.vmap(model)(x) - x[:, :8]) ** 2).mean(), optax.sgd(0.3))
    opt_state, losses = step.init(model), []
    for _ in range(20):
        model, opt_state, metrics = step(model, opt_state, x)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]


def test_gradients_in_e4m3_are_nearer_than_in_e5m2():
    """One more bit of significand: 6 dB, where one scale serves the tensor and nothing underflows."""
    x, w, c = map(jnp.asarray, tensors())
    exact = np.asarray(c, np.float64) @ np.asarray(w, np.float64).T
    errors = []
    for backward in (E5M2, fp8.recipes.E4M3):
        op = fp8.Fp8DotGeneral.init(fp8.Recipe.of(CurrentScaling(), backward=backward))
        errors.append(np.linalg.norm(jax.grad(loss, 1)(op, x, w, c) - exact))
    # The kernel's error, E4M3's in both, is half of the second: a factor of sqrt((4 + 1) / 2).
    assert errors[0] / errors[1] == pytest.approx(np.sqrt(2.5), rel=0.1)
