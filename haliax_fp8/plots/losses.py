"""loss_curves: losses of several runs, and how far each is from the baseline."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from .style import GREY, look, panels


def loss_curves(
    runs: Mapping[str, ArrayLike], *, baseline: str, steps: Sequence[float] | None = None, window: int = 1
) -> Figure:
    """Mean losses over seeds, and below them the gap to the baseline with the noise of a seed.

    The gap is `100 (mean of the run / mean of the baseline - 1)`, in percent. The band is the noise of a seed: one
    standard deviation of the baseline's seeds around their mean, in the same unit. A gap inside it cannot be told from
    another seed of the baseline.

    Args:
        runs: For each name the losses, `[steps]` or `[seeds, steps]`, all with the same steps.
        baseline: The name of the run to compare with.
        steps: What the columns are the losses of; None counts from 1.
        window: Each point is the mean of this many steps up to it.

    Returns:
        A figure with two panels. It needs a second seed of the baseline for the band.

    Raises:
        ValueError: If `runs` is not a mapping, `baseline` is not in it, losses have other shapes, or `window` does not
            fit.

    Example:
        >>> falling = np.exp(-np.arange(50) / 20)
        >>> runs = {"bf16": [falling, 1.01 * falling], "FP8": 1.02 * falling}
        >>> figure = loss_curves(runs, baseline="bf16")
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['loss', 'gap to bf16, %']
    """
    if not isinstance(runs, Mapping):
        raise ValueError(
            f"runs is a {type(runs).__name__}, but must be a dict from the name of each run to its losses: "
            f"loss_curves({{{baseline!r}: losses, 'FP8': others}}, baseline={baseline!r})"
        )
    if baseline not in runs:
        raise ValueError(f"baseline={baseline!r} is not one of the runs {list(runs)}")
    for name, values in runs.items():
        if isinstance(values, Sequence) and any(isinstance(value, Mapping) for value in values):
            raise ValueError(
                f"runs[{name!r}] holds dicts, not losses; take the number of each step, such as "
                "[metrics['loss'] for metrics in ...]"
            )
    losses = {name: np.atleast_2d(np.asarray(values, np.float64)) for name, values in runs.items()}
    length = losses[baseline].shape[-1]
    for name, values in losses.items():
        if values.ndim != 2 or values.shape[-1] != length:
            raise ValueError(
                f"runs[{name!r}] has shape {values.shape}; expected [seeds, {length}], as {baseline!r} has"
            )
    if not 1 <= window <= length:
        raise ValueError(f"window={window} is not between 1 and the number of steps, {length}")
    x = np.arange(1, length + 1) if steps is None else np.asarray(steps, np.float64)
    if x.shape != (length,):
        raise ValueError(f"steps has shape {x.shape}; expected ({length},), one for each loss")

    means = {name: _smooth(values.mean(axis=0), window) for name, values in losses.items()}
    x = x[window - 1 :]
    figure, (top, bottom) = panels(2, 4.6, ratios=(3, 2))
    for i, (name, mean) in enumerate(means.items()):
        style = look(i)
        every = max(1, len(x) // 8)
        options = {
            "color": style.color,
            "ls": style.dashes,
            "lw": 1.6,
            "marker": style.marker,
            "ms": 4,
            "markevery": (i % every, every),
        }
        top.plot(x, mean, label=name, **options)
        if name != baseline:
            bottom.plot(x, 100.0 * (mean / means[baseline] - 1.0), **options)
    bottom.axhline(0.0, color=GREY, lw=0.9)
    if len(losses[baseline]) > 1:
        seeds = np.stack([_smooth(seed, window) for seed in losses[baseline]])
        noise = 100.0 * seeds.std(axis=0, ddof=1) / seeds.mean(axis=0)
        bottom.fill_between(x, -noise, noise, color=GREY, alpha=0.3, lw=0, label=f"noise of a seed of {baseline}")
        bottom.legend(fontsize=8.5, frameon=False)
    top.set_ylabel("loss")
    top.legend(fontsize=8.5, frameon=False)
    bottom.set(xlabel="step", ylabel=f"gap to {baseline}, %")
    return figure


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    return np.convolve(values, np.full(window, 1.0 / window), "valid")
