"""benchmark_bars: speed and memory from the JSON that a benchmark writes."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from .style import look, panels


def benchmark_bars(
    results: str | pathlib.Path | Sequence[Mapping[str, Any]],
    values: Mapping[str, str],
    *,
    label: str,
    baseline: str | None = None,
) -> Figure:
    """A panel for each figure of a benchmark, such as speed and memory, with a bar for each of its rows.

    Args:
        results: The file that a benchmark's `--json` wrote, or its rows.
        values: The figures to draw: the key of the rows, and the heading of its panel with the unit.
        label: The key of the rows that names the bar.
        baseline: The name of the row that the others are compared with; None for no comparison. The text beside each
            bar then says how many times the baseline's it is.

    Returns:
        A figure with one panel per figure. A row that lacks one, because it failed, has the text "none" there.

    Raises:
        ValueError: If the file has no rows, no row has a figure, or `baseline` is not a row.

    Example:
        >>> rows = [{"library": "bf16", "ms": 4.0}, {"library": "FP8", "ms": 2.5}]
        >>> figures = {"ms": "time of a step, ms"}
        >>> figure = benchmark_bars(rows, figures, label="library", baseline="bf16")
        >>> [float(bar.get_width()) for bar in figure.axes[0].patches]
        [4.0, 2.5]
    """
    rows = _rows(results)
    names = [str(row[label]) for row in rows if label in row]
    if not rows or len(names) != len(rows):
        raise ValueError(
            f"label={label!r} is not in every row of results; the first has {list(rows[0]) if rows else []}"
        )
    if baseline is not None and baseline not in names:
        raise ValueError(f"baseline={baseline!r} is not one of the rows {names}")
    for key in values:
        if all(_number(row, key) is None for row in rows):
            raise ValueError(
                f"values has {key!r}, but no row of results has such a number; the first row has {list(rows[0])}"
            )
    figure = panels(1, 1.0)[0]
    figure.clear()
    figure.set_figheight(0.9 + 0.34 * len(rows))
    grid = figure.subplots(1, len(values), sharey=True, squeeze=False)[0]
    for axes, (key, heading) in zip(grid, values.items(), strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        base = None if baseline is None else _number(rows[names.index(baseline)], key)
        for i, row in enumerate(rows):
            style, value = look(i), _number(row, key)
            if value is None:
                axes.text(0.0, i, " none", va="center", fontsize=8.5)
                continue
            axes.barh(i, value, color=style.color + "99", edgecolor=style.color, hatch=style.hatch, height=0.7)
            ratio = f" ({value / base:.2f}×)" if base and names[i] != baseline else ""
            axes.text(value, i, f" {_short(value)}{ratio}", va="center", fontsize=8.5)
        # Room for the text beside the longest bar.
        axes.set_xlim(0.0, 1.4 * max(value for row in rows if (value := _number(row, key)) is not None))
        axes.set_xlabel(heading)
        axes.set_yticks(range(len(rows)), names)
    grid[0].invert_yaxis()
    return figure


def _rows(results: str | pathlib.Path | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if not isinstance(results, str | pathlib.Path):
        return list(results)
    read = json.loads(pathlib.Path(results).read_text())
    if not isinstance(read, dict) or not isinstance(read.get("rows"), list):
        raise ValueError(f"results={str(results)!r} has no list of rows; write it with a benchmark's --json")
    return read["rows"]


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000.0 else f"{value:.3g}"


def _number(row: Mapping[str, Any], key: str) -> float | None:
    """What a row has under a key, if that is a finite number."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    return float(value) if np.isfinite(value) else None
