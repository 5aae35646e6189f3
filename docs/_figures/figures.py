"""Draws the figures of the documentation: `uv run docs/_figures/figures.py [folder]`."""

import math
import pathlib
import sys

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import recipe_figures
import sharing_figures
from drawing import BLUE, GREEN, GREY, ORANGE, RED, STYLE, arrow, blank, box
from matplotlib.figure import Figure

from haliax_fp8 import DelayedScaling
from haliax_fp8.recipes import E4M3, E5M2, Format, saturating_cast


def three_products() -> Figure:
    """fprop, dgrad and wgrad: what each multiplies, in which format."""
    figure, axes = blank(7.6, 3.4, (0, 10, 0, 4.5))
    rows = [
        (3.6, "fprop", ("input  x", "E4M3", BLUE), ("kernel  w", "E4M3", BLUE), "output  x·w"),
        (2.2, "dgrad", ("output grad  g", "E5M2", ORANGE), ("kernel  w", "E4M3", BLUE), "input grad  g·wᵀ"),
        (0.8, "wgrad", ("input  x", "E4M3", BLUE), ("output grad  g", "E5M2", ORANGE), "kernel grad  xᵀ·g"),
    ]
    for y, name, left, right, out in rows:
        axes.text(0.1, y, name, fontsize=11, fontweight="bold", va="center")
        for x, (text, format, color) in ((2.2, left), (4.5, right)):
            box(axes, x, y, f"{text}\n{format}", color, width=1.9, height=0.9)
        axes.text(3.35, y, "·", fontsize=18, ha="center", va="center")
        arrow(axes, (5.5, y), (7.0, y))
        axes.text(6.25, y + 0.14, "sum in float32", fontsize=7.5, ha="center", color=GREY)
        box(axes, 8.35, y, f"{out}\nin the model's dtype", GREY, width=2.6, height=0.9)
    return figure


def formats() -> Figure:
    """The largest relative error of rounding, binade by binade, and of clipping beyond the maximum."""
    figure, axes = plt.subplots(figsize=(7.6, 3.3), layout="constrained")

    def errors(magnitudes: np.ndarray, format: Format) -> np.ndarray:
        rounded = np.asarray(saturating_cast(jnp.asarray(magnitudes, jnp.float32), format).astype(jnp.float32))
        return np.abs(rounded - magnitudes) / magnitudes

    for format, color in ((E4M3, BLUE), (E5M2, ORANGE)):
        edges, worst = [], []
        for exponent in range(-19, math.ceil(math.log2(format.max))):
            low, high = 2.0**exponent, min(2.0 ** (exponent + 1), format.max)
            edges.append(low)
            worst.append(errors(np.linspace(low, high, 1000), format).max())
        beyond = np.geomspace(format.max, 4 * format.max, 50)
        edges, worst = [*edges, format.max], [*worst, worst[-1]]
        axes.step(edges, 100 * np.array(worst), where="post", color=color, label=repr(format), lw=2)
        axes.plot(beyond, 100 * np.maximum(errors(beyond, format), worst[-1]), color=color, lw=2)
        labels = ((format.smallest_normal, 1.6, "smallest normal"), (format.max, 1 / 1.6, f"max {format.max:g}"))
        for value, offset, name in labels:
            axes.axvline(value, color=color, lw=0.9, ls=":")
            axes.text(value * offset, 41, name, color=color, fontsize=8, rotation=90, va="center", ha="center")
    axes.set(xscale="log", ylim=(0, 55), xlabel="magnitude, in units of the scale", ylabel="largest relative error, %")
    axes.set_xlim(2.0**-19, 2.0**18)
    axes.set_xticks([2.0**e for e in range(-18, 19, 6)], [f"2$^{{{e}}}$" for e in range(-18, 19, 6)])
    axes.minorticks_off()
    axes.legend(loc="upper center", bbox_to_anchor=(0.55, 1.0))
    return figure


def delayed_scaling() -> Figure:
    """The largest value that fits, over steps with one spike, for two history lengths."""
    steps, spike = 40, 12
    amax = 3.0 + 0.6 * np.sin(np.arange(steps) * 1.7)
    amax[spike] = 11.0
    figure, axes = plt.subplots(figsize=(7.6, 3.3), layout="constrained")
    axes.bar(np.arange(steps), amax, color=GREY, alpha=0.35, width=0.7, label="amax of the step")
    for length, color, style in ((16, BLUE, "-"), (4, ORANGE, "--")):
        scaling = DelayedScaling(amax_history_length=length)
        # A row for the operand: the scale, then the history.
        state, limits = jnp.zeros((1, 1 + length)).at[0, 0].set(1.0), []
        for value in amax:
            limits.append(float(state[0, 0]) * E4M3.max)
            state = scaling.update(state, jnp.asarray([[value]], jnp.float32), (E4M3.max,))
        # The first step has the initial scale of 1, and so a limit of 448.
        axes.step(
            np.arange(1, steps),
            limits[1:],
            where="mid",
            color=color,
            lw=2,
            ls=style,
            label=f"largest value that fits, history of {length}",
        )
    axes.annotate(
        "clipped: the history has not seen it",
        xy=(spike, 11.0),
        xytext=(spike + 1.5, 12.7),
        ha="left",
        fontsize=8.5,
        color=RED,
        arrowprops={"arrowstyle": "-|>", "color": RED},
    )
    axes.set(xlabel="step", ylabel="value", ylim=(0, 14), xlim=(-0.6, steps - 0.4))
    figure.legend(loc="outside upper center", fontsize=8.5, ncols=3)
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
    axes.text(3.0, 4.25, "weights", ha="center", fontsize=8)
    arrow(axes, (2.25, 3.7), (3.75, 3.7), GREEN)
    axes.text(3.0, 3.35, "scales", ha="center", fontsize=8, color=GREEN)
    arrow(axes, (7.05, 3.9), (8.75, 3.9))
    axes.text(7.9, 4.05, "FP8 residuals", ha="center", fontsize=8)
    arrow(axes, (10.4, 3.35), (10.4, 1.65))
    axes.text(10.55, 2.5, "dw, and the\nstate's cotangent", fontsize=8, va="center")
    arrow(axes, (8.75, 1.3), (7.05, 1.75))
    axes.text(7.9, 1.75, "dw", fontsize=8, ha="center")
    arrow(axes, (8.75, 1.0), (7.05, 0.55), GREEN)
    axes.text(7.9, 0.3, "overwrites", fontsize=8, ha="center", color=GREEN)
    arrow(axes, (5.4, 1.42), (5.4, 0.88))
    axes.text(5.55, 1.15, "updates", fontsize=8, va="center")
    arrow(axes, (4.15, 0.6), (2.25, 1.05), GREEN)
    axes.text(2.75, 0.3, "state replaced,\nweights added to", fontsize=8, ha="center", va="center")
    return figure


FIGURES = {
    "three-products": three_products,
    "formats": formats,
    "delayed-scaling": delayed_scaling,
    "state-flow": state_flow,
    **recipe_figures.FIGURES,
    **sharing_figures.FIGURES,
}


def main(folder: pathlib.Path) -> None:
    """Writes every figure as an SVG file."""
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for name, draw in FIGURES.items():
            figure = draw()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, facecolor="white", bbox_inches="tight")
            plt.close(figure)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1] / "images"))
