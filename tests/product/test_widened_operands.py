"""Which operands stay rounded because XLA widens them on the device that a program is for.

What XLA does with them is in `tests/programs/test_compiled_widened.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import E4M3, equations, products_in, state_is_constant, unchecked

import haliax_fp8 as fp8


MATRIX = (((1,), (0,)), ((), ()))


def traced(device, recipe, m, k, n, dtype=jnp.float32):
    """The forward pass of a product and its gradients, as traced for a device."""
    x, w = jnp.ones((m, k), dtype), jnp.ones((k, n), dtype)
    with fp8.devices.Device.by_name(device).as_default():
        op = fp8.Fp8DotGeneral.init(recipe)
        product = lambda x, w: op(x, w, MATRIX)
        return jax.make_jaxpr(lambda x, w: jax.vjp(product, x, w)[1](jnp.ones((m, n), dtype)))(x, w)


def kept_before(jaxpr):
    """For every operand of a product, whether its rounding is kept on one device; and its dtype."""
    inner = list(equations(jaxpr))
    made_by = {id(out): equation for equation in inner for out in equation.outvars}
    found = []
    for product in products_in(jaxpr):
        for operand in product.invars[:2]:
            maker = made_by.get(id(operand))
            if maker is not None and maker.primitive.name == "convert_element_type":
                maker = made_by.get(id(maker.invars[0]))
            is_marked = maker is not None and maker.primitive.name == "fp8_keep_cast"
            found.append((is_marked and maker.params["smallest"] == 1, operand.aval.dtype))
    return found


@state_is_constant
@pytest.mark.parametrize(
    "device, shape, kept",
    [
        ("h100", (32, 16, 48), False),
        ("h100", (1, 128, 256), True),
        ("h100", (128, 256, 1), True),
        ("h100", (128, 1, 256), True),
        ("h100", (4, 4, 4), True),
        ("a100", (32, 16, 48), True),
        ("v6e", (32, 16, 48), True),
        ("tpu7x", (32, 16, 48), False),
        ("tpu7x", (4, 4, 4), False),
        ("tpu7x", (1, 128, 256), True),
        ("local", (1, 128, 256), False),
    ],
)
def test_which_operands_are_kept_rounded(device, shape, kept):
    for recipe in ("delayed", "rowwise"):
        found = kept_before(traced(device, recipe, *shape))
        assert len(found) == 6
        # Of matrices that the device multiplies in FP8, none.
        in_float32 = np.dtype(jnp.float32) in {dtype for _, dtype in found}
        assert [is_kept for is_kept, _ in found] == [kept] * 6
        assert in_float32 == (device == "h100" and shape == (4, 4, 4))


def test_sizes_that_an_export_leaves_open_may_be_one():
    op, (rows,) = fp8.Fp8DotGeneral.init("delayed"), jax.export.symbolic_shape("rows")
    x, w = jax.ShapeDtypeStruct((rows, 128), jnp.float32), jax.ShapeDtypeStruct((128, 256), jnp.float32)
    with fp8.devices.Device.by_name("h100").as_default(), unchecked():
        exported = jax.export.export(jax.jit(lambda x, w: op(x, w, MATRIX)), platforms=["cuda"])(x, w)
    assert exported.mlir_module().count("stablehlo.xor") == 2


def test_two_operands_in_e5m2_are_kept_rounded():
    """No unit of NVIDIA's multiplies two of them."""
    recipe = fp8.Recipe.of(fp8.recipes.CurrentScaling(), forward=fp8.recipes.E5M2)
    found = kept_before(traced("h100", recipe, 32, 16, 48))
    assert [is_kept for is_kept, _ in found] == [True] * 6


@pytest.mark.parametrize(
    "function",
    [
        lambda x: fp8.ops.qdq(x, E4M3, jnp.float32(2.0), jnp.float32),
        lambda x: fp8.recipes.quantize(x, jnp.float32(2.0), fp8.recipes.E4M3).dequantize(),
        lambda x: fp8.recipes.Rounding.TO_NEAREST.squared_error(x, fp8.recipes.E4M3),
    ],
)
def test_what_is_read_back_is_rounded(function):
    inner = list(equations(jax.make_jaxpr(function)(jnp.ones((4, 4)))))
    made_by = {id(out): equation.primitive.name for equation in inner for out in equation.outvars}
    widened = [e for e in inner if e.primitive.name == "convert_element_type" and e.invars[0].aval.dtype == E4M3]
    assert [made_by[id(e.invars[0])] for e in widened] == ["fp8_keep_cast"]


@pytest.mark.parametrize(
    "device, rows, means",
    [("h100", 32, ("SCALED_DOT", "DEQUANTIZED")), ("b200", 32, ("SCALED_MATMUL", "SCALED_MATMUL"))]
    + [("a100", 32, ("DEQUANTIZED", "DEQUANTIZED")), ("h100", 1, ("DEQUANTIZED", "DEQUANTIZED"))]
    + [("local", 32, ("SCALED_DOT", "SCALED_MATMUL"))],
)
def test_what_multiplies_blocks(device, rows, means):
    """On a GPU without FP8 a Triton kernel would end the process; for a vector Triton has none."""
    jaxpr = traced(device, "mxfp8", rows, 64, 96)
    fprop = next(e for e in equations(jaxpr) if e.primitive.name == "fp8_block_product")
    assert tuple(each.name for each in fprop.params["implementations"]) == means


@pytest.mark.parametrize(
    "device, means", [("b200", "SCALED_MATMUL"), ("h100", "DEQUANTIZED"), ("local", "DEQUANTIZED")]
)
def test_what_multiplies_blocks_in_fp4(device, means):
    """Without units for FP4, XLA would expand cuDNN's call to a product in float32."""
    jaxpr = traced(device, "nvfp4_fprop", 32, 64, 96)
    fprop = next(e for e in equations(jaxpr) if e.primitive.name == "fp8_block_product")
    assert tuple(each.name for each in fprop.params["implementations"]) == (means, means)
