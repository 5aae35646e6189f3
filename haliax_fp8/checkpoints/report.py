"""What became of every entry of a checkpoint, and what to do where a load is not complete."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from .._printing import DottedName, Printable, new_table
from .checkpoint import Entries
from .names import described, is_rounding_key, is_saved, leaves_of, states_of_optimizers, within


@dataclasses.dataclass(frozen=True, repr=False)
class LoadReport(Printable):
    """What `load_into` did: prints as a table.

    Args:
        kept: Names of the model's leaves that have the numbers of the checkpoint, bit for bit.
        changed: Leaves whose numbers were fitted, and how: a history of another length, another dtype.
        fresh: Leaves that the checkpoint does not provide, and why. State is then as before the first step; everything
            else is as it was in the given model.
        unused: Names of entries that the model has no leaf for.
        not_compared: What may differ from the saved run although all leaves are kept: the number of microbatches, if
            `save` or `load_into` got none. Empty if there is nothing.

    Example:
        >>> from haliax_fp8.checkpoints import load_into
        >>> arrays = {"layers.0.bias": np.zeros(32, np.float32), "old": np.ones(3)}
        >>> _, report = load_into(fp8_linear_layers(model), arrays, allow_fresh_weights=True)
        >>> report.kept, report.unused
        (('layers.0.bias',), ('old',))
    """

    kept: tuple[str, ...]
    changed: Mapping[str, str]
    fresh: Mapping[str, str]
    unused: tuple[str, ...]
    not_compared: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether every leaf was kept and every entry used."""
        return not (self.changed or self.fresh or self.unused)

    @property
    def summary(self) -> str:
        """One line: how many of each."""
        return f"{len(self.kept)} kept, {len(self.changed)} changed, {len(self.fresh)} fresh, {len(self.unused)} unused"

    def differences(self) -> list[tuple[str, str, str]]:
        """Name, what became of it, and how or why, of everything that was not simply kept."""
        rows = [(name, "changed", how) for name, how in self.changed.items()]
        rows += [(name, "fresh", why) for name, why in self.fresh.items()]
        return rows + [(name, "unused", "the model has no such leaf") for name in self.unused]

    def __rich__(self) -> RenderableType:
        """How many of each; and a line for everything that was not simply kept."""
        note = f"Not compared: {self.not_compared}." if self.not_compared else ""
        if self.is_complete:
            return Text("\n".join(filter(None, (f"Loaded: {self.summary}", note))), "bold")
        table = new_table(f"Loaded: {self.summary}", note)
        table.add_column("name", overflow="fold")
        table.add_column(no_wrap=True)
        table.add_column("how, or why", overflow="fold")
        for name, what, why in self.differences():
            table.add_row(DottedName(name), what, Text(why))
        return table


_STATE = "state.table"

PHASES = "phases"
"""The name of a run's phases among what changed."""


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
    states = list(states_of_optimizers(tree))
    lines = [f"{name}: {why}" for name, why in misfits.items() if not within(name, states)]
    if lines:
        raise ValueError(
            f"{shown} does not fit the model: {listed(lines)}. Make the model with the sizes of the saved one. "
            "If a part is to stay new, such as a head for other classes, put None in its place and load the rest: "
            "load_into(eqx.tree_at(lambda model: model.head, model, None), path)"
        )


def require_no_fresh_weights(tree: Any, weights: Iterable[str], report: LoadReport, shown: str) -> None:
    """Raises a ValueError if the checkpoint lacks a weight: the model would go on with numbers that nobody trained.

    Args:
        tree: What was loaded into.
        weights: The names of its leaves that have learned numbers.
        report: What became of it.
        shown: What was loaded.
    """
    states = list(states_of_optimizers(tree))
    fresh = [name for name in weights if name in report.fresh and not within(name, states)]
    unused = [name for name in report.unused if not name.endswith(_STATE) and not is_rounding_key(name)]
    if fresh:
        renamed = (
            f", while the model has no leaf for {listed(unused)}: if a part was renamed, give the model the saved "
            "names, or load a mapping with its own; "
        )
        raise ValueError(
            f"{shown} has nothing for {listed(fresh)}{renamed if unused else ': '}if it is to stay as it is in the "
            "given model, use load_into(..., allow_fresh_weights=True)"
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
    if names == [PHASES]:
        return "its run has other phases", (
            "Give TrainStep the phases of the saved run; or use strict=False, which goes on at the saved step in the "
            "phases here"
        )
    states = list(states_of_optimizers(tree))
    parts = {within(name, states) for name in names}
    if "" not in parts:
        where = ", ".join(sorted(parts))
        return (
            f"the optimizer's state, {where} in the tree, does not match the saved one; everything else does",
            "Make it with the same optimizer and options as the saved one; if only quantized_state differs, load the "
            "saved kind and pass it to transfer_optimizer_state; or use strict=False, which starts the rest fresh",
        )
    whose = "the checkpoint does not belong to this model"
    if any(name.endswith((_STATE, "dot_general")) for name in names):
        return whose, (
            "Convert the model with the recipe and history length of the saved one, and train it with as many "
            "microbatches; load a plain checkpoint first, then convert; or use strict=False, which converts histories "
            "and scales where it can, and starts other state fresh"
        )
    return whose, (
        "Give the tree that was saved, in its dtypes; or use strict=False, which casts, and keeps this tree's own "
        "numbers where the checkpoint has none"
    )
