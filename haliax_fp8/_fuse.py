"""fuse_projections: layers that read the same tensor quantize it once."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ._layers import LayerRule, default_layers
from ._op import Fp8DotGeneral
from ._overwrite import OpState
from ._transform import find_layers, map_layers, rule_of


projections: tuple[tuple[str, ...], ...] = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("query_proj", "key_proj", "value_proj"),
    ("gate", "up"),
    ("gate_proj", "up_proj"),
)
"""Names that layers with the same input have in Haliax's, Levanter's and Equinox's modules: q/k/v and gate/up."""


def fuse_projections[M](
    model: M,
    groups: Sequence[Sequence[str]] = projections,
    *,
    layers: tuple[LayerRule, ...] = default_layers,
) -> M:
    """Makes layers of one module that read the same tensor quantize it once.

    The layers of a group take one scale for their input, the largest of theirs: in `filter_grad` and
    `filter_value_and_grad` it is the very same number in the program. The compiler then finds that they quantize the
    same tensor in the same way, does it once, and keeps one FP8 copy for the backward pass instead of one per layer;
    all their products read it.

    Weights stay where they are, each with a scale of its own: checkpoints, sharding rules, optimizers and the model's
    code see no difference, and `separate_projections` takes it back. In high precision nothing changes; in FP8 nothing
    changes either where the layers read the same tensor, for then their histories, and so their scales, are the same.
    Where they do not, as in cross-attention, the smaller input takes the larger one's scale: leave such groups out.

    Args:
        model: A converted model.
        groups: Names of attributes: wherever a module has two or more layers of a group, they are fused.
        layers: The rules that the model was converted with.

    Returns:
        The model with its groups marked.

    Raises:
        ValueError: If no module has two converted layers of a group whose recipes keep the same state of their input.

    References:
        Fused projections of TransformerEngine (`fuse_qkv_params`) and Megatron, which move the weights into one array
        with one scale.

    Example:
        >>> class Attention(eqx.Module):
        ...     query: hnn.Linear
        ...     key: hnn.Linear
        >>> In, Out = hax.make_axes(embed=16, head=16)
        >>> linear = hnn.Linear.init(In, Out, key=jax.random.key(0))
        >>> fused = fuse_projections(fp8_linear_layers(Attention(linear, linear)))
        >>> fused.query.dot_general.state.input_group
        'query+key'
    """
    found = find_layers(model, layers)
    marked: dict[str, str] = {}
    for group in groups:
        if isinstance(group, str):
            raise ValueError(f"groups={groups!r} must be a sequence of sequences of names, such as [('gate', 'up')]")
        modules: dict[str, list[str]] = {}
        for path, (layer, _) in found.items():
            parent, _, name = path.rpartition(".")
            if name in group and _group_state(layer, layers) is not None:
                modules.setdefault(parent, []).append(path)
        for parent, members in modules.items():
            alike = [p for p in members if _fuses(found[p][0], found[members[0]][0], layers)]
            if len(alike) > 1:
                name = "+".join(path.rpartition(".")[2] for path in alike)
                marked |= {path: f"{parent}.{name}" if parent else name for path in alike}
    if not marked:
        raise ValueError(
            f"groups={groups!r} name no two layers of one module that are converted with a recipe that keeps state of "
            f"their input; the layers are {list(found)[:12]}. Convert the model first, and name what it has"
        )
    return _with_groups(model, marked, layers)


def separate_projections[M](model: M, *, layers: tuple[LayerRule, ...] = default_layers) -> M:
    """The inverse of `fuse_projections`: every layer has a scale of its own for its input.

    Args:
        model: The model.
        layers: The rules that it was converted with.
    """
    return _with_groups(model, {}, layers)


def _with_groups(model: Any, groups: dict[str, str], layers: tuple[LayerRule, ...]) -> Any:
    def mark(path: str, layer: Any) -> Any:
        rule = rule_of(layer, layers)
        op, state = rule.op(layer), _group_state(layer, layers)
        if op is None or state is None or state.input_group == groups.get(path):
            return layer
        # Through the tree: inside `vmap` and `scan` the names may count axes that the array does not have.
        leaves = jax.tree.leaves(state)
        template = dataclasses.replace(state, input_group=groups.get(path))
        marked = jax.tree.unflatten(jax.tree.structure(template), leaves)
        return rule.with_op(layer, dataclasses.replace(op, state=marked))

    return map_layers(mark, model, layers)


def _group_state(layer: Any, layers: tuple[LayerRule, ...]) -> OpState | None:
    op: Fp8DotGeneral | None = rule_of(layer, layers).op(layer)
    return op.state if op is not None and isinstance(op.state, OpState) else None


def _fuses(layer: Any, other: Any, layers: tuple[LayerRule, ...]) -> bool:
    """Whether two layers quantize an input alike, and have stacks of the same shape."""
    a, b = rule_of(layer, layers).op(layer), rule_of(other, layers).op(other)
    assert a is not None and b is not None
    states = [_group_state(x, layers) for x in (layer, other)]
    assert states[0] is not None and states[1] is not None
    same = a.recipe.input == b.recipe.input and a.compute_dtype == b.compute_dtype
    return same and states[0].table.array.shape[:-2] == states[1].table.array.shape[:-2]
