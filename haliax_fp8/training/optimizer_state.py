"""Carries an optimizer's state over a conversion of the model."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..layers.model_argument import require_layers
from .updates import trainable


def transfer_optimizer_state(opt_state: PyTree, old_model: Any, new_model: Any) -> PyTree:
    """An optimizer's state for a model that was converted, or converted back, during training.

    Conversion does not change parameters, but it changes the type of a layer's product, and with it the tree that
    moments are stored in. This function puts the same moments into the new model's tree.

    Args:
        opt_state: The optimizer's state for `old_model`.
        old_model: The model before `fp8_linear_layers` or `restore_linear_layers`.
        new_model: The model after it.

    Returns:
        The state, in which every tree with the old model's structure has the new model's instead.

    Raises:
        ValueError: If the models' parameters differ in number, shape or dtype, or `opt_state` is not `old_model`'s.

    Example:
        >>> step, fp8_model = TrainStep(loss_fn, optax.adamw(1e-3)), fp8_linear_layers(model)
        >>> opt_state = transfer_optimizer_state(step.init(model), model, fp8_model)
        >>> jax.tree.structure(opt_state) == jax.tree.structure(step.init(fp8_model))
        True
    """
    for name, model in (("old_model", old_model), ("new_model", new_model)):
        require_layers(model, "transfer_optimizer_state(opt_state, old_model, new_model)", name)
    old, new = trainable(old_model), trainable(new_model)
    old_leaves, old_structure = jax.tree.flatten(old)
    new_leaves, new_structure = jax.tree.flatten(new)
    described = [[(x.shape, x.dtype) for x in leaves] for leaves in (old_leaves, new_leaves)]
    if described[0] != described[1]:
        raise ValueError(
            f"new_model and old_model have different parameters ({len(new_leaves)} and {len(old_leaves)} arrays); only "
            "a conversion of the same parameters can keep the optimizer's state"
        )

    def parts(node: Any) -> list[Any] | None:
        """The node of a model-shaped tree for each parameter: an array, or Optax's `MaskedNode`."""
        try:
            return old_structure.flatten_up_to(node)
        except (ValueError, TypeError):
            return None

    def is_model_tree(node: Any) -> bool:
        return parts(node) is not None

    nodes = jax.tree.leaves(opt_state, is_leaf=is_model_tree)
    if not any(map(is_model_tree, nodes)) and any(jnp.ndim(node) > 0 for node in nodes):
        raise ValueError(
            "opt_state holds no tree with the structure of old_model's parameters; it was not made by "
            "optimizer.init(trainable(old_model))"
        )

    def transfer(node: Any) -> Any:
        return node if (old_parts := parts(node)) is None else jax.tree.unflatten(new_structure, old_parts)

    return jax.tree.map(transfer, opt_state, is_leaf=is_model_tree)
