"""Products with a scale for each block on several GPUs that are not here: what runs, and what is sent."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import haliax_fp8 as fp8
from haliax_fp8._product import blocks
from haliax_fp8.devices.catalog import peaks
from haliax_fp8.devices.roofline import LIKELY
from haliax_fp8.memory import KernelResidual
from haliax_fp8.preflight import compilable_devices, inspect_step
from haliax_fp8.preflight.devices import CUDNN
from haliax_fp8.preflight.hlo import parse_hlo
from haliax_fp8.preflight.program import entry_sites, launches, opened
from haliax_fp8.preflight.traffic import is_launch, touched


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compilable_devices["b200"].missing() is not None, reason="needs the package jax-cuda13-pjrt"),
]

WIDTH, HIDDEN, TOKENS, DEVICES = 256, 1024, 8192, 8


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self):
        linear = functools.partial(eqx.nn.Linear, use_bias=False, key=jax.random.key(0))
        self.up, self.down = linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)

    def __call__(self, x):
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))


DEFAULT = KernelResidual.REQUANTIZE_WHERE_CHEAP


def converted(recipe, kernel_residual=DEFAULT):
    config = fp8.Fp8Config(recipe=recipe, kernel_residual=kernel_residual, emulate=True)  # This machine is a CPU.
    return eqx.filter_eval_shape(lambda: fp8.fp8_linear_layers([Block(), Block()], config))


def loss(blocks, x):
    for block in fp8.cast_params(blocks, jnp.bfloat16):
        x = block(x)
    return (x.astype(jnp.float32) ** 2).mean()


def step(blocks, x):
    gradients = fp8.filter_grad(loss)(blocks, x)
    overwrites, gradients = fp8.partition_for_grad_overwrite(gradients)
    return fp8.apply_updates(blocks, jax.tree.map(jnp.negative, gradients), overwrites)


# Of a B200: 148 cores, each of which takes 64 integer operations in a cycle (CUDA's programming guide, 10.0).
PEAKS, B200_INTEGERS = peaks["b200"], 148 * 64 * 1.965e9
HASH = ("xor", "multiply", "add", "and", "shift-right-logical")

X = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)


@functools.cache
def divided(recipe, kernel_residual=DEFAULT):
    """Weights and tokens over eight B200s (FSDP)."""
    model = converted(recipe, kernel_residual)
    weights = jax.tree.map(lambda leaf: P("data") if leaf.shape in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)) else P(), model)
    mesh = {"data": DEVICES}
    return inspect_step(step, model, X, device="b200", mesh=mesh, shardings=(weights, P("data")))


def sent(report):
    return sum(collective.wire * collective.executions for collective in report.step.collectives)


@pytest.mark.parametrize("recipe", ["mxfp8", "deepseek"])
def test_blocks_send_little_more_than_delayed_scaling(recipe):
    """One byte in 32 is a scale; and the products are in FP8, in a library's call."""
    report = divided(recipe)
    assert report.fp8_share == 1.0 and {p.implementation for p in report.products} == {"cuDNN block scaled"}
    # Three products of each layer, but for dgrad of the first.
    assert report.step.flops == 2 * (3 * 4 - 1) * TOKENS // DEVICES * WIDTH * HIDDEN
    # By default, delayed scaling keeps a kernel as it was gathered. Where kernels have other blocks for dgrad, they
    # are gathered for it too.
    residual = DEFAULT if recipe == "deepseek" else KernelResidual.REQUANTIZE
    assert sent(report) <= 1.1 * sent(divided("delayed", residual))
    report.require(fp8_gathers=1.0)


WHOLE, TOKENS_DIVIDED, WEIGHTS_DIVIDED, SUM_DIVIDED = (
    None,
    (P(), P("data")),
    (P("data"), P("data")),
    (P(None, "data"), P()),
)


@pytest.mark.parametrize(
    ("sharding", "sides"),
    [
        # The second fill neither a block nor what cuDNN aligns to.
        (WHOLE, (1024, 256, 512)),
        (WHOLE, (33, 50, 70)),
        (TOKENS_DIVIDED, (1024, 256, 512)),
        (WEIGHTS_DIVIDED, (1024, 256, 512)),
        # Each device sums over three blocks, which cuDNN's alignment makes four.
        (SUM_DIVIDED, (1024, 192, 512)),
    ],
)
def test_nvfp4_multiplies_in_fp4_on_one_device_and_on_several(sharding, sides):
    """All three products."""
    rows, inputs, outputs = sides
    config = fp8.Fp8Config(recipe="nvfp4", emulate=True)
    make = lambda: fp8.fp8_linear_layers(eqx.nn.Linear(inputs, outputs, use_bias=False, key=jax.random.key(0)), config)

    def gradients(model, x, key):
        def loss(model, x):
            model = fp8.with_rounding_keys(fp8.cast_params(model, jnp.bfloat16), key)
            return (jax.vmap(model)(x).astype(jnp.float32) ** 2).mean()

        return jax.grad(loss, (0, 1), allow_int=True)(model, x)

    model = eqx.filter_eval_shape(make)
    x, key = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16), jax.eval_shape(lambda: jax.random.key(0))
    options = {}
    if sharding is not None:
        weights = jax.tree.map(lambda leaf: sharding[0] if leaf.ndim == 2 else P(), model)
        options = {"mesh": {"data": 4}, "shardings": (weights, sharding[1], P())}
    report = inspect_step(gradients, model, x, key, device="b200", other_setting=False, **options)
    products = [p for p in report.products if p.reason != "rotates an operand"]
    assert {(p.name, p.lhs, p.rhs, p.implementation) for p in products} == {
        (name, "f4e2m1fn", "f4e2m1fn", "cuDNN block scaled") for name in ("fprop", "dgrad", "wgrad")
    }


def test_what_random_rounding_costs():
    """No bytes; and arithmetic that takes about as long as the bytes of its launch, with which it overlaps."""
    nvfp4 = fp8.recipes.named["nvfp4"]
    nearest = dataclasses.replace(nvfp4, output_grad=nvfp4.input, output_grad_for_wgrad=nvfp4.input_for_wgrad)
    of_input = dataclasses.replace(nvfp4.input_for_wgrad, rounding=fp8.recipes.Rounding.STOCHASTIC)
    moved, slowest = [], []

    def gradients(model, x, key):
        def loss(model, x):
            model = fp8.with_rounding_keys(fp8.cast_params(model, jnp.bfloat16), key)
            return (jax.vmap(model)(x).astype(jnp.float32) ** 2).mean()

        return jax.grad(loss, (0, 1), allow_int=True)(model, x)

    for recipe in (nearest, nvfp4, dataclasses.replace(nvfp4, input_for_wgrad=of_input)):
        config = fp8.Fp8Config(recipe=recipe, emulate=True)
        layer = lambda config=config: fp8.fp8_linear_layers(eqx.nn.Linear(512, 1024, key=jax.random.key(0)), config)
        x, key = jax.ShapeDtypeStruct((2048, 512), jnp.bfloat16), jax.eval_shape(lambda: jax.random.key(0))
        report = inspect_step(gradients, eqx.filter_eval_shape(layer), x, key, device="b200", other_setting=False)
        moved.append(report.step.others.bytes)
        ratios = [0.0]
        for launch in filter(is_launch, launches(entry_sites(parse_hlo(report.step.text)))):
            inside = [site.instruction for site in opened(launch) if site.instruction.shape.dtype == "u32"]
            integers = sum(x.shape.bytes // 4 for x in inside if x.opcode in HASH)
            if integers > 8 * 512 * 1024:  # more than casts need
                seconds = touched(launch) / (PEAKS.bandwidth * LIKELY.cast_bandwidth)
                ratios.append(integers / B200_INTEGERS / seconds)
        slowest.append(max(ratios))
    assert max(moved) < 1.001 * min(moved)
    assert slowest[0] == 0.0 and 0.7 < min(slowest[1:]) and max(slowest[1:]) < 1.2


def test_from_which_cudnn_on_its_products_take_the_scale_of_a_tensor():
    """XLA's two launches behind each product go, as the warning of older ones says; nothing else changes since."""
    config = fp8.Fp8Config(recipe="nvfp4", emulate=True)
    make = lambda: fp8.fp8_linear_layers(eqx.nn.Linear(256, 512, use_bias=False, key=jax.random.key(0)), config)
    model, x = eqx.filter_eval_shape(make), jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16)
    forward = lambda model, x: jax.vmap(fp8.cast_params(model, jnp.bfloat16))(x)
    on = lambda version: dataclasses.replace(compilable_devices["b200"], cudnn=version)
    reports = {version: inspect_step(forward, model, x, device=on(version)) for version in ("9.12.9", "9.13.0", CUDNN)}
    old, first, today = (report.step.others.count for report in reports.values())
    assert old == first + 2 and first == today
    assert [any("leaves the scales" in text for text in r.findings) for r in reports.values()] == [True, False, False]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_operands_of_wgrad_are_transposed_in_bytes(recipe, monkeypatch):
    """Otherwise XLA computes them in the layout that the call reads, and transposes bfloat16."""

    def gradients(model, x, key):
        def loss(model):
            model = fp8.with_rounding_keys(fp8.cast_params(model, jnp.bfloat16), key)
            return (model[0](x).astype(jnp.float32) ** 2).mean()

        return fp8.filter_grad(loss)(model)

    key = jax.eval_shape(lambda: jax.random.key(0))
    moved = []
    for function in (blocks.transposed_in_bytes, lambda data: data):
        monkeypatch.setattr(blocks, "transposed_in_bytes", function)
        jax.clear_caches()
        report = inspect_step(gradients, converted(recipe)[:1], X, key, device="b200", other_setting=False)
        moved.append(report.step.others.bytes)
    jax.clear_caches()
    assert moved[0] < 0.95 * moved[1]


def test_devices_multiply_blocks_inside_shard_map():
    mean = lambda gradients: jax.tree.map(lambda g: jax.lax.pmean(g, "data"), gradients)
    parts = jax.shard_map(
        lambda model, x: mean(fp8.filter_grad(loss)(model, x)), in_specs=(P(), P("data")), out_specs=P()
    )
    report = inspect_step(parts, converted("mxfp8"), X, device="b200", mesh={"data": 2}, shardings=(P(), P("data")))
    assert report.fp8_share == 1.0 and {p.implementation for p in report.products} == {"cuDNN block scaled"}
    assert {collective.kind for collective in report.step.collectives} == {"all-reduce"}


def test_hopper_says_that_it_emulates_blocks():
    report = inspect_step(
        step,
        converted("mxfp8"),
        X,
        device="h100",
        mesh={"data": 2},
        shardings=(P(), P("data")),
    )
    assert report.fp8_share == 0.0
    assert all("block scaling is emulated" in product.reason for product in report.products)
