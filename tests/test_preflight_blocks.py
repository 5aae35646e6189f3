"""Blocks of models, compiled for devices that are not here: every product of every layer runs in FP8, under each name.

What the project claims of itself; `test_preflight_products.py` holds that the reader of programs counts right.
"""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest

import haliax_fp8 as fp8
from haliax_fp8.preflight import PreflightReport, Verdict, preflight, targets


pytestmark = pytest.mark.slow
needs_gpu_compiler = pytest.mark.skipif(
    targets["h100"].missing() is not None, reason="needs the package jax-cuda13-pjrt: dependency group `preflight`"
)

LAYERS, TOKENS, EMBED, HIDDEN, EXPERTS = 3, 256, 256, 512, 4


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def abstract(make):
    """A model without its arrays, in bfloat16 but for the state of FP8 products."""
    is_state = lambda node: isinstance(node, fp8.OverwriteWithGradient)
    cast = lambda x: struct(*x.shape) if isinstance(x, jax.ShapeDtypeStruct) else x
    return jax.tree.map(lambda x: x if is_state(x) else cast(x), eqx.filter_eval_shape(make), is_leaf=is_state)


Embed, Hidden, Token = hax.make_axes(embed=EMBED, hidden=HIDDEN, token=TOKENS)


class FeedForward(eqx.Module):
    """RMSNorm and SwiGLU, as in Llama."""

    norm: hnn.RmsNorm
    gate: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 3)
        linear = lambda i, In, Out: hnn.Linear.init(In, Out, key=keys[i], use_bias=False)
        return FeedForward(
            hnn.RmsNorm.init(Embed), linear(0, Embed, Hidden), linear(1, Embed, Hidden), linear(2, Hidden, Embed)
        )

    def __call__(self, x):
        h = self.norm(x)
        return x + self.down(hnn.silu(self.gate(h)) * self.up(h))


def stacked(stack, config=None, checkpointing=False):
    def make():
        init = stack.init(hax.Axis("layers", LAYERS), FeedForward, gradient_checkpointing=checkpointing)
        return fp8.fp8_linear_layers(init(key=jax.random.split(jax.random.key(0), LAYERS)), config)

    return abstract(make), hax.NamedArray(struct(TOKENS, EMBED), (Token, Embed))


def gradients(model, x):
    """Of the model and of x, so that all layers have all three products."""
    return fp8.filter_grad(lambda args: hax.mean(hax.square(args[0].fold(args[1]).astype(jnp.float32))).scalar())(
        (model, x)
    )


FLOPS = 2 * TOKENS * EMBED * HIDDEN
"""Of one product: all layers here are as large."""


def assert_all_fp8(report: PreflightReport, products: dict[str, int], layers: set[str]) -> None:
    """All in FP8: so many products of each role, by their FLOPs, as XLA may merge those with an operand in common."""
    report.require(fp8_flops=1.0)
    flops = dict.fromkeys(products, 0)
    for product in report.products:
        assert product.lhs.startswith("f8") and product.rhs.startswith("f8")
        flops[product.role] += product.flops
    assert flops == {role: count * FLOPS for role, count in products.items()}
    names = {layer.rsplit(".", 1)[-1] for product in report.products for layer in product.layer.split(" + ")}
    assert names == layers


@needs_gpu_compiler
@pytest.mark.parametrize(
    "stack, checkpointing, target",
    [
        (hnn.BlockSeq, False, "h100"),
        (hnn.Stacked, False, "h100"),
        (hnn.Stacked, True, "h100"),
        (hnn.Stacked, True, "b200"),
    ],
    ids=["unrolled", "scan", "scan with checkpointing", "scan with checkpointing, B200"],
)
def test_stacks(target, stack, checkpointing):
    report = preflight(gradients, *stacked(stack, checkpointing=checkpointing), target=target)
    each = 3 * LAYERS
    # A checkpoint recomputes what gradients read: not the output of `down`.
    forward = each + 2 * LAYERS if checkpointing else each
    assert_all_fp8(report, {"fprop": forward, "dgrad": each, "wgrad": each}, {"gate", "up", "down"})
    assert report.step.unknown_loops == 0


@needs_gpu_compiler
@pytest.mark.parametrize("recipe", ["current", "rowwise", "static"])
def test_recipes(recipe):
    report = preflight(gradients, *stacked(hnn.Stacked, fp8.Fp8Config(recipe=recipe)), target="h100")
    each = 3 * LAYERS
    assert_all_fp8(report, dict.fromkeys(("fprop", "dgrad", "wgrad"), each), {"gate", "up", "down"})


@needs_gpu_compiler
def test_block_scaled_recipe_in_a_scan_on_blackwell():
    report = preflight(gradients, *stacked(hnn.Stacked, fp8.Fp8Config(recipe="mxfp8")), target="b200")
    assert report.fp8_share == 1.0 and report.step.flops == 3 * 3 * LAYERS * FLOPS
    assert {product.kernel for product in report.products} == {"Triton scaled-dot"}


@needs_gpu_compiler
def test_vmapped_equinox():
    layer = lambda: fp8.fp8_linear_layers(eqx.nn.Linear(EMBED, HIDDEN, key=jax.random.key(0)))

    def step(model, x):
        return fp8.filter_grad(lambda args: (jax.vmap(jax.vmap(args[0]))(args[1]).astype(jnp.float32) ** 2).mean())(
            (model, x)
        )

    report = preflight(step, abstract(layer), struct(4, TOKENS // 4, EMBED), target="h100")
    assert_all_fp8(report, {"fprop": 1, "dgrad": 1, "wgrad": 1}, {"model"})


@needs_gpu_compiler
def test_experts():
    """XLA has no grouped FP8 kernel for a GPU: what it makes of a grouped product is said, and no product is lost."""
    Experts = hax.Axis("experts", EXPERTS)
    make = lambda: fp8.fp8_linear_layers(
        hnn.MoELinear.init(Experts, Embed, Hidden, key=jax.random.key(0), use_bias=False)
    )
    x = hax.NamedArray(struct(TOKENS, EMBED), (Token, Embed))
    sizes = hax.NamedArray(struct(EXPERTS, dtype=jnp.int32), (Experts,))

    def step(layer, x, sizes):
        loss = lambda args: hax.mean(hax.square(args[0](args[1], sizes).astype(jnp.float32))).scalar()
        return fp8.filter_grad(loss)((layer, x))

    report = preflight(step, abstract(make), x, sizes, target="h100")
    assert sorted(product.role for product in report.products) == ["dgrad", "fprop", "wgrad"]
    # Each row by the kernel of its group; or all rows by all kernels, and the rest masked.
    assert {product.flops for product in report.products} <= {FLOPS, EXPERTS * FLOPS}
    assert {product.verdict for product in report.products} <= {Verdict.FP8, Verdict.EMULATED}


@pytest.mark.skipif(targets["tpu7x"].missing() is not None, reason="needs the package libtpu: extra `preflight-tpu`")
def test_tpus():
    """A TPU writes products as convolutions, fused with what is around them."""
    report = preflight(gradients, *stacked(hnn.Stacked), target="tpu7x")
    assert_all_fp8(report, dict.fromkeys(("fprop", "dgrad", "wgrad"), 3 * LAYERS), {"gate", "up", "down"})
    before = preflight(gradients, *stacked(hnn.Stacked), target="tpu6e")
    assert before.step.flops == report.step.flops
    assert {(product.verdict, "TPU7x" in product.reason) for product in before.products} == {(Verdict.EMULATED, True)}
