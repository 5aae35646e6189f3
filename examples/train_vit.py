"""Trains a small vision transformer in bf16 and in FP8 on handwritten digits, and shows that both classify alike.

    python examples/train_vit.py                      # three seeds, under 2.5 minutes on 2 CPU cores
    python examples/train_vit.py --seeds 7 --epochs 20 --convert-head
    python examples/train_vit.py --help

The model is plain Equinox: `jax.vmap(model)` over `eqx.nn.Linear`, `eqx.nn.MultiheadAttention` and `eqx.nn.LayerNorm`;
nothing in it knows of FP8. Both runs of a seed share initialization, batches and optimizer, and differ by one line,
`model = fp8_linear_layers(model, config)`. The data set, 1797 images of 8x8, comes with scikit-learn. On a CPU the FP8
products are emulated: slower, with the same rounding.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from haliax_fp8 import (
    DelayedScaling,
    Fp8Config,
    OverwriteWithGradient,
    TrainStep,
    calibrate,
    describe,
    fp8_linear_layers,
    trainable,
)


matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402  (after the choice of a backend that needs no screen)


SIDE, CLASSES = 8, 10  # of scikit-learn's digits
COLORS = {"bf16": "C0", "FP8": "C1"}


# --- The model: nothing here knows of FP8 -----------------------------------------------------------------------------


class Block(eqx.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm and added to the residual stream."""

    attention_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, hidden: int, heads: int, mlp: int, *, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.attention_norm = eqx.nn.LayerNorm(hidden)
        self.attention = eqx.nn.MultiheadAttention(heads, hidden, key=keys[0])
        self.mlp_norm = eqx.nn.LayerNorm(hidden)
        self.up = eqx.nn.Linear(hidden, mlp, key=keys[1])
        self.down = eqx.nn.Linear(mlp, hidden, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(normed, normed, normed)
        return x + jax.vmap(lambda token: self.down(jax.nn.gelu(self.up(self.mlp_norm(token)))))(x)


class VisionTransformer(eqx.Module):
    """Patches, blocks, the mean over patches, a classifier head (arXiv:2010.11929, without the class token)."""

    embed: eqx.nn.Linear
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(self, options: argparse.Namespace, *, key: jax.Array):
        keys = jax.random.split(key, 3 + options.layers)
        count = (SIDE // options.patch) ** 2
        self.embed = eqx.nn.Linear(options.patch**2, options.hidden, key=keys[0])
        self.positions = jax.random.normal(keys[1], (count, options.hidden))
        self.blocks = [Block(options.hidden, options.heads, options.mlp, key=k) for k in keys[3:]]
        self.norm = eqx.nn.LayerNorm(options.hidden)
        self.head = eqx.nn.Linear(options.hidden, CLASSES, key=keys[2])
        self.patch = options.patch

    def __call__(self, image: jax.Array) -> jax.Array:
        """The logits of one image `(8, 8)`."""
        across = SIDE // self.patch
        patches = image.reshape(across, self.patch, across, self.patch).transpose(0, 2, 1, 3)
        x = jax.vmap(self.embed)(patches.reshape(across**2, self.patch**2)) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(jnp.mean(x, axis=0)))


# --- Training ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Digits:
    """One split of the data set: images `(n, 8, 8)` with values from -1 to 1, labels `(n,)`."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    @staticmethod
    def load(test_fraction: float, seed: int) -> "Digits":
        """Splits with every class in the same proportions on both sides."""
        images, labels = load_digits(return_X_y=True)
        images = (images.reshape(-1, SIDE, SIDE) / 8.0 - 1.0).astype(np.float32)
        train, test = train_test_split(
            np.arange(len(labels)), test_size=test_fraction, stratify=labels, random_state=seed
        )
        return Digits(images[train], labels[train], images[test], labels[test])

    def batches(self, batch_size: int, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """One epoch in random order, without the incomplete batch at its end."""
        order = rng.permutation(len(self.train_labels))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            yield self.train_images[chosen], self.train_labels[chosen]


@dataclasses.dataclass
class Run:
    """What is recorded of one training.

    Args:
        losses: Training loss of each step.
        accuracies: Test accuracy after each epoch, in percent.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    accuracies: list[float] = dataclasses.field(default_factory=list)


def in_bfloat16(model: VisionTransformer) -> VisionTransformer:
    """The model with its float32 weights in bf16; FP8 state is no weight and stays float32.

    Called inside the loss: the optimizer keeps float32 master weights, and gradients arrive at them in float32.
    """

    def cast(leaf: Any) -> Any:
        return leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf

    return jax.tree.map(cast, model, is_leaf=lambda node: isinstance(node, OverwriteWithGradient))


def logits_of(model: VisionTransformer, images: jax.Array) -> jax.Array:
    """The logits of a batch of images, computed in bf16, returned in float32."""
    return jax.vmap(in_bfloat16(model))(images.astype(jnp.bfloat16)).astype(jnp.float32)


def make_loss(smoothing: float) -> Callable[[VisionTransformer, jax.Array, jax.Array], jax.Array]:
    """Cross entropy with label smoothing, the mean over the batch."""

    def loss(model: VisionTransformer, images: jax.Array, labels: jax.Array) -> jax.Array:
        targets = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), smoothing)
        return optax.softmax_cross_entropy(logits_of(model, images), targets).mean()

    return loss


@eqx.filter_jit
def accuracy(model: VisionTransformer, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The share of images classified right, in percent."""
    return 100.0 * jnp.mean((jnp.argmax(logits_of(model, images), axis=-1) == labels).astype(jnp.float32))


def train(
    model: VisionTransformer,
    step: TrainStep,
    digits: Digits,
    options: argparse.Namespace,
    seed: int,
    report: Callable[[Run], None],
) -> Run:
    """Trains a model, plain or converted, on the batches of a seed; `report` is called after each epoch."""
    run, opt_state, rng = Run(), step.init(model), np.random.default_rng(seed)
    for _ in range(options.epochs):
        for images, labels in digits.batches(options.batch_size, rng):
            model, opt_state, metrics = step(model, opt_state, jnp.asarray(images), jnp.asarray(labels))
            run.losses.append(float(metrics["loss"]))
        run.accuracies.append(float(accuracy(model, jnp.asarray(digits.test_images), jnp.asarray(digits.test_labels))))
        report(run)
    return run


def train_all(options: argparse.Namespace, console: Console) -> dict[str, list[Run]]:
    """Both models for each seed; by name, one run per seed."""
    splits = [Digits.load(options.test_fraction, seed) for seed in options.seeds]
    loss = make_loss(options.label_smoothing)
    total = options.epochs * (len(splits[0].train_labels) // options.batch_size)
    warmup = min(options.warmup, total // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, warmup, total)
    step = TrainStep(loss, optax.adamw(schedule, weight_decay=options.weight_decay))
    config = Fp8Config(
        exclude=() if options.convert_head else "head", recipe=DelayedScaling(options.amax_history_length)
    )
    runs: dict[str, list[Run]] = {"bf16": [], "FP8": []}
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=2 * len(options.seeds) * options.epochs)
        for seed, digits in zip(options.seeds, splits, strict=True):
            plain = VisionTransformer(options, key=jax.random.key(seed))
            converted = fp8_linear_layers(plain, config)
            if seed == options.seeds[0]:
                announce(plain, converted, config, digits, options, console)
            first = next(digits.batches(options.batch_size, np.random.default_rng(seed)))
            for name, model in (("bf16", plain), ("FP8", calibrate(converted, loss, [tuple(map(jnp.asarray, first))]))):

                def report(run: Run, name: str = name, seed: int = seed) -> None:
                    text = f"seed {seed}, {name:4}: loss {run.losses[-1]:.3f}, accuracy {run.accuracies[-1]:.2f} %"
                    progress.update(task, advance=1, description=text)

                runs[name].append(train(model, step, digits, options, seed, report))
    return runs


# --- What is shown ----------------------------------------------------------------------------------------------------


def announce(
    plain: VisionTransformer,
    converted: VisionTransformer,
    config: Fp8Config,
    digits: Digits,
    options: argparse.Namespace,
    console: Console,
) -> None:
    """Says what is trained on what, and what runs in FP8."""
    count = sum(leaf.size for leaf in jax.tree.leaves(trainable(plain)))
    layers = describe(converted, config)
    device = jax.devices()[0]
    emulated = "emulated on the CPU with the rounding of FP8 hardware, not its speed"
    where = emulated if device.platform == "cpu" else f"on {device.device_kind}"
    console.print(f"digits: {len(digits.train_labels)} images to train on, {len(digits.test_labels)} to test")
    console.print(f"model: {count:,} parameters, {layers.fp8_count} of {len(layers)} linear layers in FP8, {where}")
    if options.verbose:
        console.print(layers)


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


def write_figure(path: pathlib.Path, runs: dict[str, list[Run]]) -> None:
    """Training loss and test accuracy over epochs: the mean over seeds, with the range of the seeds around it."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, of_seeds in runs.items():
        # bf16 broad and pale, FP8 thin and dashed on top of it: both are seen where they coincide.
        wide = name == "bf16"
        style = {"linewidth": 5.0, "alpha": 0.4} if wide else {"linewidth": 1.5, "linestyle": (0, (4, 1.5))}
        epochs = np.arange(1, len(of_seeds[0].accuracies) + 1)
        losses = np.array([np.mean(np.split(np.array(run.losses), len(epochs)), axis=1) for run in of_seeds])
        errors = np.array([run.accuracies for run in of_seeds])
        for axes, curves in ((left, losses), (right, errors)):
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
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(title="last epoch" + (f", mean of {count} seeds" if count > 1 else ""), frameon=False)
    worst = max(gaps(runs), key=abs)
    figure.suptitle(f"Vision transformer on digits: FP8 is at most {abs(worst):.2f} points of accuracy from bf16")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags and checks those that depend on one another."""
    parser = argparse.ArgumentParser(
        prog="train_vit.py",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Trains a small vision transformer in bf16 and in FP8 from the same initialization, on "
        "scikit-learn's handwritten digits; shows the test accuracy of both and a figure of their curves.",
    )
    run = parser.add_argument_group("run")
    run.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="each: a split, an initialization, batches"
    )
    run.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    run.add_argument("--test-fraction", type=float, default=0.3, help="share of the images held back")
    run.add_argument("--out", default="runs/train_vit", metavar="DIR", help="where the figure and the numbers go")
    run.add_argument("--verbose", action="store_true", help="list every layer: converted, or why not")
    recipe = parser.add_argument_group("FP8")
    recipe.add_argument("--convert-head", action="store_true", help="the classifier head in FP8 too")
    recipe.add_argument("--amax-history-length", type=int, default=1024, metavar="N", help="steps remembered")
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=2, help="blocks")
    model.add_argument("--hidden", type=int, default=32, help="width of the residual stream")
    model.add_argument("--heads", type=int, default=4, help="attention heads")
    model.add_argument("--mlp", type=int, default=64, help="width of the perceptron in each block")
    model.add_argument("--patch", type=int, default=2, choices=[1, 2, 4], help="side of a patch, in pixels")
    optimizer = parser.add_argument_group("optimizer (AdamW; warm-up, then cosine)")
    optimizer.add_argument("--batch-size", type=int, default=32, help="images per step")
    optimizer.add_argument("--learning-rate", type=float, default=4e-3, help="at its peak")
    optimizer.add_argument("--warmup", type=int, default=60, help="steps")
    optimizer.add_argument("--weight-decay", type=float, default=0.05, help="of all weights")
    optimizer.add_argument("--label-smoothing", type=float, default=0.0, help="of the targets")
    options = parser.parse_args(argv)
    for name in ("epochs", "layers", "hidden", "heads", "mlp", "batch_size", "amax_history_length"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1")
    if options.hidden % options.heads:
        parser.error(f"--hidden {options.hidden} is not a multiple of --heads {options.heads}")
    if not 0.0 < options.test_fraction < 1.0:
        parser.error(f"--test-fraction {options.test_fraction} must lie between 0 and 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status."""
    options, console, start = parse_options(argv), Console(highlight=False), time.perf_counter()
    folder = pathlib.Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        runs = train_all(options, console)
    except KeyboardInterrupt:
        return 130
    console.print(results_table(runs, options.seeds))
    results = {name: [dataclasses.asdict(run) for run in of_seeds] for name, of_seeds in runs.items()}
    (folder / "results.json").write_text(json.dumps({"seeds": options.seeds, "gaps": gaps(runs)} | results) + "\n")
    write_figure(folder / "curves.png", runs)
    console.print(f"Curves: {folder / 'curves.png'}; the same in numbers: {folder / 'results.json'}")
    console.print(f"{time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
