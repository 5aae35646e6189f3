"""Programs for several TPUs that are not here. Their compiler does not ask JAX how to divide a call."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from compiled_models import struct
from jax import lax
from jax.sharding import PartitionSpec as P

from haliax_fp8 import Fp8DotGeneral, filter_grad
from haliax_fp8.preflight import compilable_devices, inspect_step


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compilable_devices["tpu7x"].missing() is not None, reason="needs XLA's compiler for TPUs"),
]

TPUS = {"device": "tpu7x", "mesh": {"model": 4}, "other_setting": False}
DIMENSIONS = (((1,), (0,)), ((), ()))


def abstract(recipe):
    return eqx.filter_eval_shape(lambda: Fp8DotGeneral.init(recipe))


@pytest.mark.parametrize(("recipe", "share"), [("delayed", 1.0), ("current", 1.0), ("mxfp8", 0.0)])
def test_gradients_of_an_input_that_two_layers_read(recipe, share):
    """Devices have a part of the outputs, so of the sum. A TPU multiplies no blocks in FP8."""

    def step(ops, x, kernels):
        loss = lambda ops, x: sum((op(x, w, DIMENSIONS) ** 2).mean() for op, w in zip(ops, kernels, strict=True))
        return filter_grad(lambda both: loss(*both))((ops, x))

    own = P(None, "model")
    args = [abstract(recipe)] * 2, struct(512, 256), [struct(256, 1024)] * 2
    found = inspect_step(step, *args, shardings=(None, P(), own), **TPUS).step
    assert found.fp8_share == share and len(found.products) == 4
    assert {collective.kind for collective in found.collectives} == {"all-reduce"}


def routed(op, rows, kernels, sizes):
    return op.ragged_dot(rows, kernels, sizes).astype(jnp.float32).sum()


def test_experts():
    """Each TPU multiplies its rows under `shard_map`; with automatic axes that is what the error asks for."""
    own, args = P("model"), (abstract("delayed"), struct(512, 256), struct(8, 256, 512), struct(8, dtype=jnp.int32))

    def step(op, rows, kernels, sizes):
        total = lambda *args: lax.psum(routed(*args), "model")
        mapped = jax.shard_map(total, in_specs=(P(), own, own, own), out_specs=P())
        return filter_grad(lambda params: mapped(*params, sizes))((op, rows, kernels))

    found = inspect_step(step, *args, shardings=(None, own, own, own), **TPUS).step
    assert {product.implementation for product in found.products} == {"grouped f8"}
    assert found.useful_flops == len(found.products) * 2 * 512 * 256 * 512 // 4
    whole = lambda op, rows, kernels, sizes: filter_grad(lambda params: routed(*params, sizes))((op, rows, kernels))
    with pytest.raises(ValueError, match=r"grouped product cannot be divided over 4 TPUs.*jax.shard_map"):
        inspect_step(whole, *args, shardings=(None, own, own, own), **TPUS)
