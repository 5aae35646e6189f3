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


@jax.jit
def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """Inputs, and what a network with random weights makes of them."""
    teacher = eqx.nn.MLP(64, 16, 128, 2, key=jax.random.key(1))
    x = jax.random.normal(jax.random.key(step), (256, 64))
    return x, jax.vmap(teacher)(x)


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
    """Trains in bf16, in FP8, and in bf16 from another seed; prints the means of quarters, and returns all losses."""
    model, other = (eqx.nn.MLP(64, 16, 128, 2, key=jax.random.key(seed)) for seed in (0, 2))
    # The last layer stays in bf16: the loss reads its output. Calibrated scales fit from the first step on.
    fp8_model = fp8.calibrate(fp8.fp8_linear_layers(model, exclude="layers.2"), loss_fn, [batch(0)])
    print(fp8.describe(fp8_model))
    losses = [train(each, steps) for each in (model, fp8_model, other)]
    quarters = jnp.array(losses).reshape(3, 4, steps // 4).mean(axis=-1)
    apart = 100 * (quarters / quarters[0] - 1)
    print("\nquarter   loss in bf16    in FP8   difference")
    for i in range(4):
        print(f"{i + 1:7}   {quarters[0, i]:12.5f}   {quarters[1, i]:.5f}   {apart[1, i]:+8.1f} %")
    print(f"\nThe losses end {abs(apart[1, 3]):.1f} % apart, and those of two seeds in bf16 {abs(apart[2, 3]):.1f} %.")
    print("FP8 is slower here because a CPU emulates it.")
    return losses


if __name__ == "__main__":
    main()
