"""What all figures of the documentation share: colours, style, boxes and arrows."""

import pathlib

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


# Points, and inches: text of this size can be read in a figure of this width on a phone too.
SMALLEST, WIDEST = 10.0, 6.8


def write(figure: Figure, path: pathlib.Path) -> None:
    """Writes a figure, without a background: the site turns the lightness around in the dark."""
    for text in figure.findobj(Text):
        if isinstance(text, Text):
            text.set_fontsize(max(text.get_fontsize(), SMALLEST))
    if figure.get_layout_engine() is not None:
        figure.set_figwidth(min(figure.get_figwidth(), WIDEST))
    figure.savefig(path, metadata={"Date": None}, transparent=True, bbox_inches="tight")


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
