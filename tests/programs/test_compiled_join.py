"""Joined layers as a GPU that is not here would multiply them: once, in FP8."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest

import haliax_fp8 as fp8
from haliax_fp8 import Fp8Config, fp8_linear_layers
from haliax_fp8.memory import JoinedLinear, join_linear
from haliax_fp8.preflight import compilable_devices


Wide, Out, Tokens = hax.make_axes(embed=512, mlp=1024, token=512)


class Gated(eqx.Module):
    gate_up: JoinedLinear

    def __call__(self, x):
        gate, up = self.gate_up(x)
        return hnn.silu(gate) * up

    @staticmethod
    def init(config):
        keys = jax.random.split(jax.random.key(0))
        layers = [hnn.Linear.init(Wide, Out, key=key, use_bias=False) for key in keys]
        bf16 = jax.tree.map(lambda x: x.astype(jnp.bfloat16), Gated(join_linear(layers)))
        return fp8_linear_layers(bf16, config)


def step(model, x):
    """The gradients of the weights and of the input."""
    loss = lambda both: (both[0](hax.named(both[1], (Tokens, Wide))).array.astype(jnp.float32) ** 2).mean()
    return fp8.filter_grad(loss)((model, x))


@pytest.mark.slow
@pytest.mark.skipif(compilable_devices["h100"].missing() is not None, reason="needs the package jax-cuda13-pjrt")
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_a_gpu_multiplies_once(recipe, compiled):
    """One fprop, one dgrad, one wgrad."""
    model = eqx.filter_eval_shape(lambda: Gated.init(Fp8Config(recipe=recipe)))
    x = jax.ShapeDtypeStruct((Tokens.size, Wide.size), jnp.bfloat16)
    _, report = compiled(step, model, x, device="h100")
    runs = [(product.layer, product.executions) for product in report.step.products]
    assert runs == [("model.gate_up.linear", 1)] * 3
    assert all(product.is_fp8 for product in report.step.products)
