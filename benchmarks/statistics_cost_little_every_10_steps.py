"""Claim: statistics in every tenth step of a `TrainStep` cost less than 5 % of its time.

Times steps that measure and steps that do not, in turns, in CPU time of this process: on a busy machine wall time says
little. The cost of measuring every tenth step is a tenth of what a step that measures takes longer.

    python benchmarks/statistics_cost_little_every_10_steps.py [--recipes delayed current] [--width 1024]
"""

import argparse
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from haliax_fp8 import TrainStep, cast_params, fp8_linear_layers
from haliax_fp8.statistics import every


def main() -> None:
    """Prints a line for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=["delayed", "current"])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    device = jax.devices()[0].device_kind
    print(f"MLP of 4 layers, width {options.width}, batch {options.batch}, bf16, on {device}; JAX {jax.__version__}")
    for recipe in options.recipes:
        plain, measuring = times(recipe, options)
        cost = (measuring - plain) / 10 / plain
        print(f"{recipe}: {1e3 * plain:.1f} ms a step, {1e3 * measuring:.1f} ms with statistics; every 10: {cost:+.1%}")


def times(recipe: str, options: argparse.Namespace) -> tuple[float, float]:
    """The shortest CPU time of a step without statistics, and of one with."""
    x = jax.random.normal(jax.random.key(1), (options.batch, options.width), jnp.bfloat16)
    plain = eqx.nn.MLP(options.width, options.width, options.width, 3, key=jax.random.key(0))
    model = fp8_linear_layers(plain, recipe=recipe)

    def loss_fn(model, x):
        out = jax.vmap(cast_params(model, jnp.bfloat16))(x)
        return jnp.mean(jnp.square(out.astype(jnp.float32)))

    step = TrainStep(loss_fn, optax.adamw(1e-3), monitor=every(2))
    state, found = step.init(model), ([], [])
    for index in range(2 * options.repeats + 2):
        start = time.process_time()
        model, state, metrics = step(model, state, x)
        jax.block_until_ready((model, state))
        if index >= 2:  # the first two compile
            found["fp8/layers.0/input/amax" not in metrics].append(time.process_time() - start)
    return min(found[1]), min(found[0])


if __name__ == "__main__":
    main()
