"""Grouped products as JAX's interpreter runs them, which raises for races and reads out of bounds."""

import dataclasses
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same
from jax import export
from jax.experimental.pallas import mosaic_gpu as plgpu, tpu as pltpu

from haliax_fp8 import Fp8DotGeneral, filter_grad, recipes
from haliax_fp8._numerics.quantized_array import QuantizedArray
from haliax_fp8._op import _spec
from haliax_fp8._product.grouped.contraction import RaggedContraction
from haliax_fp8._product.grouped.implementation import grouped_product
from haliax_fp8._product.primitive import fp8_dot_general
from haliax_fp8.devices import Device
from haliax_fp8.devices.grouped import GroupedImplementation
from haliax_fp8.recipes.support import Outcome, supported_in_groups


HOPPER, BLACKWELL, TPU = GroupedImplementation.HOPPER, GroupedImplementation.BLACKWELL, GroupedImplementation.TPU
XLA = GroupedImplementation.XLA

# More than 64 rows; an empty group; one within the first 64 rows of a tile of 128, which begins earlier than it; one
# that the end of the rows pushes beyond them; rows beyond the last group; nothing that tiles divide.
ROWS, INPUTS, OUTPUTS, SIZES = 180, 72, 40, (70, 0, 30, 61)


def interpreted(implementation):
    """The context in which JAX runs a device's Pallas kernels on a CPU."""
    if implementation is TPU:
        return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams())
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True, on_race="raise"))


def random(shape, dtype, seed=0):
    return np.random.default_rng(zlib.crc32(repr((shape, seed)).encode())).normal(size=shape).astype(dtype)


def reference(product, a, b, sizes):
    """In float64, from values in FP8 and their scales."""
    of = np.repeat(np.arange(len(sizes) + 1), [*sizes, len(a) - sum(sizes)])
    if product == "wgrad":
        return np.stack([a[of == group].T @ b[of == group] for group in range(len(sizes))])
    b = np.concatenate([b, np.zeros_like(b[:1])])
    return np.stack([row @ (b[group] if product == "fprop" else b[group].T) for row, group in zip(a, of, strict=True)])


E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2

# Operands of each product: shape and format, and the shapes of their scales per tensor, per row, and per block of 128.
PRODUCTS = {
    "fprop": ((ROWS, INPUTS), E4M3, (len(SIZES), INPUTS, OUTPUTS), E4M3),
    "dgrad": ((ROWS, OUTPUTS), E5M2, (len(SIZES), INPUTS, OUTPUTS), E4M3),
    "wgrad": ((ROWS, INPUTS), E4M3, (ROWS, OUTPUTS), E5M2),
}
ROWWISE = {
    "fprop": ((ROWS, 1), (len(SIZES), 1, OUTPUTS)),
    "dgrad": ((ROWS, 1), (len(SIZES), INPUTS, 1)),
    "wgrad": ((1, INPUTS), (1, OUTPUTS)),
}


def scaled(data, shape, seed, block=None):
    scale = np.exp2(np.random.default_rng(seed).uniform(-3, 3, size=shape)).astype(np.float32)
    return QuantizedArray(jnp.asarray(data), jnp.asarray(scale), block)


def test_rows_beyond_the_last_group_enter_no_amax():
    """Whatever a buffer holds there, and whatever gradient comes back to them."""
    sizes, op = jnp.asarray(SIZES), Fp8DotGeneral.init("delayed")
    kernels = jnp.asarray(random((len(SIZES), INPUTS, OUTPUTS), np.float32))
    used = (jnp.arange(ROWS) < sum(SIZES))[:, None]
    for dtype, value in ((jnp.float32, 1e7), (jnp.bfloat16, jnp.nan), (jnp.bfloat16, 1e7)):
        rows, c = (jnp.asarray(random((ROWS, n), np.float32)).astype(dtype) for n in (INPUTS, OUTPUTS))

        def loss(arguments, c, dtype=dtype):
            op, rows = arguments
            return (op.ragged_dot(rows, kernels.astype(dtype), sizes) * c).astype(jnp.float32).sum()

        found, expected = (
            jax.jit(filter_grad(loss))((op, jnp.where(used, rows, other)), jnp.where(used, c, other))
            for other in (jnp.asarray(value, dtype), jnp.asarray(0.0, dtype))
        )
        assert_same(found, expected)
        of_each = jax.vmap(lambda rows, loss=loss, c=c: filter_grad(loss)((op, rows), c)[0])
        stacked = of_each(jnp.stack([jnp.where(used, rows, jnp.asarray(value, dtype)), 2 * rows]))
        largest = jnp.abs(jnp.where(used, rows, 0.0)).max()
        np.testing.assert_array_equal(stacked.amax_history("input")[:, 0], jnp.stack([largest, 2 * largest]))


@pytest.mark.parametrize(
    "recipe",
    [
        recipes.by_name("current"),
        recipes.by_name("mxfp8"),
        recipes.Recipe.of(recipes.NVFP4Scaling(), forward=recipes.E2M1, backward=recipes.E2M1),
        recipes.by_name("delayed").measured,
        *(
            pytest.param(recipe, marks=pytest.mark.more)
            for recipe in [*map(recipes.by_name, ("rowwise", "deepseek")), recipes.by_name("current").measured]
        ),
    ],
    ids=str,
)
def test_what_rows_beyond_the_last_group_hold_changes_nothing(recipe):
    """For scales that come from the operands themselves, and for statistics."""
    sizes, op = jnp.asarray(SIZES), Fp8DotGeneral.init(recipe)
    kernels = jnp.asarray(random((len(SIZES), INPUTS, OUTPUTS), np.float32)).astype(jnp.bfloat16)
    rows, c = (jnp.asarray(random((ROWS, n), np.float32)).astype(jnp.bfloat16) for n in (INPUTS, OUTPUTS))
    used = (jnp.arange(ROWS) < sum(SIZES))[:, None]

    @jax.jit
    def step(arguments, c):
        out = lambda arguments: arguments[0].ragged_dot(*arguments[1:], sizes)
        return out(arguments), filter_grad(lambda arguments: (out(arguments) * c).astype(jnp.float32).sum())(arguments)

    zeros, large, nan = (
        step((op, jnp.where(used, rows, other), kernels), jnp.where(used, c, other))
        for other in [jnp.asarray(value, jnp.bfloat16) for value in (0.0, 1e7, jnp.nan)]
    )
    assert_same(large, zeros)
    assert_same(nan, zeros)


@pytest.mark.parametrize(
    "implementation, product, rowwise",
    [
        (HOPPER, "fprop", False),
        (HOPPER, "wgrad", True),
        (BLACKWELL, "dgrad", False),
        (BLACKWELL, "wgrad", False),
        (TPU, "fprop", True),
        (TPU, "wgrad", False),
        *(
            pytest.param(*case, marks=pytest.mark.more)
            for case in [
                (HOPPER, "fprop", True),
                (HOPPER, "dgrad", False),
                (HOPPER, "dgrad", True),
                (HOPPER, "wgrad", False),
                (BLACKWELL, "fprop", False),
                (BLACKWELL, "fprop", True),
                (BLACKWELL, "dgrad", True),
                (BLACKWELL, "wgrad", True),
                (TPU, "fprop", False),
                (TPU, "dgrad", False),
                (TPU, "dgrad", True),
                (TPU, "wgrad", True),
            ]
        ),
    ],
)
def test_products_equal_float64(implementation, product, rowwise):
    """Sums of FP8 products in float32; only the order of additions differs, so 1e-6 of the largest."""
    a_shape, a_format, b_shape, b_format = PRODUCTS[product]
    scales = ROWWISE[product] if rowwise else ((), ())
    a, b = scaled(random(a_shape, a_format), scales[0], 1), scaled(random(b_shape, b_format), scales[1], 2)
    sizes = jnp.array(SIZES, jnp.int32)
    precision = jax.lax.Precision.DEFAULT if product == "fprop" else jax.lax.Precision.HIGHEST
    with interpreted(implementation):
        found = grouped_product(implementation, product, a, b, sizes, precision, np.dtype(np.float32))
    values = [np.asarray(x.data, np.float64) * np.asarray(x.scale, np.float64) for x in (a, b)]
    expected = reference(product, *values, SIZES)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    if product != "wgrad":
        assert (np.asarray(found)[sum(SIZES) :] == 0).all()


@pytest.mark.more
@pytest.mark.parametrize(
    "product", ["wgrad", pytest.param("fprop", marks=pytest.mark.more), pytest.param("dgrad", marks=pytest.mark.more)]
)
def test_blocks_of_128_are_scaled_within_the_sum(product):
    """Of 200 elements along each sum: the second block is partial."""
    shapes = {
        "fprop": ((60, 200), (60, 2), (1, 128), (2, 200, 64), (2, 2, 1), (1, 128, 128)),
        "dgrad": ((60, 200), (60, 2), (1, 128), (2, 64, 200), (2, 1, 2), (1, 128, 128)),
        "wgrad": ((200, 64), (2, 64), (128, 1), (200, 64), (2, 64), (128, 1)),
    }
    a_shape, a_scale, a_block, b_shape, b_scale, b_block = shapes[product]
    sizes = (20, 40) if product != "wgrad" else (90, 110)
    a, b = scaled(random(a_shape, E4M3), a_scale, 1, a_block), scaled(random(b_shape, E4M3), b_scale, 2, b_block)
    high = jax.lax.Precision.HIGHEST
    with interpreted(HOPPER):
        found = grouped_product(HOPPER, product, a, b, jnp.array(sizes), high, np.dtype(np.float32))
    expected = reference(product, *(np.asarray(x.dequantize(), np.float64) for x in (a, b)), sizes)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def multiplied(implementation, x, w, sizes, recipe="delayed"):
    """Output, gradients and next state of a product of a device's implementation."""
    op = Fp8DotGeneral.init(recipe)

    def run(op, x, w):
        spec = _spec(op, RaggedContraction(implementation=implementation), x, w, None, None)
        record, key = None if op.state is None else op.state.record, None if op.key is None else op.key.array
        one = lambda x, w, sizes: fp8_dot_general(x, w, record, spec, sizes, key=key)
        out = (jax.vmap(one) if x.ndim == 3 else one)(x, w, sizes)
        return (out.astype(jnp.float32) ** 2).sum(), out

    # Equinox's, operation by operation: a kernel that is interpreted cannot be part of a compiled program.
    gradients, out = eqx.filter_grad(lambda args: run(*args), has_aux=True)((op, x, w))
    return out, gradients


@pytest.mark.more
@pytest.mark.parametrize("implementation, batch", [(HOPPER, ()), (BLACKWELL, (2,)), (TPU, (2,))], ids=str)
def test_an_op_computes_what_it_computes_on_a_cpu(implementation, batch):
    """State bit for bit; bfloat16 rounds what differs in the last bit of float32."""
    x, w = random((*batch, 50, 48), np.float32), random((*batch, 3, 48, 24), np.float32)
    sizes = jnp.broadcast_to(jnp.array([20, 0, 17]), (*batch, 3))
    x, w = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)
    with interpreted(implementation):
        found = multiplied(implementation, x, w, sizes)
    expected = multiplied(XLA, x, w, sizes)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        tolerance = 0.0 if a.dtype == jnp.float32 else 2.0**-7 * float(jnp.abs(b).max())
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=0, atol=tolerance)


def test_wrong_sizes_are_not_a_number_inside_jit():
    op, x, w = Fp8DotGeneral.init("current"), jnp.ones((5, 4)), jnp.ones((2, 4, 3))
    product = jax.jit(op.ragged_dot)
    assert jnp.isfinite(product(x, w, jnp.array([2, 3]))).all()
    for sizes in ([2, 4], [-1, 3]):
        assert jnp.isnan(product(x, w, jnp.array(sizes))).all()


@pytest.mark.parametrize(
    "device, recipe, outcome, reason",
    [
        ("h100", "delayed", Outcome.NATIVE, "kernel for Hopper multiplies E4M3 and E5M2"),
        ("h200", "deepseek", Outcome.NATIVE, "kernel for Hopper multiplies E4M3"),
        ("b200", "rowwise", Outcome.NATIVE, "kernel for Blackwell"),
        ("b200", "deepseek", Outcome.REFUSED, "takes scales of whole tensors and rows, not those of BlockScaling"),
        ("h100", "mxfp8", Outcome.REFUSED, "not those of MXFP8Scaling"),
        ("tpu7x", "delayed", Outcome.NATIVE, "kernel for TPU multiplies E4M3 and E5M2"),
        ("tpu7x", "deepseek", Outcome.REFUSED, "takes scales of whole tensors and rows"),
        ("tpu6e", "delayed", Outcome.REFUSED, "need a TPU7x"),
        ("mi350x", "delayed", Outcome.REFUSED, "no grouped products in FP8 for AMD Instinct MI350X"),
        ("a100", "delayed", Outcome.REFUSED, "compute capability 8.9"),
        ("cpu", "mxfp8", Outcome.EMULATED, "no FP8 units"),
    ],
)
def test_which_device_has_an_implementation_for_what(device, recipe, outcome, reason):
    found = supported_in_groups(Fp8DotGeneral.init(recipe).recipe, Device.by_name(device))
    assert found.outcome is outcome and reason in found.reason


def test_a_device_without_an_implementation_raises_unless_dense_products_are_allowed():
    op, shapes = Fp8DotGeneral.init(), [jax.ShapeDtypeStruct((8, 4), jnp.float32)]
    shapes += [jax.ShapeDtypeStruct((2, 4, 3), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)]
    with Device.by_name("tpu6e").as_default():
        with pytest.raises(ValueError, match=r"need a TPU7x.*allow_dense_groups=True"):
            jax.eval_shape(op.ragged_dot, *shapes)
        dense = dataclasses.replace(op, allow_dense_groups=True)
        assert jax.eval_shape(dense.ragged_dot, *shapes).shape == (8, 3)
    with Device.by_name("h100").as_default():
        text = str(jax.make_jaxpr(op.ragged_dot)(*(jnp.zeros(x.shape, x.dtype) for x in shapes)))
        assert "ragged_dot" not in text


# --- Programs for other machines --------------------------------------------------------------------------------------


def test_a_program_for_another_platform_is_refused_or_traced_for_it():
    """Traced for a CPU, it would multiply each row by the kernels of all groups on a GPU."""
    op = Fp8DotGeneral.init()
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 128), (2, 128, 128))]
    shapes.append(jax.ShapeDtypeStruct((2,), jnp.int32))
    exported = lambda *platforms: export.export(jax.jit(op.ragged_dot), platforms=platforms)(*shapes)
    assert exported("cpu").platforms == ("cpu",)
    for platforms in (("cuda",), ("cpu", "tpu")):
        with pytest.raises(ValueError, match=r"traced for cpu and cannot be.*as_default"):
            exported(*platforms)
    with Device.by_name("h100").as_default():
        # JAX does not promise that this call keeps its meaning.
        unchecked = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
        text = export.export(jax.jit(op.ragged_dot), platforms=["cuda"], disabled_checks=unchecked)(*shapes)
    assert "mosaic_gpu" in text.mlir_module() and "chlo.ragged_dot" not in text.mlir_module()
    with Device.by_name("tpu6e").as_default():
        dense = jax.jit(dataclasses.replace(op, allow_dense_groups=True).ragged_dot)
        assert export.export(dense, platforms=["cpu", "tpu"])(*shapes).platforms == ("cpu", "tpu"), "was allowed"
