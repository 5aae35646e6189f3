"""Names of Haliax's state dict, from the paths of a model's tree."""

import dataclasses
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, KeyPath, SequenceKey


@dataclasses.dataclass(frozen=True)
class Place:
    """Where something is in a model, by the names of Haliax's state dict.

    Args:
        parts: The components of its name; None where the number of a block comes.
        stack: The axis of the blocks for each None.
    """

    parts: tuple[str | None, ...] = ()
    stack: tuple[hax.Axis, ...] = ()

    def name(self, blocks: tuple[int, ...], *more: int | str) -> str:
        """The name with the numbers of blocks filled in, and what follows it."""
        numbers = iter(blocks)
        return ".".join([str(next(numbers)) if part is None else str(part) for part in (*self.parts, *more)])

    def __str__(self) -> str:
        return ".".join(["*" if part is None else part for part in self.parts])


class Places:
    """The place of each path of a tree, as `jax.tree_util.tree_flatten_with_path` gives them.

    Fields have their name, or the one that a module's `_state_dict_key_map` gives them; elements of lists their number;
    blocks of a stack are numbered as if they were elements of a list; what an `eqx.nn.Shared` holds is as if it were
    in its place.
    """

    def __init__(self, tree: Any):
        """The places of a tree."""
        self._known: dict[KeyPath, tuple[Any, Place]] = {(): (tree, Place())}

    def __getitem__(self, path: KeyPath) -> Place:
        return self._at(path)[1]

    def node(self, path: KeyPath) -> Any:
        """What is there."""
        return self._at(path)[0]

    def _at(self, path: KeyPath) -> tuple[Any, Place]:
        if path not in self._known:
            (node, place), key = self._at(path[:-1]), path[-1]
            self._known[path] = _child(node, key), _place_of_child(node, key, place)
        return self._known[path]


def _child(node: Any, key: Any) -> Any:
    match key:
        case GetAttrKey(name=name):
            return getattr(node, name)
        case SequenceKey(idx=index) | DictKey(key=index):
            return node[index]
    return None  # A node of a class that others registered: what is in it has no names of its own.


def _place_of_child(node: Any, key: Any, place: Place) -> Place:
    match key:
        case GetAttrKey(name=name):
            names = getattr(node, "_state_dict_key_map", dict)() if isinstance(node, eqx.Module) else {}
            if isinstance(node, eqx.nn.Shared):
                names = {"pytree": None}
            part = names.get(name, name)
            parts = place.parts if part is None else (*place.parts, part)
            if isinstance(node, hnn.Stacked) and name == "stacked":
                return Place((*parts, None), (*place.stack, node.Block))
            return Place(parts, place.stack)
        case SequenceKey(idx=part) | DictKey(key=part) | FlattenedIndexKey(key=part):
            return Place((*place.parts, str(part)), place.stack)
    return Place((*place.parts, str(key)), place.stack)
