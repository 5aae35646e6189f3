"""The project's own preflight: what converted models run on an H100 and a B200, read from the compiled programs."""

import re

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest
from gpu_target import compile_for_h100
from jax.sharding import PartitionSpec

import haliax_fp8 as fp8
from haliax_fp8.preflight import Verdict, preflight, targets


pytestmark = pytest.mark.slow

LAYERS, WIDTH, ROWS = 3, 256, 384
Embed, Inner, Batch = hax.Axis("embed", WIDTH), hax.Axis("inner", 2 * WIDTH), hax.Axis("batch", ROWS)
Block = hax.Axis("block", LAYERS)
XLA_NAMES = {"E4M3": "f8e4m3fn", "E5M2": "f8e5m2"}


def on(target, *cases):
    """Cases for a target, skipped where its compiler is not installed."""
    missing = targets[target].missing()
    skip = pytest.mark.skipif(missing is not None, reason=missing or "")
    return [pytest.param(case, target, marks=skip, id=f"{case}-{target}") for case in cases]


needs_h100 = pytest.mark.skipif(targets["h100"].missing() is not None, reason=targets["h100"].missing() or "")


class Layer(eqx.Module):
    """Two linear layers and nothing between: what is kept for the backward pass is kept for their products."""

    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        up, down = jax.random.split(key)
        return Layer(hnn.Linear.init(Embed, Inner, key=up), hnn.Linear.init(Inner, Embed, key=down))

    def __call__(self, x):
        return self.down(self.up(x))


class Experts(eqx.Module):
    """Grouped products, the groups of equal size."""

    up: hnn.MoELinear
    down: hnn.MoELinear

    @staticmethod
    def init(*, key):
        up, down = jax.random.split(key)
        axis = hax.Axis("experts", 4)
        return Experts(
            hnn.MoELinear.init(axis, Embed, Inner, key=up, use_bias=False),
            hnn.MoELinear.init(axis, Inner, Embed, key=down, use_bias=False),
        )

    def __call__(self, x):
        sizes = hax.full(self.up.Experts, ROWS // 4, jnp.int32)
        return self.down(self.up(x, sizes), sizes)


def stacked(**options):
    def make():
        return hnn.Stacked.init(Block, Layer, **options)(key=jax.random.split(jax.random.key(0), LAYERS))

    return make


def unrolled():
    return hnn.BlockSeq.init(Block, Layer)(key=jax.random.split(jax.random.key(0), LAYERS))


def fold(model, x):
    return model.fold(hax.named(x, (Batch, Embed))).array


def call(model, x):
    return model(hax.named(x, (Batch, Embed))).array


def mlp():
    return eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, activation=lambda x: x, key=jax.random.key(0))


def nested_vmap(model, x):
    return jax.vmap(jax.vmap(model))(x.reshape(4, ROWS // 4, WIDTH))


# Name: the model, how it is called, and how often each of its two layers runs forward, and backward, in a step.
# Checkpointing runs a block's forward pass twice, but for its last product, which no gradient asks for again.
# XLA computes a grouped product for all four groups and lets the right one through.
MODELS = {
    "unrolled": (unrolled, fold, LAYERS, 2 * LAYERS),
    "scan": (stacked(), fold, LAYERS, 2 * LAYERS),
    "scan with checkpointing": (stacked(gradient_checkpointing=True), fold, 1.5 * LAYERS, 2 * LAYERS),
    "vmapped Equinox": (mlp, lambda model, x: jax.vmap(model)(x), 1, 2),
    "twice vmapped Equinox": (mlp, nested_vmap, 1, 2),
    "experts": (lambda: Experts.init(key=jax.random.key(0)), call, 4, 8),
}


def in_bfloat16(model):
    is_state = lambda node: isinstance(node, fp8.OverwriteWithGradient)
    cast = lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x
    return jax.tree.map(cast, model, is_leaf=is_state)


def gradient_of(forward):
    """Gradients of the model and of its input; random rounding gets a key."""

    def gradient(model, x):
        def loss(model_and_x):
            model, x = model_and_x
            model = fp8.with_rounding_keys(model, jax.random.key(0))
            return (forward(model, x).astype(jnp.float32) ** 2).mean()

        return fp8.filter_grad(loss)((model, x))

    return gradient


def inputs():
    return jnp.ones((ROWS, WIDTH), jnp.bfloat16)


def converted(make, recipe="delayed"):
    return in_bfloat16(fp8.fp8_linear_layers(make(), fp8.Fp8Config(recipe=recipe)))


# --- Every kind of model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "target"), [*on("h100", *MODELS), *on("b200", "scan", "vmapped Equinox"), *on("tpu7x", "unrolled")]
)
def test_every_product_of_a_model_runs_in_fp8(name, target):
    make, forward, fprops, gradients = MODELS[name]
    report = preflight(gradient_of(forward), converted(make), inputs(), target=target)
    report.require(fp8_flops=1.0)
    formats = {p.role: set() for p in report.products}
    for product in report.products:
        formats[product.role].add(frozenset((product.lhs, product.rhs)))
    backward = {frozenset(("f8e4m3fn", "f8e5m2"))}
    assert formats == {"fprop": {frozenset(("f8e4m3fn",))}, "dgrad": backward, "wgrad": backward}
    # Two layers, each a product of ROWS by WIDTH by 2 WIDTH.
    product = 2 * ROWS * WIDTH * 2 * WIDTH
    flops = {role: sum(p.flops for p in report.products if p.role == role) for role in formats}
    assert flops["fprop"] == 2 * fprops * product
    assert flops["dgrad"] + flops["wgrad"] == 2 * gradients * product


@needs_h100
def test_a_plain_model_runs_none():
    """The same reading, on what it must not find."""
    report = preflight(gradient_of(fold), in_bfloat16(stacked()()), inputs(), target="h100")
    assert report.fp8_share == 0.0
    assert {p.lhs for p in report.products} == {"bf16"}


# --- Every recipe -----------------------------------------------------------------------------------------------------


def linear():
    return hnn.Linear.init(Embed, Inner, key=jax.random.key(0))


@pytest.mark.parametrize(("recipe", "target"), [*on("h100", *fp8.recipes), *on("b200", "rowwise", "mxfp8", "deepseek")])
def test_what_supported_says_is_what_is_compiled(recipe, target):
    """Where a recipe is called native, each product is in the formats of the recipe; where not, none is."""
    native = fp8.supported(recipe, target).is_native
    report = preflight(gradient_of(call), converted(linear, recipe), inputs(), target=target)
    found = sorted((tuple(sorted((p.lhs, p.rhs))), p.verdict is Verdict.FP8) for p in report.products)
    expected = []
    for first, second in fp8.recipes[recipe].products.values():
        if not first.scaling.quantizes:
            expected.append((("bf16", "bf16"), False))
        elif native:
            names = sorted(XLA_NAMES[operand.format.name] for operand in (first, second))
            expected.append((tuple(names), True))
    if native:
        assert found == sorted(expected)
    else:
        assert not any(is_fp8 for _, is_fp8 in found)
        assert len(found) >= 3  # More where operands are rotated: that is a product too.


# --- Memory and communication -----------------------------------------------------------------------------------------


@needs_h100
def test_what_a_scan_keeps_is_in_fp8():
    """Of each operand its FP8 copy, and no other: nothing but the products of this model asks for its activations."""

    def kept(model):
        text = compile_for_h100(gradient_of(fold), model, inputs())
        shapes = re.findall(rf"\b(\w+)\[{LAYERS},{ROWS},(?:{WIDTH}|{2 * WIDTH})\]", text)
        return set(shapes)

    assert kept(in_bfloat16(stacked()())) == {"bf16"}
    assert kept(converted(stacked())) == {"f8e4m3fn"}


@needs_h100
def test_weights_are_gathered_in_one_byte_each():
    """Kernels divided over eight devices (FSDP), rows too: each layer's kernel is gathered in FP8, at most twice."""

    def forward(model, x):
        divided = lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec("data", None))
        x = hax.named(divided(x), (Batch, Embed))
        for block in model.blocks:
            for layer in (block.up, block.down):
                x = layer(x)
                x = hax.named(divided(x.array), x.axes)
        return x.array

    model = converted(unrolled)
    shardings = jax.tree.map(
        lambda x: PartitionSpec("data", None) if eqx.is_array(x) and x.ndim == 2 and min(x.shape) >= WIDTH else None,
        model,
    )
    report = preflight(
        gradient_of(forward),
        model,
        inputs(),
        target="h100",
        mesh={"data": 8},
        shardings=(shardings, PartitionSpec("data", None)),
    )
    report.require(fp8_flops=1.0)
    gathers = [c for c in report.step.collectives if c.kind == "all-gather"]
    assert {c.dtype for c in gathers} == {"f8e4m3fn"}
    weights = LAYERS * 2 * WIDTH * 2 * WIDTH
    assert weights <= sum(c.bytes * c.executions for c in gathers) <= 2 * weights


# --- On the CPU -------------------------------------------------------------------------------------------------------


def test_on_the_cpu_too_each_gradient_is_one_product():
    report = preflight(gradient_of(lambda model, x: jax.vmap(model)(x)), converted(mlp), inputs(), target="local")
    assert sorted(p.role for p in report.products) == sorted(2 * ["fprop", "dgrad", "wgrad"])
    report.require(asked_flops=1.0)
