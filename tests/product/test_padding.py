"""Axes that are not multiples of a block: as if they went on with zeros; or refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recipe_reference as reference
from helpers import state_is_constant

import haliax_fp8 as fp8
from haliax_fp8.recipes import (
    E2M1,
    E4M3,
    BlockScaling,
    CurrentScaling,
    HadamardScaling,
    MXFP8Scaling,
    NVFP4Scaling,
    OperandUse,
    Rounding,
    RowwiseScaling,
    StaticScaling,
)


MATRIX = (((1,), (0,)), ((), ()))
ROWS, INPUTS, OUTPUTS = 37, 141, 50
WHOLE = 256  # a multiple of 16, 32 and 128


def to_nearest(recipe):
    """The recipe without random rounding, whose draws depend on the shape."""
    return recipe._map(lambda q: dataclasses.replace(q, rounding=Rounding.TO_NEAREST))


RECIPES = {name: to_nearest(recipe) for name, recipe in fp8.recipes.named.items()}
RECIPES["static"] = fp8.Recipe.of(StaticScaling(1.0))  # a scale that is given: nothing is calibrated here


def problem():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (ROWS, INPUTS), (INPUTS, OUTPUTS), (ROWS, OUTPUTS)
    # Magnitudes that grow along every axis, so that blocks differ.
    grow = lambda x: x * jnp.exp2(jnp.arange(x.shape[0]) // 9)[:, None] * jnp.exp2(jnp.arange(x.shape[1]) // 17)
    with jax.numpy_rank_promotion("allow"):
        return [grow(jax.random.normal(key, shape)) for key, shape in zip(keys, shapes, strict=True)]


def padded(x):
    return jnp.pad(x, [(0, WHOLE - size) for size in x.shape])


@jax.jit
def products(op, x, w, c):
    out, pullback = jax.vjp(lambda x, w: op(x, w, MATRIX), x, w)
    return out, *pullback(c)


@state_is_constant
@pytest.mark.more
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_products_are_those_of_operands_padded_with_zeros(name):
    """All three, and nothing but zeros beyond them. Sums of more zeros may be taken in another order."""
    x, w, c = problem()
    op = fp8.Fp8DotGeneral.init(RECIPES[name])
    cut, whole = products(op, x, w, c), products(op, padded(x), padded(w), padded(c))
    assert [a.shape for a in cut] == [(ROWS, OUTPUTS), (ROWS, INPUTS), (INPUTS, OUTPUTS)]
    magnitudes = (jnp.abs(x) @ jnp.abs(w), jnp.abs(c) @ jnp.abs(w).T, jnp.abs(x).T @ jnp.abs(c))
    for small, large, magnitude in zip(cut, whole, magnitudes, strict=True):
        inside = tuple(slice(size) for size in small.shape)
        bound = 2 * WHOLE * np.finfo(np.float32).eps * 1.3 * np.asarray(magnitude)  # 1.3: rounding of both operands
        assert (np.abs(np.asarray(small - large[inside])) <= bound).all()
        np.testing.assert_array_equal(large.at[inside].set(0.0), jnp.zeros_like(large))


BLOCKS = {
    "1x128": (BlockScaling(), 128),
    "128x128": (BlockScaling(square=True), 128),
    "mxfp8": (MXFP8Scaling(), 32),
    "mxfp8, 32x32": (MXFP8Scaling(square=True), 32),
    "nvfp4": (NVFP4Scaling(), 16),
    "nvfp4, 16x16": (NVFP4Scaling(square=True), 16),
    "rotated nvfp4": (HadamardScaling(NVFP4Scaling()), 16),
    "rowwise": (RowwiseScaling(), 1),
    "current": (CurrentScaling(), 1),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_data_and_scales_are_those_of_an_array_padded_with_zeros(name):
    """Bit for bit."""
    scaling, _ = BLOCKS[name]
    x = jax.random.normal(jax.random.key(1), (130, 141)) * jnp.exp2(jnp.arange(141) // 10)[None, :]
    whole = jnp.pad(x, [(0, -size % 128) for size in x.shape])
    format = E2M1 if "nvfp4" in name else E4M3
    use = OperandUse(format, contracted=(1,))
    quantize = jax.jit(lambda x: scaling.quantize(x, use))
    cut, filled = quantize(x), quantize(whole)
    inside = tuple(slice(size) for size in cut.data.shape)
    np.testing.assert_array_equal(np.asarray(cut.data).view(np.uint8), np.asarray(filled.data[inside]).view(np.uint8))
    np.testing.assert_array_equal(cut.scale, filled.scale[tuple(slice(size) for size in cut.scale.shape)])


@pytest.mark.parametrize("name", [name for name, (_, size) in BLOCKS.items() if size > 1])
def test_without_padding_a_cut_block_is_an_error_that_names_axis_and_size(name):
    scaling, size = BLOCKS[name]
    scaling = dataclasses.replace(scaling, padding=False)
    format = E2M1 if "nvfp4" in name else E4M3
    use = OperandUse(format, contracted=(1,))
    cut = rf"axis 1 of an operand of shape \(256, {size + 1}\)"
    message = rf"{cut} is not a multiple of the {size} elements.*padding=True"
    with pytest.raises(ValueError, match=message):
        scaling.quantize(jnp.ones((256, size + 1)), use)
    if getattr(scaling, "square", False):
        message = rf"axis 0 of an operand of shape \({size - 1}, 256\) is not a multiple of the {size} elements"
        with pytest.raises(ValueError, match=message):
            scaling.quantize(jnp.ones((size - 1, 256)), use)
    scaling.quantize(jnp.ones((256, 2 * size)), use)


@pytest.mark.parametrize("axis, shapes", [("fprop", ((128, 100), (100, 128))), ("wgrad", ((100, 128), (128, 128)))])
def test_each_product_asks_for_whole_blocks_of_what_it_sums_over(axis, shapes):
    op = fp8.Fp8DotGeneral.init(fp8.Recipe.of(BlockScaling(padding=False)))
    x, w = map(jnp.ones, shapes)
    with pytest.raises(ValueError, match="is not a multiple of the 128 elements of a block"):
        jax.grad(lambda x, w: op(x, w, MATRIX).sum(), (0, 1))(x, w)
    if axis == "wgrad":
        assert op(x, w, MATRIX).shape == (100, 128)  # the product alone sums over whole blocks


# --- Subnormals -------------------------------------------------------------------------------------------------------

SUBNORMAL = {
    "current": (CurrentScaling(), reference.current),
    "rowwise": (RowwiseScaling(), reference.rowwise),
    "1x128": (BlockScaling(), reference.block),
    "mxfp8": (MXFP8Scaling(), reference.mxfp8),
}


@pytest.mark.parametrize("name", SUBNORMAL)
def test_subnormals_of_float16_are_values_like_others(name):
    """They are normal in float32, in which everything is computed."""
    scaling, expected = SUBNORMAL[name]
    x = (np.random.default_rng(0).standard_normal((20, 150)) * 1e-6).astype(np.float16)
    data, scale = expected(x)
    got = jax.jit(lambda x: scaling.quantize(x, OperandUse(E4M3, contracted=(1,))))(x)
    np.testing.assert_array_equal(np.asarray(got.data).view(np.uint8), data.view(np.uint8))
    np.testing.assert_array_equal(got.scale, scale)


@pytest.mark.parametrize("name", BLOCKS)
def test_subnormals_of_float32_become_nothing_larger(name):
    """A CPU flushes them to zero, other devices do not: either is right, infinities and NaN are not."""
    scaling, _ = BLOCKS[name]
    x = np.full((4, 160), 1e-39, np.float32)
    x[0] = 1e-45
    format = E2M1 if "nvfp4" in name else E4M3
    values = np.asarray(scaling.quantize(jnp.asarray(x), OperandUse(format, contracted=(1,))).dequantize())
    assert (np.abs(values) <= 1.2e-38).all()
