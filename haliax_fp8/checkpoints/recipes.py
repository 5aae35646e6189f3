"""The recipes of a run's ops, as its file records them: they say what the columns of a table mean."""

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ..layers import Fp8DotGeneral
from ..layers.walk import path_string
from ..recipes import Quantization
from ..training import AbstractOp, CountedState
from .names import states_of_optimizers, within


type Operands = Mapping[str, Mapping[str, Any]]
"""The format, scaling and rounding of each operand of an op, in numbers and texts that JSON holds."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What a checkpoint records of the run that wrote it.

    Args:
        recipes: The operands of each op, by the op's name; None if it does not say.
        microbatches: How many microbatches its steps had; None if it does not say.
        phases: The phases that its optimizers' states were made for, in words; None if it does not say.
    """

    recipes: Mapping[str, Operands] | None = None
    microbatches: int | None = None
    phases: list[str] | None = None


def require_microbatches(value: Any, of: str) -> None:
    """Raises a ValueError unless a number of microbatches is positive, or None.

    Args:
        value: The user's argument.
        of: The function that takes it.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"microbatches={value!r} of {of} must be a positive integer, such as step.microbatches")


def table_of(op: str) -> str:
    """The name of the table of an op, from the op's name."""
    return f"{op}.state.table".removeprefix(".")


def op_of(table: str) -> str:
    """The name of the op of a table: the inverse of `table_of`."""
    return table.removesuffix("state.table").removesuffix(".")


def is_gradient(operand: str) -> bool:
    """Whether an operand is a gradient, by its name."""
    return operand.endswith("_grad")


def recipes_of(tree: Any) -> dict[str, Operands]:
    """The operands of each op of a tree, by the op's name; not those of moments, which have the model's structure."""
    is_op, moments = (lambda node: isinstance(node, AbstractOp)), list(states_of_optimizers(tree))
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_op)[0]
    named = [(path_string(path), node) for path, node in flat if is_op(node)]
    return {name: _operands(op) for name, op in named if not within(name, moments)}


def plans_in(tree: Any) -> Iterator[str]:
    """The phases that states in a tree were made for, in words: what checkpoints record and compare."""
    is_counted = lambda node: isinstance(node, CountedState)
    for node in jax.tree.leaves(tree, is_leaf=is_counted):
        if is_counted(node):
            yield "; ".join(phase.recorded for phase in node.plan.phases)


def _operands(op: AbstractOp) -> Operands:
    if isinstance(op, Fp8DotGeneral):
        # The three operands that have a row of the table come first.
        rows = op.recipe.state_of or op.recipe
        fields = [(field.name, getattr(rows, field.name)) for field in dataclasses.fields(rows)]
        if op.recipe.state_of is not None:
            uses = op.recipe.uses.items()
            fields += [(f"{operand}_for_{x}", used) for (operand, x), used in uses if used != rows.uses[operand, x]]
        return {
            name: {
                "format": quantization.format.name,
                "max": quantization.format.max,
                "scaling": _recorded(quantization.scaling),
                "rounding": quantization.rounding.value,
            }
            for name, quantization in fields
            if isinstance(quantization, Quantization)
        }
    if op.state is None:
        return {}
    rows = zip(op.operand_names, op.state.limits, op.state.scalings, strict=True)
    return {name: {"max": limit, "scaling": _recorded(scaling)} for name, limit, scaling in rows}


def _recorded(value: Any) -> Any:
    """A scaling, or what it is made of: the name of its class, and its fields."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: _recorded(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple | list):
        return [_recorded(item) for item in value]
    return value if isinstance(value, str | int | float | None) else repr(value)


# --- In a file --------------------------------------------------------------------------------------------------------


def in_file(recipes: Mapping[str, Operands]) -> list[dict[str, Any]]:
    """Recipes as a file lists them: each once, with the names of its ops."""
    groups: list[dict[str, Any]] = []
    for name, operands in recipes.items():
        group = next((group for group in groups if group["operands"] == operands), None)
        if group is None:
            groups.append({"ops": [name], "operands": operands})
        else:
            group["ops"].append(name)
    return groups


def from_file(groups: Any) -> dict[str, Operands]:
    """Recipes by the names of their ops.

    Args:
        groups: What `in_file` returned.

    Raises:
        ValueError: If it is something else.
    """
    recipes: dict[str, Operands] = {}
    for group in groups if isinstance(groups, list) else [None]:
        ops, operands = (group.get(key) if isinstance(group, dict) else None for key in ("ops", "operands"))
        is_known = isinstance(operands, dict) and all(map(_is_operand, operands.values()))
        if not isinstance(ops, list) or not all(isinstance(name, str) for name in ops) or not is_known:
            raise ValueError(f"its list of recipes has {group!r:.60}, which `save` does not write; copy the file")
        recipes |= dict.fromkeys(ops, operands)
    return recipes


def delayed_part(scaling: Mapping[str, Any]) -> Mapping[str, Any]:
    """The delayed scaling in a recorded one, of which it may be a part; without any, all of it.

    Args:
        scaling: The record of a scaling.
    """
    parts = (delayed_part(value) for value in scaling.values() if isinstance(value, dict))
    is_delayed = "amax_history_length" in scaling
    return scaling if is_delayed else next((part for part in parts if "amax_history_length" in part), scaling)


def _is_operand(operand: Any) -> bool:
    scaling = operand.get("scaling") if isinstance(operand, dict) else None
    if not isinstance(scaling, dict) or not isinstance(scaling.get("type"), str):
        return False
    scaling = delayed_part(scaling)
    lengths = [scaling.get(key, 1) for key in ("amax_history_length", "update_interval")]
    margin, limit = scaling.get("margin", 0), operand.get("max")
    is_whole = all(isinstance(x, int) and not isinstance(x, bool) for x in (*lengths, margin))
    return is_whole and min(lengths) > 0 and abs(margin) < 100 and isinstance(limit, float) and 0.0 < limit < math.inf


# --- What differs -----------------------------------------------------------------------------------------------------


def differences(saved: Operands, here: Operands) -> str:
    """What differs between two recipes, in words; empty if nothing does.

    Args:
        saved: The operands in the checkpoint.
        here: Those of the model.
    """
    names = list(dict.fromkeys([*here, *saved]))
    operands: dict[str, list[str]] = {}
    for name in names:
        for line in _lines(saved.get(name), here.get(name)):
            operands.setdefault(line, []).append(name)
    return "; ".join(
        line if len(of_line) == len(names) else f"{', '.join(of_line)}: {line}" for line, of_line in operands.items()
    )


def _lines(saved: Mapping[str, Any] | None, here: Mapping[str, Any] | None) -> list[str]:
    if saved is None or here is None:
        return [f"a scaling of its own {'here' if saved is None else 'in the checkpoint'} alone"]
    merged = lambda operand: {name: x for name, x in operand.items() if name != "scaling"} | operand["scaling"]
    old, new = merged(saved), merged(here)
    if old["type"] != new["type"]:
        old, new = ({key: x[key] for key in ("format", "type") if key in x} for x in (old, new))
    elif old.get("format") != new.get("format"):
        old, new = ({key: value for key, value in x.items() if key != "max"} for x in (old, new))
    return _unequal(old, new)


def _unequal(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for key in dict.fromkeys([*new, *old]):
        of_old, of_new = old.get(key), new.get(key)
        if of_old == of_new:
            continue
        if isinstance(of_old, dict) and isinstance(of_new, dict) and of_old.get("type") == of_new.get("type"):
            lines += _unequal(of_old, of_new)
        else:
            lines.append(_line(key, of_old, of_new))
    return lines


def _line(key: str, old: Any, new: Any) -> str:
    if key == "amax_history_length" and old is not None and new is not None:
        return resized(old, new)
    name = "" if key in ("format", "type") else f"{key} "
    return f"{name}{_shown(old)} in the checkpoint, {_shown(new)} here"


def resized(old: int, new: int) -> str:
    """How a history was fitted, in words."""
    return f"the history of {old} steps was {'cut' if old > new else 'padded'} to {new}; its maximum is the same"


def _shown(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    options = ", ".join(f"{name}={_shown(option)}" for name, option in value.items() if name != "type")
    return f"{value.get('type')}({options})"
