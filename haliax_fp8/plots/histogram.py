"""operand_histogram: the magnitudes of an operand against the range of a format."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike
from matplotlib.figure import Figure

from ..recipes import Format, saturating_cast
from .style import GREY, RED, look, panels


def operand_histogram(x: ArrayLike, format: Format, scale: float | None = None, *, name: str = "operand") -> Figure:
    """How the magnitudes of an operand lie in the range of its format.

    It shows the elements that are finite and not zero, in units of the scale, `|x| / scale`, in bins of half a power of
    two. Shaded areas show what becomes zero, what is subnormal and has fewer digits, and what is clipped.

    Args:
        x: The operand, of any shape and floating dtype.
        format: The format that it is rounded to.
        scale: Its scale, `x ≈ data * scale`; None for `max |x| / format.max`, as current scaling has it.
        name: What the operand is called.

    Returns:
        A figure with one panel, whose legend has the shares.

    Raises:
        ValueError: If no element is finite and not zero, or `scale` is not positive.

    Example:
        >>> figure = operand_histogram(jnp.array([1.0, 2.0, 1e-9]), E4M3, name="x")
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()][0]
        '33.3 % become zero'
    """
    values = np.abs(np.asarray(jnp.asarray(x).astype(jnp.float32))).ravel()
    values = values[np.isfinite(values) & (values > 0.0)]
    if not values.size:
        raise ValueError(f"x has {np.size(x)} elements, all of them zero or not finite; give a tensor that has others")
    scale = float(values.max()) / format.max if scale is None else float(scale)
    if not scale > 0.0:
        raise ValueError(f"scale={scale} is not positive; give the multiplier that restores values, x ≈ data * scale")
    scaled = (values / scale).astype(np.float32)
    rounded = np.asarray(saturating_cast(jnp.asarray(scaled), format).astype(jnp.float32))
    half = 0.5 * format.smallest_subnormal
    shares = {
        "become zero": float(np.mean(rounded == 0.0)),
        "subnormal": float(np.mean((rounded > 0.0) & (scaled < format.smallest_normal))),
        "clipped": float(np.mean(scaled > format.max)),
    }

    low = np.floor(2.0 * np.log2(min(float(scaled.min()), half))) / 2.0 - 0.5
    high = np.ceil(2.0 * np.log2(max(float(scaled.max()), format.max))) / 2.0 + 0.5
    edges = 2.0 ** np.arange(low, high + 0.25, 0.5)
    figure, (axes,) = panels(1, 3.2)
    axes.hist(
        scaled, bins=edges.tolist(), weights=np.full(len(scaled), 100.0 / len(scaled)), color=look(0).color, alpha=0.8
    )
    zones = (
        (edges[0], half, RED, "////", "become zero"),
        (half, format.smallest_normal, GREY, "....", "subnormal"),
        (format.max, edges[-1], RED, "xxxx", "clipped"),
    )
    for left, right, color, hatch, kind in zones:
        label = f"{100 * shares[kind]:.1f} % {kind}"
        axes.axvspan(
            left, right, facecolor=color + "22", edgecolor=color + "66", hatch=hatch, lw=0, label=label, zorder=0
        )
    axes.axvline(format.max, color=GREY, lw=0.9, ls=":")
    axes.set(xscale="log", xlim=(edges[0], edges[-1]), ylabel="elements, %")
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"|{name}| in units of the scale {scale:.3g}, and the range of {format!r}")
    axes.legend(fontsize=8.5, frameon=False, loc="upper left")
    return figure
