"""quantization_statistics: what FP8 does to the operands of a model's products."""

import dataclasses
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp

from .._op import Fp8DotGeneral
from .._state.op_state import OpState
from ..layers.default import default_rules
from ..layers.ops import all_ops, is_op, named_ops
from ..layers.own_state import require_own_state
from ..layers.uncalibrated import require_calibrated
from ..layers.walk import map_layers_in_stacks, rule_of
from ..recipes.scaling import STATISTICS, MeasuredScaling
from ..training.gradients import filter_grad
from ..training.loss import scalar_loss
from .result import ModelStatistics, OpStatistics


def quantization_statistics(model: Any, loss_fn: Callable[..., Any], *batch: Any) -> ModelStatistics:
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
        ValueError: If the model has no FP8 op, or static scales that are not calibrated, or if `loss_fn` does not
            return one number.

    Example:
        >>> measured = quantization_statistics(fp8_linear_layers(model), loss_fn, x)
        >>> float(measured.saturation)
        0.0
        >>> measured["layers.0"].sqnr.shape
        (3,)
    """
    if not all_ops(model):
        raise ValueError("model has no FP8 product to measure; convert it with fp8_linear_layers")
    require_own_state(model)
    require_calibrated(model)
    measuring = _measuring(model)
    gradients = filter_grad(lambda model: scalar_loss(loss_fn(model, *batch)))(measuring)
    by_path = {name: _statistics(op) for name, op in named_ops(gradients)}
    return ModelStatistics(tuple(by_path), tuple(by_path.values()))


def _measuring[M](model: M) -> M:
    """The model with ops whose state records statistics in addition."""

    def measure(path: str, layer: Any, stack: tuple[hax.Axis, ...]) -> Any:
        rule = rule_of(layer, default_rules)
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

    return jax.tree.map(measure_alone, map_layers_in_stacks(measure, model, default_rules), is_leaf=is_op)


def _statistics(gradient: Fp8DotGeneral) -> OpStatistics:
    assert isinstance(gradient.state, OpState)
    table, scalings = gradient.state.array, gradient.state.scalings
    rows = []
    for row, scaling in enumerate(scalings):
        assert isinstance(scaling, MeasuredScaling)
        values = scaling.statistics(table[..., row : row + 1, :])
        scale = table[..., row : row + 1, :1]
        # A scale is positive; the gradient of a layer that the loss does not reach has 0 or `-inf` there.
        reached = jnp.isfinite(values) & jnp.isfinite(scale) & (scale > 0.0)
        rows.append(jnp.where(reached, values, jnp.nan))
    measured = jnp.concatenate(rows, axis=-2)
    return OpStatistics(**{name: measured[..., i] for i, name in enumerate(STATISTICS)})
