"""Claim: tracing and lowering a converted model takes at most twice as long as the plain one, 1.6 times in a model.

    uv run benchmarks/tracing_costs_at_most_2x.py [--compile] [--json FILE] [--markdown]

Processor time of `jax.jit(value_and_grad).lower()` in bfloat16 with empty caches, plain and converted in turn, where
all layers are Haliax's also by marin-haliax's own FP8 and with Flax's op (see `lib/libraries.py`); prints medians. With
`--compile` also that of XLA's compiler, all its threads together, for the CPU that it runs on: there FP8 is emulated,
in code that no accelerator needs. How long XLA's compiler for a GPU takes: a column of `fewer_launches_than_peers.py`.
"""

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from lib import models as lib_models, output
from lib.libraries import LIBRARIES
from rich.progress import Progress

import haliax_fp8 as fp8
from haliax_fp8._cli.demo import next_token_loss
from haliax_fp8.models import Transformer, TransformerConfig


WIDTH, HEADS, LENGTH, BATCH = 64, 4, 16, 8


class EquinoxBlock(eqx.Module):
    """A transformer block in Equinox, for one sequence: its linear layers are mapped over the tokens."""

    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        attention, mlp = jax.random.split(key)
        self.norms = (eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH))
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, key=mlp)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Adds the attention's and the feed-forward layer's output."""
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


def llama(config: TransformerConfig) -> tuple[Any, Callable[..., Any], Any]:
    """A language model of `haliax_fp8.models`, with its loss."""
    tokens = hax.zeros((hax.Axis("batch", BATCH), hax.Axis("position", LENGTH)), jnp.int32)
    return in_bfloat16(Transformer.init(config, key=jax.random.key(0))), next_token_loss, tokens


def blocks_alone() -> tuple[Any, Callable[..., Any], Any]:
    """Four blocks without attention, embedding and head: little but linear layers."""
    sizes = lib_models.Sizes(dataclasses.replace(lib_models.TINY.llama, layers=4), tokens=LENGTH)
    stack = lib_models.llama(stacked=False)
    return stack.model(sizes), lib_models.loss, stack.batch(sizes)


def nested_vmap() -> tuple[Any, Callable[..., Any], Any]:
    """Four Equinox blocks, mapped over the batch and, inside, over the tokens."""
    model = eqx.nn.Sequential([eqx.nn.Lambda(EquinoxBlock(key)) for key in jax.random.split(jax.random.key(0), 4)])
    batch = jnp.ones((BATCH, LENGTH, WIDTH), jnp.bfloat16)
    return in_bfloat16(model), lambda model, x: (jax.vmap(model)(x) ** 2).mean(), batch


def in_bfloat16(model: Any) -> Any:
    """The model as it computes on a GPU. In float32 a product takes fewer equations."""
    return fp8.cast_params(model, jnp.bfloat16)


CASES = {
    "Llama of 8 blocks, unrolled": lambda: llama(TransformerConfig(layers=8, stacked=False)),
    "4 blocks of linear layers, unrolled": blocks_alone,
    "4 Equinox blocks, nested vmap": nested_vmap,
    "Llama of 24 blocks, scan": lambda: llama(TransformerConfig(layers=24, unroll=1)),
}


def seconds_taken(
    model: Any, loss: Callable[..., Any], batch: Any, gradient: Callable[..., Any], *, compiles: bool
) -> dict[str, float]:
    """Of tracing, differentiation and lowering to StableHLO, and of XLA if it is asked, nothing cached.

    Without garbage collection, as `timeit`.
    """
    jax.clear_caches()
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        lowered = eqx.filter_jit(gradient(loss)).lower(model, batch)
        taken = {"trace and lower": time.process_time() - start}
        if compiles:
            start = time.process_time()
            lowered.compile()
            taken["compile for the CPU"] = time.process_time() - start
        return taken
    finally:
        gc.enable()


GRADIENTS = {name: eqx.filter_value_and_grad for name in LIBRARIES} | {"haliax_fp8": fp8.filter_value_and_grad}
OURS = ("bf16", "haliax_fp8")


def measure(
    repeats: int, *, compiles: bool, cases: Mapping[str, Callable[[], tuple[Any, Callable[..., Any], Any]]] = CASES
) -> list[dict[str, Any]]:
    """One row per case and step: medians, and the medians of paired ratios to the plain model."""
    rows = []
    with Progress(transient=True) as progress:
        for name, case in progress.track(cases.items(), description="tracing"):
            model, loss, batch = case()
            # Haliax's own FP8 leaves Equinox's layers as they are.
            libraries = {way: LIBRARIES[way] for way in OURS} if isinstance(model, eqx.nn.Sequential) else LIBRARIES
            models = {way: library.convert(model) for way, library in libraries.items()}
            rounds = [
                {way: seconds_taken(models[way], loss, batch, GRADIENTS[way], compiles=compiles) for way in models}
                for _ in range(repeats + 1)
            ][1:]
            rows += [{"case": name, "step": step, **_medians(rounds, step)} for step in rounds[0]["bf16"]]
    return rows


def _medians(rounds: list[dict[str, dict[str, float]]], step: str) -> dict[str, dict[str, float]]:
    of = lambda way: [taken[way][step] for taken in rounds]
    ratio = lambda way: statistics.median(b / a for a, b in zip(of("bf16"), of(way), strict=True))
    return {
        "seconds": {way: statistics.median(of(way)) for way in OURS},
        "ratios": {way: ratio(way) for way in rounds[0]},
    }


def _ratio(way: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row['ratios'][way]:.2f}" if way in row["ratios"] else ""


COLUMNS = {
    "case": lambda r: r["case"],
    "step": lambda r: r["step"],
    "plain, s": lambda r: f"{r['seconds']['bf16']:.3f}",
    "FP8, s": lambda r: f"{r['seconds']['haliax_fp8']:.3f}",
    "ratio": _ratio("haliax_fp8"),
    "haliax.quantization": _ratio("haliax.quantization"),
    "flax": _ratio("flax"),
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="XLA's compiler too")
    output.add_arguments(parser)
    options = parser.parse_args()
    rows = measure(options.repeats, compiles=options.compile)
    output.finish("Tracing, lowering and compiling, processor time", COLUMNS, rows, options)


if __name__ == "__main__":
    main()
