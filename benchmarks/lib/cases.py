"""What is measured on a GPU, and forecast for one that is not here: the same functions of the same arguments."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import haliax as hax
import haliax.nn as hnn
import haliax.quantization as haxq
import jax
import jax.numpy as jnp
from a_third_fewer_bytes_in_microbatches import WAYS, MicrobatchSizes, gradients, in_each, mlp
from decode_reads_half_the_bytes import LAYOUTS, served_blocks
from flax.linen import fp8_ops
from less_memory_than_bf16 import BF16, SHARED_KEEP_KERNELS
from nvfp4_runs_on_fp4_units import MODELS, WAYS as OF_BLOCKS, keyed_gradients, ways_of

import haliax_fp8 as fp8
from haliax_fp8.memory import rematerialized
from lib import attention, experts
from lib.language_model import ModelSizes
from lib.libraries import LIBRARIES, Library, in_bf16
from lib.models import STACKS, TINY, Sizes, Stack, llama, loss
from lib.output import Row
from lib.programs import compiled


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes of all that is measured.

    Args:
        linear: Linear layers: tokens, in, out; a claim is about the first.
        products: Products alone, likewise.
        blocks: The sizes of blocks.
        microbatches: The sizes of the MLP and its microbatches.
        experts: Layers of experts: how many, rows, in, out.
        attention: Attentions: tokens, heads, heads of keys and values, features of a head.
        decode: Rows of an input of blocks in inference.
        model: The sizes of the model that is trained.
        sequences: The most sequences in a batch that are tried, a power of two.
        repeats: How often each is measured.
        steps: How often three steps of the model are measured.
        least_seconds: How long one measurement takes at least.
    """

    linear: tuple[tuple[int, int, int], ...] = (
        (8192, 4096, 14336),
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
    products: tuple[tuple[int, int, int], ...] = (
        (8192, 4096, 14336),
        (8192, 14336, 4096),
        (8192, 4096, 1024),
        (4096, 8192, 14336),
        (1024, 1024, 1024),
        (8192, 8192, 8192),
    )
    blocks: Sizes = Sizes()
    microbatches: MicrobatchSizes = MicrobatchSizes()
    experts: tuple[tuple[int, int, int, int], ...] = ((8, 16384, 4096, 14336), (64, 16384, 2048, 1408))
    attention: tuple[tuple[int, int, int, int], ...] = ((8192, 32, 8, 128), (32768, 32, 8, 128))
    decode: tuple[int, ...] = (1, 16, 256)
    model: ModelSizes = ModelSizes()
    sequences: int = 8
    repeats: int = 15
    steps: int = 5
    least_seconds: float = 0.02


SMOKE = Plan(
    linear=((16, 32, 48),),
    products=((16, 32, 16),),
    blocks=TINY,
    microbatches=MicrobatchSizes(32, 48, 16, 2),
    experts=((2, 32, 16, 16),),
    attention=((16, 2, 1, 128),),
    decode=(1,),
    model=ModelSizes(dataclasses.replace(TINY.llama, vocab=64, max_length=16, checkpointing=True)),
    sequences=2,
    repeats=2,
    steps=2,
    least_seconds=0.0,
)
"""For a rehearsal anywhere: no figures."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to compute something.

    Args:
        function: What is compiled.
        arguments: Makes its arguments.
        state: The part of the result that has the next state of the first argument; None if it has no state.
        options: Of the compiler.
        context: Of the first argument, in which it is compiled.
    """

    function: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    state: Callable[[Any], Any] | None = lambda result: result
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    context: Callable[[Any], AbstractContextManager[Any]] = lambda argument: contextlib.nullcontext()

    def build(self) -> tuple[Callable[[], Any], Row]:
        """What starts a run here, its scales set by a first one; and what is known of its program."""
        first, *rest = self.arguments()
        options = self.options if jax.default_backend() == "gpu" else {}
        with self.context(first):
            program = compiled(self.function, first, *rest, **options)
        if self.state is not None:
            first = with_state_of(self.state(program(first, *rest)), first)
        return program.of(first, *rest), program.facts


@dataclasses.dataclass(frozen=True)
class Group:
    """Ways to compute the same, which are measured in turn.

    Args:
        size: What they compute.
        cases: Each by the name of its library.
        flops: Useful ones; None if they are not of interest.
        is_step: Whether it is so long that an estimate has idle time.
    """

    size: str
    cases: Mapping[str, Case]
    flops: int | None = None
    is_step: bool = False


TRITON, CUBLASLT = "xla_gpu_enable_triton_gemm", "xla_gpu_cublas_fallback"
IMPLEMENTATIONS = {
    "cuBLASLt": {TRITON: False},
    "Triton": {TRITON: True, CUBLASLT: False},
    "the faster one": {TRITON: True},
}
"""Of products, with the compiler's options."""

OPERANDS = {
    "bf16": (jnp.bfloat16, jnp.bfloat16),
    "E4M3 x E4M3": (jnp.float8_e4m3fn, jnp.float8_e4m3fn),
    "E5M2 x E4M3": (jnp.float8_e5m2, jnp.float8_e4m3fn),
}

UNROLLED, SCAN, CHECKPOINTED = STACKS
# Whether q/k/v are joined, and the library.
_REMATERIALIZED = {
    "bf16, rematerialized": (False, BF16),
    "haliax_fp8, rematerialized, shared": (False, SHARED_KEEP_KERNELS),
    "haliax_fp8, rematerialized, q/k/v joined": (True, SHARED_KEEP_KERNELS),
}
_NOTHING_RECOMPUTED = dataclasses.replace(
    LIBRARIES["haliax_fp8"], gradient=partial(fp8.filter_grad, recompute_in_scans=False)
)


def random(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Random bf16."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def shown(size: tuple[int, ...]) -> str:
    """A size as the tables have it."""
    return " x ".join(map(str, size))


def products(plan: Plan) -> Iterator[Group]:
    """`lhs @ rhs.T` alone, which is how FP8 units want their operands; FP8 has a scale to apply."""

    def multiply(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
        out = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)
        return out if x.dtype == jnp.bfloat16 else out * scale

    def operands(dtypes: tuple[Any, Any], size: tuple[int, int, int]) -> tuple[jax.Array, ...]:
        rows, contracted, columns = size
        x, w = random(1, (rows, contracted)), random(2, (columns, contracted))
        return x.astype(dtypes[0]), w.astype(dtypes[1]), jnp.asarray(0.5, jnp.bfloat16)

    for size in plan.products:
        # bf16 by cuBLASLt has the name of a baseline.
        cases = {
            name if name == "bf16" and how == "cuBLASLt" else f"{name}, {how}": Case(
                multiply, partial(operands, dtypes, size), None, options
            )
            for name, dtypes in OPERANDS.items()
            for how, options in IMPLEMENTATIONS.items()
        }
        yield Group(shown(size), cases, 2 * math.prod(size))


def linear(plan: Plan) -> Iterator[Group]:
    """One linear layer: output, gradients of input and kernel, next state. Flax's is `flax.linen.Dense` with its op."""
    for size in plan.linear:
        yield Group(shown(size), {name: linear_layer(name, *size) for name in LIBRARIES}, 3 * 2 * math.prod(size))


def linear_layer(library: str, tokens: int, inputs: int, outputs: int) -> Case:
    """The gradients of layer and input for the gradient of the output, the next state, and the output."""
    Token, In, Out = hax.make_axes(token=tokens, input=inputs, output=outputs)
    dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    dense = nn.Dense(outputs, use_bias=False, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp, **dtypes)

    def arguments() -> tuple[Any, jax.Array, jax.Array]:
        x, cotangent = random(1, (tokens, inputs)), random(2, (tokens, outputs))
        if library == "flax":  # Compiled, so that the layer is not applied.
            return jax.jit(dense.init)(jax.random.key(0), x), x, cotangent
        plain = hnn.Linear.init(In, Out, key=jax.random.key(0), use_bias=False)
        return LIBRARIES[library].convert(in_bf16(plain)), x, cotangent

    def call(layer: Any, x: jax.Array) -> Any:
        return dense.apply(layer, x) if library == "flax" else layer(hax.named(x, (Token, In))).array

    def forward_and_backward(layer: Any, x: jax.Array, cotangent: jax.Array) -> tuple[Any, jax.Array]:
        def inner(pair: tuple[Any, jax.Array]) -> tuple[jax.Array, jax.Array]:
            out = call(*pair)
            # As in any model, there is a gradient of the output only when there is an output: else XLA would quantize
            # both operands and it together, in launches that no model can have.
            later, _ = jax.lax.optimization_barrier((cotangent, jax.lax.stop_gradient(out)))
            # Never computed: what is asked for is the output and the gradients.
            return (out * later).sum().astype(jnp.float32), out

        return LIBRARIES[library].gradient(inner, has_aux=True)((layer, x))

    return Case(forward_and_backward, arguments, lambda result: result[0][0])


def stacks(stack: str, plan: Plan) -> Iterator[Group]:
    """The gradient of four blocks' linear layers of Llama-8B, with the next state; with options for memory too."""
    cases = {name: blocks(STACKS[stack], library, plan.blocks) for name, library in LIBRARIES.items()}
    if stack != CHECKPOINTED:
        for how, (joined, library) in _REMATERIALIZED.items():
            made = llama(joined=joined, stacked=stack == SCAN, between=rematerialized)
            cases[how] = blocks(made, library, plan.blocks)
    if stack == SCAN:
        cases["haliax_fp8, nothing recomputed"] = blocks(STACKS[SCAN], _NOTHING_RECOMPUTED, plan.blocks)
    yield Group(_blocks(plan), cases, is_step=True)


def _blocks(plan: Plan) -> str:
    return f"{plan.blocks.llama.layers} blocks"


def blocks(stack: Stack, library: Library, sizes: Sizes) -> Case:
    """The gradient of blocks, with the next state."""
    arguments = lambda: (library.convert(eqx.filter_jit(stack.model)(sizes)), stack.batch(sizes))
    return Case(library.gradient(loss), arguments)


def of_blocks(plan: Plan) -> Iterator[Group]:
    """A gated MLP and the unrolled blocks in formats whose scales belong to blocks of elements."""

    def arguments(model: str, way: str) -> tuple[Any, ...]:
        made = eqx.filter_jit(MODELS[model])(plan.blocks)
        return OF_BLOCKS[way].convert(made), STACKS[UNROLLED].batch(plan.blocks), jax.random.key(0)

    for model in MODELS:
        cases = {way: Case(keyed_gradients(way), partial(arguments, model, way)) for way in ways_of(model)}
        size = _blocks(plan) if model == UNROLLED else model
        yield Group(size, cases, is_step=model == UNROLLED)


def microbatches(plan: Plan) -> Iterator[Group]:
    """The gradients of an MLP over microbatches that each quantize its kernels, and with kernels quantized once."""
    sizes = plan.microbatches
    ways = {"bf16": (None, in_each)} | {f"haliax_fp8, {name}": ("delayed", way) for name, way in WAYS.items()}

    def arguments(recipe: str | None) -> tuple[Any, jax.Array]:
        batch = random(1, (sizes.microbatches, sizes.tokens, sizes.inputs))
        return eqx.filter_jit(mlp)(sizes, recipe), batch

    cases = {
        name: Case(partial(gradients, prepare, sizes), partial(arguments, recipe))
        for name, (recipe, prepare) in ways.items()
    }
    yield Group(f"{sizes.microbatches} x {sizes.tokens} x {sizes.inputs} x {sizes.hidden}", cases)


def layers_of_experts(plan: Plan) -> Iterator[Group]:
    """Output and gradients of a layer of experts."""
    for size in plan.experts:
        cases = {
            name: Case(
                experts.gradients,
                partial(experts.layer_and_batch, recipe, *size, use_gmm=use_gmm),
                lambda result: result[1][0],
                context=experts.mesh_of,
            )
            for name, (recipe, use_gmm) in experts.WAYS.items()
        }
        # Each row is multiplied by one kernel.
        yield Group(shown(size), cases, 3 * 2 * math.prod(size[1:]))


def attentions(plan: Plan) -> Iterator[Group]:
    """Causal attention and its gradients."""
    for size in plan.attention:
        cases = {
            way: Case(attention.gradients, partial(attention.op_and_arrays, way, *size), lambda result: result[1][0])
            for way in attention.WAYS
        }
        tokens, heads, _, features = size
        # Two products forward, five backward, each half of the square.
        yield Group(shown(size), cases, 7 * tokens**2 * heads * features)


def decode(plan: Plan) -> Iterator[Group]:
    """Blocks in inference, in the layouts of folders."""

    def arguments(layout: str, rows: int) -> tuple[Any, hax.NamedArray]:
        axes = hax.Axis("token", rows), hax.Axis("hidden", plan.blocks.llama.hidden)
        made = eqx.filter_jit(partial(served_blocks, layout, plan.blocks))()
        return made, hax.random.normal(jax.random.key(1), axes, dtype=jnp.bfloat16)

    for rows in plan.decode:
        cases = {
            "bf16" if layout == "BF16" else layout: Case(
                lambda blocks, x: blocks.fold(x), partial(arguments, layout, rows), None
            )
            for layout in LAYOUTS
        }
        yield Group(f"{_blocks(plan)}, {rows} rows", cases)


def with_state_of(gradient: Any, model: Any) -> Any:
    """The model with the scales and histories that its gradient carries, and the weights that it had."""
    if fp8_ops.OVERWRITE_WITH_GRADIENT in (model if isinstance(model, dict) else ()):
        return {**model, fp8_ops.OVERWRITE_WITH_GRADIENT: gradient[fp8_ops.OVERWRITE_WITH_GRADIENT]}
    is_state = lambda node: node is None or isinstance(node, haxq.CustomGradientAccumulation)
    overwrites, _ = haxq.partition_for_grad_overwrite(gradient)
    return jax.tree.map(lambda new, old: old if new is None else new, overwrites, model, is_leaf=is_state)
