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
import jax
import jax.numpy as jnp
import optax

import haliax_fp8 as fp8
from haliax_fp8.models import Transformer, TransformerConfig, add_lora
from haliax_fp8.preflight import inspect_step
from haliax_fp8.serving import freeze, quantize_for_inference


def loss_fn(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Any loss of the logits."""
    logits = fp8.cast_params(model, jnp.bfloat16)(hax.named(tokens, ("batch", "position")))
    return hax.mean(hax.square(logits.astype(jnp.float32))).scalar()


def frozen(model: Transformer) -> Transformer:
    """The model with the layers of its blocks as `load(folder, weights="frozen")` makes them."""
    return freeze(quantize_for_inference(model, "FP8_DYNAMIC", unstack=False))


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
        sizes = (memory.arguments / 1e9, memory.temporaries / 1e9, memory.peak / 1e9)
        print(
            f"| {name} | {numbers:,.1f} | {of_state:.2f} | " + " | ".join(f"{x:.1f}" for x in sizes) + " |", flush=True
        )


if __name__ == "__main__":
    main()
