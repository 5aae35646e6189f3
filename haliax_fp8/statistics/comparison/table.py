"""The tables of a comparison: a row per layer, with what the paths begin with said once, at any width."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from ..._printing import DottedName, new_table
from ..result_table import groups
from .layer import Distance, LayerComparison


type _Columns = Mapping[str, Callable[[LayerComparison], str]]


def tables(layers: Sequence[tuple[str, LayerComparison]], *, gradients: bool) -> Iterator[RenderableType]:
    """One table for the outputs, and one for the gradients.

    Args:
        layers: The name of each layer, and what was found of it, with NumPy's numbers.
        gradients: Whether the gradients are those of a loss.
    """
    yield _LayerTable(
        "Outputs: the relative error of a layer alone, and what has accumulated",
        {
            "alone": lambda layer: _share(layer.fprop),
            "SQNR": lambda layer: f"{float(layer.fprop.sqnr):.1f} dB",
            "accumulated": lambda layer: _share(layer.output),
            "largest": lambda layer: f"{layer.output.largest:.2%}",
            "1 - cos": lambda layer: f"{layer.output.cosine_distance:.1e}",
        },
        dict(layers),
    )
    if gradients:
        yield _LayerTable(
            "Gradients: of a layer's products alone; accumulated, of output and kernel",
            {
                "dgrad\nalone": lambda layer: _share(layer.dgrad),
                "wgrad\nalone": lambda layer: _share(layer.wgrad),
                "output's": lambda layer: _share(layer.output_grad),
                "kernel's": lambda layer: _share(layer.kernel_grad),
                "1 - cos": lambda layer: f"{layer.kernel_grad.cosine_distance:.1e}",
            },
            dict(layers),
        )


@dataclasses.dataclass(frozen=True)
class _LayerTable:
    """A table of numbers; columns that do not fit beside the names follow in a table below."""

    title: str
    columns: _Columns
    layers: Mapping[str, LayerComparison]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(self.title, "bold")
        cells = {heading: self._cells(heading) for heading in self.columns}
        widths = {
            heading: max(len(line) for text in (heading, *column.values()) for line in text.splitlines())
            for heading, column in cells.items()
        }
        names = self._names()
        segment = max((name.longest_segment for _, name in names), default=0)
        piece = max((name.longest_piece for _, name in names), default=0)
        # A quarter of the width is enough for a long segment, if its pieces fit.
        for_names = min(segment, max(piece, options.max_width // 4))
        rest = list(self.columns)
        while rest:
            count = len(rest)
            while count > 1 and _width([for_names, *(widths[heading] for heading in rest[:count])]) > options.max_width:
                count -= 1
            table = new_table()
            above = max(heading.count("\n") for heading in rest[:count])
            table.add_column("\n" * above + "layer", overflow="fold")
            for heading in rest[:count]:
                table.add_column(heading, justify="right", no_wrap=True)
            for path, name in names:
                table.add_row(name, *(cells[heading].get(path, "") for heading in rest[:count]))
            yield table
            rest = rest[count:]

    def _names(self) -> list[tuple[str, DottedName]]:
        """The first cell of each row, with the path of its layer; none for a line with what several begin with."""
        rows = []
        for group in groups(list(self.layers)):
            if group.prefix:
                rows.append(("", DottedName(group.prefix)))
            rows += [(path, DottedName(name, 2 if group.prefix else 0)) for path, name in group.names.items()]
        return rows

    def _cells(self, heading: str) -> dict[str, str]:
        """A column, by the path of the layer."""
        # As wide as a number: on one line it would take room from the names.
        unreached = "not\nreached" if heading == next(iter(self.columns)) else ""
        is_reached = lambda layer: not np.isnan(layer.fprop.relative_error)
        return {path: self.columns[heading](x) if is_reached(x) else unreached for path, x in self.layers.items()}


def _width(columns: Sequence[int]) -> int:
    """The width of a table: each column with a blank on both sides, and edges."""
    return sum(columns) + 3 * len(columns) + 1


def _share(distance: Distance) -> str:
    return f"{distance.relative_error:.2%}"
