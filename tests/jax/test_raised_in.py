"""Whose assertion an error is, with JAX's frames in its traceback or without."""

import pathlib
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax_fp8._jax.raised_in import by_users_assertion, in_checkpointed_loop, in_custom_derivative

import haliax_fp8 as fp8


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


def users_loss(model, x):
    return users_mistake(model, x)


def users_mistake(model, x):
    return jax.vmap(model)(x) @ jnp.ones((3, 3))


@pytest.mark.parametrize(
    "how", ["step", "calibrate", "microbatches", "filter_grad", "filter_value_and_grad", "statistics"]
)
def test_an_error_in_the_users_loss_shows_the_users_frames(how):
    model = fp8.fp8_linear_layers(eqx.nn.Linear(8, 8, key=jax.random.key(0)))
    x = jnp.ones((4, 8))
    step = fp8.TrainStep(users_loss, optax.sgd(0.1), microbatches=2 if how == "microbatches" else 1)
    call = {
        "statistics": lambda: fp8.quantization_statistics(model, users_loss, x),
        "calibrate": lambda: step.calibrate(model, x),
        "filter_grad": lambda: fp8.filter_grad(users_loss)(model, x),
        "filter_value_and_grad": lambda: eqx.filter_jit(fp8.filter_value_and_grad(users_loss))(model, x),
    }.get(how, lambda: step(model, step.init(model), x))
    with pytest.raises(TypeError, match="contracting") as caught:
        call()
    frames = traceback.extract_tb(caught.value.__traceback__)
    package = str(pathlib.Path(fp8.__file__).parent)
    assert not [frame for frame in frames if frame.filename.startswith(package)]
    assert [frame.name for frame in frames if frame.filename == __file__][-2:] == ["users_loss", "users_mistake"]
