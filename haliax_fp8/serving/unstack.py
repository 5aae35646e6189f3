"""Unstacks layers, because XLA copies a loop's FP8 kernels before it multiplies."""

import dataclasses
from typing import Any

import haliax as hax
import haliax.nn as hnn
import jax

from ..layers.quantized import is_quantized_layer
from .blocks import ServedBlocks


def unstacked(tree: Any) -> Any:
    """The model with separate blocks in place of stacks that have layers for inference; stacks in ensembles stay.

    Args:
        tree: The model, or a part of it.
    """
    is_stack = lambda node: isinstance(node, hnn.Stacked)

    def one_by_one(node: Any) -> Any:
        if not is_stack(node) or not holds_quantized_layers(node) or _in_ensemble(node):
            return node if not is_stack(node) else dataclasses.replace(node, stacked=unstacked(node.stacked))
        blocks = tuple(map(unstacked, node.unstacked()))
        return ServedBlocks(blocks, node.Block, node.gradient_checkpointing)

    # A layer that appears at two paths stays one object.
    return jax.tree.map(one_by_one, tree, is_leaf=lambda node: is_stack(node) or is_quantized_layer(node))


def holds_quantized_layers(tree: Any) -> bool:
    """Whether a tree has a layer with data and scales.

    Args:
        tree: Any tree.
    """
    return any(map(is_quantized_layer, jax.tree.leaves(tree, is_leaf=is_quantized_layer)))


def _in_ensemble(tree: Any) -> bool:
    """Whether arrays have axes that their names do not include."""
    named = lambda node: isinstance(node, hax.NamedArray)
    leaves = [node for node in jax.tree.leaves(tree, is_leaf=named) if named(node)]
    return any(leaf.array.ndim != len(leaf.axis_names) for leaf in leaves)
