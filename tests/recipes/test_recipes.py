"""Every recipe: its scales and data against NumPy bit for bit, its accuracy, and every transformation. One table."""

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
from helpers import sqnr, state_is_constant

import haliax_fp8 as fp8
from haliax_fp8.recipes import (
    E2M1,
    E4M3,
    E5M2,
    BlockScaling,
    CurrentScaling,
    HighPrecision,
    MXFP8Scaling,
    OperandUse,
    Quantization,
    RowwiseScaling,
)
from haliax_fp8.recipes.scaling.block import e8m0_exponent


MATRIX = (((1,), (0,)), ((), ()))
RECIPES = sorted(fp8.recipes.named)
# Of each kind of scales one: of tensors, from a history and without, of rows, of blocks, and of blocks in two levels.
KINDS = ["current", "delayed", "rowwise", "deepseek", "nvfp4"]
KEY = jax.random.key(42)
# scaling, its reference, and the error of its scales: 0 where they are powers of two
SCALINGS = {
    "current": (CurrentScaling(), reference.current),
    "current, powers of two": (
        CurrentScaling(power_of_two=True),
        lambda x: reference.current(x, power_of_two=True),
    ),
    "rowwise": (RowwiseScaling(), reference.rowwise),
    "rowwise, float32": (
        RowwiseScaling(power_of_two=False),
        lambda x: reference.rowwise(x, power_of_two=False),
    ),
    "1x128": (BlockScaling(), reference.block),
    "128x128": (BlockScaling(square=True), lambda x: reference.block(x, rows=128)),
    "1x16, float32": (
        BlockScaling(size=16, power_of_two=False),
        lambda x: reference.block(x, columns=16, power_of_two=False),
    ),
    "mxfp8": (MXFP8Scaling(), reference.mxfp8),
    "mxfp8, 32x32": (MXFP8Scaling(square=True), lambda x: reference.mxfp8(x, rows=32)),
}


def matrices():
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((160, 256)).astype(np.float32)
    special = normal[:4, :40].copy()
    special[0, 3], special[1, 0], special[2, 5] = np.inf, -np.inf, np.nan
    wide = normal * np.exp2(rng.integers(-60, 60, normal.shape)).astype(np.float32)
    return {
        "normal": normal,
        "cut by the edge": normal[:37, :141],
        "one element": normal[:1, :1],
        "zeros": np.zeros((3, 70), np.float32),
        "rows of zeros": normal * (np.arange(160) % 3 == 0)[:, None].astype(np.float32),
        "magnitudes from 2**-60 to 2**60": wide,
        # XLA flushes float32's subnormals to zero on a CPU; nothing here is one.
        "tiny": normal[:8] * np.float32(1e-31),
        "huge": np.clip(normal[:8], -3, 3) * np.float32(1e38),
        "inf and nan": special,
        "powers of two": np.exp2(rng.integers(-9, 9, (8, 96))).astype(np.float32),
    }


MATRICES = matrices()


@pytest.mark.smoke
@pytest.mark.parametrize("name", sorted(SCALINGS))
def test_data_and_scales_equal_the_reference_bit_for_bit(name):
    scaling, expected = SCALINGS[name]
    quantize = jax.jit(lambda x: scaling.quantize(x, OperandUse(E4M3, contracted=(1,))))
    for x in MATRICES.values():
        data, scale = expected(x)
        got = quantize(x)
        nan = np.isnan(data.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(np.asarray(got.data).astype(np.float32)), nan)
        np.testing.assert_array_equal(np.asarray(got.data).view(np.uint8)[~nan], data.view(np.uint8)[~nan])
        # MXFP8's scale of zeros is subnormal, and flushed to zero by XLA on a CPU.
        normal = ~(np.abs(scale) < np.finfo(np.float32).tiny)
        np.testing.assert_array_equal(np.asarray(got.scale)[normal], scale[normal])


def test_e8m0_rounds_up_to_the_next_power_of_two():
    values = np.concatenate(
        [np.exp2(np.arange(-126, 127)), 1.0000001 * np.exp2(np.arange(-126, 126)), np.logspace(-37, 38, 2000)]
    ).astype(np.float32)
    expected = values.astype(np.float64).astype(ml_dtypes.float8_e8m0fnu)  # rounds to nearest: only to decode
    exponent = np.asarray(e8m0_exponent(jnp.asarray(values))).astype(np.int64) - 127
    assert (np.exp2(exponent.astype(np.float64)) >= values).all()
    assert (np.exp2(exponent - 1.0) < values).all()
    powers = slice(0, 253)
    np.testing.assert_array_equal(np.exp2(exponent[powers].astype(np.float64)), expected[powers].astype(np.float64))
    np.testing.assert_array_equal(e8m0_exponent(jnp.array([0.0, jnp.inf, jnp.nan])), [0, 254, 255])


def prepared(name, loss, op=None):
    """An op that has seen one step, so that delayed and static scaling have scales; with a key if it needs one."""
    op = fp8.Fp8DotGeneral.init(name) if op is None else op
    op = fp8.calibrate(op, loss, [()]) if fp8.recipes.named[name].is_stateful else op
    return fp8.with_rounding_keys(op, KEY)


def gates(name):
    """The least SQNR in dB of a product of normal operands, and of its gradients.

    For E2M1 in blocks of 16: the largest of 16 normal values is 1.77 standard deviations on average, so one standard
    deviation is 3.4 in units where the format's maximum is 6. There the format's values are 0.5, 1 and 2 apart (below
    2, 4 and 6), which rounding to nearest turns into a mean square error of spacing**2 / 12, 0.116 in all, or 1 % of
    the operand's mean square. Two such operands: 17 dB. Random rounding of one of them has twice its error: 15.2 dB.
    One dB below that, for the rounding of the scales.

    For kernels of E2M1 in blocks of 32, whose scales are powers of two, one standard deviation is 2.1 on average: 1.3 %
    of the mean square, or 19 dB, and two dB below that.
    """
    recipe = fp8.recipes.named[name]
    if recipe.kernel.format == E2M1 != recipe.input.format:
        return 17, 17
    if recipe.input.format == E2M1:
        return 16, 14.2
    return 28, 24 if recipe.output_grad.format == E5M2 else 28


def problem(dtype=jnp.float32, rows=96, inputs=160, outputs=80):
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = ((rows, inputs), (inputs, outputs), (rows, outputs))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


@state_is_constant
@pytest.mark.smoke
@pytest.mark.parametrize(
    "name, dtype",
    [
        *(pytest.param(name, jnp.float32, marks=pytest.mark.fast) for name in RECIPES),
        *((name, dtype) for name in ("delayed", "mxfp8") for dtype in (jnp.bfloat16, jnp.float16)),
    ],
)
def test_accuracy_of_the_three_products(name, dtype):
    x, w, c = problem(dtype)
    loss = lambda op, x, w: (c * op(x, w, MATRIX)).sum()
    op = prepared(name, lambda op: loss(op, x, w))
    exact = [np.asarray(a, np.float64) for a in (x, w, c)]
    out, (dx, dw) = op(x, w, MATRIX), jax.jit(jax.grad(loss, (1, 2)))(op, x, w)
    assert (out.dtype, dx.dtype, dw.dtype) == (dtype,) * 3
    forward, backward = gates(name)
    assert sqnr(exact[0] @ exact[1], out) >= forward
    assert sqnr(exact[2] @ exact[1].T, dx) >= backward
    assert sqnr(exact[0].T @ exact[2], dw) >= backward


@pytest.mark.parametrize("name", ["rowwise", "deepseek", "mxfp8"])
def test_an_outlier_spoils_its_own_block_only(name):
    x = np.asarray(problem(rows=256, inputs=256)[0]).copy()
    x[0, 0] = 1e5
    quantize = lambda q, x: np.asarray(
        q.scaling.quantize(jnp.asarray(x), OperandUse(q.format, contracted=(1,))).dequantize()
    )
    clean, tensor = np.ones_like(x, bool), fp8.recipes.named["current"].input
    clean[0] = False
    assert sqnr(x[clean], quantize(fp8.recipes.named[name].input, x)[clean]) >= 31
    assert sqnr(x[clean], quantize(tensor, x)[clean]) < 20


@pytest.mark.parametrize("name", KINDS)
def test_vmap_scan_checkpoint_and_jit_are_the_plain_call(name):
    x, w, c = problem(rows=16, inputs=64, outputs=64)
    op = prepared(name, lambda op: (c * op(x, w, MATRIX)).sum())
    row = lambda op, w, r: op(r, w, (((0,), (0,)), ((), ())))
    batch = lambda op, w, x: op(x, w, (((x.ndim - 1,), (0,)), ((), ())))
    twice = lambda f: lambda op, w, x: (c * f(op, w, f(op, w, x))).sum()
    in_fours = lambda x: x.reshape(4, 4, -1)
    programs = {
        "plain": twice(batch),
        "vmap": twice(lambda op, w, x: jax.vmap(lambda r: row(op, w, r))(x)),
        "nested vmap": twice(
            lambda op, w, x: jax.vmap(jax.vmap(lambda r: row(op, w, r)))(in_fours(x)).reshape(x.shape)
        ),
        "plain, two batch axes": twice(lambda op, w, x: batch(op, w, in_fours(x)).reshape(x.shape)),
        "checkpoint": lambda op, w, x: eqx.filter_checkpoint(twice(batch))(op, w, x),
        "scan": lambda op, w, x: (c * jax.lax.scan(lambda x, _: (batch(op, w, x), None), x, None, length=2)[0]).sum(),
    }
    results = {}
    for program, loss in programs.items():
        gradient = eqx.filter_jit(fp8.filter_grad(lambda params, loss=loss: loss(*params)))
        results[program] = jax.tree.leaves(gradient((op, w, x)))
    for program, leaves in results.items():
        # Blocks and rotations run along the last axis that is contracted, here of 4 or of 16 elements.
        plain = results["plain, two batch axes" if program == "nested vmap" else "plain"]
        for got, expected in zip(leaves, plain, strict=True):
            if program == "plain, two batch axes":
                continue
            if program == "scan":  # the kernel's gradients of both uses are added in another order
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * float(jnp.abs(expected).max()))
            else:
                np.testing.assert_array_equal(got, expected, err_msg=program)


@pytest.mark.parametrize("name", KINDS)
def test_sharded_jit_is_the_unsharded_program(name):
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    x, w, c = problem(rows=16, inputs=64, outputs=64)
    op = prepared(name, lambda op: (c * op(x, w, MATRIX)).sum())
    gradient = eqx.filter_jit(fp8.filter_grad(lambda params: (c * params[0](*params[1:], MATRIX)).sum()))
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(x, NamedSharding(mesh, P("devices"))), jax.device_put(w, NamedSharding(mesh, P("devices")))
    for got, expected in zip(
        jax.tree.leaves(gradient((op, *sharded))), jax.tree.leaves(gradient((op, x, w))), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * float(jnp.abs(expected).max()))


@pytest.mark.more
@pytest.mark.parametrize("name", KINDS)
def test_grouped_products(name):
    experts, inputs, outputs, rows = (hax.Axis(n, s) for n, s in (("e", 3), ("in", 64), ("out", 48), ("rows", 20)))
    layer = hnn.MoELinear.init(experts, inputs, outputs, key=jax.random.key(0), use_bias=False)
    x, sizes = hax.random.normal(jax.random.key(1), (rows, inputs)), hax.named(jnp.array([9, 0, 8]), experts)
    loss = lambda layer: (layer(x, sizes) ** 2).sum().scalar()
    converted = fp8.fp8_linear_layers(layer, fp8.Fp8Config(recipe=name))
    converted = prepared(name, loss, converted)
    forward, backward = gates(name)
    assert sqnr(layer(x, sizes).array, converted(x, sizes).array) >= forward
    got, exact = fp8.filter_grad(loss)(converted).weight.array, eqx.filter_grad(loss)(layer).weight.array
    assert sqnr(exact, got) >= min(22, backward - 2)  # the output's own error enters the gradient of its square
    np.testing.assert_array_equal(got[1], jnp.zeros_like(got[1]))


@pytest.mark.more
@pytest.mark.parametrize("name", ["rowwise", "nvfp4"])
def test_stateless_recipes_need_no_change_to_a_training_step(name):
    model = fp8.fp8_linear_layers(eqx.nn.MLP(16, 8, 64, 1, key=jax.random.key(0)), fp8.Fp8Config(recipe=name))
    x = jax.random.normal(jax.random.key(1), (32, 16))
    loss = lambda model: ((jax.vmap(fp8.with_rounding_keys(model, KEY))(x) - x[:, :8]) ** 2).mean()
    optimizer = optax.sgd(0.3)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    overwrites, _ = fp8.partition_for_grad_overwrite(model)
    assert jax.tree.leaves(overwrites) == []
    before = loss(model)
    for _ in range(20):
        updates, opt_state = optimizer.update(eqx.filter_grad(loss)(model), opt_state)
        model = eqx.apply_updates(model, updates)
    assert loss(model) < 0.7 * before


@pytest.mark.more
def test_layers_with_different_recipes_train_in_one_step():
    config = fp8.Fp8Config(overrides={"layers.0": "mxfp8", "layers.1": None}, recipe="delayed")
    model = fp8.fp8_linear_layers(eqx.nn.MLP(16, 8, 64, 2, key=jax.random.key(0)), config)
    kinds = [str(row.recipe) for row in fp8.describe(model)]
    assert kinds == ["MXFP8Scaling E4M3/E4M3/E4M3", "None", "DelayedScaling E4M3/E4M3/E5M2"]
    x = jax.random.normal(jax.random.key(1), (32, 16))
    step = fp8.TrainStep(lambda model, x: ((jax.vmap(model)(x) - x[:, :8]) ** 2).mean(), optax.sgd(0.3))
    opt_state, losses = step.init(model), []
    for _ in range(20):
        model, opt_state, metrics = step(model, opt_state, x)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]
    assert len(fp8.training.fp8_states(model)) == 1


@pytest.mark.more
def test_each_product_kept_in_high_precision_is_exact_and_runs_there():
    x, w, c = problem()
    high = Quantization(E4M3, HighPrecision())
    base = fp8.Recipe.of(CurrentScaling())
    cases = {
        "dgrad": (
            dataclasses.replace(base, kernel_for_dgrad=high, output_grad=high, output_grad_for_wgrad=base.input),
            0,
        ),
        "wgrad": (dataclasses.replace(base, input_for_wgrad=high, output_grad_for_wgrad=high), 1),
    }
    exact = (c @ w.T, x.T @ c)
    for name, (recipe, index) in cases.items():
        op = fp8.Fp8DotGeneral.init(recipe)
        gradients = jax.grad(lambda x, w, op=op: (c * op(x, w, MATRIX)).sum(), (0, 1))(x, w)
        assert sqnr(exact[index], gradients[index]) > 100, name
        assert sqnr(exact[1 - index], gradients[1 - index]) < 40, name
        assert f"{name} in high precision" in str(recipe)


@pytest.mark.parametrize("alias", sorted(fp8.recipes.aliases))
def test_aliases_name_recipes(alias):
    assert fp8.recipes.by_name(alias) is fp8.recipes.named[fp8.recipes.aliases[alias]]


def test_bad_recipes_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="nearest are.*'rowwise'"):
        fp8.Fp8Config(recipe="row-wise")
    with pytest.raises(ValueError, match="diverge"):
        fp8.Recipe.of(MXFP8Scaling(), backward=E5M2)
    high = Quantization(E4M3, HighPrecision())
    with pytest.raises(ValueError, match="one operand of wgrad"):
        dataclasses.replace(fp8.Recipe.of(CurrentScaling()), input_for_wgrad=high)
    with pytest.raises(ValueError, match="at least 1"):
        BlockScaling(size=0)


@state_is_constant
@pytest.mark.parametrize("name", KINDS)
def test_einsum_takes_every_recipe(name):
    x, w, _ = problem()
    einsum = prepared(name, lambda op: op("mk,kn->mn", x, w).sum(), fp8.Fp8Einsum.init(name))
    plain = prepared(name, lambda op: op(x, w, MATRIX).sum())
    np.testing.assert_array_equal(einsum("mk,kn->mn", x, w), plain(x, w, MATRIX))
    got = jax.grad(lambda w: einsum("mk,kn->mn", x, w).sum())(w)
    assert sqnr(x.sum(0)[:, None] + jnp.zeros_like(w), got) >= min(22, gates(name)[1] - 2)
