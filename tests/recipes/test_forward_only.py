"""Recipes that quantize the forward pass alone: gradients of any function are right, and delayed ones say if not."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers import assert_same, equations, float64, state_is_constant, unchecked

import haliax_fp8 as fp8
from haliax_fp8.checkpoints import load_into, save
from haliax_fp8.recipes import HighPrecision, MXFP8Scaling, Quantization, by_name, named
from haliax_fp8.statistics import Problem, diagnose


X = jax.random.normal(jax.random.key(1), (64, 16))
PLAIN = eqx.nn.MLP(16, 16, 64, 2, activation=jax.nn.gelu, key=jax.random.key(0))
KEY = jax.random.key(2)


def loss_fn(model, x, factor=1.0):
    return factor * jnp.mean((jax.vmap(model)(x) - jnp.sin(x)) ** 2)


def saliency(model):
    return jax.grad(lambda v: model(v)[3])(X[0])


def trained(recipe, steps=5, rate=0.1):
    step = fp8.TrainStep(loss_fn, optax.sgd(rate))
    model = step.calibrate(fp8.fp8_linear_layers(PLAIN, recipe=recipe), X)
    state = step.init(model)
    for _ in range(steps):
        model, state, metrics = step(model, state, X, key=KEY)
    return step, fp8.with_rounding_keys(model, KEY), state, metrics


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in ("delayed", "rowwise") else pytest.mark.more) for x in named]
)
def test_saliency_of_a_trained_model(name):
    _, model, *_ = trained(f"{name}_fprop")
    ratio = jnp.linalg.norm(saliency(model)) / jnp.linalg.norm(saliency(fp8.restore_linear_layers(model)))
    assert 0.95 < float(ratio) < 1.05


@state_is_constant
@pytest.mark.parametrize("name", ["delayed", "rowwise_with_gw_hp", "mxfp4_mxfp8"])
def test_the_forward_pass_is_that_of_the_recipe_and_gradients_those_of_the_operands(name):
    x, w = X, jax.random.normal(jax.random.key(3), (16, 8))
    dimensions = (((1,), (0,)), ((), ()))
    op, forward_only = (fp8.Fp8DotGeneral.init(recipe) for recipe in (name, f"{name}_fprop"))
    np.testing.assert_array_equal(forward_only(x, w, dimensions), op(x, w, dimensions))
    # 1e6 is more than any scale of a trained model could hold.
    g = 1e6 * jax.random.normal(jax.random.key(4), (64, 8))
    dx, dw = jax.grad(lambda x, w: (g * forward_only(x, w, dimensions)).sum(), (0, 1))(x, w)
    np.testing.assert_allclose(dx, g @ w.T, rtol=1e-4, atol=1.0)
    np.testing.assert_allclose(dw, x.T @ g, rtol=1e-4, atol=10.0)


E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
LARGEST = {E4M3: 448.0, E2M1: 6.0}
# For each recipe: the formats of input and kernel, and how many elements of the sum share a scale (None: all of them).
FAKE = {"mxfp4_mxfp8": (E4M3, E2M1, 32), "mxfp8": (E4M3, E4M3, 32), "rowwise": (E4M3, E4M3, None)}


def fake_quantized(x, format, size):
    """`x`, summed over its last axis, after fake quantization with power-of-two scales that clip nothing: in NumPy."""
    x = float64(x)
    blocks = x.reshape(*x.shape[:-1], -1, size or x.shape[-1])
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    scale = np.exp2(np.ceil(np.log2(amax / LARGEST[format])))
    return ((blocks / scale).astype(format).astype(np.float64) * scale).reshape(x.shape)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dequantized", [True, False])
@pytest.mark.parametrize("name", FAKE)
def test_gradients_are_those_of_fake_quantization(name, dequantized, dtype):
    """With the straight-through estimator: fprop multiplies x' and w', its gradients are g w'^T and x'^T g."""
    x, w, g = (
        jax.random.normal(jax.random.key(seed), shape).astype(dtype)
        for seed, shape in enumerate(((24, 64), (64, 40), (24, 40)))
    )
    format_x, format_w, size = FAKE[name]
    fake_x, fake_w = fake_quantized(x, format_x, size), fake_quantized(w.T, format_w, size).T
    op = fp8.Fp8DotGeneral.init(by_name(name).forward_only(dequantized=dequantized))
    out, pullback = jax.vjp(lambda x, w: op(x, w, (((1,), (0,)), ((), ()))), x, w)
    dx, dw = pullback(g)
    if not dequantized:
        expected = fake_x @ fake_w, float64(g) @ float64(w).T, float64(x).T @ float64(g)
    else:
        expected = fake_x @ fake_w, float64(g) @ fake_w.T, fake_x.T @ float64(g)
    for got, exact in zip((out, dx, dw), expected, strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(float64(got), exact, rtol=float(jnp.finfo(dtype).eps), atol=1e-5 * abs(exact).max())


@state_is_constant
@pytest.mark.parametrize("name", ["mxfp8", "delayed", "nvfp4"])
def test_products_of_dequantized_operands_are_in_the_compute_dtype(name):
    op = fp8.Fp8DotGeneral.init(by_name(name).forward_only(dequantized=True))
    x, w = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    _, pullback = jax.vjp(lambda x, w: op(x, w, (((1,), (0,)), ((), ()))), x, w)
    found = [e for e in equations(jax.make_jaxpr(pullback)(x)) if e.primitive.name in PRODUCTS]
    assert [[v.aval.dtype for v in e.invars[:2]] for e in found] == [[jnp.bfloat16] * 2] * 2


PRODUCTS = ("dot_general", "fp8_scaled_product", "fp8_block_product")


def test_only_the_operands_of_fprop_are_read_again():
    """Not another quantization of theirs, which would be another function's gradient."""
    mx = named["mxfp8"]
    recipe = mx.forward_only(dequantized=True)
    assert recipe.quantized_products == ("fprop",) and recipe.quantized_once == {"input", "kernel"}
    assert "dgrad/wgrad in high precision from quantized operands" in str(recipe)
    square = Quantization(mx.kernel.format, MXFP8Scaling(square=True))
    for field in ("kernel_for_dgrad", "input_for_wgrad"):
        with pytest.raises(ValueError, match=r"forward_only\(dequantized=True\)"):
            dataclasses.replace(recipe, **{field: square})
    with unchecked(), pytest.raises(ValueError, match="dequantized='yes'"):
        mx.forward_only(dequantized="yes")


def test_the_jacobian_of_a_trained_model():
    _, model, *_ = trained("delayed_fprop")
    exact = jax.jacrev(fp8.restore_linear_layers(model))(X[0])
    assert jnp.linalg.norm(jax.jacrev(model)(X[0]) - exact) < 0.05 * jnp.linalg.norm(exact)


def test_the_suffix_is_for_every_name_and_scaling():
    assert by_name("tensorwise_fprop") == by_name("current").forward_only()
    recipe = fp8.Recipe.of(fp8.DelayedScaling(amax_history_length=4)).forward_only()
    assert str(recipe) == "fprop DelayedScaling E4M3/E4M3, dgrad/wgrad in high precision"
    assert recipe.forward_only() == recipe
    with pytest.raises(ValueError, match="rowwize_fprop.*'rowwise'"):
        by_name("rowwize_fprop")


def test_a_recipe_with_one_operand_in_high_precision_is_told_of_it():
    rowwise, high = named["rowwise"], Quantization(named["rowwise"].input.format, HighPrecision())
    for field in ("output_grad_for_wgrad", "input_for_wgrad"):
        with pytest.raises(ValueError, match=r"forward_only\(\).*rowwise_fprop"):
            dataclasses.replace(rowwise, **{field: high})


def test_clipped_gradients_are_in_the_metrics():
    """The ratio is that of the amaxes; a loss 1000 times as large makes it 1000, and clips until scales follow."""
    step, model, state, metrics = trained("delayed", steps=1, rate=0.0)
    assert 0.5 < metrics["output_grad_amax_ratio"] < 2.0
    largest = []
    for _ in range(4):
        before = model
        model, state, metrics = step(model, state, X, 1000.0)
        ops = [(a.dot_general, b.dot_general) for a, b in zip(before.layers, model.layers, strict=True)]
        ratios = [new.amax_history("output_grad")[0] / (57344 * op.scale("output_grad")) for op, new in ops]
        np.testing.assert_allclose(metrics["output_grad_amax_ratio"], max(ratios), rtol=1e-5)
        largest.append(float(max(ratios)))
    assert largest[0] > 500 and 0.5 < largest[-1] < 2.0
    # Nothing is said of layers that a step does not reach, nor of recipes whose scales are never late.
    first = fp8.TrainStep(lambda model, x: jax.vmap(model.layers[0])(x).mean(), optax.sgd(0.0))
    _, _, metrics = first(model, first.init(model), X)
    ratio = metrics["output_grad_amax_ratio"]
    assert 0.0 < float(ratio) < np.inf
    assert "output_grad_amax_ratio" not in trained("rowwise", steps=1)[-1]


def test_the_diagnosis_of_another_loss_names_the_recipe():
    _, model, *_ = trained("delayed")
    of_output = lambda model, x: model(x[0])[3]
    found = diagnose(model, fp8.quantization_statistics(model, of_output, X))
    assert any(
        f.operand == "output_grad" and f.problem is Problem.JUMP and "_fprop" in f.advice for f in found.findings
    )


# --- The backward pass alone ---


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in ("delayed", "nvfp4") else pytest.mark.more) for x in named]
)
def test_backward_only_multiplies_forward_in_high_precision_and_backward_as_the_recipe(name):
    """Its output is the plain product; its gradients, what the state records, and the next state are the recipe's."""
    x, w, g = X, jax.random.normal(jax.random.key(3), (16, 32)), jax.random.normal(jax.random.key(4), (64, 32))
    dimensions = (((1,), (0,)), ((), ()))

    def gradients(recipe):
        op = fp8.with_rounding_keys(fp8.Fp8DotGeneral.init(recipe), KEY)
        if op.state is not None:
            op = dataclasses.replace(op, state=op.state.with_scale(jnp.array([0.02, 0.01, 0.001], jnp.float32)))
        multiply = lambda of: jnp.sum(g * of[0](of[1], of[2], dimensions))
        return op, fp8.filter_grad(multiply)((op, x, w))

    op, (of_op, dx, dw) = gradients(f"{name}_bprop")
    np.testing.assert_array_equal(op(x, w, dimensions), jax.lax.dot_general(x, w, dimensions))
    _, (of_recipe, *expected) = gradients(name)
    for ours, theirs in zip((dx, dw, *jax.tree.leaves(of_op)), (*expected, *jax.tree.leaves(of_recipe)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_backward_only_keeps_and_loads_the_state_of_its_recipe(tmp_path):
    recipe = fp8.Recipe.of(fp8.DelayedScaling(amax_history_length=4))
    step, model, state, _ = trained(recipe)
    backward_only = fp8.fp8_linear_layers(PLAIN, recipe=recipe.backward_only())
    save(tmp_path / "model.safetensors", model)
    loaded, report = load_into(backward_only, tmp_path / "model.safetensors")
    assert_same(jax.tree.leaves(loaded), jax.tree.leaves(model))
    assert "input_for_fprop, kernel_for_fprop" in report.changed["layers.0.dot_general.state.table"]
    # Calibration and statistics take it as they take the recipe.
    calibrated = [step.calibrate(fp8.fp8_linear_layers(PLAIN, recipe=x), X) for x in (recipe, recipe.backward_only())]
    assert_same(*map(jax.tree.leaves, calibrated))
    measured = fp8.quantization_statistics(loaded, loss_fn, X)["layers.0"]
    assert float(measured.error[0]) == 0.0 < float(measured.error[2])
    assert "6 products in FP8, 3 in high precision" in fp8.describe(loaded).summary


def test_a_state_is_that_of_the_scalings_that_read_it():
    delayed, rowwise = fp8.Recipe.of(fp8.DelayedScaling()), by_name("rowwise")
    assert rowwise.with_state_of(delayed).scalings == delayed.scalings and delayed.with_state_of(delayed) is delayed
    assert (
        rowwise.backward_only().state_of is None
        and delayed.backward_only().backward_only().scalings == delayed.scalings
    )
    for other in (fp8.DelayedScaling(margin=1), fp8.DelayedScaling(8)):
        with pytest.raises(ValueError, match="takes its scale from a state.*stateless scaling"):
            fp8.Recipe.of(other).with_state_of(delayed)
    with unchecked(), pytest.raises(ValueError, match="state_of='delayed'"):
        dataclasses.replace(rowwise, state_of="delayed")
    assert by_name("tensorwise_bprop") == by_name("current").backward_only()
