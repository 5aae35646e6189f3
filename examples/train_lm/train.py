"""Trains a small language model in bf16 and in FP8, side by side, and compares the final losses.

    python -m examples.train_lm                       # under 4 minutes on 2 CPU cores
    python -m examples.train_lm --data my_book.txt --steps 2000
    python -m examples.train_lm --fp8-after 150       # converts the model in mid-training
    python -m examples.train_lm --mesh data=4,model=2 # on 8 devices; on a CPU, virtual ones
    python -m examples.train_lm --resume              # after Ctrl-C: continues to the same losses
    python -m examples.train_lm --help

Both models start from the same initialization and see the same batches. Master weights are float32; the loss casts them
to bf16. The FP8 model differs by one line, `model = fp8_linear_layers(model, config)`: the projections of its blocks
multiply in FP8. On a CPU those products are emulated, slower but with the same rounding.

The README beside this file says what is in the others.
"""

import argparse
import pathlib
import shlex
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from haliax_fp8 import TrainStep, cast_params, describe, fp8_linear_layers, trainable
from haliax_fp8.devices import Device

from ..generate import generate, printable
from ..interrupts import INTERRUPTED, stop_requests
from . import checkpoint
from .corpus import Corpus, load_corpus
from .layout import Layout, make_layout
from .options import binding_flags, model_config, parse_options, resumed_folder
from .report import Curve, duration, results_table, verdict, write_figure, write_results
from .run import Run, is_fp8_step, make_evaluation, make_loss, make_optimizer, make_runs


class Stopped(Exception):
    """Ctrl-C was pressed, and a checkpoint has been written."""


def train(runs: Sequence[Run], step: TrainStep, corpus: Corpus, options: argparse.Namespace, console: Console) -> None:
    """Trains all runs, one step of each in turn, to the end or to Ctrl-C; writes checkpoints.

    Raises:
        Stopped: After Ctrl-C.
    """
    layout = runs[0].layout
    evaluate = make_evaluation(options, corpus, layout)
    first = len(runs[0].losses)
    columns = [
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[status]}"),
        # The first runs while XLA compiles; the second knows more after a few steps.
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
    ]
    show, farewell = lambda line: say_whole(console, line), lambda: _farewell(options, corpus)
    with stop_requests(show, farewell) as stop_requested, Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=options.steps, completed=first, status="compiling")
        for index in range(first, options.steps):
            batch = layout.batch(corpus.batch(options.seed, index, options.batch_size, options.seq_len))
            key = _step_key(options, index)
            for run in runs:
                if run.set_converted(is_fp8_step(options, index)):
                    run.calibrate(step, batch)
                run.train(step, batch, key)
            done = index + 1
            is_last = done == options.steps
            if is_last or _is_due(options.eval_every, done):
                for run in runs:
                    run.validation.append((done, evaluate(run.model)))
            progress.update(task, completed=done, status=_status(runs, options))
            if not console.is_terminal and (is_last or _is_due(max(1, options.steps // 10), done)):
                # Nobody sees a bar move in a log.
                say(console, f"step {done}/{options.steps}  {_status(runs, options)}")
            if len(runs[0].seconds) == _PACED and not is_last:
                say(console, time_left(runs, options.steps - done))
            if is_last or stop_requested() or _is_due(options.checkpoint_every, done):
                save_runs(runs, corpus, options)
            if stop_requested() and not is_last:
                raise Stopped


def save_runs(runs: Sequence[Run], corpus: Corpus, options: argparse.Namespace) -> None:
    """Writes a checkpoint of all runs."""
    state = [(run.model, run.opt_state) for run in runs]
    history = {run.name: {"losses": run.losses, "validation": run.validation} for run in runs}
    folder, binding = pathlib.Path(options.out), _binding(options, corpus)
    checkpoint.save(folder, len(runs[0].losses), state, binding, history, options.data)


def resume_runs(options: argparse.Namespace, step: TrainStep, corpus: Corpus, layout: Layout) -> list[Run]:
    """The runs from the checkpoint.

    Raises:
        ValueError: If the checkpoint is missing, or was written with other flags.
    """
    folder = pathlib.Path(options.out)
    progress = checkpoint.read_progress(folder)
    if progress is None:
        raise ValueError(f"--resume found no checkpoint in --out {folder}; start without --resume")
    checkpoint.check_flags(progress["flags"], _binding(options, corpus), folder)
    runs = make_runs(options, step, layout, progress["step"])
    state = checkpoint.load_state(folder, progress, [(run.model, run.opt_state) for run in runs])
    for run, (run.model, run.opt_state) in zip(runs, state, strict=True):
        history = progress["history"][run.name]
        run.losses = history["losses"]
        run.validation = [(done, loss) for done, loss in history["validation"]]
    return runs


def announce(runs: Sequence[Run], corpus: Corpus, options: argparse.Namespace, console: Console) -> None:
    """Says what is active: text, model, device, how many layers are converted and whether FP8 is emulated."""
    earlier = checkpoint.read_progress(pathlib.Path(options.out))
    if earlier is not None and not options.resume:
        say(console, f"Starting over; replaces the checkpoint of step {earlier['step']}. Use --resume to continue it")
    device = jax.devices()[0]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(trainable(runs[0].model)))
    say(
        console,
        f"{parameters:,} parameters on {device.device_kind}; {corpus.name}: {len(corpus.train):,} bytes to train on, "
        f"{len(corpus.validation):,} held back",
    )
    if 0 in corpus.train:
        say(console, f"{corpus.name} is not text: it has bytes of 0. The model learns them all the same")
    if options.mesh is not None:
        say(console, runs[0].layout.summary)
    say(console, _what_it_takes(runs, options))
    for run in runs:
        if run.config is None:
            continue
        description = describe(fp8_linear_layers(run.model, run.config), config=run.config)
        say(console, f"{run.name}: {description.summary}")
        if options.verbose:
            console.print(description)


def _what_it_takes(runs: Sequence[Run], options: argparse.Namespace) -> str:
    """How much work it is; in minutes, where that was measured. With other flags, the first steps tell."""
    steps = f"{options.steps - len(runs[0].losses)} steps of {len(runs)} {'model' if len(runs) == 1 else 'models'}"
    measured = ""
    if jax.default_backend() == "cpu" and _is_documented(options):
        measured = " On two idle CPU cores, all of it takes 4 minutes."
    return f"{steps}; Ctrl-C keeps a checkpoint. First XLA compiles, which has no progress to show.{measured}"


_PACED = 5
"""After how many steps of this process the rest is estimated."""


def time_left(runs: Sequence[Run], steps: int) -> str:
    """How long the rest of the training takes at the pace of the first steps, without the one that compiled."""
    seconds = sum(float(np.median(run.seconds[1:])) for run in runs)
    return f"At {seconds:.2g} s a step, training takes about {duration(steps * seconds)} more; evaluations come on top."


def _is_documented(options: argparse.Namespace) -> bool:
    """Whether the flags are those whose figures are documented: the defaults, but for the seed."""
    return binding_flags(options) | {"seed": 0} == binding_flags(parse_options([]))


def report(runs: Sequence[Run], options: argparse.Namespace, console: Console) -> None:
    """Table, figure, results, and a sample of the last run."""
    folder = pathlib.Path(options.out)
    baseline = next((run.name for run in runs if run.config is None), None)
    curves = {run.name: _curve(run, options) for run in runs}
    console.print(results_table(curves, baseline))
    write_results(folder / "results.json", curves, baseline)
    write_figure(folder / "loss.png", curves, baseline)
    say_whole(console, f"Loss curves: {folder / 'loss.png'}\nNumbers: {folder / 'results.json'}")
    if options.sample_bytes:
        prompt = options.prompt.encode()
        # It compiles once more.
        with console.status("writing a sample"):
            text = generate(
                cast_params(runs[-1].model, options.compute_dtype),
                jnp.asarray(np.frombuffer(prompt, np.uint8), jnp.int32),
                count=options.sample_bytes,
                temperature=options.temperature,
                key=jax.random.key(options.seed),
            )
            written = prompt + text.astype(np.uint8).tobytes()
        console.print(f"\n{runs[-1].name} writes:", style="bold", highlight=False)
        console.print(printable(written), markup=False, highlight=False)
    emulated = Device.default().emulates
    if line := verdict(curves, baseline, emulated=emulated, is_documented=_is_documented(options)):
        console.print(f"\n{line}", markup=False, highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status: 0, 2 if flags are wrong, 130 after Ctrl-C."""
    console = Console()
    resumed = resumed_folder(argv)
    progress = None if resumed is None else checkpoint.read_progress(pathlib.Path(resumed))
    options = parse_options(argv, None if progress is None else checkpoint.stored_flags(progress))
    try:
        corpus = load_corpus(options.data, options.validation_fraction)
        # First of all: it decides how many devices a CPU is.
        layout = make_layout(options.mesh, model_config(options), options.batch_size // options.microbatches)
        step = TrainStep(make_loss(options), make_optimizer(options), microbatches=options.microbatches)
        runs = resume_runs(options, step, corpus, layout) if options.resume else make_runs(options, step, layout)
        make_evaluation(options, corpus, layout)
        announce(runs, corpus, options, console)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    try:
        with layout.active():
            train(runs, step, corpus, options, console)
            last = options.steps - 1
            batch = layout.batch(corpus.batch(options.seed, last, options.batch_size, options.seq_len))
            for run in runs:
                run.measure(step, batch, _step_key(options, last))
            report(runs, options, console)
    except (Stopped, KeyboardInterrupt):
        say_whole(console, _farewell(options, corpus))
        return INTERRUPTED
    return 0


def _farewell(options: argparse.Namespace, corpus: Corpus) -> str:
    """The last lines after Ctrl-C: what is there, and how to go on."""
    progress = checkpoint.read_progress(pathlib.Path(options.out))
    # What lies in the folder may be of an earlier run, with other flags.
    if progress is None or progress["flags"] != _binding(options, corpus):
        return "Stopped before the first checkpoint."
    # The checkpoint has the other flags.
    command = shlex.join(["python", "-m", "examples.train_lm", "--out", options.out, "--resume"])
    return f"Stopped; the checkpoint is that of step {progress['step']}. To continue:\n{command}"


def _step_key(options: argparse.Namespace, index: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(options.seed), index)


def _is_due(every: int, done: int) -> bool:
    return every > 0 and done % every == 0


def _status(runs: Sequence[Run], options: argparse.Namespace) -> str:
    losses = "  ".join(f"{run.name} {run.losses[-1]:.3f}" for run in runs)
    tokens = options.batch_size * options.seq_len * len(runs)
    # A median, so that neither compilation nor a busy moment of the machine counts.
    return f"{losses}  {tokens / sum(np.median(run.seconds[-20:]) for run in runs):,.0f} tokens/s"


def _curve(run: Run, options: argparse.Namespace) -> Curve:
    tokens = options.batch_size * options.seq_len
    speed = tokens / float(np.median(run.seconds)) if run.seconds else None
    return Curve(run.losses, run.validation, speed, sum(run.seconds) or None, run.statistics)


def _binding(options: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """What a resumed run must share: the flags that change losses, and the text."""
    return binding_flags(options) | {"data": corpus.digest}


def say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False)


def say_whole(console: Console, lines: str) -> None:
    """For paths and commands, which are copied: they are not broken."""
    console.print(lines, markup=False, highlight=False, soft_wrap=True)
