"""Multipliers and scales of amaxes, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import rounded_up

from haliax_fp8.recipes.scaling import scale_of
from haliax_fp8.recipes.scaling.multiplier import LARGEST_MULTIPLIER, multiplier_of


AMAXES = np.concatenate(
    [np.exp2(np.random.default_rng(0).uniform(-125, 127, 2000)), np.exp2(np.arange(-126.0, 128.0)), [448, 449, 57344]]
).astype(np.float32)


def multipliers(limit: float) -> np.ndarray:
    """Those of `AMAXES` in float64, each rounded to float32 once."""
    return np.minimum(limit / AMAXES.astype(np.float64), LARGEST_MULTIPLIER).astype(np.float32)


@pytest.mark.parametrize("limit", [448.0, 57344.0])
def test_a_multiplier_fills_the_format(limit):
    np.testing.assert_array_equal(multiplier_of(jnp.asarray(AMAXES), limit), multipliers(limit))
    rounded = np.asarray(multiplier_of(jnp.asarray(AMAXES), limit, power_of_two=True), np.float64)
    np.testing.assert_array_equal(rounded, np.exp2(np.floor(np.log2(multipliers(limit).astype(np.float64)))))


@pytest.mark.parametrize("limit", [448.0, 57344.0])
def test_a_scale_is_the_multipliers_reciprocal_rounded_up(limit):
    exact = (1 / multipliers(limit).astype(np.float64)).astype(np.float32)
    for bits in (1, 4, 7, 24):
        np.testing.assert_array_equal(scale_of(jnp.asarray(AMAXES), limit, bits), rounded_up(exact, bits), str(bits))


def test_an_amax_of_zero_or_nan():
    """Zeros have a scale of 1. NaN stays: rounded as a number it would be zero, and hide."""
    nans = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF], np.uint32)
    for power_of_two in (False, True):
        assert float(multiplier_of(jnp.float32(0.0), 448.0, power_of_two=power_of_two)) == 1.0
        assert np.isnan(multiplier_of(jnp.asarray(nans.view(np.float32)), 448.0, power_of_two=power_of_two)).all()
    for bits in (1, 2, 4, 7, 24):
        assert float(scale_of(jnp.float32(0.0), 448.0, bits)) == 1.0
        assert np.isnan(scale_of(jnp.asarray(nans.view(np.float32)), 448.0, bits)).all(), bits
