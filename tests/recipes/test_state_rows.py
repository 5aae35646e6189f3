"""The rows of delayed scaling's state by themselves, step by step: no product, no gradient."""

import jax.numpy as jnp
import numpy as np
import pytest

import haliax_fp8 as fp8


LIMITS = (448.0, 57344.0)


def rows_of(memory):
    """Before the first step, of two operands."""
    return jnp.asarray([memory.first_row] * len(LIMITS), jnp.float32)


def measured(*amaxes):
    return jnp.asarray(amaxes, jnp.float32)[:, None]


@pytest.mark.more
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_history_drops_its_oldest_entry(length):
    """Newest first, then from the oldest on, as Flax rolls it."""
    memory = fp8.DelayedScaling(amax_history_length=length).memory
    rows, amaxes = rows_of(memory), [5.0, 4.0, 7.0, 1.0, 2.0, 3.0, 0.5]
    for step, amax in enumerate(amaxes, 1):
        rows = memory.update(rows, measured(amax, 10 * amax), LIMITS)
        recent = [0.0] * (length - step) + amaxes[max(0, step - length) : step]
        history = np.array([recent[-1], *recent[:-1]], np.float32)
        np.testing.assert_array_equal(rows[:, 1:], [history, 10 * history])
        np.testing.assert_allclose(rows[:, 0], max(recent) * np.array([1 / 448, 10 / 57344]), rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, -np.inf])
def test_a_scale_that_a_trainer_erased_is_1_until_something_is_recorded(scale):
    """Where a layer was not reached, a gradient has a scale of 0, and some trainers overwrite state as it comes."""
    memory = fp8.DelayedScaling(amax_history_length=2).memory
    erased = rows_of(memory).at[:, 0].set(scale)
    rows = memory.update(erased, measured(0.0, 0.0), LIMITS)
    np.testing.assert_array_equal(rows[:, 0], [1.0, 1.0])
    rows = memory.update(rows, measured(44.8, 0.0), LIMITS)
    np.testing.assert_allclose(rows[:, 0], [0.1, 1.0], rtol=1e-6)


def test_calibration_moves_the_scale_at_every_batch_and_the_next_step_moves_it_too():
    """Whatever the interval between updates is, and however many steps have passed since the last one."""
    memory = fp8.DelayedScaling(amax_history_length=4, update_interval=3).memory
    scale = lambda rows: np.asarray(rows[:, 0]) * LIMITS
    rows = memory.update(rows_of(memory), measured(1.0, 1.0), LIMITS)
    rows = memory.update(rows, measured(2.0, 2.0), LIMITS)
    np.testing.assert_allclose(scale(rows), 1.0, rtol=1e-6)  # two steps to go
    rows = memory.calibrated(rows, measured(3.0, 4.0), LIMITS)
    np.testing.assert_allclose(scale(rows), [3.0, 4.0], rtol=1e-6)
    rows = memory.calibrated(rows, measured(5.0, 5.0), LIMITS)
    np.testing.assert_allclose(scale(rows), 5.0, rtol=1e-6)
    rows = memory.update(rows, measured(6.0, 6.0), LIMITS)
    np.testing.assert_allclose(scale(rows), 6.0, rtol=1e-6)
    rows = memory.update(rows, measured(7.0, 7.0), LIMITS)
    np.testing.assert_allclose(scale(rows), 6.0, rtol=1e-6)


@pytest.mark.smoke
def test_an_amax_that_is_not_finite_is_entered_as_none():
    """As `-inf`, which no maximum sees: not another microbatch's, and not that of the history."""
    memory = fp8.DelayedScaling(amax_history_length=3).memory
    rows = memory.update(rows_of(memory), measured(4.0, 8.0), LIMITS)
    rows = memory.update(rows, measured(np.inf, np.nan), LIMITS)
    np.testing.assert_array_equal(rows[:, 1], [-np.inf, -np.inf])
    np.testing.assert_allclose(rows[:, 0] * np.array(LIMITS), [4.0, 8.0], rtol=1e-6)
