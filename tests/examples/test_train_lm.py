"""The example `examples/train_lm/`: its command line, resuming, conversion in mid-training, model and text."""

import contextlib
import dataclasses
import io
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from full_disk import full_disk
from helpers import run_example
from rich.console import Console

from examples.generate import generate, printable
from examples.train_lm import checkpoint, corpus, report, run, train
from examples.train_lm.layout import make_layout
from examples.train_lm.options import model_config, parse_options
from haliax_fp8 import TrainStep, describe, fp8_linear_layers
from haliax_fp8.models import Transformer, TransformerConfig


ROOT = pathlib.Path(__file__).parents[2]
STEPS = 6
TINY = (
    f"--steps {STEPS} --layers 2 --hidden 32 --heads 2 --kv-heads 1 --head-dim 16 --mlp 64 --seq-len 32 --batch-size 4 "
    "--amax-history-length 4 --eval-batches 2 --sample-bytes 8 --unroll 1"
).split()


def losses(folder: pathlib.Path) -> dict[str, list[float]]:
    history = json.loads((folder / "checkpoint.json").read_text())["history"]
    return {name: run["losses"] for name, run in history.items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> pathlib.Path:
    """The folder of a run from beginning to end."""
    folder = tmp_path_factory.mktemp("finished")
    with jax.numpy_dtype_promotion("standard"):
        assert train.main([*TINY, "--out", str(folder)]) == 0
    return folder


@pytest.mark.more
def test_a_mixture_of_experts_trains_in_fp8(tmp_path):
    """Its router stays in high precision. How far it ends from bf16 takes minutes; the README has it."""
    options = [*TINY, "--layers", "1", "--experts", "4", "--no-baseline", "--sample-bytes", "0", "--out", str(tmp_path)]
    assert train.main(options) == 0
    (curve,) = losses(tmp_path).values()
    assert curve[0] == pytest.approx(math.log(256), rel=0.2) and curve[-1] < 0.9 * curve[0]
    layers = describe(fp8_linear_layers(Transformer.init(model_config(parse_options(options)), key=jax.random.key(0))))
    assert [row.path for row in layers if "mlp" in row.path and not row.is_fp8] == ["blocks.stacked.mlp.router"]


class Terminal(io.TextIOBase):
    """The standard output, with somebody before it who presses Ctrl-C when a line appears."""

    def __init__(self, line: str, times: int):
        self.shown, self.line, self.times = sys.stdout, line, times

    def write(self, text: str) -> int:
        self.shown.write(text)
        while self.times and self.line in text:
            self.times -= 1
            signal.raise_signal(signal.SIGINT)
        return len(text)


def ctrl_c_after(step: int, times: int = 1) -> contextlib.redirect_stdout:
    """Presses Ctrl-C once a step is shown."""
    return contextlib.redirect_stdout(Terminal(f"step {step}/{STEPS} ", times))


@dataclasses.dataclass(frozen=True)
class Watched(corpus.Corpus):
    """A text that says when the batch of a step is made."""

    on_batch: Callable[[int], None]

    def batch(self, seed: int, step: int, *args: int) -> np.ndarray:
        self.on_batch(step)
        return super().batch(seed, step, *args)


@pytest.mark.more
def test_both_models_train_from_the_same_start(finished):
    curves = losses(finished)
    assert set(curves) == {"bf16", "fp8 delayed"}
    first, last = ([curve[i] for curve in curves.values()] for i in (0, -1))
    # An untrained model is near to guessing among 256 bytes, and FP8 rounds each operand by at most 2**-4.
    assert first == pytest.approx([math.log(256)] * 2, rel=0.2)
    assert first[1] == pytest.approx(first[0], rel=2**-4)
    assert first[1] != first[0], "the products of the second model are not FP8"
    assert max(last) < 0.9 * min(first)


@pytest.mark.more
def test_results_figure_and_sample_are_written(finished, capsys):
    results = json.loads((finished / "results.json").read_text())
    assert results["bf16"]["gap_percent"] is None
    ratio = results["fp8 delayed"]["validation_loss"] / results["bf16"]["validation_loss"]
    assert results["fp8 delayed"]["gap_percent"] == pytest.approx(100 * (ratio - 1))
    assert (finished / "loss.png").read_bytes().startswith(b"\x89PNG")
    # A finished run can be resumed: it has nothing left to train, and reports once more.
    assert train.main([*TINY, "--out", str(finished), "--resume", "--prompt", "def f"]) == 0
    printed = capsys.readouterr().out
    assert "def f" in printed and f"{results['bf16']['validation_loss']:.4f}" in printed


@pytest.mark.more
def test_after_ctrl_c_resume_continues_to_the_same_losses(finished, tmp_path, capsys):
    arguments = [*TINY, "--out", str(tmp_path)]
    with ctrl_c_after(step=3):
        assert train.main(arguments) == 130
    assert {name: len(curve) for name, curve in losses(tmp_path).items()} == {"bf16": 3, "fp8 delayed": 3}
    last = capsys.readouterr().out.splitlines()[-1]
    assert "python -m examples.train_lm " in last and last.endswith(" --resume")
    assert train.main([*arguments, "--resume"]) == 0
    assert losses(tmp_path) == losses(finished)


@pytest.mark.more
def test_resume_takes_the_flags_of_the_checkpoint(finished, tmp_path, capsys):
    """None has to be repeated; the text is that of the run, too."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(1, 256)) * 200)
    flags = [*TINY, "--no-baseline", "--data", str(text), "--exclude", "*.up", "--out", str(tmp_path / "run")]
    with ctrl_c_after(step=3):
        assert train.main(flags) == 130
    shown = capsys.readouterr().out
    assert "Stopping after this step" in shown
    command = shown.splitlines()[-1].partition("examples.train_lm ")[2].split()
    assert command == ["--out", str(tmp_path / "run"), "--resume"]
    assert train.main([*command, "--sample-bytes", "0"]) == 0
    (curve,) = losses(tmp_path / "run").values()
    assert len(curve) == STEPS
    # Repeating them changes nothing.
    assert train.main([*flags, "--resume", "--sample-bytes", "0"]) == 0


def test_a_sample_commands_no_terminal():
    written = printable(b"\x1b[31mred\x07\tand\n\xff \xc3\xa9\x9b")
    assert written == "\ufffd[31mred\ufffd\tand\n\ufffd \xe9\ufffd"


@pytest.mark.more
def test_mesh_makes_virtual_devices():
    """In a process of its own, in which JAX has not started."""
    code = (
        "from examples.train_lm.layout import make_layout; from haliax_fp8.models import TransformerConfig; "
        "import jax; "
        "print(make_layout({'data': 4, 'model': 2}, TransformerConfig(), 8).summary, jax.device_count())"
    )
    environment = os.environ | {"XLA_FLAGS": ""}
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == "batch, hidden over data=4; mlp over model=2 8"


@pytest.mark.more
def test_a_run_on_a_mesh_resumes_on_another(tmp_path):
    """Losses are those of one device, up to sums in another order; counted from the start of each layout."""
    flags = [*TINY, "--no-baseline", "--layers", "1", "--compute-dtype", "float32", "--sample-bytes", "0"]
    flags += ["--learning-rate", "1e-4"]
    assert train.main([*flags, "--out", str(tmp_path / "one")]) == 0
    flags += ["--out", str(tmp_path / "mesh"), "--mesh"]
    with ctrl_c_after(step=3):
        assert train.main([*flags, "data=2,model=2"]) == 130
    assert train.main([*flags, "data=4", "--resume"]) == 0
    (one,), (divided,) = losses(tmp_path / "one").values(), losses(tmp_path / "mesh").values()
    assert len(divided) == STEPS and divided[-1] < divided[0]
    assert divided == pytest.approx(one, rel=1e-4)


@pytest.mark.more
def test_second_ctrl_c_stops_at_once(tmp_path, capsys):
    """After a step, and before its checkpoint."""
    before = signal.getsignal(signal.SIGINT)
    with ctrl_c_after(step=1, times=2):
        assert train.main([*TINY, "--no-baseline", "--layers", "1", "--out", str(tmp_path)]) == 130
    assert "before the first checkpoint" in capsys.readouterr().out
    assert not (tmp_path / "checkpoint.json").exists()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.more
def test_conversion_in_mid_training_and_back_keeps_the_optimizer_state(finished, tmp_path):
    """Interrupted in the first step after the conversion: the checkpoint has FP8 state, and a resumed run begins so."""
    options = parse_options([*TINY, "--fp8-after", "2", "--fp8-until", "4", "--out", str(tmp_path)])
    text = corpus.load_corpus(options.data, options.validation_fraction)
    layout = make_layout(None, model_config(options), options.batch_size)
    step = TrainStep(run.make_loss(options), run.make_optimizer(options))
    seen = []

    def look(runs, done):
        (counts,) = {tuple(int(n) for _, n in optax.tree.get_all_with_path(run.opt_state, "count")) for run in runs}
        moments = [float(optax.tree.norm(optax.tree.get(run.opt_state, "mu"))) for run in runs]
        seen.append((describe(runs[1].model).fp8_count > 0, set(counts), moments))
        assert len(seen) == done + 1
        assert describe(runs[0].model).fp8_count == 0

    def trained(runs, interrupted=None):
        def on_batch(index):
            look(runs, index)
            if index == interrupted:
                signal.raise_signal(signal.SIGINT)

        console = Console(file=io.StringIO())
        train.train(runs, step, Watched(text.name, text.train, text.validation, on_batch), options, console)
        look(runs, STEPS)

    with pytest.raises(train.Stopped):
        trained(run.make_runs(options, step, layout), interrupted=2)
    # Both models have finished the step in which Ctrl-C was pressed.
    assert {name: len(curve) for name, curve in losses(tmp_path).items()} == {"bf16": 3, "fp8 delayed": 3}
    trained(train.resume_runs(options, step, text, layout))
    # After no step, after one, and so on.
    assert [is_fp8 for is_fp8, _, _ in seen] == [False, False, False, True, True, False, False]
    assert [counts for _, counts, _ in seen] == [{i} for i in range(STEPS + 1)]
    # Moments that began anew would be half as large; gradients in FP8 differ by roundings of at most 2**-4.
    of_baseline, of_mixed = np.array([moments for _, _, moments in seen]).T
    assert not of_baseline[0] and of_baseline[1:].all()
    np.testing.assert_allclose(of_mixed, of_baseline, rtol=2**-4)
    baseline, mixed = losses(tmp_path).values()
    assert baseline == losses(finished)["bf16"]
    assert mixed[:2] == baseline[:2] and mixed[2] != baseline[2]
    assert mixed == pytest.approx(baseline, rel=2**-4)


@pytest.mark.more
def test_resume_refuses_other_flags(finished, tmp_path, capsys):
    assert train.main([*TINY, "--learning-rate", "0.5", "--out", str(finished), "--resume"]) == 2
    message = capsys.readouterr().out
    assert "--learning-rate is 0.5 now and 0.003 in the checkpoint" in message
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 200)
    assert train.main([*TINY, "--data", str(text), "--out", str(finished), "--resume"]) == 2
    assert "--data is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--resume", "--resume found no checkpoint"),
        ("--heads 3 --kv-heads 2", "heads=3 is not a multiple of kv_heads=2"),
        ("--head-dim 15", "head_dim=15 is odd"),
        ("--exclude no_such_layer", "no_such_layer"),
        ("--mesh data=64", "--mesh needs 64 devices, and JAX has 4 cpu devices"),
        ("--mesh data=3", "--mesh data=3 does not divide the 4 rows"),
        ("--data /no/such/file", "--data /no/such/file cannot be read"),
        ("--validation-fraction 0.7", "--validation-fraction 0.7"),
        ("--batch-size 4096", "less than one batch of 4096"),
    ],
)
def test_flags_that_do_not_fit_the_model_or_the_text(flags, message, tmp_path, capsys):
    assert train.main([*TINY, "--out", str(tmp_path), *flags.split()]) == 2
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps many", "argument --steps: 'many' is not an integer of at least 1"),
        ("--steps 0", "'0' is not an integer of at least 1"),
        ("--learning-rate fast", "argument --learning-rate: 'fast' is not a number above 0"),
        ("--clip-norm 0", "'0' is not a number above 0"),
        ("--recipe fp4", "--recipe"),
        ("--recipe none --no-baseline", "nothing to train"),
        ("--microbatches 3", "--batch-size 4 is not a multiple of --microbatches 3"),
        ("--warmup 6", "--warmup 6 must be below --steps 6"),
        ("--fp8-after 6", "--fp8-after 6 must be below --steps 6"),
        ("--fp8-after 3 --fp8-until 3", "--fp8-until 3 must be above --fp8-after 3"),
        ("--mesh data=4,pipe=2", "data=4,pipe=2 is not a mesh of data and model, such as data=4,model=2"),
        ("--prompt=", "--prompt '' must have 1 to 32 bytes"),
    ],
)
def test_flags_that_contradict_each_other(flags, message, capsys):
    with pytest.raises(SystemExit) as exit:
        train.main([*TINY, *flags.split()])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


# --- Checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, error", [(100, ValueError), (3000, OSError)], ids=["in the arrays", "in the progress"])
def test_interrupted_save_leaves_the_checkpoint_before(tmp_path, size, error):
    history = {"bf16": {"losses": [1.0] * 1000}}
    checkpoint.save(tmp_path, 1, [jnp.ones(3)], {}, history)
    arrays, progress = (tmp_path / name for name in ("step_000001.safetensors", "checkpoint.json"))
    assert 100 < arrays.stat().st_size < 3000 < progress.stat().st_size
    with full_disk(size), pytest.raises(error, match="File too large"):
        checkpoint.save(tmp_path, 2, [jnp.zeros(3)], {}, history)
    progress = checkpoint.read_progress(tmp_path)
    assert progress is not None and progress["step"] == 1
    np.testing.assert_array_equal(checkpoint.load_state(tmp_path, progress, [jnp.zeros(3)])[0], np.ones(3))
    checkpoint.save(tmp_path, 2, [jnp.zeros(3)], {}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.json", "step_000002.safetensors"]


# --- Text -------------------------------------------------------------------------------------------------------------


def test_batches_depend_on_seed_and_step_only():
    text = corpus.load_corpus(None, 0.1)
    again = corpus.load_corpus(None, 0.1)
    batch = text.batch(3, 7, 4, 16)
    assert batch.shape == (4, 17) and batch.dtype == np.int32
    np.testing.assert_array_equal(batch, again.batch(3, 7, 4, 16))
    assert text.digest == again.digest != corpus.load_corpus(None, 0.2).digest
    assert not np.array_equal(batch, text.batch(3, 8, 4, 16))
    assert not np.array_equal(batch, text.batch(4, 7, 4, 16))


def test_validation_text_is_held_back_and_read_in_full():
    text = corpus.load_corpus(None, 0.1)
    assert len(text.validation) / (len(text.train) + len(text.validation)) == pytest.approx(0.1, abs=0.02)
    batches = text.validation_batches(8, 64)
    read = np.concatenate([batch[:, :-1].ravel() for batch in batches])
    np.testing.assert_array_equal(read, text.validation[: len(read)])
    assert len(text.validation) - len(read) <= 8 * 64
    assert len(text.validation_batches(8, 64, 3)) == 3
    # Whole paragraphs of the validation text that are long enough to be recognised never occur in the training text.
    train = text.train.tobytes()
    paragraphs = [p for p in text.validation.tobytes().split(b"\n\n") if len(p) > 200]
    assert len(paragraphs) > 20 and not any(p in train for p in paragraphs)


# --- Sample -----------------------------------------------------------------------------------------------------------


@pytest.mark.more
def test_greedy_sample_is_the_likeliest_continuation():
    """Beyond the window too, where the oldest token drops out."""
    config = TransformerConfig(layers=2, hidden=16, heads=4, kv_heads=2, head_dim=8, mlp=24, vocab=32, max_length=12)
    model = eqx.filter_jit(Transformer.init)(config, key=jax.random.key(0))
    prompt = jnp.array([1, 2, 3], jnp.int32)
    got = generate(model, prompt, count=14).tolist()
    logits = eqx.filter_jit(lambda model, tokens: model(tokens).array)
    written = [1, 2, 3]
    for _ in range(14):
        window = written[-config.max_length :]
        padded = jnp.zeros(config.max_length, jnp.int32).at[: len(window)].set(jnp.array(window))
        written.append(int(jnp.argmax(logits(model, hax.named(padded, "position"))[len(window) - 1])))
    assert got == written[3:]
    # Sampled nearly without chance; and by chance.
    assert generate(model, prompt, count=14, temperature=1e-5, key=jax.random.key(1)).tolist() == got
    drawn = [generate(model, prompt, count=14, temperature=1.0, key=jax.random.key(i)).tolist() for i in range(2)]
    assert got != drawn[0] != drawn[1]
    # The text ends with the first of the tokens that end it, wherever it comes, and in the prompt none does.
    for end in (got[0], got[4]):
        assert generate(model, prompt, count=14, stop=(1, end)).tolist() == got[: got.index(end) + 1]


# --- Report -----------------------------------------------------------------------------------------------------------


def test_statistics_of_the_step_get_a_column():
    from rich.console import Console

    curves = {
        "bf16": report.Curve([3.0, 2.0], [(2, 2.0)], 100.0, 3.0, {}),
        "fp8": report.Curve([3.0, 2.1], [(2, 2.01)], 50.0, 6.0, {"saturation": 0.0125}),
    }
    console = Console(width=120)
    with console.capture() as capture:
        console.print(report.results_table(curves, "bf16"))
    assert "saturation" in capture.get() and "1.250 %" in capture.get() and "+0.50 %" in capture.get()


# --- What the example is for ------------------------------------------------------------------------------------------


@pytest.mark.more
def test_fp8_ends_within_one_percent_of_bf16(tmp_path):
    """A third of the default run."""
    flags = ["--steps", "300", "--seed", "0", "--eval-every", "0", "--sample-bytes", "0"]
    run_example("-m", "examples.train_lm", *flags, "--out", str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["bf16"]["validation_loss"] < loss_of_letter_pairs(), "the model has learned more than letter pairs"
    assert abs(results["fp8 delayed"]["gap_percent"]) < 1.0


def loss_of_letter_pairs() -> float:
    """The validation loss of a model that knows how often each byte follows each other one in the training text."""
    text = corpus.load_corpus(None, 0.1)
    counts = np.ones((256, 256))
    np.add.at(counts, (text.train[:-1], text.train[1:]), 1)
    of_pairs = np.log(counts / counts.sum(axis=1, keepdims=True))
    return -float(of_pairs[text.validation[:-1], text.validation[1:]].mean())
