"""Programs for several TPUs that are not here. Their compiler does not ask JAX how to divide a call."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from compiled_models import struct
from jax import lax
from jax.sharding import PartitionSpec as P

from haliax_fp8 import Fp8DotGeneral, filter_grad
from haliax_fp8.preflight import PreflightError, compilable_devices, inspect_step


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compilable_devices["tpu7x"].missing() is not None, reason="needs XLA's compiler for TPUs"),
]

TPUS = {"device": "tpu7x", "mesh": {"model": 4}}
EIGHT = {**TPUS, "mesh": {"model": 8}}
DIMENSIONS = (((1,), (0,)), ((), ()))


def abstract(recipe):
    return eqx.filter_eval_shape(lambda: Fp8DotGeneral.init(recipe))


@pytest.mark.parametrize(("recipe", "share"), [("delayed", 1.0), ("current", 1.0), ("mxfp8", 0.0)])
def test_gradients_of_an_input_that_two_layers_read(recipe, share):
    """Devices have a part of the outputs, so of the sum. A TPU multiplies no blocks in FP8."""

    def step(ops, x, kernels):
        loss = lambda ops, x: sum((op(x, w, DIMENSIONS) ** 2).mean() for op, w in zip(ops, kernels, strict=True))
        return filter_grad(lambda both: loss(*both))((ops, x))

    spec = P(None, "model")
    args = [abstract(recipe)] * 2, struct(512, 256), [struct(256, 1024)] * 2
    program = inspect_step(step, *args, shardings=(None, P(), spec), **TPUS).step
    assert program.fp8_share == share and len(program.products) == 4
    assert {collective.kind for collective in program.collectives} == {"all-reduce"}


def routed(op, rows, kernels, sizes):
    return op.ragged_dot(rows, kernels, sizes).astype(jnp.float32).sum()


def test_experts():
    """Each TPU multiplies its rows under `shard_map`; with automatic axes that is what the error asks for."""
    spec, args = P("model"), (abstract("delayed"), struct(512, 256), struct(8, 256, 512), struct(8, dtype=jnp.int32))

    def step(op, rows, kernels, sizes):
        total = lambda *args: lax.psum(routed(*args), "model")
        mapped = jax.shard_map(total, in_specs=(P(), spec, spec, spec), out_specs=P())
        return filter_grad(lambda params: mapped(*params, sizes))((op, rows, kernels))

    program = inspect_step(step, *args, shardings=(None, spec, spec, spec), **TPUS).step
    assert {product.implementation for product in program.products} == {"grouped f8"}
    assert program.useful_flops == len(program.products) * 2 * 512 * 256 * 512 // 4
    whole = lambda op, rows, kernels, sizes: filter_grad(lambda params: routed(*params, sizes))((op, rows, kernels))
    with pytest.raises(ValueError, match=r"grouped product cannot be.*jax.shard_map"):
        inspect_step(whole, *args, shardings=(None, spec, spec, spec), **TPUS)


def test_communication_on_the_sparsecore():
    """Kernels are gathered, and their gradients added up, on another core. It gets its operands after it has started.
    A product runs while the second kernel travels."""
    squared = lambda ws, x: jnp.square((jax.nn.silu(x @ ws[0]) @ ws[1]).astype(jnp.float32)).mean()
    rows, kernels = P("model"), (struct(1024, 4096), struct(4096, 1024))
    report = inspect_step(jax.grad(squared), kernels, struct(4096, 1024), shardings=((rows, rows), rows), **EIGHT)
    first, second, gradients = report.step.collectives
    assert "call-start()" in report.step.text and "call-update" in report.step.text
    for gather in (first, second):
        assert (gather.kind, gather.bytes, gather.executions) == ("all-gather", 2 * 1024 * 4096, 1)
        assert gather.is_asynchronous and [part.feeds_product for part in gather.parts] == [True]
    assert (first.meanwhile, second.meanwhile) == ((), ("ws.0 forward",))
    assert gradients.reduces_gradients and gradients.wire == round(2 * 7 / 8 * 2 * 2 * 1024 * 4096)
    assert [product.layer for product in report.step.products] == ["ws.0", "ws.1", "ws.1", "ws.1", "ws.0"]
    with pytest.raises(PreflightError, match="0.0000 of the bytes are in FP8:\n  all-gather of bf16"):
        report.require(fp8_gathers=1.0)


@pytest.mark.parametrize(("recipe", "share"), [("delayed", 1.0), (None, 0.0)])
def test_parts_of_a_kernel_that_travel_while_others_are_multiplied(recipe, share):
    """Without an all-gather: devices pass the parts on, and multiply two joined ones at a time."""
    product = lambda op, w, x: x @ w if op is None else op(x, w, DIMENSIONS)
    args, spec = (recipe and abstract(recipe), struct(4096, 4096), struct(16384, 4096)), P("model")
    report = inspect_step(product, *args, shardings=(None, spec, spec), **TPUS)
    assert {collective.kind for collective in report.step.collectives} == {"collective-permute"}
    assert report.step.fp8_gathers == share
    if share:
        report.require(fp8_gathers=1.0)
    else:
        with pytest.raises(PreflightError, match="0.0000 of the bytes are in FP8:\n  collective-permute of bf16"):
            report.require(fp8_gathers=1.0)
