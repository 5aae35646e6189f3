"""One of the models that train side by side: loss, optimizer, conversion, one step, evaluation."""

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from haliax_fp8 import (
    Fp8Config,
    TrainStep,
    cast_params,
    fp8_linear_layers,
    quantization_statistics,
    restore_linear_layers,
    transfer_optimizer_state,
    with_rounding_keys,
)
from haliax_fp8.memory import compressed
from haliax_fp8.models import Transformer, swiglu

from .corpus import Corpus
from .layout import Layout
from .options import LEFT_ALONE, model_config, recipes


BASELINE_NAMES = {"bfloat16": "bf16", "float32": "f32"}


@dataclasses.dataclass
class Run:
    """One of the models.

    Args:
        name: Its name in the table and the figure.
        model: The model, plain or converted.
        opt_state: The optimizer's state for it.
        config: How to convert it; None for the baseline.
        layout: On which devices it is.
        is_converted: Whether `model` is converted now.
        losses: Training loss of every completed step.
        validation: Completed steps and validation loss.
        seconds: Duration of the steps of this process.
        statistics: What quantization did to the operands of the trained model: shares of 1.
    """

    name: str
    model: Transformer
    opt_state: Any
    config: Fp8Config | None
    layout: Layout
    is_converted: bool = False
    losses: list[float] = dataclasses.field(default_factory=list)
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    statistics: dict[str, float] = dataclasses.field(default_factory=dict)

    def set_converted(self, to_fp8: bool) -> bool:
        """Converts the model, or converts it back, and keeps the optimizer's moments.

        Returns:
            Whether the model is in FP8 now and was not before.
        """
        if self.config is None or to_fp8 == self.is_converted:
            return False
        old = self.model
        self.model = fp8_linear_layers(old, self.config) if to_fp8 else restore_linear_layers(old)
        self.model = self.layout.divided(self.model)
        self.opt_state = transfer_optimizer_state(self.opt_state, old, self.model)
        self.is_converted = to_fp8
        return to_fp8

    def calibrate(self, step: TrainStep, batch: jax.Array) -> None:
        """Fills scales and histories from a batch, so that the first step in FP8 already has gradients."""
        self.model = self.layout.divided(step.calibrate(self.model, batch))

    def measure(self, step: TrainStep, batch: jax.Array, key: jax.Array) -> None:
        """Records the shares of elements that quantization clips and flushes to zero, over a batch."""
        if not self.is_converted:
            return
        model = with_rounding_keys(self.model, key)
        measured = eqx.filter_jit(quantization_statistics)(model, step.loss_fn, batch)
        self.statistics = {"saturation": float(measured.saturation), "underflow": float(measured.underflow)}

    def train(self, step: TrainStep, batch: jax.Array, key: jax.Array) -> None:
        """One step; its loss and duration are recorded.

        Args:
            step: The training step.
            batch: Its bytes.
            key: The random key for recipes with stochastic rounding.

        Raises:
            FloatingPointError: If the loss is not finite.
        """
        start = time.perf_counter()
        *state, metrics = step(self.model, self.opt_state, batch, key=key)
        # XLA may divide results otherwise than arguments; the next step would then be another program.
        self.model, self.opt_state = self.layout.divided(tuple(state))
        # Reading the numbers waits for the device, so this times the step, not its dispatch.
        loss = float(metrics["loss"])
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss)
        if not np.isfinite(self.losses[-1]):
            raise FloatingPointError(
                f"the loss of {self.name} is {self.losses[-1]} in step {len(self.losses)}; "
                "lower --learning-rate or --clip-norm"
            )


def make_runs(options: argparse.Namespace, step: TrainStep, layout: Layout, done: int = 0) -> list[Run]:
    """The models to train side by side, all from the same initialization, with fresh optimizer states.

    Args:
        options: The flags.
        step: The training step, which makes the optimizer state.
        layout: The devices to train on.
        done: The number of completed steps, which decides whether the FP8 models are converted at this point.

    Raises:
        ValueError: If the model's sizes do not fit together, or `--exclude` names no layer.
    """
    exclude = (*options.exclude, *(() if options.convert_head else ("head",)))
    configs: dict[str, Fp8Config | None] = {}
    if not options.no_baseline:
        configs[BASELINE_NAMES[options.compute_dtype]] = None
    for name, recipe in recipes(options).items():
        configs[f"fp8 {name}"] = Fp8Config(recipe=recipe, exclude=(*exclude, *LEFT_ALONE.get(name, ())))
    runs = []
    for name, config in configs.items():
        # Made separately for each, so that a step with `donate=True` would not free another model's weights.
        sizes = model_config(options)
        if config is not None and options.compress_activations:
            sizes = dataclasses.replace(sizes, activation=compressed(swiglu))
        model = Transformer.init(sizes, key=jax.random.key(options.seed))
        model = layout.divided(model)
        runs.append(Run(name, model, layout.divided(step.init(model)), config, layout))
        runs[-1].set_converted(done > 0 and is_fp8_step(options, done - 1))
    return runs


def is_fp8_step(options: argparse.Namespace, index: int) -> bool:
    """Whether the FP8 models are converted in the step with this index (from 0)."""
    return options.fp8_after <= index and (options.fp8_until is None or index < options.fp8_until)


def next_token_loss(model: Transformer, tokens: hax.NamedArray) -> jax.Array:
    """Mean cross-entropy in nats of each token given those before it.

    Args:
        model: The model, in any dtype; the cross-entropy is computed in float32.
        tokens: Integers `(..., position)`: the first `position - 1` are read, the last `position - 1` predicted.

    Returns:
        A scalar, float32.
    """
    logits = model(tokens["position", :-1]).astype(jnp.float32)
    targets = hnn.one_hot(tokens["position", 1:], model.config.Vocab, dtype=jnp.float32)
    loss = hnn.cross_entropy_loss(logits, model.config.Vocab, targets)
    assert isinstance(loss, hax.NamedArray)
    return loss.scalar()


def make_loss(options: argparse.Namespace) -> Callable[[Transformer, jax.Array], jax.Array]:
    """The loss of bytes `(batch, position)`, computed in `--compute-dtype`."""

    def loss(model: Transformer, batch: jax.Array) -> jax.Array:
        tokens = hax.named(batch, ("batch", "position"))
        return next_token_loss(cast_params(model, options.compute_dtype), tokens)

    return loss


def make_optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW after global-norm clipping; the learning rate warms up linearly, then decays along half a cosine."""
    warmup = options.steps // 10 if options.warmup is None else options.warmup
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else options.learning_rate,
        peak_value=options.learning_rate,
        warmup_steps=warmup,
        decay_steps=options.steps,
        end_value=options.learning_rate * options.final_fraction,
    )
    adamw = optax.adamw(
        schedule,
        b1=options.beta1,
        b2=options.beta2,
        eps=options.adam_eps,
        weight_decay=options.weight_decay,
        mask=_decayed,
    )
    return optax.chain(optax.clip_by_global_norm(options.clip_norm), adamw)


def _decayed(params: Any) -> Any:
    """True for weights that decay: all but those of the norms."""

    def is_norm(node: Any) -> bool:
        return isinstance(node, hnn.RmsNorm)

    return jax.tree.map(lambda node: jax.tree.map(lambda _: not is_norm(node), node), params, is_leaf=is_norm)


def make_evaluation(options: argparse.Namespace, corpus: Corpus, layout: Layout) -> Callable[[Transformer], float]:
    """The mean validation loss of a model, over the same batches every time.

    Raises:
        ValueError: If the validation text is too short for one batch.
    """
    batches = corpus.validation_batches(options.batch_size, options.seq_len, options.eval_batches)
    loss = eqx.filter_jit(make_loss(options))
    return lambda model: float(np.mean([float(loss(model, layout.batch(batch))) for batch in batches]))
