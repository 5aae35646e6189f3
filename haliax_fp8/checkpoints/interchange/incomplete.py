"""What `load_into` says of a load with `strict` that is not complete: what differs, where, and what to do."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ...layers.patterns import path_string
from .checkpoint import Entries
from .names import described, is_saved, leaves_of
from .report import LoadReport


SHAPE = "shape "
"""How the reason begins where a leaf and an entry of the same name have different shapes."""

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
    whose, remedy = _cause(tree, [name for name, _, _ in differences], report.fresh)
    return f"strict=True, and {whose} ({report.summary}): {lines}. {remedy}"


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


def _cause(tree: Any, names: list[str], fresh: Mapping[str, str]) -> tuple[str, str]:
    """What is not as it was saved, and what to do."""
    parts, states = {name.partition(".")[0] for name in names}, set(_states_of_optimizers(tree))
    if parts <= states:
        where = ", ".join(sorted(parts))
        return (
            f"the optimizer's state, {where} in the tree, is not the one that was saved; all else is",
            "Make it as the saved one was made, by the same optimizer with the same options; or use strict=False, "
            "which begins anew what does not fit",
        )
    whose = "the checkpoint is not that of this model"
    if any(why.startswith(SHAPE) for why in fresh.values()):
        return (
            whose,
            "Make the model with the sizes of the saved one; strict=False keeps this model's own weights there",
        )
    if any(name.endswith(_STATE) for name in names):
        return whose, (
            "For a model with the same history length and recipe convert it as the saved one was; for a plain "
            "checkpoint load first, convert after; or use strict=False, which pads and cuts histories and starts other "
            "state fresh"
        )
    return whose, (
        "Give the tree that was saved, in its dtypes; or use strict=False, which casts, and keeps this tree's own "
        "numbers where the checkpoint has none"
    )


def _states_of_optimizers(tree: Any) -> Iterator[str]:
    """The parts of a tree that hold such a state: Optax makes it of named tuples, of which models have none."""
    is_named = lambda node: isinstance(node, tuple) and hasattr(node, "_fields")
    for path, part in jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]:
        if any(map(is_named, jax.tree.leaves(part, is_leaf=is_named))):
            yield path_string(path)
