"""Patterns that select layers by their path, and the error if one selects nothing."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, KeyEntry, SequenceKey

from .._numerics.nearest import nearest


type Predicate = Callable[[str, Any], bool]
type Pattern = str | re.Pattern[str] | Predicate
type Targets = Pattern | Sequence[Pattern]


def as_patterns(name: str, targets: Targets) -> tuple[Pattern, ...]:
    """One pattern or several as a tuple.

    Args:
        name: The argument's name, for errors.
        targets: What the user gave.

    Raises:
        ValueError: If something is neither a string, a compiled regular expression nor a function, is a layer, or is an
            empty string.
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
                "a regular expression, or a function (path, layer) -> bool"
            )
        if pattern == "":
            raise ValueError(f"{name} holds an empty string, which selects no layer; '*' selects every one")
    return patterns


def matches(pattern: Pattern, path: str, layer: Any) -> bool:
    """Whether a pattern selects a layer.

    A string selects a path that it equals, whose last component it equals, or that it matches *in full* as a glob or
    as a regular expression: `layers.1` selects `layers.1`, never `layers.10`.

    Example:
        >>> patterns = ("up", "blocks.0.mlp.up", "*.up", r".*\\.(up|down)", "mlp")
        >>> [matches(pattern, "blocks.0.mlp.up", None) for pattern in patterns]
        [True, True, True, True, False]
    """
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch(path) is not None
    if not isinstance(pattern, str):
        selected = pattern(path, layer)
        if hasattr(selected, "dtype") and not isinstance(selected, np.bool_):
            raise ValueError(
                f"a function among the patterns returned an array for {path!r} but must return True or False; "
                "wrap its result in bool(...)"
            )
        return bool(selected)
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
