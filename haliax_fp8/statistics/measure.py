"""quantization_statistics: what FP8 does to the operands of a model's products."""

import dataclasses
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from ..layers import Fp8DotGeneral, LayerRule, default_rules
from ..layers.checks import calls_users_function, check_not_modified, require_calibrated, require_model
from ..layers.walk import all_ops, is_op, map_layers_in_stacks, named_ops, rule_of
from ..recipes import STATISTICS, AbstractScaling, AmaxHistory, MeasuredScaling
from ..training import OpState, filter_grad, scalar_loss
from .result import ModelStatistics, OpStatistics


@calls_users_function
def quantization_statistics(model: PyTree, loss_fn: Callable[..., Any], *batch: Any) -> ModelStatistics:
    """Runs one forward and backward pass, as training would, and measures every operand of every FP8 product.

    The products and their gradients are those of the model's own recipes; only the measurements are added. It works
    under `jax.jit` and `eqx.filter_jit`, and costs about one more step. An operand that two products quantize
    differently is measured where it is first quantized.

    Args:
        model: A converted model; with keys (`with_rounding_keys`) if a recipe needs them.
        loss_fn: `loss_fn(model, *batch)`, a scalar.
        *batch: The arguments of the loss after the model.

    Returns:
        What `OpStatistics` lists, of input, kernel and output gradient of every op.

    Raises:
        ValueError: If the model has no FP8 op, or static scales that are not calibrated.

    Example:
        >>> measured = quantization_statistics(fp8_linear_layers(model), loss_fn, x)
        >>> float(measured.saturation)
        0.0
        >>> measured["layers.0"].sqnr.shape
        (3,)
    """
    require_model(model, "quantization_statistics(model, loss_fn, *batch)")
    if not all_ops(model):
        raise ValueError("model has no FP8 product to measure; convert it with fp8_linear_layers")
    check_not_modified(model)
    require_calibrated(model)
    gradients = filter_grad(lambda model: scalar_loss(loss_fn(model, *batch)))(measuring(model))
    return statistics_in(gradients)


def statistics_in(gradients: Any) -> ModelStatistics:
    """The statistics that gradients carry.

    Args:
        gradients: The gradients of a model that `measuring` returned, or the part of them that replaces state.
    """
    ops = dict(named_ops(gradients))
    return ModelStatistics(tuple(ops), tuple(map(_statistics, ops.values())))


def measuring[M](model: M, rules: tuple[LayerRule, ...] = default_rules) -> M:
    """The model with ops whose state records statistics in addition.

    Args:
        model: The model.
        rules: The rules of its layers' classes.
    """

    def measure(path: str, layer: Any, stack: tuple[hax.Axis, ...]) -> Any:
        rule = rule_of(layer, rules)
        op = rule.op(layer)
        if op is None:
            return layer
        recipe = op.recipe.measured
        if op.state is not None:
            return rule.with_op(layer, op.with_recipe(recipe))
        # State as conversion makes it: with the axes of the stacks and ensembles that the layer is in.
        made = rule.kernel(layer).init_op(recipe, op.compute_dtype, stack)
        return rule.with_op(layer, dataclasses.replace(op, recipe=recipe, state=made.state))

    def measure_alone(node: Any) -> Any:
        if not isinstance(node, Fp8DotGeneral) or isinstance(node.recipe.input.scaling, MeasuredScaling):
            return node
        return node.with_recipe(node.recipe.measured)

    return jax.tree.map(measure_alone, map_layers_in_stacks(measure, model, rules), is_leaf=is_op)


def without_measurements[T](tree: T, model: Any) -> T:
    """Gradients of a measuring model as the model itself would have them, or a part of them.

    The state of an operand begins with what its scaling keeps without measuring, updated as by itself.

    Args:
        tree: Gradients of `measuring(model)`, or one of the parts that `partition_for_grad_overwrite` gives.
        model: The model.
    """
    of_model = iter(all_ops(model))

    def restore(node: Any) -> Any:
        if not is_op(node):
            return node
        op = next(of_model)
        state = node.state
        if isinstance(state, OpState) and state.table.array is not None:
            state = op.state.with_array(_unmeasured_rows(state, op.state)) if isinstance(op.state, OpState) else None
        return dataclasses.replace(node, recipe=op.recipe, state=state)

    return jax.tree.map(restore, tree, is_leaf=is_op)


def _unmeasured_rows(measured: OpState, unmeasured: OpState) -> Array:
    """The rows of a state without what it measures: shorter, with the same guards."""
    table, columns = measured.array, unmeasured.array.shape[-1] - 1
    axis, rows = table.ndim - 1, []
    for row, scaling in enumerate(unmeasured.scalings):
        width = 1 if scaling.memory is None else len(scaling.memory.first_row)
        values = table[..., row : row + 1, :width]
        padding = jnp.zeros((*values.shape[:-1], columns - width), values.dtype)
        rows.append(lax.concatenate([values, padding, table[..., row : row + 1, -1:]], axis))
    return lax.concatenate(rows, axis - 1)


def _statistics(gradient: Fp8DotGeneral) -> OpStatistics:
    assert isinstance(gradient.state, OpState)
    table, scalings = gradient.state.array, gradient.state.scalings
    rows = []
    for row, scaling in enumerate(scalings):
        assert isinstance(scaling, MeasuredScaling)
        values = scaling.memory.statistics(table[..., row : row + 1, :])
        scale = table[..., row : row + 1, :1]
        # A scale is positive; the gradient of a layer that the loss does not reach has 0 or `-inf` there.
        reached = jnp.isfinite(values) & jnp.isfinite(scale) & (scale > 0.0)
        rows.append(jnp.where(reached, values, jnp.nan))
    measured = jnp.concatenate(rows, axis=-2)
    by_name = {name: measured[..., i] for i, name in enumerate(STATISTICS)}
    return OpStatistics(**by_name, scale_age=_scale_age(table, scalings, by_name["amax"]))


def _scale_age(table: Array, scalings: tuple[AbstractScaling, ...], amax: Array) -> Array | None:
    """The ages of the next step's scales; NaN where there is none."""
    inner = [scaling.scaling if isinstance(scaling, MeasuredScaling) else scaling for scaling in scalings]
    memories = [scaling.memory for scaling in inner]
    if not any(isinstance(memory, AmaxHistory) for memory in memories):
        return None
    ages = []
    for row, memory in enumerate(memories):
        if not isinstance(memory, AmaxHistory):
            ages.append(jnp.full(table.shape[:-2], jnp.nan, jnp.float32))
            continue
        # The newest, then oldest to newest.
        history = table[..., row, 1 : 1 + memory.length]
        newest_first = jnp.concatenate([history[..., :1], history[..., :0:-1]], axis=-1)
        ages.append(jnp.argmax(newest_first, axis=-1).astype(jnp.float32))
    return jnp.where(jnp.isnan(amax), jnp.nan, jnp.stack(ages, axis=-1))
