"""Products with a scale for each block, divided over devices, held against one device's and NumPy's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import EPS, assert_within
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import haliax_fp8 as fp8
from haliax_fp8._product.blocks import native_product
from haliax_fp8._product.dimensions import DotDimensions
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


# What input, kernel and result are divided over, and how devices communicate.
LAYOUTS = {
    "data parallel": (P("data"), P(), P("data"), set()),
    "weights divided too": (P("data"), P(None, "data"), P("data"), {"all-gather"}),
    "over both axes of the mesh": (P("data"), P("data", "model"), P("data", None, "model"), {"all-gather"}),
    "columns": (P(), P(None, "model"), P(None, None, "model"), set()),
    "rows, each device with all of the result": (P(None, None, "model"), P("model"), P(), {"all-reduce"}),
    "rows, each device with a part": (P("data", None, "model"), P("model"), P("data", "model"), {"reduce-scatter"}),
    "the sum over both axes": (
        P(None, None, ("data", "model")),
        P(("data", "model")),
        P(("data", "model")),
        {"reduce-scatter"},
    ),
    "tokens of a sequence": (P(None, "data"), P("data"), P(None, "data"), {"all-gather"}),
    "nothing but the result": (P(), P(), P("data", None, "model"), set()),
}


COLLECTIVES = "all-gather", "all-reduce", "reduce-scatter", "all-to-all"


@pytest.mark.more
@pytest.mark.parametrize("layout", LAYOUTS)
def test_divided_products_are_exact(layout):
    """Whatever is divided: the product of each device's parts, gathered or added up, is the product."""
    *specs, expected = LAYOUTS[layout]
    a, b, exact, magnitudes = operands()
    of_a, of_b, of_out = (NamedSharding(MESH, spec) for spec in specs)
    call = lambda x, y: product(dataclasses.replace(a, data=x), dataclasses.replace(b, data=y))
    program = jax.jit(call, out_shardings=of_out).lower(
        jax.ShapeDtypeStruct(INPUT, E4M3.dtype, sharding=of_a), jax.ShapeDtypeStruct(KERNEL, E4M3.dtype, sharding=of_b)
    )
    compiled = program.compile()
    out = compiled(jax.device_put(a.data, of_a), jax.device_put(b.data, of_b))
    assert_within(out, exact, 260 * EPS * magnitudes)
    # Of data and results. Scales are 1/32 as many bytes.
    lines = [line for line in compiled.as_text().splitlines() if "u8[" not in line]
    assert {name for name in COLLECTIVES if any(f" {name}(" in line for line in lines)} == expected


@pytest.mark.parametrize("specs", [(P("data"), P("data")), (P("data"), P(None, "data")), (P(None, "data"), P("data"))])
def test_fewer_blocks_than_devices(specs):
    """Two blocks and six columns on four devices: XLA would divide them over a part of the mesh's axis."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x, w = jax.random.normal(jax.random.key(0), (8, 64)), jax.random.normal(jax.random.key(1), (64, 8))

    @jax.jit
    def multiply(x, w):
        a = MXFP8Scaling().quantize(x, OperandUse(E4M3, contracted=(1,)))
        b = BlockScaling(square=True).quantize(w[:, :6], OperandUse(E4M3, contracted=(0,)))
        dimensions = DotDimensions.of((((1,), (0,)), ((), ())), x.shape, (64, 6))
        return native_product(a, b, dimensions, np.dtype(np.float32))

    divided = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, w), specs, strict=True)]
    np.testing.assert_allclose(multiply(*divided), multiply(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.more
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_devices_multiply_their_parts(check_vma):
    a, b, exact, magnitudes = operands()
    parts = lambda x, scale, y: product(dataclasses.replace(a, data=x, scale=scale), dataclasses.replace(b, data=y))
    tokens = P(None, "data")
    mapped = jax.shard_map(parts, mesh=MESH, in_specs=(tokens, tokens, P()), out_specs=tokens, check_vma=check_vma)
    assert_within(jax.jit(mapped)(a.data, a.scale, b.data), exact, 260 * EPS * magnitudes)


def loss(op, x, w):
    return (op(x, w, NUMBERS) ** 2).sum()


@pytest.mark.more
@pytest.mark.parametrize("recipe", ["mxfp8", "deepseek"])
def test_gradients_on_several_devices_are_those_of_one(recipe):
    """With automatic axes, and inside `shard_map`: blocks do not know of devices."""
    op = fp8.Fp8DotGeneral.init(recipe)
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((4, 128, 256), KERNEL)))
    gradients = jax.grad(loss, (1, 2))
    expected = jax.jit(gradients)(op, x, w)
    on = lambda array, *spec: jax.device_put(array, NamedSharding(MESH, P(*spec)))
    divided = jax.jit(gradients)(op, on(x, "data"), on(w, "data"))

    def of_parts(op, x, w):
        return jax.lax.psum(loss(op, x, w), "data")

    mapped = jax.shard_map(of_parts, mesh=MESH, in_specs=(P(), P("data"), P()), out_specs=P())
    for on_devices in (divided, jax.jit(jax.grad(mapped, (1, 2)))(op, x, w)):
        for got, wanted in zip(on_devices, expected, strict=True):
            # The loss's own sum over devices, and that of dw: another order, and then another E4M3 value for a few.
            assert np.linalg.norm(got - wanted) < 2e-3 * np.linalg.norm(wanted)


def lowered_for(platform, function, *specs):
    arguments = [
        jax.ShapeDtypeStruct(shape, E4M3.dtype, sharding=NamedSharding(MESH, spec))
        for shape, spec in zip((INPUT, KERNEL), specs, strict=True)
    ]
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def test_what_cannot_be_divided_is_refused_by_name():
    a, b, *_ = operands()
    call = lambda x, y: product(dataclasses.replace(a, data=x), dataclasses.replace(b, data=y))
    assert "CustomSPMDPartitioning" in lowered_for("cuda", call, P("data"), P("data"))
    some = jax.shard_map(call, mesh=MESH, in_specs=(P(), P()), out_specs=P(), axis_names={"data"}, check_vma=False)
    with pytest.raises(ValueError, match=r"shard_map over \['data'\].*'model'.*mxfp8|mxfp8.*shard_map over"):
        lowered_for("cuda", some, P(), P())
    with pytest.raises(ValueError, match="mxfp8.* 4 AMD devices"):
        lowered_for("rocm", call, P("data"), P())


def test_a_product_does_not_depend_on_how_jax_finds_it():
    """Without gradients, and under `jax.checkpoint`, the product is a primitive of its own, whose lowering needs to
    know of devices."""
    op = fp8.Fp8DotGeneral.init("mxfp8")
    for function in (lambda x, w: op(x, w, NUMBERS), jax.grad(jax.checkpoint(lambda x, w: loss(op, x, w)), 1)):
        arguments = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (INPUT, KERNEL))
        specs = NamedSharding(MESH, P("data")), NamedSharding(MESH, P("data"))
        traced = jax.jit(function, in_shardings=specs).trace(*arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "CustomSPMDPartitioning" in text and "scaled_dot" not in text
