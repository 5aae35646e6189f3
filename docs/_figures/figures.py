"""Draws the figures of the documentation into `docs/images/`.

    uv run docs/_figures/figures.py                  # all of them
    uv run docs/_figures/figures.py state-flow       # those that are named

The files are kept in the repository, and building the site only copies them.
"""

import argparse
import pathlib

import format_figures
import jax
import kept_report
import matplotlib.pyplot as plt
import plot_figures
import recipe_figures
import sharing_figures
import tutorial_figures
from drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    STYLE,
    arrow,
    blank,
    box,
    write,
)
from matplotlib.figure import Figure


IMAGES = pathlib.Path(__file__).parents[1] / "images"


def three_products() -> Figure:
    """fprop, dgrad and wgrad: what each multiplies, in which format."""
    figure, axes = blank(7.6, 3.4, (0, 10, 0, 4.5))
    rows = [
        (3.6, "fprop", ("input  x", "E4M3", BLUE), ("kernel  w", "E4M3", BLUE), "output  x·w"),
        (
            2.2,
            "dgrad",
            ("output grad  g", "E5M2", ORANGE),
            ("kernel  w", "E4M3", BLUE),
            "input grad  g·wᵀ",
        ),
        (
            0.8,
            "wgrad",
            ("input  x", "E4M3", BLUE),
            ("output grad  g", "E5M2", ORANGE),
            "kernel grad  xᵀ·g",
        ),
    ]
    for y, name, left, right, out in rows:
        axes.text(0.1, y, name, fontsize=11, fontweight="bold", va="center")
        for x, (text, format, color) in ((2.2, left), (4.5, right)):
            box(axes, x, y, f"{text}\n{format}", color, width=2.1, height=0.9)
        axes.text(3.35, y, "·", fontsize=18, ha="center", va="center")
        arrow(axes, (5.65, y), (7.0, y))
        axes.text(
            6.25, y, "sum in\nfloat32", ha="center", va="center", color=GREY, linespacing=1.5
        )
        box(axes, 8.35, y, f"{out}\nin the model's dtype", GREY, width=2.6, height=0.9)
    return figure


def state_flow() -> Figure:
    """How the state of one step becomes that of the next."""
    figure, axes = blank(8.4, 3.7, (0, 12.4, 0, 5.0))
    box(axes, 1.2, 3.9, "model\nof step t", GREY, height=1.0, width=2.0)
    box(axes, 5.4, 3.9, "forward pass\namax of input, kernel", BLUE, height=1.0, width=3.2)
    box(axes, 10.4, 3.9, "backward pass\namax of output grad", ORANGE, height=1.0, width=3.2)
    box(axes, 10.4, 1.15, "gradient tree", GREY, height=0.9, width=3.2)
    box(axes, 5.4, 1.8, "optimizer", GREY, height=0.7, width=3.2)
    box(axes, 5.6, 0.5, "apply_updates", GREEN, height=0.7, width=2.8)
    box(axes, 1.2, 1.15, "model\nof step t+1", GREY, height=1.0, width=2.0)
    arrow(axes, (2.25, 4.1), (3.75, 4.1))
    axes.text(3.0, 4.25, "weights", ha="center")
    arrow(axes, (2.25, 3.7), (3.75, 3.7), GREEN)
    axes.text(3.0, 3.35, "scales", ha="center", color=GREEN)
    arrow(axes, (7.05, 3.9), (8.75, 3.9))
    axes.text(7.9, 3.9, "FP8\nresiduals", ha="center", va="center", linespacing=1.5)
    arrow(axes, (10.4, 3.35), (10.4, 1.65))
    axes.text(10.55, 2.5, "dw, and the\nstate's cotangent", va="center")
    arrow(axes, (8.75, 1.3), (7.05, 1.75))
    axes.text(7.9, 1.75, "dw", ha="center")
    arrow(axes, (8.75, 1.0), (7.05, 0.55), GREEN)
    axes.text(7.9, 0.3, "overwrites", ha="center", color=GREEN)
    arrow(axes, (5.4, 1.42), (5.4, 0.88))
    axes.text(5.55, 1.15, "updates", va="center")
    arrow(axes, (4.15, 0.6), (2.25, 1.05), GREEN)
    axes.text(2.75, 0.3, "state replaced,\nweights added to", ha="center", va="center")
    return figure


FIGURES = {
    "three-products": three_products,
    "state-flow": state_flow,
    **plot_figures.FIGURES,
    **format_figures.FIGURES,
    **recipe_figures.FIGURES,
    **sharing_figures.FIGURES,
    **tutorial_figures.FIGURES,
}


def main(names: list[str]) -> None:
    """Writes figures as SVG files: those that are named, or all."""
    for name in names or [*kept_report.PICTURES, *FIGURES]:
        path = IMAGES / f"{name}.svg"
        if name in kept_report.PICTURES:
            path.write_text(kept_report.PICTURES[name]())
            continue
        with plt.rc_context(STYLE):
            figure = FIGURES[name]()
            write(figure, path)
            plt.close(figure)


if __name__ == "__main__":
    # Some come from models that are trained for a few steps; on the CPU they are the same everywhere.
    jax.config.update("jax_platforms", "cpu")
    parser = argparse.ArgumentParser(description="Draws the figures of the documentation.")
    parser.add_argument(
        "names",
        nargs="*",
        choices=[*kept_report.PICTURES, *FIGURES],
        metavar="NAME",
        help="only these; all of them if none is given",
    )
    main(parser.parse_args().names)
