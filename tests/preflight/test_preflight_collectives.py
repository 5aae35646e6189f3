"""What devices send to each other, of programs written by hand, and of one compiled for devices that are not here."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from compiled_models import struct
from jax.sharding import PartitionSpec as P
from test_preflight_products import module, read

from haliax_fp8.preflight import PreflightError, PreflightReport, compilable_devices, inspect_step


# Two kernels are gathered at once, one in FP8 and one in bfloat16, beside a bias; a product runs meanwhile. Then a
# gradient is scattered while another product runs, inside of what XLA writes for operations that have no start.
SYNCHRONOUS = 'to_apply=%maximum, backend_config={"collective_backend_config":{"is_sync":true}}'
ADD, MAXIMUM = (
    (
        f"%{name} (a: f32[], b: f32[]) -> f32[]",
        ["%a = f32[] parameter(0)", "%b = f32[] parameter(1)", f"ROOT %r = f32[] {name}(%a, %b)"],
    )
    for name in ("add", "maximum")
)
SCATTER = (
    "%wrapped (g: bf16[64,32]) -> bf16[8,32]",
    [
        "%g = bf16[64,32]{1,0} parameter(0)",
        "ROOT %rs = bf16[8,32]{1,0} reduce-scatter(%g), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add, "
        'metadata={op_name="jit(f)/transpose(jvp(f))/fp8_dot_general/wgrad/dot_general"}',
    ],
)
ENTRY = [
    "%w = f8e4m3fn[8,32]{1,0} parameter(0)",
    '%v = bf16[16,64]{1,0} parameter(1), metadata={op_name="model.mlp.weight"}',
    "%b = bf16[4]{0} parameter(2)",
    "%x = f8e4m3fn[16,64]{1,0} parameter(3)",
    "%y = bf16[16,128]{1,0} parameter(4)",
    "%ag = ((f8e4m3fn[8,32]{1,0}, bf16[16,64]{1,0}, bf16[4]{0}), (f8e4m3fn[64,32]{1,0}, bf16[128,64]{1,0}, "
    "bf16[32]{0})) all-gather-start(%w, %v, %b), replica_groups=mesh['data'=8] {'data'}, dimensions={0}",
    "%own = f32[16,16]{1,0} dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={1}, "
    'metadata={op_name="jit(f)/attention/dot_general"}',
    "%done = (f8e4m3fn[64,32]{1,0}, bf16[128,64]{1,0}, bf16[32]{0}) all-gather-done(%ag)",
    "%w8 = f8e4m3fn[64,32]{1,0} get-tuple-element(%done), index=0",
    "%v8 = bf16[128,64]{1,0} get-tuple-element(%done), index=1",
    "%b8 = bf16[32]{0} get-tuple-element(%done), index=2",
    "%first = bf16[16,32]{1,0} dot(%x, %w8), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    "%g = bf16[64,32]{1,0} dot(%x, %first), lhs_contracting_dims={0}, rhs_contracting_dims={0}",
    "%start = ((bf16[64,32]{1,0}), bf16[8,32]{1,0}) async-start(%g), calls=%wrapped",
    "%second = bf16[16,64]{1,0} dot(%y, %v8), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
    'metadata={op_name="jit(f)/jvp(f)/mlp/dot_general"}',
    "%update = ((bf16[64,32]{1,0}), bf16[8,32]{1,0}) async-update(%start)",
    "%scattered = bf16[8,32]{1,0} async-done(%update)",
    "%amax = f32[] parameter(5)",
    f"%r0 = f32[] all-reduce-start(%amax), replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, {SYNCHRONOUS}",
    "%r1 = f32[] all-reduce-done(%r0)",
    "%p = bf16[16,64]{1,0} collective-permute(%v), source_target_pairs={{0,1},{1,0}}",
    "ROOT %out = f32[] all-reduce(%r1), replica_groups={}, to_apply=%add",
]


def test_collectives_written_by_hand():
    text = module(ENTRY, ADD, MAXIMUM, SCATTER).replace("is_scheduled=true", "is_scheduled=true, num_partitions=8")
    program = read(text)
    by_kind = {c.kind + (f" {c.reduction}" if c.kind == "all-reduce" else ""): c for c in program.collectives}
    gather, scatter, permute = (by_kind[name] for name in ("all-gather", "reduce-scatter", "collective-permute"))
    # Seven eighths of everything come from elsewhere.
    sizes = [64 * 32, 2 * 128 * 64, 2 * 32]
    assert [(part.dtype, part.wire) for part in gather.parts] == list(
        zip(("f8e4m3fn", "bf16", "bf16"), (size * 7 / 8 for size in sizes), strict=True)
    )
    assert gather.wire == sum(sizes) * 7 // 8 and gather.bytes == sum(sizes)
    assert [part.feeds_product for part in gather.parts] == [True, True, False]
    assert gather.is_asynchronous and gather.meanwhile == ("y forward",)
    # A scatter's operand is the whole.
    assert (scatter.dtype, scatter.wire, scatter.reduction) == ("bf16", 2 * 64 * 32 * 7 // 8, "add")
    assert scatter.is_asynchronous and scatter.meanwhile == ("model.mlp forward",) and scatter.reduces_gradients
    # In groups of four, and of all; there and back.
    assert (by_kind["all-reduce maximum"].devices, by_kind["all-reduce maximum"].wire) == (4, 4 * 2 * 3 // 4)
    assert (by_kind["all-reduce add"].devices, by_kind["all-reduce add"].wire) == (8, 4 * 2 * 7 // 8)
    assert not by_kind["all-reduce maximum"].is_asynchronous and not by_kind["all-reduce maximum"].reduces_gradients
    # Gradients are added up: the scatter's scope, with another reduction, would be that of an amax.
    assert not dataclasses.replace(scatter, reduction="maximum").reduces_gradients
    assert not dataclasses.replace(scatter, scope=scatter.scope.replace("wgrad", "fprop")).reduces_gradients
    assert dataclasses.replace(permute, executions=7).sent == 7 * 2 * 16 * 64
    assert permute.wire == 2 * 16 * 64 and not permute.is_asynchronous
    # The bias is not an operand.
    assert program.fp8_gathers == sizes[0] / (sizes[0] + sizes[1])


@pytest.mark.parametrize(
    "groups, expected",
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", 2),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['a'=2,'b'=4] {'b'}", 4),
        ("mesh['a'=2,'b'=4] {'a','b'}", 8),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", 2),
        ("{}", 8),
    ],
)
def test_how_many_devices_communicate(groups, expected):
    lines = [
        "%x = f32[8]{0} parameter(0)",
        f"ROOT %r = f32[8]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add",
    ]
    text = module(lines, ADD).replace("is_scheduled=true", "is_scheduled=true, num_partitions=8")
    (all_reduce,) = read(text).collectives
    assert (all_reduce.devices, all_reduce.wire) == (expected, round(2 * 32 * (expected - 1) / expected))


def report_of_hand_written():
    text = module(ENTRY, ADD, MAXIMUM, SCATTER).replace("is_scheduled=true", "is_scheduled=true, num_partitions=8")
    return PreflightReport(compilable_devices["h100"], {"data": 8}, read(text))


def test_a_requirement_names_what_is_gathered_wide():
    report = report_of_hand_written()
    report.require(fp8_gathers=0.1)
    with pytest.raises(
        PreflightError,
        match=r"fp8_gathers=1.0 is required, but 0.1111.*\n  all-gather of bf16, 14.3 kB each time, 1 times",
    ):
        report.require(fp8_gathers=1.0)
    alone = PreflightReport(compilable_devices["h100"], {"data": 1}, report.step)
    with pytest.raises(ValueError, match="fp8_gathers=1.0 needs several devices"):
        alone.require(fp8_gathers=1.0)


def step(weights, x):
    """Two linear layers of FP8 products and their gradients, scales left out."""

    @jax.custom_vjp
    def product(x, w):
        return forward(x, w)[0]

    def forward(x, w):
        x8, w8 = x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn)
        return jnp.dot(x8, w8, preferred_element_type=jnp.bfloat16), (x8, w8)

    def backward(residuals, g):
        g8 = g.astype(jnp.float8_e5m2)
        dot = lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.bfloat16)
        return dot(g8, residuals[1].T), dot(residuals[0].T, g8)

    product.defvjp(forward, backward)

    def loss(weights):
        out = x
        for w in weights:
            out = product(out, w)
        return (out.astype(jnp.float32) ** 2).mean()

    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))


@pytest.mark.slow
@pytest.mark.skipif(compilable_devices["h100"].missing() is not None, reason="needs the package jax-cuda13-pjrt")
def test_what_eight_gpus_send_is_what_fsdp_has_to():
    """Two kernels of 512×512: gathered in E4M3, once or twice each; their gradients scattered in bfloat16."""
    arguments = (struct(512, 512), struct(512, 512)), struct(8192, 512)
    report = inspect_step(step, *arguments, device="h100", mesh={"data": 8}, shardings=(P("data"), P("data")))
    kernel = 512 * 512 * 7 // 8
    sent = lambda kind, dtype: sum(
        part.wire * collective.executions
        for collective in report.step.collectives
        for part in collective.parts
        if collective.kind == kind and part.dtype == dtype
    )
    # dgrad of the first layer is not needed.
    assert 2 * kernel <= sent("all-gather", "f8e4m3fn") <= 3 * kernel
    assert sent("reduce-scatter", "bf16") == 2 * 2 * kernel
    # Nothing else but the loss, if anything.
    assert sum(collective.wire * collective.executions for collective in report.step.collectives) < 8 * kernel
    report.require(fp8_gathers=1.0)
    gradients = [collective for collective in report.step.collectives if collective.reduces_gradients]
    assert sum(collective.wire for collective in gradients) == 2 * 2 * kernel
    assert {collective.devices for collective in report.step.collectives} == {8}
