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


def train(model, teacher: eqx.nn.MLP, steps: int) -> list[float]:
    """Trains a model, plain or converted, to imitate the teacher; returns the loss of each step."""
    optimizer = optax.adamw(2e-3)
    opt_state = optimizer.init(fp8.trainable(model))

    @eqx.filter_jit
    def train_step(model, opt_state, x):
        loss, grads = fp8.filter_value_and_grad(loss_fn)(model, x, jax.vmap(teacher)(x))
        # An FP8 layer remembers how large its operands were. The gradient of that memory is its next value.
        overwrites, grads = fp8.partition_for_grad_overwrite(grads)
        updates, opt_state = optimizer.update(grads, opt_state, fp8.trainable(model))
        return fp8.apply_updates(model, updates, overwrites), opt_state, loss

    losses = []
    for step in range(steps):
        x = jax.random.normal(jax.random.key(step), (256, 64))
        model, opt_state, loss = train_step(model, opt_state, x)
        losses.append(float(loss))
    return losses


def main(steps: int = 400) -> tuple[list[float], list[float]]:
    """Trains both models for a multiple of four steps, compares them, and returns their losses, bf16's first."""
    model, teacher = (eqx.nn.MLP(64, 16, 128, 2, key=jax.random.key(seed)) for seed in (0, 1))
    # The loss reads the output of the last layer directly, so that layer stays in bf16.
    fp8_model = fp8.fp8_linear_layers(model, exclude="layers.2")
    print(fp8.describe(fp8_model))
    losses = train(model, teacher, steps), train(fp8_model, teacher, steps)
    in_bf16, in_fp8 = jnp.array(losses).reshape(2, 4, steps // 4).mean(axis=-1)
    differences = 100 * (in_fp8 / in_bf16 - 1)
    print("\nquarter   loss in bf16    in FP8   difference")
    for quarter in range(4):
        print(f"{quarter + 1:7}   {in_bf16[quarter]:12.5f}   {in_fp8[quarter]:.5f}   {differences[quarter]:+8.1f} %")
    print(f"\nThe losses end {abs(differences[-1]):.1f} % apart. FP8 is slower here because a CPU emulates it.")
    return losses


if __name__ == "__main__":
    main()
