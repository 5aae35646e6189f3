"""FP8 attention compiled for GPUs that are not here: cuDNN's calls, their formats, and what the preflight counts."""

import re

import jax
import jax.numpy as jnp
import pytest
from compiled_models import on, unknown_calls

import haliax_fp8 as fp8
from haliax_fp8.experimental.attention import Fp8Attention
from haliax_fp8.preflight import Verdict, inspect_step


HEADS, KV_HEADS, TOKENS = 32, 8, 8192


def abstract(head_dim, batch=1, tokens=TOKENS, kv_heads=KV_HEADS):
    of = lambda heads: jax.ShapeDtypeStruct((batch, tokens, heads, head_dim), jnp.bfloat16)
    return of(HEADS), of(kv_heads), of(kv_heads)


def loss(args):
    op, *operands = args
    return op(*operands, is_causal=True).astype(jnp.float32).sum()


def calls(text):
    """Of each call of cuDNN: its name, the types that it returns, and those that it reads."""
    dtypes = {}
    for line in text.splitlines():
        if (name := re.search(r'custom_call_target="(__cudnn\$fmha\w*)"', line)) is not None:
            results, _, rest = line.partition(" custom-call(")
            reads = re.search(r"operand_layout_constraints=\{(.*?\})\}", rest)[1]
            dtypes[name[1]] = [re.findall(r"(\w+)\[", part) for part in (results.split(" = ")[1], reads)]
    return dtypes


@pytest.mark.parametrize(("head_dim", "device"), [*on([128, 64], ["h100", "b200"])])
def test_it_compiles_to_cudnn_in_fp8(head_dim, device):
    operands = abstract(head_dim)
    op = Fp8Attention.init(scaling=fp8.DelayedScaling(amax_history_length=16))
    report = inspect_step(fp8.filter_grad(loss), (op, *operands), device=device)
    dtypes = calls(report.step.text)
    assert set(dtypes) == {"__cudnn$fmhaSoftmaxF8", "__cudnn$fmhaSoftmaxBackwardF8"}
    f8, f32 = "f8e4m3fn", "f32"
    results, reads = dtypes["__cudnn$fmhaSoftmaxF8"]
    assert reads == [f8] * 3 + [f32] * 6 and results == [f8, f32, f32, f32, "u8"]
    results, reads = dtypes["__cudnn$fmhaSoftmaxBackwardF8"]
    assert reads == [f8] * 5 + [f32] * 13 and results == [f8] * 3 + [f32] * 4 + ["u8"]
    # Nothing as large as the scores is in memory.
    assert report.step.memory.temporaries < HEADS * TOKENS * TOKENS // 4
    # A head of 64 is padded to 128 for the gradient's cuDNN kernel.
    width = 128
    assert report.step.flops == 7 * HEADS * TOKENS * TOKENS * width
    assert report.fp8_share == 1.0 and {p.verdict for p in report.products} == {Verdict.FP8}
    assert unknown_calls(report.step) == set() and report.step.opaque == ()
    assert any("whether cuDNN has a GPU kernel" in caveat for caveat in report.caveats)


@pytest.mark.parametrize(("axis", "device"), [*on(["batch", "heads"], ["h100"])])
def test_devices_share_the_largest_amaxes(axis, device):
    """JAX's own rule for the calls would leave each device with its own."""
    spec = {"batch": jax.P("devices"), "heads": jax.P(None, None, "devices")}[axis]
    op = Fp8Attention.init(scaling=fp8.DelayedScaling(amax_history_length=16))
    report = inspect_step(
        fp8.filter_grad(loss),
        (op, *abstract(128, batch=8, tokens=1024)),
        devices=4,
        shardings=((None, spec, spec, spec),),
        device=device,
    )
    whole = HEADS * 8 * 1024 * 1024 * 128 * 7
    assert report.step.flops == whole // 4
    reduced = [collective for collective in report.step.collectives if collective.kind == "all-reduce"]
    # Weights and output; the gradients of scores, query, key and value.
    assert sum(collective.bytes for collective in reduced if collective.dtype == "f32") >= 6 * 4
    assert {collective.kind for collective in report.step.collectives} == {"all-reduce"}
    bodies = re.findall(r"all-reduce\(.*to_apply=%?([\w.\-]+)", report.step.text)
    for body in bodies:
        text = re.search(rf"%{re.escape(body)} [^\n]*\{{\n(.*?)\n\}}", report.step.text, re.DOTALL)[1]
        assert "maximum(" in text


@pytest.mark.parametrize(("tokens", "device"), [*on([100], ["h100"])])
def test_a_sequence_of_incomplete_tiles_is_refused(tokens, device):
    op = Fp8Attention.init(scaling=fp8.DelayedScaling(amax_history_length=16))
    with pytest.raises(ValueError, match="multiples of 128"):
        inspect_step(fp8.filter_grad(loss), (op, *abstract(128, tokens=tokens)), device=device)
    # Without a gradient it is fine.
    report = inspect_step(loss, (op, *abstract(64, tokens=tokens)), device=device)
    assert set(calls(report.step.text)) == {"__cudnn$fmhaSoftmaxF8"}
    assert report.step.flops == 2 * HEADS * tokens * tokens * 64
