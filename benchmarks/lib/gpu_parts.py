"""The parts of `one_hour_on_a_gpu.py`: what is measured, in which order, on which GPUs, with which flags of XLA's."""

import dataclasses
import gc
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import loss_at_75_million_weights

from lib import cases, language_model
from lib.cases import CHECKPOINTED, SCAN, UNROLLED, Group, Plan
from lib.language_model import WAYS_IN_PARTS, ModelSizes, Way
from lib.output import Row
from lib.programs import busy_and_span, compiled, explained, figures, measure_in_turn, median_of, seconds_of


HOPPER, BLACKWELL = "Hopper", "Blackwell"
DEFAULTS, TRITON_OFF = "XLA's defaults", "Triton off"
FLAGS = {DEFAULTS: "", TRITON_OFF: "--xla_gpu_enable_triton_gemm=false"}


PACKAGE = Path(__file__).parents[2] / "haliax_fp8"


class Unfinished(Exception):
    """A part has more to do, in the next call."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What one process measures.

    Args:
        name: What it is about.
        groups: What is compiled; None if a forecast cannot be made of it.
        minutes: Its limit: starting and compiling included.
        goes_on: Whether it takes all the time that is left, at least its limit, and goes on in the next call.
        flags: A key of `FLAGS`.
        on: The GPUs that it is for.
        measure: Yields its rows, from the plan, a folder for what it keeps, and the minutes that it has; None to
            measure the groups in turn.
    """

    name: str
    groups: Callable[[Plan], Iterator[Group]] | None
    minutes: float
    flags: str = DEFAULTS
    on: tuple[str, ...] = (HOPPER, BLACKWELL)
    measure: Callable[[Plan, Path, float], Iterator[Row]] | None = None
    goes_on: bool = False

    @property
    def key(self) -> str:
        """Its name on the command line."""
        return self.name if self.flags == DEFAULTS else f"{self.name}, {self.flags}"

    def rows(self, plan: Plan, folder: Path, minutes: float) -> Iterator[Row]:
        """What it measures, row by row."""
        rows = self.measure(plan, folder, minutes) if self.measure else measured_in_turn(self.groups(plan), plan)
        for row in rows:
            yield {"part": self.name, "flags": self.flags, **row}


def parts() -> list[Part]:
    """All, the most valuable first. A new kernel is a way in one of these, or a line here."""
    step = lambda name, ways: Part(name, None, 4.0, TRITON_OFF, measure=partial(trained, ways))
    return [
        Part("product", cases.products, 2.0),
        Part(UNROLLED, partial(cases.stacks, UNROLLED), 2.0, TRITON_OFF),
        Part(CHECKPOINTED, partial(cases.stacks, CHECKPOINTED), 2.0, TRITON_OFF),
        Part("block scales", cases.of_blocks, 5.0, on=(BLACKWELL,)),
        Part("block scales, bits", None, 3.0, on=(BLACKWELL,), measure=partial(bits, ("mxfp8", "nvfp4", "mxfp4"))),
        step("training", language_model.WAYS),
        Part("experts", cases.layers_of_experts, 2.0, TRITON_OFF),
        Part(SCAN, partial(cases.stacks, SCAN), 2.0, TRITON_OFF),
        Part("idle", None, 1.5, TRITON_OFF, measure=idle_times),
        Part(UNROLLED, partial(cases.stacks, UNROLLED), 6.0),
        Part(CHECKPOINTED, partial(cases.stacks, CHECKPOINTED), 6.0),
        Part("attention", cases.attentions, 2.0, TRITON_OFF),
        Part("linear", cases.linear, 3.0, TRITON_OFF),
        Part("decode", cases.decode, 5.0),
        Part("bits", None, 5.0, measure=partial(bits, ())),
        step("training, loss in parts", WAYS_IN_PARTS),
        Part("microbatches", cases.microbatches, 1.5, TRITON_OFF),
        Part(SCAN, partial(cases.stacks, SCAN), 6.0),
        Part("loss", None, 3.0, measure=loss_of_training, goes_on=True),
    ]


def measured_in_turn(groups: Iterator[Group], plan: Plan) -> Iterator[Row]:
    """Compiles the cases of a group, then measures all in turn; a failure is a row, and the others go on."""
    for group in groups:
        runs, facts = {}, {}
        for name, case in group.cases.items():
            try:
                runs[name], facts[name] = case.build()
            except Exception as error:
                yield {"size": group.size, "library": name, "error": explained(error)}
        measured = measure_in_turn(runs, repeats=plan.repeats, least_seconds=plan.least_seconds)
        rows = {name: {"size": group.size, "library": name, **figures(measured[name]), **facts[name]} for name in runs}
        for row in rows.values():
            if group.flops and "ms" in row:
                row["tflops"] = group.flops / row["ms"] / 1e9
            if gain := faster(row, rows.get("bf16", {})):
                row["times_bf16"], row["times_bf16_least"], row["times_bf16_most"] = gain
            yield row
        del runs
        gc.collect()


def faster(row: Row, other: Row) -> tuple[float, float, float] | None:
    """How many times as fast one is as another, round by round: the median, and its interval. None if not measured."""
    if "in_ms" not in row or "in_ms" not in other:
        return None
    return median_of([theirs / ours for ours, theirs in zip(row["in_ms"], other["in_ms"], strict=True)])


def idle_times(plan: Plan, folder: Path, minutes: float, repeats: int = 5) -> Iterator[Row]:
    """How long the GPU computes nothing while the gradient of the unrolled blocks runs, from a profile."""
    (group,) = cases.stacks(UNROLLED, plan)
    for name in ("bf16", "haliax_fp8"):
        run, facts = group.cases[name].build()
        seconds_of(run, 2)
        with tempfile.TemporaryDirectory() as profile:
            with jax.profiler.trace(profile):
                seconds_of(run, repeats)
            (file,) = Path(profile).rglob("*.xplane.pb")
            planes = jax.profiler.ProfileData.from_file(str(file)).planes
            launches = [
                (event.start_ns, event.start_ns + event.duration_ns)
                for plane in planes
                if plane.name.startswith("/device:GPU")
                for line in plane.lines
                if line.name.startswith("Stream")
                for event in line.events
            ]
        row = {"size": group.size, "library": name, **facts}
        if not launches:
            yield {**row, "error": "the profile has no launches: this device is not a GPU"}
            continue
        busy, span = busy_and_span(launches)
        idle = (span - busy) / repeats / 1e6
        note = f"idle for {idle:.2f} ms of it, {len(launches) / repeats:.0f} launches"
        yield {**row, "ms": span / repeats / 1e6, "idle_ms": idle, "note": note}


def training_steps(
    way: Way, sizes: ModelSizes, sequences: int, implementation: str, limit: int | None, repeats: int
) -> Row | None:
    """Tokens per second; None if the program says that it does not fit."""
    abstract = eqx.filter_eval_shape(way.initial, sizes, implementation)
    tokens = language_model.batch(sizes, sequences)
    step = lambda state, tokens: way.step(*state, tokens)
    program = compiled(step, abstract, tokens, donate=(0,))
    if limit is not None and program.facts["program_gb"] * 1e9 > 0.97 * limit:
        return None
    # In one program, so that no copies of all weights are ever there together.
    state = eqx.filter_jit(way.initial)(sizes, implementation)

    def run() -> Any:
        nonlocal state
        *state, metrics = program(tuple(state), tokens)
        return metrics

    seconds_of(run, 1)
    # As in training, Python starts the next step while the device computes this one.
    measured = [seconds_of(run, 3) for _ in range(repeats)]
    per_second = sequences * sizes.config.max_length / statistics.median(measured)
    return {**figures(measured), **program.facts, "tokens_per_second": per_second}


def trained(
    ways: Mapping[str, Way],
    plan: Plan,
    folder: Path,
    minutes: float,
    measure: Callable[..., Row | None] = training_steps,
) -> Iterator[Row]:
    """Steps of the model, with as many layers as fit and the most sequences that fit.

    Args:
        ways: The ways to train, by name; the first is bf16.
        plan: What is measured.
        folder: Not used.
        minutes: Not used.
        measure: As `training_steps`.
    """
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    sizes = plan.model
    if limit is not None:
        sizes = sizes.with_layers(language_model.fitting_layers(sizes, limit))
    # The backend that a GPU has for bf16; XLA's own elsewhere.
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    most, baseline = plan.sequences, None
    for library, way in ways.items():
        row: Row = {"size": "", "library": library, "error": "not one sequence fits"}
        sequences = most
        while sequences:
            try:
                measured = measure(way, sizes, sequences, implementation, limit, plan.steps)
            except Exception as error:
                row = {"size": "", "library": library, "error": explained(error)}
                if implementation == "cudnn" and "cudnn" in str(error).lower():
                    implementation = "xla"
                    continue
                if not is_out_of_memory(error):
                    break
                measured = None
            if measured is not None:
                row = {"library": library, **measured}
                break
            gc.collect()
            sequences //= 2
        if "tokens_per_second" in row:
            row["size"] = size_of_step(sizes, sequences, implementation)
            baseline = row["tokens_per_second"] if library == "bf16" else baseline
            if baseline:
                row["times_bf16"] = row["tokens_per_second"] / baseline
            # What is smaller in FP8 may make room for twice as many.
            most = min(plan.sequences, 2 * sequences)
        yield row


def size_of_step(sizes: ModelSizes, sequences: int, implementation: str) -> str:
    """As the tables have it."""
    return f"{sizes.config.layers} layers, {sequences} x {sizes.config.max_length} tokens, {implementation} attention"


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device had too little memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def bits(words: tuple[str, ...], plan: Plan, folder: Path, minutes: float) -> Iterator[Row]:
    """What the device computes beside what its CPU computes: the cases with one of the words; without words, all."""
    sys.path.insert(0, str(PACKAGE.parent / "tests" / "hardware"))
    from compare_with_cpu import cases as all_cases, compared

    chosen = (case for case in all_cases() if not words or any(word in case[0] for word in words))
    if plan is cases.SMOKE:
        chosen = (case for case in chosen if "4 x 4, float32" in case[0] or "quantize-dequantize" in case[0])
    for name, is_wrong, said in compared(chosen, jax.devices()[0]):
        yield {"size": name, "library": "haliax_fp8", "wrong": is_wrong, "note": said}


def loss_of_training(plan: Plan, folder: Path, minutes: float) -> Iterator[Row]:
    """`loss_at_75_million_weights.py`, which goes on by itself."""
    smoke = ["--size", "tiny", "--steps", "12", "--folder", str(PACKAGE)] if plan is cases.SMOKE else []
    out = folder / "loss"
    is_done = loss_at_75_million_weights.main([*smoke, "--minutes", f"{minutes:.2f}", "--out", str(out), "--quiet"])
    for row in loss_at_75_million_weights.rows_in(out):
        gap = row.get("gap", row.get("training_gap"))
        note = "" if gap is None or row["variant"] == "bf16" else f"gap of the loss {gap}, {row['seeds']} seeds"
        yield {"size": f"after {row['steps']:,} steps", "library": row["variant"], "note": note}
    if not is_done:
        raise Unfinished
