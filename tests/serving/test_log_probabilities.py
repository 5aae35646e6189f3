"""`log_probability_mismatch` against the same numbers in float64, and `importance_weights` against numbers by hand."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_fp8.serving import importance_weights, log_probability_mismatch


def test_against_float64_masked_and_under_jit():
    rng = np.random.default_rng(0)
    sampled = -rng.exponential(2.0, (4, 32)).astype(np.float32)
    # Small changes, where exp(c) - 1 - c loses its digits in float32, and a few large ones.
    change = (rng.standard_normal((4, 32)) * np.where(rng.random((4, 32)) < 0.1, 0.5, 1e-3)).astype(np.float32)
    trained = sampled + change
    mask = rng.random((4, 32)) < 0.7
    of_mask = np.where(mask, trained, np.nan).astype(np.float32)
    mismatch = jax.jit(lambda a, b, mask: log_probability_mismatch(a, b, mask=mask))(of_mask, sampled, mask)
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
        np.testing.assert_allclose(mismatch.flat()[f"serving/{name}"], value, rtol=1e-4, atol=1e-8)
    small = log_probability_mismatch(np.float32([-1.0, -2.0]) + np.float32([1e-3, 0.0]), np.float32([-1.0, -2.0]))
    c = np.float64(np.float32(-1.0) + np.float32(1e-3)) + 1.0
    np.testing.assert_allclose(small.k3, (np.expm1(c) - c) / 2, rtol=1e-5)


def test_the_multiplicative_error_of_probabilities_that_double_and_halve():
    """Twice and half as probable count alike, so the signs do not cancel; padding does not dilute them."""
    trained, sampled = np.log([0.5, 0.2, 0.3, 0.9]), np.log([0.25, 0.4, 0.3, 0.001])
    mask = np.array([True, True, True, False])
    mismatch = log_probability_mismatch(np.float32(trained), np.float32(sampled), mask=mask)
    np.testing.assert_allclose(mismatch.multiplicative_error, (2 + 2 + 1) / 3, rtol=1e-6)
    assert "multiplicative error 1.67" in " ".join(str(mismatch).split())


def test_named_arrays_and_errors():
    a = hax.named(jnp.zeros((2, 3)), ("batch", "position"))
    assert float(log_probability_mismatch(a, a - 0.5).largest) == 0.5
    with pytest.raises(ValueError, match=r"not for the same tokens.*trained: \(2,\), sampled"):
        log_probability_mismatch(jnp.zeros(2), jnp.zeros(3))


# Two sequences of three tokens, the last of which is padding. Ratios: 5, 1.5; and 0.5, 1.
TRAINED = np.log(np.float32([[0.5, 0.9, 0.3], [0.2, 0.7, 0.3]]))
SAMPLED = np.log(np.float32([[0.1, 0.6, 1e-9], [0.4, 0.7, 0.9]]))
COUNTS = np.array([[True, True, False]] * 2)


@pytest.mark.parametrize(
    ("level", "kind", "cap", "weights", "ess", "chi_squared", "capped"),
    [
        ("token", "truncate", 2.0, [[2, 1.5], [0.5, 1]], 25 / 4 / 7.5, (25 + 2.25 + 0.25 + 1) / 4 - 1, 1 / 4),
        ("token", "mask", 2.0, [[0, 1.5], [0.5, 1]], 9 / 4 / 3.5, (25 + 2.25 + 0.25 + 1) / 4 - 1, 1 / 4),
        ("sequence", "truncate", 2.0, [[2, 2], [0.5, 0.5]], 6.25 / 2 / 4.25, (7.5**2 + 0.5**2) / 2 - 1, 1 / 2),
        ("sequence", "mask", 2.0, [[0, 0], [0.5, 0.5]], 1 / 2, (7.5**2 + 0.5**2) / 2 - 1, 1 / 2),
        ("sequence", "mask", 8.0, [[7.5, 7.5], [0.5, 0.5]], 64 / 2 / 56.5, (7.5**2 + 0.5**2) / 2 - 1, 0),
    ],
)
def test_weights_and_metrics_by_hand(level, kind, cap, weights, ess, chi_squared, capped):
    """Padding has a ratio of 3e8, and neither a weight nor a part in the metrics."""
    compute = lambda a, b, mask: importance_weights(a, b, mask, level=level, kind=kind, cap=cap)
    importance = jax.jit(compute)(TRAINED, SAMPLED, COUNTS)
    np.testing.assert_allclose(importance.weights, np.pad(np.float32(weights), ((0, 0), (0, 1))), rtol=1e-6)
    expected = {"effective_sample_size": ess, "chi_squared": chi_squared, "capped": capped, "k3": _k3()}
    for name, value in (expected | {"multiplicative_error": (5 + 1.5 + 2 + 1) / 4, "tokens": 4}).items():
        np.testing.assert_allclose(importance.flat()[f"serving/{name}"], value, rtol=1e-5)
    # The same for named arrays, whose axes may be in any order.
    axes = ("position", "batch")
    a, b, mask = (hax.named(x.T, axes) for x in (TRAINED, SAMPLED, COUNTS))
    axis = "position" if level == "sequence" else None
    named = importance_weights(a, b, mask, level=level, kind=kind, cap=cap, axis=axis)
    np.testing.assert_allclose(named.weights.array.T, importance.weights, rtol=1e-6)
    assert [axis.name for axis in named.weights.axes] == list(axes)


def _k3():
    ratios = np.array([5, 1.5, 0.5, 1])
    return (ratios - 1 - np.log(ratios)).mean()


def test_chi_squared_keeps_the_digits_of_small_changes():
    c = np.float32([1e-4, -1e-4])
    np.testing.assert_allclose(
        importance_weights(c, np.zeros_like(c)).chi_squared, np.expm1(2 * c.astype(float)).mean(), rtol=1e-3
    )


def test_rows_and_batches_without_tokens():
    """A row of padding alone is no sample; without any, weights are 0 and metrics NaN."""
    importance = importance_weights(TRAINED, SAMPLED, COUNTS & [[False], [True]], level="sequence")
    np.testing.assert_allclose(importance.weights, [[0, 0, 0], [0.5, 0.5, 0]], rtol=1e-6)
    np.testing.assert_allclose([importance.effective_sample_size, importance.chi_squared], [1, 0.25 - 1], rtol=1e-6)
    for level in ("token", "sequence"):
        nothing = importance_weights(TRAINED, SAMPLED, np.zeros_like(COUNTS), level=level)
        assert (nothing.weights == 0).all() and np.isnan(nothing.effective_sample_size)
    all_masked = importance_weights(TRAINED[:1], SAMPLED[:1], COUNTS[:1], level="sequence", kind="mask")
    assert float(all_masked.effective_sample_size) == 0.0


def test_impossible_tokens():
    """Of training, of the engine, of both; in a sequence, the first makes all of it impossible."""
    none = -np.inf
    trained, sampled = np.float32([[none, 0.0], [-1.0, 0.0], [none, 0.0]]), np.float32([[-1, 0], [none, 0], [none, 0]])
    weights = lambda **options: importance_weights(trained, sampled, **options).weights
    np.testing.assert_array_equal(weights(), [[0, 1], [2, 1], [1, 1]])
    np.testing.assert_array_equal(weights(kind="mask"), [[0, 1], [0, 1], [1, 1]])
    np.testing.assert_array_equal(weights(level="sequence"), [[0, 0], [2, 2], [1, 1]])
    assert np.isnan(importance_weights(np.float32([np.nan]), sampled[0, :1]).weights).all()


def test_bfloat16_is_compared_in_float32_and_weights_have_no_gradient():
    trained, sampled = jnp.bfloat16([-3.03125, -1.0]), jnp.bfloat16([-3.015625, -1.0])
    np.testing.assert_allclose(importance_weights(trained, sampled).weights, np.exp([-0.015625, 0]), rtol=1e-6)
    # The policy gradient: the weight times the gradient of the log-probability, and no more.
    sampled = jnp.float32([-1.0, -jnp.inf])
    gradient = jax.grad(lambda x: jnp.sum(importance_weights(x, sampled).weights * x))(jnp.float32([-0.5, -1.0]))
    np.testing.assert_allclose(gradient, [np.exp(0.5), 2.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"level": "sentence"}, "level='sentence'.*'sequence'"),
        ({"kind": "clip"}, "kind='clip'.*'truncate' or 'mask'"),
        ({"cap": 0.5}, "cap=0.5.*at least 1"),
        ({"cap": float("nan")}, "cap=nan.*at least 1"),
        ({"level": "sequence", "axis": "position"}, "axis='position'.*for NamedArrays"),
        ({"axis": "position"}, "axis='position'.*level='sequence' too"),
        ({"mask": jnp.ones((2, 3), int)}, "mask.*int.*mask != 0"),
    ],
)
def test_arguments_that_would_compute_something_else(wrong, words):
    with pytest.raises(ValueError, match=words):
        importance_weights(TRAINED, SAMPLED, **wrong)


def test_named_arrays_have_to_name_the_axis_of_a_sequence():
    a = hax.named(jnp.zeros((2, 3)), ("batch", "position"))
    for axis in (None, "tokens"):
        with pytest.raises(ValueError, match=r"axis=.*'batch', 'position'"):
            importance_weights(a, a, level="sequence", axis=axis)
