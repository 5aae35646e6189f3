"""Claim: functions on model trees take seconds for 10 000 layers, and time proportional to their number.

    uv run benchmarks/ten_thousand_layers_in_seconds.py [--layers 10000] [--json FILE] [--markdown]

Processor time, on the CPU, of conversion, `describe` and the splitting of state from weights, on tiny layers of Haliax
and of Equinox. Each also runs on a tenth of the layers: if time is proportional to their number, the time per layer is
the same. Medians.
"""

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from lib import output
from rich.progress import Progress

import haliax_fp8 as fp8


def haliax_layers(count: int) -> Any:
    """Blocks of two Haliax layers each."""
    In, Out = hax.make_axes(embed=4, mlp=8)
    up, down = hnn.Linear.init(In, Out, key=jax.random.key(0)), hnn.Linear.init(Out, In, key=jax.random.key(1))
    # Copies: a layer that is at two paths is converted once. They share their arrays, which nothing here looks into.
    return {"blocks": [{"up": dataclasses.replace(up), "down": dataclasses.replace(down)} for _ in range(count // 2)]}


def equinox_layers(count: int) -> Any:
    """Blocks of two Equinox layers each."""
    up, down = eqx.nn.Linear(4, 8, key=jax.random.key(0)), eqx.nn.Linear(8, 4, key=jax.random.key(1))
    copy = lambda layer: jax.tree.map(lambda x: x, layer)
    return {"blocks": [{"up": copy(up), "down": copy(down)} for _ in range(count // 2)]}


MODELS = {"haliax": haliax_layers, "equinox": equinox_layers}

# Each takes the plain and the converted model.
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "fp8_linear_layers": lambda plain, converted: fp8.fp8_linear_layers(plain),
    "fp8_linear_layers, targets": lambda plain, converted: fp8.fp8_linear_layers(
        plain, fp8.Fp8Config(targets=["up", r"blocks\.\d+\.down"], exclude="blocks.0.*")
    ),
    "fp8_linear_layers, again": lambda plain, converted: fp8.fp8_linear_layers(converted),
    "restore_linear_layers": lambda plain, converted: fp8.restore_linear_layers(converted),
    "describe": lambda plain, converted: fp8.describe(converted),
    "print(describe)": lambda plain, converted: str(fp8.describe(converted)),
    "describe.summary": lambda plain, converted: fp8.describe(converted).summary,
    "partition_for_grad_overwrite": lambda plain, converted: fp8.partition_for_grad_overwrite(converted),
}


def seconds(operation: Callable[[], Any], repeats: int) -> float:
    """The median, without garbage collection (as `timeit`)."""
    taken = []
    for _ in range(repeats):
        gc.collect()
        gc.disable()
        try:
            start = time.process_time()
            operation()
            taken.append(time.process_time() - start)
        finally:
            gc.enable()
    return statistics.median(taken)


def measure(layers: int, repeats: int) -> list[dict[str, Any]]:
    """One row per library and operation."""
    rows = []
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=len(MODELS) * len(OPERATIONS))
        for library, make in MODELS.items():
            few, many = ((plain, fp8.fp8_linear_layers(plain)) for plain in (make(layers // 10), make(layers)))
            for name, operation in OPERATIONS.items():
                progress.update(task, description=f"{library}: {name}")
                # The few come first, and warm up what is cached.
                of_few, of_many = (seconds(lambda m=m: operation(*m), repeats) for m in (few, many))  # noqa: B023
                rows.append(
                    {
                        "operation": name,
                        "library": library,
                        "layers": layers,
                        "seconds": of_many,
                        "seconds_of_a_tenth": of_few,
                    }
                )
                progress.advance(task)
    return rows


COLUMNS = {
    "operation": lambda r: r["operation"],
    "layers of": lambda r: r["library"],
    "seconds": lambda r: f"{r['seconds']:.3f}",
    "of a tenth": lambda r: f"{r['seconds_of_a_tenth']:.3f}",
    "µs per layer": lambda r: f"{r['seconds'] / r['layers'] * 1e6:.1f}",
    "growth per layer": lambda r: f"{r['seconds'] / r['seconds_of_a_tenth'] / 10:.2f}",
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    output.add_arguments(parser)
    options = parser.parse_args()
    rows = measure(options.layers, options.repeats)
    output.finish(f"A tree of {options.layers:,} layers, processor time", COLUMNS, rows, options)


if __name__ == "__main__":
    main()
