"""What `_jax/primitives.py` needs of JAX: how it calls a primitive's own rule for reverse mode."""

import inspect

import jax
import numpy as np
from jax._src.interpreters import ad

from haliax_fp8 import Fp8DotGeneral
from haliax_fp8._product.primitive import fp8_dot_p


def test_internals_linearization():
    """This JAX calls rules as ours expects, and the product has one. Else its JVP is taken apart, which costs time."""
    parameters = list(inspect.signature(ad.fallback_linearize_rule).parameters)
    assert parameters == ["_prim", "_is_vjp", "_nonzeros", "primals", "params"]
    assert fp8_dot_p in ad.primitive_linearizations


def test_without_the_rule_gradients_are_the_same():
    x, w = jax.random.normal(jax.random.key(0), (4, 16)), jax.random.normal(jax.random.key(1), (16, 8))
    args = Fp8DotGeneral.init(), x, w
    loss = lambda op, x, w: (op(x, w, (((1,), (0,)), ((), ()))) ** 2).sum()

    def of_the_jvp(*args):
        """Reverse mode by hand: the JVP, transposed. It asks for no rule."""
        return jax.linear_transpose(lambda *tangents: jax.jvp(loss, args, tangents)[1], *args)(1.0)

    ruled = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*args)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(of_the_jvp)(*args), ruled)
