"""Which ops a loss calls. A model may multiply by `layer.weight` itself: the layer's op then never runs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.tree_util import GetAttrKey

from .._jax.reached import depends_on
from .._unconverted import LeftOut
from ..recipes.catalog import as_recipe
from ..recipes.scaling import DelayedScaling
from .ops import all_ops, is_op
from .rule import LayerRule
from .walk import map_layers_in_stacks, rule_of


MULTIPLIES_ITSELF = "never called: the model multiplies by its weight itself; exclude it"
UNUSED = "never called: the loss does not use this layer"


def with_calls_of_loss[M](
    model: M, loss_fn: Callable[..., Any], batch: tuple[Any, ...], rules: tuple[LayerRule, ...]
) -> M:
    """The model, whose ops know whether a loss calls them. The loss is traced, not run.

    Args:
        model: A converted model.
        loss_fn: `loss_fn(model, *batch)`.
        batch: Its arguments after the model: arrays, or their shapes.
        rules: The rules of the model's layers.
    """
    recipe = as_recipe(DelayedScaling(amax_history_length=1))

    def tag(path: str, layer: Any, stack: tuple[Any, ...]) -> Any:
        rule = rule_of(layer, rules)
        op = rule.op(layer)
        if op is None:
            return layer
        # Every op gets a state, and a loss that calls the op depends on it.
        made = rule.kernel(layer).init_op(recipe, op.compute_dtype, stack)
        return rule.with_op(layer, dataclasses.replace(made, allow_dense_groups=True, left_out=op.left_out))

    tagged = map_layers_in_stacks(tag, model, rules)
    is_array = lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
    arrays, static = eqx.partition((tagged, batch), is_array)

    def value(arrays: Any) -> Any:
        model, batch = eqx.combine(arrays, static)
        return jax.tree.leaves(loss_fn(model, *batch))[0]

    leaves, structure = jax.tree.flatten(arrays)
    used = depends_on(lambda leaves: value(jax.tree.unflatten(structure, leaves)), leaves)
    return with_calls(model, jax.tree.unflatten(structure, used)[0])


def with_calls[M](model: M, used: Any) -> M:
    """The model, or its gradients, whose ops know whether a loss called them.

    Args:
        model: A tree with ops.
        used: The same tree with True for each array that the value of the loss depends on, False for the others, and
            None where that is not known.
    """
    nodes = jax.tree_util.tree_flatten_with_path(used, is_leaf=is_op)[0]
    paths = [path for path, node in nodes if node is True]

    def why(path: tuple[Any, ...], op: Any) -> str | None:
        states = jax.tree.leaves(op.state)
        if any(states) or not states:
            return "" if states else None
        layer = path[:-1]
        below = [p[len(layer) :] for p in paths if len(p) > len(layer) and p[: len(layer)] == layer]
        is_read = any(p[0] == GetAttrKey("weight") or (len(p) == 1 and p[0] != GetAttrKey("bias")) for p in below)
        return MULTIPLIES_ITSELF if is_read else UNUSED

    reasons = iter([why(path, node) for path, node in nodes if is_op(node)])

    def mark(node: Any) -> Any:
        return _marked(node, next(reasons)) if is_op(node) else node

    return jax.tree.map(mark, model, is_leaf=is_op)


def with_calls_of[M](model: M, other: Any) -> M:
    """The model, whose ops know of their calls what those of another tree know.

    Args:
        model: A model.
        other: A tree with the same ops, such as its gradients.
    """
    known = [op.left_out and op.left_out.uncalled for op in all_ops(other)]
    own = [op.left_out and op.left_out.uncalled for op in all_ops(model)]
    if len(known) != len(own) or all(reason in (None, mine) for reason, mine in zip(known, own, strict=True)):
        return model
    reasons = iter(known)
    return jax.tree.map(lambda node: _marked(node, next(reasons)) if is_op(node) else node, model, is_leaf=is_op)


def _marked(op: Any, uncalled: str | None) -> Any:
    # An op without it was not made by a conversion; with it, it would have another tree structure.
    if op.left_out is None or uncalled is None:
        return op
    return dataclasses.replace(op, left_out=LeftOut(op.left_out.reasons, uncalled))
