"""Draws which elements share a scale: for each product its two operands, a shade for each block."""

import dataclasses
from collections.abc import Sequence

import matplotlib.pyplot as plt
from drawing import BLUE, GREEN, GREY, ORANGE
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path


TOKENS, FEATURES, OUTPUTS = 12, 16, 12
SHADES = ("22", "66", "aa")


@dataclasses.dataclass(frozen=True)
class Operand:
    """One operand of a product as a matrix: its name, its colour, rows and columns, and whether it is transposed."""

    name: str
    color: str
    rows: int
    columns: int
    is_transposed: bool = False


INPUT = Operand("input  x", BLUE, TOKENS, FEATURES)
KERNEL = Operand("kernel  w", GREEN, FEATURES, OUTPUTS)
GRADIENT = Operand("output grad  g", ORANGE, TOKENS, OUTPUTS)


def transposed(operand: Operand) -> Operand:
    name, rows, columns = operand.name + "ᵀ", operand.columns, operand.rows
    return dataclasses.replace(
        operand, name=name, rows=rows, columns=columns, is_transposed=True
    )


PRODUCTS = {
    "fprop": (INPUT, KERNEL),
    "dgrad": (GRADIENT, transposed(KERNEL)),
    "wgrad": (transposed(INPUT), GRADIENT),
}


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How one operand is divided: the shape of a block where its columns (or its rows) are summed over.

    Args:
        along: Elements of a block along the contraction.
        across: Elements of a block along the other axis.
    """

    along: int
    across: int = 1


def draw(
    axes: Axes, x: float, y: float, operand: Operand, sharing: Sharing, *, is_left: bool
) -> None:
    """A matrix with its upper left corner at a point, one shade for each block."""
    height, width = (
        (sharing.across, sharing.along) if is_left else (sharing.along, sharing.across)
    )
    shades: dict[str, list[Path]] = {}
    for i, top in enumerate(range(0, operand.rows, height)):
        for j, left in enumerate(range(0, operand.columns, width)):
            # So that a square keeps its shade.
            index = 2 * i + j if operand.is_transposed else i + 2 * j
            shade = SHADES[index % len(SHADES)]
            right, bottom = (
                min(left + width, operand.columns),
                min(top + height, operand.rows),
            )
            corners = [
                (left, top),
                (right, top),
                (right, bottom),
                (left, bottom),
                (left, top),
            ]
            shades.setdefault(shade, []).append(
                Path([(x + u, y + v) for u, v in corners], closed=True)
            )
    # One path for each shade: hundreds of rectangles would make the files large.
    for shade, paths in shades.items():
        path = Path.make_compound_path(*paths)
        axes.add_patch(PathPatch(path, facecolor=operand.color + shade, lw=0))
    lines = [
        [(x + column, y), (x + column, y + operand.rows)]
        for column in range(operand.columns + 1)
    ]
    lines += [
        [(x, y + row), (x + operand.columns, y + row)] for row in range(operand.rows + 1)
    ]
    path = Path.make_compound_path(*map(Path, lines))
    axes.add_patch(PathPatch(path, edgecolor="white", facecolor="none", lw=0.5))
    axes.text(x + operand.columns / 2, y - 0.7, operand.name, ha="center", va="bottom")


def contraction(
    axes: Axes, x: float, y: float, left: Operand, right: Operand, gap: float
) -> None:
    """Arrows along the axes that are summed over."""
    style = {"arrowstyle": "<|-|>", "color": GREY, "lw": 1.0, "mutation_scale": 8}
    below = y + left.rows + 0.9
    axes.annotate("", xy=(x, below), xytext=(x + left.columns, below), arrowprops=style)
    axes.text(
        x + left.columns / 2, below + 0.4, "summed over", ha="center", va="top", color=GREY
    )
    beside = x + left.columns + gap - 0.9
    axes.annotate("", xy=(beside, y), xytext=(beside, y + right.rows), arrowprops=style)


def sharing(rows: Sequence[tuple[str, dict[str, tuple[Sharing, Sharing]]]]) -> Figure:
    """A row of three products for each entry."""
    gap, pair, row_height = 3.4, 38.0, 28.0
    figure, axes = plt.subplots(figsize=(8.8, 2.35 * len(rows) + 0.1))
    for index, (label, products) in enumerate(rows):
        y = index * row_height
        if label:
            axes.text(0.0, y - 6.4, label, fontweight="bold", va="bottom")
        for column, (name, (left, right)) in enumerate(PRODUCTS.items()):
            x = column * pair
            middle = x + (left.columns + gap + right.columns) / 2
            axes.text(
                middle, y - 3.2, name, fontweight="bold", ha="center", va="bottom", color=GREY
            )
            draw(axes, x, y, left, products[name][0], is_left=True)
            draw(axes, x + left.columns + gap, y, right, products[name][1], is_left=False)
            contraction(axes, x, y, left, right, gap)
    axes.set(
        xlim=(-1.5, 2 * pair + 32),
        ylim=((len(rows) - 1) * row_height + 19.5, -8.5 if rows[0][0] else -5.5),
    )
    axes.set_aspect("equal")
    axes.axis("off")
    return figure


def blocks() -> Figure:
    """Strips along the contraction, and squares; 4 elements drawn for 128, 2 for 32."""
    strip, square = Sharing(4), Sharing(4, 4)
    deepseek = {"fprop": (strip, square), "dgrad": (strip, square), "wgrad": (strip, strip)}
    return sharing(
        [
            ("deepseek  (4 drawn for 128)", deepseek),
            ("mxfp8  (2 drawn for 32)", dict.fromkeys(PRODUCTS, (Sharing(2), Sharing(2)))),
        ]
    )


FIGURES = {
    "sharing-blocks": blocks,
}
