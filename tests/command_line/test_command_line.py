"""The command line: what it prints, what it exits with, and that it says in one line what is wrong."""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import jax
import pytest

import haliax_fp8 as fp8
from haliax_fp8._cli.demo import demo_by_name, demo_config, demo_step, demos
from haliax_fp8._cli.main import main
from haliax_fp8.layers.describe import reasons_of_layers
from haliax_fp8.preflight import compilable_devices
from haliax_fp8.preflight.compile import Traced, make_mesh
from haliax_fp8.preflight.compilers import NVIDIA
from haliax_fp8.preflight.devices import as_compilable
from haliax_fp8.preflight.render import operations


ROOT = pathlib.Path(__file__).parents[2]
ROWS, WIDTH, OUT = 32, 64, 48

# A user's file: one step with a linear layer in FP8 and one matrix in high precision, another step without FP8.
TRAINING = f"""
import equinox as eqx
import jax
import jax.numpy as jnp
from sizes import ROWS

import haliax_fp8 as fp8


def make(model):
    w = jnp.zeros(({OUT}, 16))
    step = lambda model, w, x: fp8.filter_grad(lambda mw: (jax.vmap(mw[0])(x) @ mw[1]).sum())((model, w))
    return step, (model, w, jnp.zeros((ROWS, {WIDTH})))


def plain():
    return eqx.nn.Linear({WIDTH}, {OUT}, key=jax.random.key(0))


def make_step():
    return make(fp8.fp8_linear_layers(plain()))


def make_plain_step():
    return make(plain())


def make_nothing():
    return 17


def make_broken_step():
    return (lambda x: x @ jnp.zeros((3, 3))), (jnp.zeros((2, 2)),)


def fails():
    return undefined_name


CONSTANT = 3
"""
# Of the layer: its output and the gradient of its kernel; nobody asks for that of x. Of the matrix: both gradients;
# nobody asks for the loss.
CONVERTED = 2 * 2 * ROWS * WIDTH * OUT
HIGH = 2 * 2 * ROWS * OUT * 16


@pytest.fixture(autouse=True)
def a_users_settings():
    """Promotion as users have it, in all threads: optax's AdamW does not run under strict promotion."""
    before = {name: getattr(jax.config, name) for name in ("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")}
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def training(tmp_path, monkeypatch):
    """The path of the user's file; its folder is the current one."""
    (tmp_path / "training.py").write_text(TRAINING)
    (tmp_path / "sizes.py").write_text(f"ROWS = {ROWS}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "training.py"
    for name in ("training", "sizes"):
        sys.modules.pop(name, None)


def run(*arguments):
    """The exit status; argparse's exits count as such."""
    try:
        return main(arguments)
    except SystemExit as error:
        return error.code


def local(*arguments):
    return run("preflight", *arguments, "--device", "local")


# --- A step of one's own ----------------------------------------------------------------------------------------------


def test_the_products_of_a_step(training, capsys):
    assert local(f"{training}:make_step", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    flops = {verdict: 0 for verdict in ("emulated", "high precision")}
    for product in report["step"]["products"]:
        flops[product["verdict"]] += product["flops"]
    assert flops == {"emulated": CONVERTED, "high precision": HIGH}


def test_a_module_may_be_named_instead_of_a_file(training, capsys):
    assert local("training:make_step", "--json") == 0
    assert json.loads(capsys.readouterr().out)["step"]["flops"] == CONVERTED + HIGH


def test_a_file_named_like_a_library_does_not_hide_it(training, tmp_path, capsys):
    (tmp_path / "colorsys.py").write_text(TRAINING)
    before = list(sys.path)
    assert local("colorsys.py:make_step", "--json") == 0
    assert hasattr(importlib.import_module("colorsys"), "rgb_to_hsv") and sys.path == before


def test_the_table_goes_to_the_screen_and_progress_to_the_standard_error(training, capsys):
    assert local(f"{training}:make_step") == 0
    out, err = capsys.readouterr()
    assert "emulated" in out and "fprop" in out and "compiling" not in out
    assert "compiling the step" in err


def test_files_are_written_beside_the_table(training, tmp_path, capsys):
    assert (
        local(f"{training}:make_step", "--json", "report.json", "--markdown", "report.md", "--svg", "report.svg") == 0
    )
    assert "fprop" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["device"]["name"] == "local"
    assert (tmp_path / "report.md").read_text().count("| fprop |") == 1
    picture = (tmp_path / "report.svg").read_text()
    assert "fprop" in picture and "emulated" in picture
    assert "url(http" not in picture and "font-face" not in picture


def test_a_file_that_cannot_be_written_loses_nothing_else(training, tmp_path, capsys):
    (tmp_path / "nowhere.json").symlink_to(tmp_path / "absent" / "report.json")
    assert local(f"{training}:make_step", "--json", "nowhere.json", "--markdown", "report.md") == 2
    out, err = capsys.readouterr()
    assert "fprop" in out and "fprop" in (tmp_path / "report.md").read_text()
    assert "error: nowhere.json cannot be written: No such file or directory\n" in err


def test_options_reach_the_compiler(training, capsys):
    assert local(f"{training}:make_step", "--xla", "xla_no_such_option=true") == 2
    assert "xla_no_such_option" in capsys.readouterr().err
    assert local(f"{training}:make_step", "--xla", "xla_cpu_enable_fast_math=false") == 0


def test_the_first_words_say_which_flags(training, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    options = ["--xla", "xla_cpu_enable_fast_min_max=true"]
    assert local(f"{training}:make_step", *options) == 0
    first = " ".join(capsys.readouterr().out.partition(" layer ")[0].split())
    flags = "XLA flags: --xla_cpu_enable_fast_math=false --xla_cpu_enable_fast_min_max=true"
    # A CPU has no FP8 units, and what was asked for is what runs.
    share = CONVERTED / (CONVERTED + HIGH)
    assert (
        first == f"{share:.1%} of the FLOPs in FP8 and {1 - share:.1%} in f32 on the local devices, emulated; {flags}"
    )


def test_the_report_of_a_cpu_counts_what_is_emulated(training, capsys):
    assert local(f"{training}:make_step") == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "FLOPs by format, emulated" in line]
    flops = CONVERTED + HIGH
    shares = f"FP8 {CONVERTED / flops:.1%}, f32 {HIGH / flops:.1%}"
    assert " ".join(row[4:]) == f"{shares} of {flops / 1e3:.3g} kFLOP"
    assert 1e3 < flops < 1e6


def test_flops_have_units():
    texts = [operations(count) for count in (0, 512, 999.4, 999.6, 3.161e12, 7.246e14, 2e18)]
    assert texts == ["0 FLOP", "512 FLOP", "999 FLOP", "1 kFLOP", "3.16 TFLOP", "725 TFLOP", "2 EFLOP"]


@pytest.mark.slow
@pytest.mark.skipif(compilable_devices["h100"].missing() is not None, reason="needs the package jax-cuda13-pjrt")
def test_both_settings_of_tritons_products(training, capsys, monkeypatch):
    """The second is compiled only if it was asked for."""
    monkeypatch.delenv("XLA_FLAGS")
    assert run("preflight", f"{training}:make_step", "--both-settings", "--json") == 0
    out, err = capsys.readouterr()
    assert "with xla_gpu_enable_triton_gemm=false: " in json.loads(out)["flags"]
    assert "compiling the step with the other setting" in err
    off = ["--xla", "xla_gpu_enable_triton_gemm=false"]
    assert run("preflight", f"{training}:make_step", *off, "--json") == 0
    out, err = capsys.readouterr()
    flags = "XLA flags: --xla_gpu_enable_triton_gemm=false; not compiled with xla_gpu_enable_triton_gemm=true"
    assert json.loads(out)["flags"].startswith(f"{flags}; cuDNN ") and "other setting" not in err


def test_a_baseline(training, capsys):
    assert local(f"{training}:make_step", "--compare", f"{training}:make_plain_step", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert {p["verdict"] for p in report["baseline"]["products"]} == {"high precision"}
    assert report["baseline"]["flops"] == report["step"]["flops"]


def test_reasons_come_from_the_model(training, capsys):
    """A layer that was left alone is named as `describe` names it."""
    assert local(f"{training}:make_plain_step", "--json") == 0
    reasons = {p["reason"] for p in json.loads(capsys.readouterr().out)["step"]["products"] if p["layer"]}
    assert any("not converted" in reason for reason in reasons)


@pytest.mark.parametrize(("share", "status"), [(CONVERTED / (CONVERTED + HIGH) - 0.01, 0), (0.99, 1)])
def test_requirements_decide_the_exit_status(training, capsys, share, status):
    assert local(f"{training}:make_step", "--require", f"asked_flops={share}") == status
    assert ("asked_flops=0.99 is required" in capsys.readouterr().err) == bool(status)


def test_on_a_cpu_nothing_is_in_fp8(training, capsys):
    assert local(f"{training}:make_step", "--require", "fp8_flops=0.01") == 1
    assert "fp8_flops=0.01" in capsys.readouterr().err


# --- What is wrong is said in one line, with exit status 2 ------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["training.py:make_step", "--device", "h1000"], "--device='h1000' is unknown; choose one of h100"),
        (["training.py"], "names no function; write FILE.py:FUNCTION"),
        (["absent.py:make_step", "--device", "local"], "cannot find the file absent.py"),
        (["absent:make_step", "--device", "local"], "cannot find a module named 'absent'"),
        (["training.py:make_stop", "--device", "local"], "no function 'make_stop'; it has make_step"),
        (["training.py:CONSTANT", "--device", "local"], "no function 'CONSTANT'"),
        (["training.py:make_nothing", "--device", "local"], "returned int; it has to return (step_fn, args)"),
        (["training.py:make", "--device", "local"], "has to take no arguments, but takes model; give it defaults"),
        (["training.py:make_step", "--device", "local", "--devices", "99"], "devices=99"),
        (["--demo", "lama-8b", "--device", "local"], "the nearest are ['llama-8b'"),
        (["--demo", "gpt2", "--device", "local", "--recipe", "delaid"], "'delayed'"),
        (["--demo", "gpt2", "--device", "local", "--layers", "1", "--exclude", "blocks.x"], "exclude='blocks.x'"),
        (["--demo", "gpt2", "--device", "local", "--tokens", "100", "--length", "64"], "100 is not a multiple"),
        (["--demo", "gpt2", "--device", "local", "--tokens", "64", "--devices", "2"], "over --devices 2;"),
    ],
)
def test_errors(training, capsys, arguments, message):
    if arguments == ["training.py"]:
        arguments = [*arguments, "--device", "local"]
    assert run("preflight", *arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give FILE.py:FUNCTION, or --demo"),
        (["training.py:make_step", "--demo", "gpt2"], "give FILE.py:FUNCTION, or --demo"),
        (["training.py:make_step", "--compare"], "--compare without a value is for --demo"),
        (["training.py:make_step", "--json", "--markdown"], "cannot both go to the screen"),
        (["training.py:make_step", "--require", "fp8=1"], "'fp8' cannot be required; choose from fp8_flops"),
        (["training.py:make_step", "--require", "fp8_flops=most"], "'fp8_flops=most' is not NAME=VALUE with a number"),
        (["training.py:make_step", "--devices", "0"], "'0' is not a positive integer"),
        (["training.py:make_step", "--xla", "no_value"], "'no_value' is not OPTION=VALUE, such as"),
        (["training.py:make_step", "--mesh", "8"], "'8' is not AXIS=N,..., such as data=8"),
        (["training.py:make_step", "--require", "fp8_flops=nan"], "'fp8_flops=nan' is not NAME=VALUE with a number"),
        (["training.py:make_step", "--require", "speedup=1.2"], "--require speedup=1.2 compares with a baseline; add"),
        (["--demo", "gpt2", "--mesh", "data=8"], "--mesh is for your own steps"),
        (["training.py:make_step", "--recipe", "mxfp8"], "--recipe is for --demo; training.py:make_step makes its own"),
        (["training.py:make_step", "--exclude", "head"], "--exclude is for --demo; training.py:make_step makes its"),
        (["training.py:make_step", "--tokens", "8192"], "--tokens is for --demo; training.py:make_step makes its own"),
        (["--json", "training.py:make_step"], "; 'training.py:make_step' is the value of --json"),
        (["training.py:make_step", "--json", "absent/r.json"], "the folder 'absent' does not exist; create it first"),
        (["training.py:make_step", "--svg", "."], "--svg='.' cannot be written: it is a folder"),
        (["training.py:make_step", "--svg", "-"], "--svg=- is not a file"),
        (["training.py:make_step", "--json", "r", "--svg", "r"], "--json=r and --svg=r write to the same file"),
    ],
)
def test_flags_that_do_not_fit(capsys, arguments, message):
    assert run("preflight", *arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    # The usage above it is one line, so that the error is seen.
    assert len(err.splitlines()) == 2


def test_without_a_command_it_says_which_there_are(capsys):
    assert run() == 2
    err = capsys.readouterr().err
    assert all(f"\n    {command}" in err for command in ("preflight", "devices", "checkpoint"))
    assert run("--version") == 0
    assert capsys.readouterr().out == f"haliax-fp8 {importlib.metadata.version('haliax-fp8')}\n"


@pytest.mark.parametrize(("function", "error"), [("fails", "NameError"), ("make_broken_step", "dot_general")])
def test_mistakes_in_the_users_file_keep_their_traceback(training, capsys, function, error):
    assert local(f"{training}:{function}") == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and "training.py" in err and error in err


@pytest.mark.parametrize(
    "name, device, compiler, devices",
    [
        ("h100", "h100", "nvidia", "NVIDIA's GPUs"),
        ("tpu7x", "tpu7x", "tpu", "TPUs"),
        # In any case, and by other names, as everywhere else.
        ("H100", "h100", "nvidia", "NVIDIA's GPUs"),
        ("TPU v6e", "tpu6e", "tpu", "TPUs"),
    ],
)
def test_a_missing_compiler_is_one_line_with_the_remedy(name, device, compiler, devices, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))  # beneath which `install-compiler` puts compilers
    for package in ("jax_plugins", "libtpu"):
        monkeypatch.setitem(sys.modules, package, None)
    assert run("preflight", "--demo", "gpt2", "--device", name) == 2
    remedy = f"run `python -m haliax_fp8 install-compiler {compiler}`"
    assert capsys.readouterr().err == f"error: device {device!r} needs XLA's compiler for {devices}: {remedy}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--demo", "nope"], "--demo nope is unknown"),
        (["--demo", "gpt2", "--recipe", "delaid"], "'delaid'"),
        (["--demo", "gpt2", "--compare", "absent.py:make_step"], "cannot find the file absent.py"),
        (["absent.py:make_step"], "cannot find the file absent.py"),
        (["training.py:make_stop"], "no function 'make_stop'"),
        (["training.py:make_step", "--compare", "training.py:plane"], "no function 'plane'; it has plain"),
        (["nocolon"], "'nocolon' names no function"),
    ],
)
def test_names_are_checked_before_a_compiler_is_asked_for(training, arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jax_plugins", None)
    assert run("preflight", *arguments, "--device", "h100") == 2
    err = capsys.readouterr().err
    assert message in err and "install-compiler" not in err and err.startswith("error: ") and err.count("\n") == 1


def test_the_functions_of_a_file_are_those_that_it_defines(training, capsys, tmp_path):
    """Not the names that it imports; those of a file that only gathers functions are all imported."""
    imported = "from haliax_fp8 import Fp8Einsum, filter_grad\nfrom functools import partial\n"
    (tmp_path / "own.py").write_text(f"{imported}class Shape: pass\ndef make_a(): pass\ndef train_b(): pass\n")
    (tmp_path / "gathers.py").write_text("from training import make_step\n")
    for file, names in (("own.py", "make_a, train_b"), ("gathers.py", "make_step")):
        assert local(f"{file}:nofn") == 2
        assert capsys.readouterr().err == f"error: {file} has no function 'nofn'; it has {names}\n"


@pytest.mark.more
def test_ctrl_c_ends_at_once_without_a_traceback(training, tmp_path):
    """While the step is traced, which takes longer than the test waits."""
    (tmp_path / "slow.py").write_text(
        "import time\ndef step(x):\n    open('started', 'w').close()\n    time.sleep(100)\n    return x\n"
        "def make_step():\n    import jax.numpy as jnp\n    return step, (jnp.zeros(3),)\n"
    )
    # Shells have what they start in the background ignore Ctrl-C, the tests and their children too.
    program = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('haliax_fp8', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", program, "preflight", "slow.py:make_step", "--device", "local"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not (tmp_path / "started").exists():
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Stopped." in err and "Traceback" not in err


# --- Tables -----------------------------------------------------------------------------------------------------------


def test_devices(capsys):
    assert run("devices", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(compilable_devices) <= set(rows)
    for name, row in rows.items():
        assert row["native"] == [
            recipe for recipe in fp8.recipes.named if fp8.recipes.supported(recipe, name).is_native
        ]
    assert rows["local"]["kind"] == f"{len(jax.devices())} × cpu" and rows["local"]["preflight"] == "ready"
    assert rows["mi300x"]["preflight"] == "cannot compile for it"
    assert run("devices") == 0
    out = capsys.readouterr().out
    assert "delayed, current" in out and "NVIDIA H100" in out


# --- Demos ------------------------------------------------------------------------------------------------------------

# Parameters as the papers and model cards count them; GPT-2's count is that of the checkpoint, tied head once.
PARAMETERS = {"gpt2": 124.4e6, "llama-8b": 8.03e9, "llama-70b": 70.6e9, "mixtral-8x7b": 46.7e9}


@pytest.mark.parametrize("name", demos)
def test_a_demo_has_the_published_number_of_parameters(name):
    _, args = demo_step(demo_by_name(name), layers=None, tokens=1024, length=1024, stacking="checkpointed", config=None)
    count = sum(leaf.size for leaf in jax.tree.leaves(args[0]))
    # The published figures have three digits.
    assert abs(count / PARAMETERS[name] - 1) < 0.005


@pytest.mark.parametrize("name", demos)
def test_a_demo_follows_the_guide(name):
    """Its head stays in bf16, and its step is a `TrainStep` whose options count."""
    config = demo_config(demo_by_name(name), "delayed", ["*.key"])
    step, args = demo_step(demo_by_name(name), layers=1, tokens=64, length=32, stacking="scan", config=config)
    reasons = reasons_of_layers(args[0])
    assert reasons.pop("head", "a tied head")[:16] in ("excluded by 'hea", "a tied head")
    assert any(path.endswith(".key") for path in reasons)
    if name == "gpt2":
        local = make_mesh(as_compilable("local"), None, None)
        assert Traced.of(step, args, mesh=local, shardings=None).train_steps == {False}


def test_a_demo_holds_no_array():
    # A recipe that rounds at random has keys, of which an optimizer has nothing.
    config = fp8.Fp8Config(recipe="nvfp4")
    _, args = demo_step(demo_by_name("gpt2"), layers=2, tokens=64, length=32, stacking="scan", config=config)
    assert not [leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array)]


@pytest.mark.more
@pytest.mark.parametrize("blocks", ["unrolled", "scan", "checkpointed"])
def test_the_flops_of_a_demo(capsys, blocks):
    """Counted from the published shapes: linear layers, attention, and the tied head."""
    layers, tokens, length = 2, 64, 32
    sizes = ["--layers", str(layers), "--tokens", str(tokens), "--length", str(length)]
    assert local("--demo", "gpt2", *sizes, "--blocks", blocks, "--json") == 0
    step = json.loads(capsys.readouterr().out)["step"]
    linear = 2 * tokens * layers * (4 * 768 * 768 + 2 * 768 * 3072)
    attention = 2 * 2 * tokens * length * 768 * layers
    head = 2 * tokens * 768 * 50257
    passes = 4 if blocks == "checkpointed" else 3  # forward, two gradients, and forward once more
    flops = {verdict: 0 for verdict in ("emulated", "high precision")}
    for product in step["products"]:
        flops[product["verdict"]] += product["flops"]
    # What a block computes last is not computed again: no gradient asks for it. That is the layer `down`.
    down = 2 * tokens * layers * 768 * 3072 if blocks == "checkpointed" else 0
    assert flops == {"emulated": passes * linear - down, "high precision": passes * attention + 3 * head}


# --- install-compiler -------------------------------------------------------------------------------------------------


# Instead of pip and uv: notes how it is called, and unpacks the files that a test says. Without any it fails.
INSTALLER = """#!{python}
import json, pathlib, sys
folder = pathlib.Path({folder!r})
with (folder / "commands").open("a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
files = (folder / "files").read_text().split()
if "--version" in sys.argv:
    sys.exit()
for file in files:
    path = pathlib.Path(sys.argv[sys.argv.index("--target") + 1], file)
    path.parent.mkdir(parents=True)
    path.touch()
sys.exit(not files)
"""
# As pyenv's, in a Python that has no uv.
BROKEN = "#!/bin/sh\necho 'uv: command not found' >&2\nexit 127\n"


@dataclasses.dataclass(frozen=True)
class Installer:
    """What tests know of it: the folder of its notes, and of `uv`."""

    folder: pathlib.Path

    @property
    def commands(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "commands").read_text().splitlines()]

    def unpacks(self, *files: str) -> None:
        (self.folder / "files").write_text("\n".join(files))


@pytest.fixture
def installer(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    folder = tmp_path / "installer"
    program = INSTALLER.format(python=sys.executable, folder=str(folder))
    (folder / "pip").mkdir(parents=True)
    (folder / "pip" / "__init__.py").touch()
    (folder / "pip" / "__main__.py").write_text(program)
    (folder / "uv").write_text(program)
    (folder / "uv").chmod(0o755)
    (folder / "files").touch()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return Installer(folder)


@pytest.mark.parametrize(
    "name, requirement, files",
    [
        (
            "nvidia",
            f"jax-cuda13-pjrt=={importlib.metadata.version('jaxlib')}",
            ["jax_plugins/xla_cuda13/__init__.py", "jax_cuda13_plugin/__init__.py"],
        ),
        ("tpu", "libtpu==", ["libtpu/libtpu.so"]),
    ],
)
def test_a_compiler_is_installed_once_and_beside_the_packages(name, requirement, files, installer, tmp_path, capsys):
    installer.unpacks(*files)
    environment = tmp_path / "environment"
    old = environment / "share" / "haliax_fp8" / f"{requirement.partition('==')[0]}-for-jaxlib-0.0.1"
    old.mkdir(parents=True)
    assert main(["install-compiler", name]) == 0
    (command,) = installer.commands
    folder = pathlib.Path(command[command.index("--target") + 1])
    assert command[0] == "install" and "--no-deps" in command and command[-len(files)].startswith(requirement)
    assert folder.is_relative_to(environment) and str(folder) not in sys.path and folder.exists() and not old.exists()
    assert compilable_devices["h100" if name == "nvidia" else "tpu7x"].missing() is None
    assert main(["install-compiler", name]) == 0 and len(installer.commands) == 1
    assert "installed already" in capsys.readouterr().err


def test_a_compiler_that_cannot_be_installed_is_one_line(installer, tmp_path, capsys):
    assert main(["install-compiler", "nvidia"]) == 2
    assert len(installer.commands) == 1
    err = capsys.readouterr().err
    assert "error: jax-cuda13-pjrt==" in err and f"`pip install --no-deps --target {NVIDIA.directory} " in err
    assert not list(tmp_path.rglob("*-for-jaxlib-*"))


def test_without_pip_uv_installs_the_compiler(installer, monkeypatch):
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setenv("UV", str(installer.folder / "uv"))
    installer.unpacks("jax_plugins/xla_cuda13/__init__.py", "jax_cuda13_plugin/__init__.py")
    assert main(["install-compiler", "nvidia"]) == 0
    version, command = installer.commands
    assert version == ["--version"]
    assert command[:2] == ["pip", "install"] and command[command.index("--python") + 1] == sys.executable


@pytest.mark.parametrize("uv", [None, BROKEN], ids=["none", "broken"])
def test_without_pip_and_uv_the_command_is_named(uv, installer, monkeypatch, tmp_path, capsys):
    """It is the one that would have been run: it unpacks the same wheels in the same folder."""
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if uv is not None:
        (tmp_path / "uv").write_text(uv)
        (tmp_path / "uv").chmod(0o755)
    assert main(["install-compiler", "nvidia"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: install-compiler needs pip or uv, and found neither") and err.count("\n") == 1
    remedies = [shlex.split(quoted) for quoted in err.split("`")[1::2]]
    assert remedies[0] == [sys.executable, "-m", "ensurepip"]
    assert remedies[1] == ["pip", "install", "--no-deps", "--target", str(NVIDIA.directory), *NVIDIA.requirements]


@pytest.mark.slow
@pytest.mark.skipif(NVIDIA.unpacked is None, reason=f"needs {NVIDIA.missing}")
@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is not None, reason="JAX's plugins are among the packages")
def test_where_a_compiler_is_installed_programs_stay_silent(tmp_path):
    """Neither a traceback nor a warning, before and after something was compiled for a GPU that is not here.

    Nor from JAX's compilation cache, which keeps such programs and cannot read them back.
    """
    program = """
import jax, haliax_fp8 as fp8
x = jax.numpy.ones((32, 32))
fp8.preflight.inspect_step(lambda x: x @ x, x, device="h100")
assert jax.default_backend() == "cpu" and (x @ x).sum() == 32**3
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path)
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.more
def test_a_closed_pipe_ends_quietly():
    command = f"{sys.executable} -m haliax_fp8 devices --json"
    done = subprocess.run(f"{command} | head -1", shell=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[\n", "")
