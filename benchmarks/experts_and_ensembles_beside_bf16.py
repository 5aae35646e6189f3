"""Claim: experts receive rows in FP8 for fewer bytes sent, and ensembles in FP8 move about as much as a peer's.

    uv run benchmarks/experts_and_ensembles_beside_bf16.py [--json FILE] [--markdown] [--device h100]

Output and gradients of 64 experts, 2048 -> 1408, divided over 8 or 64 devices under `shard_map`, with 16,384 rows on
each: rows that `all_to_all` sends in bf16, and that `send_rows` sends in FP8. And the gradients of four MLPs under
`vmap`, 4096 -> 14336 -> 4096, with 2048 tokens each. Compiled for GPUs that this machine need not have, with XLA's
default flags. Bytes are read from the programs. Nothing runs. One device in a process: see
`docs/experts-and-attention.md`.
"""

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from a_third_fewer_bytes_in_microbatches import MicrobatchSizes, mlp
from jax import lax
from jax.sharding import PartitionSpec
from lib import output
from lib.experts import GROUPED_BF16
from lib.libraries import LIBRARIES
from lib.output import Row
from rich.progress import Progress

import haliax_fp8 as fp8
from haliax_fp8.preflight import inspect_step
from haliax_fp8.recipes import E5M2, Recipe
from haliax_fp8.sharding import send_rows


@dataclasses.dataclass(frozen=True)
class ExpertSizes:
    """The sizes of a layer of experts.

    Args:
        experts: On all devices.
        rows: Of each device.
        inputs: Of each expert.
        outputs: Of each expert.
    """

    experts: int = 64
    rows: int = 16384
    inputs: int = 2048
    outputs: int = 1408


@dataclasses.dataclass(frozen=True)
class Sent:
    """A way to multiply and to send rows.

    Args:
        recipe: Of the products.
        in_fp8: Whether rows travel to their experts in FP8.
        gradient: The format of gradients that travel back; None for high precision.
    """

    recipe: str | Recipe = "delayed"
    in_fp8: bool = True
    gradient: Any = None


WAYS = {
    "bf16, grouped": Sent(GROUPED_BF16, in_fp8=False),
    "FP8, rows sent in bf16": Sent(in_fp8=False),
    "FP8, rows sent in FP8": Sent(),
    "FP8, rows and their gradients sent in FP8": Sent(gradient=E5M2),
}
DEVICES = (8, 64)
MEMBERS = 4


def exchange(x: jax.Array) -> jax.Array:
    """As many rows from each device to each."""
    return lax.all_to_all(x, "experts", 0, 0, tiled=True)


def of_experts(way: str, devices: int, device: str, sizes: ExpertSizes = ExpertSizes()) -> Row:
    """What one device of a step sends and moves."""
    sent, divided = WAYS[way], PartitionSpec("experts")
    op = eqx.filter_eval_shape(lambda: fp8.Fp8DotGeneral.init(sent.recipe))
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    rows, (experts, inputs, outputs) = devices * sizes.rows, (sizes.experts, sizes.inputs, sizes.outputs)
    arguments = array(experts, inputs, outputs), array(rows, inputs), array(rows, outputs)

    def loss(params: tuple[Any, jax.Array, jax.Array], groups: jax.Array, cotangent: jax.Array) -> jax.Array:
        op, kernels, rows = params
        received = send_rows(rows, op, exchange, gradient_format=sent.gradient) if sent.in_fp8 else exchange(rows)
        out = op.ragged_dot(received, kernels, groups)
        return lax.psum((out * cotangent).astype(jnp.float32).sum(), "experts")

    def step(op: Any, kernels: jax.Array, rows: jax.Array, cotangent: jax.Array, groups: jax.Array) -> Any:
        specs = (PartitionSpec(), divided, divided), divided, divided
        total = jax.shard_map(loss, in_specs=specs, out_specs=PartitionSpec())
        return fp8.filter_value_and_grad(lambda params: total(params, groups, cotangent))((op, kernels, rows))

    groups = jax.ShapeDtypeStruct((experts,), jnp.int32)
    where: dict[str, Any] = {"mesh": {"experts": devices}, "shardings": (None, *4 * [divided])}
    program = inspect_step(step, op, *arguments, groups, device=device, **where).step
    wire = sum(collective.wire * collective.executions for collective in program.collectives)
    return {"what": f"{experts} experts on {devices} devices", "way": way, "sent": wire, **moved(program)}


def of_ensemble(library: str, device: str) -> Row:
    """What the gradients of all members move."""
    sizes = MicrobatchSizes()
    Token, Embed, _ = sizes.axes
    make = eqx.filter_vmap(lambda _: mlp(sizes, library), axis_size=MEMBERS)
    model = eqx.filter_eval_shape(lambda: make(jnp.arange(MEMBERS)))
    batch = jax.ShapeDtypeStruct((MEMBERS, sizes.tokens, sizes.inputs), jnp.bfloat16)

    def loss(model: Any, batch: jax.Array) -> jax.Array:
        of_member = lambda model, x: hax.mean(hax.square(model(hax.named(x, (Token, Embed))).astype(jnp.float32))).array
        return eqx.filter_vmap(of_member)(model, batch).sum()

    program = inspect_step(LIBRARIES[library].gradient(loss), model, batch, device=device).step
    return {"what": f"ensemble of {MEMBERS} MLPs", "way": library, "sent": 0.0, **moved(program)}


def moved(program: Any) -> Row:
    """What both kinds of programs have."""
    return {
        "fp8": program.fp8_share,
        "launches": program.others.count,
        "gigabytes": program.others.bytes / 1e9,
        "temporaries": program.memory.temporaries / 1e9,
    }


COLUMNS: dict[str, Callable[[Any], str]] = {
    "model": lambda r: r["what"],
    "way": lambda r: r["way"],
    "FLOPs in FP8": lambda r: f"{r['fp8']:.0%}",
    "sent by a device, MB": lambda r: f"{r['sent'] / 1e6:,.1f}" if r["sent"] else "",
    "other launches": lambda r: str(r["launches"]),
    "other GB": lambda r: f"{r['gigabytes']:.2f}",
    "temporaries, GB": lambda r: f"{r['temporaries']:.2f}",
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h100", help="the GPU to compile for; default: %(default)s")
    output.add_arguments(parser)
    options = parser.parse_args()
    cases = [partial(of_experts, way, devices) for devices in DEVICES for way in WAYS]
    cases += [partial(of_ensemble, library) for library in LIBRARIES]
    with Progress(transient=True) as progress:
        rows = [case(options.device) for case in progress.track(cases, description="compiling")]
    output.finish(f"Experts and ensembles, compiled for {options.device}", COLUMNS, rows, options)


if __name__ == "__main__":
    main()
