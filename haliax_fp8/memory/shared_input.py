"""fuse_projections: layers that read the same tensor quantize it once, or multiply it once."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax

from .._op import Fp8DotGeneral
from .._state.op_state import OpState
from ..layers.default import default_rules
from ..layers.rule import LayerRule
from ..layers.walk import find_layers, map_layers, rule_of
from .fused_projections import FusedProjections


projections: tuple[tuple[str, ...], ...] = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("query_proj", "key_proj", "value_proj"),
    ("gate", "up"),
    ("gate_proj", "up_proj"),
)
"""Names of layers with the same input in Haliax's, Levanter's and Equinox's modules: q/k/v and gate/up."""


@dataclasses.dataclass(frozen=True)
class AbstractFusion(abc.ABC):
    """How `fuse_projections` fuses layers that read the same tensor."""

    @abc.abstractmethod
    def fuse(self, model: Any, groups: Sequence[Sequence[str]], layers: tuple[LayerRule, ...]) -> tuple[Any, bool]:
        """The model with its groups fused, and whether a module has two layers of a group."""


@dataclasses.dataclass(frozen=True)
class SharedInput(AbstractFusion):
    """The layers stay separate and quantize their input once.

    The layers of a group use one scale for their input, the largest of theirs; in `filter_grad` and
    `filter_value_and_grad` it is the same value in the program. The compiler then sees that they quantize the same
    tensor in the same way, does it once, and keeps one FP8 copy for the backward pass instead of one per layer; all
    their products read it.

    Weights stay in place, each with its own scale: checkpoints, sharding rules, optimizers and the model's code see no
    difference. High precision does not change. Nor does FP8 if the layers read the same tensor, because their
    histories, and so their scales, are then equal. If they do not, as in cross-attention, the smaller input gets the
    larger one's scale: leave such groups out.
    """

    def fuse(self, model: Any, groups: Sequence[Sequence[str]], layers: tuple[LayerRule, ...]) -> tuple[Any, bool]:
        """The model with the states of its groups marked."""
        found = find_layers(model, layers)
        marked: dict[str, str] = {}
        for group in groups:
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
        return _with_groups(model, marked, layers), bool(marked)


@dataclasses.dataclass(frozen=True)
class OneProduct(AbstractFusion):
    """The layers of a group become one: one weight, one scale for it, one product forward and one per gradient.

    This means fewer kernels to launch and to compile, and one gradient of the input instead of a sum of several. The
    module becomes a `FusedProjections`, which is called like the module and has its attributes and state dicts. Its
    weight concatenates the rows of all its layers, and so do the optimizer's moments. In high precision the numbers do
    not change. In FP8 the kernels of a group share one scale, and so do the gradients.

    It is worth it for q/k/v. The gradients of gate and up have to be concatenated before they are quantized, which
    moves more bytes than one product saves (`docs/performance.md`). If output axes are sharded, as in tensor
    parallelism, use `SharedInput`: otherwise parts of several layers would have to move between devices.
    """

    def fuse(self, model: Any, groups: Sequence[Sequence[str]], layers: tuple[LayerRule, ...]) -> tuple[Any, bool]:
        """The model with every module that has a group replaced by a `FusedProjections`."""
        found: list[Any] = []

        def groups_of(node: Any) -> list[tuple[str, ...]]:
            if not isinstance(node, eqx.Module) or isinstance(node, FusedProjections):
                return []
            fields = [field.name for field in dataclasses.fields(node)]
            here = [[n for n in fields if n in group and _joins(getattr(node, n, None), layers)] for group in groups]
            return list(dict.fromkeys(tuple(names) for names in here if len(names) > 1))

        def visit(node: Any) -> Any:
            names = groups_of(node)
            if not names:
                return node
            twice = [name for i, group in enumerate(names) for name in group if name in sum(names[:i], ())]
            if twice:
                raise ValueError(f"groups={groups!r} list {twice} of a {type(node).__name__} in more than one group")
            found.append(node)
            inner = jax.tree.map(visit, node, is_leaf=lambda child: child is not node and bool(groups_of(child)))
            return FusedProjections.of(inner, names, layers)

        model = jax.tree.map(visit, model, is_leaf=lambda node: bool(groups_of(node)))
        return model, bool(found)


def _joins(layer: Any, layers: tuple[LayerRule, ...]) -> bool:
    has_rule = any(isinstance(layer, rule.layer_type) for rule in layers)
    return has_rule and rule_of(layer, layers).part(layer) is not None


def fuse_projections[M](
    model: M,
    groups: Sequence[Sequence[str]] = projections,
    *,
    how: AbstractFusion = SharedInput(),
    layers: tuple[LayerRule, ...] = default_rules,
) -> M:
    """Makes layers of one module that read the same tensor quantize it once, or multiply it once.

    `separate_projections` undoes it.

    Args:
        model: A converted model; with `OneProduct()`, a plain one also works.
        groups: Names of attributes: wherever a module has two or more layers of a group, they are fused.
        how: `SharedInput()` or `OneProduct()`. You can combine them: one product for q/k/v first, then shared inputs
            for the rest.
        layers: The rules that the model was converted with.

    Returns:
        The model with its groups fused.

    Raises:
        ValueError: If no module has two layers of a group: for `SharedInput`, converted ones whose recipes keep the
            same state of their input. For `OneProduct`, if layers of a group differ in more than their outputs, in
            any module: name the groups that do not.

    References:
        Fused projections of TransformerEngine (`fuse_qkv_params`) and Megatron, which move the weights into one array
        with one scale, as `OneProduct` does.

    Example:
        >>> class Attention(eqx.Module):
        ...     query: hnn.Linear
        ...     key: hnn.Linear
        ...     def __call__(self, x):
        ...         return hax.dot(self.query(x), self.key(x), axis="head")
        >>> In, Out = hax.make_axes(embed=16, head=16)
        >>> linear = hnn.Linear.init(In, Out, key=jax.random.key(0))
        >>> model = fp8_linear_layers(Attention(linear, linear))
        >>> fuse_projections(model).query.dot_general.state.input_group
        'query+key'
        >>> fuse_projections(model, how=OneProduct()).joined["query+key"].weight.axes
        (Axis(name='joined', size=32), Axis(name='embed', size=16))
    """
    for group in groups:
        if isinstance(group, str):
            raise ValueError(f"groups={groups!r} must be a sequence of sequences of names, such as [('gate', 'up')]")
    if not isinstance(how, AbstractFusion):
        raise ValueError(f"how={how!r} is not a way to fuse layers; use SharedInput() or OneProduct()")
    fused, found = how.fuse(model, groups, layers)
    if not found:
        raise ValueError(
            f"groups={groups!r} name no two layers of one module that {how} can fuse; the layers are "
            f"{list(find_layers(model, layers))[:12]}. SharedInput() needs layers converted with a recipe that keeps "
            "state for their input. Convert the model first, and name layers that exist and are not fused yet"
        )
    return fused


def separate_projections[M](model: M, *, layers: tuple[LayerRule, ...] = default_rules) -> M:
    """The inverse of `fuse_projections`: every layer has its own weight, and its own scale for its input.

    Args:
        model: The model, which may have been trained since, or an optimizer's state of its structure. Layers that were
            joined get copies of the joined layer's state.
        layers: The rules that it was converted with.
    """

    def separate(node: Any) -> Any:
        return separate_projections(node.separated(), layers=layers) if isinstance(node, FusedProjections) else node

    apart = jax.tree.map(separate, model, is_leaf=lambda node: isinstance(node, FusedProjections))
    return _with_groups(apart, {}, layers)


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
