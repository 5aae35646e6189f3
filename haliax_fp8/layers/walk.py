"""The walk over a model's tree: every layer that has a rule, with its path and the stacks that it is in."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import haliax as hax
import haliax.nn as hnn
import jax
from jax.tree_util import KeyEntry

from .patterns import path_string
from .rule import LayerRule, Refused


STACKED = jax.tree_util.GetAttrKey("stacked")


def rule_of(layer: Any, rules: tuple[LayerRule, ...]) -> LayerRule:
    """The first rule whose class fits the layer."""
    return next(rule for rule in rules if isinstance(layer, rule.layer_type))


def find_layers(module: Any, rules: tuple[LayerRule, ...]) -> dict[str, tuple[Any, tuple[hax.Axis, ...]]]:
    """Every layer that has a rule, by path, with the axes of the stacks that it is in."""
    found: dict[str, tuple[Any, tuple[hax.Axis, ...]]] = {}

    def collect(path: str, layer: Any, stack: tuple[hax.Axis, ...]) -> Any:
        found[path] = (layer, stack)
        return layer

    _walk(collect, module, rules, (), ())
    return found


def map_layers[M](function: Callable[[str, Any], M], module: M, rules: tuple[LayerRule, ...]) -> M:
    """The tree with every layer that has a rule replaced by `function(path, layer)`."""
    return map_layers_in_stacks(lambda path, layer, stack: function(path, layer), module, rules)


def map_layers_in_stacks[M](
    function: Callable[[str, Any, tuple[hax.Axis, ...]], Any], module: M, rules: tuple[LayerRule, ...]
) -> M:
    """Like `map_layers`, for a function that also takes the axes of the stacks that a layer is in."""
    return _walk(function, module, rules, (), ())


def _walk(
    function: Callable[[str, Any, tuple[hax.Axis, ...]], Any],
    tree: Any,
    rules: tuple[LayerRule, ...],
    prefix: tuple[KeyEntry, ...],
    stack: tuple[hax.Axis, ...],
) -> Any:
    layer_types = tuple(jax.tree.leaves([rule.layer_type for rule in rules]))

    def visit(path: tuple[KeyEntry, ...], node: Any) -> Any:
        path = prefix + path
        if isinstance(node, layer_types):
            return function(path_string(path), node, stack)
        if isinstance(node, hnn.Stacked):
            inner = _walk(function, node.stacked, rules, (*path, STACKED), (*stack, node.Block))
            return dataclasses.replace(node, stacked=inner)
        return node

    return jax.tree_util.tree_map_with_path(
        visit, tree, is_leaf=lambda node: isinstance(node, (*layer_types, hnn.Stacked))
    )


def nothing_to_convert(module: Any, rules: tuple[LayerRule, ...], left: Mapping[str, str]) -> ValueError:
    """The error for a model without a layer that can be converted.

    Args:
        module: The given model.
        rules: The rules of the layer classes that can be converted.
        left: The reason for each layer that was found and cannot be, by path.
    """
    classes = jax.tree.leaves([rule.layer_type for rule in rules if not isinstance(rule, Refused)])
    names = ", ".join(dict.fromkeys(_public(cls) for cls in classes if not cls.__module__.startswith("haliax_fp8.")))
    found = "".join(f"; {path or 'the module itself'} cannot be: {reason}" for path, reason in list(left.items())[:3])
    return ValueError(
        f"this {type(module).__name__} contains no layer that can be converted{found}. Supported: {names}, anywhere in "
        "a tree of modules, lists and dicts. If a module multiplies by plain arrays, call an Fp8DotGeneral or "
        "Fp8Einsum there; for your own layer class, give Fp8Config(rules=...) a LayerRule"
    )


def _public(cls: type) -> str:
    """The name by which a class is imported: those of Haliax and Equinox are in `nn`."""
    package = cls.__module__.partition(".")[0]
    return f"{package}.nn.{cls.__name__}" if package in ("haliax", "equinox") else f"{cls.__module__}.{cls.__name__}"
