"""Question: what does FP8 cost in loss, in a Llama of 75 million weights and on 100 million bytes of real text?

    uv run benchmarks/loss_at_75_million_weights.py --minutes 10              # needs a GPU; the same command goes on
    uv run benchmarks/loss_at_75_million_weights.py --size 3M --steps 2000 --seeds 3 --minutes 600    # on a CPU
    uv run benchmarks/loss_at_75_million_weights.py --size tiny               # anywhere: no figures
    uv run benchmarks/loss_at_75_million_weights.py --show FILE --plot PICTURE.svg

Every variant trains on the same batches in the same order, and from the same weights, as bf16 with its seed; `bf16+ulp`
is bf16 once more, from weights moved by one ulp of float32: what two runs differ by that ought to be the same. All runs
train side by side, a few steps of each in turn, so that whenever a call ends there is a comparison. The gap is that of
the losses of pairs, `100 (loss / loss in bf16 - 1)`.

A call ends after `--minutes`, and the next one goes on from `--out`, which has every run's last state and
`results.json`. Both are written every minute, or so seldom that writing takes a tenth of the time. Runs do one pass
over the text, or `--steps`: the learning rate depends on their number, so all calls have to agree in it. More
`--variants` or `--seeds` can be added, and catch up.

Tokens are bytes. The text is the source and the prose of the Python packages that are installed where it runs: files of
the same content count once, their order is that of their hashes, and every fiftieth is held back. It is kept in `--out`
with a list of its files. A file that was copied with changes may be in both parts.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


BEGIN = time.monotonic()
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import equinox as eqx  # noqa: E402
import haliax as hax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from lib import output  # noqa: E402
from lib.language_model import JaxAttention, next_token_loss  # noqa: E402
from lib.paired_gaps import paired_gap  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402

import haliax_fp8 as fp8  # noqa: E402
from haliax_fp8.checkpoints import load_into, save  # noqa: E402
from haliax_fp8.models import Transformer, TransformerConfig  # noqa: E402
from haliax_fp8.models.rotary import rotate  # noqa: E402
from haliax_fp8.training import quantized_state  # noqa: E402


SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
HELD_BACK = 50
"""One file of so many is held back."""
BASELINE = "bf16"
POINTS = 100
"""Of a curve: each is the mean of the losses of a hundredth of the steps."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What all runs share.

    Args:
        llama: The model.
        batch: Sequences in a step.
        text_bytes: Of the training text, at most.
        least_text_bytes: Less is an error.
        validation_batches: Batches of the text that is held back.
        chunk: Steps of one run before the next one's turn.
        learning_rate: At its peak.
    """

    llama: TransformerConfig
    batch: int
    text_bytes: int
    least_text_bytes: int
    validation_batches: int = 16
    chunk: int = 25
    learning_rate: float = 6e-4

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.llama.max_length


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, length: int) -> TransformerConfig:
    head_dim = hidden // heads
    return TransformerConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=mlp,
        max_length=length,
        unroll=1,
    )


SIZES = {
    "75M": Sizes(_llama(12, 768, 12, 4, 2048, 2048), 16, 100_000_000, 50_000_000),
    "3M": Sizes(_llama(4, 256, 8, 4, 704, 128), 4, 10_000_000, 1_000_000, 32, 10, 1e-3),
    "tiny": Sizes(_llama(2, 32, 2, 1, 64, 32), 4, 40_000, 1_000, 2, 3),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a model is trained.

    Args:
        config: How it is converted; None leaves it in bf16.
        first_in_bf16: The share of the steps before it is converted.
        fp8_moments: Whether the optimizer's moments are stored in FP8.
        ulp: Whether its weights start one ulp of float32 above those of the seed.
    """

    config: fp8.Fp8Config | None = None
    first_in_bf16: float = 0.0
    fp8_moments: bool = False
    ulp: bool = False


def _recipe(name: str) -> fp8.Fp8Config:
    return fp8.Fp8Config(recipe=name, exclude="head")


VARIANTS = {
    BASELINE: Variant(),
    "bf16+ulp": Variant(ulp=True),
    "delayed": Variant(_recipe("delayed")),
    "current": Variant(_recipe("current")),
    "rowwise": Variant(_recipe("rowwise")),
    "delayed+fp8_moments": Variant(_recipe("delayed"), fp8_moments=True),
    "bf16+fp8_moments": Variant(fp8_moments=True),
    "delayed+first_quarter_in_bf16": Variant(_recipe("delayed"), first_in_bf16=0.25),
}


@dataclasses.dataclass(frozen=True)
class Text:
    """Bytes in two parts, and the files that they come from.

    Args:
        train: Training bytes.
        validation: Bytes of other files.
        files: A line for each file: its SHA-256, its size and its path.
    """

    train: np.ndarray
    validation: np.ndarray
    files: list[str]

    @property
    def digest(self) -> str:
        """A hash of all that was read."""
        return hashlib.sha256(self.train.tobytes() + self.validation.tobytes()).hexdigest()[:16]

    def sequences(self, sizes: Sizes, seed: int) -> np.ndarray:
        """The training text as sequences, each once, in the order of a seed."""
        count = len(self.train) // sizes.llama.max_length
        order = np.random.default_rng(seed).permutation(count)
        return self.train[: count * sizes.llama.max_length].reshape(count, -1)[order]


def text_in(folder: Path, sizes: Sizes, roots: Sequence[Path] | None) -> Text:
    """The text of an earlier call, or else that of the installed packages, which it keeps.

    Args:
        folder: Where it is kept.
        sizes: How much is needed.
        roots: Folders to read; None for the standard library's and the packages'.
    """
    arrays, listing = folder / "text.npz", folder / "text.files.txt"
    if not arrays.exists():
        text = installed_text(sizes, roots)
        listing.write_text("\n".join(text.files))
        draft = folder / "text.part.npz"
        np.savez(draft, train=text.train, validation=text.validation)
        draft.replace(arrays)
    with np.load(arrays) as archive:
        return Text(archive["train"], archive["validation"], listing.read_text().splitlines())


def installed_text(sizes: Sizes, roots: Sequence[Path] | None = None) -> Text:
    """As much text of the packages that are installed as a run takes.

    Args:
        sizes: How much that is.
        roots: Folders to read; None for the standard library's and the packages'.

    Raises:
        ValueError: If there is too little.
    """
    paths = sysconfig.get_paths()
    roots = roots or [Path(paths[name]) for name in ("stdlib", "purelib", "platlib")]
    unique: dict[str, Path] = {}
    for path in sorted({path for root in roots for path in root.rglob("*")}):
        # Larger ones are tables that a program wrote.
        if path.suffix in SUFFIXES and path.is_file() and path.stat().st_size <= 1_000_000:
            unique.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), path)
    validation_size = sizes.validation_batches * sizes.tokens
    train, validation, files = bytearray(), bytearray(), []
    for sha, path in sorted(unique.items()):
        part, size = (validation, validation_size) if int(sha[-8:], 16) % HELD_BACK == 0 else (train, sizes.text_bytes)
        if len(part) < size:
            part += path.read_bytes()
            files.append(f"{sha}  {path.stat().st_size:>7}  {path}")
    if len(train) < sizes.least_text_bytes or len(validation) < validation_size:
        raise ValueError(
            f"the folders have {len(train) / 1e6:.2f} MB of text to train on, {len(validation) / 1e6:.2f} MB to hold "
            f"back; this size takes {sizes.least_text_bytes / 1e6:g} and {validation_size / 1e6:.2f} MB at least: "
            "install more packages, such as those of `uv sync --group dev`, or name folders with --folder"
        )
    as_array = lambda part, size: np.frombuffer(bytes(part[:size]), np.uint8)
    return Text(as_array(train, sizes.text_bytes), as_array(validation, validation_size), files)


def rotary_attention(query: Any, key: Any, value: Any, *rotary: hax.NamedArray) -> hax.NamedArray:
    """Causal attention with rotary positions: cuDNN's on a GPU."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else None
    return JaxAttention(implementation)(rotate(query, *rotary), rotate(key, *rotary), value)


@functools.cache
def training_step(*, fp8_moments: bool) -> fp8.TrainStep:
    """One for all runs that share an optimizer, so that each kind of model is compiled once."""
    moments = optax.scale_by_adam(b2=0.95)

    # The learning rate is part of the optimizer's state, so that the program does not depend on the number of steps.
    def chained(learning_rate: Any) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(1.0),
            quantized_state(moments) if fp8_moments else moments,
            optax.add_decayed_weights(0.1, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
            optax.scale_by_learning_rate(learning_rate),
        )

    optimizer = optax.inject_hyperparams(chained)(learning_rate=0.0)
    return fp8.TrainStep(next_token_loss, optimizer, donate=True)


class Run:
    """A model in training.

    Args:
        name: Its variant and its seed, as in `delayed:0`.
        sizes: The sizes.
        text: The text.
        steps: How many there will be.
        folder: Where its state is; if there is any, the run goes on from it.
    """

    def __init__(self, name: str, sizes: Sizes, text: Text, steps: int, folder: Path) -> None:
        self.name, self.sizes, self.path = name, sizes, folder / f"{name.replace(':', '-')}.safetensors"
        variant, _, seed = name.partition(":")
        self.variant, self.rates = VARIANTS[variant], learning_rates(steps, sizes.learning_rate)
        self.sequences = text.sequences(sizes, int(seed))
        self.conversion = math.ceil(self.variant.first_in_bf16 * steps / sizes.chunk) * sizes.chunk
        config = dataclasses.replace(sizes.llama, attention=rotary_attention)
        self.model = eqx.filter_jit(Transformer.init)(config, key=jax.random.key(int(seed)))
        if self.variant.ulp:
            self.model = jax.tree.map(lambda w: jnp.nextafter(w, jnp.inf) if eqx.is_array(w) else w, self.model)
        self.step = training_step(fp8_moments=self.variant.fp8_moments)
        self.opt_state = self.step.init(self.model)
        self.record = {
            "done": np.zeros((), np.int32),
            "losses": np.zeros(steps, np.float32),
            # Step, loss, and loss of the weights in bf16 of each quarter.
            "validations": np.zeros((4, 3), np.float32),
        }
        self.seconds: list[float] = []
        if self.path.exists():
            # How far it was says whether its model is converted.
            (*_, self.record), _ = load_into((None, None, self.record), self.path)
            if self.done > self.conversion:
                self.convert()
            (self.model, self.opt_state, self.record), _ = load_into(self._tree, self.path, strict=True)
            self.record = jax.tree.map(np.array, self.record)

    @property
    def _tree(self) -> Any:
        return self.model, self.opt_state, self.record

    @property
    def done(self) -> int:
        """Steps that were done."""
        return int(self.record["done"])

    def save(self) -> None:
        """Replaces the file of its state. A run that has diverged is a result too."""
        save(self.path, self._tree, allow_nonfinite=True)

    def convert(self) -> None:
        """Converts the model."""
        if self.variant.config is not None:
            old, self.model = self.model, fp8.fp8_linear_layers(self.model, self.variant.config)
            self.opt_state = fp8.transfer_optimizer_state(self.opt_state, old, self.model)

    def batch(self, index: int) -> hax.NamedArray:
        """The tokens of a step."""
        start = index * self.sizes.batch
        return _named(self.sequences[start : start + self.sizes.batch])

    def train(self, validation_tokens: Sequence[hax.NamedArray]) -> None:
        """Its turn: some steps, timed as a whole; after a quarter of all also a validation."""
        start, steps = self.done, len(self.rates)
        if start == self.conversion:
            self.convert()
            self.model = self.step.calibrate(self.model, self.batch(start))
        indices = range(start, min(start + self.sizes.chunk, steps))
        batches = [self.batch(index) for index in indices]
        begin, losses = time.perf_counter(), []
        for index, tokens in zip(indices, batches, strict=True):
            self.opt_state.hyperparams["learning_rate"] = jnp.float32(self.rates[index])
            self.model, self.opt_state, metrics = self.step(self.model, self.opt_state, tokens)
            losses.append(metrics["loss"])
        self.record["losses"][start : indices.stop] = [float(loss) for loss in losses]
        self.seconds.append((time.perf_counter() - begin) / len(indices))
        self.record["done"] = np.int32(indices.stop)
        for quarter in range(4):
            if start < steps * (quarter + 1) // 4 <= self.done:
                self.record["validations"][quarter] = (self.done, *self.validation(validation_tokens))

    def validation(self, validation_tokens: Sequence[hax.NamedArray]) -> tuple[float, float]:
        """The loss of the text that is held back, as trained and of the same weights in bf16."""
        mean = lambda model: statistics.fmean(float(_loss(model, tokens)) for tokens in validation_tokens)
        loss = mean(self.model)
        return loss, loss if self.variant.config is None else mean(fp8.restore_linear_layers(self.model))

    @property
    def result(self) -> dict[str, Any]:
        """What `results.json` has of it."""
        width = max(1, len(self.rates) // POINTS)
        whole = self.done // width * width
        # The first turn compiles.
        seconds = self.seconds[1:] or self.seconds
        return {
            "done": self.done,
            "every": width,
            "losses": self.record["losses"][:whole].reshape(-1, width).mean(axis=1).round(5).tolist(),
            "validations": [row for row in self.record["validations"].round(5).tolist() if row[0]],
            "seconds_per_step": statistics.median(seconds) if seconds else None,
        }


def _named(tokens: np.ndarray) -> hax.NamedArray:
    return hax.named(jnp.asarray(tokens, jnp.int32), ("batch", "position"))


_loss = eqx.filter_jit(next_token_loss)


def learning_rates(steps: int, peak: float) -> np.ndarray:
    """Half a cosine to a tenth of the peak, after a warm-up of a fiftieth of the steps."""
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, max(1, steps // 50), steps, 0.1 * peak)
    return np.asarray(rate(np.arange(steps) + 0.5), np.float32)


def train(names: Sequence[str], sizes: Sizes, text: Text, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """Goes on with the runs until they are done or the time is over, and returns what `results.json` has then."""
    settings = {"size": options.size, "steps": steps, "text": text.digest}
    file, folder = options.out / "results.json", options.out
    content = _of_earlier_calls(file, settings)
    validation_tokens = text.validation.reshape(sizes.validation_batches, sizes.batch, sizes.llama.max_length)
    validation_tokens = [_named(tokens) for tokens in validation_tokens]
    runs = [Run(name, sizes, text, steps, folder) for name in names]

    def write() -> float:
        begin = time.monotonic()
        for run in runs:
            run.save()
            earlier = content["runs"].get(run.name, {})
            content["runs"][run.name] = run.result | ({} if run.seconds else _timing_of(earlier))
        draft = file.with_name("results.json.part")
        draft.write_text(json.dumps(content | {"environment": output.environment()}))
        draft.replace(file)
        return time.monotonic() - begin

    end, saved, saving = BEGIN + 60.0 * options.minutes, time.monotonic(), 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=options.quiet) as progress:
        bar = progress.add_task("", total=steps * len(runs), completed=sum(run.done for run in runs))
        while (behind := min(run.done for run in runs)) < steps:
            begin = time.monotonic()
            for run in (run for run in runs if run.done == behind):
                run.train(validation_tokens)
                loss = run.record["losses"][run.done - 1]
                progress.update(bar, advance=run.done - behind, description=f"{run.name}: loss {loss:.4f}")
            now = time.monotonic()
            if now + (now - begin) + saving > end:
                break
            if now - saved > max(options.save_every, 10.0 * saving):
                saving, saved = write(), time.monotonic()
    write()
    return content


def _timing_of(earlier: Mapping[str, Any]) -> dict[str, Any]:
    return {"seconds_per_step": earlier["seconds_per_step"]} if earlier else {}


def _of_earlier_calls(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `results.json` has, if all settings are the same."""
    if not path.exists():
        return {"settings": settings, "runs": {}}
    content = json.loads(path.read_text())
    for name, value in settings.items():
        if content["settings"][name] != value:
            raise ValueError(
                f"--out {path.parent} has runs with {name}={content['settings'][name]!r}, and these have {value!r}: "
                "runs are compared only if all settings are equal; give the same ones, or another folder"
            )
    return content


def rows(content: Mapping[str, Any]) -> Iterator[output.Row]:
    """One for each variant: its gaps to bf16, over the seeds that both have, after as many steps as all have done."""
    runs: dict[str, dict[int, Any]] = {}
    for name, run in content["runs"].items():
        variant, _, seed = name.partition(":")
        runs.setdefault(variant, {})[int(seed)] = run
    for variant, by_seed in runs.items():
        baseline = {seed: run for seed, run in runs[BASELINE].items() if seed in by_seed}
        yield {"variant": variant, "seeds": len(baseline), **_row({seed: by_seed[seed] for seed in baseline}, baseline)}


def _row(by_seed: Mapping[int, Any], baseline: Mapping[int, Any]) -> output.Row:
    both = [*by_seed.values(), *baseline.values()]
    points, quarters = (min(len(run[name]) for run in both) for name in ("losses", "validations"))
    # Of the last tenth.
    training = lambda run: float(np.mean(run["losses"][points - max(1, points // 10) : points]))
    validated = lambda run, column=1: run["validations"][quarters - 1][column]
    each = lambda runs, read: {seed: read(run) for seed, run in runs.items()}
    timed = [run["seconds_per_step"] for run in by_seed.values() if run["seconds_per_step"] is not None]
    row = {"steps": points * both[0]["every"], "curve": gap_curve(by_seed, baseline)}
    row["seconds_per_step"] = statistics.median(timed) if timed else None
    if points:
        row["training_loss"] = statistics.fmean(each(by_seed, training).values())
        row["training_gap"] = paired_gap(each(by_seed, training), each(baseline, training))
    if quarters:
        in_bf16 = lambda run: validated(run, 2)
        row["validated_after"] = int(validated(both[0], 0))
        row["loss"] = statistics.fmean(each(by_seed, validated).values())
        row["gap"] = paired_gap(each(by_seed, validated), each(baseline, validated))
        row["gap_in_bf16"] = paired_gap(each(by_seed, in_bf16), each(baseline, validated))
    return row


def rows_in(folder: Path) -> list[output.Row]:
    """Those of the runs in a folder."""
    return list(rows(json.loads((folder / "results.json").read_text())))


def gap_curve(by_seed: Mapping[int, Any], baseline: Mapping[int, Any]) -> list[list[float]]:
    """The gap of the training loss over steps: after which step, the mean over seeds, the lowest and the highest."""
    pairs = [(by_seed[seed], baseline[seed]) for seed in by_seed]
    points = min(len(run["losses"]) for pair in pairs for run in pair)
    losses, of_baseline = (np.array([pair[i]["losses"][:points] for pair in pairs]) for i in (0, 1))
    gaps = 100.0 * (losses / of_baseline - 1.0)
    steps = pairs[0][0]["every"] * np.arange(1, points + 1)
    return np.stack([steps, gaps.mean(0), gaps.min(0), gaps.max(0)], axis=1).tolist()


def figure_of(table: Sequence[output.Row], title: str) -> Any:
    """The gaps over steps, each with a band from its lowest to its highest seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    axes = figure.subplots()
    dashes = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (9, 2)), (0, (1, 3)))
    drawn = [row for row in table if row["variant"] != BASELINE and row["curve"]]
    for row, line in zip(drawn, dashes, strict=False):
        steps, mean, low, high = np.transpose(row["curve"])
        (curve,) = axes.plot(steps, mean, ls=line, lw=1.8, label=f"{row['variant']}, {row['seeds']} seeds")
        axes.fill_between(steps, low, high, color=curve.get_color(), alpha=0.2, lw=0)
    axes.axhline(0.0, color="#6b7280", lw=0.8)
    axes.set(title=title, xlabel="step", ylabel="gap of the loss to bf16, %")
    if drawn:
        axes.legend(frameon=False)
    return figure


def _gap(name: str) -> Any:
    return lambda row: "" if name not in row or row["variant"] == BASELINE else str(row[name])


COLUMNS = {
    "variant": lambda row: row["variant"],
    "seeds": lambda row: str(row["seeds"]),
    "steps": lambda row: f"{row['steps']:,}",
    "training loss": lambda row: f"{row['training_loss']:.4f}" if "training_loss" in row else "",
    "gap to bf16": _gap("training_gap"),
    "validated after": lambda row: f"{row['validated_after']:,}" if "gap" in row else "",
    "held-back loss": lambda row: f"{row['loss']:.4f}" if "gap" in row else "",
    "its gap": _gap("gap"),
    "95 %": lambda row: (
        "{:+.2f} to {:+.2f} %".format(*row["gap"].interval)
        if "gap" in row and row["variant"] != BASELINE and row["gap"].seeds > 1
        else ""
    ),
    "weights as bf16": _gap("gap_in_bf16"),
    "s a step": lambda row: "" if row["seconds_per_step"] is None else f"{row['seconds_per_step']:.3g}",
}


def show(content: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Prints the table, and draws the picture."""
    table, settings = list(rows(content)), content["settings"]
    title = "Gap of the loss to bf16, {size} weights, {steps:,} steps, text {text}".format(**settings)
    output.show(title, COLUMNS, table, content["environment"], markdown=options.markdown)
    if options.plot:
        figure_of(table, title).savefig(options.plot)


def main(argv: Sequence[str] | None = None) -> bool:
    """Goes on with the runs, and prints the table; whether all steps are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="75M", help="weights of the model; default: %(default)s")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["bf16+ulp", "delayed"], help="besides bf16")
    parser.add_argument("--seeds", type=int, default=2, help="how many of each; those from 0 on")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all that the call does")
    parser.add_argument("--steps", type=int, help="of each run; default: one pass over the text")
    parser.add_argument("--out", type=Path, help="default: runs/loss_at_SIZE")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between two states on disk, at least")
    parser.add_argument("--folder", type=Path, nargs="+", help="read the text here, and not in the packages")
    parser.add_argument("--show", type=Path, help="only print what a results.json has")
    parser.add_argument("--plot", type=Path, help="also draw the gap over steps; needs matplotlib")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    options = parser.parse_args(argv)
    if options.plot:
        import matplotlib as matplotlib  # Its absence is noticed now, and not after the last step.
    if options.show:
        show(json.loads(options.show.read_text()), options)
        return True
    sizes = SIZES[options.size]
    options.out = options.out or Path(f"runs/loss_at_{options.size}")
    options.out.mkdir(parents=True, exist_ok=True)
    text = text_in(options.out, sizes, options.folder)
    print(f"{len(text.train) / 1e6:.2f} MB of text to train on, of {len(text.files):,} files", file=sys.stderr)
    limit = len(text.train) // sizes.tokens
    steps = options.steps or limit
    if not 0 < steps <= limit:
        raise ValueError(f"--steps {steps} is not from 1 to {limit}, one pass over the text")
    variants = dict.fromkeys((BASELINE, *options.variants))
    names = [f"{variant}:{seed}" for seed in range(options.seeds) for variant in variants]
    content = train(names, sizes, text, steps, options)
    content["environment"] = output.environment()
    show(content, options)
    done = min(content["runs"][name]["done"] for name in names)
    if done < steps:
        print(f"{done:,} of {steps:,} steps are done: the same command goes on", file=sys.stderr)
    return done == steps


if __name__ == "__main__":
    main()
