"""share_input_scales: layers that read the same tensor quantize it once."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._op import Fp8DotGeneral
from .._state.op_state import OpState
from .._tensor_names import SAME_INPUT
from ..layers.checks import require_layers, require_model
from ..layers.config import default_rules
from ..layers.rule import LayerRule
from ..layers.walk import find_layers, map_layers, rule_of


projections = SAME_INPUT
"""Names of layers that share an input in Haliax's, Levanter's and Equinox's modules: q/k/v and gate/up."""


def share_input_scales[M](
    model: M, groups: Sequence[Sequence[str]] = projections, *, rules: tuple[LayerRule, ...] = default_rules
) -> M:
    """Makes layers of one module that read the same tensor, such as q/k/v, quantize it once.

    The layers of a group use one scale for their input, the largest of their scales; in `filter_grad` and
    `filter_value_and_grad` it is one value in the program. The compiler then sees that the layers quantize the same
    tensor in the same way, does it once, and keeps one FP8 copy for the backward pass instead of one per layer. All
    their products read it.

    Weights stay in place, each with its own scale: checkpoints, sharding rules, optimizers and the model's code see no
    difference. High precision does not change. Nor does FP8 if the layers read the same tensor, because their
    histories, and so their scales, are then equal. If they read different tensors, as in cross-attention, the smaller
    input gets the larger one's scale: leave such groups out.

    A plain `eqx.filter_grad` gains nothing from it: there each layer takes the scale of its own state and quantizes the
    tensor for itself. The numbers are the same if the layers read the same tensor.

    Args:
        model: A converted model.
        groups: Names of attributes: wherever a module has two or more layers of a group, these share a scale.
        rules: The rules that the model was converted with.

    Returns:
        The model with the states of these layers marked; `separate_input_scales` undoes it.

    A function that gets only a part of its model, and assembles the model inside, is differentiated in another way, in
    which each layer makes its own copy: the numbers are the same.

    Raises:
        ValueError: If no module has two layers of a group that are converted with a recipe that keeps the same state
            for their input.

    References:
        TransformerEngine (`fuse_qkv_params`) and Megatron fuse projections by moving their weights into one array with
        one scale. For that, see `join_linear`.

    Example:
        >>> class Attention(eqx.Module):
        ...     query: hnn.Linear
        ...     key: hnn.Linear
        ...     def __call__(self, x):
        ...         return hax.dot(self.query(x), self.key(x), axis="head")
        >>> In, Out = hax.make_axes(embed=16, head=16)
        >>> linear = hnn.Linear.init(In, Out, key=jax.random.key(0))
        >>> model = fp8_linear_layers(Attention(linear, linear))
        >>> share_input_scales(model).query.dot_general.state.shared_input
        'query+key'
    """
    require_layers(model, "share_input_scales(model)")
    for group in groups:
        if isinstance(group, str):
            raise ValueError(f"groups={groups!r} must be a sequence of sequences of names, such as [('gate', 'up')]")
    # By module, and by the properties that must be equal for layers to share a scale.
    alike: dict[Any, list[str]] = collections.defaultdict(list)
    layers = find_layers(model, rules)
    for path, (layer, _) in layers.items():
        parent, _, name = path.rpartition(".")
        op = rule_of(layer, rules).op(layer)
        state = _state(op)
        for i, group in enumerate(groups):
            if name in group and op is not None and state is not None:
                shape = state.table.array.shape[:-2]
                alike[parent, i, op.recipe.input, op.compute_dtype, shape].append(name)
    shared: dict[str, str] = {}
    for (parent, *_), names in alike.items():
        if len(names) > 1:
            prefix = f"{parent}." if parent else ""
            shared |= {f"{prefix}{name}": f"{prefix}{'+'.join(names)}" for name in names}
    if not shared:
        raise ValueError(
            f"groups={groups!r} name no two layers of one module that can share a scale; the layers are "
            f"{list(layers)[:12]}. Convert the model first, with a recipe that keeps state for their input, and name "
            "layers that exist. Without state, layers that read the same tensor have the same scale anyway"
        )
    return _with_shared_inputs(model, shared, rules)


def separate_input_scales[M](model: M, *, rules: tuple[LayerRule, ...] = default_rules) -> M:
    """The inverse of `share_input_scales`: every layer has its own scale for its input.

    Args:
        model: The model, which may have been trained since, or an optimizer's state with its structure.
        rules: The rules that it was converted with.
    """
    require_model(model, "separate_input_scales(model)")
    return _with_shared_inputs(model, {}, rules)


def _with_shared_inputs(model: Any, shared: Mapping[str, str], rules: tuple[LayerRule, ...]) -> Any:
    def change(path: str, layer: Any) -> Any:
        rule = rule_of(layer, rules)
        op = rule.op(layer)
        state = _state(op)
        if op is None or state is None or state.shared_input == shared.get(path):
            return layer
        # As a tree: inside `vmap` and `scan` the names may include axes that the array does not have.
        template = dataclasses.replace(state, shared_input=shared.get(path))
        changed = jax.tree.unflatten(jax.tree.structure(template), jax.tree.leaves(state))
        return rule.with_op(layer, dataclasses.replace(op, state=changed))

    return map_layers(change, model, rules)


def _state(op: Fp8DotGeneral | None) -> OpState | None:
    return op.state if op is not None and isinstance(op.state, OpState) else None
