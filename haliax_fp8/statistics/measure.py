"""quantization_statistics: what FP8 does to the operands of a model's products."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float32
from rich.table import Table

from .._op import Fp8DotGeneral
from .._state.op_state import OpState
from .._tables import Printable, new_table
from ..layers.default import default_rules
from ..layers.ops import all_ops, is_op, named_ops
from ..layers.own_state import require_own_state
from ..layers.uncalibrated import require_calibrated
from ..layers.walk import map_layers_in_stacks, rule_of
from ..recipes.scaling import AbstractStatefulScaling, MeasuredScaling
from ..training.gradients import filter_grad
from ..training.loss import scalar_loss


OPERANDS = ("input", "kernel", "output_grad")


class OpStatistics(eqx.Module):
    """What quantization does to the operands of one op, `[*stack, 3]` for input, kernel and output gradient.

    Operands that the loss does not reach have NaN; operands in high precision lose nothing, so their shares are 0. If
    an op is used several times, each number is the largest over its uses.

    Args:
        amax: `max |x|`.
        saturation: The share of elements that are clipped at the format's maximum.
        underflow: The share of elements that are flushed to zero.
        error: `|x - q|**2 / |x|**2`, the mean square error of quantization relative to the operand.
    """

    amax: Float32[Array, "*stack 3"]
    saturation: Float32[Array, "*stack 3"]
    underflow: Float32[Array, "*stack 3"]
    error: Float32[Array, "*stack 3"]

    @property
    def sqnr(self) -> Float32[Array, "*stack 3"]:
        """The signal-to-quantization-noise ratio in dB: `-10 log10(error)`; infinite without error."""
        return -10.0 * jnp.log10(self.error)


class ModelStatistics(Printable, eqx.Module):
    """The statistics of a model's ops, by path. Print it for a table.

    Args:
        ops: For each op its statistics.
    """

    ops: dict[str, OpStatistics]

    def __getitem__(self, path: str) -> OpStatistics:
        """The statistics of the op at a path."""
        if path not in self.ops:
            raise KeyError(f"no op at {path!r}; there are {list(self.ops)}")
        return self.ops[path]

    @property
    def saturation(self) -> Float32[Array, ""]:
        """The mean share of clipped elements over all operands that the loss reaches."""
        return self._mean("saturation")

    @property
    def underflow(self) -> Float32[Array, ""]:
        """The mean share of elements flushed to zero over all operands that the loss reaches."""
        return self._mean("underflow")

    def _mean(self, name: str) -> Float32[Array, ""]:
        return jnp.nanmean(jnp.concatenate([getattr(op, name).ravel() for op in self.ops.values()]))

    def __rich__(self) -> Table:
        table = new_table("Quantization of each operand (the worst of a stack)")
        for column in ("op", "operand"):
            table.add_column(column, overflow="fold")
        for column in ("amax", "saturation", "underflow", "SQNR"):
            table.add_column(column, justify="right")
        for path, op in self.ops.items():
            if any(isinstance(leaf, Tracer) or not eqx.is_array(leaf) for leaf in jax.tree.leaves(op)):
                table.add_row(path, "traced or abstract: no numbers")
                continue
            # NaN, for members that the loss does not reach, gives way to numbers.
            worst = lambda values, reduce=np.fmax: reduce.reduce(np.asarray(values).reshape(-1, 3), axis=0)
            columns = worst(op.amax), worst(op.saturation), worst(op.underflow), worst(op.sqnr, np.fmin)
            for i, operand in enumerate(OPERANDS):
                amax, saturation, underflow, sqnr = (column[i] for column in columns)
                cells = f"{amax:.3g}", f"{saturation:.3%}", f"{underflow:.3%}", f"{sqnr:.1f} dB"
                table.add_row("" if i else path, operand, *cells)
        return table


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
        Amax, saturation, underflow and error of input, kernel and output gradient of every op.

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
    return ModelStatistics({name: _statistics(op) for name, op in named_ops(gradients)})


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
        assert isinstance(scaling, AbstractStatefulScaling)
        values = scaling.newest(table[..., row : row + 1, :])
        scale = table[..., row : row + 1, :1]
        # A scale is positive; the gradient of a layer that the loss does not reach has 0 or `-inf` there.
        reached = jnp.isfinite(values) & jnp.isfinite(scale) & (scale > 0.0)
        rows.append(jnp.where(reached, values, jnp.nan))
    measured = jnp.concatenate(rows, axis=-2)
    return OpStatistics(*(measured[..., i] for i in range(measured.shape[-1])))
