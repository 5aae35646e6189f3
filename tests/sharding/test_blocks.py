"""Products with a scale for each block, divided over devices, held against one device's and NumPy's."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import EPS, assert_within
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import haliax_fp8 as fp8
from haliax_fp8._product.block_product import native_product
from haliax_fp8._product.dimensions import DotDimensions
from haliax_fp8._product.divided_product import DividedProduct
from haliax_fp8.recipes import E4M3, BlockScaling, MXFP8Scaling, OperandUse


MESH = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
NUMBERS = ((2,), (0,)), ((), ())
INPUT, KERNEL = (4, 8, 256), (256, 64)
DIMENSIONS = DotDimensions.of(NUMBERS, INPUT, KERNEL)


@functools.cache
def operands():
    """Quantized operands, the exact product, and the sum of its terms' magnitudes."""
    rng = np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(rng.standard_normal(shape) * np.exp2(rng.integers(-8, 9, shape)), jnp.float32)
    a = MXFP8Scaling().quantize(draw(INPUT), OperandUse(E4M3, contracted=(2,)))
    b = BlockScaling(square=True).quantize(draw(KERNEL), OperandUse(E4M3, contracted=(0,)))
    values = [np.asarray(x.dequantize(), np.float64) for x in (a, b)]
    return a, b, values[0] @ values[1], np.abs(values[0]) @ np.abs(values[1])


def product(a, b):
    return native_product(a, b, DIMENSIONS, np.dtype(np.float32))


LAYOUTS = {
    "data parallel": (P("data"), P(), P("data")),
    "weights divided too": (P("data"), P("data"), P("data")),
    "over both axes of the mesh": (P("data"), P("data", "model"), P("data", None, "model")),
    "columns": (P(), P(None, "model"), P(None, None, "model")),
    "rows, each device with all of the result": (P(None, None, "model"), P("model"), P()),
    "rows, each device with a part": (P("data", None, "model"), P("model"), P("data", "model")),
    "the sum over both axes": (P(None, None, ("data", "model")), P(("data", "model")), P(("data", "model"))),
    "tokens of a sequence": (P(None, ("model", "data")), P("data"), P(None, ("model", "data"))),
    "nothing but the result": (P(), P(), P("data", None, "model")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_divided_products_are_exact(layout):
    """Whatever XLA has divided: the product of each device's parts, gathered or added up, is the product."""
    a, b, exact, magnitudes = operands()
    of_a, of_b, of_out = (NamedSharding(MESH, spec) for spec in LAYOUTS[layout])
    call = lambda x, y: product(fp8.recipes.QuantizedArray(x, a.scale, a.block, 1), with_data(b, y))
    out = jax.jit(call, out_shardings=of_out)(jax.device_put(a.data, of_a), jax.device_put(b.data, of_b))
    assert_within(out, exact, 260 * EPS * magnitudes)
