"""What is shown at the end: the table and the figure."""

import dataclasses
import pathlib
from collections.abc import Sequence

import matplotlib


matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402  (after the choice of a backend that needs no screen)
import numpy as np  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402
from rich.table import Table  # noqa: E402


COLORS = {"bf16": "C0", "FP8": "C1"}


@dataclasses.dataclass
class Run:
    """The records of one training run.

    Args:
        losses: Training loss of each step.
        accuracies: Test accuracy after each epoch, in percent.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    accuracies: list[float] = dataclasses.field(default_factory=list)


def gaps(runs: dict[str, list[Run]]) -> list[float]:
    """For each seed, the final test accuracy in FP8 minus that in bf16, in points."""
    return [fp8.accuracies[-1] - bf16.accuracies[-1] for bf16, fp8 in zip(runs["bf16"], runs["FP8"], strict=True)]


def results_table(runs: dict[str, list[Run]], seeds: Sequence[int]) -> Table:
    """One row per seed, and their mean."""
    rows = [(str(seed), *(runs[name][i].accuracies[-1] for name in runs)) for i, seed in enumerate(seeds)]
    rows.append(("mean", *(float(np.mean([run.accuracies[-1] for run in runs[name]])) for name in runs)))
    table = Table(title="Test accuracy after the last epoch", title_justify="left")
    for heading in ("seed", *runs, "gap"):
        table.add_column(heading, justify="right")
    for index, (label, bf16, fp8) in enumerate(rows):
        table.add_row(
            label, f"{bf16:.2f} %", f"{fp8:.2f} %", f"{fp8 - bf16:+.2f} points", end_section=index == len(seeds) - 1
        )
    return table


def verdict(runs: dict[str, list[Run]]) -> str:
    """What the results mean: the mean gap, next to how far seeds of bf16 differ."""
    by_seed = gaps(runs)
    mean = float(np.mean(by_seed))
    apart = f"{abs(mean):.2f} points {'below' if mean < 0 else 'above'}"
    line = f"FP8 ends {apart if round(abs(mean), 2) else 'level with'} bf16"
    if len(by_seed) < 2:
        return f"{line}; one seed cannot tell that from noise: give several, --seeds 0 1 2."
    finals = [run.accuracies[-1] for run in runs["bf16"]]
    return f"{line}, the mean of {len(by_seed)} seeds; bf16 itself differs by {max(finals) - min(finals):.2f} points."


def write_figure(path: pathlib.Path, runs: dict[str, list[Run]]) -> None:
    """Training loss and test accuracy over epochs: the mean over seeds, with the range of the seeds around it."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, of_seeds in runs.items():
        # bf16 broad and pale, FP8 thin and dashed on top of it: both are seen where they coincide.
        wide = name == "bf16"
        style = {"linewidth": 5.0, "alpha": 0.4} if wide else {"linewidth": 1.5, "linestyle": (0, (4, 1.5))}
        epochs = np.arange(1, len(of_seeds[0].accuracies) + 1)
        losses = np.array([np.mean(np.split(np.array(run.losses), len(epochs)), axis=1) for run in of_seeds])
        accuracies = np.array([run.accuracies for run in of_seeds])
        for axes, curves in ((left, losses), (right, accuracies)):
            mean = f"{name}: {curves[:, -1].mean():.3f}" if axes is left else f"{name}: {curves[:, -1].mean():.2f} %"
            axes.fill_between(
                epochs, curves.min(axis=0), curves.max(axis=0), color=COLORS[name], alpha=0.12, linewidth=0
            )
            axes.plot(epochs, curves.mean(axis=0), color=COLORS[name], label=mean, **style)
    left.set(ylabel="training loss, mean of the epoch", yscale="log")
    finals = [run.accuracies[-1] for of_seeds in runs.values() for run in of_seeds]
    right.set(ylabel="test accuracy, %", ylim=(min(90.0, min(finals) - 2.0), 100.0))
    count = len(runs["bf16"])
    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        seeds = f", mean of {count} seeds\n(shaded: their range)" if count > 1 else ""
        axes.legend(title=f"last epoch{seeds}", frameon=False)
    largest = max(map(abs, gaps(runs)))
    every = " for every seed" if count > 1 else ""
    figure.suptitle(f"Vision transformer on digits: test accuracy in FP8 within {largest:.2f} points of bf16{every}")
    figure.savefig(path, dpi=150)
    plt.close(figure)
