"""The FP8 ops of a model, in the order of its tree."""

from collections.abc import Iterator
from typing import Any

import jax

from .._op import Fp8DotGeneral
from .patterns import path_string


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
            yield path_string(path).removesuffix("dot_general").removesuffix("."), node


def is_op(node: Any) -> bool:
    """Whether a node of a tree is an op."""
    return isinstance(node, Fp8DotGeneral)
