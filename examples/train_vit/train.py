"""Trains a small vision transformer in bf16 and in FP8 on handwritten digits, and compares their accuracy.

    python -m examples.train_vit                      # three seeds, under 2.5 minutes on 2 CPU cores
    python -m examples.train_vit --seeds 7 --epochs 20 --convert-head
    python -m examples.train_vit --help

The model is plain Equinox: `jax.vmap(model)` over `eqx.nn.Linear`, `eqx.nn.MultiheadAttention` and `eqx.nn.LayerNorm`;
nothing in it is about FP8. Both runs of a seed share initialization, batches and optimizer, and differ by one line,
`model = fp8_linear_layers(model, config)`. The data set, 1797 images of 8x8, comes with scikit-learn. On a CPU the FP8
products are emulated: slower, with the same rounding.
"""

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from haliax_fp8 import (
    DelayedScaling,
    Fp8Config,
    TrainStep,
    calibrate,
    cast_params,
    describe,
    fp8_linear_layers,
    trainable,
)

from ..interrupts import INTERRUPTED, stop_requests
from .model import CLASSES, SIDE, VisionTransformer
from .report import Run, gaps, results_table, verdict, write_figure


_STOPPED = "Stopped; this example keeps no checkpoint."


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

    def batches(
        self, batch_size: int, noise: float, rng: np.random.Generator
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """One epoch in random order, without the incomplete batch at its end; fresh noise on every image."""
        order = rng.permutation(len(self.train_labels))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            images = self.train_images[chosen]
            images = images + noise * rng.standard_normal(images.shape, np.float32)
            yield images, self.train_labels[chosen]


def logits_of(model: VisionTransformer, images: jax.Array) -> jax.Array:
    """The logits of a batch of images, computed in bf16, returned in float32."""
    return jax.vmap(cast_params(model, jnp.bfloat16))(images.astype(jnp.bfloat16)).astype(jnp.float32)


def make_loss(smoothing: float) -> Callable[[VisionTransformer, jax.Array, jax.Array], jax.Array]:
    """Cross entropy with label smoothing, the mean over the batch."""

    def loss(model: VisionTransformer, images: jax.Array, labels: jax.Array) -> jax.Array:
        targets = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), smoothing)
        return optax.softmax_cross_entropy(logits_of(model, images), targets).mean()

    return loss


@eqx.filter_jit
def accuracy(model: VisionTransformer, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The share of images classified correctly, in percent."""
    return 100.0 * jnp.mean((jnp.argmax(logits_of(model, images), axis=-1) == labels).astype(jnp.float32))


def train(
    model: VisionTransformer,
    step: TrainStep,
    digits: Digits,
    options: argparse.Namespace,
    seed: int,
    report: Callable[[Run], None],
    stop_requested: Callable[[], bool] = lambda: False,
) -> Run:
    """Trains a model, plain or converted, on the batches of a seed; `report` is called after each epoch.

    Raises:
        KeyboardInterrupt: After the step in which a stop was requested.
    """
    run, opt_state, rng = Run(), step.init(model), np.random.default_rng(seed)
    for _ in range(options.epochs):
        for images, labels in digits.batches(options.batch_size, options.noise, rng):
            model, opt_state, metrics = step(model, opt_state, jnp.asarray(images), jnp.asarray(labels))
            run.losses.append(float(metrics["loss"]))
            if stop_requested():
                raise KeyboardInterrupt
            if not np.isfinite(run.losses[-1]):
                raise FloatingPointError(f"the loss is {run.losses[-1]}; lower --learning-rate {options.learning_rate}")
        run.accuracies.append(float(accuracy(model, jnp.asarray(digits.test_images), jnp.asarray(digits.test_labels))))
        report(run)
    return run


def train_all(options: argparse.Namespace, console: Console) -> dict[str, list[Run]]:
    """Both models for each seed; by name, one run per seed.

    Raises:
        ValueError: If the data set cannot be split or batched as the flags say.
        FloatingPointError: If a loss is not finite.
    """
    splits = [Digits.load(options.test_fraction, seed) for seed in options.seeds]
    loss = make_loss(options.label_smoothing)
    count = len(splits[0].train_labels)
    if options.batch_size > count:
        raise ValueError(f"--batch-size {options.batch_size} is more than the {count} images to train on")
    total = options.epochs * (count // options.batch_size)
    warmup = min(options.warmup, total // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, warmup, total)
    step = TrainStep(loss, optax.adamw(schedule, weight_decay=options.weight_decay))
    config = Fp8Config(
        exclude=() if options.convert_head else "head", recipe=DelayedScaling(options.amax_history_length)
    )
    runs: dict[str, list[Run]] = {"bf16": [], "FP8": []}
    steps = 2 * len(options.seeds) * total
    console.print(
        f"{steps} steps: {total} for each of two models and {len(options.seeds)} seeds. First XLA compiles, which has "
        f"no progress to show{_measured(options)}"
    )
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    say = lambda line: console.print(line, markup=False)
    with stop_requests(say, lambda: _STOPPED) as stop_requested, Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=2 * len(options.seeds) * options.epochs)
        for seed, digits in zip(options.seeds, splits, strict=True):
            plain = VisionTransformer(**model_sizes(options), key=jax.random.key(seed))
            converted = fp8_linear_layers(plain, config)
            if seed == options.seeds[0]:
                announce(plain, converted, config, digits, options, console)
            # Calibrate on the first batch, so that every scale fits from the first step on.
            first = next(digits.batches(options.batch_size, options.noise, np.random.default_rng(seed)))
            converted = calibrate(converted, loss, [tuple(map(jnp.asarray, first))])
            for name, model in (("bf16", plain), ("FP8", converted)):

                def report(run: Run, name: str = name, seed: int = seed) -> None:
                    text = f"seed {seed}, {name:4}: loss {run.losses[-1]:.3f}, accuracy {run.accuracies[-1]:.2f} %"
                    progress.update(task, advance=1, description=text)

                runs[name].append(train(model, step, digits, options, seed, report, stop_requested))
    return runs


def _measured(options: argparse.Namespace) -> str:
    """How long the default takes where that was measured."""
    named = vars(options) | {"out": None, "verbose": None}
    if jax.default_backend() != "cpu" or named != vars(parse_options([])) | {"out": None, "verbose": None}:
        return ""
    return "; on two idle CPU cores all of it takes 2.5 minutes"


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
    layers = describe(converted, config=config)
    console.print(f"digits: {len(digits.train_labels)} images to train on, {len(digits.test_labels)} to test")
    console.print(f"model: {count:,} parameters; {layers.summary}")
    if options.verbose:
        console.print(layers)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds defaults, except to switches."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if isinstance(action.default, bool) else super()._get_help_string(action)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags and checks those that depend on one another."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_vit",
        usage="%(prog)s [options]",
        formatter_class=_Formatter,
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
    optimizer.add_argument("--noise", type=float, default=0.25, help="added to the images, which span -1 to 1")
    options = parser.parse_args(argv)
    for name in ("epochs", "layers", "hidden", "heads", "mlp", "batch_size", "amax_history_length"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1")
    if options.hidden % options.heads:
        parser.error(f"--hidden {options.hidden} is not a multiple of --heads {options.heads}")
    if min(options.seeds) < 0:
        parser.error(f"--seeds {options.seeds} must not be negative")
    if not 0.0 < options.test_fraction < 1.0:
        parser.error(f"--test-fraction {options.test_fraction} must lie between 0 and 1")
    return options


def model_sizes(options: argparse.Namespace) -> dict[str, int]:
    """The arguments of `VisionTransformer`."""
    return {name: getattr(options, name) for name in ("patch", "layers", "hidden", "heads", "mlp")}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status."""
    options, console, start = parse_options(argv), Console(highlight=False), time.perf_counter()
    folder = pathlib.Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        runs = train_all(options, console)
    except KeyboardInterrupt:
        console.print(_STOPPED)
        return INTERRUPTED
    except (ValueError, FloatingPointError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return 2
    console.print(results_table(runs, options.seeds))
    results = {name: [dataclasses.asdict(run) for run in of_seeds] for name, of_seeds in runs.items()}
    (folder / "results.json").write_text(json.dumps({"seeds": options.seeds, "gaps": gaps(runs)} | results) + "\n")
    write_figure(folder / "curves.png", runs)
    # Paths are copied: they are not broken.
    console.print(f"Curves: {folder / 'curves.png'}\nNumbers: {folder / 'results.json'}", soft_wrap=True)
    console.print(f"{time.perf_counter() - start:.0f} s", verdict(runs), sep="\n")
    return 0
