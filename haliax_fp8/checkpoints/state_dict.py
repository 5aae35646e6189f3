"""Haliax's state dicts: their keys as the names of a model's leaves."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ..layers import Places
from .checkpoint import Entries, HostArrays
from .names import described, is_saved, is_whole, leaves_of


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

    return HostArrays(entries, array, checkpoint.run)


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
    templates = dict(_templates(model))
    renamed: list[tuple[str, tuple[str, ...]]] = []
    stacks: dict[str, dict[int, str]] = {}
    for key in entries:
        parts = tuple(key.split("."))
        numbers = [i for i, part in enumerate(parts) if part.isdecimal() and str(int(part)) == part]
        of_stack = [(i, templates.get((*parts[:i], None, *parts[i + 1 :]))) for i in numbers]
        i, name = next((pair for pair in of_stack if pair[1] is not None), (None, None))
        if i is None or name is None or parts in templates:
            renamed.append((templates.get(parts, key), (key,)))
        else:
            stacks.setdefault(name, {})[int(parts[i])] = key
    for name, keys in stacks.items():
        is_full = sorted(keys) == list(range(len(keys)))
        renamed += [(name, _Stack(keys[i] for i in sorted(keys)))] if is_full else [(k, (k,)) for k in keys.values()]
    return renamed


def _templates(model: Any) -> Iterator[tuple[tuple[str | None, ...], str]]:
    """The components of each leaf's key, None for the number of a block, and the leaf's name."""
    places, flat = Places(model), jax.tree_util.tree_flatten_with_path(model, is_leaf=is_whole)[0]
    for (path, _), leaf in zip(flat, leaves_of(model), strict=True):
        parts: list[str | None] = []
        for part in places[path].parts:
            # A stack in a stack keeps its keys: nothing in Haliax says how both indices are written.
            if part is not None or None not in parts:
                parts += [None] if part is None else part.split(".")
        yield (*parts, *(() if leaf.state is None else ("table",))), leaf.name
