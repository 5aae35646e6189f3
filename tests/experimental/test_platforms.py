"""What `platforms.py` needs of JAX's private primitives: the arguments and results of cuDNN's calls, without a GPU."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import E4M3
from jax._src import dispatch
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from haliax_fp8.experimental.attention import Fp8Attention, platforms
from haliax_fp8.experimental.attention.emulated import TENSORS, AttentionSpec
from haliax_fp8.experimental.attention.primitive import fp8_attention_p


QUERY, KEY = (jax.ShapeDtypeStruct((1, 256, heads, 128), E4M3) for heads in (4, 2))
LOGS = jax.ShapeDtypeStruct((1, 4, 256), jnp.float32)
SCALES = jax.ShapeDtypeStruct((len(TENSORS),), jnp.float32)
SPEC = AttentionSpec(scale=0.1, is_causal=True, out_dtype=np.dtype(np.float32))


def forward(*arrays, differentiated=True):
    return platforms._cudnn_forward(*arrays, spec=SPEC, differentiated=differentiated)


def backward(*arrays):
    return platforms._cudnn_backward(*arrays, spec=SPEC)


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
    args = (QUERY, KEY, KEY, SCALES)
    (call,) = calls(lambda *args: forward(*args, differentiated=differentiated), *args)
    assert call.primitive is cudnn._dot_product_attention_fp8_fwd_p
    assert call.params == {"scale": 0.1, "use_causal_mask": True, "layout": 0, "is_training": differentiated}
    assert list(inspect.signature(cudnn._dot_product_attention_fp8_fwd_abstract).parameters)[:9] == [
        *("query", "key", "value", "descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    ]
    results = jax.eval_shape(lambda *args: forward(*args, differentiated=differentiated), *args)
    assert [x.shape for x in results] == [QUERY.shape, (1, 4, 256), (2,)]
    assert [x.dtype for x in results] == [E4M3, jnp.float32, jnp.float32]


def test_the_backward_call():
    args = (QUERY, KEY, KEY, QUERY, QUERY, LOGS, SCALES)
    (call,) = calls(backward, *args)
    assert call.primitive is cudnn._dot_product_attention_fp8_bwd_p
    assert list(inspect.signature(cudnn._dot_product_attention_fp8_bwd_abstract).parameters)[:18] == [
        *("query", "key", "value", "fwd_output", "grad_output", "activation"),
        *("descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s", "descale_dP"),
        *("scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP"),
    ]
    results = jax.eval_shape(backward, *args)
    assert [x.shape for x in results] == [QUERY.shape, KEY.shape, KEY.shape, (4,)]
    assert [x.dtype for x in results[:3]] == [E4M3] * 3
    # Whatever JAX calls them, XLA gets them in the order in which they are bound.
    bind = lambda *args: cudnn._dot_product_attention_fp8_bwd_p.bind(*args, **call.params)
    bound = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in call.invars]
    lowered = jax.jit(bind).trace(*bound).lower(lowering_platforms=("cuda",)).as_text()
    (operands,) = re.findall(r"@__cudnn\$fmhaSoftmaxBackwardF8\(([^)]*)\)", lowered)
    assert operands == ", ".join(f"%arg{i}" for i in range(18))


def test_scales_of_the_backward_pass_are_in_the_order_of_xla():
    """Descale_Q, K, V, S, O, dO and dP, then Scale_S, dP, dQ, dK and dV, in XLA's `cuda_dnn.cc`; JAX's own differs."""
    scales = dict(zip(TENSORS, np.exp2(np.arange(10.0, dtype=np.float32)), strict=True))
    zeros = [jnp.zeros(x.shape, x.dtype) for x in (QUERY, KEY, KEY, QUERY, QUERY, LOGS)]
    arrays = [*zeros, jnp.array([*scales.values()])]
    traced = jax.make_jaxpr(backward)(*arrays)
    at = next(i for i, equation in enumerate(traced.eqns) if equation.primitive.name == "custom_partitioning")
    before = traced.jaxpr.replace(eqns=traced.eqns[:at], outvars=traced.eqns[at].invars[6:])
    numbers = [float(x.reshape(())) for x in jax.core.eval_jaxpr(before, traced.consts, *arrays)]
    read = ("query", "key", "value", "weights", "output", "output_grad", "scores_grad")
    written = ("weights", "scores_grad", "query_grad", "key_grad", "value_grad")
    assert numbers == [scales[name] for name in read] + [1 / scales[name] for name in written]


def test_jax_lowers_these_with_devices():
    """JAX looks for its own primitive for that in programs, and does not see into ours."""
    assert cudnn._dot_product_attention_fp8_fwd_p in dispatch.prim_requires_devices_during_lowering
    assert fp8_attention_p in dispatch.prim_requires_devices_during_lowering


def test_without_the_private_primitives_only_programs_for_a_gpu_fail(monkeypatch):
    """As with a JAX that renamed them."""
    monkeypatch.delattr(cudnn, "_dot_product_attention_fp8_fwd_p")
    # No other test has these shapes, so nothing of it is cached.
    op, x = Fp8Attention.init(), jnp.ones((1, 128, 3, 64))
    attend = jax.jit(lambda x: op(x, x, x, scale=0.3))
    assert attend(x).shape == x.shape
    with pytest.raises(
        ImportError,
        match=rf"JAX {jax.__version__} is installed, which lacks a private name that Fp8Attention on a GPU needs",
    ):
        attend.trace(x).lower(lowering_platforms=("cuda",))
