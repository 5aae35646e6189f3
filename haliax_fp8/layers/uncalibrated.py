"""Which scales are not calibrated yet, or of no step, read from a model on the host."""

from typing import Any

import numpy as np

from .._state.op_state import OpState
from ..recipes.recipe import OPERAND_NAMES
from ..recipes.scaling import DelayedScaling, StaticScaling
from .ops import all_ops, named_ops
from .own_state import table_on_host


def uncalibrated_operands(state: Any, *, wait: bool = True) -> tuple[str, ...]:
    """The operands of an op whose scale is not calibrated in at least one layer of its stack.

    Args:
        state: An op's state. An abstract or traced state has no values to read, so no operand is reported.
        wait: Whether to wait for a state that is being computed; without it, no operand is reported for such a state.
    """
    if not isinstance(state, OpState):
        return ()
    rows = [row for row, s in enumerate(state.scalings) if isinstance(s, StaticScaling) and s.scale is None]
    table = table_on_host(state, wait=wait) if rows else None
    return () if table is None else tuple(OPERAND_NAMES[row] for row in rows if np.isinf(table[..., row, 0]).any())


def unrecorded_operands(state: Any) -> tuple[str, ...]:
    """The operands of an op whose delayed scale is still the first one, 1, in at least one layer of its stack.

    Steps that were not finite do not count: they record `-inf`, and leave the scale as it was.

    Args:
        state: As in `uncalibrated_operands`.
    """
    if not isinstance(state, OpState) or (table := table_on_host(state)) is None:
        return ()
    rows = [row for row, scaling in enumerate(state.scalings) if isinstance(scaling, DelayedScaling)]
    is_first = (table[..., 0] == 1.0) & (table[..., 1:-1] <= 0.0).all(-1)
    return tuple(OPERAND_NAMES[row] for row in rows if is_first[..., row].any())


def require_calibrated(model: Any, *, wait: bool = True) -> None:
    """Raises a ValueError that names the layers, if a static scale is not calibrated yet.

    Args:
        model: A model; not checked if it is traced or abstract.
        wait: As in `uncalibrated_operands`.
    """
    # Paths are slow to make, and needed for the message alone.
    if not any(uncalibrated_operands(op.state, wait=wait) for op in all_ops(model)):
        return
    operands = {name: uncalibrated_operands(op.state, wait=wait) for name, op in named_ops(model)}
    found = [f"{name or 'the model itself'} ({', '.join(missing)})" for name, missing in operands.items() if missing]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(
            f"model has static scales that are not calibrated, in {len(found)} layers: {', '.join(found[:3])}{more}. "
            "Calibrate it first: model = step.calibrate(model, *batch) with a TrainStep, or calibrate(model, loss_fn, "
            "[batch]). If you did, the loss did not reach these operands, or they were all zeros or not finite: "
            "calibrate on another batch, leave the layers out with Fp8Config(exclude=...), or give a scale, "
            "StaticScaling(scale=...)"
        )
