"""What `_jax/cudnn_attention.py` needs of JAX: the arguments and results of cuDNN's calls, without their compiler."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import E4M3
from jax._src import dispatch, xla_bridge
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from haliax_fp8._jax import cudnn_attention
from haliax_fp8.attention import by_platform
from haliax_fp8.attention.emulated import Attention
from haliax_fp8.attention.primitive import fp8_attention_p
from haliax_fp8.attention.tensors import TENSORS


QUERY, KEY = (jax.ShapeDtypeStruct((1, 256, heads, 128), E4M3) for heads in (4, 2))
SCALE = jax.ShapeDtypeStruct((), jnp.float32)
STATIC = {"scale": 0.1, "is_causal": True}


def calls(function, *args):
    """The primitives of cuDNN in a traced function, with their parameters."""
    found, jaxprs = [], [jax.make_jaxpr(function)(*args).jaxpr]
    for jaxpr in jaxprs:
        for equation in jaxpr.eqns:
            jaxprs += [p.jaxpr for p in equation.params.values() if hasattr(p, "jaxpr")]
            if equation.primitive.name.startswith("dot_product_attention"):
                found.append(equation)
    return found


@pytest.mark.parametrize("differentiated", [True, False])
def test_the_forward_call(differentiated):
    forward = lambda *args: cudnn_attention.fp8_forward(args[:3], args[3:], **STATIC, differentiated=differentiated)
    (call,) = calls(forward, QUERY, KEY, KEY, *[SCALE] * 6)
    assert call.primitive is cudnn._dot_product_attention_fp8_fwd_p
    assert call.params == {"scale": 0.1, "use_causal_mask": True, "layout": 0, "is_training": differentiated}
    assert list(inspect.signature(cudnn._dot_product_attention_fp8_fwd_abstract).parameters)[:9] == [
        *("query", "key", "value", "descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    ]
    shapes = [x.shape for x in jax.eval_shape(forward, QUERY, KEY, KEY, *[SCALE] * 6)]
    assert shapes == [QUERY.shape, (), (), (1, 4, 256)]


def test_the_backward_call():
    logs = jax.ShapeDtypeStruct((1, 4, 256), jnp.float32)
    backward = lambda *args: cudnn_attention.fp8_backward(args[:5], args[5], args[6:], **STATIC)
    args = (QUERY, KEY, KEY, QUERY, QUERY, logs, *[SCALE] * 12)
    (call,) = calls(backward, *args)
    assert call.primitive is cudnn._dot_product_attention_fp8_bwd_p
    assert list(inspect.signature(cudnn._dot_product_attention_fp8_bwd_abstract).parameters)[:18] == [
        *("query", "key", "value", "fwd_output", "grad_output", "activation"),
        *("descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s", "descale_dP"),
        *("scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP"),
    ]
    found = jax.eval_shape(backward, *args)
    assert [x.shape for x in found] == [QUERY.shape, KEY.shape, KEY.shape, (), (), (), ()]
    assert [x.dtype for x in found[:3]] == [E4M3] * 3
    # Whatever JAX calls them, XLA gets them in the order in which they are bound.
    bind = lambda *args: cudnn._dot_product_attention_fp8_bwd_p.bind(*args, **call.params)
    bound = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in call.invars]
    lowered = jax.jit(bind).trace(*bound).lower(lowering_platforms=("cuda",)).as_text()
    (operands,) = re.findall(r"@__cudnn\$fmhaSoftmaxBackwardF8\(([^)]*)\)", lowered)
    assert operands == ", ".join(f"%arg{i}" for i in range(18))


def test_scales_of_the_backward_pass_are_in_the_order_of_xla():
    """Descale_Q, K, V, S, O, dO and dP, then Scale_S, dP, dQ, dK and dV, in XLA's `cuda_dnn.cc`; JAX's own differs."""
    scales = dict(zip(TENSORS, np.exp2(np.arange(10.0, dtype=np.float32)), strict=True))
    shaped = lambda x: jnp.zeros(x.shape, x.dtype)
    arrays = [*map(shaped, (QUERY, KEY, KEY, QUERY, QUERY)), jnp.zeros((1, 4, 256)), jnp.array([*scales.values()])]
    backward = functools.partial(by_platform._cudnn_backward, attention=Attention(scale=0.1, is_causal=True))
    traced = jax.make_jaxpr(backward)(*arrays)
    at = next(i for i, equation in enumerate(traced.eqns) if equation.primitive.name == "custom_partitioning")
    given = traced.jaxpr.replace(eqns=traced.eqns[:at], outvars=traced.eqns[at].invars[6:])
    found = [float(x.reshape(())) for x in jax.core.eval_jaxpr(given, traced.consts, *arrays)]
    back = ("query", "key", "value", "weights", "output", "output_grad", "scores_grad")
    there = ("weights", "scores_grad", "query_grad", "key_grad", "value_grad")
    assert found == [scales[name] for name in back] + [1 / scales[name] for name in there]


def test_attention_in_bfloat16_asks_no_device():
    query, key = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (QUERY, KEY))
    attend = lambda *args: cudnn_attention.attention(*args, **STATIC).astype(jnp.float32).sum()
    names = {call.primitive.name for call in calls(jax.grad(attend), query, key, key)}
    assert names == {"dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"}


def test_jax_lowers_these_with_devices():
    """JAX looks for its own primitive for that in programs, and does not see into ours."""
    assert cudnn._dot_product_attention_fp8_fwd_p in dispatch.prim_requires_devices_during_lowering
    assert fp8_attention_p in dispatch.prim_requires_devices_during_lowering


def test_jax_keeps_what_it_tells_plugins():
    assert xla_bridge._plugin_callbacks and all(map(callable, xla_bridge._plugin_callbacks))
    assert {hasattr(plugin, "c_api") for plugin in xla_bridge._backend_factories.values()} == {True}
