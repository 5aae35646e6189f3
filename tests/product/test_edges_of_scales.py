"""Scales where arithmetic ends: of members, of the smallest blocks, of blocks that no product factors out.

Held against the definition in float64, element by element.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recipe_reference as reference
from helpers import E4M3, EPS, assert_within, float64, products

import haliax_fp8 as fp8
from haliax_fp8._product.grouped.contraction import RaggedContraction
from haliax_fp8.recipes import BlockScaling, CurrentScaling, MXFP8Scaling, NVFP4Scaling, OperandUse, RowwiseScaling
from haliax_fp8.recipes.recipe import OPERANDS
from haliax_fp8.recipes.scaling.block import e8m0_exponent


MATRIX = (((1,), (0,)), ((), ()))

LAYER = fp8.fp8_linear_layers(eqx.nn.Linear(16, 16, key=jax.random.key(0)), fp8.Fp8Config(amax_history_length=2))

# scaling, and what it makes of a matrix whose last axis is contracted
STATELESS = {
    "current": (CurrentScaling(), reference.current),
    "rowwise": (RowwiseScaling(), reference.rowwise),
    "1x16": (BlockScaling(size=16), lambda x: reference.block(x, columns=16)),
    "16x16": (BlockScaling(size=16, square=True), lambda x: reference.block(x, rows=16, columns=16)),
    "mxfp8": (MXFP8Scaling(), reference.mxfp8),
    "mxfp8, 32x32": (MXFP8Scaling(square=True), lambda x: reference.mxfp8(x, rows=32)),
}


@pytest.mark.parametrize("name", STATELESS)
def test_members_of_an_ensemble_have_scales_of_their_own(name):
    """Each as by itself, bit for bit, however much larger another one is; two axes of members too."""
    scaling, expected = STATELESS[name]
    sizes = np.exp2([[0, 12, -9], [5, -3, 30]])[..., None, None]
    x = (np.random.default_rng(0).standard_normal((2, 3, 40, 70)) * sizes).astype(np.float32)
    got = jax.jit(
        lambda x: scaling.quantize(x, OperandUse(fp8.recipes.E4M3, contracted=(3,), members=fp8.recipes.Members(2)))
    )(x)
    for member in np.ndindex(2, 3):
        data, scale = expected(x[member])
        np.testing.assert_array_equal(np.asarray(got.data[member]).view(np.uint8), data.view(np.uint8))
        np.testing.assert_array_equal(np.asarray(got.scale[member]).ravel(), np.ravel(scale))


@pytest.mark.parametrize(
    "scaling, blocked",
    [
        (BlockScaling(size=4), (2,)),
        (BlockScaling(size=4, square=True), (2, 3)),
        (MXFP8Scaling(), (2,)),
        (MXFP8Scaling(square=True), (2, 3)),
        (NVFP4Scaling(), (2,)),
        (NVFP4Scaling(square=True), (2, 3)),
    ],
    ids=str,
)
def test_blocks_run_along_the_last_contracted_and_the_last_free_axis(scaling, blocked):
    """Of four axes the first and the third are contracted: blocks along the third, squares along the fourth too."""
    size = {BlockScaling: 4, MXFP8Scaling: 32, NVFP4Scaling: 16}[type(scaling)]
    x = np.random.default_rng(0).standard_normal((33, 34, 35, 36)).astype(np.float32)
    got = scaling.quantize(jnp.asarray(x), OperandUse(fp8.recipes.E4M3, contracted=(0, 2)))
    assert got.block == tuple(size if axis in blocked else 1 for axis in range(4))
    assert got.scale.shape == tuple(-(-n // b) for n, b in zip(x.shape, got.block, strict=True))


def test_powers_of_two_that_are_subnormal():
    """E8M0 begins at `2**-127`, half of float32's smallest normal number; what lies above it goes up to the next one.

    As NumPy makes them: in any arithmetic, XLA on a CPU takes them for 0.
    """
    numbers = np.array([2.0**-127, 2.0**-128, 2.0**-127 + 2.0**-149, 2.0**-126, 2.0**-126 + 2.0**-149], np.float32)
    np.testing.assert_array_equal(e8m0_exponent(jnp.asarray(numbers)), [0, 0, 1, 1, 2])


def test_the_smallest_scale_of_e8m0_that_no_device_flushes():
    """`2**-126`: what this format holds times this scale is held exactly, down to float32's smallest normal number.

    `2**-127`, which E8M0 has too, is no normal number of float32: XLA on a CPU takes it for 0 in any arithmetic.
    """
    codes = np.arange(1, 127, dtype=np.uint8).view(E4M3).astype(np.float64)
    held = codes[codes >= 2.0]  # times 2**-127 they are normal numbers of float32, and half of them this format's
    x = np.zeros((4, 32), np.float32)
    x.flat[: len(held)] = held * 2.0**-127 * np.where(np.arange(len(held)) % 2, -1, 1)
    use = OperandUse(fp8.recipes.E4M3, contracted=(1,))
    got = jax.jit(lambda x: MXFP8Scaling().quantize(x, use))(x)
    np.testing.assert_array_equal(float64(got.data), x.astype(np.float64) * 2.0**126)
    scale = np.where((x != 0).any(axis=1), np.float32(2.0**-126), np.float32(0.0)).view(np.uint32)
    found = np.asarray(got.scale).view(np.uint32).ravel()
    np.testing.assert_array_equal(found[scale != 0], scale[scale != 0])


def test_every_product_takes_rows_along_what_it_sums_over():
    """An operand of two products is quantized for each: a row of fprop is a column of wgrad."""
    rng = np.random.default_rng(0)
    spread = lambda shape: (rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))).astype(np.float32)
    x, w, g = spread((6, 16)), spread((16, 8)), spread((6, 8))
    op = fp8.Fp8DotGeneral.init(fp8.Recipe.of(RowwiseScaling(power_of_two=False)))
    out, pullback = jax.jit(lambda x, w: jax.vjp(lambda x, w: op(x, w, MATRIX), x, w))(x, w)

    def rows(a):
        data, scale = reference.rowwise(a, power_of_two=False)
        return data.astype(np.float64) * scale

    dx, dw = pullback(jnp.asarray(g))
    for actual, a, b in ((out, x, w.T), (dx, g, w), (dw, x.T, g.T)):
        a, b = rows(a), rows(b)
        assert_within(actual, a @ b.T, (a.shape[1] + 4) * EPS * (np.abs(a) @ np.abs(b).T))


@pytest.mark.parametrize("batch", [0, 2])
def test_what_grouped_products_sum_over(batch):
    """Inputs in fprop, outputs in dgrad, rows in wgrad: there lie the rows that share a scale."""
    axes = {"input": "mk", "kernel": "gkn", "output_grad": "mn"}
    for product, summed in {"fprop": "k", "dgrad": "n", "wgrad": "m"}.items():
        expected = tuple((batch + axes[operand].index(summed),) for operand in OPERANDS[product])
        assert RaggedContraction(batch).contracted(product) == expected


@pytest.mark.parametrize("free", [9, 10], ids=["blocks that divide it otherwise", "blocks that do not divide it"])
@pytest.mark.parametrize("kernel_first", [False, True])
def test_blocks_of_a_free_axis_that_are_neither_the_axis_nor_one_element(kernel_first, free):
    """Squares of 4 × 4 of a kernel that contracts four elements: its scales are constant along the sum, and still no
    product with one scale for each column. Blocks of 4, 4 and 1 of nine columns are not three blocks of three."""
    rng = np.random.default_rng(0)
    spread = lambda shape: (rng.standard_normal(shape) * np.exp2(rng.integers(-8, 9, shape))).astype(np.float32)
    x, w, g = spread((5, 4)), spread((4, free)), spread((5, free))
    op = fp8.Fp8DotGeneral.init(fp8.Recipe.of(BlockScaling(size=4)), kernel_shape=(free,))
    if kernel_first:
        call = lambda w, x: op(w, x, (((0,), (1,)), ((), ())))
        out, pullback = jax.vjp(call, w, x)
        got = out.T, *reversed(pullback(jnp.asarray(g.T)))
    else:
        out, pullback = jax.vjp(lambda x, w: op(x, w, MATRIX), x, w)
        got = out, *pullback(jnp.asarray(g))

    def values(a, rows=1):
        """Quantized in blocks of four along the last axis."""
        data, scale = reference.block(a, rows=rows, columns=4)
        return data.astype(np.float64) * reference.expand(scale.astype(np.float64), a.shape, rows, 4)

    kernel = values(w.T, rows=4).T
    # fprop sums over four, dgrad over the free axis, wgrad over the rows; operands are quantized along each.
    pairs = [
        ((((1,), (0,)), ((), ())), values(x), kernel),
        ((((1,), (1,)), ((), ())), values(g), kernel),
        ((((0,), (0,)), ((), ())), values(x.T).T, values(g.T).T),
    ]
    for actual, (numbers, a, b) in zip(got, pairs, strict=True):
        unused = np.zeros(np.shape(actual))
        exact, magnitudes = products(a, b, unused, numbers).out, products(abs(a), abs(b), unused, numbers).out
        assert_within(actual, exact, (max(a.size, b.size) + 2) * EPS * magnitudes)


# --- Products of scales that float32 does not hold --------------------------------------------------------------------


@pytest.mark.parametrize("filter_grad", [fp8.filter_grad, eqx.filter_grad], ids=["ours", "Equinox's"])
@pytest.mark.parametrize("size", [1e-29, 1e-31, 1e-32])
def test_gradients_of_scales_whose_product_underflows(size, filter_grad):
    """Scales of about 1e-37 and 1e-3: their product is not a normal number, and the gradients are."""
    layer, x = LAYER, jax.random.normal(jax.random.key(1), (8, 16))
    loss = lambda layer, x: (jax.vmap(layer)(x) ** 2).mean() * size
    for _ in range(3):
        overwrites, rest = fp8.partition_for_grad_overwrite(filter_grad(loss)(layer, x))
        layer = fp8.apply_updates(layer, jax.tree.map(jnp.zeros_like, rest), overwrites)
    gradients, gradient_of_x = filter_grad(lambda both: loss(*both))((layer, x))
    unit = lambda layer, x: (jax.vmap(layer)(x) ** 2).mean()
    of_unit = eqx.filter_grad(lambda both: unit(*both))((fp8.restore_linear_layers(layer), x))
    for got, expected in ((gradients.weight, of_unit[0].weight), (gradient_of_x, of_unit[1])):
        # The output's gradient is rounded to 3 significant bits, the other operand to 4; and so was what it is made of.
        assert_within(float64(got) / size, float64(expected), np.abs(float64(expected)).max() / 4)
