"""delayed_scaling: the largest value that fits, as delayed scaling follows a tensor."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from ..recipes import E4M3, DelayedScaling, Format
from .style import GREY, RED, look, panels


def delayed_scaling(
    amaxes: ArrayLike, scalings: Mapping[str, DelayedScaling] | Sequence[DelayedScaling], format: Format = E4M3
) -> Figure:
    """Bars for the amax of each step, and for each scaling the largest value that fits: `scale * format.max`.

    A bar above a curve is clipped: the history has not seen such a large tensor. The first step has the scale 1, so its
    limit is the format's maximum; it is not drawn.

    Args:
        amaxes: The largest magnitude of the tensor at each step, two at least.
        scalings: What to follow it with, by name; without names, what each of them prints.
        format: The tensor's format.

    Returns:
        A figure with one panel.

    Raises:
        ValueError: If there are fewer than two amaxes, or one is negative or not finite.

    Example:
        >>> figure = delayed_scaling([1.0, 2.0, 4.0], [DelayedScaling(amax_history_length=2)])
        >>> # The largest of the two steps before.
        >>> figure.axes[0].get_lines()[0].get_ydata().round(6).tolist()
        [1.0, 2.0]
    """
    heights = np.asarray(amaxes, np.float32)
    if heights.ndim != 1 or len(heights) < 2 or not (np.isfinite(heights) & (heights >= 0.0)).all():
        raise ValueError(f"amaxes has shape {heights.shape}; expected two or more magnitudes, finite and not negative")
    named = scalings if isinstance(scalings, Mapping) else {repr(scaling): scaling for scaling in scalings}
    x = np.arange(len(heights))
    limits = {name: _limits(heights, scaling, format) for name, scaling in named.items()}
    is_clipped = np.any([heights[1:] > limit * (1.0 + 1e-6) for limit in limits.values()], axis=0)

    figure, (axes,) = panels(1, 3.3)
    axes.bar(x, heights, color=GREY, alpha=0.4, width=0.7, label="amax of the step")
    for i, (name, limit) in enumerate(limits.items()):
        style = look(i)
        axes.step(x[1:], limit, where="mid", color=style.color, ls=style.dashes, lw=2, label=f"what fits: {name}")
    at = 1 + np.flatnonzero(is_clipped)
    if at.size:
        axes.plot(at, heights[at], "v", color=RED, ms=5, label="clipped")
    if heights.max() > 100.0 * heights[heights > 0.0].min(initial=np.inf):
        axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="magnitude", xlim=(-0.6, len(heights) - 0.4))
    figure.legend(loc="outside upper center", fontsize=8.5, ncols=2, frameon=False)
    return figure


def _limits(amaxes: np.ndarray, scaling: DelayedScaling, format: Format) -> np.ndarray:
    """The largest value that fits, from the second step on."""
    memory = scaling.memory
    state, limits = jnp.asarray([memory.first_row], jnp.float32), []
    for amax in amaxes[:-1]:
        state = memory.update(state, jnp.asarray([[amax]], jnp.float32), (format.max,))
        limits.append(float(state[0, 0]) * format.max)
    return np.asarray(limits)
