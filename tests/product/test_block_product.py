"""What accelerators run for blocks of E8M0 scales, `lax.scaled_dot`, held against the dequantized product.

Products of E4M3 values and powers of two are exact in bfloat16 and in float32, so that the two differ in the order of
accumulation only.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import EPS, assert_within, equations, products

import haliax_fp8 as fp8
from haliax_fp8._product.blocks import exponent_of, native_product
from haliax_fp8._product.dimensions import DotDimensions
from haliax_fp8.recipes import E4M3, BlockScaling, CurrentScaling, MXFP8Scaling, NVFP4Scaling, OperandUse, StaticScaling


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


def quantized(a, b, numbers, scaling_a, scaling_b):
    """In the order of contraction that an op quantizes in: that of the first operand's axes."""
    pairs = sorted(zip(*numbers[0], strict=True))
    a = scaling_a.quantize(a, OperandUse(E4M3, contracted=tuple(axis for axis, _ in pairs)))
    b = scaling_b.quantize(b, OperandUse(E4M3, contracted=tuple(axis for _, axis in pairs)))
    ordered = (tuple(axis for axis, _ in pairs), tuple(axis for _, axis in pairs)), numbers[1]
    return a, b, ordered


def assert_native_is_dequantized(a, b, numbers):
    dimensions = DotDimensions.of(numbers, a.shape, b.shape)
    got = jax.jit(lambda a, b: native_product(a, b, dimensions, np.dtype(np.float32)))(a, b)
    values = [np.asarray(x.dequantize(), np.float64) for x in (a, b)]
    out = np.empty(got.shape)
    exact = products(*values, out, numbers).out
    magnitudes = products(*map(np.abs, values), out, numbers).out
    terms = int(np.prod([a.shape[axis] for axis in numbers[0][0]]))
    assert_within(got, exact, (terms + 2) * EPS * magnitudes)


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
    op = fp8.Fp8DotGeneral.init(fp8.Recipe.of(scaling))
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
    assert counts == {"mxfp8": 3, "deepseek": 3} | dict.fromkeys(list(native)[2:], 0)


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
