"""black_box: runs a step again and keeps the operands of the product with which it goes wrong."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._op import Fp8DotGeneral
from ..._state.op_state import OpState
from ...layers.model_argument import require_model
from ...layers.ops import is_op, named_ops
from ...layers.own_state import table_on_host
from ...recipes.recipe import USES, OperandName
from ...training.loss import scalar_loss
from ..diagnosis.checks import not_finite
from ..diagnosis.operand import Operand, operands
from ..diagnosis.thresholds import Thresholds
from ..measure import quantization_statistics
from ..result import ModelStatistics, numbered
from .box import BlackBox
from .recorder import RECORDED, Recorder, Seen


_LIMIT = 2**28


def black_box(
    model: Any,
    loss_fn: Callable[..., Any],
    *batch: Any,
    layer: str | None = None,
    index: tuple[int, ...] = (),
    step: int | None = None,
    limit: int = _LIMIT,
) -> BlackBox:
    """Keeps the operands of one layer's products, with all that it takes to compute them again elsewhere.

    Call it when a step was not finite or looks wrong, with the model that the step was given and its batch. It runs
    the step again: once to measure, if no layer is named, and once to record. So training itself carries nothing.

    Without `layer` it is the layer of the first operand with an element that is not finite: a kernel before an input
    before an output gradient, because each spoils the next. If all are finite, it is that of the operand that
    loses most by quantization: of its norm, or of its elements by clipping and flushing.

    Args:
        model: A converted model, with keys if a recipe needs them; not under `jit`.
        loss_fn: `loss_fn(model, *batch)`, a scalar.
        *batch: Its arguments after the model. For a step with microbatches, one of them.
        layer: The path of a layer, as `describe` names it.
        index: Which layer of a stack, with `layer`.
        step: The number of the step, to be written down.
        limit: The most bytes that the operands may take: what they need is known, and an error, before anything runs.

    Returns:
        The operands; `save` writes them, and `replay` computes with them.

    Raises:
        ValueError: If the model has no FP8 product or no such layer; if the loss does not reach the layer, or uses it
            several times; if its products are grouped; if the operands take more than `limit`.

    Example:
        >>> box = black_box(fp8_linear_layers(model), loss_fn, x, step=12)
        >>> box.step
        12
    """
    require_model(model, "black_box(model, loss_fn, *batch)")
    ops = dict(named_ops(model))
    if not ops:
        raise ValueError("model has no FP8 product to keep; convert it with fp8_linear_layers")
    name: OperandName
    if layer is None:
        worst, reason = _worst(model, eqx.filter_jit(quantization_statistics)(model, loss_fn, *batch))
        path, index, name = worst.layer, worst.index, worst.name
    else:
        path, name, reason = layer, "input", "its layer was named"
        if path not in ops:
            raise ValueError(f"layer={layer!r} has no FP8 product; there are {list(ops)}")
    op = ops[path]
    stack = op.state.table.array.shape[:-2] if isinstance(op.state, OpState) else _stack_of(op)
    if len(index) != len(stack) or any(not 0 <= i < n for i, n in zip(index, stack, strict=True)):
        raise ValueError(f"index={index} does not name a layer in stacks of sizes {stack}; give one number for each")
    of_layer = numbered(path, index)
    seen, numbers = _recorded(model, loss_fn, batch, path, stack, limit)
    numbers = np.asarray(numbers)[index]
    uses = numbers[-1]
    if uses != 1.0:
        raise ValueError(
            f"the loss uses {of_layer} {uses:.0f} times, and a black box holds the operands of one use; "
            "give a loss_fn that uses it once, or another layer"
        )
    table = table_on_host(op.state)
    return BlackBox(
        *seen.split(numbers[:-1]),
        state=None if table is None else table[index],
        key=None if op.key is None or not op.recipe.needs_key else np.asarray(op.key.array)[index],
        contraction=seen.contraction,
        recipe=op.recipe,
        compute_dtype=op.compute_dtype,
        out_dtype=seen.out_dtype,
        precision=seen.precision,
        layer=path,
        index=index,
        operand=name,
        product=USES[name][0],
        reason=reason,
        step=step,
    )


def _worst(model: Any, measured: ModelStatistics) -> tuple[Operand, str]:
    """The operand that explains what is wrong, and why."""
    everything = operands(model, measured)
    for finding in not_finite(everything, Thresholds()):
        same = lambda o, f=finding: (o.layer, o.index, o.name) == (f.layer, f.index, f.operand)
        return next(o for o in everything if same(o)), finding.seen
    worst = max(everything, key=_lost)
    return worst, (
        f"every element is finite; quantization loses most here: an error of {worst['error'] ** 0.5:.2%} of the norm, "
        f"{worst['saturation']:.2%} of the elements clipped, {worst['underflow']:.2%} flushed to zero"
    )


def _lost(operand: Operand) -> float:
    """What quantization loses: of the norm, or of the elements, whichever is more. An outlier hides what it flushes."""
    return float(np.nan_to_num(max(operand["error"] ** 0.5, operand["saturation"], operand["underflow"]), nan=-1.0))


def _stack_of(op: Fp8DotGeneral) -> tuple[int, ...]:
    """The axes of stacks and ensembles of an op without state: those of its key, or of its stack."""
    return op.key.array.shape[:-1] if op.key is not None else tuple(axis.size for axis in op.stack)


def _recorded(
    model: Any, loss_fn: Callable[..., Any], batch: tuple[Any, ...], layer: str, stack: tuple[int, ...], limit: int
) -> tuple[Seen, Array]:
    """What the layer multiplies, in front the axes of its stack."""
    found: list[Seen] = []
    arrays, static = eqx.partition(_with_recorder(model, layer, None, found.append), eqx.is_array)
    jax.eval_shape(lambda arrays: _gradient(eqx.combine(arrays, static), loss_fn, batch, None), arrays)
    if not found:
        raise ValueError(f"the loss does not depend on {layer}, so it has no output gradient; name another layer")
    if any(seen != found[0] for seen in found):
        raise ValueError(
            f"the loss uses {layer} with operands of several shapes, and a black box holds those of one use"
        )
    seen = found[0]
    needed = seen.bytes * int(np.prod(stack))
    if needed > limit:
        raise ValueError(
            f"the operands of {layer} take {needed:,} bytes{' in the whole stack' if stack else ''}, more than "
            f"limit={limit:,}; give a smaller batch, or a higher limit"
        )
    names = tuple(axis.name for axis in next(op for path, op in named_ops(model) if path == layer).stack)
    axes = tuple(hax.Axis(name, size) for name, size in zip(names, stack[len(stack) - len(names) :], strict=True))
    slot = hax.named(jnp.zeros((*(axis.size for axis in axes), seen.size + 1), jnp.float32), (*axes, "fp8_recorded"))
    members = stack[: len(stack) - len(names)]
    slot = jax.tree.map(lambda x: jnp.broadcast_to(x, (*members, *x.shape)), slot)
    recording = _with_recorder(model, layer, slot, found.append)
    gradient = eqx.filter_jit(_gradient)(recording, loss_fn, batch, slot)
    return seen, gradient.array


def _gradient(model: Any, loss_fn: Callable[..., Any], batch: tuple[Any, ...], slot: hax.NamedArray | None) -> Any:
    """The gradient of a recorder's slot; of the model where there is none, which traces the layer as well."""
    is_recorder = lambda node: isinstance(node, Recorder)

    def summed(slot: Any, arrays: Any) -> Array:
        whole = eqx.combine(arrays, rest)
        if slot is not None:
            fill = lambda node: eqx.tree_at(lambda recorder: recorder.slot, node, slot) if is_recorder(node) else node
            whole = jax.tree.map(fill, whole, is_leaf=is_recorder)
        run = lambda _: scalar_loss(loss_fn(whole, *batch))
        return jnp.sum(jax.vmap(run, axis_name=RECORDED)(jnp.zeros(1)))

    # State is not differentiated: operands do not depend on what the step records.
    arrays, rest = eqx.partition(model, _is_weight, is_leaf=is_op)
    return jax.grad(summed, argnums=0 if slot is not None else 1)(slot, arrays)


def _is_weight(node: Any) -> bool:
    return not is_op(node) and eqx.is_inexact_array(node)


def _with_recorder[M](model: M, layer: str, slot: hax.NamedArray | None, when_traced: Callable[[Seen], object]) -> M:
    by_path = iter(named_ops(model))

    def with_recorder(node: Any) -> Any:
        if not is_op(node):
            return node
        path, op = next(by_path)
        return Recorder(op, slot, when_traced) if path == layer else op

    return jax.tree.map(with_recorder, model, is_leaf=is_op)
