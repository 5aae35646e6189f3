"""Claim: on a Hopper GPU, converted layers and models are faster than in bf16. Compares with marin-haliax and Flax.

    uv run benchmarks/faster_on_hopper.py [--minutes 7.5] [--json FILE] [--markdown]  # needs a GPU and jax[cuda]
    uv run benchmarks/faster_on_hopper.py --show FILE [--markdown]                    # prints what a run has written
    uv run benchmarks/faster_on_hopper.py --smoke                                     # tiny sizes, anywhere: no figures

With `XLA_FLAGS=--xla_gpu_enable_triton_gemm=false` it compiles in a fraction of the time: XLA then tries no products of
Triton's.

Measures, on random inputs, medians of repeated runs after warm-up, libraries in turn within one process. A GPU at its
power limit changes its clock, and so what a library does is compared with what the others do in the same round: a ratio
is the median of those of the rounds, with an interval that holds the median of all rounds there could be in 95 % of
cases.

- products alone, of bf16 and FP8 operands, written as bf16, by cuBLAS;
- one linear layer forward and backward (output, gradients of input and kernel, next state) on a grid of sizes. Flax's
  is `flax.linen.Dense` with its op, the others are `haliax.nn.Linear`;
- the gradient of four blocks' linear layers of Llama-8B, unrolled and as a scan; there Flax's op replaces Haliax's, see
  `lib/libraries.py`. Also with rematerialized norms and activations, in bf16 and with our options for memory;
- the gradients of an MLP over four microbatches, in bf16, with kernels that each microbatch quantizes, and with kernels
  quantized once;
- a layer of experts, its output and gradients: bf16 with and without `use_gmm`, and our Pallas kernels;
- causal attention and its gradients, in bf16 by cuDNN and in FP8;
- training steps of a model with the shape of Llama-8B (`lib/language_model.py`) with the most sequences that fit, in
  bf16 and with `haliax_fp8`, one after the other, because both do not fit at once. Then with the logits of one sequence
  at a time, also with the head in FP8, and with the moments in FP8;
- how long the GPU is idle in the unrolled blocks, from a profile.

Within nine minutes of a GPU, what nobody has measured yet, and what users compare with:

    XLA_FLAGS=--xla_gpu_enable_triton_gemm=false uv run benchmarks/faster_on_hopper.py --minutes 6 --json own.json \
        --part "Llama-8B, scan" --part idle --part "training, loss in parts"
    uv run benchmarks/faster_on_hopper.py --minutes 3 --json defaults.json --part "Llama-8B, unrolled"

The time of a layer or block is that of its launches in sequence: several runs are started in a row. One step sets the
scales before the measurement. Memory is what the compiled program needs, arguments included, from XLA's own analysis: a
process has a single peak, which does not describe any one program.

Everything runs in one process. A point that fails becomes a row with its error. If time runs out, the remaining points
become rows that say so. The file is written after every row, so measurements survive if the process is killed.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any


BEGIN = time.monotonic()
# Before JAX starts: allocate memory on demand, up to nearly all of it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import equinox as eqx  # noqa: E402
import flax.linen as nn  # noqa: E402
import haliax as hax  # noqa: E402
import haliax.nn as hnn  # noqa: E402
import haliax.quantization as haxq  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from a_third_fewer_bytes_in_microbatches import WAYS, MicrobatchSizes, gradients, in_each, mlp  # noqa: E402
from flax.linen import fp8_ops  # noqa: E402
from less_memory_than_bf16 import BF16, SHARED_KEPT  # noqa: E402
from lib import attention, experts, language_model, output  # noqa: E402
from lib.language_model import WAYS_IN_PARTS, ModelSizes, Way  # noqa: E402
from lib.libraries import LIBRARIES, Library, in_bf16  # noqa: E402
from lib.models import STACKS, TINY, Sizes, Stack, llama, loss  # noqa: E402
from lib.output import Row  # noqa: E402
from lib.programs import busy_and_span, compiled, explained, figures, measure_in_turn, median_of, seconds_of  # noqa: E402
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: E402

import haliax_fp8 as fp8  # noqa: E402
from haliax_fp8.memory import rematerialized  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured; in this order, as the last is dropped first.

    Args:
        first: The linear layer that a claim is about: tokens, in, out.
        blocks: The sizes of the blocks.
        microbatches: The sizes of the MLP and its microbatches.
        experts: Layers of experts: how many, rows, in, out.
        attention: Attentions: tokens, heads, heads of keys and values, features of a head.
        model: The sizes of the model.
        sequences: The most sequences in a batch that are tried, a power of two.
        products: Sizes of products alone.
        grid: The other linear layers.
        repeats: How often each is measured.
        steps: How often three steps of the model are measured.
        least_seconds: How long one measurement takes at least.
        guess: Seconds that the first point of a part is expected to take.
    """

    first: tuple[int, int, int] = (8192, 4096, 14336)
    blocks: Sizes = Sizes()
    microbatches: MicrobatchSizes = MicrobatchSizes()
    experts: tuple[tuple[int, int, int, int], ...] = ((8, 16384, 4096, 14336), (64, 16384, 2048, 1408))
    attention: tuple[tuple[int, int, int, int], ...] = ((8192, 32, 8, 128), (32768, 32, 8, 128))
    model: ModelSizes = ModelSizes()
    sequences: int = 8
    products: tuple[tuple[int, int, int], ...] = (
        (8192, 4096, 14336),
        (8192, 14336, 4096),
        (1024, 1024, 1024),
        (4096, 4096, 4096),
        (8192, 8192, 8192),
        (16384, 16384, 16384),
    )
    grid: tuple[tuple[int, int, int], ...] = (
        (8192, 14336, 4096),
        (8192, 4096, 4096),
        (8192, 4096, 1024),
        (16384, 4096, 14336),
        (1024, 1024, 1024),
        (2048, 2048, 2048),
        (4096, 4096, 4096),
        (16384, 16384, 16384),
        (1024, 4096, 14336),
        (16384, 1024, 1024),
        (1024, 16384, 16384),
    )
    repeats: int = 15
    steps: int = 5
    least_seconds: float = 0.02
    guess: float = 20.0


SMOKE = Plan(
    first=(16, 32, 48),
    blocks=TINY,
    microbatches=MicrobatchSizes(32, 48, 16, 2),
    experts=((2, 32, 16, 16),),
    attention=((16, 2, 1, 128),),
    model=ModelSizes(dataclasses.replace(TINY.llama, vocab=64, max_length=16, checkpointing=True)),
    sequences=2,
    products=((16, 32, 16),),
    grid=((16, 16, 16),),
    repeats=2,
    steps=2,
    least_seconds=0.0,
    guess=0.0,
)


@dataclasses.dataclass(frozen=True)
class Point:
    """One thing to measure.

    Args:
        part: What it is about.
        size: Its sizes.
        measure: Yields its rows.
    """

    part: str
    size: str
    measure: Callable[[], Iterator[Row]]


def points(plan: Plan, parts: Sequence[str] | None = None) -> list[Point]:
    """Those of some parts (None: all), the most important first.

    Raises:
        ValueError: If there is no such part.
    """

    def in_turn(part: str, size: tuple[int, ...], builders: dict[str, Callable[[], Callable[[], Any]]], work: int):
        measure = partial(measured_in_turn, builders, plan, 2 * work * math.prod(size))
        return Point(part, " x ".join(map(str, size)), measure)

    def linear(size: tuple[int, int, int]) -> Point:
        return in_turn("linear", size, {name: partial(compiled_linear_layer, name, *size) for name in LIBRARIES}, 3)

    def stack(name: str) -> Point:
        builders = {library: partial(blocks, STACKS[name], LIBRARIES[library], plan.blocks) for library in LIBRARIES}
        for how, (joined, library) in REMATERIALIZED.items():
            stack = llama(joined=joined, stacked=name == SCAN, between=rematerialized)
            builders[how] = partial(blocks, stack, library, plan.blocks)
        if name == SCAN:
            builders["haliax_fp8, nothing recomputed"] = partial(blocks, STACKS[name], NOTHING_RECOMPUTED, plan.blocks)
        return Point(name, f"{plan.blocks.llama.layers} blocks", partial(measured_in_turn, builders, plan, None))

    ways = {"bf16": (None, in_each)} | {f"haliax_fp8, {name}": ("delayed", way) for name, way in WAYS.items()}
    sizes = plan.microbatches
    microbatches = Point(
        "microbatches",
        f"{sizes.microbatches} x {sizes.tokens} x {sizes.inputs} x {sizes.hidden}",
        partial(
            measured_in_turn, {name: partial(mlp_gradients, *way, sizes) for name, way in ways.items()}, plan, None
        ),
    )

    def experts_of(size: tuple[int, int, int, int]) -> Point:
        builders = {name: partial(layer_of_experts, *way, *size) for name, way in experts.WAYS.items()}
        # Each row is multiplied by one kernel.
        useful = 3 * 2 * math.prod(size[1:])
        return Point("experts", " x ".join(map(str, size)), partial(measured_in_turn, builders, plan, useful))

    def attention_of(size: tuple[int, int, int, int]) -> Point:
        tokens, heads, _, features = size
        builders = {name: partial(one_attention, name, *size) for name in attention.WAYS}
        # Two products forward, five backward, each half of the square.
        useful = 7 * tokens**2 * heads * features
        return Point("attention", " x ".join(map(str, size)), partial(measured_in_turn, builders, plan, useful))

    of_sequences = f"{plan.model.config.max_length} tokens a sequence"
    train = Point("training", of_sequences, partial(trained, plan, language_model.WAYS))
    in_parts = Point("training, loss in parts", of_sequences, partial(trained, plan, WAYS_IN_PARTS))
    idle = Point("idle", f"{plan.blocks.llama.layers} blocks", partial(idle_times, plan))
    products = [
        in_turn("product", size, {name: partial(product, *dtypes, *size) for name, dtypes in OPERANDS.items()}, 1)
        for size in plan.products
    ]
    stacks = [stack("Llama-8B, unrolled"), stack(SCAN)]
    every = [
        linear(plan.first),
        microbatches,
        *map(experts_of, plan.experts),
        *map(attention_of, plan.attention),
        *products,
        *stacks,
        train,
        in_parts,
        idle,
        *map(linear, plan.grid),
    ]
    names = dict.fromkeys(point.part for point in every)
    if unknown := set(parts or ()) - names.keys():
        raise ValueError(f"--part {unknown.pop()!r} is not one of {list(names)}")
    return [point for point in every if not parts or point.part in parts]


def measured_in_turn(builders: dict[str, Callable[[], Any]], plan: Plan, flops: int | None) -> Iterator[Row]:
    """Compiles each, then measures all in turn; a failure is a row, and the others go on."""
    runs, facts = {}, {}
    for name, build in builders.items():
        try:
            runs[name], facts[name] = build()
        except Exception as error:
            yield {"library": name, "error": explained(error)}
    measured = measure_in_turn(runs, repeats=plan.repeats, least_seconds=plan.least_seconds)
    rows = {name: {"library": name, **figures(measured[name]), **facts[name]} for name in runs}
    for row in rows.values():
        if flops and "ms" in row:
            row["tflops"] = flops / row["ms"] / 1e9
        if gain := faster(row, rows.get("bf16", {})):
            row["times_bf16"], row["times_bf16_least"], row["times_bf16_most"] = gain
        yield row


def faster(row: Row, other: Row) -> tuple[float, float, float] | None:
    """How many times as fast one is as another, round by round: the median, and its interval. None if not measured."""
    if "in_ms" not in row or "in_ms" not in other:
        return None
    return median_of([theirs / ours for ours, theirs in zip(row["in_ms"], other["in_ms"], strict=True)])


OPERANDS = {
    "bf16": (jnp.bfloat16, jnp.bfloat16),
    "E4M3 x E4M3": (jnp.float8_e4m3fn, jnp.float8_e4m3fn),
    "E5M2 x E4M3": (jnp.float8_e5m2, jnp.float8_e4m3fn),
}


def product(lhs: Any, rhs: Any, rows: int, contracted: int, columns: int) -> tuple[Callable[[], Any], Row]:
    """`lhs @ rhs.T`, which is how FP8 units want their operands; FP8 has a scale to apply."""
    x, w = random(1, (rows, contracted)).astype(lhs), random(2, (columns, contracted)).astype(rhs)
    scale = jnp.asarray(0.5, jnp.bfloat16)

    def multiply(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
        out = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)
        return out if lhs == jnp.bfloat16 else out * scale

    options = {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else {}
    program = compiled(multiply, x, w, scale, **options)
    return program.of(x, w, scale), program.facts


def random(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Random bf16."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def linear_layer(
    library: str, tokens: int, inputs: int, outputs: int
) -> tuple[Callable[..., Any], tuple[Any, jax.Array, jax.Array]]:
    """The gradients of layer and input for a given gradient of the output, the next state, and the output.

    Returns:
        A function, and its arguments: layer, input, gradient of the output.
    """
    x, cotangent = random(1, (tokens, inputs)), random(2, (tokens, outputs))
    if library == "flax":
        dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        dense = nn.Dense(outputs, use_bias=False, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp, **dtypes)
        # Compiled, so that the layer is not applied.
        layer, call = jax.jit(dense.init)(jax.random.key(0), x), dense.apply
    else:
        Token, In, Out = hax.make_axes(token=tokens, input=inputs, output=outputs)
        plain = hnn.Linear.init(In, Out, key=jax.random.key(0), use_bias=False)
        layer = LIBRARIES[library].convert(in_bf16(plain))
        call = lambda layer, x: layer(hax.named(x, (Token, In))).array

    def forward_and_backward(layer: Any, x: jax.Array, cotangent: jax.Array) -> tuple[Any, jax.Array]:
        def inner(pair: tuple[Any, jax.Array]) -> tuple[jax.Array, jax.Array]:
            out = call(*pair)
            # As in any model, there is a gradient of the output only when there is an output: else XLA would quantize
            # both operands and it together, in launches that no model can have.
            later, _ = jax.lax.optimization_barrier((cotangent, jax.lax.stop_gradient(out)))
            # Never computed: what is asked for is the output and the gradients.
            return (out * later).sum().astype(jnp.float32), out

        return LIBRARIES[library].gradient(inner, has_aux=True)((layer, x))

    return forward_and_backward, (layer, x, cotangent)


def compiled_linear_layer(library: str, *size: int) -> tuple[Callable[[], Any], Row]:
    """A run of it, the scales set by a first one."""
    forward_and_backward, (layer, x, cotangent) = linear_layer(library, *size)
    program = compiled(forward_and_backward, layer, x, cotangent)
    (gradient, _), _ = program(layer, x, cotangent)
    return program.of(with_state_of(gradient, layer), x, cotangent), program.facts


SCAN = "Llama-8B, scan"
# Whether q/k/v are joined, and the library.
REMATERIALIZED = {
    "bf16, rematerialized": (False, BF16),
    "haliax_fp8, rematerialized, shared": (False, SHARED_KEPT),
    "haliax_fp8, rematerialized, q/k/v joined": (True, SHARED_KEPT),
}
"""Norms and activations rematerialized in the blocks' code, kernels kept."""

NOTHING_RECOMPUTED = dataclasses.replace(
    LIBRARIES["haliax_fp8"], gradient=partial(fp8.filter_grad, recompute_in_scans=False)
)


def blocks(stack: Stack, chosen: Library, sizes: Sizes) -> tuple[Callable[[], Any], Row]:
    """The gradient of blocks, with the next state."""
    model, x = chosen.convert(eqx.filter_jit(stack.model)(sizes)), stack.batch(sizes)
    program = compiled(chosen.gradient(loss), model, x)
    model = with_state_of(program(model, x), model)
    return program.of(model, x), program.facts


def mlp_gradients(
    recipe: str | None, prepare: Callable[[Any], Any], sizes: MicrobatchSizes
) -> tuple[Callable[[], Any], Row]:
    """Those over all microbatches, compiled as a `TrainStep` is; the scales set by a first run."""
    model = eqx.filter_jit(mlp)(sizes, recipe)
    batch = random(1, (sizes.microbatches, sizes.tokens, sizes.inputs))
    options = {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else {}
    program = compiled(partial(gradients, prepare, sizes), model, batch, **options)
    model = with_state_of(program(model, batch), model)
    return program.of(model, batch), program.facts


def layer_of_experts(recipe: str | None, use_gmm: bool, *size: int) -> tuple[Callable[[], Any], Row]:
    """Output and gradients of a layer of experts, the scales set by a first run."""
    layer, *batch = experts.layer_and_batch(recipe, *size, use_gmm=use_gmm)
    with experts.mesh_of(layer):
        program = compiled(experts.gradients, layer, *batch)
    _, (gradient, _) = program(layer, *batch)
    return program.of(with_state_of(gradient, layer), *batch), program.facts


def one_attention(way: str, *size: int) -> tuple[Callable[[], Any], Row]:
    """Output and gradients of causal attention."""
    op, *arrays = attention.op_and_arrays(way, *size)
    program = compiled(attention.gradients, op, *arrays)
    _, (gradient, *_) = program(op, *arrays)
    return program.of(with_state_of(gradient, op), *arrays), program.facts


def idle_times(plan: Plan, repeats: int = 5) -> Iterator[Row]:
    """How long the GPU computes nothing while the gradient of the unrolled blocks runs, from a profile."""
    for name in ("bf16", "haliax_fp8"):
        run, facts = blocks(STACKS["Llama-8B, unrolled"], LIBRARIES[name], plan.blocks)
        seconds_of(run, 2)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                seconds_of(run, repeats)
            (file,) = Path(folder).rglob("*.xplane.pb")
            planes = jax.profiler.ProfileData.from_file(str(file)).planes
            launches = [
                (event.start_ns, event.start_ns + event.duration_ns)
                for plane in planes
                if plane.name.startswith("/device:GPU")
                for line in plane.lines
                if line.name.startswith("Stream")
                for event in line.events
            ]
        if not launches:
            yield {"library": name, **facts, "error": "the profile has no launches: this device is not a GPU"}
            continue
        busy, span = busy_and_span(launches)
        milliseconds, idle = span / repeats / 1e6, (span - busy) / repeats / 1e6
        times = dict.fromkeys(("ms", "ms_least", "ms_most"), milliseconds)
        note = f"idle for {idle:.2f} ms of it, {len(launches) / repeats:.0f} launches"
        yield {"library": name, **facts, **times, "idle_ms": idle, "note": note}


def with_state_of(gradient: Any, model: Any) -> Any:
    """The model with the scales and histories that its gradient carries, and the weights that it had."""
    if fp8_ops.OVERWRITE_WITH_GRADIENT in (model if isinstance(model, dict) else ()):
        return {**model, fp8_ops.OVERWRITE_WITH_GRADIENT: gradient[fp8_ops.OVERWRITE_WITH_GRADIENT]}
    is_state = lambda node: node is None or isinstance(node, haxq.CustomGradientAccumulation)
    overwrites, _ = haxq.partition_for_grad_overwrite(gradient)
    return jax.tree.map(lambda new, old: old if new is None else new, overwrites, model, is_leaf=is_state)


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
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    so_far = {} if peak is None else {"peak_gb_of_the_process_so_far": peak / 1e9}
    return {**figures(measured), **program.facts, **so_far, "tokens_per_second": per_second}


def trained(plan: Plan, ways: Mapping[str, Way], measure: Callable[..., Row | None] = training_steps) -> Iterator[Row]:
    """Steps of the model, with as many layers as fit and the most sequences that fit.

    Args:
        plan: What is measured.
        ways: The ways to train, by name; the first is bf16.
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
        row: Row = {"library": library, "error": "not one sequence fits"}
        sequences = most
        while sequences:
            try:
                found = measure(way, sizes, sequences, implementation, limit, plan.steps)
            except Exception as error:
                row = {"library": library, "error": explained(error)}
                if implementation == "cudnn" and "cudnn" in str(error).lower():
                    implementation = "xla"
                    continue
                if not is_out_of_memory(error):
                    break
                found = None
            if found is not None:
                row = {"library": library, **found}
                break
            gc.collect()
            sequences //= 2
        if "tokens_per_second" in row:
            layers, batch = sizes.config.layers, f"{sequences} x {sizes.config.max_length} tokens"
            row["size"] = f"{layers} layers, {batch}, {implementation} attention"
            baseline = row["tokens_per_second"] if library == "bf16" else baseline
            if baseline:
                row["times_bf16"] = row["tokens_per_second"] / baseline
            # What is smaller in FP8 may make room for twice as many.
            most = min(plan.sequences, 2 * sequences)
        yield row


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device had too little memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def measure_all(chosen: Sequence[Point], deadline: float, guess: float, record: Callable[[Row], None]) -> None:
    """Measures as many points as time allows.

    Args:
        chosen: What to measure.
        deadline: By `time.monotonic`.
        guess: Seconds that the first point of a part is expected to take.
        record: Called with each row.
    """
    longest: dict[str, float] = {}
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        for point in chosen:
            where = {"part": point.part, "size": point.size}
            # Unrolled and as a scan, the same blocks take about as long to compile.
            kind = point.part.partition(",")[0]
            expected = longest.get(kind, guess)
            begin = time.monotonic()
            if begin + expected > deadline:
                record({**where, "library": "", "error": "dropped: no time was left"})
                continue
            progress.update(task, description=f"{point.part} {point.size}, {deadline - begin:.0f} s left")
            try:
                for row in point.measure():
                    record({**where, **row})
            except Exception as error:  # What fails is a row, and the next point is measured.
                record({**where, "library": "", "error": explained(error)})
            longest[kind] = max(longest.get(kind, 0.0), time.monotonic() - begin)
            gc.collect()


def rows_of(
    chosen: Sequence[Point], deadline: float, guess: float, write: Callable[[Sequence[Row]], None]
) -> list[Row]:
    """Those of as many points as time allows; if interrupted, those so far.

    Args:
        chosen: What to measure.
        deadline: See `measure_all`.
        guess: See `measure_all`.
        write: Called after each row, with all rows.
    """
    rows: list[Row] = []

    def record(row: Row) -> None:
        rows.append(row)
        write(rows)

    with contextlib.suppress(KeyboardInterrupt):
        measure_all(chosen, deadline, guess, record)
    return rows


def verdicts(rows: Sequence[Row], plan: Plan) -> list[str]:
    """What the rows say of the claims."""

    def best_of(part: str, size: str, asked: float) -> str:
        found = [row for row in rows if (row["part"], row["size"], row["library"]) == (part, size, "haliax_fp8")]
        ratio = found[0].get("times_bf16") if found else None
        if ratio is None:
            return f"{part} {size}: not measured"
        return f"{part} {size}: {ratio:.2f} x bf16, {asked} asked for: {'met' if ratio >= asked else 'NOT met'}"

    by_size: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["part"] == "linear" and "ms" in row:
            by_size.setdefault(row["size"], {})[row["library"]] = row
    peers = ("haliax.quantization", "flax")
    ahead, behind, measured = [], [], 0
    for size, found in by_size.items():
        gains = [faster(found.get("haliax_fp8", {}), found.get(peer, {})) for peer in peers]
        certain = [gain for gain in gains if gain is not None]
        if len(certain) == len(peers):
            measured += 1
            ahead += [size] * all(least > 1 for _, least, _ in certain)
            behind += [size] * any(most < 1 for *_, most in certain)
    compared = (
        f"ahead of marin-haliax and Flax at {len(ahead)} of {measured} measured grid points of {len(plan.grid) + 1}"
    )
    compared += f"; behind at {', '.join(behind)}" if behind else ""
    compared += f"; within the noise at {measured - len(ahead) - len(behind)}"
    return [
        best_of("linear", " x ".join(map(str, plan.first)), 1.6),
        best_of("Llama-8B, unrolled", f"{plan.blocks.llama.layers} blocks", 1.4),
        best_of("Llama-8B, scan", f"{plan.blocks.llama.layers} blocks", 1.4),
        compared,
    ]


def _number(name: str, form: str) -> Callable[[Row], str]:
    return lambda row: format(row[name], form) if name in row else ""


def _gain(row: Row) -> str:
    if "times_bf16_least" not in row:
        return _number("times_bf16", ".2f")(row)
    return f"{row['times_bf16']:.2f} ({row['times_bf16_least']:.2f} – {row['times_bf16_most']:.2f})"


def _products(row: Row) -> str:
    if "cublas_fp8" not in row:
        return ""
    return f"{row['cublas_fp8']} / {row['cublas_other']} / {row['triton_products']}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "what": lambda row: row["part"],
    "size": lambda row: row["size"],
    "library": lambda row: row["library"],
    "ms": _number("ms", ",.3f"),
    "least – most": lambda row: f"{row['ms_least']:,.3f} – {row['ms_most']:,.3f}" if "ms" in row else "",
    "x bf16": _gain,
    "TFLOP/s": _number("tflops", ",.0f"),
    "tokens/s": _number("tokens_per_second", ",.0f"),
    "program, GB": _number("program_gb", ".2f"),
    "products in cuBLAS FP8 / cuBLAS other / Triton": _products,
    "compiled in, s": _number("compile_s", ".1f"),
    "note": lambda row: row.get("error", row.get("note", "")),
}


def show(rows: Sequence[Row], environment: dict[str, Any], plan: Plan, *, markdown: bool) -> None:
    """Prints the table and, for a run on a GPU, which claims it supports."""
    title = f"Measured on {environment['device']}, {environment.get('flags') or "with XLA's default flags"}"
    if environment["backend"] != "gpu" or environment["smoke"]:
        title = f"Tiny sizes on {environment['device']}: shows that the benchmark runs, and no speed"
    output.show(title, COLUMNS, rows, environment, markdown=markdown, left=3)
    if environment["backend"] == "gpu" and not environment["smoke"]:
        print("", *(f"- {line}" for line in verdicts(rows, plan)), sep="\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=7.5, help="since the start of the process, compiling included")
    parser.add_argument("--part", action="append", help="only this, such as linear; may be repeated; default: all")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on any device")
    parser.add_argument("--show", type=Path, help="only print what a run has written to this file")
    output.add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.show:
        read = json.loads(options.show.read_text())
        plan = SMOKE if read["environment"]["smoke"] else Plan()
        show(read["rows"], read["environment"], plan, markdown=options.markdown)
        return
    backend = jax.default_backend()
    if backend != "gpu" and not options.smoke:
        parser.error(f"JAX computes on {backend!r} here: this needs a GPU and jax[cuda]; --smoke runs anywhere")
    plan = SMOKE if options.smoke else Plan()
    try:
        chosen = points(plan, options.part)
    except ValueError as error:
        parser.error(str(error))
    flags = os.environ.get("XLA_FLAGS", "")
    environment = {**output.environment(), "backend": backend, "smoke": options.smoke, "flags": flags}

    def write(rows: Sequence[Row]) -> None:
        if options.json:
            output.write(options.json, rows, environment)

    rows = rows_of(chosen, BEGIN + 60 * options.minutes, plan.guess, write)
    show(rows, environment, plan, markdown=options.markdown)


if __name__ == "__main__":
    main()
