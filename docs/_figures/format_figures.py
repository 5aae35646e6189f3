"""Draws what a format can say, before any scale."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from haliax_fp8.plots.style import look, panels
from haliax_fp8.recipes import E2M1, E4M3, E5M2, Format, saturating_cast


def relative_errors(formats: Sequence[Format]) -> Figure:
    """The largest relative error of rounding, binade by binade, and of clipping beyond the maximum, in percent."""
    figure, (axes,) = panels(1, 3.3)
    low = min(format.smallest_subnormal for format in formats) / 8.0
    high = 16.0 * max(format.max for format in formats)
    for i, format in enumerate(formats):
        style, edges, worst = look(i), [], []
        for exponent in range(round(math.log2(low)), math.ceil(math.log2(format.max))):
            edges.append(2.0**exponent)
            worst.append(
                _errors(
                    np.linspace(2.0**exponent, min(2.0 ** (exponent + 1), format.max), 1025),
                    format,
                ).max()
            )
        axes.step(
            [*edges, format.max],
            100.0 * np.asarray([*worst, worst[-1]]),
            where="post",
            color=style.color,
            ls=style.dashes,
            lw=2,
            label=repr(format),
        )
        beyond = np.geomspace(format.max, min(4.0 * format.max, high), 50)
        errors = 100.0 * np.maximum(_errors(beyond, format), worst[-1])
        axes.plot(beyond, errors, color=style.color, ls=style.dashes, lw=2)
        for value, offset, name in (
            (format.smallest_normal, 1.6, "smallest normal"),
            (format.max, 1 / 1.6, "max"),
        ):
            axes.axvline(value, color=style.color, lw=0.9, ls=":")
            text = f"{name} {format.max:g}" if name == "max" else name
            axes.text(
                value * offset,
                41,
                text,
                color=style.color,
                fontsize=8,
                rotation=90,
                va="center",
                ha="center",
            )
    axes.set_xscale("log", base=2)
    axes.set(xlim=(low, high), ylim=(0, 55))
    axes.set(xlabel="magnitude, in units of the scale", ylabel="largest relative error, %")
    axes.legend(loc="upper center", bbox_to_anchor=(0.55, 1.0), frameon=False)
    return figure


def representable_values(
    formats: Sequence[Format], low: float = 0.0, high: float = 2.0
) -> Figure:
    """Every value of each format between two numbers, and how many lie in the upper half, from the middle on."""
    figure, (axes,) = panels(1, 0.8 + 0.4 * len(formats))
    middle = 0.5 * (low + high)
    for i, format in enumerate(formats):
        y, style = len(formats) - 1 - i, look(i)
        # Every pattern of the type, as NumPy reads it.
        patterns = np.arange(2 ** jnp.finfo(format.dtype).bits, dtype=np.uint8).view(
            format.dtype
        )
        values = np.unique(patterns.astype(np.float64))
        values = values[(values >= low) & (values <= high)]
        axes.vlines(values, y - 0.32, y + 0.32, color=style.color, lw=1.3)
        count = int(((values >= middle) & (values < high)).sum())
        axes.text(
            high + 0.03 * (high - low),
            y,
            f"{count} in [{middle:g}, {high:g})",
            va="center",
            fontsize=8.5,
            color=style.color,
        )
    axes.set_yticks(range(len(formats)), [repr(format) for format in reversed(formats)])
    axes.set(
        xlim=(low - 0.015 * (high - low), high + 0.16 * (high - low)),
        ylim=(-0.6, len(formats) - 0.4),
    )
    axes.set_xticks(np.linspace(low, high, 9))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("value, in units of the scale")
    return figure


def _errors(magnitudes: np.ndarray, format: Format) -> np.ndarray:
    """How far each is from what it is rounded to, as a share of it."""
    rounded = np.asarray(
        saturating_cast(jnp.asarray(magnitudes, jnp.float32), format).astype(jnp.float32)
    )
    return np.abs(rounded - magnitudes) / magnitudes


FIGURES = {
    "formats": lambda: relative_errors((E4M3, E5M2)),
    "format-values": lambda: representable_values((E4M3, E5M2, E2M1)),
}
