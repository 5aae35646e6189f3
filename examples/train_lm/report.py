"""What is shown of results: durations, the table, the figure, the results as JSON."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence

import matplotlib


matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402  (after the choice of a backend that needs no screen)
import numpy as np  # noqa: E402
import rich.box  # noqa: E402
from matplotlib import ticker  # noqa: E402
from rich.table import Table  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Curve:
    """The results of one trained model.

    Args:
        losses: Training loss of every step, nats per byte.
        validation: Completed steps and validation loss, in order; the last is the final one.
        tokens_per_second: For the median step of this process; None if it ran none.
        seconds: For all steps of this process, including compilation; None if it ran none.
        statistics: What quantization does to the trained model's operands, for example `saturation`; fractions of 1.
    """

    losses: Sequence[float]
    validation: Sequence[tuple[int, float]]
    tokens_per_second: float | None
    seconds: float | None
    statistics: Mapping[str, float]

    @property
    def validation_loss(self) -> float:
        """The loss of the held-back text after the last step."""
        return self.validation[-1][1]


def duration(seconds: float) -> str:
    """A time to wait, in the unit in which one thinks of it."""
    for count, unit in ((seconds / 3600, "hours"), (seconds / 60, "minutes")):
        if count >= 2:
            return f"{count:.1f} {unit}" if count < 10 else f"{count:.0f} {unit}"
    return f"{max(1.0, seconds):.0f} s"


def gap_percent(curve: Curve, baseline: Curve) -> float:
    """How far the validation loss lies above the baseline's."""
    return 100.0 * (curve.validation_loss / baseline.validation_loss - 1.0)


def results_table(curves: Mapping[str, Curve], baseline: str | None) -> Table:
    """One row per trained model; at most 80 columns wide."""
    names = sorted({name for curve in curves.values() for name in curve.statistics})
    table = Table(title=f"After {len(next(iter(curves.values())).losses)} steps", title_justify="left")
    table.box, table.padding = rich.box.SIMPLE, (0, 1, 0, 0)
    # Broken by hand, so that numbers never are.
    headings = ["run", "validation\nloss", "gap", *names, "tokens/s", "seconds"]
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="right" if column else "left", no_wrap=column > 0, overflow="fold")
    for name, curve in curves.items():
        gap = "" if baseline is None or name == baseline else f"{gap_percent(curve, curves[baseline]):+.2f} %"
        statistics = [f"{100 * curve.statistics[key]:.3f} %" if key in curve.statistics else "" for key in names]
        loss = curve.validation_loss
        speed = "" if curve.tokens_per_second is None else f"{curve.tokens_per_second:,.0f}"
        seconds = "" if curve.seconds is None else f"{curve.seconds:,.0f}"
        table.add_row(name, f"{loss:.4f}", gap, *statistics, speed, seconds)
    return table


SCATTER = (0.4, 0.7)
"""The standard deviation over seeds of a single FP8 run's gap, in percent; the least and the most of the 8-bit recipes.

Measured for 200 steps of a smaller model: `docs/convergence.md`. bf16 from weights moved by one ulp has 0.04 %.
"""


def verdict(curves: Mapping[str, Curve], baseline: str | None, *, emulated: bool, is_documented: bool) -> str:
    """What the results mean, in sentences; empty without a baseline and another run.

    Args:
        curves: The results.
        baseline: The name of the baseline's.
        emulated: Whether the device emulates FP8.
        is_documented: Whether the runs are near enough to those that `SCATTER` was measured for.
    """
    others = [name for name in curves if name != baseline]
    if baseline is None or not others:
        return ""
    ends = []
    for name in others:
        gap = gap_percent(curves[name], curves[baseline])
        ends.append(f"{name} ends {abs(gap):.2f} % {'above' if gap > 0 else 'below'} {baseline}")
    sentences = ["; ".join(ends)]
    if is_documented:
        least, most = SCATTER
        sentences.append(
            f"From seed to seed, the gap of a single run scatters by {least:g} to {most:g} % (a smaller model, 200 "
            "steps: docs/convergence.md), so compare the means of several, with --seed"
        )
    else:
        sentences.append("One seed cannot tell a gap from noise: compare the means of several, with --seed")
    speeds = {name: curve.tokens_per_second for name, curve in curves.items() if curve.tokens_per_second is not None}
    if emulated and baseline in speeds and any(speeds.get(name, np.inf) < speeds[baseline] for name in others):
        sentences.append("FP8 is slower here because a CPU emulates it")
    return ". ".join(sentences) + "."


def write_results(path: pathlib.Path, curves: Mapping[str, Curve], baseline: str | None) -> None:
    """The table's numbers as JSON, for scripts that compare runs."""
    results = {
        name: {
            "validation_loss": curve.validation_loss,
            "bits_per_byte": curve.validation_loss / math.log(2),
            "gap_percent": None if baseline is None or name == baseline else gap_percent(curve, curves[baseline]),
            "tokens_per_second": curve.tokens_per_second,
            "seconds": curve.seconds,
            "validation": [list(point) for point in curve.validation],
            **curve.statistics,
        }
        for name, curve in curves.items()
    }
    path.write_text(json.dumps(results, indent=2) + "\n")


def write_figure(path: pathlib.Path, curves: Mapping[str, Curve], baseline: str | None) -> None:
    """Draws the loss curves, and below them each one's distance from the baseline's.

    All runs see the same batches, so in the lower panel the noise of the batches cancels.
    """
    others = [name for name in curves if name != baseline]
    compared = baseline is not None and bool(others)
    many = len(others) > 2
    figure, panels = plt.subplots(
        1 + compared,
        1,
        figsize=(11 if many else 8, 6.5 if compared else 4.5),
        sharex=True,
        squeeze=False,
        height_ratios=[2.2, 1] if compared else [1],
        layout="constrained",
    )
    upper = panels[0, 0]
    colors = {name: f"C{index}" for index, name in enumerate(curves)}
    for name, curve in curves.items():
        steps = np.arange(1, len(curve.losses) + 1)
        # The baseline broad and pale, the others thin and dashed on top of it: both are seen where they coincide.
        wide = name == baseline
        upper.plot(
            steps,
            _smooth(curve.losses),
            color=colors[name],
            linewidth=5.0 if wide else 1.5,
            alpha=0.4 if wide else 1.0,
            linestyle="-" if wide else (0, (4, 1.5)),
            label=f"{name}: {curve.validation_loss:.4f}" if many else f"{name}, training (smoothed)",
        )
        upper.plot(
            *zip(*curve.validation, strict=True),
            color=colors[name],
            marker="o" if wide else "x",
            markersize=11 if wide else 7,
            markerfacecolor="none",
            linestyle="none",
            label=None if many else f"{name}, validation: {curve.validation_loss:.4f}",
        )
    upper.set_yscale("log")
    upper.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)))
    upper.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    upper.yaxis.set_minor_locator(ticker.NullLocator())
    upper.set_ylabel("loss, nats per byte (log scale)")
    if many:
        figure.legend(frameon=False, loc="outside right center", title="training (smoothed)\nand validation loss")
    else:
        upper.legend(frameon=False)
    upper.set_title(_title(curves, baseline, others))
    if baseline is not None and compared:
        lower = panels[1, 0]
        reference = np.asarray(curves[baseline].losses)
        lower.axhspan(-1.0, 1.0, color="0.93", label="within 1 %")
        lower.axhline(0.0, color=colors[baseline], linewidth=1.0)
        for name in others:
            distance = 100.0 * (np.asarray(curves[name].losses) / reference - 1.0)
            steps = np.arange(1, len(distance) + 1)
            lower.plot(steps, distance, color=colors[name], linewidth=0.5, alpha=0.4)
            lower.plot(steps, _smooth(distance), color=colors[name], linewidth=1.5, label=name)
        low, high = lower.get_ylim()
        lower.set_ylim(max(low, -5.0), min(high, 5.0))
        lower.set_ylabel(f"training loss\nabove {baseline}, %")
        handles, labels = lower.get_legend_handles_labels()
        shown = slice(0, 1 if many else None)
        lower.legend(handles[shown], labels[shown], frameon=False, ncols=3)
    panels[-1, 0].set_xlabel("step")
    for axes in panels[:, 0]:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _title(curves: Mapping[str, Curve], baseline: str | None, others: Sequence[str]) -> str:
    if baseline is None or not others:
        return "Loss"
    if len(others) > 2:
        return f"Loss of {baseline} and of FP8 recipes"
    gaps = ", ".join(f"{name} {gap_percent(curves[name], curves[baseline]):+.2f} %" for name in others)
    return f"Validation loss against {baseline}: {gaps}"


def _smooth(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """A mean over a window around each point.

    At the start, where the loss falls fast, the window narrows to stay symmetric; at the end, where it hardly falls,
    only its right half is cut off.
    """
    values = np.asarray(values, float)
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    reach = np.minimum(max(1, len(values) // 50), index)
    start, stop = index - reach, np.minimum(index + reach + 1, len(values))
    return (total[stop] - total[start]) / (stop - start)
