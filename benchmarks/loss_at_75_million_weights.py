"""Question: what does FP8 cost in loss, in a Llama of 75 million weights and on 100 million bytes of real text?

    uv run benchmarks/loss_at_75_million_weights.py [--minutes 8] [--json FILE]                  # needs a GPU
    uv run benchmarks/loss_at_75_million_weights.py --runs bf16:1 --steps N --json FILE          # adds runs to a file
    uv run benchmarks/loss_at_75_million_weights.py --smoke                                      # tiny, anywhere

Runs are `variant:seed`. Those of one call train side by side in one process, a few steps of each in turn: from the same
weights, on the same batches in the same order. A call is a whole comparison, then, however long it took, and the next
one adds to the same file. It measures how long a step takes, and does as many as fit into `--minutes`, at most one pass
over `--bytes`; give the later calls the `--steps` of the first, because the learning rate depends on them.

Tokens are bytes. The text is the source and the prose of the Python packages that are installed where it runs: files of
the same content count once, their order is that of their hashes, and every fiftieth is held back. What was read is
listed, with its hashes, beside the file of results. A file that was copied with changes may be in both parts.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import statistics
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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402

import haliax_fp8 as fp8  # noqa: E402
from haliax_fp8.models import Transformer, TransformerConfig  # noqa: E402
from haliax_fp8.models.rotary import rotate  # noqa: E402
from haliax_fp8.training import quantized_state  # noqa: E402


SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
HELD_BACK = 50
"""One file of so many is held back."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What all runs share.

    Args:
        llama: The model.
        batch: Sequences in a step.
        text_bytes: Of the training text.
        validation_batches: Batches of the text that is held back.
        chunk: Steps of one run before the next one's turn.
    """

    llama: TransformerConfig = TransformerConfig(
        layers=12, hidden=768, heads=12, kv_heads=4, head_dim=64, mlp=2048, max_length=2048, unroll=1
    )
    batch: int = 16
    text_bytes: int = 100_000_000
    validation_batches: int = 16
    chunk: int = 25


SMOKE = Sizes(
    TransformerConfig(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, mlp=64, max_length=32, unroll=1),
    batch=4,
    text_bytes=40_000,
    validation_batches=2,
    chunk=3,
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a model is trained.

    Args:
        config: How it is converted; None leaves it in bf16.
        first_in_bf16: The share of the steps before it is converted.
        fp8_moments: Whether the optimizer's moments are stored in FP8.
    """

    config: fp8.Fp8Config | None = None
    first_in_bf16: float = 0.0
    fp8_moments: bool = False


def _recipe(name: str) -> fp8.Fp8Config:
    return fp8.Fp8Config(recipe=name, exclude="head")


VARIANTS = {
    "bf16": Variant(),
    "delayed": Variant(_recipe("delayed")),
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
        files: For each file its path, its SHA-256 and its size.
    """

    train: np.ndarray
    validation: np.ndarray
    files: list[tuple[str, str, int]]

    @property
    def digest(self) -> str:
        """A hash of all that was read."""
        return hashlib.sha256("".join(sha for _, sha, _ in self.files).encode()).hexdigest()[:16]

    def sequences(self, sizes: Sizes, seed: int) -> np.ndarray:
        """The training text as sequences, each once, in the order of a seed."""
        count = len(self.train) // sizes.llama.max_length
        order = np.random.default_rng(seed).permutation(count)
        return self.train[: count * sizes.llama.max_length].reshape(count, -1)[order]


def installed_text(sizes: Sizes, roots: Sequence[Path] | None = None) -> Text:
    """The text of the packages that are installed.

    Args:
        sizes: How much is needed.
        roots: Folders to read; None for the standard library's and the packages'.

    Raises:
        ValueError: If there is less than that.
    """
    paths = sysconfig.get_paths()
    roots = roots or [Path(paths[name]) for name in ("stdlib", "purelib", "platlib")]
    unique: dict[str, Path] = {}
    for path in sorted({path for root in roots for path in root.rglob("*")}):
        # Larger ones are tables that a program wrote.
        if path.suffix in SUFFIXES and path.is_file() and path.stat().st_size <= 1_000_000:
            unique.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), path)
    train_size, held_size = sizes.text_bytes, sizes.validation_batches * sizes.batch * sizes.llama.max_length
    train, held, files = bytearray(), bytearray(), []
    for sha, path in sorted(unique.items()):
        part, size = (held, held_size) if int(sha[-8:], 16) % HELD_BACK == 0 else (train, train_size)
        if len(part) < size:
            part += path.read_bytes()
            files.append((str(path), sha, path.stat().st_size))
    if len(train) < train_size or len(held) < held_size:
        raise ValueError(
            f"the folders have {len(train)} bytes of text for training and {len(held)} for validation, and "
            f"{train_size} and {held_size} are needed; install more packages, or give a --folder or a smaller --bytes"
        )
    return Text(
        np.frombuffer(bytes(train[:train_size]), np.uint8), np.frombuffer(bytes(held[:held_size]), np.uint8), files
    )


def rotary_attention(query: Any, key: Any, value: Any, *rotary: hax.NamedArray) -> hax.NamedArray:
    """Causal attention with rotary positions: cuDNN's on a GPU."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else None
    return JaxAttention(implementation)(rotate(query, *rotary), rotate(key, *rotary), value)


def _optimizer(variant: Variant) -> optax.GradientTransformation:
    moments = optax.scale_by_adam(b2=0.95)

    # The learning rate is part of the optimizer's state, so that the program does not depend on the number of steps.
    def chained(learning_rate: Any) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(1.0),
            quantized_state(moments) if variant.fp8_moments else moments,
            optax.add_decayed_weights(0.1, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)),
            optax.scale_by_learning_rate(learning_rate),
        )

    return optax.inject_hyperparams(chained)(learning_rate=0.0)


class Run:
    """A model in training.

    Args:
        name: Its variant and its seed, as in `delayed:0`.
        sizes: The sizes.
        text: The text.
    """

    def __init__(self, name: str, sizes: Sizes, text: Text) -> None:
        variant, _, seed = name.partition(":")
        self.name, self.variant, self.seed, self.sizes = name, VARIANTS[variant], int(seed), sizes
        self.sequences = text.sequences(sizes, self.seed)
        config = dataclasses.replace(sizes.llama, attention=rotary_attention)
        self.model = eqx.filter_jit(Transformer.init)(config, key=jax.random.key(self.seed))
        self.step = fp8.TrainStep(next_token_loss, _optimizer(self.variant), donate=True)
        self.opt_state = self.step.init(self.model)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.validations: list[tuple[int, float, float]] = []
        if self.variant.first_in_bf16 == 0.0:
            self.convert(0)

    @property
    def done(self) -> int:
        """Steps that were done."""
        return len(self.losses)

    def convert(self, index: int) -> None:
        """Converts the model, and fills its state from the batch of a step."""
        if self.variant.config is not None:
            old, self.model = self.model, fp8.fp8_linear_layers(self.model, self.variant.config)
            self.opt_state = fp8.transfer_optimizer_state(self.opt_state, old, self.model)
            self.model = self.step.calibrate(self.model, self.batch(index))

    def batch(self, index: int) -> hax.NamedArray:
        """The tokens of a step."""
        start = index * self.sizes.batch
        return _named(self.sequences[start : start + self.sizes.batch])

    def train(self, indices: range, learning_rates: Sequence[float]) -> None:
        """Some steps, timed as a whole."""
        batches = [self.batch(index) for index in indices]
        begin, losses = time.perf_counter(), []
        for index, tokens in zip(indices, batches, strict=True):
            self.opt_state.hyperparams["learning_rate"] = jnp.float32(learning_rates[index])
            self.model, self.opt_state, metrics = self.step(self.model, self.opt_state, tokens)
            losses.append(metrics["loss"])
        self.losses += [float(loss) for loss in losses]
        self.seconds.append((time.perf_counter() - begin) / len(indices))

    def validate(self, batches: Sequence[hax.NamedArray]) -> None:
        """The loss of the text that is held back, as trained and of the same weights in bf16."""
        mean = lambda model: statistics.fmean(float(_loss(model, tokens)) for tokens in batches)
        loss = mean(self.model)
        in_bf16 = loss if self.variant.config is None else mean(fp8.restore_linear_layers(self.model))
        self.validations.append((self.done, loss, in_bf16))

    def seconds_per_step(self) -> float:
        """Of the slower part, if it is converted later. The run is used up."""
        if self.variant.first_in_bf16:
            self.convert(0)
        for _ in range(2):
            self.train(range(self.sizes.chunk), [0.0] * self.sizes.chunk)
        return self.seconds[1]

    def record(self) -> dict[str, Any]:
        """What the file keeps of it."""
        return {
            "losses": [round(loss, 5) for loss in self.losses],
            "validations": self.validations,
            # The first turn compiles.
            "seconds_per_step": statistics.median(self.seconds[1:] or self.seconds),
        }


def _named(tokens: np.ndarray) -> hax.NamedArray:
    return hax.named(jnp.asarray(tokens, jnp.int32), ("batch", "position"))


_loss = eqx.filter_jit(next_token_loss)


def learning_rates(steps: int, peak: float) -> np.ndarray:
    """Half a cosine after a warm-up of a fiftieth of the steps."""
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, max(1, steps // 50), steps, 0.1 * peak)
    return np.asarray(rate(np.arange(steps) + 0.5), np.float32)


def fitting_steps(runs: Sequence[str], sizes: Sizes, text: Text, limit: int, end: float) -> int:
    """As many steps as fit until a time, of `time.monotonic`, at most `limit`; whole turns."""
    seconds = 0.0
    for name in dict.fromkeys(name.partition(":")[0] for name in runs):
        count = sum(run.partition(":")[0] == name for run in runs)
        seconds += count * Run(f"{name}:0", sizes, text).seconds_per_step()
    # A tenth of what is left is for validation.
    fitting = int(0.9 * max(0.0, end - time.monotonic()) / seconds)
    steps = min(limit, fitting) // sizes.chunk * sizes.chunk
    if steps == 0:
        raise ValueError(
            f"{sizes.chunk} steps of each run take {seconds * sizes.chunk:.0f} s, more than is left of --minutes; "
            "give more of them, or fewer --runs"
        )
    return steps


def compare(names: Sequence[str], sizes: Sizes, text: Text, options: argparse.Namespace) -> dict[str, Any]:
    """Trains the runs side by side, and returns what the file has after them."""
    limit = len(text.train) // sizes.llama.max_length // sizes.batch // sizes.chunk * sizes.chunk
    steps = options.steps or fitting_steps(names, sizes, text, limit, BEGIN + 60.0 * options.minutes)
    if not 0 < steps <= limit or steps % sizes.chunk:
        raise ValueError(f"--steps {steps} is not a multiple of {sizes.chunk} from {sizes.chunk} to {limit}")
    settings = {"steps": steps, "learning_rate": options.learning_rate, "sizes": repr(sizes), "text": text.digest}
    content = _read(options.json, settings) or {"settings": settings, "runs": {}}
    rates = learning_rates(steps, options.learning_rate)
    held = text.validation.reshape(sizes.validation_batches, sizes.batch, sizes.llama.max_length)
    held = [_named(tokens) for tokens in held]
    runs = [Run(name, sizes, text) for name in names]
    marks = [steps * quarter // 4 // sizes.chunk * sizes.chunk for quarter in range(1, 5)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=options.quiet) as progress:
        bar = progress.add_task("", total=steps * len(runs))
        for start in range(0, steps, sizes.chunk):
            for run in runs:
                conversion = math.ceil(run.variant.first_in_bf16 * steps / sizes.chunk) * sizes.chunk
                if start and start == conversion:
                    run.convert(start)
                run.train(range(start, start + sizes.chunk), rates)
                progress.update(bar, advance=sizes.chunk, description=f"{run.name}: loss {run.losses[-1]:.4f}")
            if start + sizes.chunk in marks:
                for run in runs:
                    run.validate(held)
                    content["runs"][run.name] = run.record()
                if options.json:
                    _write(options.json, content, text)
    return content


def _read(path: Path | None, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    if path is None or not path.exists():
        return None
    content = json.loads(path.read_text())
    different = [name for name, value in settings.items() if content["settings"][name] != value]
    if different:
        name = different[0]
        raise ValueError(
            f"--json {path} has runs with {name}={content['settings'][name]!r}, and these have {settings[name]!r}; "
            "runs are compared only if all settings are equal: give the same ones, or another file"
        )
    return content


def _write(path: Path, content: dict[str, Any], text: Text) -> None:
    listing = path.with_suffix(".files.txt")
    listing.write_text("".join(f"{sha}  {size:>7}  {name}\n" for name, sha, size in text.files))
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(json.dumps(content | {"environment": output.environment()}))
    draft.replace(path)


def rows(content: Mapping[str, Any], sizes: Sizes) -> Iterator[output.Row]:
    """One for each run, with its gap to bf16 of the same seed."""
    runs = content["runs"]
    for name, record in runs.items():
        variant, _, seed = name.partition(":")
        done, loss, in_bf16 = record["validations"][-1]
        baseline = runs.get(f"bf16:{seed}")
        # A file may hold runs that were stopped.
        base = dict((step, loss) for step, loss, _ in baseline["validations"]).get(done) if baseline else None
        yield {
            "variant": variant,
            "seed": seed,
            "steps": done,
            "loss": loss,
            "gap": base and 100.0 * (loss / base - 1.0),
            "gap_in_bf16": base and 100.0 * (in_bf16 / base - 1.0),
            "tokens_per_second": sizes.batch * sizes.llama.max_length / record["seconds_per_step"],
        }


_percent = lambda value: "" if value is None else f"{value:+.2f} %"

COLUMNS = {
    "variant": lambda row: row["variant"],
    "seed": lambda row: row["seed"],
    "steps": lambda row: f"{row['steps']:,}",
    "loss": lambda row: f"{row['loss']:.4f}",
    "gap to bf16": lambda row: _percent(row["gap"]),
    "weights as bf16": lambda row: _percent(row["gap_in_bf16"]),
    "bytes/s": lambda row: f"{row['tokens_per_second']:,.0f}",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Trains what is asked for, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", nargs="+", default=["bf16:0", "delayed:0"], help=f"of {', '.join(VARIANTS)}, with seeds"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="for all that the call does")
    parser.add_argument("--steps", type=int, help="do so many, however long they take")
    parser.add_argument("--folder", type=Path, nargs="+", help="read the text here, and not in the packages")
    parser.add_argument("--bytes", type=int, help="of the training text")
    parser.add_argument("--learning-rate", type=float, default=6e-4, help="at its peak")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: no figures")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    output.add_arguments(parser)
    options = parser.parse_args(argv)
    unknown = [name for name in options.runs if name.partition(":")[0] not in VARIANTS]
    if unknown or not all(name.partition(":")[2].isdigit() for name in options.runs):
        parser.error(f"--runs {' '.join(options.runs)}: each is one of {', '.join(VARIANTS)}, a colon and a seed")
    sizes = SMOKE if options.smoke else Sizes()
    if options.bytes:
        sizes = dataclasses.replace(sizes, text_bytes=options.bytes)
    text = installed_text(sizes, options.folder)
    content = compare(options.runs, sizes, text, options)
    made_with = output.environment()
    title = f"Loss per byte of {len(text.files):,} files, {sizes.text_bytes / 1e6:.1f} MB, text {text.digest}"
    output.show(title, COLUMNS, list(rows(content, sizes)), made_with, markdown=options.markdown)


if __name__ == "__main__":
    main()
