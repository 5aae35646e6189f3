"""What became of every entry of a checkpoint."""

import dataclasses
from collections.abc import Mapping

from rich.console import RenderableType
from rich.text import Text

from ..._printing import DottedName, Printable, new_table


@dataclasses.dataclass(frozen=True, repr=False)
class LoadReport(Printable):
    """What `load_into` did: prints as a table.

    Args:
        kept: Names of the model's leaves that have the numbers of the checkpoint, bit for bit.
        changed: Leaves whose numbers were fitted, and how: a history of another length, another dtype.
        fresh: Leaves that the checkpoint does not provide, and why. State is then as before the first step; everything
            else is as it was in the given model.
        unused: Names of entries that the model has no leaf for.

    Example:
        >>> from haliax_fp8.checkpoints import load_into
        >>> arrays = {"layers.0.bias": np.zeros(32, np.float32), "old": np.ones(3)}
        >>> _, report = load_into(fp8_linear_layers(model), arrays)
        >>> report.kept, report.unused
        (('layers.0.bias',), ('old',))
    """

    kept: tuple[str, ...]
    changed: Mapping[str, str]
    fresh: Mapping[str, str]
    unused: tuple[str, ...]

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
        if self.is_complete:
            return Text(f"Loaded: {self.summary}", "bold")
        table = new_table(f"Loaded: {self.summary}")
        table.add_column("name", overflow="fold")
        table.add_column(no_wrap=True)
        table.add_column("how, or why", overflow="fold")
        for name, what, why in self.differences():
            table.add_row(DottedName(name), what, Text(why))
        return table
