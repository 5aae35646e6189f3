"""Fine-tunes an FP8 folder with low-rank adapters: load, add, train, merge, export, check, and write text.

    python -m examples.finetune_adapters                                # two minutes on two CPU cores
    python -m examples.finetune_adapters --base FOLDER --data FILE      # a folder whose tokens are bytes

Without `--base` it first trains a small Llama on prose and exports it in FP8. The adapters then learn Python from the
standard library. Nothing but the folder says what the model is.
"""

import argparse
import dataclasses
import inspect
import pathlib
import shutil
import sys
import textwrap
from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import track

from examples.byte_tokenizer import write_byte_tokenizer
from examples.generate import generate, printable
from examples.train_lm.corpus import Corpus, load_corpus, split_corpus
from examples.train_lm.run import next_token_loss
from haliax_fp8 import TrainStep, cast_params, fp8_linear_layers, plots, trainable
from haliax_fp8.huggingface import check_folder, export_adapter, export_model, load
from haliax_fp8.models import Transformer, TransformerConfig, add_lora, merge_lora


BATCH, LENGTH = 16, 64


def loss_fn(model: Transformer, batch: jax.Array) -> jax.Array:
    """The mean loss of the next byte, in bf16. What is frozen has its dtype already."""
    return next_token_loss(cast_params(model, jnp.bfloat16), hax.named(batch, ("batch", "position")))


def train[M](model: M, corpus: Corpus, steps: int, rate: float, what: str) -> tuple[M, list[float]]:
    """Trains what is trainable; returns the model and the loss of each step."""
    step = TrainStep(loss_fn, optax.adamw(optax.cosine_decay_schedule(rate, steps)))
    opt_state, losses = step.init(model), []
    for i in track(range(steps), description=what, transient=True, disable=not sys.stdout.isatty()):
        model, opt_state, metrics = step(model, opt_state, jnp.asarray(corpus.batch(0, i, BATCH, LENGTH)))
        losses.append(float(metrics["loss"]))
    return model, losses


def validation_loss(model: Transformer, corpus: Corpus) -> float:
    """The mean loss of text that was held back."""
    batches = corpus.validation_batches(BATCH, LENGTH, 4)
    return float(np.mean([eqx.filter_jit(loss_fn)(model, jnp.asarray(batch)) for batch in batches]))


def make_base(folder: pathlib.Path, steps: int) -> None:
    """A small Llama that trained on prose in FP8, as a folder in FP8."""
    model = Transformer.init(TransformerConfig(), key=jax.random.key(0))
    model = fp8_linear_layers(model, exclude="head")
    model, _ = train(model, load_corpus(None, 0.1), steps, 3e-3, "pretraining")
    export_model(model, folder, "FP8_DYNAMIC")
    write_byte_tokenizer(folder, max_length=model.config.max_length)


def python_sources() -> bytes:
    """Modules of the standard library."""
    return "\n\n".join(map(inspect.getsource, (argparse, dataclasses, inspect, shutil, textwrap))).encode()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.finetune_adapters", description="Fine-tunes FP8 weights.")
    parser.add_argument("--base", type=pathlib.Path, help="a folder in FP8 whose tokens are bytes; made if not given")
    parser.add_argument("--data", type=pathlib.Path, help="the text to learn; Python's own sources if not given")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/adapters"), help="where folders go")
    parser.add_argument("--rank", type=int, default=8, help="of each adapter")
    parser.add_argument("--steps", type=int, default=200, help="of pretraining, and of each fine-tuning")
    flags = parser.parse_args(argv)
    console = Console()
    say = lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
    shutil.rmtree(flags.out, ignore_errors=True)
    base = flags.out / "base" if flags.base is None else flags.base
    if flags.base is None:
        make_base(base, flags.steps)
    corpus = split_corpus("data", python_sources() if flags.data is None else flags.data.read_bytes(), 0.1)

    # For comparison, all weights.
    whole, of_whole = train(load(base, dtype="float32"), corpus, flags.steps, 3e-3, "all weights")
    frozen = load(base, weights="frozen")
    model = add_lora(frozen, rank=flags.rank, key=jax.random.key(1))
    model, of_adapters = train(model, corpus, flags.steps, 1e-2, "adapters")
    runs = {"all weights": of_whole, "adapters": of_adapters}
    plots.loss_curves(runs, baseline="all weights", window=10).savefig(flags.out / "loss.png", dpi=150)

    export_adapter(model, flags.out / "adapter", base=base)
    merged = merge_lora(model)
    say(repr(export_model(merged, flags.out / "merged", "FP8_DYNAMIC", like=base)))
    say(repr(check_folder(flags.out / "merged")))
    served = load(flags.out / "merged", weights="served")
    numbers = [sum(x.size for x in jax.tree.leaves(trainable(each))) for each in (whole, model)]
    say(f"Trained: {numbers[0]:,} weights, or {numbers[1]:,} of adapters. Loss of text that was held back:")
    models = {"base": frozen, "all weights": whole, "adapters": model, "merged, served in FP8": served}
    for name, each in models.items():
        say(f"  {name}: {validation_loss(each, corpus):.3f}")
    prompt = jnp.asarray(np.frombuffer(b"def ", np.uint8), jnp.int32)
    for name, each in (("base", frozen), ("merged", served)):
        text = generate(each, prompt, count=80, temperature=0.5, key=jax.random.key(0))
        say(f"{name} writes: {printable(b'def ' + text.astype(np.uint8).tobytes())!r}")
    say(f"The curve: {flags.out / 'loss.png'}\nFor PEFT: {flags.out / 'adapter'}\nvllm serve {flags.out / 'merged'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
