"""The walk over a model by the names of its state dict: each layer that has a rule, and each other array."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import numpy as np

from ..._op import Fp8DotGeneral
from ..._state.marker import OverwriteWithGradient
from ...attention.op import Fp8Attention
from ...layers.rebuilt import rebuilt
from ...layers.rule import LayerRule, Refused
from ...layers.walk import rule_of


@dataclasses.dataclass(frozen=True)
class ModelPath:
    """Where something is in a model.

    Args:
        parts: The components of its name in the state dict; None where the number of a block comes.
        stack: The axis of the blocks for each None.
    """

    parts: tuple[str | None, ...] = ()
    stack: tuple[hax.Axis, ...] = ()

    def child(self, part: str | int) -> "ModelPath":
        """What a component is added to."""
        return ModelPath((*self.parts, str(part)), self.stack)

    def stacked(self, axis: hax.Axis) -> "ModelPath":
        """The blocks of a stack."""
        return ModelPath((*self.parts, None), (*self.stack, axis))

    def name(self, blocks: Iterable[int], *more: int | str) -> str:
        """The name with the numbers of blocks filled in.

        Args:
            blocks: One number for each axis of the stack.
            *more: Components that follow it.
        """
        numbers: Iterator[int] = iter(blocks)
        return ".".join([*(str(next(numbers)) if part is None else part for part in self.parts), *map(str, more)])

    def __str__(self) -> str:
        return ".".join("*" if part is None else part for part in self.parts)


class Visitor(Protocol):
    """What is done with each layer and array of a model; each method returns what replaces it."""

    def layer(self, layer: Any, rule: LayerRule, path: ModelPath) -> Any:
        """A layer that has a rule, with all arrays in it."""
        ...

    def attention(self, op: Fp8Attention, path: ModelPath) -> Any:
        """Attention in FP8, which has state alone."""
        ...

    def array(self, array: Any, owner: Any, path: ModelPath) -> Any:
        """An array outside of such layers; a `NamedArray` or a plain one.

        Args:
            array: The array.
            owner: The module that it is a field of; None if it is in none.
            path: Where it is.
        """
        ...


def visit[M](model: M, visitor: Visitor, rules: tuple[LayerRule, ...]) -> M:
    """The model with each layer and array replaced by what the visitor makes of it.

    Names are those of Haliax's state dicts: fields by name, or by the name that a module's `_state_dict_key_map` gives
    them; elements of lists and tuples by number; blocks of a stack as if they were elements of a list. FP8 state is
    passed over.

    Args:
        model: The model, or any tree.
        visitor: What to do.
        rules: The rules of the layer classes.
    """
    types = tuple(jax.tree.leaves([rule.layer_type for rule in rules if not isinstance(rule, Refused)]))
    return _Walk(visitor, rules, types).visit(model, None, ModelPath())


def is_array(node: Any) -> bool:
    """Whether it is an array of a model: Haliax's, JAX's, NumPy's, or an abstract one."""
    return isinstance(node, hax.NamedArray | jax.Array | np.ndarray | jax.ShapeDtypeStruct)


@dataclasses.dataclass
class _Walk:
    visitor: Visitor
    rules: tuple[LayerRule, ...]
    types: tuple[type, ...]

    def visit(self, node: Any, owner: Any, path: ModelPath) -> Any:
        if isinstance(node, OverwriteWithGradient | Fp8DotGeneral):
            return node
        if isinstance(node, Fp8Attention):
            return self.visitor.attention(node, path)
        if isinstance(node, self.types):
            return self.visitor.layer(node, rule_of(node, self.rules), path)
        if is_array(node):
            return self.visitor.array(node, owner, path)
        if isinstance(node, hnn.Stacked):
            stacked = self.visit(node.stacked, node, path.stacked(node.Block))
            return dataclasses.replace(node, stacked=stacked)
        if isinstance(node, eqx.Module):
            return self._module(node, path)
        if isinstance(node, dict):
            return {key: self.visit(value, owner, path.child(key)) for key, value in node.items()}
        if isinstance(node, list | tuple):
            values = [self.visit(value, owner, path.child(i)) for i, value in enumerate(node)]
            if isinstance(node, tuple) and hasattr(node, "_fields"):
                return type(node)(*values)
            return type(node)(values)
        return node

    def _module(self, module: eqx.Module, path: ModelPath) -> Any:
        names = getattr(module, "_state_dict_key_map", dict)()
        changed = {}
        for field in dataclasses.fields(module):
            if not hasattr(module, field.name):
                continue
            value = getattr(module, field.name)
            if not field.metadata.get("static", False):
                name = names.get(field.name, field.name)
                value = self.visit(value, module, path if name is None else path.child(name))
            changed[field.name] = value
        return rebuilt(type(module), changed)
