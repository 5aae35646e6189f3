"""statistics_heatmaps: scale, amax, underflow and saturation of every layer over the steps of training."""

from collections.abc import Sequence

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from ..statistics import StatisticsLog
from .style import panels


# Shares of 1, drawn in percent.
_SHARES = ("saturation", "underflow", "last_bin", "error")
# Magnitudes, of which ratios matter.
_MAGNITUDES = ("amax", "scale", "rms_error", "norm", "kurtosis")


def statistics_heatmaps(
    log: StatisticsLog,
    operand: str = "input",
    statistics: Sequence[str] = ("scale", "amax", "underflow", "saturation"),
) -> Figure:
    """A row per layer and a column per measured step: where in the model, and when, something happens.

    As NVIDIA's BioNeMo analyzer draws from TransformerEngine's logs. Magnitudes have logarithmic colours, shares are in
    percent. Lighter is larger; cells are white where nothing was measured.

    Args:
        log: What was measured, from `StatisticsLog.of`.
        operand: `"input"`, `"kernel"` or `"output_grad"`.
        statistics: One panel for each: fields of `OpStatistics`, or `"sqnr"`.

    Returns:
        A figure with one panel per statistic.

    Raises:
        ValueError: If the log has no such statistic, or none is asked for.

    References:
        `bionemo-framework`, the analysis of statistics that `nvdlfw_inspect` logs.

    Example:
        >>> # As in `measured.flat()`.
        >>> measured = {"fp8/layers.0/kernel/amax": 1.0, "fp8/layers.1/kernel/amax": 2.0}
        >>> log = StatisticsLog.of([measured, measured], steps=[0, 10])
        >>> figure = statistics_heatmaps(log, "kernel", ["amax"])
        >>> figure.axes[0].get_title(loc="left")
        'amax of the kernel'
    """
    if not statistics:
        raise ValueError("statistics is empty; name at least one, such as 'amax'")
    tables = {name: log.table(name, operand) for name in statistics}
    count = max(len(layers) for layers, _ in tables.values())
    height = 0.75 + max(0.75, 0.2 * min(count, 40))
    figure, axes = panels(len(tables), height * len(tables) + 0.3)
    for one, (name, (layers, values)) in zip(axes, tables.items(), strict=True):
        shown = 100.0 * values if name in _SHARES else values
        norm = _norm(shown, is_magnitude=name in _MAGNITUDES)
        # Masked, zeros of a logarithmic map have its lowest colour and not that of what is missing.
        shown = np.maximum(shown, norm.vmin) if isinstance(norm, LogNorm) else shown
        image = one.pcolormesh(_edges(log.steps), np.arange(len(layers) + 1), shown, cmap="cividis", norm=norm)
        every = -(-len(layers) // 40)
        one.set_yticks(np.arange(0, len(layers), every) + 0.5, layers[::every], fontsize=7.5)
        one.invert_yaxis()
        one.set_title(f"{name} of the {operand}", loc="left", fontsize=10)
        bar = figure.colorbar(ScalarMappable(image.norm, image.cmap), ax=one, pad=0.01, aspect=12)
        if isinstance(norm, LogNorm):
            # Where the numbers span less than a power of ten, matplotlib draws too few marks, or too many.
            marks = np.geomspace(*image.get_clim(), 4)
            bar.set_ticks(marks.tolist(), labels=[f"{mark:.2g}" for mark in marks])
            bar.minorticks_off()
        bar.set_label("%" if name in _SHARES else "dB" if name == "sqnr" else "")
    axes[-1].set_xlabel("step")
    return figure


def _norm(values: np.ndarray, *, is_magnitude: bool) -> Normalize:
    """Colours from the smallest to the largest finite number; for shares from zero."""
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0.0]
    if is_magnitude and positive.size:
        low, high = positive.min(), positive.max()
        return LogNorm(low, high) if high > low else LogNorm(low / 2.0, 2.0 * high)
    low, high = (min(0.0, finite.min()), finite.max()) if finite.size else (0.0, 1.0)
    return Normalize(low, high if high > low else low + 1.0)


def _edges(steps: Sequence[int]) -> np.ndarray:
    """Where columns begin: half way between steps."""
    if len(steps) == 1:
        return np.asarray([steps[0] - 0.5, steps[0] + 0.5])
    middle = 0.5 * (np.asarray(steps[:-1]) + np.asarray(steps[1:]))
    first, last = 1.5 * steps[0] - 0.5 * steps[1], 1.5 * steps[-1] - 0.5 * steps[-2]
    return np.concatenate([[first], middle, [last]])
