"""Experts divided over eight GPUs that are not here; run as a program, it prints what was compiled as JSON.

JAX compiles kernels in Pallas for one architecture in a process, the first that it meets.
"""

import json
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

    own = P("experts")
    total = jax.shard_map(loss, in_specs=((P(), own, own), own, own), out_specs=P())
    return filter_grad(lambda params: total(params, sizes, c))((op, kernels, rows))


def under_automatic_axes(op, kernels, rows, sizes, c):
    return filter_grad(lambda op: (op.ragged_dot(rows, kernels, sizes) * c).sum())(op)


if __name__ == "__main__":
    op = eqx.filter_eval_shape(lambda: Fp8DotGeneral.init("delayed"))
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)
    args = op, of(EXPERTS, INPUTS, OUTPUTS), of(ROWS, INPUTS), sizes, of(ROWS, OUTPUTS)
    own = P("experts")
    where = {"target": sys.argv[1], "mesh": {"experts": DEVICES}, "shardings": (None, own, own, own, own)}
    found = inspect_step(step, *args, **where, other_setting=False).step
    try:
        inspect_step(under_automatic_axes, *args, **where, other_setting=False)
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    products = {product.role: [product.kernel, product.shape] for product in found.products}
    sent = [line.split(" = ")[1].split("[")[0].strip("(") for line in found.text.splitlines() if " all-to-all" in line]
    print(json.dumps({"products": products, "sent": sent, "flops": found.useful_flops, "refusal": refusal}))
