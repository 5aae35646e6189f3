"""Claim: with masters and moments in the host's memory, 7 billion weights train on one H100, in 32 GB.

    uv run benchmarks/seven_billion_weights_train_on_one_h100.py [--device h100] [--layers 32]

A step of AdamW on Llama-8B's blocks in FP8, with 8192 tokens, blocks checkpointed in a scan, and an elementwise
stand-in for attention: with float32 masters and moments on the device, and with a `HostOptimizer`. Compiled for a
device that this machine need not have; bytes are XLA's. Nothing runs.
"""

import argparse
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax

import haliax_fp8 as fp8
from haliax_fp8.memory import HostOptimizer
from haliax_fp8.models import Transformer, TransformerConfig
from haliax_fp8.preflight import inspect_step


def loss_fn(model: Transformer, tokens: jax.Array) -> jax.Array:
    """Any loss of the logits."""
    logits = fp8.cast_params(model, jnp.bfloat16)(hax.named(tokens, ("batch", "position")))
    return hax.mean(hax.square(logits.astype(jnp.float32))).scalar()


def host_step(host: HostOptimizer) -> Any:
    """A step of a bfloat16 model, whose masters are in the host's memory."""

    def step(tokens: jax.Array, model: Transformer, state: Any) -> Any:
        loss, gradients = fp8.filter_value_and_grad(loss_fn)(model, tokens)
        overwrites, gradients = fp8.partition_for_grad_overwrite(gradients)
        params, state = host.update(gradients, state, fp8.trainable(model))
        nothing = jax.tree.map(lambda _: None, gradients)
        return loss, fp8.apply_updates(eqx.combine(params, model), nothing, overwrites), state

    return eqx.filter_jit(step, donate="all-except-first")


def main() -> None:
    """Prints a line for each memory that may hold the optimizer's state."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="h100")
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    config = TransformerConfig(
        layers=options.layers,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mlp=14336,
        vocab=256,
        max_length=2048,
        attention=lambda query, key, value, *_: query * (key * value),
        checkpointing=True,
        unroll=1,
    )
    optimizer = optax.adamw(1e-4)
    host, on_device = HostOptimizer(optimizer), fp8.TrainStep(lambda m, t: loss_fn(m, t), optimizer, donate=True)

    def in_host() -> Any:
        model = fp8.cast_params(Transformer.init(config, key=jax.random.key(0)), jnp.bfloat16)
        model = fp8.fp8_linear_layers(model, emulate=True)
        return model, host.init(fp8.trainable(model))

    def in_device() -> Any:
        model = fp8.fp8_linear_layers(Transformer.init(config, key=jax.random.key(0)), emulate=True)
        return model, on_device.init(model)

    tokens = jax.ShapeDtypeStruct((4, 2048), jnp.int32)
    cublas = {"xla_gpu_enable_triton_gemm": False}
    print("| masters and moments | arguments GB | temporaries GB | peak GB |\n|---|---|---|---|")
    for name, make, step in (("on the device", in_device, on_device), ("host", in_host, host_step(host))):
        model, state = eqx.filter_eval_shape(make)
        args = (model, state, tokens) if name == "on the device" else (tokens, model, state)
        report = inspect_step(step, *args, device=options.device, compiler_options=cublas)
        memory = report.step.memory
        numbers = (memory.arguments, memory.temporaries, memory.peak)
        print(f"| {name} | " + " | ".join(f"{x / 1e9:.1f}" for x in numbers) + " |", flush=True)


if __name__ == "__main__":
    main()
