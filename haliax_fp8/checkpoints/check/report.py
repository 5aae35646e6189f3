"""What a check found."""

import dataclasses
import pathlib

from rich.console import RenderableType
from rich.text import Text

from ..._printing import Printable, new_table


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something wrong with a folder.

    Args:
        file: The file, by its name in the folder.
        tensor: The tensor, or the part of the configuration; empty if it is the file as a whole.
        problem: What is wrong.
        is_error: Whether the checkpoint is broken; otherwise some engines compute other numbers than others.
    """

    file: str
    tensor: str
    problem: str
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.file}: {self.tensor}: {self.problem}" if self.tensor else f"{self.file}: {self.problem}"


@dataclasses.dataclass(frozen=True, repr=False)
class CheckReport(Printable):
    """What a check of a folder found.

    Args:
        directory: The folder.
        layout: Its layout; empty if it could not be read.
        quantized: The number of weights in FP8.
        tensors: The number of tensors.
        faults: What is wrong; errors first.
    """

    directory: pathlib.Path
    layout: str
    quantized: int
    tensors: int
    faults: tuple[Fault, ...]

    @property
    def errors(self) -> tuple[Fault, ...]:
        """The faults that break the checkpoint."""
        return tuple(fault for fault in self.faults if fault.is_error)

    @property
    def is_sound(self) -> bool:
        """Whether nothing breaks the checkpoint."""
        return not self.errors

    def __rich__(self) -> RenderableType:
        """A row for each fault, or a line that there is none."""
        summary = f"{self.directory.resolve().name}: {self.layout or 'not readable'}"
        if self.layout:
            summary += f", {self.tensors} tensors, {self.quantized} weights in FP8"
        if not self.faults:
            return Text(f"{summary}; sound", "green")
        table = new_table(f"{summary}; {'sound, with remarks' if self.is_sound else 'broken'}")
        for column in ("file", "tensor", "problem"):
            table.add_column(column, overflow="fold")
        for fault in self.faults:
            problem = Text(fault.problem if fault.is_error else f"remark: {fault.problem}")
            table.add_row(Text(fault.file, "red" if fault.is_error else "yellow"), Text(fault.tensor), problem)
        return table
