"""Claim: adapters on a frozen FP8 model train with the memory of its FP8 weights, and the optimizer holds theirs alone.

    uv run benchmarks/adapters_train_on_a_frozen_fp8_model.py [--device h100] [--layers 32] [--rank 16]

A step of AdamW on Llama-8B's blocks with 8192 tokens, blocks checkpointed in a scan, and an elementwise stand-in for
attention: of adapters on FP8 weights, of adapters on weights in bfloat16, and of all weights in float32. Compiled for a
device that this machine need not have; bytes are XLA's. Nothing runs.
"""

import argparse
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import haliax_fp8 as fp8
from haliax_fp8.huggingface import FrozenLinear
from haliax_fp8.huggingface.frozen_kernel import FrozenKernel
from haliax_fp8.models import Transformer, TransformerConfig, add_lora
from haliax_fp8.preflight import inspect_step


def loss_fn(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Any loss of the logits."""
    logits = fp8.cast_params(model, jnp.bfloat16)(hax.named(tokens, ("batch", "position")))
    return hax.mean(hax.square(logits.astype(jnp.float32))).scalar()


def in_fp8(layer: hnn.Linear, stack: hax.Axis) -> FrozenLinear:
    """The layer as `load(folder, weights="frozen")` makes it, with a scale for each output, all zero."""
    count = lambda spec: int(np.prod([axis.size for axis in hax.axis.axis_spec_to_tuple(spec)]))
    outputs, inputs = count(layer.Out), count(layer.In)
    bits = lambda dtype, **axes: hax.zeros((stack, *hax.make_axes(**axes)), dtype)
    data = bits(jnp.uint8, fp8_out=outputs, fp8_in=inputs)
    scale = bits(jnp.uint32, fp8_rows=outputs, fp8_columns=1)
    kernel = FrozenKernel(data, scale, None, np.dtype(jnp.float8_e4m3fn), (1, inputs))
    fields: Any = (None, layer.bias, layer.In, layer.Out, layer.dot_general, layer._reparam_cls)
    return FrozenLinear(*fields, kernel=kernel)


def frozen(model: Transformer) -> Transformer:
    """The model with the layers of its blocks in FP8."""
    is_layer = lambda node: isinstance(node, hnn.Linear)
    convert = lambda node: in_fp8(node, model.config.Layers) if is_layer(node) else node
    blocks = lambda model: model.blocks
    return eqx.tree_at(blocks, model, jax.tree.map(convert, model.blocks, is_leaf=is_layer))


def main() -> None:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="h100")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    config = TransformerConfig(
        layers=options.layers,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mlp=14336,
        max_length=2048,
        attention=lambda query, key, value, *_: query * (key * value),
        checkpointing=True,
        unroll=1,
    )
    init = lambda: Transformer.init(config, key=jax.random.key(0))
    half = lambda: fp8.cast_params(init(), jnp.bfloat16)
    adapted = lambda model: add_lora(model, rank=options.rank, key=jax.random.key(1))
    ways: dict[str, Callable[[], Any]] = {
        "adapters, FP8 weights": lambda: adapted(frozen(half())),
        "adapters, bf16 weights": lambda: adapted(half()),
        "all weights, float32": init,
    }
    step = fp8.TrainStep(loss_fn, optax.adamw(1e-4), donate=True)
    tokens = jax.ShapeDtypeStruct((4, 2048), jnp.int32)
    print("| trained | numbers M | optimizer's state GB | arguments GB | temporaries GB | peak GB |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, make in ways.items():
        model = eqx.filter_eval_shape(make)
        state = eqx.filter_eval_shape(lambda make=make: step.init(make()))
        memory = inspect_step(step, model, state, tokens, device=options.device).step.memory
        numbers = sum(x.size for x in jax.tree.leaves(fp8.trainable(model))) / 1e6
        of_state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / 1e9
        found = (memory.arguments / 1e9, memory.temporaries / 1e9, memory.peak / 1e9)
        print(
            f"| {name} | {numbers:,.1f} | {of_state:.2f} | " + " | ".join(f"{x:.1f}" for x in found) + " |", flush=True
        )


if __name__ == "__main__":
    main()
