"""`log_probability_mismatch` against the same numbers in float64."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_fp8.serving import log_probability_mismatch


def test_against_float64_masked_and_under_jit():
    rng = np.random.default_rng(0)
    sampled = -rng.exponential(2.0, (4, 32)).astype(np.float32)
    # Small changes, where exp(c) - 1 - c loses its digits in float32, and a few large ones.
    change = (rng.standard_normal((4, 32)) * np.where(rng.random((4, 32)) < 0.1, 0.5, 1e-3)).astype(np.float32)
    trained = sampled + change
    mask = rng.random((4, 32)) < 0.7
    of_mask = np.where(mask, trained, np.nan).astype(np.float32)
    found = jax.jit(lambda a, b, mask: log_probability_mismatch(a, b, mask=mask))(of_mask, sampled, mask)
    c = (trained.astype(np.float64) - sampled.astype(np.float64))[mask]
    expected = {
        "mean": np.abs(c).mean(),
        "largest": np.abs(c).max(),
        "k1": -c.mean(),
        "k3": (np.expm1(c) - c).mean(),
        "ratio": np.exp(np.abs(c).max()),
        "multiplicative_error": np.exp(np.abs(c)).mean(),
        "tokens": mask.sum(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found.flat()[f"serving/{name}"], value, rtol=1e-4, atol=1e-8)
    small = log_probability_mismatch(np.float32([-1.0, -2.0]) + np.float32([1e-3, 0.0]), np.float32([-1.0, -2.0]))
    c = np.float64(np.float32(-1.0) + np.float32(1e-3)) + 1.0
    np.testing.assert_allclose(small.k3, (np.expm1(c) - c) / 2, rtol=1e-5)


def test_the_multiplicative_error_of_probabilities_that_double_and_halve():
    """Twice and half as probable count alike, so the signs do not cancel; padding does not dilute them."""
    trained, sampled = np.log([0.5, 0.2, 0.3, 0.9]), np.log([0.25, 0.4, 0.3, 0.001])
    mask = np.array([True, True, True, False])
    found = log_probability_mismatch(np.float32(trained), np.float32(sampled), mask=mask)
    np.testing.assert_allclose(found.multiplicative_error, (2 + 2 + 1) / 3, rtol=1e-6)
    assert "multiplicative error 1.67" in " ".join(str(found).split())


def test_named_arrays_and_errors():
    a = hax.named(jnp.zeros((2, 3)), ("batch", "position"))
    assert float(log_probability_mismatch(a, a - 0.5).largest) == 0.5
    with pytest.raises(ValueError, match=r"not for the same tokens.*trained: \(2,\), sampled"):
        log_probability_mismatch(jnp.zeros(2), jnp.zeros(3))
