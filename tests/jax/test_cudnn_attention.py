"""What `_jax/cudnn_attention.py` and `_jax/late_plugin.py` need of JAX."""

import jax
import jax.numpy as jnp
from jax._src import xla_bridge

from haliax_fp8._jax import cudnn_attention


QUERY, KEY = (jax.ShapeDtypeStruct((1, 256, heads, 128), jnp.bfloat16) for heads in (4, 2))


def calls(function, *args):
    """The primitives of cuDNN in a traced function, with their parameters."""
    found, jaxprs = [], [jax.make_jaxpr(function)(*args).jaxpr]
    for jaxpr in jaxprs:
        for equation in jaxpr.eqns:
            jaxprs += [p.jaxpr for p in equation.params.values() if hasattr(p, "jaxpr")]
            if equation.primitive.name.startswith("dot_product_attention"):
                found.append(equation)
    return found


def test_attention_in_bfloat16_asks_no_device():
    attend = lambda *args: cudnn_attention.attention(*args, scale=0.1, is_causal=True).astype(jnp.float32).sum()
    names = {call.primitive.name for call in calls(jax.grad(attend), QUERY, KEY, KEY)}
    assert names == {"dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"}


def test_jax_keeps_what_it_tells_plugins():
    assert xla_bridge._plugin_callbacks and all(map(callable, xla_bridge._plugin_callbacks))
    assert {hasattr(plugin, "c_api") for plugin in xla_bridge._backend_factories.values()} == {True}
