"""Layers that read the same input keep their own products: XLA would merge small ones, and scale results later."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest
from compiled_models import abstract, on

import haliax_fp8 as fp8
from haliax_fp8.memory import share_input_scales


Layers, Member, Token, Embed, Out = hax.make_axes(layers=3, member=3, token=1024, embed=256, out=128)


class Block(eqx.Module):
    """Three layers that read the same, and one behind them."""

    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    out: hnn.Linear

    @staticmethod
    def init(out_first, *, key):
        keys = jax.random.split(key, 4)
        linear = lambda i, *axes: hnn.Linear.init(*axes, key=keys[i], use_bias=False, out_first=out_first)
        return Block(*(linear(i, Embed, Out) for i in range(3)), linear(3, Out, Embed))

    def __call__(self, x):
        return x + self.out(self.query(x) + self.key(x) * self.value(x))


def stack(kind):
    return lambda out_first: kind.init(Layers, Block)(out_first, key=jax.random.split(jax.random.key(0), Layers.size))


def ensemble(out_first):
    return hax.vmap(Block.init, Member)(out_first, key=jax.random.split(jax.random.key(0), Member.size))


def fold(model, x):
    return model.fold(x)


def of_members(model, x):
    return hax.vmap(lambda block: block(x), Member)(model)


def of_separate_inputs(model, x):
    return hax.vmap(lambda block, x: block(x), Member)(model, hax.broadcast_axis(x, Member))


# How a model is made, called, and changed before it is, and how many blocks run in a step.
CASES = {
    "unrolled": (stack(hnn.BlockSeq), fold, lambda model: model, Layers.size),
    "scan": (stack(hnn.Stacked), fold, lambda model: model, Layers.size),
    "unrolled, kernels quantized once": (stack(hnn.BlockSeq), fold, fp8.quantize_kernels, Layers.size),
    "scan, kernels quantized once": (stack(hnn.Stacked), fold, fp8.quantize_kernels, Layers.size),
    "ensemble": (ensemble, of_members, lambda model: model, 1),
    "ensemble with inputs of its own": (ensemble, of_separate_inputs, lambda model: model, 1),
}


@pytest.mark.parametrize("out_first", [True, False], ids=["out first", "in first"])
@pytest.mark.parametrize(("name", "device"), on(CASES, ["h100"]))
def test_products_stay_apart(name, device, out_first, compiled):
    make, call, change, blocks = CASES[name]
    model = abstract(lambda: share_input_scales(fp8.fp8_linear_layers(make(out_first))))
    x = eqx.filter_eval_shape(lambda: hax.zeros((Token, Embed), jnp.bfloat16))

    def loss(arguments):
        model, x = arguments
        return (call(change(model), x).astype(jnp.float32) ** 2).mean().scalar()

    _, report = compiled(lambda model, x: fp8.filter_grad(loss)((model, x)), model, x, device=device)
    report.require(fp8_flops=1.0)
    assert sum(product.executions for product in report.step.products) == blocks * 4 * 3
