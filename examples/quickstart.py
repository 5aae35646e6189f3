"""Trains a small model in bf16 and in FP8 with a plain Equinox loop, and compares the losses.

    python examples/quickstart.py     # under 30 seconds on 2 CPU cores

Conversion is one line, and the training step differs in three. A CPU emulates FP8: slower, with the same rounding.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import haliax_fp8 as fp8


def loss_fn(model: eqx.nn.MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error, computed in bf16 from float32 weights."""
    prediction = jax.vmap(fp8.cast_params(model, jnp.bfloat16))(x.astype(jnp.bfloat16))
    return jnp.mean(jnp.square(prediction.astype(jnp.float32) - y))


def batch(teacher: eqx.nn.MLP, step: int) -> tuple[jax.Array, jax.Array]:
    """Inputs, and what the teacher makes of them."""
    x = jax.random.normal(jax.random.key(step), (256, 64))
    return x, jax.vmap(teacher)(x)


def train(model, teacher: eqx.nn.MLP, steps: int) -> list[float]:
    """Trains a model, plain or converted, to imitate the teacher; returns the loss of each step."""
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
        model, opt_state, loss = train_step(model, opt_state, *batch(teacher, step))
        losses.append(float(loss))
    return losses


def main(steps: int = 400) -> tuple[list[float], list[float]]:
    """Trains both models for a multiple of four steps, compares them, and returns their losses, bf16's first."""
    model, teacher, other = (eqx.nn.MLP(64, 16, 128, 2, key=jax.random.key(seed)) for seed in range(3))
    # The loss reads the output of the last layer directly, so that layer stays in bf16.
    fp8_model = fp8.fp8_linear_layers(model, exclude="layers.2")
    # Scales that fit from the first step on.
    fp8_model = fp8.calibrate(fp8_model, loss_fn, [batch(teacher, 0)])
    print(fp8.describe(fp8_model))
    losses = train(model, teacher, steps), train(fp8_model, teacher, steps)
    of_other_seed = jnp.array(train(other, teacher, steps)[-(steps // 4) :]).mean()
    in_bf16, in_fp8 = jnp.array(losses).reshape(2, 4, steps // 4).mean(axis=-1)
    differences = 100 * (in_fp8 / in_bf16 - 1)
    print("\nquarter   loss in bf16    in FP8   difference")
    for quarter in range(4):
        print(f"{quarter + 1:7}   {in_bf16[quarter]:12.5f}   {in_fp8[quarter]:.5f}   {differences[quarter]:+8.1f} %")
    by_chance = 100 * abs(of_other_seed / in_bf16[-1] - 1)
    print(f"\nThe losses end {abs(differences[-1]):.1f} % apart, and those of two seeds in bf16 {by_chance:.1f} %.")
    print("FP8 is slower here because a CPU emulates it.")
    return losses


if __name__ == "__main__":
    main()
