"""What `load_into` says of a checkpoint that does not fit, or with `strict` not wholly: where, and what to do."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ...layers.model_argument import holds_optimizer_state
from ...layers.patterns import path_string
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
    states = set(_states_of_optimizers(tree))
    lines = [f"{name}: {why}" for name, why in misfits.items() if name.partition(".")[0] not in states]
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
    parts, states = {name.partition(".")[0] for name in names}, set(_states_of_optimizers(tree))
    if parts <= states:
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


def _states_of_optimizers(tree: Any) -> Iterator[str]:
    """The parts of a tree that hold such a state."""
    for path, part in jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]:
        if holds_optimizer_state(part):
            yield path_string(path)
