"""Claim: under FSDP every kernel travels in FP8, and once per step unless blocks are checkpointed.

    uv run benchmarks/kernels_travel_once_in_fp8.py [--json FILE] [--markdown] [--device h100]

Training steps for eight devices, as XLA divides them: two blocks of Llama-8B with something elementwise instead of
attention, 8192 tokens per device, AdamW, float32 weights, bf16 activations; and an MLP, 4096 -> 14336 -> 4096, in
one batch or four microbatches. Compiled for GPUs that this machine need not have, without Triton's products. What
devices send each other is read from the program. Nothing runs.
"""

import argparse
import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import optax
from a_third_fewer_bytes_in_microbatches import MLP
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from lib import models, output
from lib.libraries import LIBRARIES
from lib.output import Row
from rich.progress import Progress

import haliax_fp8 as fp8
from haliax_fp8.memory import KernelResidual
from haliax_fp8.models import TransformerConfig, swiglu
from haliax_fp8.preflight import inspect_step
from haliax_fp8.preflight.hlo import parse_hlo
from haliax_fp8.preflight.instruction import Shape
from haliax_fp8.preflight.program import entry_sites, launches
from haliax_fp8.training import ReduceOnce


BF16 = jnp.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What eight devices divide.

    Args:
        mesh: The mesh axes and their sizes.
        parameters: The mesh axis of each named axis of parameters.
        activations: The same of activations. With `sequence`, positions are divided between layers, see
            `docs/many-devices.md`.
    """

    mesh: Mapping[str, int]
    parameters: Mapping[str, str]
    activations: Mapping[str, str]

    @property
    def sequence(self) -> bool:
        """Whether positions are divided between layers."""
        return "sequence" in self.activations


_FEATURES = {"mlp": "model", "kv_heads": "model"}
FSDP = Layout({"data": 8}, {"hidden": "data"}, {"token": "data"})
DATA_PARALLEL = Layout({"data": 8}, {}, {"token": "data"})
TENSOR_PARALLEL = Layout({"model": 8}, _FEATURES, _FEATURES)
SEQUENCE = Layout({"model": 8}, _FEATURES, {**_FEATURES, "sequence": "model"})
ALL = Layout({"data": 4, "model": 2}, {"hidden": "data", **_FEATURES}, {"batch": "data", **SEQUENCE.activations})


@dataclasses.dataclass(frozen=True)
class TrafficSizes:
    """The sizes of both models.

    Args:
        config: Of the blocks.
        tokens: Of each device, or of all that divide features.
    """

    config: TransformerConfig = dataclasses.replace(models.LLAMA_8B.llama, layers=2)
    tokens: int = 8192


TINY = TrafficSizes(
    dataclasses.replace(models.TINY.llama, hidden=256, heads=16, kv_heads=8, head_dim=16, mlp=512), tokens=256
)
"""For tests."""


class SequenceBlock(eqx.Module):
    """`models.Block` with positions divided between layers, where the axis is called `sequence`.

    It is renamed in front of a row-parallel layer, whose output Haliax then divides by positions; behind it, that
    would be whole first, and so would its gradient, in bfloat16.
    """

    block: models.Block

    @staticmethod
    def init(config: TransformerConfig, *, key: jax.Array) -> "SequenceBlock":
        """A block with random weights."""
        return SequenceBlock(models.Block.init(config, key=key))

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        """Adds both halves' output."""
        block, norms, attention = self.block, self.block.norms, self.block.attention
        inside: Mapping[Any, Any] = {"sequence": "position"}
        between: Mapping[Any, Any] = {"position": "sequence"}
        h = norms[0](x).rename(inside)
        mixed = models.mix(attention.query(h), attention.key(h), attention.value(h))
        x = x + attention.output(mixed.rename(between))
        h = norms[1](x).rename(inside)
        return x + block.down(swiglu(block.gate(h), block.up(h)).rename(between))


@dataclasses.dataclass(frozen=True)
class Case:
    """A step.

    Args:
        layout: What is divided.
        recipe: Of the layers; None for bf16, and for a peer.
        peer: The library whose FP8 multiplies instead, see `lib/libraries.py`.
        stack: Whether blocks run in a scan that recomputes them.
        mlp: Whether the model is the MLP.
        shared: Whether q/k/v, and gate and up, share the scale of their input, and XLA merges equal gathers.
        config: Options of the conversion.
        step: Options of `TrainStep`.
    """

    layout: Layout = FSDP
    recipe: str | None = "delayed"
    peer: str = "bf16"
    stack: bool = False
    mlp: bool = False
    shared: bool = False
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    step: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def model(self, sizes: TrafficSizes) -> Any:
        """The model, abstract, with float32 weights."""

        def make() -> Any:
            if self.mlp:
                Hidden, Inner = sizes.config.Hidden, sizes.config.Mlp
                linear = lambda *axes: hnn.Linear.init(*axes, key=jax.random.key(0), use_bias=False)
                model: Any = MLP(linear(Hidden, Inner), linear(Inner, Hidden))
            else:
                kind = hnn.Stacked if self.stack else hnn.BlockSeq
                block = SequenceBlock if self.layout.sequence else models.Block
                blocks = kind.init(sizes.config.Layers, block, gradient_checkpointing=self.stack)
                model = blocks(sizes.config, key=jax.random.split(jax.random.key(0), sizes.config.layers))
            if self.recipe is None:
                return LIBRARIES[self.peer].convert(model)
            model = fp8.fp8_linear_layers(model, recipe=self.recipe, emulate=True, compute_dtype=BF16, **self.config)
            return fp8.memory.share_input_scales(model) if self.shared else model

        return eqx.filter_eval_shape(make)

    def loss(self, model: Any, x: hax.NamedArray) -> jax.Array:
        """The mean square of the output."""
        if "quantize_kernels" not in self.step:
            # Else products round their kernels themselves.
            model = fp8.cast_params(model, BF16)
        out = model(x) if self.mlp else model.fold(x)
        return hax.mean(hax.square(out.astype(jnp.float32))).scalar()


PEER = "haliax.quantization"
AGAIN = {"kernel_residual": KernelResidual.REQUANTIZE}
MICROBATCHES = {"microbatches": 4}
GATHERED_ONCE = {**MICROBATCHES, "quantize_kernels": "gathered_once"}
MERGED = {"xla_gpu_experimental_collective_cse_distance_threshold": 1_000_000}
"""Of XLA: gathers of equal data are one, however far apart."""

CASES = {
    "FSDP, bf16": Case(recipe=None),
    "FSDP, haliax.quantization": Case(recipe=None, peer=PEER),
    "FSDP": Case(),
    "FSDP, kernels quantized again": Case(config=AGAIN),
    "FSDP, scan + checkpointing, bf16": Case(recipe=None, stack=True),
    "FSDP, scan + checkpointing, haliax.quantization": Case(recipe=None, peer=PEER, stack=True),
    "FSDP, scan + checkpointing": Case(stack=True),
    "FSDP, current scaling": Case(recipe="current"),
    "data-parallel": Case(DATA_PARALLEL),
    "data-parallel, kernels quantized again": Case(DATA_PARALLEL, config=AGAIN),
    "tensor-parallel, bf16": Case(TENSOR_PARALLEL, recipe=None),
    "tensor-parallel": Case(TENSOR_PARALLEL),
    "tensor-parallel + sequence, bf16": Case(SEQUENCE, recipe=None),
    "tensor-parallel + sequence": Case(SEQUENCE),
    "tensor-parallel + sequence, shared scales": Case(SEQUENCE, shared=True),
    "FSDP 4 x tensor-parallel 2 + sequence, bf16": Case(ALL, recipe=None),
    "FSDP 4 x tensor-parallel 2 + sequence": Case(ALL),
    "FSDP 4 x tensor-parallel 2 + sequence, shared scales": Case(ALL, shared=True),
    "MLP, bf16": Case(recipe=None, mlp=True),
    "MLP, haliax.quantization": Case(recipe=None, peer=PEER, mlp=True),
    "MLP": Case(mlp=True),
    "MLP, kernels quantized again": Case(mlp=True, config=AGAIN),
    "MLP, 4 microbatches, bf16": Case(recipe=None, mlp=True, step=MICROBATCHES),
    "MLP, 4 microbatches": Case(mlp=True, step=MICROBATCHES),
    "MLP, kernels quantized once": Case(mlp=True, step={**MICROBATCHES, "quantize_kernels": "once"}),
    "MLP, kernels gathered once": Case(mlp=True, step=GATHERED_ONCE),
    "MLP, gradients reduced once, in float32": Case(
        mlp=True, step={**MICROBATCHES, "reduce_gradients": ReduceOnce("data")}
    ),
    "MLP, kernels gathered and gradients reduced once, in bf16": Case(
        mlp=True, step={**GATHERED_ONCE, "reduce_gradients": ReduceOnce("data", BF16)}
    ),
}
"""By name."""


def sent(text: str) -> collections.Counter[tuple[str, str]]:
    """The bytes of a program's collectives, by kind and element type: of what is gathered, of what is reduced."""
    traffic: collections.Counter[tuple[str, str]] = collections.Counter()
    for launch in launches(entry_sites(parse_hlo(text))):
        kind = launch.instruction.opcode.removesuffix("-start")
        if kind not in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"):
            continue
        operands = [shape for operand in launch.operands for shape in operand.instruction.shape.arrays]
        total = lambda shapes: sum(shape.bytes for shape in shapes)
        whole: list[Shape] = max(operands, list(launch.results), key=total)
        for shape in whole:
            traffic[kind, shape.dtype] += launch.executions * shape.bytes
    return traffic


def row(case: Case, device: str, sizes: TrafficSizes = TrafficSizes()) -> Row:
    """What one program holds."""
    layout = case.layout
    train = fp8.TrainStep(case.loss, optax.adamw(1e-4), donate=True, **case.step)
    model = case.model(sizes)
    args = model, eqx.filter_eval_shape(train.init, model)
    x = eqx.filter_eval_shape(lambda: hax.zeros((*_tokens(layout, sizes), sizes.config.Hidden), BF16))

    def step(model: Any, opt_state: Any, x: hax.NamedArray) -> Any:
        with hax.axis_mapping(dict(layout.activations)):
            return train(model, opt_state, x)

    divided = (*_divided(args, layout.mesh, layout.parameters), _divided(x, layout.mesh, layout.activations))
    options = {"xla_gpu_enable_triton_gemm": False, **(MERGED if case.shared else {})}
    report = inspect_step(step, *divided, device=device, mesh=layout.mesh, compiler_options=options)
    traffic = sent(report.step.text)
    of = lambda kind, fp8_only: sum(b for (k, t), b in traffic.items() if k == kind and t.startswith("f8") == fp8_only)
    return {
        "gathered_fp8": of("all-gather", True),
        "gathered_wider": of("all-gather", False),
        "scattered": sum(b for (kind, _), b in traffic.items() if kind == "reduce-scatter"),
        "wire": sum(collective.wire * collective.executions for collective in report.step.collectives),
        "reductions": sum(c.executions for c in report.step.collectives if c.kind.startswith("all-reduce")),
        "peak": report.step.memory.peak,
        "fp8_flops": report.fp8_share,
    }


def _tokens(layout: Layout, sizes: TrafficSizes) -> tuple[hax.Axis, ...]:
    """The axes of tokens: a single one, or two sequences for each device that has its own."""
    if not layout.sequence:
        return (hax.Axis("token", sizes.tokens * layout.mesh.get("data", 1)),)
    return hax.Axis("batch", 2 * layout.mesh.get("data", 1)), hax.Axis("sequence", sizes.tokens // 2)


def _divided[T](tree: T, sizes: Mapping[str, int], mapping: Mapping[str, str]) -> T:
    """Abstract arrays with the shardings of a layout."""
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))

    def divide(node: Any) -> Any:
        if not isinstance(node, hax.NamedArray) or node.array is None:
            return node
        spec = PartitionSpec(*(mapping.get(axis.name) for axis in node.axes))
        array = jax.ShapeDtypeStruct(node.array.shape, node.array.dtype, sharding=NamedSharding(mesh, spec))
        return hax.NamedArray(array, node.axes)  # pyright: ignore[reportArgumentType]

    return jax.tree.map(divide, tree, is_leaf=lambda node: isinstance(node, hax.NamedArray))


COLUMNS: dict[str, Callable[[Any], str]] = {
    "step": lambda r: r["case"],
    "gathered in FP8, MB": lambda r: f"{r['gathered_fp8'] / 1e6:,.1f}",
    "gathered wider, MB": lambda r: f"{r['gathered_wider'] / 1e6:,.1f}",
    "scattered, MB": lambda r: f"{r['scattered'] / 1e6:,.1f}",
    "sent by a device, MB": lambda r: f"{r['wire'] / 1e6:,.0f}",
    "all-reduces": lambda r: str(r["reductions"]),
    "peak, GB": lambda r: f"{r['peak'] / 1e9:.2f}",
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="h100")
    output.add_arguments(parser)
    options = parser.parse_args()
    rows = []
    with Progress(transient=True) as progress:
        for name in progress.track(CASES, description="compiling"):
            rows.append({"case": name, **row(CASES[name], options.device)})
    output.finish(f"Steps of eight devices, compiled for {options.device}", COLUMNS, rows, options, left=1)


if __name__ == "__main__":
    main()
