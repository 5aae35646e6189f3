"""What `load_into` says of a checkpoint that does not fit, or with `strict` not wholly: where, and what to do."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax

from ...layers.checks import holds_optimizer_state
from ...layers.walk import path_string
from .checkpoint import Entries
from .names import described, is_saved, leaves_of
from .report import LoadReport


_STATE = "state.table"


def incomplete(tree: Any, report: LoadReport, entries: Entries) -> str:
    """The message.

    Args:
        tree: What was loaded into.
        report: What became of it.
        entries: What the checkpoint holds.
    """
    differences = report.differences()
    here = {leaf.name: described(leaf.value) for leaf in leaves_of(tree) if is_saved(leaf.value)}
    lines = listed([f"{name} {what}: {why}{_only_one(name, here, entries)}" for name, what, why in differences])
    whose, remedy = _cause(tree, [name for name, _, _ in differences])
    return f"strict=True, and {whose} ({report.summary}): {lines}. {remedy}"


def require_fit(tree: Any, misfits: Mapping[str, str], shown: str) -> None:
    """Raises a ValueError if weights of a checkpoint do not fit: the model would go on with weights of its own.

    Args:
        tree: What is loaded into.
        misfits: The leaves of another shape or kind than their entries, and both.
        shown: What is loaded.
    """
    states = list(_states_of_optimizers(tree))
    lines = [f"{name}: {why}" for name, why in misfits.items() if not _within(name, states)]
    if lines:
        raise ValueError(
            f"{shown} does not fit the model: {listed(lines)}. Make the model with the sizes of the saved one. "
            "If a part is to stay new, such as a head for other classes, put None in its place and load the rest: "
            "load_into(eqx.tree_at(lambda model: model.head, model, None), path)"
        )


def listed(lines: list[str]) -> str:
    """The first of some lines, and how many more there are."""
    more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
    return "; ".join(lines[:5]) + more


def _only_one(name: str, here: Entries, entries: Entries) -> str:
    """Dtype and shape of what only the tree has, or only the checkpoint. A state's are a matter of its recipe."""
    if (name in here) == (name in entries) or name.endswith(_STATE):
        return ""
    known = here[name] if name in here else entries[name]
    return f", {known.dtype}{known.shape} {'here' if name in here else 'in the checkpoint'}"


def _cause(tree: Any, names: list[str]) -> tuple[str, str]:
    """What differs from the saved tree, and what to do."""
    states = list(_states_of_optimizers(tree))
    parts = {_within(name, states) for name in names}
    if "" not in parts:
        where = ", ".join(sorted(parts))
        return (
            f"the optimizer's state, {where} in the tree, does not match the saved one; everything else does",
            "Make it with the same optimizer and options as the saved one; or use strict=False, which starts the "
            "rest fresh",
        )
    whose = "the checkpoint does not belong to this model"
    if any(name.endswith(_STATE) for name in names):
        return whose, (
            "Convert the model with the recipe and history length of the saved one; load a plain checkpoint first, "
            "then convert; or use strict=False, which pads and cuts histories and starts other state fresh"
        )
    return whose, (
        "Give the tree that was saved, in its dtypes; or use strict=False, which casts, and keeps this tree's own "
        "numbers where the checkpoint has none"
    )


def _within(name: str, paths: Iterable[str]) -> str:
    """The one of some paths that a name is in; empty if it is in none."""
    return next((path for path in paths if f"{name}.".startswith(f"{path}.")), "")


def _states_of_optimizers(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[str]:
    """The parts of a tree that hold such a state, and no model beside it."""
    children = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    for key, part in children:
        if not holds_optimizer_state(part):
            continue
        if _has_model(part):
            yield from _states_of_optimizers(part, (*path, *key))
        else:
            yield path_string((*path, *key))


def _has_model(part: Any) -> bool:
    """Whether a part is a module or has one, as what trainers keep; not in named tuples, as moments are."""
    if isinstance(part, eqx.Module):
        return True
    values = part.values() if isinstance(part, dict) else part if type(part) in (tuple, list) else ()
    return any(map(_has_model, values))
