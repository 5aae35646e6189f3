"""Experts divided over eight GPUs that are not here; run as a program, it prints what was compiled as JSON.

JAX compiles Pallas kernels for one architecture in a process, the first that it meets.
"""

import json
import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from haliax_fp8 import Fp8DotGeneral, filter_grad
from haliax_fp8.preflight import inspect_step
from haliax_fp8.sharding import send_rows


DEVICES, EXPERTS, ROWS, INPUTS, OUTPUTS = 8, 16, 4096, 256, 512


def exchange(x):
    return lax.all_to_all(x, "experts", 0, 0, tiled=True)


def step(op, kernels, rows, sizes, c):
    """The gradients of a loss over all devices, rows sent in FP8."""

    def loss(params, sizes, c):
        op, kernels, rows = params
        out = op.ragged_dot(send_rows(rows, op, exchange), kernels, sizes)
        return lax.psum((out * c).astype(jnp.float32).sum(), "experts")

    by_expert = P("experts")
    total = jax.shard_map(loss, in_specs=((P(), by_expert, by_expert), by_expert, by_expert), out_specs=P())
    return filter_grad(lambda params: total(params, sizes, c))((op, kernels, rows))


def under_automatic_axes(op, kernels, rows, sizes, c):
    """The same with rows where they are, without `shard_map`."""
    loss = lambda params: (params[0].ragged_dot(params[2], params[1], sizes) * c).astype(jnp.float32).sum()
    _, of_kernels, of_rows = filter_grad(loss)((op, kernels, rows))
    return jax.lax.with_sharding_constraint(of_kernels, P("experts")), of_rows


def described(report):
    """Products, the shapes of arrays that devices send each other, and FLOPs of one device."""
    products = {product.name: product.implementation for product in report.products}
    sends = re.findall(r"= \(*(\S+?)\{.* (all-gather|all-reduce|all-to-all|reduce-scatter)(?:-start)?\(", report.text)
    return {"products": products, "sent": sends, "useful": report.useful_flops, "computed": report.flops}


if __name__ == "__main__":
    op = eqx.filter_eval_shape(lambda: Fp8DotGeneral.init("delayed"))
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)
    args = op, of(EXPERTS, INPUTS, OUTPUTS), of(ROWS, INPUTS), sizes, of(ROWS, OUTPUTS)
    by_expert = P("experts")
    where = {"device": sys.argv[1], "mesh": {"experts": DEVICES}}
    steps = {
        "shard_map": (step, (None, by_expert, by_expert, by_expert, by_expert)),
        "automatic axes": (under_automatic_axes, (None, by_expert, by_expert, None, by_expert)),
    }
    reports = {name: inspect_step(of, *args, **where, shardings=at).step for name, (of, at) in steps.items()}
    print(json.dumps({name: described(report) for name, report in reports.items()}))
