"""Arrays that no layer of a known class owns: a product with one stays in high precision."""

import os.path
from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from jax.tree_util import KeyEntry

from .._state.marker import OverwriteWithGradient
from .ops import is_op
from .patterns import path_string
from .rule import LayerRule
from .walk import STACKED, find_layers, rule_of


def arrays_outside(model: Any, rules: tuple[LayerRule, ...]) -> list[str]:
    """The paths of floating-point arrays of two or more dimensions that belong to no layer with a rule.

    Axes of stacks and ensembles do not count, nor do the arrays of Equinox's and Haliax's own classes, such as
    embeddings and norms, or of a module that holds an op of its own.

    Args:
        model: Any tree.
        rules: The rules of the layer classes that are known.
    """
    layer_types = tuple(jax.tree.leaves([rule.layer_type for rule in rules]))
    ensembles = _ensembles(model, rules)
    found: list[str] = []

    def visit(path: tuple[KeyEntry, ...], node: Any, stack: tuple[str, ...], *, is_owned: bool) -> None:
        if isinstance(node, (*layer_types, OverwriteWithGradient)) or is_op(node):
            return
        if isinstance(node, hax.NamedArray) or _is_array(node):
            if not is_owned and _dimensions(node, path, stack, ensembles) >= 2:
                found.append(path_string(path))
            return
        if isinstance(node, hnn.Stacked):
            visit((*path, STACKED), node.stacked, (*stack, node.Block.name), is_owned=False)
            return
        is_owned = type(node).__module__.startswith(("equinox.nn", "haliax.nn")) or _multiplies(node)
        for key, child in _children(node):
            visit((*path, *key), child, stack, is_owned=is_owned)

    visit((), model, (), is_owned=False)
    return found


def _children(node: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What is one level below a node; nothing for a leaf."""
    for path, child in jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]:
        if child is not node:
            yield path, child


def _multiplies(node: Any) -> bool:
    """Whether a module has an op for its own arrays, or an einsum, which has nothing but an op."""

    def is_own(value: Any) -> bool:
        below = [child for _, child in _children(value)] if isinstance(value, eqx.Module) else []
        return is_op(value) or (len(below) == 1 and is_op(below[0]))

    return isinstance(node, eqx.Module) and any(is_own(child) for _, child in _children(node))


def _is_array(node: Any) -> bool:
    is_array = eqx.is_array(node) or isinstance(node, jax.ShapeDtypeStruct)
    return is_array and jnp.issubdtype(node.dtype, jnp.floating)


def _dimensions(node: Any, path: tuple[KeyEntry, ...], stack: tuple[str, ...], ensembles: Mapping[str, int]) -> int:
    """How many axes an array has, without those of stacks and ensembles."""
    if isinstance(node, hax.NamedArray):
        return len([name for name in node.axis_names if name not in stack]) if _is_array(node.array) else 0
    if not ensembles:
        return node.ndim - len(stack)
    # A plain array does not say which of its axes are of ensembles: the nearest layer's kernel does.
    common = lambda other: len(os.path.commonprefix([path_string(path).split("."), other.split(".")]))
    nearest = max(ensembles, key=common)
    return node.ndim - (ensembles[nearest] if common(nearest) else min(ensembles.values()))


def _ensembles(model: Any, rules: tuple[LayerRule, ...]) -> dict[str, int]:
    """How many axes of ensembles and stacks are in front of each layer's kernel, by path."""
    counts = {}
    for path, (layer, stack) in find_layers(model, rules).items():
        members, inner = rule_of(layer, rules).kernel(layer).members_and_stack(stack)
        counts[path] = len(members) + len(inner)
    return counts
