"""The rows of `describe`'s table, where layers that are alike share a row."""

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from .._printing import common_prefix, in_one_name, without_numbers


class Layer(Protocol):
    """What a row needs to know of a layer."""

    @property
    def path(self) -> str:
        """Its path in the model."""
        ...

    @property
    def shape(self) -> str:
        """Its input and output axes."""
        ...

    @property
    def stacked(self) -> str:
        """The stacks that repeat it."""
        ...


@dataclasses.dataclass(frozen=True)
class LayerRow[L: Layer]:
    """One row: a layer, or several that it describes alike.

    Args:
        name: The name of the layer, or those of siblings after that of their parent; with ranges for layers that differ
            in their numbers; without the group's prefix.
        shapes: Every shape among them, once.
        layer: The first of them.
    """

    name: str
    shapes: tuple[str, ...]
    layer: L


@dataclasses.dataclass(frozen=True)
class RowGroup[L: Layer]:
    """Rows of one stack.

    Args:
        prefix: What their paths begin with; empty if there is one layer, or too little in common.
        stacked: The stack; empty for none.
        rows: The rows.
    """

    prefix: str
    stacked: str
    rows: tuple[LayerRow[L], ...]


class Kind[L: Layer](Protocol):
    """What a row says of a layer other than its name and shape."""

    def __call__(self, layer: L, /) -> Hashable:
        """Returns the same value for layers that the row describes in the same way."""
        ...


def grouped[L: Layer](layers: Sequence[L], kind: Kind[L]) -> Iterator[RowGroup[L]]:
    """The rows of a table, in the order of the layers.

    Three or more siblings that differ in name and shape alone share a row, as the projections of an attention do. So do
    layers that differ in their numbers alone, as those of the blocks of a list do. Rows of one stack form a group,
    and so do others whose paths begin with the same two segments or more.

    Args:
        layers: The layers.
        kind: What a row says of a layer other than its name and shape.
    """
    rows = _in_ranges(_siblings(layers, kind), kind)
    for (stacked, _), group in itertools.groupby(rows, _stack_or_root):
        members = tuple(group)
        paths = [path for row in members for path in row.paths]
        prefix = common_prefix(paths) if len(paths) > 1 else ""
        # A number alone would not name a layer.
        if not stacked and ("." not in prefix or any(row.without(prefix).name[:1].isdigit() for row in members)):
            prefix = ""
        yield RowGroup(prefix, stacked, tuple(row.without(prefix) for row in members))


def _stack_or_root(row: "_Row[Any]") -> tuple[str, str]:
    """What rows of one group have in common: their stack, or without one the first segment of their paths."""
    return row.layer.stacked, "" if row.layer.stacked else row.path.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class _Row[L: Layer]:
    """A row before it is known what its group begins with.

    Args:
        path: That of the layer, or of the parent of siblings.
        siblings: Their names; none for a layer.
        shapes: Every shape, once.
        layer: The first layer.
    """

    path: str
    siblings: tuple[str, ...]
    shapes: tuple[str, ...]
    layer: L

    @property
    def paths(self) -> list[str]:
        return [f"{self.path}.{name}" for name in self.siblings] or [self.path]

    def without(self, prefix: str) -> LayerRow[L]:
        path = self.path.removeprefix(prefix).removeprefix(".")
        names = ", ".join(self.siblings)
        return LayerRow(f"{path}: {names}" if path and names else path or names, self.shapes, self.layer)


def _siblings[L: Layer](layers: Sequence[L], kind: Kind[L]) -> Iterator[_Row[L]]:
    """A row for each layer, or for siblings that differ in name and shape alone; not for those of a list."""
    parent = lambda layer: layer.path.rpartition(".")[0]
    for (above, _, _), group in itertools.groupby(layers, lambda layer: (parent(layer), layer.stacked, kind(layer))):
        members = tuple(group)
        names = tuple(layer.path.rpartition(".")[2] for layer in members)
        if not above or len(members) < 3 or any(name.isdigit() for name in names):
            yield from (_Row(layer.path, (), (layer.shape,), layer) for layer in members)
        else:
            yield _Row(above, names, tuple(dict.fromkeys(layer.shape for layer in members)), members[0])


def _in_ranges[L: Layer](rows: Iterable[_Row[L]], kind: Kind[L]) -> Iterator[_Row[L]]:
    """Rows that differ in the numbers of their paths alone are one, where the first of them was."""
    alike: dict[Hashable, list[_Row[L]]] = {}
    for row in rows:
        same = without_numbers(row.path), row.siblings, row.shapes, row.layer.stacked, kind(row.layer)
        alike.setdefault(same, []).append(row)
    for group in alike.values():
        yield dataclasses.replace(group[0], path=in_one_name([row.path for row in group]))
