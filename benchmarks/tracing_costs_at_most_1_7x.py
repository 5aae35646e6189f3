"""Claim: tracing and lowering a converted model takes at most 1.7 times as long as the plain one, 1.5 without a scan.

    uv run benchmarks/tracing_costs_at_most_1_7x.py [--compile] [--json FILE] [--markdown]

Processor time of `jax.jit(value_and_grad).lower()` in bfloat16 with empty caches, plain and converted in turn; prints
medians. With `--compile` also that of XLA's compiler, all its threads together, for the CPU that it runs on: there FP8
is emulated, in code that no accelerator needs. How long XLA's compiler for a GPU takes: a column of
`fewer_launches_than_peers.py`.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from lib import output
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
    "4 Equinox blocks, nested vmap": nested_vmap,
    "Llama of 24 blocks, scan": lambda: llama(TransformerConfig(layers=24, unroll=1)),
}


def seconds_taken(
    model: Any, loss: Callable[..., Any], batch: Any, gradient: Callable[..., Any], *, compiles: bool
) -> tuple[float, float]:
    """Of tracing, differentiation and lowering to StableHLO, and of XLA (0 if it is not asked), nothing cached.

    Without garbage collection, as `timeit`.
    """
    jax.clear_caches()
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        lowered = eqx.filter_jit(gradient(loss)).lower(model, batch)
        between = time.process_time()
        if compiles:
            lowered.compile()
        return between - start, time.process_time() - between
    finally:
        gc.enable()


def measure(
    repeats: int, *, compiles: bool, cases: Mapping[str, Callable[[], tuple[Any, Callable[..., Any], Any]]] = CASES
) -> list[dict[str, Any]]:
    """One row per case: medians, and the median of the paired ratios."""
    rows = []
    with Progress(transient=True) as progress:
        for name, case in progress.track(cases.items(), description="tracing"):
            model, loss, batch = case()
            converted = fp8.fp8_linear_layers(model)
            pairs = [
                (
                    seconds_taken(model, loss, batch, eqx.filter_value_and_grad, compiles=compiles),
                    seconds_taken(converted, loss, batch, fp8.filter_value_and_grad, compiles=compiles),
                )
                for _ in range(repeats + 1)
            ][1:]
            rows.append({"case": name, "step": "trace and lower", **_medians([(a[0], b[0]) for a, b in pairs])})
            if compiles:
                rows.append({"case": name, "step": "compile for the CPU", **_medians([(a[1], b[1]) for a, b in pairs])})
    return rows


def _medians(pairs: list[tuple[float, float]]) -> dict[str, float]:
    plain, ours = zip(*pairs, strict=True)
    ratio = statistics.median(b / a for a, b in pairs)
    return {"plain_s": statistics.median(plain), "fp8_s": statistics.median(ours), "ratio": ratio}


COLUMNS = {
    "case": lambda r: r["case"],
    "step": lambda r: r["step"],
    "plain, s": lambda r: f"{r['plain_s']:.3f}",
    "FP8, s": lambda r: f"{r['fp8_s']:.3f}",
    "ratio": lambda r: f"{r['ratio']:.2f}",
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
