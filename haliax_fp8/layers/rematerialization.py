"""The marker of modules that keep only their inputs for the backward pass, by which `describe` lists them."""

import abc
from collections.abc import Iterator
from typing import Any

import jax

from .patterns import path_string


class AbstractRematerialized(abc.ABC):
    """A module that `haliax_fp8.memory.rematerialize` changed; a subclass of the class that it had."""

    @property
    @abc.abstractmethod
    def in_short(self) -> str:
        """What it is, such as `SwiGlu in float32`."""


def find_rematerialized(model: Any) -> Iterator[tuple[str, str]]:
    """The path of every such module in a tree, with what it is.

    Args:
        model: The tree.
    """
    # A module may hold others: what is found is taken apart again.
    is_found = lambda node: isinstance(node, AbstractRematerialized)

    def walk(prefix: tuple[Any, ...], tree: Any) -> Iterator[tuple[str, str]]:
        is_leaf = lambda node: is_found(node) and node is not tree
        for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
            if is_found(node):
                yield path_string((*prefix, *path)), node.in_short
                yield from walk((*prefix, *path), node)

    if is_found(model):
        yield "", model.in_short
    yield from walk((), model)
