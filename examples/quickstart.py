"""Trains in bf16 and in FP8 with a plain Equinox loop: conversion is one line, and the step differs in three."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import haliax_fp8 as fp8


def loss_fn(model: eqx.nn.MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error, computed in bf16 from float32 weights."""
    prediction = jax.vmap(fp8.cast_params(model, jnp.bfloat16))(x.astype(jnp.bfloat16))
    return jnp.mean(jnp.square(prediction.astype(jnp.float32) - y))


@jax.jit
def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """Inputs, and what a network with random weights makes of them."""
    x = jax.random.normal(jax.random.key(step), (256, 64))
    return x, jax.vmap(eqx.nn.MLP(64, 16, 128, 2, key=jax.random.key(1)))(x)


def train(model, steps: int) -> list[float]:
    """Trains a model, plain or converted; returns the loss of each step."""
    optimizer = optax.adamw(2e-3)
    opt_state = optimizer.init(fp8.trainable(model))

    @eqx.filter_jit
    def train_step(model, opt_state, x, y):
        loss, grads = fp8.filter_value_and_grad(loss_fn)(model, x, y)
        # An FP8 layer remembers how large its operands were. The gradient of that memory is its next value.
        overwrites, grads = fp8.partition_for_grad_overwrite(grads)
        updates, opt_state = optimizer.update(grads, opt_state, fp8.trainable(model))
        return fp8.apply_updates(model, updates, overwrites), opt_state, loss

    losses = []
    for step in range(steps):
        model, opt_state, loss = train_step(model, opt_state, *batch(step))
        losses.append(float(loss))
    return losses


def main(steps: int = 400) -> list[list[float]]:
    """Trains in bf16, in FP8, and in bf16 from another seed; compares the last quarters, and returns all losses."""
    model, other = (eqx.nn.MLP(64, 16, 128, 2, key=jax.random.key(seed)) for seed in (0, 2))
    # The last layer stays in bf16: the loss reads its output. Calibrated scales fit from the first step on.
    fp8_model = fp8.calibrate(fp8.fp8_linear_layers(model, exclude="layers.2"), loss_fn, [batch(0)])
    print(fp8.describe(fp8_model))
    losses = [train(each, steps) for each in (model, fp8_model, other)]
    ends = jnp.array(losses)[:, -steps // 4 :].mean(axis=1)
    apart = 100 * jnp.abs(ends / ends[0] - 1)
    print(f"\nThe loss falls from {losses[0][0]:.4f} to {ends[0]:.5f} in bf16, and to {ends[1]:.5f} in FP8.")
    print(f"They end {apart[1]:.1f} % apart, two seeds in bf16 {apart[2]:.1f} %. FP8 is slow here: a CPU emulates it.")
    return losses


if __name__ == "__main__":
    main()
