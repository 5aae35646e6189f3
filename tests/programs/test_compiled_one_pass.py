"""Operands in blocks that kernels read once, in programs for a B200 that is not here: launches, bytes, what is sent."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import haliax_fp8 as fp8
from haliax_fp8.preflight import compilable_devices, inspect_step


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compilable_devices["b200"].missing() is not None, reason="needs the package jax-cuda13-pjrt"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

ROWS, WIDTH, HIDDEN = 512, 256, 384


class Mlp(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self):
        linear = functools.partial(eqx.nn.Linear, key=jax.random.key(0))
        self.up, self.down = linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)

    def __call__(self, x):
        return jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))


def once(mlp, x):
    return mlp(x)


def in_scan(mlp, x):
    parts = x.reshape(2, -1, WIDTH)
    return jax.lax.scan(lambda _, part: (None, mlp(part)), None, parts)[1]


def in_checkpoint(mlp, x):
    return jax.checkpoint(lambda mlp, x: mlp(x))(mlp, x)


def gradients(way, mlp, x, key):
    def loss(mlp, x):
        mlp = fp8.with_rounding_keys(fp8.cast_params(mlp, jnp.bfloat16), key)
        return (way(mlp, x).astype(jnp.float32) ** 2).mean()

    return jax.grad(loss, (0, 1), allow_int=True)(mlp, x)


def report(recipe, way=once, one_pass=True, rows=ROWS, **options):
    config = fp8.Fp8Config(recipe=recipe, one_pass=one_pass, emulate=True)
    mlp = eqx.filter_eval_shape(lambda: fp8.fp8_linear_layers(Mlp(), config))
    x, key = jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16), jax.eval_shape(lambda: jax.random.key(0))
    step = functools.partial(gradients, way)
    return inspect_step(step, mlp, x, key, device="b200", other_setting=False, **options)


def kernels(compiled):
    return sum("custom-call(" in line and "fp8_quantizing_" in line for line in compiled.step.text.splitlines())


def are_in_blocks(compiled):
    products = [p for p in compiled.products if p.reason != "rotates an operand"]
    return {p.implementation for p in products} == {"cuDNN block scaled"} and compiled.step.opaque == ()


@pytest.mark.parametrize(("recipe", "passes"), [("mxfp8", 1), ("nvfp4", 2), ("nvfp4_delayed", 1)])
def test_each_operand_is_read_once(recipe, passes):
    """Both inputs and both gradients for two products, in one launch; kernels again in the backward pass, or once."""
    one_pass, without = report(recipe), report(recipe, one_pass=False)
    # MXFP8 quantizes each kernel again for dgrad; NVFP4, with squares, keeps both copies.
    assert kernels(one_pass) == passes * (2 + 2 + (4 if recipe == "mxfp8" else 2))
    assert are_in_blocks(one_pass) and kernels(without) == 0
    # XLA's own order of scales for cuDNN is an array with this ending.
    assert ",32,4,4]" not in one_pass.step.text and ",32,4,4]" in without.step.text
    assert one_pass.step.others.count < without.step.others.count / 2
    # Rotations are inside of the kernels.
    of_layers = lambda report: sum(p.flops for p in report.products if p.reason != "rotates an operand")
    assert of_layers(one_pass) == of_layers(without)


def test_bytes_of_a_kernel():
    """The preflight counts 2 bytes read, and twice 1 + 1/32 written, of each element that both products take."""

    def quantized(layer, x):
        layer = fp8.cast_params(layer, jnp.bfloat16)
        out, pullback = jax.vjp(lambda layer, x: jax.vmap(layer)(x), layer, x)
        return out, pullback(out)

    config = fp8.Fp8Config(recipe="mxfp8", one_pass=True, emulate=True)
    layer = lambda: fp8.fp8_linear_layers(eqx.nn.Linear(WIDTH, HIDDEN, use_bias=False, key=jax.random.key(0)), config)
    abstract = eqx.filter_eval_shape(layer)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    abstract = eqx.tree_at(lambda layer: layer.weight, abstract, jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.bfloat16))
    compiled = inspect_step(quantized, abstract, x, device="b200", other_setting=False)
    both, weight = ROWS * (WIDTH + HIDDEN), WIDTH * HIDDEN
    expected = both * (2 + 2 * (1 + 1 / 32)) + 2 * weight * (2 + 1 + 1 / 32)
    assert compiled.step.others.bytes == expected and compiled.step.others.count == 4


@pytest.mark.parametrize(("way", "recipe"), [(in_scan, "mxfp8"), (in_checkpoint, "mxfp8"), (in_scan, "nvfp4")])
def test_kernels_in_scans_and_checkpoints(way, recipe):
    compiled = report(recipe, way)
    assert kernels(compiled) >= 8 and are_in_blocks(compiled)


def test_rows_that_fill_no_tile_are_left_to_xla():
    """Kernels of weights alone, and products as XLA multiplies them."""
    compiled = report("mxfp8", rows=200)
    assert kernels(compiled) == 4 and are_in_blocks(compiled)


def test_each_device_reads_its_share():
    """Inside `shard_map` kernels run on each device; a program that XLA divides is as without them."""

    def by_each(mlp, x):
        return jax.shard_map(once, in_specs=(P(), P("data")), out_specs=P("data"))(mlp, x)

    options = {"mesh": {"data": 2}, "shardings": (P(), P("data"), P())}
    # Devices know the scale of a whole tensor if it is stored.
    for recipe, count in (("mxfp8", 8), ("nvfp4_delayed", 6)):
        compiled = report(recipe, by_each, **options)
        assert kernels(compiled) == count and are_in_blocks(compiled)
    divided, without = (report("mxfp8", one_pass=one_pass, **options) for one_pass in (True, False))
    assert kernels(divided) == 0 and are_in_blocks(divided)
    assert divided.step.others.bytes <= 1.01 * without.step.others.bytes
    assert [c.wire for c in divided.step.collectives] == [c.wire for c in without.step.collectives]
