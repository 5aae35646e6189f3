"""Claim: Llama-3-8B trains on one 80 GB GPU without masters and with moments in FP8, on the device alone.

    uv run benchmarks/eight_billion_weights_train_on_one_h100.py [--device h100] [--layers 32] [--row TEXT] [--markdown]

A step of AdamW on the shapes of Llama-3-8B, with one sequence of 4096 tokens, blocks checkpointed in a scan, and the
head in bfloat16: float32 weights and moments, bfloat16 throughout, masters and moments in the host's memory, and
bfloat16 weights that are rounded stochastically with moments in FP8. Compiled for a device that this machine need not
have; bytes are XLA's. Nothing runs.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.quantization as haxq
import jax
import jax.numpy as jnp
import optax
from lib import output
from lib.language_model import CONVERSIONS, JaxAttention, ModelSizes, next_token_loss

import haliax_fp8 as fp8
from haliax_fp8.memory import HostOptimizer
from haliax_fp8.models import Transformer
from haliax_fp8.preflight import inspect_step
from haliax_fp8.recipes import Rounding
from haliax_fp8.training import quantized_state


ADAMW = optax.adamw(1e-4)


@dataclasses.dataclass(frozen=True)
class Row:
    """How the model is trained.

    Args:
        library: What its products run in; the name of one of `CONVERSIONS`, or a peer.
        dtype: Of its weights on the device.
        optimizer: AdamW, or AdamW in another memory or precision.
        rounding: Of the sum of weight and update.
    """

    library: str
    dtype: Any
    optimizer: Any = ADAMW
    rounding: Rounding = Rounding.TO_NEAREST


FP8, PEER = "haliax_fp8", "haliax.quantization"
LAYERS_OF_BLOCKS = ["query", "key", "value", "output", "gate", "up", "down"]
MOMENTS_IN_FP8 = quantized_state(ADAMW)
ROWS = {
    "bf16; weights and moments in float32": Row("bf16", jnp.float32),
    "FP8 of haliax.quantization; weights and moments in float32": Row(PEER, jnp.float32),
    "FP8; weights and moments in float32": Row(FP8, jnp.float32),
    "FP8; weights in float32, moments in FP8": Row(FP8, jnp.float32, MOMENTS_IN_FP8),
    "FP8; weights in bf16, masters and moments in the host's memory": Row(FP8, jnp.bfloat16, HostOptimizer(ADAMW)),
    "bf16; weights and moments in bf16": Row("bf16", jnp.bfloat16),
    "FP8; weights in bf16, rounded stochastically; moments in FP8": Row(
        FP8, jnp.bfloat16, MOMENTS_IN_FP8, Rounding.STOCHASTIC
    ),
}


def state_of(row: Row, sizes: ModelSizes, implementation: str | None) -> tuple[Any, Any]:
    """The model and the optimizer's state."""
    config = dataclasses.replace(sizes.config, attention=JaxAttention(implementation))
    model = fp8.cast_params(Transformer.init(config, key=jax.random.key(0)), row.dtype)
    model = converted(model, row.library)
    on_host = isinstance(row.optimizer, HostOptimizer)
    return model, row.optimizer.init(fp8.trainable(model)) if on_host else step_of(row).init(model)


def converted(model: Transformer, library: str) -> Any:
    """The model with the products of a library, but for its head."""
    if library == PEER:
        return haxq.quantize_linear_layers(model, haxq.QuantizationConfig(targets=LAYERS_OF_BLOCKS, fp8=True))
    return CONVERSIONS[library](model)


def step_of(row: Row) -> fp8.TrainStep:
    """The step of an optimizer on the device."""
    return fp8.TrainStep(next_token_loss, row.optimizer, parameter_rounding=row.rounding)


def program(row: Row) -> Callable[..., Any]:
    """A step that reuses the memory of model and state."""

    def on_device(inputs: Any, model: Transformer, state: Any) -> Any:
        tokens, words = inputs
        return step_of(row)(model, state, tokens, key=jax.random.wrap_key_data(words))

    def on_host(inputs: Any, model: Transformer, state: Any) -> Any:
        loss, gradients = fp8.filter_value_and_grad(next_token_loss)(model, inputs[0])
        overwrites, gradients = fp8.partition_for_grad_overwrite(gradients)
        params, state = row.optimizer.update(gradients, state, fp8.trainable(model))
        nothing = jax.tree.map(lambda _: None, gradients)
        return loss, fp8.apply_updates(eqx.combine(params, model), nothing, overwrites), state

    chosen = on_host if isinstance(row.optimizer, HostOptimizer) else on_device
    return eqx.filter_jit(chosen, donate="all-except-first")


def compiled(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The memory of a row's step; its parts are those of its arguments, and gradients in the weights' dtype."""
    row, sizes = ROWS[name], ModelSizes().with_layers(options.layers)
    model, state = eqx.filter_eval_shape(lambda: state_of(row, sizes, options.attention))
    axes = hax.Axis("batch", 1), hax.Axis("position", sizes.config.max_length)
    tokens = hax.NamedArray(jax.ShapeDtypeStruct((1, sizes.config.max_length), jnp.int32), axes)
    inputs = (tokens, jax.ShapeDtypeStruct((2,), jnp.uint32))
    flags = {"xla_gpu_enable_triton_gemm": False}
    report = inspect_step(program(row), inputs, model, state, device=options.device, compiler_options=flags)
    memory, weights = report.step.memory, size_of(fp8.trainable(model))
    return {
        "row": name,
        "weights": weights,
        "gradients": weights,
        "moments": 0 if isinstance(row.optimizer, HostOptimizer) else size_of(state),
        "temporaries": memory.temporaries,
        "peak": memory.peak,
        "host": size_of(state) if isinstance(row.optimizer, HostOptimizer) else 0,
        "seconds": report.step.seconds,
    }


def size_of(tree: Any) -> int:
    """The bytes of its arrays."""
    leaves = (leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def main() -> None:
    """Prints a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h100")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--attention", choices=("cudnn", "xla"), default="cudnn", help="of jax.nn")
    parser.add_argument("--row", default="", help="only rows whose name contains this")
    output.add_arguments(parser)
    options = parser.parse_args()
    rows = [compiled(name, options) for name in ROWS if options.row in name]
    gigabytes = lambda name: lambda row: f"{row[name] / 1e9:.1f}"
    names = ("weights", "gradients", "moments", "temporaries", "peak", "host")
    columns = {"products; weights and moments": lambda row: row["row"]} | {f"{n} GB": gigabytes(n) for n in names}
    title = f"A step of AdamW on Llama-3-8B, {options.layers} layers, 4096 tokens, compiled for {options.device}"
    output.finish(title, columns, rows, options)


if __name__ == "__main__":
    main()
