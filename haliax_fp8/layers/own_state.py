"""On the host: whether only its own updates changed a model's state."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .._state.guard import is_changed as scale_is_changed
from .._state.op_state import OpState
from .._state.require import KEEP_STATE_WITH_TRAINED
from .._state.table import numbers_of
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


def require_whole_state(model: Any, *, calibrating: bool = False) -> None:
    """Raises a ValueError that names the layers, if a step would have to update state that is in another part.

    Args:
        model: A model, or a part of one, as `eqx.partition` returns it.
        calibrating: Whether state that training only reads is written too, as that of static scaling.
    """

    def is_missing(state: Any) -> bool:
        missing = isinstance(state, OpState) and state.table.array is None
        return missing and (calibrating or numbers_of(state.scalings) > 0)

    if any(is_missing(op.state) for op in all_ops(model)):
        found = [name or "the model itself" for name, op in named_ops(model) if is_missing(op.state)]
        raise ValueError(
            f"the FP8 state of {_first(found)} is not in this part of the model, so its scales would never be updated: "
            f"eqx.partition put it with the frozen weights. {KEEP_STATE_WITH_TRAINED} Or pass the whole model, and "
            "freeze weights in the optimizer: optax.masked(optax.set_to_zero(), mask) at its end"
        )


def _first(layers: list[str]) -> str:
    """The first three, and how many more there are."""
    return ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")


def changed_message(layers: list[str]) -> str:
    """What happened to the state of layers, and how to train and average instead."""
    return (
        f"the FP8 state of {_first(layers)} was changed by something other than its own update: an "
        "optimizer, weight decay or an average that was given the whole model, or gradients that were divided before "
        "state was split from them. Scales are not parameters, and products with them now give NaN. Use TrainStep, or "
        "split state from parameters in your step:\n"
        "    overwrites, grads = partition_for_grad_overwrite(grads)\n"
        "    updates, opt_state = optimizer.update(grads, opt_state, trainable(model))\n"
        "    model = apply_updates(model, updates, overwrites)\n"
        "and start with optimizer.init(trainable(model)). Average models (EMA, SWA, target networks) with\n"
        "    average = training.incremental_update(model, average, step_size=0.01)\n"
        "The state of this model is lost: convert it again, fp8_linear_layers(restore_linear_layers(model), config)"
    )


def is_changed(state: Any, *, wait: bool = True) -> bool:
    """Whether a state holds a scale that does not match its guard; False if it has no values to read.

    Args:
        state: An op's state.
        wait: As in `require_own_state`.
    """
    table = table_on_host(state, wait=wait)
    return table is not None and scale_is_changed(table[..., 0], table[..., -1])


def are_usable(tables: Sequence[np.ndarray]) -> bool:
    """Whether only their own updates changed all these tables, and each of their scales is calibrated.

    Args:
        tables: From `tables_on_host`.
    """
    if not tables:
        return True
    columns = ([table[..., column].ravel() for table in tables] for column in (0, -1))
    # Models may be cast to several dtypes.
    scales, guards = (np.concatenate(column, dtype=np.float32, casting="unsafe") for column in columns)
    return not np.isinf(scales).any() and not scale_is_changed(scales, guards)


def table_on_host(state: Any, *, wait: bool = True) -> np.ndarray | None:
    """The numbers of an op's state; None if it is abstract, traced, deleted or not a state.

    Args:
        state: Anything.
        wait: Whether to wait for state that is being computed; without it, such state gives None.
    """
    tables = tables_on_host([state.table.array], wait=wait) if isinstance(state, OpState) else []
    return tables[0] if tables else None


def tables_on_host(tables: Sequence[Any], *, wait: bool = True) -> list[np.ndarray]:
    """The numbers of those tables that have any: not of abstract, traced and deleted ones.

    Args:
        tables: The tables of several states.
        wait: As in `table_on_host`.
    """
    found: list[Any] = []
    for table in tables:
        if isinstance(table, np.ndarray):
            found.append(table)
        # JAX's arrays have `is_ready`, but its types do not declare it.
        elif isinstance(table, jax.Array) and not isinstance(table, Tracer) and not table.is_deleted():
            if wait or getattr(table, "is_ready", lambda: True)():
                # On several hosts each one has a copy of its own.
                found.append(table if table.is_fully_addressable else table.addressable_data(0))
    # All copies from the device run at the same time.
    return jax.device_get(found)
