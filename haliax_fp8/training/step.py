"""TrainStep: one optimizer step for a converted model, jitted."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jaxtyping import Array, Key, PyTree

from .._arguments import require_bool
from .._jax.errors import explained_by
from .._numerics.rounding import Rounding
from ..devices.device import Device
from ..devices.xla_flags import XlaFlags
from ..layers.checks import (
    require_no_quantized_kernels,
    require_usable_tables,
    require_weights,
    require_whole_model,
    require_whole_state,
)
from ..layers.config import Fp8Config, default_rules
from ..layers.describe import describe, recipes_of
from ..layers.quantized_kernels import quantize_kernels
from ..layers.rule import LayerRule
from ..layers.walk import all_ops, is_op
from ..recipes.compiler_options import log_cost_of_flags, training_options
from ..recipes.recipe import Recipe
from ..recipes.scaling import AmaxHistory
from .calibration import recorded, require_recorded, require_usable, with_next_states
from .microbatches import (
    BatchGradients,
    KernelQuantization,
    ReduceOnce,
    StepInput,
    gradients_of_batch,
)
from .monitor import CountedState, Monitor, Plan, counted
from .phases import Phase, as_phases, phase_at, require_counted, require_phases, restored
from .step_arguments import require_arguments, require_choices, require_key_reaches_loss, require_keys
from .updates import apply_exact_updates, in_float32, require_bfloat16, require_updatable, trainable_part


M = TypeVar("M")


type Metrics = dict[str, Any]


# Libraries should not print, so a one-line summary goes to the logger at INFO when training starts.
_logger = logging.getLogger("haliax_fp8")


class TrainStep(eqx.Module):
    """A training step for any Optax optimizer: gradients, microbatches, update, state.

    Works on models with and without FP8 layers. The optimizer sees the inexact arrays of the model without FP8 state.

    Args:
        loss_fn: `loss_fn(model, *batch)`, the mean loss over the batch: a scalar, or a `NamedArray` without axes. If it
            needs a random key, for example for dropout, `loss_fn(model, *batch, key)`: see `loss_key` below.
        optimizer: Any Optax optimizer.
        microbatches: The number of parts into which the leading axis of every array in the batch is split: part `i`
            has the rows `i`, `i + microbatches`, and so on, so that devices which divide this axis keep their rows. The
            parts run in a `lax.scan`; gradients are averaged, and amaxes combined by maximum.
        donate: Reuses the memory of the model and the optimizer state for the new ones. Anything that shares arrays
            with them, such as the model before conversion, becomes unusable after the step.
        quantize_kernels: Whether each microbatch quantizes the kernels, or the step does so `"once"` for all of them;
            with `"gathered_once"` it also gathers them once, if each device holds a part.
        reduce_gradients: `ReduceOnce(over="data")` adds up gradients on each device, and over devices once per step, in
            the dtype that it names. None leaves it to XLA: in the products' dtype, under FSDP in each microbatch.
        parameter_rounding: How the sum of a bfloat16 parameter and its update is rounded. `Rounding.STOCHASTIC` trains
            without float32 masters: to nearest, most updates are too small to change a bfloat16 number, while rounded
            up or down at random they arrive whole on average. Every step then needs a `key`, and the optimizer sees
            parameters and gradients in float32, so that its state and updates are float32 too.
        rules: The `Fp8Config(rules=...)` with which the model was converted, to find the kernels of your own layer
            classes.
        has_aux: Whether `loss_fn` returns `(loss, aux)`, as in `eqx.filter_value_and_grad`. `aux`, any tree, is then
            `metrics["aux"]`. With microbatches, its arrays have one more leading axis, with the results of each
            microbatch in turn (in a `NamedArray`, the axis "microbatch"): take the mean, the sum or the last, as fits.
        recompute_in_scans: Whether the bodies of the loss's scans compute elementwise work again in the backward pass,
            as in `filter_grad`. Turn it off for debuggers, which would see a checkpoint.
        monitor: What to measure in some steps, such as `haliax_fp8.statistics.every(100)`; None measures nothing. Its
            numbers are in `metrics` of these steps. The optimizer's state then counts steps.
        phases: Recipes from one step to another, such as `[Phase(0, None), Phase(1000)]` for a beginning in high
            precision; see `Phase`. Each is a compiled program. The optimizer's state counts steps, so that a resumed
            run is in its phase.

    Raises:
        ValueError: If `quantize_kernels` is not a `KernelQuantization` or the name of one, `rules` is not a tuple of
            rules, `phases` are not in order from 0, or `donate`, `has_aux` or `recompute_in_scans` is not a bool. When
            called: if another argument is not what it must be, `microbatches` does not divide a batch, `opt_state`
            belongs to another model, or model or `opt_state` were given to an earlier step with `donate=True`; if `key`
            is missing for `parameter_rounding` or is meant for `loss_fn`; if the model lacks its state, has quantized
            kernels or uncalibrated static scales; inside `jit` with a monitor or several phases; if a phase does not
            fit the model, or `opt_state` does not say its step; with `quantize_kernels="once"` and `"gathered_once"`
            also where the function `quantize_kernels` raises.

    Example:
        >>> step = TrainStep(loss_fn, optax.adamw(1e-3))
        >>> opt_state = step.init(model)
        >>> model, opt_state, metrics = step(model, opt_state, x)
        >>> sorted(metrics)
        ['grad_norm', 'loss']
    """

    loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation | optax.MultiSteps
    microbatches: int = eqx.field(default=1, static=True)
    donate: bool = eqx.field(default=False, static=True)
    quantize_kernels: KernelQuantization | str = eqx.field(
        default=KernelQuantization.IN_EACH_MICROBATCH, static=True, converter=KernelQuantization
    )
    reduce_gradients: ReduceOnce | None = eqx.field(default=None, static=True)
    parameter_rounding: Rounding = eqx.field(default=Rounding.TO_NEAREST, static=True)
    rules: tuple[LayerRule, ...] = eqx.field(default=default_rules, static=True)
    has_aux: bool = eqx.field(default=False, static=True)
    recompute_in_scans: bool = eqx.field(default=True, static=True)
    monitor: Monitor | None = eqx.field(default=None, static=True)
    phases: tuple[Phase, ...] = eqx.field(default=(), static=True, converter=as_phases)

    def __check_init__(self) -> None:
        for name in ("donate", "has_aux", "recompute_in_scans"):
            require_bool(name, getattr(self, name), of="TrainStep")
        # Raises a ValueError unless they are rules.
        Fp8Config(rules=self.rules)

    @explained_by(require_choices)
    def init(self, model: PyTree) -> PyTree:
        """The optimizer's state for the trainable part of the model.

        Logs one line, `describe(model).summary`, at level INFO to the logger `haliax_fp8`. On NVIDIA GPUs it logs
        another if the XLA flags in the environment cost FP8 or its accumulation precision.

        Raises:
            ValueError: If a step could not train the model: it was made by `serving.quantize_for_inference`, its state
                was changed or is in another part, or it has quantized kernels; or if `parameter_rounding` is stochastic
                and it has no parameters in bfloat16, or some in float16; or if the optimizer has a tree of labels
                that Optax calls, because it is a model; or if a phase does not fit the model.
        """
        require_whole_model(model, "step.init(model)")
        require_weights(model, "model", "Train the model that it was made from")
        if _logger.isEnabledFor(logging.INFO) and not is_op(model):
            _logger.info(describe(model).summary)
        require_updatable(model)
        if self.parameter_rounding.needs_key:
            reason = f"parameter_rounding={self.parameter_rounding} is for bfloat16 parameters"
            require_bfloat16(model, "model", reason)
        require_phases(model, self.phases, self.rules)
        flags = XlaFlags.of_environment().with_options(self.compiler_options(model))
        log_cost_of_flags(flags, Device.default(), recipes_of(model))
        opt_state = self.optimizer.init(self._for_optimizer(trainable_part(model)))
        return counted(opt_state)._replace(plan=Plan(self.phases)) if self._counts else opt_state

    def phase(self, opt_state: PyTree) -> Phase | None:
        """The phase that the next step is in, for a progress line; None for a step without phases.

        Args:
            opt_state: As in a step.
        """
        if len(self.phases) > 1:
            require_counted(opt_state, self.phases)
            return phase_at(self.phases, int(opt_state.steps))
        return self.phases[0] if self.phases else None

    def compiler_options(self, model: PyTree, *_: Any, device: Device | None = None) -> dict[str, bool]:
        """The XLA options that a step of this model is compiled with, in addition to the environment's flags.

        On NVIDIA GPUs they restrict products to cuBLASLt, so that gradients accumulate in full float32. Inside another
        `jit`, only the outer options count, and a step passes none.

        Args:
            model: The model.
            *_: The other arguments of a step; ignored.
            device: Where the step runs; by default the device that JAX uses.
        """
        models = [phase.applied(model, self.rules) for phase in self.phases] or [model]
        return training_options(recipes_of(models), Device.default() if device is None else device)

    @explained_by(require_choices)
    def calibrate(
        self, model: M, *batch: Any, key: Key[Array, ""] | None = None, loss_key: Key[Array, ""] | None = None
    ) -> M:
        """The model with its state filled from a pass in high precision over this step's own microbatches.

        Adds to every history what the first step would record if it ran in high precision: one amax, the largest over
        the microbatches. Scales then fit from the first step on. Call it again with another batch for another entry.

        Args:
            model: The model. If it has no state, because its recipe keeps none or it is not converted, it is returned
                unchanged, so a script for several recipes needs no special case.
            *batch: As in a step.
            key: As in a step.
            loss_key: As in a step.

        Returns:
            The model with new state; parameters, and the arrays of the given model, do not change.

        Raises:
            ValueError: As in a step; or if the batch holds NaN or infinities, or is zero everywhere, or if no layer has
                recorded its input.

        Example:
            >>> step = TrainStep(loss_fn, optax.adamw(1e-3), microbatches=2)
            >>> fp8_model = fp8_linear_layers(model)
            >>> fp8_model = step.calibrate(fp8_model, x)
            >>> bool((fp8_model.layers[0].dot_general.scale("output_grad") < 1.0).all())
            True
        """
        require_key_reaches_loss(self.loss_fn, batch, key, loss_key)
        require_no_quantized_kernels(model)
        inputs = StepInput(batch, key, loss_key)
        require_usable(batch, "batch")
        model = recorded(model, lambda observed: _overwrites((self._program(None, None), inputs), observed))
        require_recorded(model)
        return model

    @explained_by(require_arguments)
    def __call__(
        self,
        model: M,
        opt_state: PyTree,
        *batch: Any,
        key: Key[Array, ""] | None = None,
        loss_key: Key[Array, ""] | None = None,
    ) -> tuple[M, PyTree, Metrics]:
        """One step.

        Args:
            model: The model.
            opt_state: From `init`, or from the previous step.
            *batch: The arguments of `loss_fn` after the model.
            key: A new key in each step, for recipes with stochastic rounding, see `with_rounding_keys`, and for
                `parameter_rounding`.
            loss_key: A new key in each step, for losses with dropout or other random numbers; `loss_fn` gets it as its
                argument `key`. With microbatches, each gets one of `jax.random.split(loss_key, microbatches)`.

        Returns:
            The new model, the new optimizer state, and metrics: `loss`, `grad_norm` (over parameters, before clipping,
            in float32), `aux` with `has_aux`, and the monitor's numbers if it measured in this step. With delayed
            scaling also `output_grad_amax_ratio`: the largest amax of an output gradient, divided by the largest value
            that its scale could hold. Somewhat above 1 is usual; far above, gradients were clipped and are too small.
        """
        require_keys(self, batch, key, loss_key)
        optimizer_state = opt_state.optimizer if isinstance(opt_state, CountedState) else opt_state
        leaves, structure = jax.tree.flatten((model, optimizer_state))
        nested = any(isinstance(x, Tracer) for x in (*leaves, *jax.tree.leaves((batch, key, loss_key))))
        if self._counts and nested:
            counted(opt_state, nested=True)
        phase = self.phase(opt_state)
        ops = _checked_ops(structure, self.phases, phase, self.rules)
        require_usable_tables(model, [leaves[position] for position in ops.tables])
        inputs = StepInput(batch, key, loss_key)
        options = {} if nested else training_options(ops.recipes, Device.default())
        compiled = _step(self.donate, tuple(options.items()))
        if self._counts:
            opt_state = counted(opt_state)
        if phase is not None and len(self.phases) > 1 and int(opt_state.steps) == phase.start:
            _logger.info("%s", phase)
        due = self.monitor if self.monitor is not None and self.monitor.is_due(int(opt_state.steps)) else None
        program = self._program(due, phase)
        new, new_optimizer, metrics, measured = compiled((program, inputs), leaves, structure)
        # What is static in a compiled step is that of the first model: a model's reasons are those that it came with.
        of_model, _ = structure.children()
        count = of_model.num_leaves
        model = jax.tree.unflatten(of_model, new[:count])
        optimizer_state = jax.tree.unflatten(new_optimizer, new[count:])
        if due is not None:
            metrics = metrics | due.metrics(measured, due.prefix)
        if isinstance(opt_state, CountedState):
            optimizer_state = CountedState(opt_state.steps + 1, optimizer_state, Plan(self.phases))
        return model, optimizer_state, metrics

    def _for_optimizer[T](self, tree: T) -> T:
        """Parameters or gradients in the dtype in which the optimizer sees them."""
        return in_float32(tree) if self.parameter_rounding.needs_key else tree

    @property
    def _counts(self) -> bool:
        """Whether the number of a step decides which program it runs."""
        return self.monitor is not None or len(self.phases) > 1

    def _program(self, monitor: Monitor | None, phase: Phase | None) -> "TrainStep":
        """The step that one program is compiled from. Phases that differ in their first step alone share it."""
        phases = () if phase is None else (dataclasses.replace(phase, start=0),)
        if (monitor, phases) == (self.monitor, self.phases):
            return self
        return dataclasses.replace(self, monitor=monitor, phases=phases)


class _Ops(NamedTuple):
    """What a step has to know of a model's FP8 ops. The structure of the model decides all of it.

    Args:
        recipes: Their recipes in the phase of the step, each once.
        tables: The positions of their tables among the leaves.
    """

    recipes: tuple[Recipe, ...]
    tables: tuple[int, ...]


@functools.lru_cache
def _checked_ops(structure: Any, phases: tuple[Phase, ...], phase: Phase | None, rules: tuple[LayerRule, ...]) -> _Ops:
    """The ops of a model, from the structure of `(model, opt_state)`. Only the first step of a phase looks for them.

    Raises:
        ValueError: If the structure says that a step cannot train the model: it has quantized kernels, or its state is
            in another part, or a phase does not fit it.
    """
    # Every leaf becomes its position.
    model, _ = jax.tree.unflatten(structure, range(structure.num_leaves))
    require_no_quantized_kernels(model)
    require_whole_state(model)
    require_phases(model, phases, rules)
    tables: list[Any] = [op.state.table.array for op in all_ops(model) if op.state is not None]
    # Static scales may be in another part.
    recipes = recipes_of(model if phase is None else phase.applied(model, rules))
    return _Ops(tuple(recipes), tuple(position for position in tables if position is not None))


def fp8_train_step(
    not_donated: tuple[TrainStep, StepInput], leaves: list[Any], structure: Any
) -> tuple[list[Any], Any, Metrics, Any]:
    """One step. Model and optimizer state are flat: Equinox would flatten and rebuild the trees several times.

    Returns:
        The leaves of the new model and optimizer state, the structure of the latter, metrics, and the monitor's
        measurements.
    """
    step, inputs = not_donated
    model, opt_state = jax.tree.unflatten(structure, leaves)
    batch_gradients, measured = _gradients(step, inputs, model)
    params = step._for_optimizer(trainable_part(model))
    updates, opt_state = step.optimizer.update(step._for_optimizer(batch_gradients.gradients), opt_state, params)
    # Squares of float16 gradients are 0 below 2e-4 and infinite above 256; sums of bfloat16 ones stop growing.
    metrics = {"loss": batch_gradients.loss, "grad_norm": optax.tree.norm(in_float32(batch_gradients.gradients))}
    metrics |= _output_grad_amax_ratio(model, batch_gradients.overwrites)
    if step.has_aux:
        metrics["aux"] = batch_gradients.aux
    key = inputs.key if step.parameter_rounding.needs_key else None
    model = apply_exact_updates(model, updates, batch_gradients.overwrites, key)
    leaves, of_optimizer = jax.tree.flatten(opt_state)
    return [*jax.tree.leaves(model), *leaves], of_optimizer, metrics, measured


def _output_grad_amax_ratio(model: Any, overwrites: Any) -> Metrics:
    """The largest amax of an output gradient over what its scale could hold, under its name; nothing without any."""
    ratios = [
        jnp.max(new.amax_history("output_grad")[..., 0] / (op.scale("output_grad") * op.recipe.output_grad.format.max))
        for op, new in zip(all_ops(model), all_ops(overwrites), strict=True)
        if isinstance(op.recipe.output_grad.scaling.memory, AmaxHistory)
        and new.state is not None
        and new.state.table.array is not None
    ]
    # What a step did not reach has `-inf`.
    return {"output_grad_amax_ratio": functools.reduce(jnp.maximum, ratios, jnp.float32(0.0))} if ratios else {}


@functools.cache
def _step(donate: bool, options: tuple[tuple[str, bool], ...]) -> Callable[..., Any]:
    """The compiled step. One for all instances, so that equal ones share compiled code."""
    # `jax.jit` accepts it, but Equinox's types do not declare it.
    for_jax: dict[str, Any] = {"compiler_options": dict(options)}
    return eqx.filter_jit(fp8_train_step, donate="all-except-first" if donate else "none", **for_jax)


@eqx.filter_jit
def _overwrites(not_donated: tuple[TrainStep, StepInput], model: Any) -> Any:
    """The part of a step's gradients that replaces state, with the states of the next step."""
    return with_next_states(model, _gradients(*not_donated, model)[0].overwrites)


def _gradients(step: TrainStep, inputs: StepInput, model: Any) -> tuple[BatchGradients, Any]:
    """Loss and gradients of a step's batch, in its one phase, if any; and its monitor's measurements."""
    of_phase = model
    for phase in step.phases:
        of_phase = phase.applied(of_phase, step.rules)
    evaluated = of_phase if step.monitor is None else step.monitor.measuring(of_phase, step.rules)
    # When mapped over devices' parts, each product would quantize its kernel for every part, and XLA would gather it in
    # high precision.
    once = step.quantize_kernels is not KernelQuantization.IN_EACH_MICROBATCH or step.reduce_gradients is not None
    if once:
        gather = step.quantize_kernels is KernelQuantization.GATHERED_ONCE
        evaluated = quantize_kernels(evaluated, gather=gather, rules=step.rules)
    gradients = gradients_of_batch(
        step.loss_fn,
        evaluated,
        inputs,
        step.microbatches,
        reduction=step.reduce_gradients,
        has_aux=step.has_aux,
        recompute_in_scans=step.recompute_in_scans,
    )
    measured = None if step.monitor is None else step.monitor.measured(gradients.overwrites)

    def of_model(tree: Any) -> Any:
        """Gradients as those of the model, which the optimizer knows."""
        if step.monitor is not None:
            tree = step.monitor.without_measurements(tree, of_phase)
        return restored(tree, model) if step.phases else tree

    overwrites, others = of_model(gradients.overwrites), of_model(gradients.gradients)
    return BatchGradients(gradients.loss, gradients.aux, overwrites, others), measured
