"""What a checkpoint is to those who load it: named entries, whose arrays are read when they are asked for."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .recipes import Run


type Entries = Mapping[str, jax.ShapeDtypeStruct]
"""The shape and dtype of each entry, without its numbers."""


class AbstractCheckpoint(abc.ABC):
    """A checkpoint, opened."""

    @property
    @abc.abstractmethod
    def entries(self) -> Entries:
        """What it holds."""

    @property
    def run(self) -> Run:
        """What it records of the run that wrote it; nothing by default."""
        return Run()

    @abc.abstractmethod
    def read(self, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        """Arrays by name, each read no earlier than it is looked up where the kind of checkpoint allows it.

        Args:
            wanted: The names, with the sharding that the array will get; None to read it on the host.

        Returns:
            NumPy or JAX arrays; only the latter may have that sharding already.
        """


class Lazily(Mapping[str, Any]):
    """A mapping whose values are made when they are looked up, and not kept."""

    def __init__(self, names: Any, make: Callable[[str], Any]):
        """A mapping of these names.

        Args:
            names: The keys.
            make: The value of a key.
        """
        self._names, self._make = frozenset(names), make

    def __getitem__(self, name: str) -> Any:
        """The value of a name, made each time it is looked up."""
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Any:
        """The names in alphabetical order."""
        return iter(sorted(self._names))

    def __len__(self) -> int:
        """How many names there are."""
        return len(self._names)


@dataclasses.dataclass(frozen=True)
class HostArrays(AbstractCheckpoint):
    """Arrays on the host, in memory or in a file.

    Args:
        listed: The entries.
        array: The array of a name.
        recorded: What it records of the run that wrote it.
    """

    listed: Entries
    array: Callable[[str], Any]
    recorded: Run = Run()

    @property
    def entries(self) -> Entries:
        """The entries that the checkpoint lists, by name."""
        return self.listed

    @property
    def run(self) -> Run:
        """What the checkpoint records."""
        return self.recorded

    def read(self, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        """Each array when it is looked up."""
        return Lazily(wanted, self.array)
