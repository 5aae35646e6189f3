"""Trains a small model in bf16 and in FP8 with a plain Equinox loop, and compares the losses.

    python examples/quickstart.py     # under 30 seconds on 2 CPU cores

Conversion is one line, and the training step differs in three. On a CPU, FP8 products are emulated: slower, with the
same rounding. For a language model see `train_lm/`.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from haliax_fp8 import (
    apply_updates,
    cast_params,
    describe,
    filter_value_and_grad,
    fp8_linear_layers,
    partition_for_grad_overwrite,
    trainable,
)


def loss_fn(model: eqx.nn.MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error, computed in bf16 from float32 weights."""
    model = cast_params(model, jnp.bfloat16)
    prediction = jax.vmap(model)(x.astype(jnp.bfloat16))
    return jnp.mean(jnp.square(prediction.astype(jnp.float32) - y))


def train(model: Any, teacher: eqx.nn.MLP, steps: int) -> list[float]:
    """Trains a model, plain or converted, to imitate the teacher; returns the loss of each step."""
    optimizer = optax.adamw(2e-3)
    opt_state = optimizer.init(trainable(model))

    @eqx.filter_jit
    def train_step(model, opt_state, x):
        loss, grads = filter_value_and_grad(loss_fn)(model, x, jax.vmap(teacher)(x))
        # An FP8 layer remembers how large its operands were. The gradient of that memory is its next value.
        overwrites, grads = partition_for_grad_overwrite(grads)
        updates, opt_state = optimizer.update(grads, opt_state, trainable(model))
        return apply_updates(model, updates, overwrites), opt_state, loss

    losses = []
    for step in range(steps):
        x = jax.random.normal(jax.random.key(step), (256, 64))
        model, opt_state, loss = train_step(model, opt_state, x)
        losses.append(float(loss))
    return losses


def main(steps: int = 400) -> tuple[list[float], list[float]]:
    """Trains both models on the same batches and prints how their losses fall; returns the losses, bf16's first."""
    model = eqx.nn.MLP(64, 16, 128, 2, key=jax.random.key(0))
    teacher = eqx.nn.MLP(64, 16, 128, 2, key=jax.random.key(1))
    # The loss reads the output of the last layer directly, so that layer stays in bf16.
    fp8_model = fp8_linear_layers(model, exclude="layers.2")
    print(describe(fp8_model))
    bf16, fp8 = train(model, teacher, steps), train(fp8_model, teacher, steps)
    print("\n    steps   loss in bf16    in FP8   difference")
    for start in range(0, steps, max(1, steps // 4)):
        of_steps = slice(start, start + max(1, steps // 4))
        plain, converted = (sum(losses[of_steps]) / len(losses[of_steps]) for losses in (bf16, fp8))
        name = f"{start + 1}-{start + len(bf16[of_steps])}"
        print(f"{name:>9}   {plain:12.5f}   {converted:.5f}   {100 * (converted / plain - 1):+8.2f} %")
    last = -max(1, steps // 4)
    difference = 100 * (sum(fp8[last:]) / sum(bf16[last:]) - 1)
    side = "above" if difference > 0 else "below"
    print(f"\nFP8 ends {abs(difference):.1f} % {side} bf16. It is slower here because a CPU emulates FP8.")
    return bf16, fp8


if __name__ == "__main__":
    main()
