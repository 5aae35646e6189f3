"""`cast_params`: parameters in another dtype, state in float32, gradients at the master weights."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import unchecked

from haliax_fp8 import cast_params, filter_grad, fp8_linear_layers


In, Out, Batch = hax.make_axes(In=16, Out=8, batch=4)


def model():
    plain = hnn.Linear.init(In, Out, key=jax.random.key(0))
    other = {"count": jnp.arange(3), "key": jax.random.key(1), "name": "a", "nothing": None}
    return {"layer": fp8_linear_layers(plain), **other}


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_are_cast_and_nothing_else(dtype):
    before = model()
    after = cast_params(before, dtype)
    assert after["layer"].weight.dtype == after["layer"].bias.dtype == dtype
    state, old = after["layer"].dot_general.state, before["layer"].dot_general.state
    assert state.array.dtype == jnp.float32
    np.testing.assert_array_equal(state.array, old.array)
    assert after["count"].dtype == before["count"].dtype and after["key"].dtype == before["key"].dtype
    assert (after["name"], after["nothing"]) == ("a", None)


def test_gradients_arrive_at_the_master_weights():
    x = hax.random.normal(jax.random.key(2), (Batch, In), dtype=jnp.bfloat16)
    loss = lambda layer: hax.sum(cast_params(layer, jnp.bfloat16)(x)).scalar().astype(jnp.float32)
    gradients = eqx.filter_jit(filter_grad(loss))(model()["layer"])
    assert gradients.weight.dtype == jnp.float32
    assert float(gradients.dot_general.amax_history("input")[0]) == float(jnp.abs(x.array).max())


def test_swapped_arguments_are_named():
    """Without a dump of the model."""
    with unchecked(), pytest.raises(ValueError, match="^dtype is of type MLP, and is not a floating dtype"):
        cast_params(jnp.bfloat16, eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0)))
    with unchecked(), pytest.raises(ValueError, match="^dtype is of type list, and is not a floating dtype"):
        cast_params(model(), [jnp.bfloat16])


@pytest.mark.parametrize("dtype", ["int8", jnp.float8_e4m3fn, "a"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="dtype=.* is not a floating dtype of 16 bits or more"):
        cast_params(model(), dtype)
