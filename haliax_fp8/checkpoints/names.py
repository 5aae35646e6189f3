"""The leaves of a tree by name: what entries of a checkpoint are matched with."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import numpy as np

from ..layers import is_quantized_layer
from ..layers.checks import holds_optimizer_state
from ..layers.walk import path_string
from ..training import OpState, QuantizedState


class Leaf(NamedTuple):
    """An array or a number of a tree.

    Args:
        name: Its path, joined by dots, as `layers.0.weight`; for a named array that of the array inside is left out.
        value: An array, a `jax.ShapeDtypeStruct`, a Python number, or None where a named array has none.
        state: The state whose table it is; else None.
    """

    name: str
    value: Any
    state: OpState | None = None


def is_whole(node: Any) -> bool:
    """Whether a leaf is made of it as it is, whatever is in it."""
    return isinstance(node, OpState | hax.NamedArray)


def leaves_of(tree: Any) -> Iterator[Leaf]:
    """Every leaf, in the order of the tree; the table of an op's state once, with the state."""
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_whole)[0]:
        name = path_string(path)
        if isinstance(node, OpState):
            # An op without a table, as in the moments of an optimizer that trains part of a model, has no state.
            yield Leaf(f"{name}.table", node.table.array, None if node.table.array is None else node)
        elif isinstance(node, hax.NamedArray):
            yield Leaf(name, node.array)
        else:
            yield Leaf(name, node)


def with_leaves(tree: Any, values: list[Any]) -> Any:
    """The tree with other values in the order of `leaves_of`."""
    nodes, structure = jax.tree.flatten(tree, is_leaf=is_whole)

    def replaced(node: Any, value: Any) -> Any:
        # A named array holds no array, but Optax's `MaskedNode`, where an optimizer leaves a parameter out.
        if value is None or (isinstance(node, hax.NamedArray) and value is node.array):
            return node
        if isinstance(node, OpState):
            return node.with_array(value)
        # Through the tree: the names may count axes that the array does not have.
        return jax.tree.unflatten(jax.tree.structure(node), [value]) if isinstance(node, hax.NamedArray) else value

    return jax.tree.unflatten(structure, [replaced(*pair) for pair in zip(nodes, values, strict=True)])


def former_names(tree: Any) -> dict[str, str]:
    """The names that data and scales of quantized layers had in earlier checkpoints, by those of today.

    Frozen experts have none: the axes of their scales were in another order.
    """
    former = {}
    for path, layer in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_quantized_layer)[0]:
        if not is_quantized_layer(layer) or (layer.kernel.has_gradient and layer.described.Experts is not None):
            continue
        at = ".".join(filter(None, (path_string(path), "kernel")))
        for name, before in (("data", "data"), ("scale", "scale"), ("tensor_scale", "unit")):
            former[f"{at}.stored.{name}"] = f"{at}.{before}"
    return former


def is_saved(value: Any) -> bool:
    """Whether a leaf is an array or a number, which checkpoints hold; anything else comes from the code."""
    return eqx.is_array_like(value) or isinstance(value, jax.ShapeDtypeStruct)


def name_twice(names: Iterable[str]) -> str | None:
    """A name that two leaves have, of which one would get the other's numbers; None if there is none."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def require_one_each(names: Iterable[str], what: str) -> None:
    """Raises a ValueError if two leaves have the same name.

    Args:
        names: The names.
        what: What has them, for the error.
    """
    if (name := name_twice(names)) is not None:
        raise ValueError(f"{what} has two leaves called {name!r}; rename one: a key with a dot reads as a path")


def described(value: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of such a leaf."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    return jax.ShapeDtypeStruct((), np.asarray(value).dtype)


def is_rounding_key(name: str) -> bool:
    """Whether a leaf is the key of an op that rounds stochastically, which every step replaces."""
    return name.endswith("dot_general.key")


def within(name: str, paths: Iterable[str]) -> str:
    """The one of some paths that a name is in; empty if it is in none."""
    return next((path for path in paths if f"{name}.".startswith(f"{path}.")), "")


def states_of_optimizers(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[str]:
    """The parts of a tree that hold such a state, and no model beside it."""
    children = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    for key, part in children:
        if not holds_optimizer_state(part):
            continue
        if _has_model(part):
            yield from states_of_optimizers(part, (*path, *key))
        else:
            yield path_string((*path, *key))


def _has_model(part: Any) -> bool:
    """Whether a part is a module or has one, as what trainers keep; not in named tuples, as moments are."""
    if isinstance(part, eqx.Module):
        return not isinstance(part, QuantizedState)
    values = part.values() if isinstance(part, dict) else part if type(part) in (tuple, list) else ()
    return any(map(_has_model, values))
