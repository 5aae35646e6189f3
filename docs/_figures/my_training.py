"""The step of `preflight.md`, of whose report `kept_report.py` draws the picture."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import haliax_fp8 as fp8


def loss_fn(model, images, labels):
    logits = jax.vmap(model)(images).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make(config):
    """A step with its arguments, abstract: no array is made."""
    init = lambda: eqx.nn.MLP(784, 10, 4096, 2, dtype=jnp.bfloat16, key=jax.random.key(0))
    model = eqx.filter_eval_shape(init)
    model = model if config is None else fp8.fp8_linear_layers(model, config)
    step = fp8.TrainStep(loss_fn, optax.adamw(1e-3))
    images = jax.ShapeDtypeStruct((8192, 784), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((8192,), jnp.int32)
    return step, (model, eqx.filter_eval_shape(step.init, model), images, labels)


def make_step():
    return make(fp8.Fp8Config(exclude="layers.2"))


def make_bf16_step():
    return make(None)
