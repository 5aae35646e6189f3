"""Serves what `examples.train_lm` trained: quantizes it each way, compares, exports, reloads, and writes text.

    python -m examples.train_lm --steps 300           # first: trains, and keeps a checkpoint
    python -m examples.serve_lm                       # a table of layouts; folders that inference engines load
    python -m examples.serve_lm --run runs/train_lm --export runs/served --layouts FP8 FP8_DYNAMIC

The reference is the trained model with its weights in bf16. A model served with the scales of training computes what
training computed, bit for bit. No engine with other GPU kernels can be expected to come closer than the floor:
what another rounding of intermediates makes of the very model that trained.
"""

import argparse
import dataclasses
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import rich.box
from rich.console import Console
from rich.table import Table

from examples.byte_tokenizer import write_byte_tokenizer
from examples.generate import generate
from examples.train_lm import checkpoint
from examples.train_lm.corpus import load_corpus
from examples.train_lm.layout import make_layout
from examples.train_lm.options import model_config, parse_options
from examples.train_lm.run import Run, make_evaluation, make_loss, make_optimizer
from examples.train_lm.train import resume_runs
from haliax_fp8 import TrainStep, cast_params, restore_linear_layers
from haliax_fp8.huggingface import export_model, import_model
from haliax_fp8.models import Transformer
from haliax_fp8.serving import layouts, quantize_for_inference, serving_mismatch


MULTIPLY_DIFFERENTLY = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "W8A16")
"""The layouts without those that another one differs from in its folder alone."""


@dataclasses.dataclass(frozen=True)
class Served:
    """One way to serve the model.

    Args:
        layout: The name of its layout.
        model: The model.
        memory: Bytes of all weights.
        disk: Bytes of the exported weights.
        loss: Of the validation text.
        kl: From the model in bf16, the mean over positions.
        agreement: In which share of positions the likeliest byte is that of the model in bf16.
        mismatch: The mean change of log p of the text's bytes against training.
    """

    layout: str
    model: Transformer
    memory: int
    disk: int
    loss: float
    kl: float
    agreement: float
    mismatch: float


def trained_run(folder: pathlib.Path, data: str | None) -> tuple[Run, argparse.Namespace, Any]:
    """The FP8 run of a checkpoint, the flags that it was trained with, and the text.

    Args:
        folder: The `--out` of the training.
        data: Its `--data`.

    Raises:
        ValueError: If the folder has no checkpoint, or none of a run in FP8.
    """
    progress = checkpoint.read_progress(folder)
    if progress is None:
        raise ValueError(f"--run {folder} has no checkpoint; train first: python -m examples.train_lm --out {folder}")
    defaults = vars(parse_options(["--out", str(folder), *(["--data", data] if data else [])]))
    # The text has its hash there.
    known = {name: value for name, value in progress["flags"].items() if name in defaults and name != "data"}
    options = argparse.Namespace(**{**defaults, **known})
    corpus = load_corpus(options.data, options.validation_fraction)
    layout = make_layout(None, model_config(options), options.batch_size)
    step = TrainStep(make_loss(options), make_optimizer(options), microbatches=options.microbatches)
    runs = [run for run in resume_runs(options, step, corpus, layout) if run.is_converted]
    if not runs:
        raise ValueError(f"--run {folder} holds no model in FP8; train one, without --recipe none")
    return runs[-1], options, corpus


def exported(model: Transformer, layout: str, folder: pathlib.Path, like: Transformer) -> int:
    """Writes the model as engines load it, reads it back, and returns the bytes of its weights.

    Args:
        model: The trained model.
        layout: The layout.
        folder: Where to; replaced.
        like: A plain model of the same sizes.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    report = export_model(model, folder, layout)
    write_byte_tokenizer(folder, max_length=model.config.max_length)
    import_model(folder, like)
    return report.quantized_bytes + report.dense_bytes


def weight_bytes(model: Transformer) -> int:
    """What a model's arrays take."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(model) if hasattr(x, "dtype"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status: 0, or 2 if something is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.serve_lm", description=(__doc__ or "").splitlines()[0].replace("`", "")
    )
    parser.add_argument("--run", type=pathlib.Path, default=pathlib.Path("runs/train_lm"), help="--out of the training")
    parser.add_argument("--data", help="the text it was trained on, if that was given")
    parser.add_argument("--export", type=pathlib.Path, default=pathlib.Path("runs/served"), help="where folders go")
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=layouts,
        metavar="NAME",
        default=MULTIPLY_DIFFERENTLY,
        help=f"some of {', '.join(layouts)} (default: {', '.join(MULTIPLY_DIFFERENTLY)})",
    )
    parser.add_argument("--prompt", default="The ", help="what the text continues")
    parser.add_argument("--bytes", type=int, default=120, help="length of the text")
    flags = parser.parse_args(argv)
    console = Console()
    try:
        run, options, corpus = trained_run(flags.run, flags.data)
        ways = [served(layout, run, options, corpus, flags.export) for layout in ("BF16", *flags.layouts)]
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    console.print(table(ways, run.name, floor_of(run, options, corpus)))
    prompt = jnp.asarray(np.frombuffer(flags.prompt.encode(), np.uint8), jnp.int32)
    for one in ways:
        text = generate(one.model, prompt, count=flags.bytes)
        written = flags.prompt + text.astype(np.uint8).tobytes().decode(errors="replace")
        console.print(f"{one.layout} writes: {written!r}", markup=False, highlight=False)
    folder = flags.export / "FP8_DYNAMIC"
    # Commands are copied: each has a line, which is not broken.
    console.print(
        f"\nFolders: {flags.export}/<layout>\n"
        "vLLM, on a GPU; FP8_DYNAMIC on a CPU too:\n"
        f"  vllm serve {folder} --max-model-len {options.seq_len}\n"
        f"Transformers:\n  pipeline('text-generation', '{folder}')\n"
        f"What a folder holds:\n  haliax-fp8 checkpoint check {folder} --headers",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0


def served(layout: str, run: Run, options: argparse.Namespace, corpus: Any, export: pathlib.Path) -> Served:
    """The model served one way, compared, and exported.

    Args:
        layout: The layout, or "BF16".
        run: The trained model.
        options: The flags of its training.
        corpus: Its text.
        export: Where folders go.
    """
    training = cast_params(run.model, options.compute_dtype)
    plain = restore_linear_layers(training)
    model = plain if layout == "BF16" else quantize_for_inference(training, layout)
    tokens, targets = compared(options, corpus)
    of_training = serving_mismatch(training, model, tokens, tokens=targets).served
    of_bf16 = serving_mismatch(plain, model, tokens, tokens=targets).served
    loss = make_evaluation(options, corpus, run.layout)(model)
    disk = exported(training, layout, export / layout, plain)
    return Served(layout, model, weight_bytes(model), disk, loss, of_bf16.kl, of_bf16.agreement, of_training.mean)


def compared(options: argparse.Namespace, corpus: Any) -> tuple[hax.NamedArray, jax.Array]:
    """A batch of the validation text, and the byte that follows each."""
    batch = jnp.asarray(corpus.validation_batches(options.batch_size, options.seq_len, 1)[0])
    return hax.named(batch[:, :-1], ("batch", "position")), batch[:, 1:]


def floor_of(run: Run, options: argparse.Namespace, corpus: Any) -> float:
    """The mean change of log p of training against itself, with intermediates rounded otherwise."""
    training = cast_params(run.model, options.compute_dtype)
    tokens, targets = compared(options, corpus)
    return serving_mismatch(training, training, tokens, tokens=targets).floor.mean


def table(ways: Sequence[Served], name: str, floor: float) -> Table:
    """A row for each way, next to the floor of the last column; at most 80 columns wide.

    Args:
        ways: The ways to serve the model; the first is the reference.
        name: The name of the trained model.
        floor: What `floor_of` returned.
    """
    caption = f"The floor of the last column, training with intermediates rounded otherwise: {floor:.4f}"
    out = Table(title=f"{name}, served", caption=caption, title_justify="left", caption_justify="left")
    out.box, out.padding = rich.box.SIMPLE, (0, 1, 0, 0)
    # Broken by hand, so that numbers never are.
    for column in ("layout", "memory", "disk", "loss", "against\nbf16", "KL", "greedy", "from\ntraining"):
        out.add_column(column, justify="left" if column == "layout" else "right", no_wrap=True)
    reference = ways[0]
    for one in ways:
        out.add_row(
            one.layout,
            f"{one.memory / 1e3:,.0f} kB",
            f"{one.disk / 1e3:,.0f} kB",
            f"{one.loss:.4f}",
            f"{one.loss / reference.loss - 1:+.3%}",
            f"{one.kl:.1e}",
            f"{one.agreement:.1%}",
            f"{one.mismatch:.4f}",
        )
    return out


if __name__ == "__main__":
    sys.exit(main())
