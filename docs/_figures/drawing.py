"""What all figures of the documentation share: colours, style, boxes and arrows, and text that a phone can show."""

import pathlib
import re

import matplotlib


matplotlib.use("svg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.text import Text  # noqa: E402


BLUE, ORANGE, GREEN, GREY, RED = "#1f6fb2", "#d9822b", "#3a8f5c", "#6b7280", "#c0392b"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "legend.frameon": False,
    # The same bytes in every run, so that version control shows only real changes.
    "svg.hashsalt": "haliax_fp8",
}


# A phone of 390 px shows a figure 358 px wide, whatever its width. Text of 7 px can just be read.
PHONE, READABLE = 358.0, 7.0
# Points, and inches: together they give 7.3 px there.
SMALLEST, WIDEST = 10.0, 6.8


def write(figure: Figure, path: pathlib.Path) -> None:
    """Writes a figure, without a background: the site turns the lightness around in the dark.

    Raises:
        ValueError: If its text could not be read on a phone.
    """
    for text in figure.findobj(Text):
        if isinstance(text, Text):
            text.set_fontsize(max(text.get_fontsize(), SMALLEST))
    if figure.get_layout_engine() is not None:
        figure.set_figwidth(min(figure.get_figwidth(), WIDEST))
    figure.savefig(path, metadata={"Date": None}, transparent=True, bbox_inches="tight")
    require_readable(path.name, path.read_text(), SMALLEST)


def require_readable(name: str, svg: str, smallest: float) -> None:
    """Raises unless text of a size, in the units of a picture, can be read on a phone.

    Raises:
        ValueError: If it would be smaller than 7 px.
    """
    found = re.search(r'viewBox="0 0 (\S+) ', svg)
    assert found is not None, f"{name} has no viewBox"
    height = smallest * PHONE / float(found[1])
    if height < READABLE:
        raise ValueError(
            f"{name} is {float(found[1]):.0f} units wide, so text of {smallest:g} is {height:.1f} px high on a phone, "
            f"and should be {READABLE:g}: make the figure narrower, or its text larger"
        )


def box(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    color: str,
    width: float = 1.5,
    height: float = 0.62,
) -> None:
    """A box with a text, centred."""
    axes.add_patch(
        plt.Rectangle(
            (x - width / 2, y - height / 2),
            width,
            height,
            facecolor=color + "22",
            edgecolor=color,
            lw=1.4,
        )
    )
    axes.text(x, y, text, ha="center", va="center")


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    color: str = GREY,
    **options,
) -> None:
    """An arrow from one point to another."""
    axes.annotate(
        "",
        xy=end,
        xytext=start,
        arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.3, **options},
    )


def blank(
    width: float, height: float, limits: tuple[float, float, float, float]
) -> tuple[Figure, Axes]:
    """A figure without axes."""
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set(xlim=limits[:2], ylim=limits[2:])
    axes.axis("off")
    return figure, axes
