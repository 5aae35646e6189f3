"""TrainStep: one optimizer step for a converted model, jitted."""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Key, PyTree

from .._jax.constraint import whole_in_front
from ..devices.device import Device
from ..devices.xla_flags import XlaFlags
from ..layers.config import Fp8Config
from ..layers.default import default_rules
from ..layers.description import describe, recipes_of
from ..layers.own_state import require_own_state
from ..layers.quantized_kernels import quantize_kernels, require_no_kernel_copies
from ..layers.rule import LayerRule
from ..layers.uncalibrated import require_calibrated
from ..recipes.compiler_options import log_cost_of_flags, training_options
from .calibration import recorded
from .gradients import filter_value_and_grad
from .kernel_quantization import KernelQuantization, as_kernel_quantization
from .keys import require_step_key, with_rounding_keys
from .loss import scalar_loss
from .updates import accumulate_gradients, apply_updates, common_dtype, partition_for_grad_overwrite, trainable


M = TypeVar("M")


type Metrics = dict[str, Float[Array, ""]]


# A library does not print. At logging level INFO, users see once, when training begins, what is active.
_logger = logging.getLogger("haliax_fp8")


class TrainStep(eqx.Module):
    """A training step for any Optax optimizer: gradients, microbatches, update, state.

    Works on models with and without FP8 layers. The optimizer sees the inexact arrays of the model without FP8 state.

    Args:
        loss_fn: `loss_fn(model, *batch)`, the mean loss over the batch: a scalar, or a `NamedArray` without axes. Keys
            that it needs, for example for dropout, are part of the batch.
        optimizer: Any Optax optimizer.
        microbatches: The number of parts into which the leading axis of every array in the batch is split: part `i`
            has the rows `i`, `i + microbatches`, and so on, so that devices which divide this axis keep their rows. The
            parts run in a `lax.scan`; gradients are averaged, and amaxes combined by maximum. For a key per part, put
            `jax.random.split(key, microbatches)` into the batch; the loss gets an array with one key.
        donate: Reuses the memory of the model and the optimizer state for the new ones. Anything that shares arrays
            with them, such as the model before conversion, becomes unusable after the step.
        quantize_kernels: Whether each microbatch quantizes the kernels, or the step does it `"once"` for all of them;
            with `"gathered_once"` it also gathers them once, for devices that each hold a part.
        rules: Those of `Fp8Config(rules=...)` that the model was converted with, to find the kernels of your own layer
            classes.

    Raises:
        ValueError: If `loss_fn` is not a function, `optimizer` is not an optimizer, `microbatches` is not an integer
            of at least 1, `quantize_kernels` is not a `KernelQuantization` or the name of one, or `rules` is not a
            tuple of rules. When called, if `microbatches` does not divide a batch, if `loss_fn` returns anything but
            one number, if `opt_state` belongs to another model, if `key` is not a single key or is meant for
            `loss_fn`, or if the model has quantized kernels, or static scales that are not calibrated; with
            `quantize_kernels="once"` and `"gathered_once"` also as the function `quantize_kernels` does.

    Example:
        >>> step = TrainStep(loss_fn, optax.adamw(1e-3))
        >>> opt_state = step.init(model)
        >>> model, opt_state, metrics = step(model, opt_state, x)
        >>> sorted(metrics)
        ['grad_norm', 'loss']
    """

    loss_fn: Callable[..., Float[Array, ""]]
    optimizer: optax.GradientTransformation | optax.MultiSteps
    microbatches: int = eqx.field(default=1, static=True)
    donate: bool = eqx.field(default=False, static=True)
    quantize_kernels: KernelQuantization | str = eqx.field(
        default=KernelQuantization.IN_EACH_MICROBATCH, static=True, converter=as_kernel_quantization
    )
    rules: tuple[LayerRule, ...] = eqx.field(default=default_rules, static=True)

    def __check_init__(self) -> None:
        _require_loss_and_optimizer(self.loss_fn, self.optimizer)
        if not isinstance(self.microbatches, int) or isinstance(self.microbatches, bool) or self.microbatches < 1:
            raise ValueError(
                f"microbatches={self.microbatches!r} must be an integer of at least 1: into how many parts a step "
                "splits its batch"
            )
        if not isinstance(self.donate, bool):
            raise ValueError(f"donate={self.donate!r} must be True or False")
        # Raises unless they are rules.
        Fp8Config(rules=self.rules)

    def init(self, model: PyTree) -> PyTree:
        """The optimizer's state for the trainable part of the model.

        Logs one line, `describe(model).summary`, at level INFO to the logger `haliax_fp8`. On NVIDIA GPUs it logs
        another if the XLA flags in the environment cost FP8 or its accumulation precision.
        """
        if _logger.isEnabledFor(logging.INFO):
            _logger.info(describe(model).summary)
        require_own_state(model)
        require_no_kernel_copies(model)
        flags = XlaFlags.of_environment().with_options(self.compiler_options(model))
        log_cost_of_flags(flags, Device.default(), recipes_of(model))
        return self.optimizer.init(trainable(model))

    def compiler_options(self, model: PyTree, *_: Any, device: Device | None = None) -> dict[str, bool]:
        """The XLA options that a step of this model is compiled with, besides the flags of the environment.

        On NVIDIA GPUs they restrict products to cuBLASLt, so that gradients accumulate in full float32. Inside another
        `jit`, only the outer options count, and a step passes none.

        Args:
            model: The model.
            *_: The other arguments of a step; ignored.
            device: Where the step runs; by default the device that JAX uses.
        """
        return training_options(recipes_of(model), Device.default() if device is None else device)

    def calibrate(self, model: M, *batch: Any, key: Key[Array, ""] | None = None) -> M:
        """The model with its state filled from a pass in high precision over this step's own microbatches.

        Adds to every history what the first step would record if it ran in high precision: one amax, the largest over
        the microbatches. Scales then fit from the first step on. Call it again with another batch for another entry.

        Args:
            model: The model. If it has no state, because its recipe keeps none or it is not converted, it is returned
                unchanged, so a script for several recipes needs no special case.
            *batch: As in a step.
            key: As in a step.

        Returns:
            The model with new state; parameters, and the arrays of the given model, do not change.

        Raises:
            ValueError: As in a step.

        Example:
            >>> step, fp8_model = TrainStep(loss_fn, optax.adamw(1e-3), microbatches=2), fp8_linear_layers(model)
            >>> fp8_model = step.calibrate(fp8_model, x)
            >>> bool((fp8_model.layers[0].dot_general.scale("output_grad") < 1.0).all())
            True
        """
        require_step_key(key, self.loss_fn, batch)
        require_no_kernel_copies(model)
        return recorded(model, lambda observed: _overwrites((self, batch, key), observed))

    def __call__(
        self, model: M, opt_state: PyTree, *batch: Any, key: Key[Array, ""] | None = None
    ) -> tuple[M, PyTree, Metrics]:
        """One step.

        Args:
            model: The model.
            opt_state: From `init`, or from the step before.
            *batch: The arguments of `loss_fn` after the model.
            key: For recipes with stochastic rounding: a new one in each step. See `with_rounding_keys`.

        Returns:
            The new model, the new optimizer state, and `loss` and `grad_norm` (over parameters, before clipping).
        """
        require_step_key(key, self.loss_fn, batch)
        # Without waiting for the step before: the model that it got was checked already.
        require_calibrated(model, wait=False)
        require_own_state(model, wait=False)
        require_no_kernel_copies(model)
        nested = any(isinstance(x, Tracer) for x in jax.tree.leaves((model, opt_state, batch)))
        options = {} if nested else self.compiler_options(model)
        return _step(self.donate, tuple(options.items()))((self, batch, key), model, opt_state)


def _require_loss_and_optimizer(loss_fn: Any, optimizer: Any) -> None:
    def is_optimizer(x: Any) -> bool:
        return not isinstance(x, type) and all(callable(getattr(x, name, None)) for name in ("init", "update"))

    if is_optimizer(loss_fn) and callable(optimizer):
        raise ValueError("loss_fn and optimizer are swapped; use TrainStep(loss_fn, optimizer)")
    if not callable(loss_fn):
        raise ValueError(f"loss_fn={loss_fn!r} is not a function; give one that is called as loss_fn(model, *batch)")
    if not is_optimizer(optimizer):
        called = "; call it to make one" if callable(optimizer) else ""
        raise ValueError(
            f"optimizer={optimizer!r} is not an optimizer{called}; use one from optax, such as optax.adamw(1e-3)"
        )


def _run(kept: tuple[TrainStep, tuple[Any, ...], Array | None], model: Any, opt_state: Any) -> tuple[Any, Any, Metrics]:
    step, batch, key = kept
    loss, overwrites, gradients = _loss_and_gradients(model, step, batch, key)
    params = trainable(model)
    try:
        updates, opt_state = step.optimizer.update(gradients, opt_state, params)
    except (ValueError, TypeError) as error:
        if jax.tree.structure(opt_state) == jax.tree.structure(jax.eval_shape(step.optimizer.init, params)):
            raise
        raise ValueError(
            "opt_state does not belong to this model and optimizer: the trees differ. Create it with step.init(model); "
            "if the model was converted during training, keep the moments with "
            "opt_state = transfer_optimizer_state(opt_state, old_model, model)"
        ) from error
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(gradients)}
    return apply_updates(model, updates, overwrites), opt_state, metrics


@functools.cache
def _step(donate: bool, options: tuple[tuple[str, bool], ...]) -> Callable[..., Any]:
    """The compiled step. One for all instances, so that equal ones share compiled code."""
    # `jax.jit` takes it, but Equinox's types do not declare it.
    for_jax: dict[str, Any] = {"compiler_options": dict(options)}
    return eqx.filter_jit(_run, donate="all-except-first" if donate else "none", **for_jax)


@eqx.filter_jit
def _overwrites(kept: tuple[TrainStep, tuple[Any, ...], Array | None], model: Any) -> Any:
    """The part of a step's gradients that replaces state."""
    return _loss_and_gradients(model, *kept)[1]


def _loss_and_gradients(
    model: Any, step: TrainStep, batch: tuple[Any, ...], key: Array | None
) -> tuple[Array, Any, Any]:
    def loss_fn(model: Any, batch: tuple[Any, ...], key: Array | None) -> Array:
        return scalar_loss(step.loss_fn(model if key is None else with_rounding_keys(model, key), *batch))

    value_and_grad = filter_value_and_grad(loss_fn)
    count, evaluated = step.microbatches, model
    if step.quantize_kernels is not KernelQuantization.IN_EACH_MICROBATCH:
        gather = step.quantize_kernels is KernelQuantization.GATHERED_ONCE
        evaluated = quantize_kernels(model, Fp8Config(rules=step.rules), gather=gather)
    if count == 1:
        loss, gradients = value_and_grad(evaluated, batch, key)
        return loss, *partition_for_grad_overwrite(gradients)

    def split(x: Array) -> Array:
        if x.ndim == 0 and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"the batch has a single random key, which cannot be split into microbatches={count}; pass one for "
                f"each, jax.random.split(key, {count}), and take key[0] in loss_fn"
            )
        if x.ndim == 0 or x.shape[0] % count:
            raise ValueError(
                f"microbatches={count} does not divide the leading axis of a batch array of shape {x.shape}"
            )
        # Devices that divide the leading axis keep their rows: the outer part of a divided axis stays divided.
        parts = x.reshape(x.shape[0] // count, count, *x.shape[1:])
        return whole_in_front(jnp.swapaxes(parts, 0, 1))

    arrays, rest = eqx.partition(batch, eqx.is_array)
    arrays = jax.tree.map(split, arrays)

    keys = None if key is None else jax.random.split(key, count)

    def microbatch(arrays: Any) -> tuple[Array, Any]:
        arrays, key = arrays
        loss, gradients = value_and_grad(evaluated, eqx.combine(arrays, rest), key)
        # Sums of bfloat16 gradients stop growing after a few hundred terms.
        return loss, jax.tree.map(lambda g: g.astype(common_dtype(g.dtype, np.dtype(np.float32))), gradients)

    def accumulate(carry: tuple[Array, Any], arrays: Any) -> tuple[tuple[Array, Any], None]:
        loss, gradients = microbatch(arrays)
        return (carry[0] + loss, accumulate_gradients(carry[1], gradients)), None

    first = microbatch(jax.tree.map(lambda x: x[0], (arrays, keys)))
    (loss, gradients), _ = jax.lax.scan(accumulate, first, jax.tree.map(lambda x: x[1:], (arrays, keys)))
    overwrites, gradients = partition_for_grad_overwrite(gradients)
    gradients = jax.tree.map(lambda g, p: (g / count).astype(p.dtype), gradients, trainable(model))
    return loss / count, overwrites, gradients
