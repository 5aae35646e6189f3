"""compare: where in the network a converted model and the plain one part."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._jax.max_grad import to_max_grad
from ..._op import Fp8DotGeneral
from ...layers.default import default_rules
from ...layers.model_argument import require_layers
from ...layers.ops import all_ops, is_op
from ...layers.own_state import require_own_state
from ...layers.quantized_kernels import require_no_kernel_copies
from ...layers.rule import LayerRule
from ...layers.uncalibrated import require_calibrated
from ...layers.walk import find_layers, map_layers_in_stacks, nothing_to_convert, rule_of
from ...recipes.catalog import named
from .distance import NUMBERS, distances
from .result import Distance, LayerComparison, ModelComparison
from .twin import COLUMNS, COMPARED, MODELS, Twin


def compare(
    plain: Any,
    converted: Any,
    function: Callable[..., Any],
    *batch: Any,
    rules: tuple[LayerRule, ...] = default_rules,
) -> ModelComparison:
    """Runs both models side by side on one batch, forward and backward, and compares them at every linear layer.

    Each layer is compared twice. *Alone*: the converted layer gets what the plain model has there, so the error is its
    own. *Accumulated*: each model goes on with its own numbers, so the error is that of all layers up to here, or in
    the backward pass from the loss down to here. Layers that are not converted accumulate errors too.

    It is exact under `vmap`, in a `scan` and with checkpointing, and works under `jax.jit`. It takes the memory of two
    steps, and computes each product three times.

    Args:
        plain: The model in high precision, such as `restore_linear_layers(converted)`.
        converted: The same model with FP8 layers; calibrated or trained, with keys if a recipe needs them.
        function: `function(model, *batch)`. If it returns one number, a loss, the gradients are compared as well;
            else the sum of what it returns is differentiated to get there, and gradients are not shown.
        *batch: The arguments after the model.
        rules: The rules of `Fp8Config(rules=...)` that the model was converted with.

    Returns:
        The distances of each layer; `print` shows them in the order of the network, `print(found.worst())` those
        layers first that are worst on their own.

    Raises:
        ValueError: If the models differ in more than their products: other classes, shapes or dtypes; if no linear
            layer is in them; if `function` returns nothing with a gradient.

    Example:
        >>> found = compare(model, fp8_linear_layers(model), loss_fn, x)
        >>> bool(found["layers.0"].output.sqnr > 20.0)
        True
        >>> bool(found["layers.0"].fprop.relative_error == found["layers.0"].output.relative_error)
        True
    """
    for name, model in (("plain", plain), ("converted", converted)):
        require_layers(model, "compare(plain, converted, function, *batch)", name)
    require_own_state(converted)
    require_no_kernel_copies(converted)
    require_calibrated(converted)
    found = find_layers(converted, rules)
    twins = {path: twin for path, (layer, stack) in found.items() if (twin := _twin(layer, stack, rules)) is not None}
    if not twins:
        raise nothing_to_convert(converted, rules, {})
    if not all_ops(converted):
        remedy = (
            "plain has them, so they are swapped; use compare(plain, converted, function, *batch)"
            if all_ops(plain)
            else "convert it: converted = fp8_linear_layers(plain)"
        )
        raise ValueError(f"converted has no FP8 layer, so there is nothing to compare; {remedy}")

    def with_twins(model: Any) -> Any:
        def put(path: str, layer: Any, stack: tuple[hax.Axis, ...]) -> Any:
            if (twin := twins.get(path)) is None:
                return layer
            # By way of an op, which is what rules know how to put into a layer.
            op = Fp8DotGeneral.init(named["current"])
            return jax.tree.map(
                lambda node: twin if is_op(node) else node, rule_of(layer, rules).with_op(layer, op), is_leaf=is_op
            )

        return map_layers_in_stacks(put, model, rules)

    models = [eqx.partition(with_twins(model), _is_array, is_leaf=_is_twin) for model in (plain, converted)]
    _require_alike(*(arrays for arrays, _ in models))
    return _compared(models[0][0], models[1][0], models[1][1], function, batch, tuple(twins))


def _twin(layer: Any, stack: tuple[hax.Axis, ...], rules: tuple[LayerRule, ...]) -> Twin | None:
    """What a layer of both models multiplies with; None for layers that are left alone."""
    rule = rule_of(layer, rules)
    op = rule.op(layer)
    if op is None and rule.refusal(layer) is not None:
        return None
    kernel = rule.kernel(layer)
    members, stack = kernel.members_and_stack(stack)
    axes = (*stack, hax.Axis("fp8_compared", COLUMNS))
    slot = hax.named(jnp.zeros(tuple(axis.size for axis in axes), jnp.float32), axes)
    # In front, where the names do not count: as the weights of an ensemble.
    slot = jax.tree.map(lambda x: jnp.broadcast_to(x, (*members, *x.shape)), slot)
    shape = kernel.init_op(named["current"], None, stack).kernel_shape if op is None else op.kernel_shape
    return Twin(op, slot, shape)


def _is_twin(node: Any) -> bool:
    return isinstance(node, Twin)


def _is_array(node: Any) -> bool:
    return eqx.is_array(node)


def _require_alike(plain: Any, converted: Any) -> None:
    """Raises unless both models have the same arrays beside their products."""

    def described(model: Any) -> dict[str, str]:
        leaves = jax.tree_util.tree_flatten_with_path(model)[0]
        return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}

    ours, theirs = described(plain), described(converted)
    for path in (*ours, *theirs):
        if ours.get(path) != theirs.get(path):
            raise ValueError(
                f"plain and converted differ at {path}: {ours.get(path, 'nothing')} and {theirs.get(path, 'nothing')}. "
                "Compare a converted model with restore_linear_layers(converted), or with the model that it was "
                "converted from, in the same dtype"
            )


# Jitted as a whole: outside, JAX cannot add gradients up by maximum.
@eqx.filter_jit
def _compared(
    plain: Any,
    converted: Any,
    static: Any,
    function: Callable[..., Any],
    batch: tuple[Any, ...],
    paths: tuple[str, ...],
) -> ModelComparison:
    slots = [node.slot for node in jax.tree.leaves(static, is_leaf=_is_twin) if _is_twin(node)]

    def summed(slots: list[hax.NamedArray]) -> tuple[Array, tuple[Any, bool]]:
        slots = jax.tree.map(to_max_grad, slots)
        given = iter(slots)
        fill = lambda node: eqx.tree_at(lambda twin: twin.slot, node, next(given)) if _is_twin(node) else node
        rest, is_loss = jax.tree.map(fill, static, is_leaf=_is_twin), []

        def run(arrays: Any) -> tuple[Array, list[Array]]:
            out = function(eqx.combine(arrays, rest, is_leaf=_is_twin), *batch)
            leaves = [leaf for leaf in jax.tree.leaves(out) if eqx.is_inexact_array(leaf)]
            if not leaves:
                raise ValueError(
                    f"function returned {type(out).__name__} without floating-point arrays; return the loss, or what "
                    "the model computes"
                )
            is_loss.append(len(leaves) == 1 and leaves[0].ndim == 0)
            return sum((jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves), start=jnp.float32(0.0)), leaves

        both = jax.tree.map(lambda *x: jnp.stack(x), plain, converted)
        values, leaves = jax.vmap(run, axis_name=MODELS, axis_size=2)(both)
        whole = jnp.concatenate([leaf.reshape(2, -1).astype(jnp.float32) for leaf in leaves], axis=1)
        return jnp.sum(values), (distances(whole[0], whole[1]), is_loss[0])

    gradients, (result, is_loss) = jax.grad(summed, has_aux=True)(slots)
    layers = tuple(_layer(slot.array) for slot in gradients)
    return ModelComparison(paths, layers, Distance(*(result[i] for i in range(len(NUMBERS)))), is_loss)


def _layer(numbers: Array) -> LayerComparison:
    """The comparison of a layer, from a slot's gradient."""
    reached = numbers[..., -1] > 0.0

    def distance(index: int) -> Distance:
        first = index * len(NUMBERS)
        columns = (numbers[..., first + i] for i in range(len(NUMBERS)))
        return Distance(*(jnp.where(reached, column, jnp.float32(jnp.nan)) for column in columns))

    return LayerComparison(**{name: distance(i) for i, name in enumerate(COMPARED)})
