"""Which static scales are not calibrated yet, read from a model on the host."""

from typing import Any

import jax
import numpy as np

from .._op import Fp8DotGeneral
from .._state.op_state import OpState
from ..recipes.scaling import StaticScaling
from .own_state import table_on_host
from .patterns import path_string


_OPERANDS = ("input", "kernel", "output_grad")


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
    return () if table is None else tuple(_OPERANDS[row] for row in rows if np.isinf(table[..., row, 0]).any())


def require_calibrated(model: Any, *, wait: bool = True) -> None:
    """Raises a ValueError that names the layers, if a static scale is not calibrated yet.

    Args:
        model: A model; not checked if it is traced or abstract.
        wait: As in `uncalibrated_operands`.
    """
    is_op = lambda node: isinstance(node, Fp8DotGeneral)
    # Paths are slow to make, and needed for the message alone.
    if not any(is_op(x) and uncalibrated_operands(x.state, wait=wait) for x in jax.tree.leaves(model, is_leaf=is_op)):
        return
    found = []
    for path, node in jax.tree_util.tree_flatten_with_path(model, is_leaf=is_op)[0]:
        if is_op(node) and (operands := uncalibrated_operands(node.state, wait=wait)):
            name = path_string(path).removesuffix("dot_general").removesuffix(".") or "the model itself"
            found.append(f"{name} ({', '.join(operands)})")
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(
            f"model has static scales that are not calibrated, in {len(found)} layers: {', '.join(found[:3])}{more}. "
            "Calibrate it first: model = step.calibrate(model, *batch) with a TrainStep, or calibrate(model, loss_fn, "
            "[batch]). If you did, the loss did not reach these operands, or they were all zeros or not finite: "
            "calibrate on another batch, leave the layers out with Fp8Config(exclude=...), or give a scale, "
            "StaticScaling(scale=...)"
        )
