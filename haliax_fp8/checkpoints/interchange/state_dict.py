"""Haliax's state dicts: their keys as the names of a model's leaves."""

import re
from collections.abc import Iterator
from typing import Any

import haliax.nn as hnn
import jax
import numpy as np

from ...layers.patterns import path_string
from .checkpoint import Entries, HostArrays
from .names import described, is_saved, leaves_of


def with_names_of(model: Any, checkpoint: HostArrays) -> HostArrays:
    """A checkpoint whose keys may be those of Haliax's state dict of the model, with keys that are names of leaves.

    Haliax renames fields as `_state_dict_key_map` says, and has an entry for each layer of a stack; here a stack is one
    array again. Axes that `to_torch_compatible_state_dict` flattened into one are several again.

    Args:
        model: The model.
        checkpoint: The entries.

    Raises:
        ValueError: If two keys belong to one leaf.
    """
    shapes = {leaf.name: described(leaf.value).shape for leaf in leaves_of(model) if is_saved(leaf.value)}
    pairs = _renamed(model, checkpoint.entries)
    if len(shapes.keys() & dict(pairs).keys()) <= len(shapes.keys() & checkpoint.entries.keys()):
        pairs = [(name, (name,)) for name in checkpoint.entries]
    renamed: dict[str, tuple[str, ...]] = {}
    for name, keys in pairs:
        if name in renamed:
            first, second = sorted((renamed[name][0], keys[0]))
            raise ValueError(f"the checkpoint has two keys for {name}, {first!r} and {second!r}; remove one")
        renamed[name] = keys
    entries: dict[str, jax.ShapeDtypeStruct] = {}
    for name, keys in renamed.items():
        parts = [checkpoint.entries[key] for key in keys]
        # Layers of different shapes cannot be stacked; each remains what it is.
        if isinstance(keys, _Stack) and len({(x.shape, x.dtype) for x in parts}) == 1:
            entries[name] = jax.ShapeDtypeStruct((len(keys), *parts[0].shape), parts[0].dtype)
        else:
            entries |= {name if len(keys) == 1 else key: x for key, x in zip(keys, parts, strict=True)}
    flat = {name for name, entry in entries.items() if name in shapes and _is_flattened(entry.shape, shapes[name])}
    entries |= {name: jax.ShapeDtypeStruct(shapes[name], entries[name].dtype) for name in flat}

    def array(name: str) -> Any:
        keys = renamed.get(name, (name,))
        arrays = [np.asarray(checkpoint.array(key)) for key in keys]
        whole = np.stack(arrays) if isinstance(keys, _Stack) else arrays[0]
        return whole.reshape(shapes[name]) if name in flat else whole

    return HostArrays(entries, array)


def _is_flattened(flat: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether one shape is the other with neighbouring axes made one."""
    if len(flat) >= len(shape):
        return False
    rest = list(shape)
    for size in flat:
        product = 1
        while rest and product < size:
            product *= rest.pop(0)
        if product != size:
            return False
    return all(size == 1 for size in rest)


class _Stack(tuple[str, ...]):
    """The keys of the layers of a stack, in their order."""


def _renamed(model: Any, entries: Entries) -> list[tuple[str, tuple[str, ...]]]:
    """Names with the keys of their parts; a name that two keys belong to occurs twice."""
    prefixes = sorted(_prefixes(model), key=lambda prefix: -len(prefix[0]))
    patterns = [(re.compile(pattern), name) for pattern, name in prefixes]
    plain: list[tuple[str, tuple[str, ...]]] = []
    stacks: dict[str, dict[int, str]] = {}
    for key in entries:
        found = ((pattern.match(key), name) for pattern, name in patterns)
        match, name = next((pair for pair in found if pair[0] is not None), (None, ""))
        name = key if match is None else name + key[match.end() :]
        if match is None or not match.groups():
            plain.append((name, (key,)))
        else:
            stacks.setdefault(name, {})[int(match.group(1))] = key
    whole = [(name, _Stack(parts[i] for i in range(len(parts)))) for name, parts in stacks.items() if _is_full(parts)]
    partial = [(key, (key,)) for parts in stacks.values() if not _is_full(parts) for key in parts.values()]
    return plain + partial + whole


def _is_full(parts: dict[int, str]) -> bool:
    return sorted(parts) == list(range(len(parts)))


def _prefixes(node: Any, pattern: str = "", name: str = "") -> Iterator[tuple[str, str]]:
    """The prefixes of keys beneath a node, as patterns, and of the names that they stand for, where they differ.

    The pattern has a group for the index of a layer in a stack. Each has a dot at its end if it is not empty.
    """
    has_map = getattr(node, "_state_dict_key_map", None)
    renames: Any = has_map() if callable(has_map) and not isinstance(node, type) else {}
    for path, child in _children(node):
        field = path_string(path)
        part = renames.get(field, field)
        inner = pattern if part is None else rf"{pattern}{re.escape(part)}\."
        # A stack in a stack keeps its keys: nothing in Haliax says how both indices are written.
        if isinstance(node, hnn.Stacked) and field == "stacked" and "(" not in pattern:
            inner = rf"{inner}(0|[1-9][0-9]*)\."
        if inner != rf"{pattern}{re.escape(field)}\.":
            yield inner, f"{name}{field}."
        yield from _prefixes(child, inner, f"{name}{field}.")


def _children(node: Any) -> list[tuple[Any, Any]]:
    """The nodes directly beneath one."""
    flat = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return [] if len(flat) == 1 and flat[0][1] is node else flat
