"""What accelerators run for blocks of E8M0 scales, `lax.scaled_dot`, held against the dequantized product.

Products of E4M3 values and powers of two are exact in bfloat16 and in float32, so that the two differ in the order of
accumulation only.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import EPS, assert_within, equations, products, state_is_constant

import haliax_fp8 as fp8
from haliax_fp8._product.blocks import MX, NV, exponent_of, native_product
from haliax_fp8._product.dimensions import DotDimensions
from haliax_fp8.recipes import (
    E2M1,
    E4M3,
    BlockScaling,
    CurrentScaling,
    Members,
    MXFP8Scaling,
    NVFP4Scaling,
    OperandUse,
    StaticScaling,
)


MATRIX = (((1,), (0,)), ((), ()))
BLOCKS = {
    "mxfp8": MXFP8Scaling(),
    "mxfp8, 32x32": MXFP8Scaling(square=True),
    "1x128": BlockScaling(),
    "128x128": BlockScaling(square=True),
    "1x96": BlockScaling(size=96),
}
# dimension numbers, shapes: the last pair of contracted axes carries the blocks
PRODUCTS = {
    "matrices": (MATRIX, (24, 256), (256, 40)),
    "an axis that ends in a block": (MATRIX, (5, 141), (141, 7)),
    "an axis shorter than a block": (MATRIX, (5, 20), (20, 7)),
    "two contracted axes, in another order": ((((2, 0), (2, 0)), ((), ())), (3, 6, 100), (3, 5, 100)),
    "a batch axis": ((((2,), (1,)), ((0,), (0,))), (3, 6, 70), (3, 70, 5)),
    "batch axes at the end, two free axes": ((((1,), (0,)), ((3,), (1,))), (2, 64, 3, 4), (64, 4, 5)),
    "no free axis": ((((0,), (0,)), ((), ())), (70,), (70,)),
}


def operands(shape_a, shape_b):
    """Magnitudes from 2**-8 to 2**8, so that blocks have scales of their own."""
    rng = np.random.default_rng(0)
    draw = lambda shape: rng.standard_normal(shape) * np.exp2(rng.integers(-8, 9, shape))
    return (jnp.asarray(draw(shape), jnp.float32) for shape in (shape_a, shape_b))


def quantized(a, b, numbers, scaling_a, scaling_b, **use):
    """In the order of contraction that an op quantizes in: that of the first operand's axes."""
    pairs, use = sorted(zip(*numbers[0], strict=True)), {"format": E4M3} | use
    a = scaling_a.quantize(a, OperandUse(contracted=tuple(axis for axis, _ in pairs), **use))
    b = scaling_b.quantize(b, OperandUse(contracted=tuple(axis for _, axis in pairs), **use))
    ordered = (tuple(axis for axis, _ in pairs), tuple(axis for _, axis in pairs)), numbers[1]
    return a, b, ordered


def assert_native_is_dequantized(a, b, numbers, blocks=MX):
    dimensions = DotDimensions.of(numbers, a.shape, b.shape)
    got = jax.jit(lambda a, b: native_product(a, b, dimensions, np.dtype(np.float32), blocks))(a, b)
    values = [np.asarray(x.dequantize(), np.float64) for x in (a, b)]
    out = np.empty(got.shape)
    exact = products(*values, out, numbers).out
    magnitudes = products(*map(np.abs, values), out, numbers).out
    terms = int(np.prod([a.shape[axis] for axis in numbers[0][0]]))
    # The scales of tensors, and their products with those of blocks, are rounded.
    assert_within(got, exact, (terms + 2 + 4 * (blocks is NV)) * EPS * magnitudes)


@pytest.mark.more
@pytest.mark.parametrize("product", PRODUCTS)
def test_native_product_of_every_layout(product):
    numbers, shape_a, shape_b = PRODUCTS[product]
    a, b, numbers = quantized(*operands(shape_a, shape_b), numbers, BLOCKS["1x128"], BLOCKS["mxfp8"])
    assert_native_is_dequantized(a, b, numbers)


@pytest.mark.parametrize(
    "scaling_a, scaling_b",
    [("mxfp8", "mxfp8, 32x32"), ("1x128", "128x128"), ("1x128", "1x128"), ("128x128", "mxfp8"), ("1x96", "1x128")],
)
def test_native_product_of_every_pair_of_blocks(scaling_a, scaling_b):
    numbers, shape_a, shape_b = MATRIX, (40, 170), (170, 150)
    a, b, numbers = quantized(*operands(shape_a, shape_b), numbers, BLOCKS[scaling_a], BLOCKS[scaling_b])
    assert_native_is_dequantized(a, b, numbers)


@pytest.mark.parametrize("per_row, square", [(False, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
def test_native_product_of_nvfp4(product, per_row, square):
    numbers, shape_a, shape_b = PRODUCTS[product]
    scalings = NVFP4Scaling(per_row=per_row), NVFP4Scaling(square=square)
    a, b, numbers = quantized(*operands(shape_a, shape_b), numbers, *scalings, format=E2M1)
    assert_native_is_dequantized(a, b, numbers, NV)


def test_members_of_an_ensemble_have_tensor_scales_of_their_own():
    numbers = (((2,), (1,)), ((0,), (0,)))
    a, b = operands((3, 6, 70), (3, 70, 5))
    sizes = jnp.array([1.0, 1e-3, 1e4])[:, None, None]
    a, b, _ = quantized(a * sizes, b, numbers, NVFP4Scaling(), NVFP4Scaling(), format=E2M1, members=Members(1))
    assert a.tensor_scale.shape == (3, 1, 1)
    assert_native_is_dequantized(a, b, numbers, NV)
    # Under vmap, each example's scale is applied behind the product of all.
    dimensions = DotDimensions.of((((1,), (0,)), ((), ())), (6, 70), (70, 5))

    def one(a, b):
        a, b, _ = quantized(a, b, MATRIX, NVFP4Scaling(), NVFP4Scaling(), format=E2M1)
        return native_product(a, b, dimensions, np.dtype(np.float32), NV)

    x, y = operands((3, 6, 70), (3, 70, 5))
    got = jax.vmap(one, out_axes=1)(x * sizes, y)
    np.testing.assert_allclose(got, jnp.stack([one(x[i] * sizes[i], y[i]) for i in range(3)], 1), rtol=1e-5)


def test_bits_of_nvfp4_scales_are_those_of_e4m3():
    """Of the smallest and largest of one tensor, of zeros, and of a block that holds an infinity."""
    x = np.ones((1, 128), np.float32)
    x[0, :16], x[0, 16:32], x[0, 32:48], x[0, 48:64] = 0.0, np.inf, 3.0 * 2.0**-9, 3.0 * 448.0
    q = NVFP4Scaling().quantize(jnp.asarray(x), OperandUse(E2M1, contracted=(1,)))
    expected = np.array([0, np.nan, 2.0**-9, 448, *[448 / 1344] * 4], np.float32).astype(jnp.float8_e4m3fn)
    got = np.asarray(NV.scale_bits(q)).view(expected.dtype)[0]
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))
    b = dataclasses.replace(q, data=q.data.T, scale=q.scale.T, block=(16, 1), tensor_scale=q.tensor_scale.T)
    dimensions = DotDimensions.of(MATRIX, (1, 128), (128, 1))
    assert np.isnan(native_product(q, b, dimensions, np.dtype(np.float32), NV)).all()


@pytest.mark.more
def test_blocks_of_zeros_and_of_the_largest_and_smallest_scales():
    x = np.ones((8, 160), np.float32)
    x[:, :32], x[:, 32:64], x[:, 64:96] = 0.0, 3e38, 1e-36
    a, b, numbers = quantized(jnp.asarray(x), jnp.eye(160), MATRIX, BLOCKS["mxfp8"], BLOCKS["1x128"])
    assert_native_is_dequantized(a, b, numbers)


def test_exponents_are_e8m0():
    exponents = np.arange(-126, 128)
    np.testing.assert_array_equal(exponent_of(jnp.asarray(np.exp2(exponents), jnp.float32)), exponents + 127)
    assert exponent_of(jnp.array([jnp.nan])) == 255


def programs(scaling, rows=256):
    """The names of the primitives in the forward and backward pass."""
    op = fp8.Fp8DotGeneral.init(fp8.Recipe.of(scaling, forward=E2M1 if isinstance(scaling, NVFP4Scaling) else E4M3))
    x, w = jnp.ones((rows, 256)), jnp.ones((256, 128))
    jaxpr = jax.make_jaxpr(jax.grad(lambda x, w: op(x, w, MATRIX).sum(), (0, 1)))(x, w)
    return [equation.primitive.name for equation in equations(jaxpr)]


def test_products_that_hardware_takes_have_a_native_branch():
    """The branch that a CPU does not take is in the program still: XLA chooses by platform."""
    native = {
        "mxfp8": MXFP8Scaling(),
        "deepseek": BlockScaling(),
        "float32 scales": BlockScaling(power_of_two=False),
        "blocks of 16": BlockScaling(size=16),
        "nvfp4": NVFP4Scaling(),
        "current": CurrentScaling(),
    }
    counts = {name: programs(scaling).count("fp8_block_product") for name, scaling in native.items()}
    assert counts == dict.fromkeys(native, 0) | {"mxfp8": 3, "deepseek": 3, "nvfp4": 3}


def test_a_quantized_kernel_keeps_what_the_native_branch_needs():
    """Otherwise its products would multiply dequantized operands, silently."""
    layer = eqx.nn.Linear(256, 128, use_bias=False, key=jax.random.key(0))
    for recipe in ("mxfp8_fprop", "nvfp4_fprop"):
        model = fp8.quantize_kernels(fp8.fp8_linear_layers(layer, recipe=recipe))
        jaxpr = jax.make_jaxpr(jax.grad(lambda x, model=model: jax.vmap(model)(x).sum()))(jnp.ones((32, 256)))
        assert [e.primitive.name for e in equations(jaxpr)].count("fp8_block_product") == 1


@state_is_constant
@pytest.mark.parametrize("name", sorted(fp8.recipes.named))
def test_operands_without_elements(name):
    """No rows; nothing to sum over."""
    # A static scale has to be given: there is nothing to measure.
    recipe = StaticScaling(1.0) if name == "static" else name
    op = fp8.with_rounding_keys(fp8.Fp8DotGeneral.init(recipe), jax.random.key(0))
    for shapes in (((0, 64), (64, 32)), ((4, 0), (0, 32))):
        x, w = map(jnp.ones, shapes)
        out, pullback = jax.vjp(lambda x, w: op(x, w, MATRIX), x, w)
        np.testing.assert_array_equal(out, jnp.zeros((x.shape[0], w.shape[1])))
        for gradient, operand in zip(pullback(jnp.ones_like(out)), (x, w), strict=True):
            np.testing.assert_array_equal(gradient, jnp.zeros_like(operand))
