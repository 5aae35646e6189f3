"""Compiles functions for the local device, and measures them in turn."""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax

from lib.output import Row


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled function of trees.

    Args:
        compiled: XLA's program: arrays in, arrays out.
        facts: What is known without running it.
    """

    compiled: Callable[..., Any]
    facts: Row

    def __call__(self, *args: Any) -> Any:
        """Starts it; the result has None for everything that is not an array."""
        return self.of(*args)()

    def of(self, *args: Any) -> Callable[[], Any]:
        """What starts it with these arguments, whose arrays are looked up only once."""
        return functools.partial(self.compiled, *(eqx.filter(arg, eqx.is_array) for arg in args))


def is_shaped(leaf: Any) -> bool:
    """Whether a leaf is an array, or the shape of one."""
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def compiled(function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **options: Any) -> Program:
    """Compiles a function for the default device.

    Args:
        function: Of trees of arrays; everything that is not an array is static.
        *args: Its arguments, or their shapes.
        donate: Which arguments give their memory to the results.
        **options: Of the compiler.
    """
    start = time.perf_counter()
    arrays, static = eqx.partition(args, is_shaped)
    called = lambda *arrays: eqx.filter(function(*eqx.combine(arrays, static)), eqx.is_array)
    program = jax.jit(called, donate_argnums=donate).lower(*arrays).compile(compiler_options=options)
    seconds, text, memory = time.perf_counter() - start, program.as_text() or "", program.memory_analysis()
    inputs_and_outputs = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    facts = {
        "compile_s": seconds,
        "program_gb": (inputs_and_outputs + memory.temp_size_in_bytes) / 1e9,
        "temporaries_gb": memory.temp_size_in_bytes / 1e9,
        "cublas_fp8": text.count('custom_call_target="__cublas$lt$matmul$f8"'),
        "cublas_other": text.count('custom_call_target="__cublas$lt$matmul"') + text.count('"__cublas$gemm"'),
        "triton_products": text.count('"kind":"__triton_gemm"') + text.count('"kind":"__triton_nested_gemm_fusion"'),
    }
    return Program(program, facts)


def measure_in_turn(
    runs: Mapping[str, Callable[[], Any]], *, repeats: int, least_seconds: float
) -> dict[str, list[float] | Exception]:
    """Seconds of one run of each, several times; one after the other in every round, each round beginning elsewhere.

    Args:
        runs: What starts a run on the device and returns its result.
        repeats: Rounds.
        least_seconds: A measurement is of as many runs in a row as take about that long, and of five at least, because
            the device waits for Python to start the first one: milliseconds, for a model with many arrays.

    Returns:
        The measurements of each, or what it raised.
    """
    timings: dict[str, list[float] | Exception] = {name: [] for name in runs}
    in_a_row: dict[str, int] = {}
    for turn in range(-1, repeats):
        names = list(runs)
        first = turn % len(names) if names else 0
        for name in names[first:] + names[:first]:
            measured = timings[name]
            if isinstance(measured, Exception):
                continue
            try:
                if turn < 0:
                    seconds_of(runs[name], 2)
                    in_a_row[name] = min(50, max(5, round(least_seconds / seconds_of(runs[name], 2))))
                else:
                    measured.append(seconds_of(runs[name], in_a_row[name]))
            except Exception as error:  # One library's failure is a row of the table, and not the end of the others.
                timings[name] = error
    return timings


def seconds_of(run: Callable[[], Any], count: int) -> float:
    """Of one run, from several in a row: a device works on one after the other."""
    start = time.perf_counter()
    for _ in range(count):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / count


def figures(measured: list[float] | Exception) -> Row:
    """The row of what was measured: milliseconds, or why there are none."""
    if isinstance(measured, Exception):
        return {"error": explained(measured)}
    return {
        "ms": statistics.median(measured) * 1e3,
        "ms_least": min(measured) * 1e3,
        "ms_most": max(measured) * 1e3,
        "in_ms": [1e3 * seconds for seconds in measured],
    }


def median_of(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the ends of an interval that holds the median of what they are drawn from, in 95 % of cases.

    The ends are two of the sorted values: how many of n values are below the true median has a binomial distribution,
    whatever theirs is. Fewer than six values cannot say so much: then the ends are the least and the most.
    """
    ordered, n = sorted(values), len(values)
    below, chance = 0, 0.5**n
    while chance <= 0.025 and below < n // 2:
        below += 1
        chance += math.comb(n, below) * 0.5**n
    low = max(0, below - 1)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def explained(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def busy_and_span(intervals: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """For how long at least one of the intervals lasts, and how long it is from the first to the last."""
    busy, end = 0.0, -math.inf
    for start, stop in sorted(intervals):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy, end - min(start for start, _ in intervals)
