"""Benchmarks of training: runs that go on from call to call, their gaps, and what others count with."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(150):
        (folder / f"{index}.md").write_text(f"Chapter {index}. " + "It was the best of times. " * 40)
    (folder / "copy.md").write_text((folder / "0.md").read_text())
    return folder


def asked(out, folder, *more, steps=12):
    # The time counts from the import, which another test may have done.
    tiny = ["--size", "tiny", "--quiet", "--markdown", "--save-every", "0", "--seeds", "1", "--minutes", "600"]
    return [*tiny, "--steps", str(steps), "--out", str(out), "--folder", str(folder), *more]


def runs_in(out):
    return json.loads((out / "results.json").read_text())["runs"]


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path, folder):
    """Every loss has the bits of a run in one piece; a variant that starts in bf16 is converted."""
    from loss_at_75_million_weights import main

    variants = ["--variants", "delayed", "delayed+first_quarter_in_bf16"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(asked(whole, folder, *variants)) is True
    command = [sys.executable, str(BENCHMARKS / "loss_at_75_million_weights.py"), *asked(killed, folder, *variants)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + 300
        while not (killed / "results.json").exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    # Saved after each turn of three steps; it may have been killed while it wrote the next one.
    assert process.wait() in (-signal.SIGKILL, 0) and min(run["done"] for run in runs_in(killed).values()) >= 3
    assert main(asked(killed, folder, *variants)) is True
    for name, run in runs_in(whole).items():
        again = runs_in(killed)[name]
        assert (again["losses"], again["validations"]) == (run["losses"], run["validations"]), name
        assert run["done"] == 12 and len(run["losses"]) == 12 and run["losses"][-1] < run["losses"][0]
    bf16, converted = (runs_in(whole)[f"{name}:0"]["losses"] for name in ("bf16", "delayed+first_quarter_in_bf16"))
    assert bf16[:3] == converted[:3] and bf16[3:] != converted[3:]


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_a_call_ends_in_time_and_later_variants_and_seeds_catch_up(tmp_path, folder, capsys):
    from loss_at_75_million_weights import main

    assert main(asked(tmp_path, folder, "--variants", "bf16+ulp", "--minutes", "0")) is False
    assert [run["done"] for run in runs_in(tmp_path).values()] == [3, 3]
    assert "3 of 12 steps are done: the same command goes on" in capsys.readouterr().err
    picture = tmp_path / "gap.svg"
    assert main(asked(tmp_path, folder, "--variants", "delayed", "--seeds", "2", "--plot", str(picture))) is True
    assert {name: run["done"] for name, run in runs_in(tmp_path).items()} == {
        **{f"{variant}:{seed}": 12 for variant in ("bf16", "delayed") for seed in (0, 1)},
        "bf16+ulp:0": 3,
    }
    gaps = [
        100 * (runs_in(tmp_path)[f"delayed:{i}"]["validations"][-1][1] / loss - 1)
        for i in (0, 1)
        for loss in [runs_in(tmp_path)[f"bf16:{i}"]["validations"][-1][1]]
    ]
    error = abs(gaps[0] - gaps[1]) / 2
    assert f"| {sum(gaps) / 2:+.2f} ± {error:.2f} % |" in capsys.readouterr().out
    assert "delayed, 2 seeds" in picture.read_text()
    # One of two equal files was read; the text is what the first call found.
    names = [Path(line.split("  ")[-1]).name for line in (tmp_path / "text.files.txt").read_text().splitlines()]
    assert len({"0.md", "copy.md"} & {*names}) <= 1 and len(names) > 5
    with pytest.raises(ValueError, match="steps=12"):
        main(asked(tmp_path, folder, steps=9))


def test_too_little_text_is_refused_with_how_much_there_is(folder):
    from loss_at_75_million_weights import SIZES, installed_text

    with pytest.raises(ValueError, match=r"0\.1\d MB of text to train on.*takes 50 .*--folder"):
        installed_text(SIZES["75M"], [folder])


def test_gaps_are_those_of_pairs_of_seeds():
    """Of losses with known ratios: +2 and +4 % in the last tenth, +1 % for both in the validation."""
    from loss_at_75_million_weights import rows

    def run(last, validation, points=10):
        validations = [[100, validation, 2 * validation]]
        return {
            "done": 100, "every": 10, "losses": [4.0] * (points - 1) + [last], "validations": validations,
            "seconds_per_step": 0.5,
        }  # fmt: skip

    runs = {"bf16:0": run(2.0, 3.0), "bf16:1": run(4.0, 5.0), "bf16:2": run(1.0, 1.0)}
    runs |= {"delayed:1": run(4.16, 5.05), "delayed:0": run(2.04, 3.03)}
    bf16, delayed = rows({"runs": runs})
    assert (bf16["seeds"], bf16["training_gap"].mean, delayed["seeds"], delayed["steps"]) == (3, 0.0, 2, 100)
    assert delayed["training_gap"].mean == pytest.approx(3.0) and delayed["training_gap"].error == pytest.approx(1.0)
    assert delayed["gap"].mean == pytest.approx(1.0) and delayed["gap_in_bf16"].mean == pytest.approx(102.0)
    np.testing.assert_allclose(delayed["curve"][0], [10, 0.0, 0.0, 0.0], atol=1e-9)
    np.testing.assert_allclose(delayed["curve"][-1], [100, 3.0, 2.0, 4.0])


@pytest.mark.usefixtures("standard_promotion")
def test_the_rehearsal_is_as_the_pages_say():
    from loss_at_75_million_weights import rows

    content = json.loads((BENCHMARKS / "loss_at_3_million_weights.json").read_text())
    found = {row["variant"]: row for row in rows(content)}
    assert {row["steps"] for row in found.values()} == {2000} and len(found) == 3
    results, page = (BENCHMARKS / "RESULTS.md").read_text(), BENCHMARKS.parent / "docs" / "convergence.md"
    for variant in ("bf16+ulp", "delayed"):
        assert str(found[variant]["gap"]) in page.read_text()
        (line,) = [line for line in results.splitlines() if line.startswith(f"| {variant} | 3 |")]
        assert all(str(found[variant][name]) in line for name in ("training_gap", "gap", "gap_in_bf16"))


def test_the_loss_in_parts_is_the_loss():
    from lib.language_model import loss_in_parts, next_token_loss

    from haliax_fp8.models import Transformer, TransformerConfig

    model = Transformer.init(TransformerConfig(layers=1, hidden=32, heads=1, mlp=32, unroll=1), key=jax.random.key(0))
    tokens = hax.named(jax.random.randint(jax.random.key(1), (3, 16), 0, 256), ("batch", "position"))
    whole, in_parts = (eqx.filter_value_and_grad(loss)(model, tokens) for loss in (next_token_loss, loss_in_parts))
    # Sums in another order, and products in bfloat16 of other shapes.
    np.testing.assert_allclose(whole[0], in_parts[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(whole[1]), jax.tree.leaves(in_parts[1]), strict=True):
        assert jnp.linalg.norm(a - b) <= 2e-2 * jnp.linalg.norm(a)


def test_time_in_which_nothing_runs():
    from lib.programs import busy_and_span

    # Two overlap, one lies within another, and there are gaps of 1 and 3.
    assert busy_and_span([(10, 14), (0, 4), (3, 6), (1, 2), (7, 7)]) == (10.0, 14)
