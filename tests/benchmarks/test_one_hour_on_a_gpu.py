"""The script for an hour on a GPU: what is done and what is left, forecasts, and the page that it writes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import equinox as eqx
import pytest


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from lib import gpu_results  # noqa: E402
from lib.cases import SMOKE  # noqa: E402
from lib.gpu_parts import BLACKWELL, HOPPER, parts  # noqa: E402
from lib.gpu_results import Measurements  # noqa: E402
from one_hour_on_a_gpu import MEASURED, UNFINISHED, run_call  # noqa: E402


def row(**more):
    return {"device": "gpu", "part": "linear", "flags": "Triton off", "size": "1 x 1 x 1", "library": "bf16", **more}


def test_a_line_without_its_end_is_lost_and_no_other(tmp_path):
    measured = Measurements(tmp_path / "measured.jsonl")
    for line in (row(ms=1.0), row(ms=2.0), row(ms=3.0, device="other"), {"device": "gpu", "done": "linear"}):
        measured.append(line)
    text = measured.path.read_text()
    measured.path.write_text(text + '{"device": "gpu", "part": "lin')
    measured.append(row(library="haliax_fp8", ms=0.5))
    assert measured.path.read_text().startswith(text) and len(measured.path.read_text().splitlines()) == 6
    assert measured.rows("gpu") == [row(ms=2.0), row(library="haliax_fp8", ms=0.5)]
    assert (measured.done("gpu"), measured.done("other")) == ({"linear"}, set())


@pytest.mark.parametrize("generation", [HOPPER, BLACKWELL])
def test_calls_do_what_is_left_and_fits(tmp_path, monkeypatch, capsys, generation):
    """With a clock and processes of the test's: each part takes half of its limit, one crashes, one takes too long."""
    measured, now, started = Measurements(tmp_path / "measured.jsonl"), [0.0], []
    outcomes = {"product": -signal.SIGSEGV, "experts, Triton off": -signal.SIGALRM, "loss": UNFINISHED}

    def process(command, **_):
        key, limit = (command[command.index(name) + 1] for name in ("--child", "--limit"))
        if key == "device":
            measured.append({"device": "gpu", "environment": {"generation": generation}})
            return subprocess.CompletedProcess(command, 0)
        started.append(key)
        now[0] += float(limit) / 2
        return subprocess.CompletedProcess(command, outcomes.get(key, 0))

    monkeypatch.setattr("one_hour_on_a_gpu.subprocess.run", process)
    monkeypatch.setattr("one_hour_on_a_gpu.time.monotonic", lambda: now[0])
    monkeypatch.setattr("one_hour_on_a_gpu.BEGIN", 0.0)
    keys = [part.key for part in parts() if generation in part.on]
    assert ("block scales" in keys) is (generation == BLACKWELL) and len({*keys}) == len(keys)

    run_call(None, measured, 10.0, smoke=False)
    # A part that does not fit any more is left out, and a shorter one takes its place.
    limits = {part.key: 60 * part.minutes for part in parts()}
    left, expected = 600.0, []
    for key in keys[:-1]:
        if limits[key] <= left:
            expected.append(key)
            left -= limits[key] / 2
    # What goes on from call to call takes the rest, if that is long enough.
    expected += ["loss"] * (left >= limits["loss"])
    assert started == expected and started[0] == "product" and len(started) < len(keys)
    assert "The same command goes on with: " in capsys.readouterr().err

    for _ in range(12):
        now[0] = 0.0
        run_call(None, measured, 10.0, smoke=False)
    # Everything once, failures too; only what is unfinished again and again.
    assert {*started} == {*keys}
    assert [key for key in keys if started.count(key) > 1] == ["loss"]
    errors = {line["done"]: line["error"] for line in measured.lines() if "error" in line}
    assert "ended with" in errors.pop("product") and "stopped after" in errors.pop("experts, Triton off") and not errors

    now[0] = 0.0
    run_call([part for part in parts() if part.name == "linear"], measured, 10.0, smoke=False)
    assert started[-1] == "linear, Triton off" and started.count("linear, Triton off") == 2


@pytest.mark.slow
def test_a_killed_call_goes_on(tmp_path):
    """Its process ends with it, what it measured stays, and the next call finishes."""
    file = tmp_path / "measured.jsonl"
    command = [sys.executable, str(BENCHMARKS / "one_hour_on_a_gpu.py"), "--smoke", "--json", str(file)]
    command += ["--minutes", "60", "--part", "product", "--part", "idle"]
    measured, until = Measurements(file), time.monotonic() + 600
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while time.monotonic() < until and not any("part" in line for line in measured.lines()):
            time.sleep(0.05)
        process.kill()
    while subprocess.run(["pgrep", "-f", str(file)], capture_output=True, check=False).stdout:
        assert time.monotonic() < until, "the measuring process has not ended"
        time.sleep(0.2)
    device = measured.lines()[0]["device"]
    assert {row["part"] for row in measured.rows(device)} == {"product"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "250"})
    assert measured.done(device) == {"product", "idle, Triton off"}
    # A CPU has no launches, which is said in a row of its own.
    assert "E4M3 x E4M3, Triton" in done.stdout and "not a GPU" in done.stdout


def test_every_case_has_its_arguments():
    """On a GPU, a case that cannot be made is a row of minutes that are lost."""
    groups = [group for part in parts() if part.groups for group in part.groups(SMOKE)]
    cases = [(name, case) for group in groups for name, case in group.cases.items()]
    for _, case in cases:
        assert eqx.filter_eval_shape(case.arguments)
    assert {"bf16", "nvfp4, first block mxfp8, one pass"} <= {name for name, _ in cases}


def test_every_forecast_is_of_a_part_and_within_its_range():
    """Those of bf16's products alone by the definition: FLOPs at 0.75 of the data sheet's peak, and 2 µs."""
    forecasts, keys = gpu_results.read_forecasts(), {(part.name, part.flags) for part in parts()}
    assert {key[0] for key in forecasts} == {"h100", "h200", "b200"}
    peak = {"h100": 989.4e12, "h200": 989.4e12, "b200": 2250e12}
    products = 0
    for (device, part, flags, size, library), found in forecasts.items():
        assert (part, flags) in keys and found["date"] >= "2026-11-28"
        assert found["ms_least"] <= found["ms"] <= found["ms_most"]
        assert found["times_bf16_least"] <= found["times_bf16"] <= found["times_bf16_most"]
        if (part, library) == ("product", "bf16") and min(map(int, size.split(" x "))) >= 4096:
            m, k, n = map(int, size.split(" x "))
            assert found["ms"] == pytest.approx(1e3 * (2 * m * k * n / (0.75 * peak[device]) + 2e-6), rel=1e-3)
            products += 1
    assert products >= 3


def test_a_measurement_is_set_beside_its_forecast(monkeypatch):
    known = {("h200", "linear", "Triton off", "1 x 1 x 1", "bf16"): {"ms": 2.0, "ms_least": 1.8, "ms_most": 2.4}}
    monkeypatch.setattr(gpu_results, "read_forecasts", lambda: known)
    inside, outside = gpu_results.with_forecasts([row(ms=2.2), row(ms=2.5)], "NVIDIA H200")
    missed = gpu_results.COLUMNS["measured / forecast"]
    assert (missed(inside), missed(outside)) == ("1.10", "1.25, outside")
    assert gpu_results.with_forecasts([row(ms=2.2)], "NVIDIA H100 80GB HBM3") == [row(ms=2.2)]


def test_the_page_has_what_the_command_writes(tmp_path):
    page = (BENCHMARKS / "RESULTS.md").read_text()
    copy = tmp_path / "RESULTS.md"
    copy.write_text(re.sub(r"(?m)^\| .* \|$", "", page))
    gpu_results.write_section(copy, gpu_results.section(Measurements(MEASURED)))
    between = lambda text: text.partition(gpu_results.BEGINNING)[2].partition(gpu_results.END)[0]
    assert between(copy.read_text()) == between(page) and "| 41.3 |" in between(page)
    copy.write_text("no marks")
    with pytest.raises(ValueError, match="restore them"):
        gpu_results.write_section(copy, "")
    assert json.loads(MEASURED.read_text().splitlines()[0])["environment"]["date"] == "2026-11-26"
