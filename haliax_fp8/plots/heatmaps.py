"""statistics_heatmaps: scale, amax, underflow and saturation of every layer over the steps of training."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from ..statistics.result import OPERANDS
from .style import panels


# Shares of 1, drawn in percent.
_SHARES = ("saturation", "underflow", "last_bin", "error")
# Magnitudes, of which ratios matter.
_MAGNITUDES = ("amax", "scale", "rms_error", "norm", "kurtosis")


def statistics_heatmaps(
    measured: Sequence[Mapping[str, Any]],
    steps: Sequence[int] | None = None,
    operand: str = "input",
    statistics: Sequence[str] = ("scale", "amax", "underflow", "saturation"),
) -> Figure:
    """A row per layer and a column per measured step: where in the model, and when, something happens.

    As NVIDIA's BioNeMo analyzer draws from TransformerEngine's logs. Magnitudes have logarithmic colours, shares are in
    percent. Lighter is larger; cells are white where nothing was measured.

    Args:
        measured: What `ModelStatistics.flat()` gave in each step; other numbers, such as the loss, are left out.
        steps: The number of each step; None counts from 0.
        operand: `"input"`, `"kernel"` or `"output_grad"`.
        statistics: One panel for each: fields of `OpStatistics`, or `"sqnr"`.

    Returns:
        A figure with one panel per statistic.

    Raises:
        ValueError: If `measured` has no such statistic, or none is asked for; if `steps` is not as long, or not
            increasing; or if a value is not one number.

    References:
        `bionemo-framework`, the analysis of statistics that `nvdlfw_inspect` logs.

    Example:
        >>> # As in `measured.flat()`.
        >>> measured = {"fp8/layers.0/kernel/amax": 1.0, "fp8/layers.1/kernel/amax": 2.0}
        >>> figure = statistics_heatmaps([measured, measured], [0, 10], "kernel", ["amax"])
        >>> figure.axes[0].get_title(loc="left")
        'amax of the kernel'
    """
    if not statistics:
        raise ValueError("statistics is empty; name at least one, such as 'amax'")
    if operand not in OPERANDS:
        raise ValueError(f"operand={operand!r} is not one of {list(OPERANDS)}")
    steps = list(range(len(measured)) if steps is None else map(int, steps))
    if not measured or len(steps) != len(measured):
        raise ValueError(
            f"steps has {len(steps)} entries and measured {len(measured)}; give one measured.flat() for each step"
        )
    if any(after <= before for before, after in itertools.pairwise(steps)):
        raise ValueError(f"steps={steps} is not increasing; sort the measurements by step, with each step once")
    for numbers in measured:
        if not isinstance(numbers, Mapping):
            raise ValueError(f"measured has a {type(numbers).__name__}, not a dict of numbers; use its flat()")
        if wrong := [name for name, value in numbers.items() if np.size(value) != 1]:
            raise ValueError(f"{wrong[0]!r} has shape {np.shape(numbers[wrong[0]])}, not one number; use flat()")
    tables = {name: _table(measured, name, operand) for name in statistics}
    count = max(len(layers) for layers, _ in tables.values())
    height = 0.75 + max(0.75, 0.2 * min(count, 40))
    figure, axes = panels(len(tables), height * len(tables) + 0.3)
    for one, (name, (layers, values)) in zip(axes, tables.items(), strict=True):
        shown = 100.0 * values if name in _SHARES else values
        norm = _norm(shown, is_magnitude=name in _MAGNITUDES)
        # Masked, zeros of a logarithmic map have its lowest colour and not that of what is missing.
        shown = np.maximum(shown, norm.vmin) if isinstance(norm, LogNorm) else shown
        image = one.pcolormesh(_edges(steps), np.arange(len(layers) + 1), shown, cmap="cividis", norm=norm)
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


def _table(
    measured: Sequence[Mapping[str, Any]], statistic: str, operand: str
) -> tuple[tuple[str, ...], Float64[np.ndarray, "layers steps"]]:
    """The layers that have a statistic, and its numbers; NaN where a step has none."""
    split = {name: name.rsplit("/", 3) for numbers in measured for name in numbers}
    parts = {name: tuple(part[1:]) for name, part in split.items() if len(part) == 4}
    rows = {layer: name for name, (layer, of, what) in parts.items() if (of, what) == (operand, statistic)}
    if not rows:
        known = sorted({what for _, of, what in parts.values() if of == operand})
        raise ValueError(f"statistic={statistic!r} of {operand} is not in measured, which has {known}")
    number = lambda numbers, name: float(np.asarray(numbers.get(name, np.nan)).item())
    return tuple(rows), np.asarray([[number(numbers, name) for numbers in measured] for name in rows.values()])


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
