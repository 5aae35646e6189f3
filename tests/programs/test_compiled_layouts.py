"""On a Hopper GPU no launch writes FP8 in two layouts, which is slow, also where layers share their inputs' scales."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest
from compiled_models import abstract, on

import haliax_fp8 as fp8
from haliax_fp8 import models
from haliax_fp8.memory import share_input_scales


# A block of Llama-8B's sizes: in a smaller one, XLA merges other launches.
CONFIG = models.TransformerConfig(
    layers=2, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, attention=lambda q, k, v: q + k * v
)
TOKENS = hax.Axis("token", 8192)
STACKS = {"unrolled": hnn.BlockSeq, "scan": hnn.Stacked}


def converted(stack, recipe, share):
    blocks = stack.init(CONFIG.Layers, models.Block)(CONFIG, key=jax.random.split(jax.random.key(0), CONFIG.layers))
    model = fp8.fp8_linear_layers(blocks, fp8.Fp8Config(recipe=recipe, emulate=True))
    return share_input_scales(model) if share else model


def loss(model, x):
    return (model.fold(x) ** 2).mean().scalar().astype(jnp.float32)


@pytest.mark.parametrize(
    ("recipe", "share"),
    [("delayed", False), ("delayed", True), ("current", False)],
    ids=["delayed", "shared", "current"],
)
@pytest.mark.parametrize(("name", "device"), on(STACKS, ["h100"]))
def test_no_launch_writes_two_layouts(name, device, recipe, share, compiled):
    model = abstract(lambda: converted(STACKS[name], recipe, share))
    x = eqx.filter_eval_shape(lambda: hax.zeros((TOKENS, CONFIG.Hidden), dtype=jnp.bfloat16))
    _, report = compiled(fp8.filter_grad(loss), model, x, device=device)
    traffic = report.step.others.traffic
    assert traffic.casts > 0 and traffic.two_layouts == 0
