"""Claim: statistics in every tenth step of a `TrainStep` cost less than 5 % of its time.

Times steps that measure and steps that do not, in turns, in CPU time of this process: on a busy machine wall time says
little. The cost of measuring every tenth step is a tenth of what a step that measures takes longer; medians over pairs.
Narrow layers pay more, because a product takes time with the cube of the width, and measuring with its square.

    python benchmarks/statistics_cost_little_every_10_steps.py [--recipes delayed current] [--sizes 128x512 1024x4096]
"""

import argparse
import statistics
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from haliax_fp8 import TrainStep, cast_params, fp8_linear_layers
from haliax_fp8.statistics import every


def main() -> None:
    """Prints a line for each size and recipe."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=["delayed", "current"])
    parser.add_argument(
        "--sizes", nargs="+", default=["128x512", "256x1024", "512x2048", "1024x4096"], help="width x rows"
    )
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    print(f"MLP of 4 layers, bf16, on {jax.devices()[0].device_kind}; JAX {jax.__version__}")
    for size in options.sizes:
        width, rows = map(int, size.split("x"))
        for recipe in options.recipes:
            pairs = times(recipe, width, rows, options.repeats)
            plain, measuring = (statistics.median(column) for column in zip(*pairs, strict=True))
            cost = statistics.median((b - a) / 10 / a for a, b in pairs)
            print(
                f"width {width}, {rows} rows, {recipe}: {1e3 * plain:.1f} ms a step, {1e3 * measuring:.1f} ms with "
                f"statistics; every 10: {cost:+.1%}",
                flush=True,
            )


def times(recipe: str, width: int, rows: int, repeats: int) -> list[tuple[float, float]]:
    """The CPU time of a step without statistics, and of the one with them that came before it."""
    x = jax.random.normal(jax.random.key(1), (rows, width), jnp.bfloat16)
    plain = eqx.nn.MLP(width, width, width, 3, key=jax.random.key(0))
    model = fp8_linear_layers(plain, recipe=recipe)

    def loss_fn(model, x):
        out = jax.vmap(cast_params(model, jnp.bfloat16))(x)
        return jnp.mean(jnp.square(out.astype(jnp.float32)))

    step = TrainStep(loss_fn, optax.adamw(1e-3), monitor=every(2))
    state, seconds = step.init(model), []
    for index in range(2 * repeats + 2):
        start = time.process_time()
        model, state, metrics = step(model, state, x)
        jax.block_until_ready((model, state))
        # Even steps measure.
        assert ("fp8/layers.0/input/amax" in metrics) == (index % 2 == 0)
        seconds.append(time.process_time() - start)
    return list(zip(seconds[3::2], seconds[2::2], strict=True))  # the first two compile


if __name__ == "__main__":
    main()
