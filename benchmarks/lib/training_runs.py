"""One model trained on one seed, in bf16 or in FP8: what `recipes_train_like_bf16.py` compares."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import haliax_fp8 as fp8
from haliax_fp8.training import quantized_state
from lib.training_tasks import AbstractTask


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What happens to all variants alike.

    Args:
        steps: Steps.
        every: The number of steps between two validations; divides `steps`.
        learning_rate: At its peak, after a tenth of the steps.
        decay: What the learning rate does after that: `cosine`, half a one; `constant`, nothing.
        loss_scales: By what the loss of each step is multiplied, and its gradients divided again: `constant` by 1;
            `growing` by 1.1 more in each step, at most by 1.1**200; `spikes` by 2**16 in every tenth step. Exact
            arithmetic gives the same with all three: what differs are the amaxes of gradients.
    """

    steps: int = 200
    every: int = 100
    learning_rate: float = 3e-3
    decay: str = "cosine"
    loss_scales: str = "constant"

    def learning_rates(self) -> np.ndarray:
        """One for each step."""
        end = {"cosine": 0.0, "constant": self.learning_rate}[self.decay]
        rate = optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, self.steps // 10, self.steps, end)
        # The schedule begins at 0, a step that changes nothing.
        return np.asarray(rate(np.arange(self.steps) + 0.5), np.float32)

    def scales(self) -> np.ndarray:
        """One for each step."""
        step = np.arange(self.steps)
        scales = {
            "constant": np.ones(self.steps),
            "growing": 1.1 ** np.minimum(step, 200),
            "spikes": np.where(step % 10 == 9, 2.0**16, 1.0),
        }
        return scales[self.loss_scales].astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a model is trained.

    Args:
        config: How it is converted; None leaves it in the task's dtype.
        calibrated: Whether its state is filled from the next batch, wherever it is converted.
        ulp: Whether all weights start one ulp of float32 above those of the seed: the noise floor.
        moments_in_fp8: Whether the optimizer's moments are stored by `quantized_state`.
        bf16_weights: Whether weights are in bfloat16, and rounded stochastically, instead of in float32.
        share: Of the schedule's steps: the learning rate decays over so many.
        switches: Shares of the steps after which it is converted anew, in order, each with its configuration. State
            starts afresh; weights and the optimizer's moments stay.
    """

    config: fp8.Fp8Config | None = None
    calibrated: bool = False
    ulp: bool = False
    switches: tuple[tuple[float, fp8.Fp8Config | None], ...] = ()
    moments_in_fp8: bool = False
    bf16_weights: bool = False
    share: float = 1.0

    @property
    def optimizer(self) -> Any:
        """AdamW; the learning rate is an argument of each step, so that all share one program."""
        return MOMENTS_IN_FP8 if self.moments_in_fp8 else ADAMW


ADAMW = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.scale_by_adam(b2=0.95),
    optax.add_decayed_weights(0.1, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
)
MOMENTS_IN_FP8 = quantized_state(ADAMW)

type Record = dict[str, Any]
"""`losses` of all steps; `validation` and `validation_bf16`, the weights' loss without FP8: pairs of step and loss."""


def train(
    task: AbstractTask,
    schedule: Schedule,
    variant: Variant,
    seed: int,
    advance: Callable[[int], None] = lambda steps: None,
) -> Record:
    """Trains one model to the end, or to the first loss that is not finite.

    Args:
        task: Model and data.
        schedule: Steps and learning rate.
        variant: How it is trained.
        seed: Determines weights and batches; random rounding too.
        advance: Called with the number of steps that were done.
    """
    key = jax.random.key(seed)
    total, schedule = schedule.steps, dataclasses.replace(schedule, steps=round(variant.share * schedule.steps))
    plain = _initial(task, key)
    if variant.ulp:
        plain = jax.tree.map(lambda w: jnp.nextafter(w, jnp.inf) if eqx.is_inexact_array(w) else w, plain)
    if variant.bf16_weights:
        plain = fp8.cast_params(plain, jnp.bfloat16)
    batches, validation = task.batches(seed, schedule.steps), task.validation(seed)
    keys = jax.random.split(jax.random.fold_in(key, 1), schedule.steps)
    inputs = (batches, keys, schedule.learning_rates(), schedule.scales())
    phases = {round(share * schedule.steps): config for share, config in ((0.0, variant.config), *variant.switches)}
    model, moments = plain, variant.optimizer.init(in_float32(fp8.trainable(plain)))
    record: Record = {"losses": [], "validation": [], "validation_bf16": []}
    marks = sorted({*phases, *range(0, schedule.steps, schedule.every), schedule.steps})
    for start, end in zip(marks, marks[1:], strict=False):
        if start in phases:
            old, model = model, _converted(fp8.restore_linear_layers(model), phases[start])
            moments = fp8.transfer_optimizer_state(moments, old, model)
            if variant.calibrated and phases[start] is not None:
                model = fp8.calibrate(model, task.loss, [tuple(jnp.asarray(x[start]) for x in batches)])
        (model, moments), losses = _steps(task.loss, variant.optimizer, (model, moments), _part(inputs, start, end))
        record["losses"] += np.asarray(losses, float).tolist()
        for name, of in (("validation", model), ("validation_bf16", fp8.restore_linear_layers(model))):
            record[name].append((end, float(_evaluate(task.loss, of, validation))))
        advance(end - start)
        if not np.isfinite(record["losses"]).all():
            advance(schedule.steps - end)
            break
    advance(total - schedule.steps)
    return record


def in_float32(tree: Any) -> Any:
    """What the optimizer computes with; nothing changes with weights in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _part(inputs: Any, start: int, end: int) -> Any:
    return jax.tree.map(lambda x: x[start:end], inputs)


@eqx.filter_jit
def _initial(task: AbstractTask, key: jax.Array) -> Any:
    return task.init(key)


def _converted(model: Any, config: fp8.Fp8Config | None) -> Any:
    return model if config is None else fp8.fp8_linear_layers(model, config)


@eqx.filter_jit
def _steps(loss: Callable[..., jax.Array], optimizer: Any, state: Any, inputs: Any) -> tuple[Any, jax.Array]:
    """The training loop as one program, and the loss of each step."""
    arrays, static = eqx.partition(state, eqx.is_array)

    def step(arrays: Any, inputs: Any) -> tuple[Any, jax.Array]:
        (model, moments), (batch, key, rate, scale) = eqx.combine(arrays, static), inputs

        def scaled(model: Any) -> jax.Array:
            return loss(fp8.with_rounding_keys(model, key), *batch) * scale

        value, gradients = fp8.filter_value_and_grad(scaled)(model)
        overwrites, gradients = fp8.partition_for_grad_overwrite(gradients)
        gradients, params = in_float32(gradients), in_float32(fp8.trainable(model))
        gradients = jax.tree.map(lambda g: g / scale, gradients)
        updates, moments = optimizer.update(gradients, moments, params)
        in_bf16 = any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(fp8.trainable(model)))
        updates = jax.tree.map(lambda u: -rate * u, updates)
        model = fp8.apply_updates(model, updates, overwrites, key=key if in_bf16 else None)
        return eqx.filter((model, moments), eqx.is_array), value / scale

    arrays, losses = jax.lax.scan(step, arrays, inputs)
    return eqx.combine(arrays, static), losses


@eqx.filter_jit
def _evaluate(loss: Callable[..., jax.Array], model: Any, batches: Any) -> jax.Array:
    return jax.lax.map(lambda batch: loss(model, *batch), batches).mean()
