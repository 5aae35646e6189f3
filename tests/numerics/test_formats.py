"""Formats and the saturating cast, held against an independent decoder and a search through all 256 codes."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from haliax_fp8._numerics.casts import saturating_cast
from haliax_fp8._numerics.quantized_array import divide_by
from haliax_fp8.formats import E2M1, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, Format


FORMATS = [E4M3, E5M2, E4M3FNUZ, E5M2FNUZ]
BIAS = {E4M3: 7, E5M2: 15, E4M3FNUZ: 8, E5M2FNUZ: 16}

over_formats = pytest.mark.parametrize("format", FORMATS, ids=repr)
over_input_dtypes = pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["f32", "bf16", "f16"]
)


def decode(code: int, format: Format) -> float:
    """The value of one code, from the papers' definitions: sign, biased exponent, significand, and what is special."""
    mantissa_bits = 2 if format in (E5M2, E5M2FNUZ) else 3
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & (2**mantissa_bits - 1)
    if format in (E4M3FNUZ, E5M2FNUZ):
        if code == 0x80:
            return math.nan
    elif format is E4M3:
        if code & 0x7F == 0x7F:
            return math.nan
    elif exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - BIAS[format] - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - BIAS[format])


VALUES = {format: np.array([decode(code, format) for code in range(256)]) for format in FORMATS}


def nearest(x: np.ndarray, format: Format) -> np.ndarray:
    """The code nearest to each value (float64) among all finite codes; the even one of two; the largest beyond."""
    values = VALUES[format]
    codes = np.flatnonzero(np.isfinite(values))
    # Even codes first, and the first minimum taken: a tie goes to the even code. (±0 are both even, and equal.)
    codes = codes[np.argsort(codes & 1, kind="stable")]
    distance = np.abs(np.clip(x, -format.max, format.max)[..., None] - values[codes])
    return np.where(np.isnan(x), np.nan, values[codes[np.argmin(distance, axis=-1)]])


def cast_to_float64(x: jax.Array, format: Format) -> np.ndarray:
    data = saturating_cast(x, format)
    assert (data.dtype, data.shape) == (format.dtype, x.shape)
    # Decoded from the bits: the cast back is not under test, nor trusted.
    return VALUES[format][np.asarray(data).view(np.uint8)]


# --- Limits -----------------------------------------------------------------------------------------------------------


@over_formats
def test_values_are_ml_dtypes(format):
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(codes.view(format.dtype).astype(np.float64), VALUES[format])


@over_formats
def test_limits_are_those_of_ml_dtypes_and_of_the_codes(format):
    limits, positive = ml_dtypes.finfo(format.dtype), VALUES[format][VALUES[format] > 0]
    positive = positive[np.isfinite(positive)]
    assert format.max == float(limits.max) == positive.max()
    assert format.smallest_normal == float(limits.smallest_normal) == 2.0 ** (1 - BIAS[format])
    assert format.smallest_subnormal == float(limits.smallest_subnormal) == positive.min()
    assert format.mantissa_bits == limits.nmant == 7 - limits.nexp
    assert format.dynamic_range == math.log2(positive.max() / positive.min())


def test_published_maxima():
    assert [format.max for format in FORMATS] == [448.0, 57344.0, 240.0, 57344.0]
    assert (E2M1.max, E2M1.smallest_normal, E2M1.smallest_subnormal) == (6.0, 1.0, 0.5)


@over_formats
def test_relative_error_is_reached_and_never_exceeded(format):
    x = np.linspace(format.smallest_normal, format.max, 4097, dtype=np.float32)
    x = np.concatenate([x, np.geomspace(format.smallest_normal, format.max, 4097, dtype=np.float32)])
    error = np.abs(cast_to_float64(jnp.asarray(x), format) - x) / x
    assert error.max() <= format.relative_error
    # The worst case is just above a power of two, half way to the next value: u / (1 + u) for u = 2**-(m + 1).
    assert error.max() > 0.9 * format.relative_error / (1 + format.relative_error)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8], ids=["f32", "bf16", "int8"])
def test_format_refuses_other_dtypes(dtype):
    message = rf"dtype={jnp.dtype(dtype).name} of format 'Wide' is not .* eight bits or fewer; use one such as"
    with pytest.raises(ValueError, match=message):
        Format("Wide", jnp.dtype(dtype))


def test_formats_are_values():
    """Equal by content and hashable: they are part of static configuration."""
    assert Format("E4M3", E4M3.dtype) == E4M3 != E5M2
    assert {E4M3: 1}[Format("E4M3", np.dtype("float8_e4m3fn"))] == 1
    assert [repr(format) for format in FORMATS] == ["E4M3", "E5M2", "E4M3FNUZ", "E5M2FNUZ"]


# --- The cast ---------------------------------------------------------------------------------------------------------


def boundaries(format: Format) -> np.ndarray:
    """Every finite value, every tie between two neighbours, and the float32 on either side of each."""
    values = np.unique(VALUES[format][np.isfinite(VALUES[format])])
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    return np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))])


@over_formats
@over_input_dtypes
@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_every_value_every_tie_and_their_neighbours(format, dtype, transform):
    x = jnp.asarray(boundaries(format)).astype(dtype)
    data = transform(lambda x: saturating_cast(x, format))(x)
    actual = VALUES[format][np.asarray(data).view(np.uint8)]
    np.testing.assert_array_equal(actual, nearest(np.asarray(x).astype(np.float64), format))


# One shape for all draws, so that nothing is compiled twice.
SIZE = 32
any_float = st.floats(width=32, allow_nan=True, allow_infinity=True)
near_the_range = st.builds(math.ldexp, st.floats(-2, 2, width=32), st.integers(-22, 18))


@pytest.mark.smoke
@over_formats
@over_input_dtypes
@settings(max_examples=30, deadline=None, derandomize=True)
@given(values=st.lists(any_float | near_the_range, min_size=SIZE, max_size=SIZE))
def test_cast_is_nearest_of_all_codes(format, dtype, values):
    x = np.array(values, np.float32)
    x[np.abs(x) > float(jnp.finfo(dtype).max)] = np.inf  # float16 has no such value: NumPy would warn.
    x = jnp.asarray(x).astype(dtype)
    np.testing.assert_array_equal(cast_to_float64(x, format), nearest(np.asarray(x).astype(np.float64), format))


@over_formats
def test_infinities_become_the_maximum_and_nan_stays(format):
    x = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, 1e30, -1e30], jnp.float32)
    np.testing.assert_array_equal(
        cast_to_float64(x, format), [format.max, -format.max, np.nan, format.max, -format.max]
    )


@over_formats
def test_what_rounds_to_zero_is_zero(format):
    """Also in the fnuz formats, where the code of a negative zero is NaN."""
    half = format.smallest_subnormal / 2
    x = jnp.asarray([0.0, -0.0, half, -half, 1e-30, -1e-30, 1e-45, -1e-45], jnp.float32)
    np.testing.assert_array_equal(cast_to_float64(x, format), np.zeros(8))
    above = np.nextafter(np.float32(half), np.float32(1))
    assert cast_to_float64(jnp.asarray([above, -above]), format).tolist() == [2 * half, -2 * half]


@pytest.mark.parametrize("format, overflows", [(E4M3, math.nan), (E5M2, math.inf)], ids=["E4M3", "E5M2"])
def test_the_bare_cast_does_not_saturate(format, overflows):
    """Why the clip is there."""
    x = jnp.asarray([2 * format.max], jnp.float32)
    np.testing.assert_array_equal(np.asarray(x.astype(format.dtype)).astype(np.float64), [overflows])
    assert cast_to_float64(x, format) == [format.max]


@over_formats
@pytest.mark.parametrize("source", FORMATS[::-1], ids=repr)
def test_cast_from_one_format_to_another(format, source):
    """The limit of one format may not exist in the other, which once made NaN of every value."""
    x = jnp.asarray(np.arange(256, dtype=np.uint8).view(source.dtype))
    np.testing.assert_array_equal(cast_to_float64(x, format), nearest(VALUES[source], format))


@over_formats
def test_cast_keeps_order_and_is_idempotent(format):
    x = jnp.asarray(np.sort(boundaries(format)))
    once = cast_to_float64(x, format)
    assert np.all(np.diff(once) >= 0)
    np.testing.assert_array_equal(cast_to_float64(jnp.asarray(once, jnp.float32), format), once)


# --- Why scale --------------------------------------------------------------------------------------------------------


def test_dynamic_range_example():
    """Seven decades without and with a scale of amax / max: overflow goes, the smallest value pays for it."""
    values = np.array([0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0], np.float32)

    def absolute_bound(unit):
        """Half a unit in the last place of what `unit` scales: relative where normal, absolute where subnormal."""
        return np.maximum(values * E4M3.relative_error, unit * E4M3.smallest_subnormal / 2)

    unscaled = cast_to_float64(jnp.asarray(values), E4M3)
    assert unscaled[-1] == E4M3.max  # 1000 is lost ...
    assert np.all(np.abs(unscaled - values)[:-1] <= absolute_bound(1.0)[:-1])  # ... and nothing else.

    scale = values.max() / np.float32(E4M3.max)
    data = cast_to_float64(jnp.asarray(values / scale), E4M3)
    restored = data * scale
    assert data.max() == E4M3.max and data[0] == 0.0
    np.testing.assert_allclose(restored[-1], values[-1], rtol=np.finfo(np.float32).eps)
    assert np.all(np.abs(restored - values) <= absolute_bound(scale) * (1 + 1e-6))
    # The two ends together do not fit: the example spans more binades than E4M3 has.
    assert math.log2(values.max() / values.min()) > E4M3.dynamic_range


def test_values_are_divided_whatever_else_a_program_computes():
    """XLA for CPUs would multiply by the reciprocal of a divisor that has one use: halfway cases round differently."""
    halfway = np.arange(17, 31, 2, dtype=np.float32) / 16
    scale = np.random.default_rng(0).uniform(0.5, 2.0, (256, 1)).astype(np.float32)
    x = halfway * scale
    expected = (x / scale).astype(ml_dtypes.float8_e4m3fn)
    alone = jax.jit(lambda x, scale: divide_by(x, scale, E4M3).data)
    beside = jax.jit(lambda x, scale: (divide_by(x, scale, E4M3).data, divide_by(2 * x, scale, E4M3).data)[0])
    for program in (alone, beside):
        np.testing.assert_array_equal(program(x, scale).view(np.uint8), expected.view(np.uint8))
