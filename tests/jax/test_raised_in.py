"""Whose assertion an error is, with JAX's frames in its traceback or without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_fp8._jax.raised_in import by_users_assertion, in_checkpointed_loop, in_custom_derivative


of_jax = {"__name__": "jax._src.made_up"}
exec("def require(x): assert x is None", of_jax)


def of_user(x):
    assert x is None


def with_filtering(mode, function):
    """The error that a function raises when it is differentiated."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", mode)
    try:
        with pytest.raises(AssertionError) as caught:
            jax.value_and_grad(lambda x: function(x) or x)(jnp.ones(()))
    finally:
        jax.config.update("jax_traceback_filtering", before)
    return caught.value


@pytest.mark.parametrize("mode", ["off", "tracebackhide", "remove_frames", "quiet_remove_frames"])
def test_assertions_of_the_user(mode):
    assert by_users_assertion(with_filtering(mode, of_user))
    assert not by_users_assertion(with_filtering(mode, of_jax["require"]))


def test_a_traceback_without_the_frame_that_asserts():
    """The last frame that is left only called what asserts; JAX also removes frames of NumPy's assertions."""
    compare = lambda x: np.testing.assert_array_equal(2.0, 1.0)
    assert by_users_assertion(with_filtering("off", compare))
    assert not by_users_assertion(with_filtering("remove_frames", compare))


def test_other_errors():
    assert not by_users_assertion(ValueError("x"))
    error = with_filtering("off", of_user)
    assert not in_custom_derivative(error) and not in_checkpointed_loop(error)
