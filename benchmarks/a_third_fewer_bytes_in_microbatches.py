"""Claim: with kernels quantized once per step, microbatches move a third fewer bytes between products.

    uv run benchmarks/a_third_fewer_bytes_in_microbatches.py [--json FILE] [--markdown] [--device h100]

The gradients of an MLP, 4096 -> 14336 -> 4096, summed over four microbatches of 2048 tokens in a scan: with kernels
that each product quantizes, and from `quantize_kernels`. Compiled for a device that this machine need not have, with
XLA's default flags and with cuBLASLt's products alone, as a `TrainStep` compiles. Bytes are read from the program.
Nothing runs.
"""

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from lib import output
from lib.libraries import LIBRARIES, in_bf16
from lib.output import Row
from rich.progress import Progress

import haliax_fp8 as fp8
from haliax_fp8.preflight import inspect_step


@dataclasses.dataclass(frozen=True)
class MicrobatchSizes:
    """The sizes of what is compared.

    Args:
        inputs: Features of the input and of the output.
        hidden: Features between.
        tokens: Of a microbatch.
        microbatches: How many there are.
    """

    inputs: int = 4096
    hidden: int = 14336
    tokens: int = 2048
    microbatches: int = 4

    @property
    def axes(self) -> tuple[hax.Axis, hax.Axis, hax.Axis]:
        """Tokens, input, hidden."""
        return hax.make_axes(token=self.tokens, embed=self.inputs, mlp=self.hidden)


class MLP(eqx.Module):
    """Two linear layers and a ReLU."""

    up: hnn.Linear
    down: hnn.Linear

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        """Its output."""
        return self.down(hnn.relu(self.up(x)))


def mlp(sizes: MicrobatchSizes, recipe: str | None) -> MLP:
    """The model in bfloat16, converted with a recipe, or by a peer of this name."""
    _, Embed, Mlp = sizes.axes
    up, down = (hnn.Linear.init(*axes, key=jax.random.key(0), use_bias=False) for axes in ((Embed, Mlp), (Mlp, Embed)))
    model = in_bf16(MLP(up, down))
    if recipe in LIBRARIES:
        return LIBRARIES[recipe].convert(model)
    return model if recipe is None else fp8.fp8_linear_layers(model, recipe=recipe, emulate=True)


def gradients(prepare: Callable[[MLP], MLP], sizes: MicrobatchSizes, model: MLP, batch: jax.Array) -> MLP:
    """Those of the mean square of the output, summed over microbatches.

    Args:
        prepare: Makes the model that all microbatches get.
        sizes: The sizes.
        model: The model.
        batch: `[microbatches, tokens, inputs]`.
    """
    Token, Embed, _ = sizes.axes
    loss = lambda model, x: hax.mean(hax.square(model(hax.named(x, (Token, Embed))).astype(jnp.float32))).scalar()
    prepared, gradient = prepare(model), fp8.filter_grad(loss)
    add = lambda total, x: (fp8.accumulate_gradients(total, gradient(prepared, x)), None)
    return jax.lax.scan(add, gradient(prepared, batch[0]), batch[1:])[0]


def in_each(model: MLP) -> MLP:
    """The model as it is: every product quantizes its kernel."""
    return model


WAYS = {"in each microbatch": in_each, "once": fp8.quantize_kernels}
RECIPES = ("delayed", "current", "rowwise")
PEERS = ("bf16", "haliax.quantization")
FLAGS: dict[str, dict[str, bool]] = {"XLA's defaults": {}, "cuBLASLt alone": {"xla_gpu_enable_triton_gemm": False}}


def row(recipe: str, way: str, flags: str, device: str, sizes: MicrobatchSizes = MicrobatchSizes()) -> Row:
    """What one program holds."""
    model = eqx.filter_eval_shape(lambda: mlp(sizes, recipe))
    batch = jax.ShapeDtypeStruct((sizes.microbatches, sizes.tokens, sizes.inputs), jnp.bfloat16)
    function = partial(gradients, WAYS[way], sizes)
    report = inspect_step(function, model, batch, device=device, compiler_options=FLAGS[flags])
    return {
        "recipe": recipe,
        "way": way,
        "flags": flags,
        "fp8_flops": report.fp8_share,
        "other_launches": report.step.others.count,
        "other_gb": report.step.others.bytes / 1e9,
        "temporaries_gb": report.step.memory.temporaries / 1e9,
    }


COLUMNS: dict[str, Callable[[Any], str]] = {
    "recipe": lambda r: r["recipe"],
    "flags": lambda r: r["flags"],
    "kernels quantized": lambda r: r["way"],
    "FLOPs in FP8": lambda r: f"{r['fp8_flops']:.1%}",
    "other launches": lambda r: str(r["other_launches"]),
    "other GB": lambda r: f"{r['other_gb']:.2f}",
    "temporaries, GB": lambda r: f"{r['temporaries_gb']:.2f}",
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h100")
    output.add_arguments(parser)
    options = parser.parse_args()
    rows = []
    with Progress(transient=True) as progress:
        pairs = [(peer, "in each microbatch") for peer in PEERS] + [(recipe, way) for recipe in RECIPES for way in WAYS]
        cases = [(*pair, flags) for flags in FLAGS for pair in pairs]
        for case in progress.track(cases, description="compiling"):
            rows.append(row(*case, options.device))
    output.finish(f"Four microbatches, compiled for {options.device}", COLUMNS, rows, options, left=3)


if __name__ == "__main__":
    main()
