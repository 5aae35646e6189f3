"""Every product of a program is found, with the FLOPs that its sizes give: counted here by hand, or from the model."""

import dataclasses
import json
import math
import re

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled_models import abstract, struct
from hypothesis import given, strategies as st

import haliax_fp8 as fp8
from haliax_fp8.devices import Efficiency
from haliax_fp8.devices.roofline import Roofline
from haliax_fp8.preflight import Memory, PreflightReport, Verdict, compilable_devices, inspect_step
from haliax_fp8.preflight.analyze import analyze
from haliax_fp8.preflight.compile import Compiled
from haliax_fp8.preflight.sizes import _pairs


def read(text, device="h100", written="", outputs=(), known=None):
    """The analysis of a program in HLO text."""
    memory = Memory(0, 0, 0, 0, 0)
    return analyze(Compiled(text, written, tuple(outputs), memory, 0.0), compilable_devices[device], known)


def module(entry, *functions):
    """HLO text of a program with one argument; functions are given as `(header, lines)`."""
    bodies = [f"{header} {{\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n" for header, lines in functions]
    main = "ENTRY %main (x: f32[2]) -> f32[2] {\n" + "\n".join(f"  {line}" for line in entry) + "\n}\n"
    return "HloModule jit_f, is_scheduled=true\n\n" + "\n".join(bodies) + "\n" + main


def gemm(name, out, operands, device, contract, batch=((), ()), op_name="jit(f)/dot_general", root=False):
    """A call of cuBLAS, as XLA writes it."""
    numbers = {
        "lhs_contracting_dimensions": [str(contract[0])],
        "rhs_contracting_dimensions": [str(contract[1])],
        "lhs_batch_dimensions": list(map(str, batch[0])),
        "rhs_batch_dimensions": list(map(str, batch[1])),
    }
    config = json.dumps({"gemm_backend_config": {"alpha_real": 1, "dot_dimension_numbers": numbers}})
    return (
        f"{'ROOT ' if root else ''}%{name} = ({out}, s8[4194304]{{0}}) custom-call({', '.join(operands)}), "
        f'custom_call_target="{device}", metadata={{op_name="{op_name}"}}, backend_config={config}'
    )


# --- Written by hand --------------------------------------------------------------------------------------------------


@pytest.mark.more
def test_a_dot_with_batch_and_several_contracted_axes():
    text = module(
        [
            "%a = bf16[3,5,7,11]{3,2,1,0} parameter(0)",
            "%b = bf16[7,13,3,11]{3,2,1,0} parameter(1)",
            "ROOT %d = f32[3,5,13]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2,3}, "
            "rhs_batch_dims={2}, rhs_contracting_dims={0,3}",
        ]
    )
    (product,) = read(text).products
    assert (product.batch, product.m, product.n, product.k) == (3, 5, 13, 77)
    assert product.flops == 2 * 3 * 5 * 13 * 77
    assert (product.lhs, product.rhs, product.out, product.implementation) == ("bf16", "bf16", "f32", "dot")
    assert product.bytes == 2 * (3 * 5 * 7 * 11 + 7 * 13 * 3 * 11) + 4 * 3 * 5 * 13


@pytest.mark.parametrize("dtype, verdict", [("f8e4m3fn", Verdict.FP8), ("bf16", Verdict.HIGH_PRECISION)])
@pytest.mark.parametrize("mask, hidden", [("CAUSAL", 2), ("NO_MASK", 1)])
def test_a_fused_attention_makes_two_products_forward_and_five_backward(dtype, verdict, mask, hidden):
    """Two sequences of 256 tokens, six heads of 64, which share two heads of keys with 128 tokens."""
    config = {"mask_type": mask, "intermediate_tensor_shape": {"dimensions": ["2", "6", "256", "128"]}}
    config = json.dumps({"cudnn_fmha_backend_config": config})
    q, kv = f"{dtype}[2,256,6,64]{{3,2,1,0}}", f"{dtype}[2,128,2,64]{{3,2,1,0}}"
    call = '%{} = ({}, u8[0]{{0}}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax{}", {}'
    of = lambda scope: f'metadata={{op_name="{scope}"}}, backend_config={config}'
    text = module(
        [
            f"%q = {q} parameter(0)",
            f"%k = {kv} parameter(1)",
            call.format("f", q, "F8", of("jit(f)/jvp(attention)/fwd")),
            "ROOT " + call.format("b", f"{q}, {kv}, {kv}", "BackwardF8", of("jit(f)/transpose(jvp(attention))/bwd")),
        ]
    )
    program = read(text)
    flops = 2 * 2 * 6 * 256 * 128 * 64 // hidden
    assert [(p.name, p.flops, p.verdict) for p in program.products] == [
        *[("forward", flops, verdict)] * 2,
        *[("backward", flops, verdict)] * 5,
    ]
    assert program.opaque == () and program.others.count == 0
    assert {p.implementation for p in program.products} == {"cuDNN attention"}
    reasons = {"" if verdict is Verdict.FP8 else "fused attention in bf16"}
    assert {p.reason for p in program.products} == reasons
    # Neither an older GPU nor one with other formats multiplies them.
    if dtype != "bf16":
        assert {p.verdict for p in read(text, "a100").products} == {Verdict.EMULATED}


@pytest.mark.parametrize(
    "device, dtype, implementation, verdict",
    [
        ("__cublas$lt$matmul$f8", "f8e4m3fn", "cublasLt f8", Verdict.FP8),
        ("__cublas$lt$matmul", "bf16", "cublasLt", Verdict.HIGH_PRECISION),
        ("__cublas$gemm", "f32", "cublas", Verdict.HIGH_PRECISION),
    ],
)
def test_cublas(device, dtype, implementation, verdict):
    text = module(
        [
            f"%a = {dtype}[2,16,64]{{2,1,0}} parameter(0)",
            f"%b = {dtype}[2,32,64]{{2,1,0}} parameter(1)",
            "%s = f32[] constant(1)",
            gemm("g", "bf16[2,16,32]{2,1,0}", ["%a", "%b", "%s", "%s"], device, (2, 2), ((0,), (0,))),
            "ROOT %out = bf16[2,16,32]{2,1,0} get-tuple-element(%g), index=0",
        ]
    )
    program = read(text)
    (product,) = program.products
    assert product.flops == program.flops == 2 * 2 * 16 * 32 * 64
    assert (product.implementation, product.lhs, product.out, product.verdict) == (
        implementation,
        dtype,
        "bf16",
        verdict,
    )
    assert program.fp8_share == (verdict is Verdict.FP8)
    assert program.others.count == 0


def loop(name, body, count, state="(s32[], f32[8,8])"):
    """A `while` that runs `count` times."""
    known = f', backend_config={{"known_trip_count":{{"n":"{count}"}}}}' if count else ""
    return f"%{name} = {state} while(%t), condition=%cond, body=%{body}{known}"


CONDITION = ("%cond (c: (s32[], f32[8,8])) -> pred[]", ["ROOT %true = pred[] constant(true)"])


def test_loops_in_loops_multiply():
    inner = (
        "%inner (c: (s32[], f32[8,8])) -> (s32[], f32[8,8])",
        [
            "%c = (s32[], f32[8,8]{1,0}) parameter(0)",
            "%i = s32[] get-tuple-element(%c), index=0",
            "%x = f32[8,8]{1,0} get-tuple-element(%c), index=1",
            "%d = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            "ROOT %r = (s32[], f32[8,8]{1,0}) tuple(%i, %d)",
        ],
    )
    outer = (
        "%outer (t: (s32[], f32[8,8])) -> (s32[], f32[8,8])",
        ["%t = (s32[], f32[8,8]{1,0}) parameter(0)", "ROOT " + loop("w", "inner", 5)],
    )
    entry = ["%t = (s32[], f32[8,8]{1,0}) parameter(0)", "ROOT " + loop("w2", "outer", 7)]
    program = read(module(entry, CONDITION, inner, outer))
    (product,) = program.products
    assert product.executions == 35 and program.flops == 35 * 2 * 8**3
    assert program.unknown_loops == 0


def test_a_loop_of_unknown_length_counts_once_and_is_named():
    body = (
        "%body (c: (s32[], f32[8,8])) -> (s32[], f32[8,8])",
        [
            "%c = (s32[], f32[8,8]{1,0}) parameter(0)",
            "%x = f32[8,8]{1,0} get-tuple-element(%c), index=1",
            "%i = s32[] get-tuple-element(%c), index=0",
            "%d = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            "ROOT %r = (s32[], f32[8,8]{1,0}) tuple(%i, %d)",
        ],
    )
    program = read(
        module(["%t = (s32[], f32[8,8]{1,0}) parameter(0)", "ROOT " + loop("w", "body", 0)], CONDITION, body)
    )
    assert program.flops == 2 * 8**3 and program.unknown_loops == 1


def counting_loop(start, stop, step, direction, fused=False):
    """A loop whose counter goes from `start` by `step` while it compares with `stop`, as a TPU's compiler leaves it."""
    add = (
        "%increment (p: s32[], q: s32[]) -> s32[]",
        [
            "%p = s32[] parameter(0)",
            "%q = s32[] parameter(1)",
            "ROOT %sum = s32[] add(%q, %p)",
        ],
    )
    body = (
        "%body (c: (s32[], f32[8,8])) -> (s32[], f32[8,8])",
        [
            "%c = (s32[], f32[8,8]{1,0}) parameter(0)",
            "%x = f32[8,8]{1,0} get-tuple-element(%c), index=1",
            "%i = s32[] get-tuple-element(%c), index=0",
            f"%one = s32[] constant({step})",
            "%j = s32[] fusion(%one, %i), kind=kLoop, calls=%increment" if fused else "%j = s32[] add(%i, %one)",
            "%k = s32[] copy(%j)",
            "%d = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            "ROOT %r = (s32[], f32[8,8]{1,0}) tuple(%k, %d)",
        ],
    )
    condition = (
        "%cond (c: (s32[], f32[8,8])) -> pred[]",
        [
            "%c = (s32[], f32[8,8]{1,0}) parameter(0)",
            f"%n = s32[] constant({stop})",
            "%i = s32[] get-tuple-element(%c), index=0",
            f"ROOT %test = pred[] compare(%i, %n), direction={direction}",
        ],
    )
    entry = [
        "%x = f32[8,8]{1,0} parameter(0)",
        f"%zero = s32[] constant({start})",
        "%t = (s32[], f32[8,8]{1,0}) tuple(%zero, %x)",
        "ROOT " + loop("w", "body", 0),
    ]
    return module(entry, condition, add, body)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "start, stop, step, direction",
    [
        (0, 5, 1, "LT"),
        (2, 11, 3, "LT"),
        (2, 12, 3, "LT"),
        (0, 5, 1, "LE"),
        (7, 0, -1, "GT"),
        (7, 1, -2, "GE"),
        (3, 3, 1, "LT"),
        (-4, 3, 2, "LT"),
    ],
)
def test_loops_that_count_from_constant_to_constant(start, stop, step, direction, fused):
    """Against a counter that counts."""
    goes_on = {"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__}[direction]
    count, counter = 0, start
    while goes_on(counter, stop):
        count, counter = count + 1, counter + step
    program = read(counting_loop(start, stop, step, direction, fused))
    assert [product.executions for product in program.products] == [count] and program.unknown_loops == 0


def test_loops_until_something_holds_are_unknown():
    assert read(counting_loop(0, 5, 0, "LT")).unknown_loops == 1
    assert read(counting_loop(0, 5, 1, "NE")).unknown_loops == 1
    lowered = jax.jit(lambda x: jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ x, x)).lower(jnp.ones((8, 8)))
    program = read(lowered.as_text("hlo"))
    assert program.unknown_loops == 1 and program.flops == 2 * 8**3


def test_loops_as_jax_writes_them():
    """Before XLA has found their length: a scan and a `fori_loop`, one in the other."""

    def f(x):
        inner = lambda i, x: x @ x
        return jax.lax.scan(lambda x, _: (jax.lax.fori_loop(2, 7, inner, x), None), x, length=3)[0]

    program = read(jax.jit(f).lower(jnp.ones((8, 8))).as_text("hlo"))
    assert program.flops == 3 * 5 * 2 * 8**3 and program.unknown_loops == 0


def triton(kind):
    """A product in a fusion of its own, whose operands are fusions too, as XLA nests them for Triton."""
    tile = ("%tile (p: f8e4m3fn[32,64]) -> f8e4m3fn[32,64]", ["ROOT %p = f8e4m3fn[32,64]{1,0} parameter(0)"])
    body = (
        "%gemm (a: f8e4m3fn[32,64], b: f8e4m3fn[64,48]) -> bf16[32,48]",
        [
            "%a = f8e4m3fn[32,64]{1,0} parameter(0)",
            "%fa = f8e4m3fn[32,64]{1,0} fusion(%a), kind=kCustom, calls=%tile, "
            'backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}',
            "%b = f8e4m3fn[64,48]{1,0} parameter(1)",
            "%d = f32[32,48]{1,0} dot(%fa, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
            'metadata={op_name="jit(f)/fp8_dot_general/jit(forward)/fprop/dot_general"}',
            "ROOT %o = bf16[32,48]{1,0} convert(%d)",
        ],
    )
    entry = [
        "%a = f8e4m3fn[32,64]{1,0} parameter(0)",
        "%b = f8e4m3fn[64,48]{1,0} parameter(1)",
        f"ROOT %f = bf16[32,48]{{1,0}} fusion(%a, %b), kind=kCustom, calls=%gemm, "
        f'backend_config={{"fusion_backend_config":{{"kind":"{kind}"}}}}',
    ]
    return module(entry, tile, body)


@pytest.mark.parametrize(
    "kind, implementation",
    [("__triton_nested_gemm_fusion", "Triton dot"), ("__triton_gemm", "Triton dot"), ("", "fused dot")],
)
def test_products_in_fusions(kind, implementation):
    (product,) = read(triton(kind)).products
    assert product.flops == 2 * 32 * 48 * 64
    assert (product.implementation, product.name, product.verdict) == (implementation, "fprop", Verdict.FP8)
    # The product is in float32, but the launch casts it before it writes it.
    assert product.out == "bf16" and product.bytes == 32 * 64 + 64 * 48 + 2 * 32 * 48


def test_split_k_has_the_same_flops():
    text = module(
        [
            "%a = bf16[32,4,16]{2,1,0} parameter(0)",
            "%b = bf16[48,4,16]{2,1,0} parameter(1)",
            "ROOT %d = f32[4,32,48]{2,1,0} dot(%a, %b), lhs_batch_dims={1}, lhs_contracting_dims={2}, "
            "rhs_batch_dims={1}, rhs_contracting_dims={2}",
        ]
    )
    assert read(text).flops == 2 * 32 * 48 * 64


def test_block_scaled_products():
    text = module(
        [
            "%a = f8e4m3fn[32,64]{1,0} parameter(0)",
            "%b = f8e4m3fn[48,64]{1,0} parameter(1)",
            "%sa = f8e8m0fnu[32,2]{1,0} parameter(2)",
            "%sb = f8e8m0fnu[48,2]{1,0} parameter(3)",
            "ROOT %d = bf16[32,48]{1,0} scaled-dot(%a, %b, %sa, %sb), lhs_contracting_dims={1}, "
            "rhs_contracting_dims={1}",
        ]
    )
    (product,) = read(text, "b200").products
    assert product.flops == 2 * 32 * 48 * 64
    assert (product.implementation, product.verdict, product.format) == ("scaled-dot", Verdict.FP8, "FP8")


FOUR, EIGHT = "f4e2m1fn[{0},{0}]{{1,0:E(4)}}", "f8e4m3fn[{0},{0}]{{1,0}}"


def product_of_blocks(k, second):
    """On a B200, of an operand in FP4 and another one."""
    return read(
        module(
            [
                f"%a = {FOUR.format(k)} parameter(0)",
                f"%b = {second.format(k)} parameter(1)",
                f"%sa = f8e4m3fn[{k},{k // 16}]{{1,0}} parameter(2)",
                f"%sb = f8e4m3fn[{k},{k // 16}]{{1,0}} parameter(3)",
                f"ROOT %d = bf16[{k},{k}]{{1,0}} scaled-dot(%a, %b, %sa, %sb), lhs_contracting_dims={{1}}, "
                "rhs_contracting_dims={1}",
            ]
        ),
        "b200",
    )


def test_products_in_fp4_are_in_low_precision_and_at_its_rate():
    """Two operands of half a byte an element; one in FP8 makes it a product of FP8 units."""
    k = 2**16
    peaks = compilable_devices["b200"].peaks
    roofline = Roofline(peaks, Efficiency(launch=0.0, block_flops=0.5, fp4_flops=0.25, bandwidth=1.0))
    four, eight = product_of_blocks(k, FOUR), product_of_blocks(k, EIGHT)
    assert four.fp8_share == eight.fp8_share == 1.0
    counts = [{name: one.products for name, one in p.by_format().items()} for p in (four, eight)]
    assert counts == [{"FP4": 1, "FP8": 0}, {"FP4": 0, "FP8": 1}]
    assert four.words(Verdict.FP8) == "100.0% of the FLOPs in FP4"
    assert four.products[0].bytes == 2 * k**2 // 2 + 2 * k * (k // 16) + 2 * k**2
    times = [2 * k**3 / (0.25 * peaks.fp4), 2 * k**3 / (0.5 * peaks.fp8)]
    assert [p.estimate(roofline).products for p in (four, eight)] == pytest.approx(times)


@pytest.mark.parametrize(
    ("cudnn", "second", "warns"),
    [("9.12.5", FOUR, True), ("9.13.0", FOUR, False), ("10.0.0", FOUR, False), ("9.12.5", EIGHT, False)],
)
def test_an_old_cudnn_leaves_the_scales_of_fp4_to_xla(cudnn, second, warns):
    device = dataclasses.replace(compilable_devices["b200"], cudnn=cudnn)
    report = PreflightReport(device, {"devices": 1}, product_of_blocks(64, second))
    assert any(f"cuDNN {cudnn} leaves" in finding for finding in report.findings) == warns
    assert report.to_markdown().splitlines()[0].endswith(f"; cuDNN {cudnn}")
    assert json.loads(report.to_json())["device"]["cudnn"] == cudnn


@pytest.mark.parametrize(
    "attributes, out, flops",
    [
        # Rows by the kernel of their group: each row meets one kernel.
        ("lhs_contracting_dims={1}, rhs_contracting_dims={1}, rhs_group_dims={0}", "f32[32,48]", 2 * 32 * 64 * 48),
    ],
)
def test_grouped_products(attributes, out, flops):
    text = module(
        [
            "%a = bf16[32,64]{1,0} parameter(0)",
            "%b = bf16[4,64,48]{2,1,0} parameter(1)",
            "%g = s32[4]{0} parameter(2)",
            f"ROOT %d = {out}{{1,0}} ragged-dot(%a, %b, %g), {attributes}, lhs_ragged_dims={{0}}",
        ]
    )
    assert read(text).flops == flops


def test_grouped_products_over_rows():
    """The kernels' gradient: each row meets each column of the other operand once, in whatever group."""
    text = module(
        [
            "%a = bf16[32,64]{1,0} parameter(0)",
            "%b = bf16[32,48]{1,0} parameter(1)",
            "%g = s32[4]{0} parameter(2)",
            "ROOT %d = f32[4,64,48]{2,1,0} ragged-dot(%a, %b, %g), lhs_contracting_dims={0}, rhs_contracting_dims={0}, "
            "lhs_ragged_dims={0}",
        ]
    )
    assert read(text).flops == 2 * 32 * 64 * 48


@pytest.mark.parametrize(
    "lhs, rhs, out, window, labels, sizes",
    [
        ("4,256,1024", "2048,1024,1", "4,256,2048", "{size=1}", "0bf_oi0->0bf", (1, 1024, 2048, 1024)),
        ("4,256,2048", "4,256,1024", "2048,1024,1", "{size=4}", "0fb_0io->bf0", (1, 2048, 1024, 1024)),
        ("256,1024", "1024,512", "256,512", "", "bf_io->bf", (1, 256, 512, 1024)),
        # A batch of 8 products: each position of the output meets one element of the window.
        (
            "8,32,64",
            "8,64,16",
            "8,32,16",
            "{size=8 stride=7 lhs_dilate=8}",
            "0bf_0io->0bf",
            (8, 32, 16, 64),
        ),
    ],
)
def test_products_that_a_tpu_writes_as_convolutions(lhs, rhs, out, window, labels, sizes):
    in_window = f"window={window}, " if window else ""
    text = module(
        [
            f"%a = f8e4m3fn[{lhs}]{{1,0:T(8,128)(4,1)}} parameter(0)",
            f"%b = f8e4m3fn[{rhs}]{{1,0:T(8,128)(4,1)}} parameter(1)",
            f"ROOT %c = f32[{out}]{{1,0:T(8,128)}} convolution(%a, %b), {in_window}dim_labels={labels}",
        ]
    )
    (product,) = read(text, "tpu7x").products
    assert (product.batch, product.m, product.n, product.k) == sizes
    assert product.verdict is Verdict.FP8
    assert read(text, "tpu6e").products[0].verdict is Verdict.EMULATED


@given(*[st.integers(1, 7)] * 5, st.integers(-9, 9))
def test_pairs_of_a_window_are_counted(size, positions, window, stride, holes, low):
    """As one by one: for each position of the output and each element of the window, whether it meets an input."""
    for dilation in (1, 2, 3, 6):
        fields = {"size": window, "stride": stride, "rhs_dilate": dilation, "lhs_dilate": holes, "pad": low}
        met = [p * stride + e * dilation - low for p in range(positions) for e in range(window)]
        expected = sum(0 <= index <= (size - 1) * holes and index % holes == 0 for index in met)
        if not stride == dilation == holes == window == 1:
            assert _pairs(fields, size, positions) == expected


def convolution_macs(x, w, stride, pad, dilate):
    """Multiplications of a one-dimensional convolution, one by one: batch, position, feature, window."""
    batch, length, features = x
    window, _, out_features = w
    low, high = pad
    positions = (length + low + high - ((window - 1) * dilate + 1)) // stride + 1
    inside = sum(
        0 <= position * stride + element * dilate - low < length
        for position in range(positions)
        for element in range(window)
    )
    return batch * features * out_features * inside


@pytest.mark.parametrize("stride, pad, dilate", [(1, (0, 0), 1), (2, (1, 2), 1), (3, (4, 0), 2), (1, (2, 2), 3)])
def test_convolutions_count_what_is_multiplied(stride, pad, dilate):
    """On the program that XLA makes of a convolution, padding is not work."""
    x, w = (2, 17, 3), (4, 3, 5)

    def convolve(x, w):
        numbers = ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(x, w, (stride,), [pad], rhs_dilation=(dilate,), dimension_numbers=numbers)

    report = inspect_step(convolve, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in (x, w)), device="local")
    assert report.step.flops == 2 * convolution_macs(x, w, stride, pad, dilate)


@pytest.mark.parametrize(
    "call, operands, result",
    [
        ("BackwardFilter", ("bf16[8,34,34,32]", "bf16[8,32,32,64]"), "bf16[64,3,3,32]"),
        ("BackwardInput", ("bf16[8,32,32,64]", "bf16[64,3,3,32]"), "bf16[8,34,34,32]"),
        ("Forward", ("bf16[8,34,34,32]", "bf16[64,3,3,32]"), "bf16[8,32,32,64]"),
    ],
)
def test_cudnns_gradients_of_convolutions_multiply_as_often_as_the_convolution(call, operands, result):
    """Their attributes are those of the convolution, of input and filter; the lines are XLA's."""
    (product,) = read(
        module(
            [
                *(f"%p{i} = {shape}{{3,2,1,0}} parameter({i})" for i, shape in enumerate(operands)),
                f"ROOT %c = ({result}{{3,2,1,0}}, u8[0]{{0}}) custom-call(%p0, %p1), window={{size=3x3}}, "
                f'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{call}"',
            ]
        )
    ).products
    assert product.flops == 2 * 8 * 32**2 * 64 * 32 * 3**2
    assert (product.lhs, product.out) == ("bf16", "bf16")


def test_branches_and_asynchronous_launches():
    then = (
        "%then (a: bf16[8,8]) -> bf16[8,8]",
        [
            "%a = bf16[8,8]{1,0} parameter(0)",
            "ROOT %d = bf16[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        ],
    )
    other = ("%other (a: bf16[8,8]) -> bf16[8,8]", ["ROOT %b = bf16[8,8]{1,0} parameter(0)"])
    wrapped = (
        "%wrapped (w: bf16[8,8]) -> bf16[8,8]",
        [
            "%w = bf16[8,8]{1,0} parameter(0)",
            "ROOT %e = bf16[8,8]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        ],
    )
    entry = [
        "%x = bf16[8,8]{1,0} parameter(0)",
        "%p = pred[] constant(true)",
        "%c = bf16[8,8]{1,0} conditional(%p, %x, %x), true_computation=%then, false_computation=%other",
        "%s = ((bf16[8,8]{1,0}), bf16[8,8]{1,0}, u32[]) async-start(%c), calls=%wrapped",
        "ROOT %e2 = bf16[8,8]{1,0} async-done(%s)",
    ]
    program = read(module(entry, then, other, wrapped))
    assert [product.flops for product in program.products] == [2 * 8**3] * 2
    assert program.branches == 1


def test_launches_that_cannot_be_looked_into_are_named():
    text = module(
        [
            "%x = f8e4m3fn[8,8]{1,0} parameter(0)",
            'ROOT %k = bf16[8,8]{1,0} custom-call(%x, %x), custom_call_target="__gpu$xla.gpu.triton", '
            'metadata={op_name="jit(f)/pallas_call"}',
        ]
    )
    program = read(text)
    (call,) = program.opaque
    assert (call.name, call.operands, call.executions) == ("__gpu$xla.gpu.triton", ("f8e4m3fn",) * 2, 1)
    assert program.flops == 0 and program.others.count == 0


def test_a_gradient_that_rows_are_added_to():
    """A tied head's, as GPUs have it: the gradients of the rows that were looked up are scattered into it."""
    add = (
        "%add (a: bf16[], b: bf16[]) -> bf16[]",
        ["%a = bf16[] parameter(0)", "%b = bf16[] parameter(1)", "ROOT %sum = bf16[] add(%a, %b)"],
    )
    entry = [
        '%table = bf16[96,32]{1,0} parameter(0), metadata={op_name="model.table"}',
        '%g = bf16[48,96]{1,0} parameter(1), metadata={op_name="g"}',
        '%x = bf16[48,32]{1,0} parameter(2), metadata={op_name="x"}',
        '%i = s32[48,1]{1,0} parameter(3), metadata={op_name="i"}',
        "%w = bf16[96,32]{1,0} dot(%g, %x), lhs_contracting_dims={0}, rhs_contracting_dims={0}, "
        'metadata={op_name="jit(f)/transpose(jvp(f))/dot_general"}',
        "%s = bf16[96,32]{1,0} scatter(%w, %i, %x), update_window_dims={1}, inserted_window_dims={0}, "
        "scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add",
        "ROOT %new = bf16[96,32]{1,0} subtract(%table, %s)",
    ]
    (product,) = read(module(entry, add), outputs=["0.table"]).products
    assert (product.layer, product.name) == ("model.table", "backward")


def layer_of_a_cast(taken):
    """The layer of a product whose kernel is `(w - (w - taken)) / s`, in FP8."""
    cast = (
        "%cast (x: bf16[96,32], s: f32[], y: bf16[96,32]) -> f8e4m3fn[96,32]",
        [
            "%p = bf16[96,32]{1,0} parameter(0)",
            "%s = f32[] parameter(1)",
            "%q = bf16[96,32]{1,0} parameter(2)",
            "%x = f32[96,32]{1,0} convert(%p)",
            "%y = f32[96,32]{1,0} convert(%q)",
            "%b = f32[96,32]{1,0} broadcast(%s), dimensions={}",
            f"%z = f32[96,32]{{1,0}} subtract(%x, {taken})",
            "%v = f32[96,32]{1,0} subtract(%x, %z)",
            "%d = f32[96,32]{1,0} divide(%v, %b)",
            "ROOT %e = f8e4m3fn[96,32]{1,0} convert(%d)",
        ],
    )
    entry = [
        '%w = bf16[96,32]{1,0} parameter(0), metadata={op_name="model.up.weight"}',
        '%s.1 = f32[] parameter(1), metadata={op_name="scale"}',
        '%o = bf16[96,32]{1,0} parameter(2), metadata={op_name="other"}',
        '%g = f8e4m3fn[48,32]{1,0} parameter(3), metadata={op_name="x"}',
        "%k = f8e4m3fn[96,32]{1,0} fusion(%w, %s.1, %o), kind=kLoop, calls=%cast",
        "ROOT %out = bf16[48,96]{1,0} dot(%g, %k), lhs_contracting_dims={1}, rhs_contracting_dims={1}, "
        'metadata={op_name="jit(f)/dot_general"}',
    ]
    (product,) = read(module(entry, cast)).products
    return product.layer


def test_a_cast_that_makes_infinities_nan():
    """`(x - (x - x)) / s` is the quantized `x`; any other difference is computed."""
    assert layer_of_a_cast("%x") == "model.up"
    assert layer_of_a_cast("%y") != "model.up"


# --- Compiled for this CPU, counted from the model's shapes -----------------------------------------------------------


def mlp():
    return eqx.nn.MLP(32, 16, 64, 2, key=jax.random.key(0))


def mlp_gradient(model, x):
    return fp8.filter_grad(lambda model, x: (jax.vmap(model)(x).astype(jnp.float32) ** 2).mean())(model, x)


# 32 -> 64 -> 64 -> 16: all have fprop and wgrad, and all but the first dgrad.
MLP_MACS = 2 * (32 * 64 + 64 * 64 + 64 * 16) + (64 * 64 + 64 * 16)


@pytest.mark.parametrize("convert", [lambda m: m, fp8.fp8_linear_layers], ids=["plain", "fp8"])
@pytest.mark.parametrize("batch", [48, 16])
def test_unrolled_layers(convert, batch):
    report = inspect_step(mlp_gradient, abstract(lambda: convert(mlp())), struct(batch, 32), device="local")
    assert report.step.flops == 2 * batch * MLP_MACS
    assert len(report.products) == 8


def test_every_product_is_named_after_its_layer():
    model = abstract(lambda: fp8.fp8_linear_layers(mlp()))
    report = inspect_step(mlp_gradient, model, struct(48, 32), device="local")
    expected = {(f"model.layers.{i}", product) for i in range(3) for product in ("fprop", "dgrad", "wgrad")}
    assert {(p.layer, p.name) for p in report.products} == expected - {("model.layers.0", "dgrad")}
    sizes = {(p.layer, p.name): (p.m * p.n * p.k) for p in report.products}
    assert sizes["model.layers.0", "wgrad"] == 48 * 32 * 64 and sizes["model.layers.2", "dgrad"] == 48 * 64 * 16


def test_without_our_scopes_layers_are_named_too():
    report = inspect_step(mlp_gradient, abstract(mlp), struct(48, 32), device="local")
    assert {p.layer for p in report.products} == {f"model.layers.{i}" for i in range(3)}
    assert sorted(p.name for p in report.products) == ["backward"] * 5 + ["forward"] * 3


def test_without_our_scopes_the_table_tells_wgrad_from_dgrad():
    """wgrad sums over the 48 rows, dgrad over a layer's outputs; the first layer has no dgrad."""
    report = inspect_step(mlp_gradient, abstract(mlp), struct(48, 32), device="local")
    backward = {(p.layer[-1], p.k): p.makes_weight for p in report.products if p.name == "backward"}
    assert backward == {("0", 48): True, ("1", 48): True, ("2", 48): True, ("1", 64): False, ("2", 16): False}
    head, *rows = re.findall(r"^.*rows × in.*$|^ +[012] +48×.*$", str(report), re.MULTILINE)
    assert [row.split()[:2] for row in rows] == [["0", "48×32×64"], ["1", "48×64×64"], ["2", "48×64×16"]]
    cells = [[row[head.index(column) :][:5].strip() for column in ("fprop", "dgrad", "wgrad")] for row in rows]
    assert [[bool(cell) for cell in row] for row in cells] == [[True, False, True], [True] * 3, [True] * 3]


def test_a_kernel_that_a_tpu_fetches_in_slices():
    """They are fetched one by one, and one array again by name alone; memory without contents is nothing to run."""
    text = module(
        [
            '%x = bf16[512,256]{1,0} parameter(0), metadata={op_name="x"}',
            '%w = bf16[256,128]{1,0} parameter(1), metadata={op_name="model.layers[1].weight"}',
            "%b = s8[65536]{0} bitcast(%w)",
            "%start = ((s8[65536]{0}), s8[32768]{0:S(1)}, s32[]{:S(2)}) slice-start(%b), slice={[0:32768]}",
            "%start.1 = ((s8[65536]{0}), s8[32768]{0:S(1)}, s32[]{:S(2)}) slice-start(%b), slice={[32768:65536]}",
            '%memory = u8[1024]{0:S(1)} custom-call(), custom_call_target="AllocateBuffer"',
            "%done = s8[32768]{0:S(1)} slice-done(%start)",
            "%done.1 = s8[32768]{0:S(1)} slice-done(%start.1)",
            '%whole = bf16[256,128]{1,0:S(1)} custom-call(%done, %done.1), custom_call_target="ConcatBitcast"',
            "ROOT %c = bf16[512,128]{1,0} convolution(%x, %whole), dim_labels=bf_io->bf",
        ]
    )
    program = read(text, "tpu7x")
    (product,) = program.products
    assert product.layer == "model.layers.1"
    assert (program.others.count, program.others.bytes) == (2, 2 * 65536)


def tied_gradient(model, tokens):
    """A table for tokens that is the head too, and positions that are added to what was looked up."""

    def loss(model):
        x = model["table"][tokens] + model["positions"]
        return (jnp.tanh(x @ model["table"].T) ** 2).sum()

    gradients = jax.grad(loss)(model)
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, model, gradients)


def test_a_tied_heads_gradients_are_its_own():
    """With one sequence, its dgrad is, element by element, the gradient of the positions too."""
    model = {"table": struct(96, 32), "positions": struct(48, 32)}
    report = inspect_step(tied_gradient, model, struct(48, dtype=jnp.int32), device="local")
    assert [(p.layer, p.name, p.flops) for p in report.products] == [
        ("model.table", product, 2 * 48 * 96 * 32) for product in ("forward", "backward", "backward")
    ]


def test_what_is_multiplied_by_a_weight_has_its_gradient_from_a_product():
    """Trained inputs: of the products that their gradient and the kernel's come from, each reads the other."""

    def step(model):
        loss = lambda model: (jnp.tanh(model["queries"] @ model["kernel"]["weight"]) ** 2).sum()
        return jax.tree.map(lambda weight, gradient: weight - gradient, model, jax.grad(loss)(model))

    model = {"queries": struct(48, 32), "kernel": {"weight": struct(32, 96)}}
    report = inspect_step(step, model, device="local")
    assert {p.layer for p in report.products} == {"model.kernel"} and len(report.products) == 3


BLOCKS, EMBED, HIDDEN, TOKENS = 4, 32, 64, 48


class Block(eqx.Module):
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        Embed, Hidden = hax.make_axes(embed=EMBED, hidden=HIDDEN)
        up, down = jax.random.split(key)
        return Block(hnn.Linear.init(Embed, Hidden, key=up), hnn.Linear.init(Hidden, Embed, key=down))

    def __call__(self, x):
        return x + self.down(hnn.relu(self.up(x)))


def stack_gradient(model, x):
    return fp8.filter_grad(lambda model: hax.mean(hax.square(model.fold(x).astype(jnp.float32))).scalar())(model)


@pytest.mark.parametrize("converted", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize(
    "stack, checkpointing, forward",
    [(hnn.BlockSeq, False, 1), (hnn.Stacked, False, 1), (hnn.Stacked, True, 2)],
    ids=["unrolled", "scan", "scan with checkpointing"],
)
def test_stacks(stack, checkpointing, forward, converted):
    def make():
        Layers = hax.Axis("layers", BLOCKS)
        made = stack.init(Layers, Block, gradient_checkpointing=checkpointing)
        model = made(key=jax.random.split(jax.random.key(0), BLOCKS))
        return fp8.fp8_linear_layers(model) if converted else model

    x = hax.NamedArray(struct(TOKENS, EMBED), (hax.Axis("token", TOKENS), hax.Axis("embed", EMBED)))
    report = inspect_step(stack_gradient, abstract(make), x, device="local")
    product = 2 * TOKENS * EMBED * HIDDEN
    # Of two layers in each block: fprop (again where checkpoints recompute it), dgrad and wgrad. Nobody asks for the
    # gradient of x; a loop computes it in every step, as all its steps are alike.
    skipped = 1 if stack is hnn.BlockSeq else 0
    # What recomputation makes of the last product of a block, no gradient reads.
    unread = BLOCKS if checkpointing else 0
    expected = BLOCKS * 2 * (forward + 2) - skipped - unread
    assert report.step.flops == expected * product
    assert sum(p.executions for p in report.products) == expected
    names = {p.layer.replace("stacked.", "").split(".")[-1] for p in report.products}
    assert names == {"up", "down"}


def test_attention_is_told_from_layers():
    def attention(w, x):
        q, k = x @ w["query"], x @ w["key"]
        return jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, k)) @ x

    w = {name: struct(32, 32) for name in ("query", "key")}
    report = inspect_step(attention, w, struct(4, 24, 32), device="local")
    reasons = {p.layer: p.reason for p in report.products}
    assert reasons["w.query"] == reasons["w.key"] == "not converted"
    assert reasons[""] == "a batched product of activations, as in attention"
    assert report.step.flops == 2 * 4 * 24 * (32 * 32 * 2 + 24 * 32 * 2)


@pytest.mark.parametrize("converted", [False, True], ids=["plain", "fp8"])
def test_vmapped_layers_are_one_product(converted):
    def make():
        layer = eqx.nn.Linear(32, 64, use_bias=False, key=jax.random.key(0))
        return fp8.fp8_linear_layers(layer) if converted else layer

    def step(model, x):
        return fp8.filter_grad(lambda model: (jax.vmap(jax.vmap(model))(x).astype(jnp.float32) ** 2).mean())(model)

    report = inspect_step(step, abstract(make), struct(4, 24, 32), device="local")
    assert len(report.products) == 2 and report.step.flops == 2 * 2 * 4 * 24 * 32 * 64
    assert {product.layer for product in report.products} == {"model"}


def test_grouped_products_of_experts():
    """On a CPU, XLA multiplies every row by every kernel and masks: this is what runs, and what is counted."""
    Experts, In, Out = hax.make_axes(experts=4, d=32, f=64)
    layer = abstract(lambda: hnn.MoELinear.init(Experts, In, Out, key=jax.random.key(0), use_bias=False))
    x = hax.NamedArray(struct(48, 32), (hax.Axis("row", 48), In))
    sizes = hax.NamedArray(struct(4, dtype=jnp.int32), (Experts,))
    report = inspect_step(lambda layer, x, sizes: layer(x, sizes), layer, x, sizes, device="local")
    grouped = 2 * 48 * 32 * 64
    assert report.step.flops in (grouped, 4 * grouped)


def test_donated_arguments_are_donated():
    """JAX forgets what an inner `jit` donates; peak memory would count it twice."""
    sine = lambda x: jnp.sin(x) * 2
    for function in (jax.jit(sine, donate_argnums=0), eqx.filter_jit(sine, donate="all")):
        donating = inspect_step(function, struct(256, 256), device="local").step.memory
        assert donating.aliased == donating.outputs == 2 * 256 * 256
    assert inspect_step(jax.jit(sine), struct(256, 256), device="local").step.memory.aliased == 0


@pytest.mark.more
def test_a_training_step_of_ours_donates():
    """`TrainStep(donate=True)`: new weights and moments are written over old ones."""
    model, x = abstract(lambda: fp8.fp8_linear_layers(mlp())), struct(48, 32)
    loss = lambda model, x: (jax.vmap(model)(x).astype(jnp.float32) ** 2).mean()
    steps = [fp8.TrainStep(loss, optax.sgd(1e-3, momentum=0.9), donate=donate) for donate in (False, True)]
    state = eqx.filter_eval_shape(steps[0].init, model)
    undonated, donated = (inspect_step(step, model, state, x, device="local").step.memory for step in steps)
    weights = 2 * (32 * 64 + 64 * 64 + 64 * 16)
    assert undonated.aliased == 0 and donated.aliased >= 2 * weights


def test_arguments_of_all_kinds():
    """Real arrays, NumPy's, keys, Python numbers, strings and functions."""

    def step(w, x, key, factor, name, activation):
        assert name == "mean" and factor == 2
        return getattr(jnp, name)(activation(x @ w) * factor) + jax.random.normal(key)

    arguments = (jnp.ones((8, 4)), np.ones((2, 8), np.float32), jax.random.key(0), 2, "mean", jax.nn.relu)
    report = inspect_step(step, *arguments, device="local")
    assert report.step.flops == 2 * 2 * 8 * 4


def test_nothing_is_allocated():
    """An argument of 34 GB, more than machines for tests have."""
    big = 2**17
    report = inspect_step(lambda a, b: (a @ b).sum(), struct(big, big), struct(big, 16), device="local")
    assert report.step.memory.arguments >= 2 * big**2
    assert report.step.flops == 2 * 16 * big**2


# --- What launches touch ----------------------------------------------------------------------------------------------


def test_slices_and_updates_in_place_count_as_what_they_touch():
    body = (
        "%fused (big: f32[1000,64], small: f32[1,64], i: s32[]) -> f32[1000,64]",
        [
            "%big = f32[1000,64]{1,0} parameter(0)",
            "%i = s32[] parameter(2)",
            "%zero = s32[] constant(0)",
            "%row = f32[1,64]{1,0} dynamic-slice(%big, %i, %zero), dynamic_slice_sizes={1,64}",
            "%small = f32[1,64]{1,0} parameter(1)",
            "%sum = f32[1,64]{1,0} add(%row, %small)",
            "ROOT %new = f32[1000,64]{1,0} dynamic-update-slice(%big, %sum, %i, %zero)",
        ],
    )
    entry = [
        "%x = f32[1000,64]{1,0} parameter(0)",
        "%y = f32[1,64]{1,0} parameter(1)",
        "%j = s32[] parameter(2)",
        "ROOT %f = f32[1000,64]{1,0} fusion(%x, %y, %j), kind=kLoop, calls=%fused",
    ]
    program = read(module(entry, body))
    # The row read, the other operand, the index; the row written.
    assert program.others.count == 1 and program.others.bytes == 4 * 64 + 4 * 64 + 4 + 4 * 64


@pytest.mark.parametrize(
    "line, touched",
    [
        ("add(%x, %x)", 3 * 4 * 600),
        ("copy(%x)", 2 * 4 * 600),
        ("bitcast(%x)", 0),
    ],
)
def test_plain_launches(line, touched):
    text = module(["%x = f32[600]{0} parameter(0)", f"ROOT %r = f32[600]{{0}} {line}"])
    assert read(text).others.bytes == touched


def test_loops_count_their_launches():
    body = (
        "%body (c: (s32[], f32[8,8])) -> (s32[], f32[8,8])",
        [
            "%c = (s32[], f32[8,8]{1,0}) parameter(0)",
            "%x = f32[8,8]{1,0} get-tuple-element(%c), index=1",
            "%i = s32[] get-tuple-element(%c), index=0",
            "%n = f32[8,8]{1,0} negate(%x)",
            "ROOT %r = (s32[], f32[8,8]{1,0}) tuple(%i, %n)",
        ],
    )
    program = read(
        module(["%t = (s32[], f32[8,8]{1,0}) parameter(0)", "ROOT " + loop("w", "body", 6)], CONDITION, body)
    )
    assert program.others.count == 6 and program.others.bytes == 6 * 2 * 4 * 64


def test_gathers_of_a_mesh():
    """A weight sharded over four devices is gathered: three quarters come from elsewhere, all of it is written."""
    from jax.sharding import PartitionSpec as P

    report = inspect_step(
        lambda w, x: x @ jax.lax.with_sharding_constraint(w, P()),
        struct(64, 32, dtype=jnp.float32),
        struct(16, 64, dtype=jnp.float32),
        device="local",
        mesh={"data": 4},
        shardings=(P("data"), P("data")),
    )
    (gather,) = report.step.collectives
    assert (gather.kind, gather.dtype, gather.bytes, gather.executions) == ("all-gather", "f32", 4 * 64 * 32, 1)
    # Each device has a quarter of the rows.
    assert report.step.flops == 2 * 16 * 64 * 32 // 4 and report.mesh == {"data": 4}
    assert math.prod(report.mesh.values()) == 4
