"""What `quantization_statistics` reports, against NumPy, for every recipe and under every transformation."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recipe_reference as reference
from helpers import state_is_constant
from matrix_product import loss

import haliax_fp8 as fp8
from haliax_fp8._numerics.quantized_array import QuantizedArray
from haliax_fp8.recipes import (
    E2M1,
    E4M3,
    E4M3FNUZ,
    E5M2,
    CurrentScaling,
    HighPrecision,
    NVFP4Scaling,
    Quantization,
    StaticScaling,
)
from haliax_fp8.recipes.scaling import STATISTICS, Members, statistics_of


OPERANDS = ("input", "kernel", "output_grad")
KEY = jax.random.key(0)
FIELDS = (
    "amax",
    "saturation",
    "underflow",
    "error",
    "rms_error",
    "norm",
    "dynamic_range",
    "kurtosis",
    "nonfinite",
)


def tensors(seed=0):
    """Wide distributions, so that each format flushes something to zero."""
    rng = np.random.default_rng(seed)
    shapes = (24, 160), (160, 32), (24, 32)
    return tuple(
        (rng.standard_normal(shape) * np.exp2(rng.integers(-20, 4, shape))).astype(np.float32) for shape in shapes
    )


def expected(x, values, limit_reached):
    """The statistics in float64; of the finite elements."""
    size = x.size
    x, values, limit_reached = (a[np.isfinite(x)] for a in (x.astype(np.float64), values, limit_reached))
    centered = x - x.mean()
    return {
        "amax": np.abs(x).max(),
        "saturation": limit_reached.mean(),
        "underflow": ((values == 0) & (x != 0)).mean(),
        "error": ((x - values) ** 2).sum() / (x**2).sum(),
        "rms_error": np.sqrt(((x - values) ** 2).mean()),
        "norm": np.sqrt((x**2).sum()),
        "dynamic_range": np.log2(np.abs(x).max() / np.abs(x)[x != 0].min()),
        "kurtosis": (centered**4).mean() / (centered**2).mean() ** 2,
        "nonfinite": size - x.size,
    }


def by_blocks(x, name, operand):
    """What a recipe's values are in NumPy: which axis its blocks run along, and how long they are."""
    kernel = operand == "kernel"
    turned = x.T if kernel else x
    format = "E5M2" if operand == "output_grad" and name == "current" else "E4M3"
    if name == "current":
        data, scale = reference.current(turned, format)
        values = data.astype(np.float64) * scale
    elif name in ("rowwise", "rowwise_wgrad_bf16"):
        data, scale = reference.rowwise(turned)
        values = data.astype(np.float64) * scale
    elif name == "deepseek":
        rows = 128 if kernel else 1
        data, scale = reference.block(turned, rows=rows)
        values = data.astype(np.float64) * reference.expand(scale, turned.shape, rows, 128)
    else:
        data, scale = reference.mxfp8(turned)
        values = data.astype(np.float64) * reference.expand(scale, turned.shape, 1, 32)
    return values.T if kernel else values


def assert_statistics(got, rows):
    """`got` has a number for each operand, `rows` one dictionary for each."""
    for operand, row in enumerate(rows):
        for field in row:
            actual = float(getattr(got, field)[operand])
            # Shares are counts; errors are sums of squares in float32.
            np.testing.assert_allclose(
                actual, row[field], rtol=1e-4, atol=1e-12, err_msg=f"{OPERANDS[operand]} {field}"
            )


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["current", "rowwise", "rowwise_wgrad_bf16", "deepseek", "mxfp8"])
def test_stateless_recipes_against_numpy(name):
    arrays = tensors()
    op = fp8.Fp8DotGeneral.init(name)
    measured = eqx.filter_jit(lambda op, *a: fp8.quantization_statistics(op, loss, *a))(op, *map(jnp.asarray, arrays))
    (got,) = measured.ops.values()
    rows = [
        expected(x, by_blocks(x, name, operand), np.zeros(x.shape, bool))
        for x, operand in zip(arrays, OPERANDS, strict=True)
    ]
    assert_statistics(got, rows)
    assert any(row["underflow"] > 0 for row in rows)
    np.testing.assert_allclose(got.sqnr, [-10 * np.log10(row["error"]) for row in rows], rtol=1e-3)
    np.testing.assert_allclose(float(measured.underflow), np.mean([row["underflow"] for row in rows]), rtol=1e-5)


# Scales that are too small for some elements: these are clipped.
SCALES = (2.0**-9, 2.0**-9, 2.0**-16)


@pytest.mark.more
@pytest.mark.parametrize(
    "kind, formats",
    [
        ("delayed", ("E4M3", "E5M2")),
        ("static", ("E4M3FNUZ", "E5M2FNUZ")),
        ("static", ("E2M1", "E2M1")),
    ],
)
def test_clipped_and_flushed_elements_are_counted(kind, formats):
    forward, backward = (getattr(fp8.recipes, name) for name in formats)
    by_operand = (forward, forward, backward)
    if kind == "static":
        quantizations = [Quantization(f, StaticScaling(s)) for f, s in zip(by_operand, SCALES, strict=True)]
        op = fp8.Fp8DotGeneral.init(fp8.Recipe(*quantizations))
    else:
        op = fp8.Fp8DotGeneral.init(fp8.Recipe.of(fp8.DelayedScaling(), forward=forward, backward=backward))
        op = eqx.tree_at(lambda op: op.state, op, op.state.with_scale(jnp.array(SCALES)))
    arrays, rows = tensors(), []
    for x, scale, format in zip(arrays, SCALES, by_operand, strict=True):
        scaled = x.astype(np.float64) / scale
        values = reference.cast(scaled.astype(np.float32), format.name).astype(np.float64) * scale
        # Beyond where rounding to nearest would have stayed at the largest value, had there been a next one.
        bits = {"E4M3": 3, "E5M2": 2, "E4M3FNUZ": 3, "E5M2FNUZ": 2, "E2M1": 1}[format.name]
        half_way = format.max + 2.0 ** (np.floor(np.log2(format.max)) - bits) / 2
        top = np.abs(values) == format.max * scale
        row = expected(x, values, np.abs(scaled) > half_way)
        rows.append(row | {"scale": scale, "last_bin": top.mean()})
    (got,) = fp8.quantization_statistics(op, loss, *map(jnp.asarray, arrays)).ops.values()
    assert_statistics(got, rows)
    assert any(row["saturation"] > 0 for row in rows)


@pytest.mark.more
@pytest.mark.parametrize("format", [E4M3, E5M2, E4M3FNUZ, E2M1], ids=repr)
def test_what_rounds_to_the_maximum_is_not_clipped(format):
    half = 2.0 ** (np.floor(np.log2(format.max)) - format.mantissa_bits - 1)
    x = jnp.array([[format.max, format.max + 0.99 * half, -format.max - 0.99 * half, format.max + 1.01 * half]])
    static = Quantization(format, StaticScaling(1.0))
    op = fp8.Fp8DotGeneral.init(fp8.Recipe(static, static, static))
    (got,) = fp8.quantization_statistics(op, loss, x, jnp.ones((4, 1)), jnp.ones((1, 1))).ops.values()
    assert float(got.saturation[0]) == 0.25


@pytest.mark.more
def test_a_recipe_of_four_bits_counts_and_its_flushed_blocks_are_not_clipped():
    """A block whose scale is flushed to zero ends at the largest value times zero: underflow, not saturation."""
    x, w, c = tensors()
    x = x.copy()
    x[0, 0] = 1e9
    recipe = fp8.Recipe.of(NVFP4Scaling(), forward=E2M1)
    (got,) = fp8.quantization_statistics(
        fp8.Fp8DotGeneral.init(recipe), loss, *map(jnp.asarray, (x, w, c))
    ).ops.values()
    data, scale = reference.nvfp4(x)
    values = data.astype(np.float64) * reference.expand(scale, x.shape, 1, 16)
    row = expected(x, values, np.zeros(x.shape, bool))
    assert row["underflow"] > 0.9
    # The error is that of the outlier, and as small as float32's own squared.
    del row["rms_error"]
    np.testing.assert_allclose(
        [float(getattr(got, name)[0]) for name in row], list(row.values()), rtol=1e-4, atol=1e-13
    )


@pytest.mark.more
def test_elements_that_are_not_finite_are_counted_and_left_out():
    """The scale is stored, so the others keep their values."""
    x, w, c = tensors()
    # Many, so that a share of all elements is another number.
    x[:8], x[8, :2], x[9, 0] = np.nan, np.inf, -np.inf
    static = Quantization(E4M3, StaticScaling(2.0**-5))
    op = fp8.Fp8DotGeneral.init(fp8.Recipe(static, static, static))
    measured = fp8.quantization_statistics(op, loss, *map(jnp.asarray, (x, w, c)))
    (got,) = measured.ops.values()
    scaled = np.where(np.isfinite(x), x, 0.0) * 2.0**5
    values = reference.cast(scaled.astype(np.float32), "E4M3").astype(np.float64) * 2.0**-5
    row = expected(x, values, np.abs(scaled) > 464)
    row["last_bin"] = (np.abs(values[np.isfinite(x)]) == 448 * 2.0**-5).mean()
    assert row["nonfinite"] == x[:8].size + 3 and row["saturation"] > 0.0 and row["underflow"] > 0.0
    for field in row:
        np.testing.assert_allclose(float(getattr(got, field)[0]), row[field], rtol=1e-4, err_msg=field)
    assert float(got.nonfinite[1]) == 0 and float(got.nonfinite[2]) == 0
    assert f"{x[:8].size + 3} NaN or inf" in str(measured)


@pytest.mark.parametrize("format", [E4M3, E4M3FNUZ, E2M1], ids=repr)
@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_what_a_scale_that_is_not_finite_spoils_is_not_flushed(format, scale):
    """Neither zero nor clipped, but NaN: also where no bit of the data says so. The other row keeps its values."""
    x = np.array([[1.0, -2.0, 0.0, np.nan], [1.0, -2.0, 0.0, 2.0**-30]], np.float32)
    scales = jnp.array([[scale], [1.0]], jnp.float32)
    data = jnp.asarray(x / scales).astype(format.storage)
    numbers = statistics_of(jnp.asarray(x), QuantizedArray(data, scales), Members(0), format)
    got = dict(zip(STATISTICS, numbers, strict=True))
    assert np.isnan(got["error"]) and got["nonfinite"] == 1
    np.testing.assert_allclose([got["underflow"], got["saturation"], got["last_bin"]], [1 / 7, 0.0, 0.0], rtol=1e-6)


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_one_nan_does_not_flush_the_others_to_zero(recipe):
    x = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    x[0, 0] = np.nan
    model = fp8.fp8_linear_layers(eqx.nn.Linear(64, 16, key=KEY), recipe=recipe)
    measured = fp8.quantization_statistics(model, lambda m, x: jnp.mean(jax.vmap(m)(x) ** 2), jnp.asarray(x))
    (got,) = measured.of_ops
    assert got.nonfinite[0] == 1 and got.underflow[0] < 1e-3 and got.saturation[0] == 0.0


@pytest.mark.more
def test_names_for_trackers():
    model = fp8.fp8_linear_layers(eqx.nn.MLP(8, 8, 16, 1, key=KEY), fp8.Fp8Config(recipe="current"))
    x = jax.random.normal(KEY, (4, 8))
    measured = jax.jit(lambda: fp8.quantization_statistics(model, lambda m: (jax.vmap(m)(x) ** 2).mean()).flat("q"))()
    names = (*FIELDS, "scale", "last_bin", "active", "wide_rows", "sqnr", "mse", "over_noise")
    operands = [f"q/layers.{layer}/{operand}" for layer in (0, 1) for operand in OPERANDS]
    assert set(measured) == {f"{operand}/{name}" for operand in operands for name in names}
    np.testing.assert_allclose(float(measured["q/layers.0/input/amax"]), np.abs(np.asarray(x)).max())


@pytest.mark.more
@pytest.mark.parametrize("factor", [1e-28, 1e25, 1e36])
def test_magnitudes_whose_squares_float32_does_not_have(factor):
    """Gradients of a mean over many elements are that small; their error is the same at any magnitude."""
    x, w, c = map(jnp.asarray, tensors())
    op = fp8.Fp8DotGeneral.init(CurrentScaling(power_of_two=True))
    at = lambda factor: next(iter(fp8.quantization_statistics(op, loss, x, w, factor * c).ops.values()))
    exponent = 2.0 ** round(np.log2(factor))
    plain, scaled = at(1.0), at(exponent)
    for field in ("saturation", "underflow", "error", "dynamic_range", "kurtosis"):
        np.testing.assert_allclose(getattr(scaled, field), getattr(plain, field), rtol=1e-5)
    np.testing.assert_allclose(scaled.amax, plain.amax * np.array([1.0, 1.0, exponent], np.float32), rtol=1e-6)


# --- Transformations --------------------------------------------------------------------------------------------------


def prepared(name, *arrays):
    op = fp8.Fp8DotGeneral.init(name)
    op = fp8.calibrate(op, loss, [arrays]) if fp8.recipes.named[name].is_stateful else op
    return fp8.with_rounding_keys(op, KEY)


@pytest.mark.more
@pytest.mark.parametrize("name", ["delayed", "static", "nvfp4"])
def test_reuse_and_scan_report_the_largest_of_each_number(name):
    x, w, c = map(jnp.asarray, tensors())
    op = prepared(name, x, w, c)
    programs = {
        "twice": lambda op, a, b: loss(op, a, w, c) + loss(op, b, w, c),
        "scan": lambda op, a, b: jax.lax.scan(
            lambda total, x: (total + loss(op, x, w, c), None), jnp.float32(0.0), jnp.stack([a, b])
        )[0],
    }
    measure = eqx.filter_jit(lambda op, f, *args: next(iter(fp8.quantization_statistics(op, f, *args).ops.values())))
    other = x[::-1] * 1.7
    single = [measure(op, loss, a, w, c) for a in (x, other)]
    for program, function in programs.items():
        got = measure(op, function, x, other)
        for field in FIELDS:
            largest = np.maximum(*(getattr(s, field) for s in single))
            np.testing.assert_allclose(getattr(got, field), largest, rtol=1e-5, err_msg=f"{program} {field}")


@state_is_constant
@pytest.mark.parametrize("name", ["delayed", "mxfp8", "nvfp4"])
def test_measuring_changes_no_number_of_the_model(name):
    """The gradients are those of training: the recipe that records is the recipe, bit for bit."""
    x, w, c = map(jnp.asarray, tensors())
    op = prepared(name, x, w, c)
    recording = op.with_recipe(op.recipe.measured)
    for a, b in zip(
        jax.jit(jax.grad(loss, (1, 2)))(op, x, w, c), jax.jit(jax.grad(loss, (1, 2)))(recording, x, w, c), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_a_second_use_that_is_written_out_is_shared_still():
    tensor = Quantization(E4M3, CurrentScaling())
    recipe = dataclasses.replace(fp8.Recipe(tensor, tensor, tensor), input_for_wgrad=tensor, kernel_for_dgrad=tensor)
    measured = recipe.measured
    assert measured.input_for_wgrad == measured.input and measured.kernel_for_dgrad == measured.kernel


@pytest.mark.more
def test_members_of_an_ensemble_are_measured_apart():
    x, w, c = map(jnp.asarray, tensors())
    make = lambda key: eqx.nn.Linear(160, 32, use_bias=False, key=key)
    members = [make(key) for key in jax.random.split(KEY, 2)]
    ensemble = jax.tree.map(lambda *a: jnp.stack(a) if eqx.is_array(a[0]) else a[0], *members)
    config = fp8.Fp8Config(recipe="mxfp8")
    single = lambda model: (c * jax.vmap(model)(x)).sum()

    @eqx.filter_jit
    def measure(model, loss_fn):
        return next(iter(fp8.quantization_statistics(fp8.fp8_linear_layers(model, config), loss_fn).ops.values()))

    of_each = [measure(member, single) for member in members]
    got = measure(ensemble, lambda models: eqx.filter_vmap(single)(models).sum())
    for field in FIELDS:
        np.testing.assert_allclose(getattr(got, field), [getattr(s, field) for s in of_each], rtol=1e-5)


# --- What is not quantized --------------------------------------------------------------------------------------------


@pytest.mark.more
def test_operands_in_high_precision_lose_nothing():
    x, w, c = map(jnp.asarray, tensors())
    c = c.at[0].set(1e4)  # far above E4M3's maximum
    high, tensor = (
        Quantization(E4M3, HighPrecision()),
        Quantization(E4M3, CurrentScaling()),
    )
    # fprop alone in FP8: the gradient of the output stays as it is.
    recipe = fp8.Recipe(tensor, tensor, high, input_for_wgrad=high, kernel_for_dgrad=high)
    (got,) = fp8.quantization_statistics(fp8.Fp8DotGeneral.init(recipe), loss, x, w, c).ops.values()
    np.testing.assert_allclose(got.amax, [float(jnp.abs(a).max()) for a in (x, w, c)])
    np.testing.assert_allclose(got.over_noise[0], 1 / np.sqrt(3 * float(got.error[0])), rtol=1e-6)
    np.testing.assert_allclose(got.mse[0] * x.size, got.error[0] * (x**2).sum(), rtol=1e-5)
    assert float(got.error[0]) > 0 and float(got.error[1]) > 0
    lost = got.saturation[2], got.last_bin[2], got.underflow[2], got.error[2]
    assert all(float(x) == 0.0 for x in lost)
    assert float(got.sqnr[2]) == np.inf


@pytest.mark.more
def test_layers_that_the_loss_does_not_reach_are_nan_and_do_not_enter_the_mean():
    model = fp8.fp8_linear_layers(
        [eqx.nn.Linear(16, 16, key=key) for key in jax.random.split(KEY)], fp8.Fp8Config(recipe="mxfp8")
    )
    x = jax.random.normal(KEY, (8, 16))
    measured = fp8.quantization_statistics(model, lambda model: jax.vmap(model[0])(x).sum())
    reached, skipped = measured.ops.values()
    assert np.isfinite(reached.error).all() and np.isnan(skipped.error).all()
    assert np.isfinite(float(measured.saturation)) and "nan" not in str(measured)
    assert "1: never called; describe(model, loss_fn, *batch" in str(measured)


def test_a_model_without_ops_is_refused():
    with pytest.raises(ValueError, match="model has no FP8 product to measure; convert"):
        fp8.quantization_statistics(eqx.nn.Linear(2, 2, key=KEY), loss)
