"""`preflight --choose`: what it prints makes the choice, and what does not fit together it says in one line."""

import json
import pathlib
import shlex
import sys

import jax
import pytest

from haliax_fp8._cli.main import main
from haliax_fp8.preflight import compilable_devices


TRAINING = """
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import haliax_fp8 as fp8


def make_step(tokens, recipe=None):
    model = eqx.filter_eval_shape(lambda: eqx.nn.MLP(64, 64, 128, 1, key=jax.random.key(0)))
    model = model if recipe is None else fp8.fp8_linear_layers(model, recipe=recipe)
    step = fp8.TrainStep(lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2), optax.sgd(1e-3))
    return step, (model, eqx.filter_eval_shape(step.init, model), jax.ShapeDtypeStruct((tokens, 64), jnp.float32))


def without_tokens():
    return make_step(64)
"""

needs_compiler = pytest.mark.skipif(compilable_devices["h100"].missing() is not None, reason="needs jax-cuda13-pjrt")


def run(*arguments):
    """The exit status; argparse's exits count as such."""
    try:
        return main(("preflight", *arguments))
    except SystemExit as error:
        return error.code


@pytest.fixture
def training(tmp_path, monkeypatch):
    (tmp_path / "training.py").write_text(TRAINING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "120")
    before = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield "training.py"
    jax.config.update("jax_numpy_dtype_promotion", before)
    sys.modules.pop("training", None)


@pytest.mark.slow
@needs_compiler
def test_the_printed_lines_of_ones_own_step_give_its_figures(training, capsys):
    search = (f"{training}:make_step", "--choose", "--tokens", "256", "--recipe", "none,current", "--cache", "kept")
    assert run(*search) == 0
    out, err = capsys.readouterr()
    assert "6 of 6: recipe='current', tokens=256" in err
    code = out[out.index("from training import make_step") :]
    sys.path.insert(0, "")
    namespace = {}
    exec(code, namespace)
    first = next(line for line in out.splitlines() if line.split()[1:2] == ["256"])
    assert first.split()[2] == f"{256 / namespace['report'].estimate.total:,.0f}"
    # Nothing is compiled again.
    files = {file: file.stat().st_mtime_ns for file in pathlib.Path("kept").iterdir()}
    assert len(files) == 6
    assert run(*search) == 0
    assert {file: file.stat().st_mtime_ns for file in files} == files
    assert capsys.readouterr().out == out


@pytest.mark.slow
@needs_compiler
def test_the_printed_command_of_a_demo_gives_its_figures(training, capsys):
    sizes = ("--demo", "gpt2", "--layers", "1", "--length", "128", "--tokens", "256")
    assert run(*sizes, "--choose", "--recipe", "delayed", "--exact", "--cache", "kept") == 2
    assert "no recipe to choose from, because exact=True" in capsys.readouterr().err
    assert run(*sizes, "--choose", "--recipe", "delayed", "--cache", "kept") == 0
    out = capsys.readouterr().out
    program, *words = shlex.split(out[out.index("python -m haliax_fp8") :])
    assert (program, words[:3]) == ("python", ["-m", "haliax_fp8", "preflight"])
    assert run(*words[3:], "--json") == 0
    step = json.loads(capsys.readouterr().out)["step"]
    tokens = int(words[words.index("--tokens") + 1])
    best = next(line for line in out.splitlines() if line.split()[:1] == ["delayed"])
    assert f" {tokens / step['estimate']['total']:,.0f} (" in best
    assert f" {step['memory']['peak'] / 1e9:.1f} " in f"{best} "
    assert run(*sizes, "--choose", "--recipe", "delayed", "--memory", "0.001") == 1
    assert "Nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["training.py:make_step", "--memory", "80"], "--memory is for --choose"),
        (["training.py:make_step", "--choose", "--json"], "--json is for a single report"),
        (["--demo", "gpt2", "--choose", "--memory", "-1"], "'-1' is not a positive number of gigabytes"),
        (["training.py:without_tokens", "--choose"], "training.py:without_tokens does not take tokens"),
        (["training.py:make_step", "--choose", "--mesh", "data=2"], "training.py:make_step does not take mesh"),
        (["training.py:make_step", "--choose", "--recipe", "curent"], "--recipe='curent' is unknown"),
    ],
)
def test_what_does_not_fit_together(training, capsys, arguments, words):
    assert run(*arguments) == 2
    assert words in " ".join(capsys.readouterr().err.split())
