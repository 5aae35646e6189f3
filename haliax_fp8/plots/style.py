"""What all plots share: panels, and colours that differ in grey too."""

import dataclasses
import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure


WIDTH = 7.6
"""Inches: a column of text at 10 points."""

GREY = "#6b7280"
RED = "#c0392b"


@dataclasses.dataclass(frozen=True)
class Look:
    """What one of several curves looks like.

    Args:
        color: Distinct also for the colour-blind, from Okabe and Ito.
        dashes: matplotlib's line style.
        marker: matplotlib's marker.
    """

    color: str
    dashes: str | tuple[int, tuple[int, ...]]
    marker: str


_LOOKS = (
    Look("#1f6fb2", "-", "o"),
    Look("#d9822b", "--", "s"),
    Look("#3a8f5c", "-.", "^"),
    Look("#c0392b", ":", "D"),
    Look("#7b4fa3", (0, (6, 1, 1, 1, 1, 1)), "v"),
    Look("#a0522d", (0, (3, 3)), "P"),
    Look("#0f9aa8", (0, (9, 2)), "X"),
    Look("#6b7280", (0, (1, 3)), "*"),
)


def look(index: int) -> Look:
    """The look of the curve of that number; after eight they come again."""
    return _LOOKS[index % len(_LOOKS)]


class Picture(Figure):
    """A figure that notebooks show by themselves. matplotlib's shows itself only after `%matplotlib inline`."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def panels(rows: int, height: float, *, ratios: tuple[float, ...] | None = None) -> tuple[Figure, list[Axes]]:
    """A figure with panels one above the other, which share their x axis.

    Args:
        rows: How many.
        height: The figure's height in inches.
        ratios: The panels' relative heights; None for equal ones.
    """
    # Not by pyplot, which keeps every figure until it is closed and chooses a screen.
    figure = Picture(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=ratios)
    axes = [row[0] for row in grid]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes
