"""A mixture-of-experts layer, compiled for a GPU that is not here; run as a program, it prints what it found as JSON.

JAX compiles Pallas kernels for one architecture in a process, the first that it meets.
"""

import json
import sys

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp

from haliax_fp8 import fp8_linear_layers
from haliax_fp8.preflight import inspect_step


SHAPES = {"8 experts": (8, 16384, 4096, 14336), "64 experts": (64, 16384, 2048, 1408)}


def step(layer, x, sizes, grad):
    """The output, and the gradients of weights and inputs."""

    def loss(args):
        layer, x = args
        out = layer(x, sizes).array
        return (out.astype(jnp.float32) * grad.astype(jnp.float32)).sum(), out

    (_, out), gradients = eqx.filter_value_and_grad(loss, has_aux=True)((layer, x))
    return out, gradients


def arguments(recipe, experts, rows, inputs, outputs, **options):
    Experts, Rows, In, Out = hax.make_axes(experts=experts, rows=rows, inputs=inputs, outputs=outputs)

    def init():
        layer = hnn.MoELinear.init(Experts, In, Out, key=jax.random.key(0), use_bias=False, **options)
        layer = fp8_linear_layers(jax.tree.map(lambda x: x.astype(jnp.bfloat16), layer), recipe=recipe)
        x, grad = hax.zeros((Rows, In), jnp.bfloat16), jnp.zeros((rows, outputs), jnp.bfloat16)
        return layer, x, hax.zeros(Experts, jnp.int32), grad

    return eqx.filter_eval_shape(init)


def figures(device, *shape, recipe="delayed", **options):
    report = inspect_step(step, *arguments(recipe, *shape, **options), device=device).step
    return {
        "products": sorted((product.name, product.implementation, product.out) for product in report.products),
        "fp8_share": report.fp8_share,
        "flops": report.flops,
        "useful_flops": report.useful_flops,
        "gigabytes": report.others.bytes / 1e9,
        "megabytes": report.memory.temporaries / 1e6,
    }


if __name__ == "__main__":
    device = sys.argv[1]
    by_case = {name: figures(device, *shape) for name, shape in SHAPES.items()}
    # With a scale for each row or block.
    for recipe in ["rowwise", *(["deepseek"] if device == "h100" else [])]:
        by_case[recipe] = figures(device, 3, 384, 128, 192, recipe=recipe, use_gmm=True)
    print(json.dumps(by_case))
