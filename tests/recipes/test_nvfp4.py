"""NVFP4: the 4-bit format, its scales and data bit for bit, the rotation, and which product it enters."""

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import recipe_reference as reference
from helpers import equations, rounded_up, sqnr, unchecked

import haliax_fp8 as fp8
from haliax_fp8._numerics.rounding import Rotation
from haliax_fp8.recipes import (
    E2M1,
    E4M3,
    CurrentScaling,
    HadamardScaling,
    HighPrecision,
    Members,
    NVFP4Scaling,
    OperandUse,
    Quantization,
    Rounding,
)
from haliax_fp8.statistics import Problem, Remedy, apply_remedies, diagnose, quantization_statistics


MATRIX = (((1,), (0,)), ((), ()))
KEY = jax.random.key(7)
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])

RECIPE = fp8.recipes.named["nvfp4"]
ROWS = dataclasses.replace(RECIPE, input=Quantization(E2M1, NVFP4Scaling(per_row=True)))
UNROTATED = dataclasses.replace(RECIPE, input_for_wgrad=None, output_grad_for_wgrad=None)


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- E2M1 -------------------------------------------------------------------------------------------------------------


def test_e2m1_has_the_values_of_ml_dtypes():
    codes = np.arange(16, dtype=np.uint8)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    np.testing.assert_array_equal(values, np.concatenate([E2M1_VALUES, -E2M1_VALUES]))
    format = E2M1
    assert (format.max, format.smallest_normal, format.smallest_subnormal) == (6.0, 1.0, 0.5)
    assert format.mantissa_bits == 1
    # The container holds them all.
    np.testing.assert_array_equal(values.astype(format.storage).astype(np.float64), values)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_e2m1_rounds_to_the_nearest_value_and_ties_to_the_even_code(dtype):
    ties = (E2M1_VALUES[1:] + E2M1_VALUES[:-1]) / 2
    # Codes 0 to 7 in order: each tie goes to the neighbour with the even one.
    of_ties = np.where(np.arange(7) % 2 == 0, E2M1_VALUES[:-1], E2M1_VALUES[1:])
    np.testing.assert_array_equal(of_ties, [0, 1, 1, 2, 2, 4, 4])
    off = float(jnp.finfo(dtype).eps)
    x = np.concatenate([E2M1_VALUES, ties, ties * (1 - off), ties * (1 + off), [6.9, 7.0, 8.0, 1e4, np.inf]])
    expected = np.concatenate([E2M1_VALUES, of_ties, E2M1_VALUES[:-1], E2M1_VALUES[1:], [6.0] * 5])
    x, expected = np.concatenate([x, -x]), np.concatenate([expected, -expected])
    got = jax.jit(lambda x: fp8.recipes.saturating_cast(x, E2M1))(jnp.asarray(x, dtype))
    assert got.dtype == E2M1.storage
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), expected)
    np.testing.assert_array_equal(np.signbit(np.asarray(got).astype(np.float32)), np.signbit(expected))


def test_e2m1_is_the_cast_of_ml_dtypes():
    x = np.concatenate([normal(4000) * 3, np.linspace(-6.5, 6.5, 2001, dtype=np.float32)])
    expected = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(fp8.recipes.saturating_cast(jnp.asarray(x), E2M1).astype(jnp.float32), expected)
    assert np.isnan(np.asarray(fp8.recipes.saturating_cast(jnp.array([jnp.nan]), E2M1)).astype(np.float32)).all()


# --- Scales and data --------------------------------------------------------------------------------------------------


def matrices():
    plain, rng = normal((96, 128)), np.random.default_rng(1)
    special = {name: plain[:20, :40].copy() for name in ("inf", "nan")}
    special["inf"][3, 17], special["inf"][4, 0], special["nan"][2, 5] = np.inf, -np.inf, np.nan
    outlier = plain.copy()
    outlier[0, 0] = 3e5
    return {
        "normal": plain,
        "cut by the edge": plain[:37, :53],
        "shorter than a block": plain[:5, :7],
        "one element": plain[:1, :1],
        "one negative zero": np.full((1, 1), -0.0, np.float32),
        "zeros": np.zeros((17, 33), np.float32),
        "rows of zeros": plain * (np.arange(96) % 3 == 0)[:, None].astype(np.float32),
        "blocks too small for their scales": outlier,
        "magnitudes from 2**-60 to 2**60": plain * np.exp2(rng.integers(-60, 60, plain.shape)).astype(np.float32),
        "tiny": plain[:8] * np.float32(1e-31),
        "huge": np.clip(plain[:8], -3, 3) * np.float32(1e38),
        "bfloat16": plain.astype(ml_dtypes.bfloat16),
        "subnormal in float16": (plain[:20] * 2e-6).astype(np.float16),
        **special,
    }


MATRICES = matrices()


@pytest.mark.parametrize("square", [False, True], ids=["1x16", "16x16"])
def test_data_and_scales_equal_the_reference_bit_for_bit(square):
    scaling = NVFP4Scaling(square=square)
    quantize = jax.jit(lambda x: scaling.quantize(x, OperandUse(E2M1, contracted=(1,))))
    for x in MATRICES.values():
        data, scale = reference.nvfp4(x, rows=16 if square else 1)
        got = quantize(x)
        # Under a scale of NaN, which is that of a whole block, the data say nothing.
        nan = np.isnan(reference.expand(scale, x.shape, 16 if square else 1, 16))
        np.testing.assert_array_equal(np.asarray(got.data).view(np.uint8)[~nan], data.view(np.uint8)[~nan])
        np.testing.assert_array_equal(got.scale, scale)


def test_with_per_row_each_row_is_quantized_as_a_tensor():
    quantize = jax.jit(lambda x: NVFP4Scaling(per_row=True).quantize(x, OperandUse(E2M1, contracted=(1,))))
    for x in MATRICES.values():
        got, rows = quantize(x), [reference.nvfp4(row[None]) for row in x]
        assert got.tensor_scale.shape == (len(x), 1)
        data, scale = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        nan = np.isnan(reference.expand(scale, x.shape, 1, 16))
        np.testing.assert_array_equal(np.asarray(got.data).view(np.uint8)[~nan], data.view(np.uint8)[~nan])
        np.testing.assert_array_equal(got.scale, scale)
    # Several axes are summed, or are rows; and the kernel keeps blocks that both of its products take.
    x = jnp.asarray(normal((3, 4, 5, 32)))
    scale = NVFP4Scaling(per_row=True).quantize(x, OperandUse(E2M1, contracted=(1, 3))).tensor_scale
    np.testing.assert_allclose(scale, np.abs(x).max((1, 3), keepdims=True) / np.float32(448 * 6), rtol=1e-6)
    assert fp8.Recipe.of(NVFP4Scaling(per_row=True)).kernel.scaling == NVFP4Scaling(square=True)


@pytest.mark.more
def test_each_member_of_an_ensemble_has_a_tensor_scale_of_its_own():
    x = np.stack([normal((8, 32), seed) * 10.0**seed for seed in range(3)]).astype(np.float32)
    got = NVFP4Scaling().quantize(jnp.asarray(x), OperandUse(E2M1, contracted=(2,), members=Members(1)))
    for member, (data, scale) in enumerate(zip(got.data, got.scale, strict=True)):
        expected = reference.nvfp4(x[member])
        np.testing.assert_array_equal(np.asarray(data).view(np.uint8), expected[0].view(np.uint8))
        np.testing.assert_array_equal(scale, expected[1])


def test_block_scales_are_e4m3_multiples_of_one_number():
    x = MATRICES["normal"]
    scale = np.asarray(
        NVFP4Scaling().quantize(jnp.asarray(x), OperandUse(E2M1, (1,))).scale,
        np.float64,
    )
    in_e4m3 = scale / (np.abs(x).max() / (448.0 * 6.0))
    np.testing.assert_allclose(in_e4m3, in_e4m3.astype(ml_dtypes.float8_e4m3fn).astype(np.float64), rtol=1e-6)
    assert in_e4m3.max() == pytest.approx(448.0)


@pytest.mark.parametrize("bits", [1, 7])
def test_in_bfloat16_the_tensor_scale_is_rounded_up(bits):
    """To so many significant bits; the blocks' scales are in E4M3 as before, and none of them is clipped."""
    x = MATRICES["normal"]
    got = NVFP4Scaling().quantize(jnp.asarray(x), OperandUse(E2M1, (1,), scale_bits=bits))
    exact = np.abs(x).max().astype(np.float64) / (448.0 * 6.0)
    tensor_scale = float(got.tensor_scale[0, 0])
    assert got.tensor_scale_bits == bits and tensor_scale == rounded_up(exact, bits)
    in_e4m3 = (np.asarray(got.scale, np.float64) / tensor_scale).astype(ml_dtypes.float8_e4m3fn)
    target = np.abs(by_blocks(x, 1)).max(axis=1) / 6.0 / tensor_scale
    np.testing.assert_array_equal(in_e4m3.ravel(), target.astype(ml_dtypes.float8_e4m3fn))
    np.testing.assert_allclose(got.scale, in_e4m3.astype(np.float64) * tensor_scale, rtol=2.0**-23)


DELAYED = NVFP4Scaling(delayed=fp8.DelayedScaling(amax_history_length=4))


@pytest.mark.parametrize("square", [False, True], ids=["1x16", "16x16"])
@pytest.mark.parametrize("below", [1.0, 1.75, 4.0])
def test_with_a_stored_scale_of_the_tensor_data_equal_the_reference(below, square):
    """The largest block scale is 256 where the amax is as before, 448 where it is 1.75 times as large; then clipped."""
    x, rows = MATRICES["normal"], 16 if square else 1
    stored = np.abs(x).max() / np.float32(6.0 * below)
    scaling = dataclasses.replace(DELAYED, square=square)
    got = scaling.quantize(jnp.asarray(x), OperandUse(E2M1, (1,), stored_scale=jnp.float32(stored)))
    unit = stored.astype(np.float64) / 256.0
    exact = np.abs(by_blocks(x, rows)).max(axis=1).reshape(got.scale.shape) / 6.0 / unit
    scale = np.minimum(exact, 448.0).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_allclose(got.scale, scale * unit, rtol=2.0**-22)
    assert scale.max() == {1.0: 256.0, 1.75: 448.0, 4.0: 448.0}[below]
    scaled = x / reference.expand((scale * unit).astype(np.float32), x.shape, rows, 16)
    data = np.clip(scaled, -6.0, 6.0).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    # A quotient beside the middle of two neighbours may differ in its last bit.
    assert np.mean(np.asarray(got.data, np.float32) != data) < 1e-3
    assert float(got.amax[0, 0]) == np.abs(x).max()


def test_a_stored_scale_holds_what_a_rotation_makes_of_an_operand():
    """The amax grows at most fourfold: here it does, and nothing is clipped."""
    signs = np.sign(np.asarray(Rotation(1, 16).undo(jnp.ones((1, 16)).at[:, 1:].set(0.0))))
    x = jnp.asarray(np.float32(3.0) * np.tile(signs, (4, 2)))
    use = OperandUse(E2M1, (1,), stored_scale=jnp.float32(0.5))
    got = HadamardScaling(DELAYED).quantize(x, use)
    assert float(np.abs(got.dequantize_rotated()).max()) == 12.0
    np.testing.assert_allclose(got.dequantize(), x, rtol=1e-6)
    assert float(got.tensor_scale.squeeze()) == 2.0 / 256.0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_step_that_is_not_finite_leaves_the_stored_scale(value):
    """And the next step is as if it had not been."""
    layer = fp8.fp8_linear_layers(eqx.nn.Linear(32, 32, key=jax.random.key(0)), recipe="nvfp4_delayed")
    x = jnp.asarray(normal((48, 32)))
    loss = lambda layer, x: (jax.vmap(fp8.with_rounding_keys(layer, KEY))(x) ** 2).sum()
    step = jax.jit(lambda layer, x: fp8.partition_for_grad_overwrite(fp8.filter_grad(loss)(layer, x)))
    scales = []
    for data in (x, 2 * x, x.at[3, 4].set(value)):
        overwrites, gradients = step(layer, data)
        layer = fp8.apply_updates(layer, jax.tree.map(jnp.zeros_like, gradients), overwrites)
        scales.append(float(layer.dot_general.scale("input")))
    np.testing.assert_allclose(scales[0], np.abs(x).max() / 6.0, rtol=1e-6)
    assert scales == [scales[0], 2 * scales[0], 2 * scales[0]]
    assert float(layer.dot_general.amax_history("input")[0]) == 2 * np.abs(x).max()


def test_a_history_has_the_length_that_a_configuration_asks_for():
    """Behind a rotation too: the operand's two uses have one state."""
    recipe = fp8.recipes.named["nvfp4_delayed"].with_amax_history_length(3)
    assert recipe.input.scaling.delayed == fp8.DelayedScaling(amax_history_length=3)
    assert recipe.input_for_wgrad.scaling.scaling == recipe.input.scaling
    with pytest.raises(ValueError, match=r"operands='input' of with_delayed has 'i'; list some of \('input'"):
        recipe.with_delayed(lambda delayed: delayed, "input")
    layer = fp8.fp8_linear_layers(
        eqx.nn.Linear(16, 16, key=jax.random.key(0)), recipe="nvfp4_delayed", amax_history_length=3
    )
    assert layer.dot_general.amax_history("kernel").shape == (3,)


def test_who_reads_a_history_reads_that_of_a_tensor_scale():
    """The description, the metrics of a step, the diagnosis and its remedies."""
    mlp = eqx.nn.MLP(32, 32, 32, 1, key=jax.random.key(0))
    model = fp8.fp8_linear_layers(mlp, recipe="nvfp4_delayed", amax_history_length=4)
    no_amax = "No amax recorded yet"
    assert "delayed NVFP4Scaling" in str(model.layers[0].dot_general.recipe) and no_amax in str(fp8.describe(model))
    loss = lambda model, x: (jax.vmap(model)(x) ** 2).mean()
    step, x = fp8.TrainStep(loss, optax.sgd(0.0)), jnp.asarray(normal((48, 32)))
    model, opt_state, _ = step(model, step.init(model), x, key=KEY)
    model, _, metrics = step(model, opt_state, x, key=KEY)
    # Only rounding at random makes this gradient another than the last step's.
    assert 0.5 < metrics["output_grad_amax_ratio"] < 2.0 and no_amax not in str(fp8.describe(model))
    diagnosed = lambda model: diagnose(model, quantization_statistics(fp8.with_rounding_keys(model, KEY), loss, x))
    assert not diagnosed(model).findings
    measured = quantization_statistics(fp8.with_rounding_keys(model, KEY), loss, x)
    np.testing.assert_array_equal(measured["layers.0"].scale_age[:2], [0, 0])
    op = model.layers[0].dot_general
    # As after a spike two steps ago, which blocks follow up to a point.
    for spike, problems in ((2.0**10, []), (2.0**20, [Problem.OLD_SPIKE])):
        state = op.state.with_array(op.state.array.at[0, 4].multiply(spike))
        state = state.with_scale(state.scale.at[0].multiply(spike))
        spiked = eqx.tree_at(lambda m: m.layers[0].dot_general, model, dataclasses.replace(op, state=state))
        of_input = [f.problem for f in diagnosed(spiked).findings if (f.layer, f.operand) == ("layers.0", "input")]
        assert of_input == problems
    # As if a margin were missing.
    op = dataclasses.replace(op, state=op.state.with_scale(op.state.scale * jnp.array([0.125, 1.0, 1.0])))
    model = eqx.tree_at(lambda m: m.layers[0].dot_general, model, op)
    diagnosis = diagnosed(model)
    (finding,) = diagnosis.findings
    assert (finding.layer, finding.operand, finding.problem) == ("layers.0", "input", Problem.SATURATION)
    assert finding.remedy is Remedy.MARGIN
    mended = apply_remedies(model, diagnosis).layers[0].dot_general
    assert mended.recipe.input.scaling.delayed.margin == mended.recipe.input_for_wgrad.scaling.scaling.delayed.margin
    assert (mended.recipe.input.scaling.delayed.margin, op.recipe.input.scaling.delayed.margin) == (1, 0)
    np.testing.assert_array_equal(mended.scale("input"), op.scale("input"))


def by_blocks(x, rows):
    """Of each block of 16 along the last axis, all elements: `[blocks, elements]`."""
    parts = reference.blocks(np.asarray(x, np.float64), rows, 16)
    return parts.transpose(0, 2, 1, 3).reshape(-1, rows * 16)


def scaling_and_use(rounding, square=False, **options):
    use = OperandUse(E2M1, (1,), rounding=rounding, key=KEY)
    return NVFP4Scaling(square=square, **options), use


@pytest.mark.more
@pytest.mark.parametrize("square", [False, True], ids=["1x16", "16x16"])
def test_block_scales_are_rounded_up_where_rounding_is_random(square):
    """To the smallest value of E4M3 that clips nothing."""
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scaling, use = scaling_and_use(Rounding.STOCHASTIC, square)
    for name in ("normal", "cut by the edge", "rows of zeros", "blocks too small for their scales", "bfloat16"):
        x = MATRICES[name]
        scale = np.asarray(scaling.quantize(jnp.asarray(x), use).scale, np.float64).ravel()
        amax = np.abs(by_blocks(x, 16 if square else 1)).max(axis=1)
        unit = np.abs(x.astype(np.float64)).max() / (448.0 * 6.0)
        expected = codes[np.searchsorted(codes, amax / 6.0 / unit * (1 - 1e-6))]
        np.testing.assert_allclose(scale / unit, expected, rtol=1e-6, err_msg=name)
        assert (amax <= 6.0 * scale * (1 + 1e-6)).all(), name


def squared_errors(x, q, rounding, rows):
    """Of each block, from the values of E2M1: of rounding to nearest what it is, of random rounding the variance."""
    scale = reference.expand(np.asarray(q.scale, np.float64), x.shape, rows, 16)
    if rounding is Rounding.TO_NEAREST:
        errors = (np.asarray(q.data, np.float64) * scale - x) ** 2
    else:
        magnitude = np.clip(np.abs(x) / np.where(scale > 0, scale, 1.0), 0.0, 6.0)
        above = np.clip(np.searchsorted(E2M1_VALUES, magnitude), 1, 7)
        lower, upper = E2M1_VALUES[above - 1], E2M1_VALUES[above]
        errors = (upper - magnitude) * (magnitude - lower) * scale**2 + (np.abs(x) - magnitude * scale) ** 2
    return by_blocks(errors, rows).sum(axis=1)


@pytest.mark.parametrize("rounding", [Rounding.TO_NEAREST, Rounding.STOCHASTIC], ids=["nearest", "random"])
@pytest.mark.parametrize("square", [False, True], ids=["1x16", "16x16"])
def test_no_block_is_worse_with_four_over_six(square, rounding):
    rows = 16 if square else 1
    arrays = {name: MATRICES[name] for name in ("normal", "blocks too small for their scales", "rows of zeros")}
    arrays["wide"] = MATRICES["magnitudes from 2**-60 to 2**60"]
    arrays |= {f"t {seed}": np.random.default_rng(seed).standard_t(2, (96, 128)) for seed in range(5)}
    arrays["of few values"] = np.random.default_rng(9).choice([0.0, 1.0, 2.0, 3.0, 4.0, 4.5, 5.0, 6.0], (96, 128))
    for name, x in arrays.items():
        x = x.astype(np.float32)
        plain, better = (
            squared_errors(x.astype(np.float64), s.quantize(jnp.asarray(x), use), rounding, rows)
            for s, use in (scaling_and_use(rounding, square, four_over_six=four) for four in (False, True))
        )
        # Scales and scaled values are rounded to float32.
        amax = np.abs(by_blocks(x, rows)).max(axis=1)
        assert (better <= plain + 1e-13 * rows * 16 * amax**2).all(), name
        # Of 256 normal values the largest is alone, and 6 as good as always better.
        if name == "normal" and not square:
            assert better.sum() < 0.95 * plain.sum()


@pytest.mark.more
def test_four_over_six_chooses_between_two_scales_and_takes_four_where_it_fits():
    """30 of 40 is 4.5 of 6, which E2M1 has not, and 3 of 4."""
    x = np.zeros((3, 16), np.float32)
    x[0, :4], x[1, :4], x[2, 0] = [10, 20, 30, 40], [10, 15, 20, 60], 6 * 448
    scaling, use = scaling_and_use(Rounding.TO_NEAREST, four_over_six=True)
    got = scaling.quantize(jnp.asarray(x), use)
    np.testing.assert_array_equal(got.scale[:, 0], [10.0, 10.0, 448.0])
    np.testing.assert_array_equal(got.dequantize()[:2], x[:2])
    # Beside the tensor's amax there is no choice: half as much again is beyond E4M3.
    x[0] *= 60.0
    assert float(scaling.quantize(jnp.asarray(x), use).scale[0, 0]) == 384.0


# --- Rows apart -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outlier", [2.0, 1e4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_with_per_row_no_row_of_fprop_depends_on_others(dtype, outlier):
    """Bit for bit: in a part of the batch, alone, under vmap and in a scan. With one scale for all, rows do."""
    x = jnp.asarray(normal((64, 96)), dtype).at[40].multiply(outlier)
    w = jnp.asarray(normal((96, 48), 1), dtype)
    rows, all_alike = (fp8.Fp8DotGeneral.init(recipe) for recipe in (ROWS, RECIPE))
    multiply = jax.jit(lambda x, op=rows: op(x, w, MATRIX))
    together = multiply(x)
    for part in (slice(0, 16), slice(3, 4), slice(39, 41)):
        np.testing.assert_array_equal(multiply(x[part]), together[part])
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda row: multiply(row[None])[0]))(x), together)
    _, scanned = jax.lax.scan(lambda _, part: (None, multiply(part)), None, x.reshape(4, 16, 96))
    np.testing.assert_array_equal(scanned.reshape(64, 48), together)
    if dtype == jnp.float32 or outlier > 2.0:
        of_all = jax.jit(lambda x: all_alike(x, w, MATRIX))
        assert (np.asarray(of_all(x[:16])) != np.asarray(of_all(x)[:16])).any(axis=1).sum() > 5


def test_gradients_with_per_row():
    """Exactly those of the operands quantized in NumPy: a scale for each row of dgrad, and each column of wgrad."""
    x, w, g = normal((48, 64)), normal((64, 32), 1), normal((48, 32), 2)
    x[7], g[:, 3] = x[7] * 1e3, g[:, 3] * 1e3

    def by_rows(a):
        parts = [reference.nvfp4(row[None]) for row in a]
        return np.concatenate(
            [data.astype(np.float64) * reference.expand(s, (1, a.shape[1]), 1, 16) for data, s in parts]
        )

    data, scale = reference.nvfp4(w, rows=16)
    kernel = data.astype(np.float64) * reference.expand(scale, w.shape, 16, 16)
    op = fp8.Fp8DotGeneral.init(fp8.Recipe.of(NVFP4Scaling(per_row=True), forward=E2M1))
    dx, dw = jax.jit(lambda x, w: jax.vjp(lambda x, w: op(x, w, MATRIX), x, w)[1](g))(x, w)
    for got, expected in ((dx, by_rows(g) @ kernel.T), (dw, by_rows(x.T) @ by_rows(g.T).T)):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


# --- Unbiased ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operands", ["normal", "of unlike sizes"])
@pytest.mark.parametrize("four_over_six", [False, True], ids=["6", "4 or 6"])
def test_gradients_are_unbiased(operands, four_over_six):
    """The mean over keys regressed on the product of the unrounded gradient with the other operand as quantized.

    With block scales rounded to nearest the slope was 0.9965, 14 standard errors below 1 with normal operands.
    """
    rng = np.random.default_rng(0)
    x, w, g = (rng.standard_normal(shape) for shape in ((256, 128), (128, 96), (256, 96)))
    if operands == "of unlike sizes":
        x, w = x * np.exp(0.8 * rng.standard_normal(128)), rng.standard_t(5, w.shape)
        g = rng.standard_t(4, g.shape) * np.exp(0.5 * rng.standard_normal((256, 1))) * 1e-6
    x, w, g = (jnp.asarray(a, jnp.float32) for a in (x, w, g))
    change = lambda s: dataclasses.replace(s, four_over_six=four_over_six)
    rotated = HadamardScaling(change(RECIPE.input.scaling))
    recipe = dataclasses.replace(
        RECIPE,
        output_grad=dataclasses.replace(RECIPE.output_grad, scaling=change(RECIPE.output_grad.scaling)),
        output_grad_for_wgrad=dataclasses.replace(RECIPE.output_grad_for_wgrad, scaling=rotated),
    )
    op = fp8.Fp8DotGeneral.init(recipe)

    @jax.jit
    def gradients(key, x, w, g):
        return jax.vjp(lambda x, w: fp8.with_rounding_keys(op, key)(x, w, MATRIX), x, w)[1](g)

    quantized = lambda q, a, axis: np.asarray(q.scaling.quantize(a, OperandUse(q.format, (axis,))).dequantize())
    exact = np.asarray(g, np.float64) @ quantized(recipe.kernel, w, 1).T.astype(np.float64)
    exact = exact, quantized(recipe.input_for_wgrad, x, 0).T.astype(np.float64) @ np.asarray(g, np.float64)
    slopes = []
    for seed in range(40):
        got = gradients(jax.random.key(seed), x, w, g)
        slopes.append([(np.asarray(a, np.float64) * e).sum() / (e * e).sum() for a, e in zip(got, exact, strict=True)])
    error = np.std(slopes, axis=0, ddof=1) / np.sqrt(len(slopes))
    assert (np.abs(np.mean(slopes, axis=0) - 1.0) < 4.0 * error).all(), (np.mean(slopes, axis=0), error)
    assert operands != "normal" or (error < 0.0035 / 10).all()


def of_kind(kind, shape, seed):
    rng = np.random.default_rng(seed)
    match kind:
        case "heavy-tailed":
            return rng.standard_t(3, shape)
        case "sparse":
            return rng.standard_normal(shape) * (rng.random(shape) < 0.1)
        case "constant":
            return np.full(shape, 0.7)
    return rng.standard_normal(shape)


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "sparse", "constant"])
def test_wgrad_of_two_operands_rounded_at_random(kind):
    """Slope 1, the error that the values of E2M1 imply, and nothing left in the mean over draws.

    Of the recipe as it is, whose input is rounded to nearest, a fifth to a third of the squared error is bias.
    """
    draws, (rows, inputs, outputs) = 200, (80, 64, 48)
    x, g = of_kind("normal" if kind == "heavy-tailed" else kind, (rows, inputs), 1), of_kind(kind, (rows, outputs), 2)
    x, g, w = (jnp.asarray(a, jnp.float32) for a in (x, g, np.zeros((inputs, outputs))))
    of_input = dataclasses.replace(RECIPE.input_for_wgrad, rounding=Rounding.STOCHASTIC)
    keys = jax.random.split(KEY, draws)

    def wgrads(recipe):
        op = fp8.Fp8DotGeneral.init(recipe)
        one = lambda key: jax.vjp(lambda w: fp8.with_rounding_keys(op, key)(x, w, MATRIX), w)[1](g)[0]
        return np.asarray(jax.jit(lambda keys: jax.lax.map(one, keys))(keys), np.float64)

    exact = np.asarray(x, np.float64).T @ np.asarray(g, np.float64)
    size = (exact**2).sum()
    got = wgrads(dataclasses.replace(RECIPE, input_for_wgrad=of_input))
    slopes, errors = (got * exact).sum((1, 2)) / size, ((got - exact) ** 2).sum((1, 2)) / size
    assert abs(slopes.mean() - 1.0) <= 4.0 * slopes.std() / np.sqrt(draws) + 1e-6
    # A mean over draws has an error of 1 / draws; as many independent elements as the shorter side bound its spread.
    of_mean = ((got.mean(0) - exact) ** 2).sum() / size
    assert of_mean <= errors.mean() / draws * (1 + 4 * np.sqrt(2 / outputs)) + 1e-12
    # Rotated, elements are rounded independently: Var(u'v) = sum of g² Var(x) + x² Var(g) + Var(x) Var(g).
    values, variances = [], []
    for a in (x, g):
        rotated = np.asarray(Rotation(axis=0, length=rows).apply(a)).T
        scaling, use = scaling_and_use(Rounding.STOCHASTIC)
        scale = reference.expand(
            np.asarray(scaling.quantize(jnp.asarray(rotated), use).scale, np.float64), rotated.shape, 1, 16
        )
        magnitude = np.abs(rotated) / np.where(scale > 0, scale, 1.0)
        above = np.clip(np.searchsorted(E2M1_VALUES, magnitude), 1, 7)
        values.append(rotated.astype(np.float64) ** 2)
        variances.append((E2M1_VALUES[above] - magnitude) * (magnitude - E2M1_VALUES[above - 1]) * scale**2)
    expected = (variances[0] @ values[1].T + values[0] @ variances[1].T + variances[0] @ variances[1].T).sum() / size
    assert abs(errors.mean() - expected) <= 5.0 * errors.std() / np.sqrt(draws) + 1e-4 * expected + 1e-9
    today = wgrads(RECIPE)
    biased = ((today.mean(0) - exact) ** 2).sum() / ((today - exact) ** 2).sum((1, 2)).mean()
    assert kind == "constant" or 0.1 < biased < 0.4


# --- Rotation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis, length", [(0, 16), (1, 48), (0, 20), (1, 5), (2, 1)])
def test_rotation_is_orthogonal(axis, length):
    shape = tuple(length if i == axis else 3 for i in range(3))
    x, rotation = normal(shape), Rotation(axis=axis, length=length)
    rotated = rotation.apply(jnp.asarray(x))
    assert rotated.shape[axis] == -(-length // 16) * 16
    # 16 terms of quarters: each sum is off by at most 16 eps of the sum of magnitudes.
    bound = 16 * np.finfo(np.float32).eps * 16 * np.abs(x).max()
    np.testing.assert_allclose(
        (np.asarray(rotated, np.float64) ** 2).sum(), (x.astype(np.float64) ** 2).sum(), rtol=1e-5
    )
    np.testing.assert_allclose(rotation.undo(rotated), x, rtol=0, atol=bound)


def test_rotation_is_one_matrix_of_quarters_for_every_group():
    rotated = np.asarray(Rotation(axis=0, length=48).apply(jnp.eye(48)), np.float64)
    matrix = rotated[:16, :16]  # column j is the image of the unit vector j
    np.testing.assert_array_equal(np.abs(matrix), np.full((16, 16), 0.25))
    np.testing.assert_array_equal(matrix.T @ matrix, np.eye(16))
    np.testing.assert_array_equal(rotated, np.kron(np.eye(3), matrix))
    # Random signs: a constant does not all go into one element.
    assert np.abs(matrix.sum(axis=1)).max() < 4.0


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_bfloat16_is_rotated_in_bfloat16(axis):
    """Of whole numbers each sum is exact in float32, and is rounded once."""
    x = np.random.default_rng(0).integers(-100, 100, (32, 32, 32))
    matrix = np.asarray(Rotation(axis=0, length=16).apply(jnp.eye(16)), np.float64)
    groups = np.moveaxis(x, axis, -1).reshape(32, 32, 2, 16) @ matrix.T
    expected = np.moveaxis(groups.reshape(32, 32, 32), -1, axis).astype(ml_dtypes.bfloat16)
    got = Rotation(axis=axis, length=32).apply(jnp.asarray(x, jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got), expected)


@pytest.mark.parametrize("rows", [64, 37])
def test_a_product_of_rotated_operands_is_the_product(rows):
    """Bounded by float32's rounding of the rotation, 16 terms of each factor."""
    x, g = normal((rows, 24)), normal((rows, 40), 1)
    rotation = Rotation(axis=0, length=rows)
    a, b = (np.asarray(rotation.apply(jnp.asarray(m)), np.float64) for m in (x, g))
    exact = x.T.astype(np.float64) @ g.astype(np.float64)
    bound = 2 * 16 * np.finfo(np.float32).eps * (np.abs(a).T @ np.abs(b) + np.abs(x).T @ np.abs(g))
    assert (np.abs(a.T @ b - exact) <= bound).all()


def test_of_several_summed_axes_the_last_is_rotated():
    """It is the one that lies together in memory, and blocks run along it; the first may be a few sequences."""
    x = jnp.asarray(normal((3, 32, 8)))
    use = OperandUse(E4M3, (0, 1))
    quantized = HadamardScaling(CurrentScaling(), padding=False).quantize(x, use)
    assert quantized.rotation == Rotation(axis=1, length=32)


def test_rotation_spreads_an_outlier():
    x = np.full(16, 0.01, np.float32)
    x[5] = 8.0
    rotated = np.asarray(Rotation(axis=0, length=16).apply(jnp.asarray(x)))
    assert np.abs(rotated).max() / np.abs(rotated).min() < 1.1  # 800 before


# --- Which product ----------------------------------------------------------------------------------------------------


def keyed(recipe):
    return fp8.with_rounding_keys(fp8.Fp8DotGeneral.init(recipe), KEY)


def problem():
    return tuple(jnp.asarray(normal(shape, seed)) for seed, shape in enumerate([(48, 64), (64, 32), (48, 32)]))


def gradients(op, x, w, c):
    return jax.jit(jax.grad(lambda x, w: (c * op(x, w, MATRIX)).sum(), (0, 1)))(x, w)


@pytest.mark.more
def test_wgrad_is_rotated_and_no_other_product():
    x, w, c = problem()
    rotated, unrotated = keyed(RECIPE), keyed(UNROTATED)
    np.testing.assert_array_equal(rotated(x, w, MATRIX), unrotated(x, w, MATRIX))
    (dx, dw), (dx_unrotated, dw_unrotated) = gradients(rotated, x, w, c), gradients(unrotated, x, w, c)
    np.testing.assert_array_equal(dx, dx_unrotated)
    assert not np.array_equal(dw, dw_unrotated)
    # Two rotations in the program of all gradients, one for each of wgrad's operands, and none without.
    sizes = []
    for op in (rotated, unrotated):
        program = jax.make_jaxpr(lambda x, w, op=op: gradients(op, x, w, c))(x, w)
        scopes = [str(e.source_info.name_stack) for e in equations(program) if e.primitive.name == "dot_general"]
        sizes.append(sum("rotation" in scope for scope in scopes))
    assert sizes == [2, 0]


@pytest.mark.more
def test_forward_mode_of_a_rotated_recipe_is_the_exact_derivative_within_rounding():
    """Rounding is taken as the identity: `dx·q(w) + q(x)·dw`, each operand rotated back."""
    x, w, _ = problem()
    dx, dw = jnp.asarray(normal(x.shape, 5)), jnp.asarray(normal(w.shape, 6))
    _, got = jax.jit(lambda *a: jax.jvp(lambda x, w: keyed(RECIPE)(x, w, MATRIX), a[:2], a[2:]))(x, w, dx, dw)
    exact = np.asarray(dx, np.float64) @ np.asarray(w) + np.asarray(x, np.float64) @ np.asarray(dw)
    assert got.shape == exact.shape
    assert sqnr(exact, got) >= 18  # one rounded operand of each product: 20 dB, see `gates` in test_recipes.py
    # Batched, as Jacobians are: each direction on its own.
    directions = jnp.stack([dx, 2 * dx])
    _, both = jax.jit(jax.vmap(lambda d: jax.jvp(lambda x: keyed(RECIPE)(x, w, MATRIX), (x,), (d,))))(directions)
    np.testing.assert_allclose(both[1], 2 * both[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scaling", [CurrentScaling(), NVFP4Scaling()], ids=["one scale", "blocks"])
@pytest.mark.parametrize("rotated", ["every product", "dgrad", "fprop, whose operands gradients read"])
def test_any_product_may_be_rotated(rotated, scaling):
    """As the products of the operands in NumPy, each rotated back; also of a kernel that was quantized before."""
    x, w, g = (jnp.asarray(normal(shape, seed)) for seed, shape in enumerate([(37, 50), (50, 40), (37, 40)]))
    x, g = x.at[3, 5].set(50.0), g.at[7, 3].set(50.0)
    plain, turned = (Quantization(E4M3, s) for s in (scaling, HadamardScaling(scaling)))
    high = Quantization(E4M3, HighPrecision())
    recipe = {
        "every product": fp8.Recipe(turned, turned, turned),
        "dgrad": fp8.Recipe(plain, plain, turned, kernel_for_dgrad=turned, output_grad_for_wgrad=plain),
        "fprop, whose operands gradients read": fp8.Recipe(turned, turned, high),
    }[rotated]

    def values(quantization, a, axis):
        if quantization is high:
            return np.asarray(a, np.float64)
        use = OperandUse(E4M3, contracted=(axis,))
        return np.asarray(quantization.scaling.quantize(a, use).dequantize(), np.float64)

    uses = recipe.uses
    x_f, w_f = values(uses["input", "fprop"], x, 1), values(uses["kernel", "fprop"], w, 0)
    if uses["output_grad", "dgrad"] is high:
        w_d, x_w = w_f, x_f
    else:
        w_d, x_w = values(uses["kernel", "dgrad"], w, 1), values(uses["input", "wgrad"], x, 0)
    g_d, g_w = values(uses["output_grad", "dgrad"], g, 1), values(uses["output_grad", "wgrad"], g, 0)
    layer = eqx.tree_at(lambda m: m.weight, eqx.nn.Linear(50, 40, use_bias=False, key=KEY), w.T)
    layer = fp8.fp8_linear_layers(layer, recipe=recipe)
    for model in (layer, fp8.quantize_kernels(layer)):
        out, back = jax.vjp(lambda x, w, m=model: jax.vmap(eqx.tree_at(lambda m: m.weight, m, w.T))(x), x, w)
        for got, expected in zip((out, *back(g)), (x_f @ w_f, g_d @ w_d.T, x_w.T @ g_w), strict=True):
            # Where the rotation is compiled, a last bit may differ, and then a rounded element.
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-3 * np.abs(expected).max())


@pytest.mark.more
def test_wgrad_of_a_grouped_product_is_left_unrotated():
    """It sums over parts of an axis: a rotation would mix rows of different groups."""
    experts, inputs, outputs, rows = (hax.Axis(n, s) for n, s in (("e", 3), ("in", 32), ("out", 48), ("rows", 40)))
    layer = hnn.MoELinear.init(experts, inputs, outputs, key=jax.random.key(0), use_bias=False)
    x, sizes = hax.random.normal(jax.random.key(1), (rows, inputs)), hax.named(jnp.array([9, 0, 26]), experts)
    c = hax.random.normal(jax.random.key(2), (rows, outputs))
    loss = lambda layer: (c * layer(x, sizes)).sum().scalar()
    found = []
    for recipe in (RECIPE, UNROTATED):
        # Keyed inside: random rounding of wgrad's operand is the same in both.
        same = dataclasses.replace(
            recipe, output_grad=dataclasses.replace(recipe.output_grad, rounding=Rounding.TO_NEAREST)
        )
        if same.output_grad_for_wgrad is not None:
            nearest = dataclasses.replace(same.output_grad_for_wgrad, rounding=Rounding.TO_NEAREST)
            same = dataclasses.replace(same, output_grad_for_wgrad=nearest)
        converted = fp8.fp8_linear_layers(layer, fp8.Fp8Config(recipe=same))
        found.append(eqx.filter_jit(fp8.filter_grad(loss))(converted).weight.array)
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(np.asarray(found[0])[[0, 2]]).max() > 0
    np.testing.assert_array_equal(found[0][1], jnp.zeros_like(found[0][1]))


# --- Refused ----------------------------------------------------------------------------------------------------------


def test_state_behind_a_rotation_is_refused():
    with pytest.raises(ValueError, match=r"scaling=DelayedScaling\(.*a scaling that measures"):
        HadamardScaling(fp8.DelayedScaling())
    other = HadamardScaling(NVFP4Scaling(delayed=fp8.DelayedScaling(amax_history_length=3)))
    recipe = fp8.recipes.named["nvfp4_delayed"]
    with pytest.raises(ValueError, match="an operand has one state"):
        dataclasses.replace(recipe, input_for_wgrad=Quantization(E2M1, other))


def test_rotating_one_operand_of_a_product_is_refused():
    rotated = Quantization(E2M1, HadamardScaling(NVFP4Scaling()))
    for field, product in (("input_for_wgrad", "wgrad"), ("kernel_for_dgrad", "dgrad"), ("input", "fprop")):
        with pytest.raises(ValueError, match=f"rotates one operand of {product}"):
            dataclasses.replace(UNROTATED, **{field: rotated})


def test_per_row_is_refused_where_a_block_has_several_rows():
    with pytest.raises(ValueError, match="per_row=True and square=True of NVFP4Scaling"):
        NVFP4Scaling(per_row=True, square=True)
    with unchecked(), pytest.raises(ValueError, match="per_row=1 of NVFP4Scaling"):
        NVFP4Scaling(per_row=1)


def test_a_stored_scale_is_refused_where_there_would_be_several():
    for name in ("per_row", "per_device"):
        with pytest.raises(ValueError, match=f"{name}=True and delayed=DelayedScaling"):
            dataclasses.replace(DELAYED, **{name: True})
    with unchecked(), pytest.raises(ValueError, match="delayed=CurrentScaling"):
        NVFP4Scaling(delayed=CurrentScaling())
    with pytest.raises(ValueError, match="use.stored_scale=None"):
        DELAYED.quantize(jnp.ones((16, 16)), OperandUse(E2M1, (1,)))
