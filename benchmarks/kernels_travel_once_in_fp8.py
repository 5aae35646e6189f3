"""Claim: under FSDP every kernel travels in FP8, and once per step if it is kept or gathered once.

    uv run benchmarks/kernels_travel_once_in_fp8.py [--json FILE] [--markdown] [--target h100]

Training steps for eight devices, as XLA divides them: two blocks of Llama-8B with something elementwise in attention's
place, 8192 tokens per device, AdamW, float32 weights, bf16 activations; and an MLP, 4096 -> 14336 -> 4096, with four
microbatches. Compiled for GPUs that this machine need not have, without Triton's products. What devices send each other
is read from the program. Nothing runs.
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
import models
import optax
from a_third_fewer_bytes_in_microbatches import MLP
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from lib import output
from lib.output import Row
from rich.progress import Progress

import haliax_fp8 as fp8
from haliax_fp8.demo import TransformerConfig
from haliax_fp8.memory import KernelResidual
from haliax_fp8.preflight import inspect_step
from haliax_fp8.preflight.hlo.sites import entry_sites, kernels
from haliax_fp8.preflight.hlo.text import Shape, parse_hlo


DEVICES = 8
BF16 = jnp.dtype(jnp.bfloat16)
FSDP = {"hidden": "devices"}
TENSOR_PARALLEL = {"mlp": "devices", "kv_heads": "devices"}


@dataclasses.dataclass(frozen=True)
class TrafficSizes:
    """The sizes of both models.

    Args:
        config: Of the blocks.
        tokens: Of each device.
    """

    config: TransformerConfig = dataclasses.replace(models.LLAMA_8B.llama, layers=2)
    tokens: int = 8192


TINY = TrafficSizes(dataclasses.replace(models.TINY.llama, hidden=256, head_dim=64, mlp=512), tokens=256)
"""For tests."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A step.

    Args:
        layout: What is divided: parameters' axes over devices; tokens too, unless it is a tensor-parallel one.
        recipe: Of the layers; None for bf16.
        stack: Whether blocks run in a scan that recomputes them.
        mlp: Whether the model is the MLP, with four microbatches.
        config: Options of the conversion.
        step: Options of `TrainStep`.
    """

    layout: Mapping[str, str] = dataclasses.field(default_factory=lambda: FSDP)
    recipe: str | None = "delayed"
    stack: bool = False
    mlp: bool = False
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
                blocks = kind.init(sizes.config.Layers, models.Block, gradient_checkpointing=self.stack)
                model = blocks(sizes.config, key=jax.random.split(jax.random.key(0), sizes.config.layers))
            if self.recipe is None:
                return model
            return fp8.fp8_linear_layers(model, recipe=self.recipe, emulate=True, compute_dtype=BF16, **self.config)

        return eqx.filter_eval_shape(make)

    def loss(self, model: Any, x: hax.NamedArray) -> jax.Array:
        """The mean square of the output."""
        if "quantize_kernels" not in self.step:
            # Else products round their kernels themselves.
            model = fp8.cast_params(model, BF16)
        out = model(x) if self.mlp else model.fold(x)
        return hax.mean(hax.square(out.astype(jnp.float32))).scalar()


MICROBATCHES = {"microbatches": 4}
CASES = {
    "FSDP, bf16": Case(recipe=None),
    "FSDP": Case(),
    "FSDP, kernels kept": Case(config={"kernel_residual": KernelResidual.KEEP}),
    "FSDP, scan + checkpointing, bf16": Case(recipe=None, stack=True),
    "FSDP, scan + checkpointing": Case(stack=True),
    "FSDP, current scaling": Case(recipe="current"),
    "tensor-parallel, bf16": Case(TENSOR_PARALLEL, recipe=None),
    "tensor-parallel": Case(TENSOR_PARALLEL),
    "MLP, 4 microbatches, bf16": Case(recipe=None, mlp=True, step=MICROBATCHES),
    "MLP, 4 microbatches": Case(mlp=True, step=MICROBATCHES),
    "MLP, kernels quantized once": Case(mlp=True, step={**MICROBATCHES, "quantize_kernels": "once"}),
    "MLP, kernels gathered once": Case(mlp=True, step={**MICROBATCHES, "quantize_kernels": "gathered_once"}),
}
"""By name."""


def sent(text: str) -> collections.Counter[tuple[str, str]]:
    """The bytes of a program's collectives, by kind and element type: of what is gathered, of what is reduced."""
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for kernel in kernels(entry_sites(parse_hlo(text))):
        kind = kernel.instruction.opcode.removesuffix("-start")
        if kind not in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"):
            continue
        given = [shape for operand in kernel.operands for shape in operand.instruction.shape.arrays]
        total = lambda shapes: sum(shape.bytes for shape in shapes)
        whole: list[Shape] = max(given, list(kernel.results), key=total)
        for shape in whole:
            found[kind, shape.dtype] += kernel.executions * shape.bytes
    return found


def row(case: Case, target: str, sizes: TrafficSizes = TrafficSizes()) -> Row:
    """What one program holds."""
    mesh = {"devices": DEVICES}
    is_fsdp = case.layout is FSDP
    Token = hax.Axis("token", sizes.tokens * (DEVICES if is_fsdp else 1))
    tokens = {"token": "devices"} if is_fsdp else {}
    train = fp8.TrainStep(case.loss, optax.adamw(1e-4), donate=True, **case.step)
    model = case.model(sizes)
    args = model, eqx.filter_eval_shape(train.init, model)
    x = eqx.filter_eval_shape(lambda: hax.zeros((Token, sizes.config.Hidden), BF16))

    def step(model: Any, opt_state: Any, x: hax.NamedArray) -> Any:
        with hax.axis_mapping(tokens if is_fsdp else case.layout):
            return train(model, opt_state, x)

    given = (*_divided(args, case.layout), _divided(x, tokens))
    options = {"xla_gpu_enable_triton_gemm": False}
    report = inspect_step(step, *given, target=target, mesh=mesh, compiler_options=options, other_setting=False)
    found, scaled = sent(report.step.text), (DEVICES - 1) / DEVICES
    times = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
    of = lambda kind, fp8_only: sum(b for (k, t), b in found.items() if k == kind and t.startswith("f8") == fp8_only)
    return {
        "gathered_fp8": of("all-gather", True),
        "gathered_wider": of("all-gather", False),
        "scattered": sum(b for (kind, _), b in found.items() if kind == "reduce-scatter"),
        "wire": scaled * sum(times.get(kind, 1) * size for (kind, _), size in found.items()),
        "reductions": sum(c.executions for c in report.step.collectives if c.kind.startswith("all-reduce")),
        "peak": report.step.memory.peak,
        "fp8_flops": report.fp8_share,
    }


def _divided[T](tree: T, layout: Mapping[str, str]) -> T:
    """Abstract arrays with the shardings of a layout."""
    mesh = AbstractMesh((DEVICES,), ("devices",))

    def divide(node: Any) -> Any:
        if not isinstance(node, hax.NamedArray) or node.array is None:
            return node
        spec = PartitionSpec(*(layout.get(axis.name) for axis in node.axes))
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
    parser.add_argument("--target", default="h100")
    output.add_arguments(parser)
    options = parser.parse_args()
    rows = []
    with Progress(transient=True) as progress:
        for name in progress.track(CASES, description="compiling"):
            rows.append({"case": name, **row(CASES[name], options.target)})
    output.finish(f"Steps of eight devices, compiled for {options.target}", COLUMNS, rows, options, left=1)


if __name__ == "__main__":
    main()
