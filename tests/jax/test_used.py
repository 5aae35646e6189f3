"""Which arguments a function's value depends on."""

import jax
import jax.numpy as jnp
from jax import lax

from haliax_fp8._jax.used import depends_on


def test_arguments_that_a_value_depends_on():
    """Of those that a loop, a branch or a call only passes on, and of a result that is dropped, it does not."""

    def function(arrays):
        a, b, c, d, e = arrays
        carry, _ = lax.scan(lambda carry, x: ((carry[0] + x, carry[1]), None), (a, b), jnp.ones(3))
        called, _ = jax.jit(lambda c, d: (c, d))(c, d)
        jnp.sin(e)
        return carry[0] + called

    assert depends_on(function, [jnp.ones(())] * 5) == [True, False, True, False, False]
    assert depends_on(lambda tree: jnp.where(False, tree["b"].sum(), 1.0), {"a": jnp.ones(2), "b": jnp.ones(2)}) == [
        False,
        True,
    ]
