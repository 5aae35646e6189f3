"""The rows of `describe`'s table: what layers have in common is said once."""

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

from .._tables import common_prefix


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
    """One row: a layer, or several that differ in name and shape alone.

    Args:
        name: The name of the layer, or those of its siblings after that of their parent; without the group's prefix.
        shapes: Every shape among them, once.
        layer: The first of them.
    """

    name: str
    shapes: tuple[str, ...]
    layer: L


@dataclasses.dataclass(frozen=True)
class Group[L: Layer]:
    """Rows of one stack.

    Args:
        prefix: What their paths begin with; empty if there is one row, or no stack.
        stacked: The stack.
        rows: The rows.
    """

    prefix: str
    stacked: str
    rows: tuple[LayerRow[L], ...]


def grouped[L: Layer](layers: Sequence[L], kind: "Kind[L]") -> Iterator[Group[L]]:
    """The rows of a table, in the order of the layers.

    Layers of one stack form a group. In it, three or more siblings that differ in name and shape alone share a row, as
    the projections of an attention do; those of a list keep theirs.

    Args:
        layers: The layers.
        kind: What a row says of a layer other than its name and shape.
    """
    for stacked, found in itertools.groupby(layers, lambda layer: layer.stacked):
        members = tuple(found)
        prefix = common_prefix([layer.path for layer in members]) if stacked and len(members) > 1 else ""
        yield Group(prefix, stacked, tuple(_rows(members, prefix, kind)))


class Kind[L: Layer](Protocol):
    """What a row says of a layer other than its name and shape."""

    def __call__(self, layer: L, /) -> Hashable:
        """The same value for layers of which it says the same."""
        ...


def _rows[L: Layer](layers: Sequence[L], prefix: str, kind: Kind[L]) -> Iterator[LayerRow[L]]:
    name_of = lambda layer: layer.path.removeprefix(prefix).removeprefix(".")
    for (parent, _), found in itertools.groupby(layers, lambda layer: (_parent(layer.path), kind(layer))):
        siblings = tuple(found)
        names = [layer.path.rpartition(".")[2] for layer in siblings]
        if not parent or len(siblings) < 3 or any(name.isdigit() for name in names):
            yield from (LayerRow(name_of(layer), (layer.shape,), layer) for layer in siblings)
            continue
        first, shapes = siblings[0], tuple(dict.fromkeys(layer.shape for layer in siblings))
        above = _parent(name_of(first))
        yield LayerRow(f"{above}: {', '.join(names)}" if above else ", ".join(names), shapes, first)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
