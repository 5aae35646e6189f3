"""The argument that is a model: what else was given is named, with the remedy."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np

from .config import Fp8Config
from .ops import is_op


def require_tree(tree: Any, call: str, name: str = "model") -> None:
    """Raises a ValueError if an argument is nothing that could have numbers: None, a class, a function, a text.

    Args:
        tree: What was given.
        call: How the function is called.
        name: The argument's name.
    """
    if isinstance(tree, type):
        raise ValueError(f"{name} is the class {tree.__name__}, but must be an instance, with weights; use {call}")
    is_array = isinstance(tree, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    if tree is None or (_is_leaf(tree) and not is_array):
        raise _without_layers(tree, call, name)


def require_model(model: Any, call: str, name: str = "model") -> None:
    """Like `require_tree`, for functions that take a model without its optimizer's state.

    Moments have the structure of the model, so every layer would be found again in them.

    Args:
        model: As in `require_tree`.
        call: As in `require_tree`.
        name: As in `require_tree`.
    """
    require_tree(model, call, name)
    if type(model) is not tuple:
        return
    for index, item in enumerate(model):
        others = model[:index] + model[index + 1 :]
        if isinstance(item, eqx.Module) and any(_is_of_optimizer(other, type(item)) for other in others):
            raise ValueError(
                f"{name} is a tuple with an optimizer's state, and the model is {_item(index)}: give the model alone, "
                f"{call}"
            )


def require_layers(model: Any, call: str, name: str = "model") -> None:
    """Like `require_model`, for functions to which an array or an op alone is not a model.

    Args:
        model: As in `require_tree`.
        call: As in `require_tree`.
        name: As in `require_tree`.
    """
    require_model(model, call, name)
    if is_op(model):
        raise ValueError(f"{name} is an Fp8DotGeneral, the product of a layer; use {call}, with the model it is in")
    if isinstance(model, hax.NamedArray) or _is_leaf(model):
        raise _without_layers(model, call, name)


def holds_optimizer_state(tree: Any) -> bool:
    """Whether a tree is an optimizer's state, or has one in it: Optax makes it of named tuples, models have none."""
    return any(map(_is_named_tuple, jax.tree.leaves(tree, is_leaf=_is_named_tuple)))


def _is_leaf(tree: Any) -> bool:
    return not isinstance(tree, eqx.Module) and jax.tree_util.all_leaves([tree])


def _is_of_optimizer(tree: Any, model_type: type) -> bool:
    """Whether a tree has moments of a model of a class, or is an optimizer's state that needs none.

    A named tuple may also be what a recurrent layer carries, or several models: Optax calls its own `...State`.
    """
    states = [x for x in jax.tree.leaves(tree, is_leaf=_is_named_tuple) if type(x).__name__.endswith("State")]
    is_model = lambda node: isinstance(node, model_type)
    return any(not x or any(map(is_model, jax.tree.leaves(x, is_leaf=is_model))) for x in states)


def _is_named_tuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _without_layers(model: Any, call: str, name: str) -> ValueError:
    if model is None:
        shown = "None"
    elif isinstance(model, Fp8Config):
        shown = "an Fp8Config"
    else:
        shown = "a function" if callable(model) else f"of type {type(model).__name__}"
    return ValueError(f"{name} is {shown}, and has no layers; use {call}, with the model itself")


def _item(index: int) -> str:
    return f"its {('first', 'second', 'third')[index]} item" if index < 3 else f"its item {index}"
