"""Walks over a model's tree: its layers and ops by path, and the patterns that select layers."""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, KeyEntry, SequenceKey

from .._arguments import nearest
from .._op import Fp8DotGeneral
from .rule import LayerRule, Refused


__all__ = [
    "Pattern",
    "Targets",
    "all_ops",
    "as_patterns",
    "find_layers",
    "is_op",
    "map_layers",
    "map_layers_in_stacks",
    "matches",
    "named_ops",
    "nothing_to_convert",
    "path_string",
    "rule_of",
    "unmatched_error",
]


# --- layers


def rule_of(layer: Any, rules: tuple[LayerRule, ...]) -> LayerRule:
    """The first rule whose class fits the layer."""
    return next(rule for rule in rules if isinstance(layer, rule.layer_type))


def find_layers(module: Any, rules: tuple[LayerRule, ...]) -> dict[str, tuple[Any, tuple[hax.Axis, ...]]]:
    """Every layer that has a rule, by path, with the axes of the stacks that it is in."""
    return _find(module, types_of(rules))


def find_layers_and_ops(module: Any, rules: tuple[LayerRule, ...]) -> dict[str, tuple[Any, tuple[hax.Axis, ...]]]:
    """Like `find_layers`, with every op that is in no such layer, by the path that `named_ops` gives it."""
    nodes = _find(module, (*types_of(rules), Fp8DotGeneral))
    return {_without_field(path) if is_op(node) else path: (node, stack) for path, (node, stack) in nodes.items()}


def types_of(rules: tuple[LayerRule, ...]) -> tuple[type, ...]:
    """The classes of layers that have a rule."""
    return tuple(jax.tree.leaves([rule.layer_type for rule in rules]))


def _find(module: Any, types: tuple[type, ...]) -> dict[str, tuple[Any, tuple[hax.Axis, ...]]]:
    nodes: dict[str, tuple[Any, tuple[hax.Axis, ...]]] = {}

    def collect(path: str, node: Any, stack: tuple[hax.Axis, ...]) -> Any:
        nodes[path] = (node, stack)
        return node

    _walk(collect, module, types, (), ())
    return nodes


def map_layers[M](function: Callable[[str, Any], M], module: M, rules: tuple[LayerRule, ...]) -> M:
    """The tree with every layer that has a rule replaced by `function(path, layer)`."""
    return map_layers_in_stacks(lambda path, layer, stack: function(path, layer), module, rules)


def map_layers_in_stacks[M](
    function: Callable[[str, Any, tuple[hax.Axis, ...]], Any], module: M, rules: tuple[LayerRule, ...]
) -> M:
    """Like `map_layers`, for a function that also takes the axes of the stacks that a layer is in."""
    return _walk(function, module, types_of(rules), (), ())


def map_layers_and_ops[M](
    function: Callable[[str, Any, Fp8DotGeneral], Fp8DotGeneral], module: M, rules: tuple[LayerRule, ...]
) -> M:
    """The tree with every op replaced by `function(path, layer, op)`; an op that is in no layer is the layer too."""

    def change(path: str, node: Any, stack: tuple[hax.Axis, ...]) -> Any:
        if is_op(node):
            return function(_without_field(path), node, node)
        rule = rule_of(node, rules)
        op = rule.op(node)
        return node if op is None else rule.with_op(node, function(path, node, op))

    return _walk(change, module, (*types_of(rules), Fp8DotGeneral), (), ())


def _walk(
    function: Callable[[str, Any, tuple[hax.Axis, ...]], Any],
    tree: Any,
    types: tuple[type, ...],
    prefix: tuple[KeyEntry, ...],
    stack: tuple[hax.Axis, ...],
) -> Any:
    def visit(path: tuple[KeyEntry, ...], node: Any) -> Any:
        path = prefix + path
        if isinstance(node, types):
            return function(path_string(path), node, stack)
        if isinstance(node, hnn.Stacked):
            inner = _walk(function, node.stacked, types, (*path, STACKED), (*stack, node.Block))
            return dataclasses.replace(node, stacked=inner)
        return node

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=lambda node: isinstance(node, (*types, hnn.Stacked)))


STACKED = jax.tree_util.GetAttrKey("stacked")


def path_string(path: Sequence[KeyEntry]) -> str:
    """A path in a tree, its parts joined by dots.

    Example:
        >>> path_string((GetAttrKey("layers"), SequenceKey(0), DictKey("up")))
        'layers.0.up'
    """
    parts = []
    for key in path:
        match key:
            case GetAttrKey():
                parts.append(key.name)
            case SequenceKey():
                parts.append(str(key.idx))
            case DictKey() | FlattenedIndexKey():
                parts.append(str(key.key))
            case _:
                parts.append(str(key).strip(".[]'\""))
    return ".".join(parts)


# --- ops


def all_ops(model: Any) -> list[Fp8DotGeneral]:
    """Every op.

    Args:
        model: A converted model, or any other tree.
    """
    return [node for node in jax.tree.leaves(model, is_leaf=is_op) if is_op(node)]


def named_ops(model: Any) -> Iterator[tuple[str, Fp8DotGeneral]]:
    """Every op with the path of its layer, empty for the model itself; slower than `all_ops`.

    Args:
        model: A converted model, or any other tree.
    """
    for path, node in jax.tree_util.tree_flatten_with_path(model, is_leaf=is_op)[0]:
        if is_op(node):
            yield _without_field(path_string(path)), node


def _without_field(path: str) -> str:
    """The path of an op without the field that holds it in a layer."""
    return path.removesuffix("dot_general").removesuffix(".")


def is_op(node: Any) -> bool:
    """Whether a node of a tree is an op."""
    return isinstance(node, Fp8DotGeneral)


# --- patterns


type Predicate = Callable[[str, Any], bool]


type Pattern = str | re.Pattern[str] | type | Predicate


type Targets = Pattern | Sequence[Pattern]


def as_patterns(name: str, targets: Targets) -> tuple[Pattern, ...]:
    """One pattern or several as a tuple.

    Args:
        name: The argument's name, for errors.
        targets: The argument.

    Raises:
        ValueError: If something is neither a string, a compiled regular expression, a class nor a function, is a layer,
            or is an empty string.
    """
    is_one = isinstance(targets, str | re.Pattern) or callable(targets)
    patterns: tuple[Any, ...] = tuple(targets) if isinstance(targets, Iterable) and not is_one else (targets,)
    for pattern in patterns:
        if isinstance(pattern, eqx.Module):
            raise ValueError(
                f"{name} holds a layer of class {type(pattern).__name__}; give its path, such as 'layers.2', which "
                f"print(describe(model)) shows, or a function: {name}=lambda path, layer: ..."
            )
        if not (isinstance(pattern, str | re.Pattern) or callable(pattern)):
            raise ValueError(
                f"{name} holds {pattern!r}; give the last part of a path ('up_proj'), a full path, a glob, "
                "a regular expression, a class of layers, or a function (path, layer) -> bool"
            )
        if pattern == "":
            raise ValueError(f"{name} holds an empty string, which selects no layer; '*' selects every one")
    return patterns


def matches(pattern: Pattern, path: str, layer: Any) -> bool:
    """Whether a pattern selects a layer.

    A string selects a path that it equals, whose last component it equals, or that it matches *in full* as a glob or
    as a regular expression: `layers.1` selects `layers.1`, never `layers.10`. A class selects its instances.

    Example:
        >>> patterns = ("up", "blocks.0.mlp.up", "*.up", r".*\\.(up|down)", "mlp")
        >>> [matches(pattern, "blocks.0.mlp.up", None) for pattern in patterns]
        [True, True, True, True, False]
    """
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch(path) is not None
    if isinstance(pattern, type):
        return isinstance(layer, pattern)
    if not isinstance(pattern, str):
        return bool(pattern(path, layer))
    if pattern in (path, path.rpartition(".")[2]) or fnmatch.fnmatchcase(path, pattern):
        return True
    try:
        return re.fullmatch(pattern, path) is not None
    except re.error:
        return False  # a glob such as `*.up` is not a regular expression


def unmatched_error(name: str, pattern: Pattern, paths: Sequence[str]) -> ValueError:
    """The error for a pattern that selects none of `paths`."""
    if not paths:
        return ValueError(f"{name}={pattern!r} selects nothing: the model has no layer that can be converted")
    shown = paths
    if isinstance(pattern, str):
        by_end = {path.rpartition(".")[2]: path for path in reversed(paths)}
        near = nearest(pattern, [*paths, *by_end], 5)
        shown = list(dict.fromkeys(by_end.get(n, n) for n in near)) or paths
    listed = ", ".join(shown[:5]) + (f", … ({len(paths)} in all)" if len(paths) > 5 else "")
    hint = ""
    if isinstance(pattern, str) and any(path.startswith(f"{pattern}.") for path in paths):
        hint = f"; {f'{pattern}.*'!r} selects what is beneath it"
    return ValueError(f"{name}={pattern!r} selects no layer; the nearest are: {listed}{hint}")


def nothing_to_convert(module: Any, rules: tuple[LayerRule, ...], refusals: Mapping[str, str]) -> ValueError:
    """The error for a model without a layer that can be converted.

    Args:
        module: The model.
        rules: The rules of the layer classes that can be converted.
        refusals: Why each layer that has a rule cannot be converted, by path.
    """
    classes = jax.tree.leaves([rule.layer_type for rule in rules if not isinstance(rule, Refused)])
    names = ", ".join(dict.fromkeys(_public(cls) for cls in classes if not cls.__module__.startswith("haliax_fp8.")))
    shown = list(refusals.items())[:3]
    refused = "".join(f"; {path or 'the module itself'} cannot be: {reason}" for path, reason in shown)
    hint = "for your own layer class, give Fp8Config(rules=...) a LayerRule"
    if type(module).__module__.startswith("flax."):
        hint = (
            'Flax\'s layers take an op without state, as in flax.nnx.Linear(dot_general=Fp8DotGeneral.init("current"))'
        )
    return ValueError(
        f"this {_public(type(module))} contains no layer that can be converted{refused}. Supported: {names}, anywhere "
        "in a tree of modules, lists and dicts. If a module multiplies by plain arrays, call an Fp8DotGeneral or "
        f"Fp8Einsum there; {hint}"
    )


def _public(cls: type) -> str:
    """The name by which a class is imported: those of Haliax and Equinox are in `nn`, Flax's in `nnx` or `linen`."""
    package, *rest = cls.__module__.split(".")
    if package in ("haliax", "equinox"):
        return f"{package}.nn.{cls.__name__}"
    public = f"flax.{rest[0]}" if package == "flax" and rest else cls.__module__
    return cls.__name__ if public in ("builtins", "__main__") else f"{public}.{cls.__name__}"
