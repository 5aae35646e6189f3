"""Where XLA widens FP8 operands, they are rounded first: vectors, small matrices, and devices without FP8 units.

XLA drops a cast to FP8 that is followed by a cast back. So each operand of a product must still be cast in the compiled
program, and what is cast must not be read in a wider type as well.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from helpers import state_is_constant
from jax import lax

import haliax_fp8 as fp8
from haliax_fp8.preflight import compilable_devices, inspect_step
from haliax_fp8.recipes import E4M3


pytestmark = pytest.mark.slow

SHAPES = {"matrices": (512, 256, 768), "one row": (1, 256, 768), "one column": (512, 256, 1), "one term": (64, 1, 32)}
SMALL = (4, 4, 4)

further = lambda *cases: [pytest.param(case, marks=pytest.mark.more) for case in cases]


@pytest.fixture
def program():
    """The compiled gradient of a product, in text, for a device that XLA's compiler is installed for."""

    def program_of(device, recipe, shape, dtype):
        if missing := compilable_devices[device].missing():
            pytest.skip(missing)
        m, k, n = shape
        x, w, g = (jnp.ones(sizes, dtype) for sizes in ((m, k), (k, n), (m, n)))
        with fp8.devices.Device.by_name(device).as_default():
            op = fp8.Fp8DotGeneral.init(recipe)

        def step(op, x, w, g):
            out, pullback = jax.vjp(lambda x, w: op(x, w, (((1,), (0,)), ((), ()))), x, w)
            return out, pullback(g)

        return inspect_step(step, op, x, w, g, device=device).step.text

    return program_of


def casts_of(text):
    """How many clipped numbers become FP8, and how many are used as they are."""
    narrow = wide = 0
    for name in re.findall(r"^ *(?:ROOT )?(%clamp[\w.]*) = \S+ clamp\(", text, re.MULTILINE):
        users = re.findall(rf"= (\w+)\[\S* (\w+)\([^)\n]*{re.escape(name)}[,)]", text)
        are_casts = [opcode == "convert" and dtype.startswith("f8") for dtype, opcode in users]
        narrow, wide = narrow + any(are_casts), wide + (not all(are_casts))
    return narrow, wide


@state_is_constant
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "mxfp8"])
@pytest.mark.parametrize("device", ["h100", "a100", "tpu6e"])
def test_operands_are_rounded(program, device, recipe, shape):
    fp8_casts, others = casts_of(program(device, recipe, SHAPES[shape], jnp.bfloat16))
    # Input, kernel and output gradient, or both ways in which each is quantized.
    assert fp8_casts >= 3 and others == 0


@state_is_constant
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_small_products_are_not_in_float16(program, recipe, dtype):
    """In float16 448 * 448 is infinite. XLA multiplies matrices with fewer than 100 elements in a loop."""
    text = program("h100", recipe, SMALL, dtype)
    assert casts_of(text)[0] >= 3 and casts_of(text)[1] == 0
    assert not re.findall(r"\bf16\[", text)


def test_parts_with_one_row_or_column_are_rounded():
    """Sizes are those of the whole product; XLA decides by what a device has of it."""
    if missing := compilable_devices["h100"].missing():
        pytest.skip(missing)
    P = jax.P
    op, spec = fp8.Fp8DotGeneral.init("delayed"), (P(), P("devices"), P())
    for shapes, shardings in ((((8, 256), (256, 768)), spec), (((64, 256), (256, 8)), (P(), P(), P(None, "devices")))):
        with fp8.devices.Device.by_name("h100").as_default():
            step = lambda op, x, w: op(x, w, (((1,), (0,)), ((), ())))
            arrays = [jnp.ones(shape, jnp.bfloat16) for shape in shapes]
            report = inspect_step(step, op, *arrays, device="h100", devices=8, shardings=shardings)
        assert casts_of(report.step.text) == (2, 0)


def test_what_is_compressed_is_kept_in_fp8():
    """Without a scan, whose boundary would keep the rounding."""
    if missing := compilable_devices["h100"].missing():
        pytest.skip(missing)
    swiglu = fp8.memory.compressed(lambda gate, up: jax.nn.silu(gate) * up)

    def step(x, gate, up, down):
        loss = lambda *ws: ((swiglu(x @ ws[0], x @ ws[1]) @ ws[2]).astype(jnp.float32) ** 2).sum()
        return jax.grad(loss, (0, 1, 2))(gate, up, down)

    shapes = (512, 256), (256, 1024), (256, 1024), (1024, 256)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    text = inspect_step(step, *arrays, device="h100").step.text
    assert casts_of(text) == (2, 0)


def test_xla_still_needs_this():
    """What the tests above guard against: alone, XLA drops the rounding, and takes float16 for small products."""
    if missing := compilable_devices["h100"].missing():
        pytest.skip(missing)
    clipped = lambda x: lax.clamp(-448.0, x, 448.0).astype(jnp.float8_e4m3fn)
    product = lambda x, w: lax.dot(clipped(x), clipped(w), preferred_element_type=jnp.float32)
    of = lambda *shapes: inspect_step(product, *(jnp.ones(shape) for shape in shapes), device="h100").step.text
    assert casts_of(of((1, 256), (256, 768)))[1] > 0
    assert re.findall(r"\bf16\[", of((4, 4), (4, 4)))


def test_values_that_are_read_back_are_rounded():
    """Quantize-dequantize, and what a `QuantizedArray` stands for, in one program."""
    if missing := compilable_devices["h100"].missing():
        pytest.skip(missing)
    functions = (
        lambda x: fp8.ops.qdq(x, jnp.float8_e4m3fn, jnp.float32(2.0), jnp.float32),
        lambda x: fp8.recipes.quantize(x, jnp.float32(2.0), E4M3).dequantize(),
    )
    for function in functions:
        narrow = r"= f8e4m3fn\[[^\]]*\]\S* convert\("
        x = jnp.ones((64, 64))
        assert re.findall(narrow, inspect_step(function, x, device="h100").step.text)
        # A gradient is not FP8 data: it has no scale, and passes as if there were no cast.
        backward = lambda x, g, function=function: jax.vjp(function, x)[1](g)
        text = inspect_step(backward, jnp.ones((64, 64)), jnp.ones((64, 64)), device="h100").step.text
        assert not re.findall(narrow, text)
