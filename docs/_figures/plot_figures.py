"""Draws one picture with each function of `haliax_fp8.plots`: of formats, and of a small model in training."""

import functools
import json
import pathlib
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from drawing import BLUE, GREEN, GREY, ORANGE, RED, WIDEST
from jaxtyping import Array
from matplotlib.figure import Figure
from matplotlib.text import Text
from scipy.special import stdtrit

import haliax_fp8 as fp8
from haliax_fp8 import DelayedScaling, plots


BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
ON_BOTH = "#7d8896"
SEEDS, STEPS, EVERY, WIDTH = 3, 60, 3, 32


def loss_fn(model: eqx.nn.MLP, x: Array) -> Array:
    """The sine of the inputs is learned."""
    return jnp.mean((jax.vmap(model)(x) - jnp.sin(x)) ** 2)


def batch(seed: int, step: int) -> Array:
    """Inputs that are three times larger from step 20 to step 29."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.random.normal(key, (64, WIDTH)) * (3.0 if 20 <= step < 30 else 1.0)


@functools.cache
def trained() -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Losses of a model in float32 and in FP8, three seeds each; statistics of the first."""
    config = fp8.Fp8Config(recipe=fp8.Recipe.of(DelayedScaling(amax_history_length=8)))
    measure = eqx.filter_jit(
        lambda model, x: fp8.quantization_statistics(model, loss_fn, x).flat()
    )
    losses: dict[str, list[list[float]]] = {"float32": [], "FP8, delayed": []}
    measured, step = [], fp8.TrainStep(loss_fn, optax.adam(3e-3))
    for name, runs in losses.items():
        for seed in range(SEEDS):
            model = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 2, key=jax.random.key(100 + seed))
            if name != "float32":
                model = fp8.calibrate(
                    fp8.fp8_linear_layers(model, config), loss_fn, [(batch(seed, 0),)]
                )
            optimizer, run = step.init(model), []
            for i in range(STEPS):
                x = batch(seed, i)
                if name != "float32" and seed == 0 and i % EVERY == 0:
                    measured.append(measure(model, x))
                model, optimizer, metrics = step(model, optimizer, x)
                run.append(metrics["loss"])
            runs.append([float(loss) for loss in run])
    return {name: np.asarray(runs) for name, runs in losses.items()}, measured


def loss_curves() -> Figure:
    """Three seeds in float32 and in FP8."""
    return plots.loss_curves(trained()[0], baseline="float32")


def heatmaps() -> Figure:
    """The inputs of every layer while the data change."""
    figure = plots.statistics_heatmaps(trained()[1], range(0, STEPS, EVERY))
    # Readable on white and on black: of this picture the site does not turn the lightness around.
    for text in figure.findobj(Text):
        text.set_color(ON_BOTH)
    for axes in figure.axes:
        axes.tick_params(color=ON_BOTH, labelcolor=ON_BOTH)
        axes.spines[:].set_color(ON_BOTH)
    return figure


def delayed_scaling() -> Figure:
    """One spike, and two histories."""
    amaxes = 3.0 + 0.6 * np.sin(np.arange(40) * 1.7)
    amaxes[12] = 11.0
    scalings = {
        f"history of {length}": DelayedScaling(amax_history_length=length)
        for length in (16, 4)
    }
    return plots.delayed_scaling(amaxes, scalings)


def convergence() -> Figure:
    """The gap over 400 steps, 128 wide, with 95 % intervals: eight bits above, four below."""
    shown = (
        {
            "delayed": BLUE,
            "current": ORANGE,
            "mxfp8": GREY,
            "current, first quarter in bf16": GREEN,
            "current, attention in bf16": RED,
        },
        {
            "nvfp4": BLUE,
            "nvfp4, first block in MXFP8, fprop in bf16 at the end": GREEN,
        },
    )
    rows = json.loads((BENCHMARKS / "convergence.json").read_text())["rows"]
    titles = {
        "topics, 128 wide": "cosine decay",
        "topics, 128 wide, constant rate": "constant rate",
    }
    figure, panels = plt.subplots(
        2, 2, figsize=(WIDEST, 5.4), layout="constrained", sharex=True, sharey="row"
    )
    for column, (case, title) in enumerate(titles.items()):
        of_case = {
            row["variant"]: row for row in rows if (row["case"], row["steps"]) == (case, 400)
        }
        baseline = of_case["bf16"]["curves"]
        for axes, names in zip(panels[:, column], shown, strict=True):
            for name, color in names.items():
                if name not in of_case:
                    continue
                losses = of_case[name]["curves"]
                gaps = np.array(
                    [100 * (np.divide(losses[seed], baseline[seed]) - 1) for seed in losses]
                )
                reach = (
                    stdtrit(len(gaps) - 1, 0.975) * gaps.std(axis=0, ddof=1) / len(gaps) ** 0.5
                )
                mean, steps = gaps.mean(axis=0), 20 * np.arange(1, gaps.shape[1] + 1)
                axes.plot(steps, mean, color=color, lw=2, label=name)
                axes.fill_between(
                    steps, mean - reach, mean + reach, color=color, alpha=0.15, lw=0
                )
            fewer = of_case["bf16, 98 % of the steps"]["mean"]
            axes.axhline(
                fewer,
                color="black",
                lw=1,
                ls="--",
                label="bf16, 98 % of the steps, at the end",
            )
        panels[0, column].set_title(title)
        panels[1, column].set_xlabel("step")
    for axes, place, columns in zip(panels[:, 0], ("upper", "lower"), (2, 1), strict=True):
        axes.set_ylabel("gap to bf16, %")
        lines = axes.get_legend_handles_labels()
        figure.legend(*lines, loc=f"outside {place} center", ncols=columns)
    return figure


def rehearsal() -> Figure:
    """The gap over 2,000 steps of a model of 3 million weights, as its benchmark draws it."""
    sys.path.insert(0, str(BENCHMARKS))
    from loss_at_75_million_weights import figure_of, rows

    content = json.loads((BENCHMARKS / "loss_at_3_million_weights.json").read_text())
    return figure_of(list(rows(content)), "3 million weights, on a CPU")


FIGURES = {
    "convergence": convergence,
    "rehearsal": rehearsal,
    "delayed-scaling": delayed_scaling,
    "loss-curves": loss_curves,
    "heatmaps": heatmaps,
}
