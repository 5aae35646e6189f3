"""Products with one scale: what each platform computes, and every way in which `vmap` may map operands and scale."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from haliax_fp8._numerics.quantized_array import QuantizedArray
from haliax_fp8._product.contraction import scaled_dot_general
from haliax_fp8._product.dimensions import DotDimensions
from haliax_fp8._product.scaled_product import scaled_product


ROWS, COLUMNS, SUMMED = 3, 5, 16
BFLOAT16 = np.dtype(jnp.bfloat16)


def data(seed, *shape):
    """Half integers, of which float32 holds every sum."""
    values = np.random.default_rng(seed).integers(-16, 17, shape) / 2.0
    return jnp.asarray(values.astype(ml_dtypes.float8_e4m3fn))


def multiply(a, b, scale, dtype=BFLOAT16, bits=1):
    """Two matrices, whose scales have so many bits together that bfloat16 holds their product, or not."""
    dims = DotDimensions.of((((1,), (0,)), ((), ())), (ROWS, SUMMED), (SUMMED, COLUMNS))
    one = jnp.float32(1.0)
    a, b = (QuantizedArray(x, one, scale_bits=bits) for x in (a, b))
    return scaled_product(a, b, scale, dims, lax.Precision.HIGHEST, dtype)


def exact(a, b, scale):
    """In float64, with leading axes that number members."""
    a, b, scale = (np.asarray(x, np.float64) for x in (a, b, scale))
    return np.einsum("...ij,...jk->...ik", a, b) * scale[..., None, None]


@pytest.mark.parametrize(("bits", "on_cuda"), [(1, "bf16"), (24, "f32")])
def test_a_program_has_what_its_platforms_compute(bits, on_cuda):
    function = jax.jit(functools.partial(multiply, bits=bits))
    args = data(0, ROWS, SUMMED), data(1, SUMMED, COLUMNS), jnp.float32(0.25)
    written = lambda platforms: re.findall(
        r"dot_general.*-> tensor<\d+x\d+x(\w+)>", function.trace(*args).lower(lowering_platforms=platforms).as_text()
    )
    assert [written((platform,)) for platform in ("cpu", "tpu", "rocm")] == [["f32"]] * 3
    assert written(("cuda",)) == [on_cuda]
    # A program for both decides when it runs.
    assert set(written(("cpu", "cuda"))) == {"f32", on_cuda}


@pytest.mark.parametrize("bits", [1, 24])
def test_bits_on_a_cpu(bits):
    """The sum is exact in float32, so that one rounding is left."""
    a, b, scale = data(0, ROWS, SUMMED), data(1, SUMMED, COLUMNS), jnp.float32(2.0**-3)
    out = jax.jit(functools.partial(multiply, bits=bits))(a, b, scale)
    np.testing.assert_array_equal(out, exact(a, b, scale).astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(multiply(a, b, scale, bits=bits), out)


MAPPED = [which for which in itertools.product((None, 0), repeat=3) if any(axis == 0 for axis in which)]


@pytest.mark.parametrize("inner", MAPPED)
def test_mapped_operands_and_scales(inner):
    for outer in [(None, None, None), *MAPPED]:
        sizes = 2, 4
        shapes = (ROWS, SUMMED), (SUMMED, COLUMNS), ()
        leading = [tuple(n for n, axes in zip(sizes, (outer, inner), strict=True) if axes[i] == 0) for i in range(3)]
        a, b = (data(i, *leading[i], *shapes[i]) for i in range(2))
        scale = jnp.exp2(jnp.arange(np.prod(leading[2], dtype=int), dtype=jnp.float32)).reshape(leading[2])
        function = jax.vmap(multiply, in_axes=inner)
        if outer != (None, None, None):
            function = jax.vmap(function, in_axes=outer)
        # The reference has both axes everywhere, of size one where an operand lacks them.
        whole = [
            np.asarray(x, np.float64).reshape(
                *(n if axes[i] == 0 else 1 for n, axes in zip(sizes, (outer, inner), strict=True)), *shapes[i]
            )
            for i, x in enumerate((a, b, scale))
        ]
        expected = exact(*whole).astype(ml_dtypes.bfloat16)
        expected = expected[0] if outer == (None, None, None) else expected
        np.testing.assert_array_equal(jax.jit(function)(a, b, scale), expected)


@pytest.mark.parametrize("members", [(4, 4), (4, 1)])
@pytest.mark.parametrize(("bits", "on_cuda"), [(1, "bf16"), (24, "f32")])
def test_members_multiply_as_one_product_does(members, bits, on_cuda):
    """On a GPU the batched product of an ensemble is in bfloat16 too, and its scales need no launch in float32."""
    shapes = (ROWS, SUMMED), (SUMMED, COLUMNS)
    dims = DotDimensions.of((((2,), (1,)), ((0,), (0,))), *((4, *shape) for shape in shapes))
    scales = [2.0 ** jnp.arange(-1, count - 1, dtype=jnp.float32) for count in members]
    arrays = [data(i, 4, *shape) for i, shape in enumerate(shapes)]

    def product(*arrays):
        a, b = (
            QuantizedArray(x, scale[:, None, None], scale_bits=bits) for x, scale in zip(arrays, scales, strict=True)
        )
        return scaled_dot_general(a, b, dims, lax.Precision.HIGHEST, BFLOAT16, None)

    expected = exact(arrays[0], arrays[1], np.multiply(*np.broadcast_arrays(*map(np.asarray, scales))))
    np.testing.assert_array_equal(jax.jit(product)(*arrays), expected.astype(ml_dtypes.bfloat16))
    text = jax.jit(product).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"dot_general.*-> tensor<\d+x\d+x\d+x(\w+)>", text) == [on_cuda]


def test_rows_with_a_scale_each_are_multiplied_in_float32():
    """Scales along a free axis do not belong to members."""
    a, b = data(0, ROWS, SUMMED), data(1, SUMMED, COLUMNS)
    dims = DotDimensions.of((((1,), (0,)), ((), ())), a.shape, b.shape)
    scale = 2.0 ** jnp.arange(ROWS, dtype=jnp.float32)
    rows = QuantizedArray(a, scale[:, None], scale_bits=1)
    columns = QuantizedArray(b, jnp.ones((1, 1)), scale_bits=1)
    out = scaled_dot_general(rows, columns, dims, lax.Precision.HIGHEST, BFLOAT16, None)
    np.testing.assert_array_equal(
        out, (exact(a, b, np.float64(1)) * np.asarray(scale)[:, None]).astype(ml_dtypes.bfloat16)
    )


def test_an_axis_of_one_operand_makes_no_copies_of_the_other():
    """A kernel that all examples share stays one."""
    function = jax.vmap(multiply, in_axes=(0, None, None))
    args = data(0, 4, ROWS, SUMMED), data(1, SUMMED, COLUMNS), jnp.float32(1.0)
    (equation,) = jax.make_jaxpr(function)(*args).eqns
    assert [v.aval.shape for v in equation.invars] == [(4, ROWS, SUMMED), (SUMMED, COLUMNS), ()]
