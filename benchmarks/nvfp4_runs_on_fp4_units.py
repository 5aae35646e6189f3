"""Claim: on a B200 all three products of `nvfp4` run in FP4, and its quantization takes back most of what they save.

    JAX_PLATFORMS=cpu uv run benchmarks/nvfp4_runs_on_fp4_units.py [--json FILE] [--markdown] [--device b200]

Compiles the gradients of a gated MLP, 4096 to 14336, and of four blocks of Llama-8B, unrolled, 8192 tokens, without
checkpointing, for a device that this machine need not have: in bf16, with Haliax's own FP8, and with recipes of this
library. Products, launches, bytes and temporaries are read from the programs. The time is the preflight's estimate,
from data-sheet peaks and shares of them; nothing runs.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from lib import output
from lib.libraries import LIBRARIES, Library, in_bf16
from lib.models import LLAMA_8B, STACKS, Sizes, loss
from rich.progress import Progress

import haliax_fp8 as fp8
from haliax_fp8 import models
from haliax_fp8.devices.roofline import FASTEST, SLOWEST, Roofline
from haliax_fp8.preflight import inspect_step


class GatedMlp(eqx.Module):
    """The feed-forward half of a block of Llama-8B, without its norm."""

    mlp: models.SwiGlu

    @staticmethod
    def init(sizes: Sizes) -> "GatedMlp":
        """One with random weights in bf16."""
        return in_bf16(GatedMlp(models.Block.init(sizes.llama, key=jax.random.key(0)).mlp))

    def fold(self, x: hax.NamedArray) -> hax.NamedArray:
        """As a stack of blocks is called."""
        return self.mlp(x)


MODELS: dict[str, Callable[[Sizes], Any]] = {
    "gated MLP": GatedMlp.init,
    "Llama-8B, unrolled": STACKS["Llama-8B, unrolled"].model,
}


def _library(recipe: str, *, one_pass: bool = False, **options: Any) -> Library:
    convert = lambda model: fp8.fp8_linear_layers(model, recipe=recipe, one_pass=one_pass, **options)
    return dataclasses.replace(LIBRARIES["haliax_fp8"], convert=convert)


WAYS = {
    "bf16": LIBRARIES["bf16"],
    "haliax.quantization": LIBRARIES["haliax.quantization"],
    **{recipe: _library(recipe) for recipe in ("delayed", "mxfp8", "nvfp4")},
    **{f"{recipe}, one pass": _library(recipe, one_pass=True) for recipe in ("mxfp8", "nvfp4", "nvfp4_delayed")},
    "nvfp4, first block mxfp8, one pass": _library("nvfp4", one_pass=True, overrides={"blocks.0.*": "mxfp8"}),
}


def ways_of(model: str) -> list[str]:
    """The ways that fit a model: the MLP has no first block."""
    return [way for way in WAYS if "first block" not in way or model != "gated MLP"]


def keyed_gradients(way: str) -> Callable[[Any, hax.NamedArray, jax.Array], Any]:
    """The function that is compiled: the gradients of a model, for `nvfp4` with a key to round at random."""

    def gradients(model: Any, x: hax.NamedArray, key: jax.Array) -> Any:
        keyed = lambda model: fp8.with_rounding_keys(model, key) if way.startswith("nvfp4") else model
        return WAYS[way].gradient(lambda model, x: loss(keyed(model), x))(model, x)

    return gradients


def row(model: str, way: str, device: str, sizes: Sizes = LLAMA_8B) -> output.Row:
    """What one program holds."""
    abstract = eqx.filter_eval_shape(lambda: WAYS[way].convert(MODELS[model](sizes)))
    x = eqx.filter_eval_shape(STACKS["Llama-8B, unrolled"].batch, sizes)
    key = jax.eval_shape(lambda: jax.random.key(0))
    report = inspect_step(keyed_gradients(way), abstract, x, key, device=device)
    program, estimate = report.step, report.estimate
    ends = [Roofline(peaks, rates) for rates in (FASTEST, SLOWEST)] if (peaks := report.device.peaks) else []
    return {
        "model": model,
        "way": way,
        "formats": {name: one.products for name, one in program.by_format().items() if one.products},
        "rotations": sum(product.executions for product in program.rotations),
        "other_launches": program.others.count,
        "other_gb": program.others.bytes / 1e9,
        "temporaries_gb": program.memory.temporaries / 1e9,
        "products_ms": None if estimate is None else estimate.products * 1e3,
        "estimate_ms": None if estimate is None else estimate.total * 1e3,
        "estimate_ms_range": [program.estimate(end).total * 1e3 for end in ends],
    }


def _range(row: output.Row) -> str:
    return " ({:.1f} to {:.1f})".format(*row["estimate_ms_range"])


COLUMNS = {
    "model": lambda r: r["model"],
    "recipe": lambda r: r["way"],
    "products": lambda r: ", ".join(f"{name} {count}" for name, count in r["formats"].items()),
    "rotations": lambda r: str(r["rotations"]),
    "other launches": lambda r: str(r["other_launches"]),
    "other GB": lambda r: f"{r['other_gb']:.1f}",
    "temporaries, GB": lambda r: f"{r['temporaries_gb']:.2f}",
    "products, ms": lambda r: "" if r["products_ms"] is None else f"{r['products_ms']:.1f}",
    "estimate, ms": lambda r: f"{r['estimate_ms']:.1f}{_range(r)}" if r["estimate_ms"] else "",
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="b200")
    output.add_arguments(parser)
    options = parser.parse_args()
    rows = []
    with Progress(transient=True) as progress:
        cases = [(model, way) for model in MODELS for way in ways_of(model)]
        for model, way in progress.track(cases, description="compiling"):
            rows.append(row(model, way, options.device))
    title = f"Gradient, {LLAMA_8B.tokens} tokens, compiled for {options.device}: counts, and an estimate of the time"
    output.finish(title, COLUMNS, rows, options, left=3)


if __name__ == "__main__":
    main()
