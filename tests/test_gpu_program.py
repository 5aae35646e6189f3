"""What an H100 would run, read from the compiled program."""

import re

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest
from gpu_target import compile_for_h100

import haliax_fp8 as fp8


pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the dependency group `preflight`")
pytestmark = pytest.mark.slow

WIDTH = 256


def products(text):
    """How many matrix products run in FP8 and how many do not, and the scopes of the former."""
    lines = [line for line in text.splitlines() if "__cublas$lt$matmul" in line or re.search(r"= \S+ dot\(", line)]
    fp8_lines = [line for line in lines if '"__cublas$lt$matmul$f8"' in line]
    scopes = sorted(re.search(r"/(fprop|dgrad|wgrad)/", line).group(1) for line in fp8_lines)
    return scopes, len(lines) - len(fp8_lines)


def gradient(loss):
    return fp8.filter_grad(loss)


def in_bfloat16(model):
    overwrites, rest = eqx.partition(model, lambda n: isinstance(n, fp8.OverwriteWithGradient), is_leaf=is_state)
    rest = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, rest)
    return eqx.combine(overwrites, rest, is_leaf=is_state)


def is_state(node):
    return isinstance(node, fp8.OverwriteWithGradient)


@pytest.mark.parametrize("nested", [False, True])
def test_under_vmap_each_gradient_is_one_fp8_product(nested):
    model = in_bfloat16(fp8.fp8_linear_layers(eqx.nn.Linear(WIDTH, 2 * WIDTH, key=jax.random.key(0))))
    x = jnp.ones((4, 64, WIDTH) if nested else (256, WIDTH), jnp.bfloat16)
    over = (lambda f: jax.vmap(jax.vmap(f))) if nested else jax.vmap
    loss = lambda args: (over(args[0])(args[1]).astype(jnp.float32) ** 2).mean()
    scopes, others = products(compile_for_h100(lambda m, x: gradient(loss)((m, x)), model, x))
    assert scopes == ["dgrad", "fprop", "wgrad"]
    assert others == 0


def test_a_scan_over_haliax_layers_runs_all_products_in_fp8():
    Block, embed = hax.Axis("block", 3), hax.Axis("embed", WIDTH)

    class Layer(eqx.Module):
        up: hnn.Linear
        down: hnn.Linear

        @staticmethod
        def init(*, key):
            up, down = jax.random.split(key)
            mlp = hax.Axis("mlp", 2 * WIDTH)
            return Layer(hnn.Linear.init(embed, mlp, key=up), hnn.Linear.init(mlp, embed, key=down))

        def __call__(self, x):
            return x + self.down(hnn.relu(self.up(x)))

    stack = hnn.Stacked.init(Block, Layer)(key=jax.random.split(jax.random.key(0), Block.size))
    model = in_bfloat16(fp8.fp8_linear_layers(stack))
    x = hax.ones((hax.Axis("batch", 256), embed), jnp.bfloat16)
    loss = lambda args: (args[0].fold(args[1]).astype(jnp.float32) ** 2).mean().scalar()
    scopes, others = products(compile_for_h100(lambda m, x: gradient(loss)((m, x)), model, x))
    assert scopes == ["dgrad", "dgrad", "fprop", "fprop", "wgrad", "wgrad"]
    assert others == 0


def test_on_the_cpu_too_each_gradient_is_one_product():
    model = fp8.fp8_linear_layers(eqx.nn.Linear(WIDTH, 2 * WIDTH, key=jax.random.key(0)))
    loss = lambda args: (jax.vmap(args[0])(args[1]) ** 2).mean()
    arrays, static = eqx.partition((model, jnp.ones((32, WIDTH))), eqx.is_array)
    text = jax.jit(lambda a: eqx.filter(gradient(loss)(eqx.combine(a, static)), eqx.is_array)).lower(arrays).as_text()
    assert text.count("stablehlo.dot_general") == 3
