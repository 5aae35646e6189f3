"""On the host: whether only its own updates changed a model's state."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._state.guard import is_changed as scale_is_changed
from .._state.op_state import OpState
from .ops import all_ops, named_ops


def require_own_state(model: Any, *, wait: bool = True) -> None:
    """Raises a ValueError that names the layers, if anything but its own update changed the state of one.

    An optimizer that gets the whole tree, weight decay, an average of models: each of them changes scales, which are
    not parameters. On a device, products with such scales give NaN.

    Args:
        model: A model, or any tree; not checked if it is traced or abstract.
        wait: Whether to wait for state that is being computed; without it, such state is not checked.
    """
    # Paths are slow to make, and needed for the message alone.
    if not any(is_changed(op.state, wait=wait) for op in all_ops(model)):
        return
    found = [name or "the model itself" for name, op in named_ops(model) if is_changed(op.state, wait=wait)]
    if found:
        raise ValueError(changed_message(found))


def changed_message(layers: list[str]) -> str:
    """What happened to the state of layers, and the correct training step."""
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return (
        f"the FP8 state of {', '.join(layers[:3])}{more} was changed by something other than its own update: an "
        "optimizer, weight decay or an average that was given the whole model. Scales are not parameters, and "
        "products with them now give NaN. Use TrainStep, or split state from parameters in your step:\n"
        "    overwrites, grads = partition_for_grad_overwrite(grads)\n"
        "    updates, opt_state = optimizer.update(grads, opt_state, trainable(model))\n"
        "    model = apply_updates(model, updates, overwrites)\n"
        "and start with optimizer.init(trainable(model)). The state of this model is lost: convert it again, "
        "fp8_linear_layers(restore_linear_layers(model), config)"
    )


def is_changed(state: Any, *, wait: bool = True) -> bool:
    """Whether a state holds a scale that does not match its guard; False if it has no values to read.

    Args:
        state: An op's state.
        wait: As in `require_own_state`.
    """
    table = table_on_host(state, wait=wait)
    return table is not None and scale_is_changed(table[..., 0], table[..., -1])


def table_on_host(state: Any, *, wait: bool = True) -> np.ndarray | None:
    """The numbers of an op's state; None if it is abstract, traced, deleted or not a state.

    Args:
        state: Anything.
        wait: Whether to wait for state that is being computed; without it, such state gives None.
    """
    table = state.table.array if isinstance(state, OpState) else None
    if isinstance(table, jax.Array):
        # JAX's arrays have `is_ready`, but its types do not declare it.
        if isinstance(table, Tracer) or table.is_deleted() or not (wait or getattr(table, "is_ready", lambda: True)()):
            return None
        # On several hosts each one has a copy of its own.
        table = np.asarray(table if table.is_fully_addressable else table.addressable_data(0))
    return table if isinstance(table, np.ndarray) else None
