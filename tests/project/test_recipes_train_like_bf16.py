"""The benchmark that compares losses with those of bf16: its statistics, its files, and tiny runs."""

import dataclasses
import json
import math
import pathlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haliax_fp8 as fp8


BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import recipes_train_like_bf16  # noqa: E402
from lib.paired_gaps import RunFile, final, paired_gap, thinned  # noqa: E402
from lib.training_runs import Schedule, Variant, train  # noqa: E402
from lib.training_tasks import AbstractTask, source_text  # noqa: E402
from lib.training_variants import SUITES  # noqa: E402


pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_a_gap_is_the_mean_of_pairs():
    # Gaps of 1, 2 and 3 %: the mean is 2, the standard deviation 1, the standard error 1 / sqrt(3).
    gap = paired_gap({0: 101.0, 1: 204.0, 2: 309.0, 9: 5.0}, {0: 100.0, 1: 200.0, 2: 300.0, 8: 1.0})
    np.testing.assert_allclose((gap.mean, gap.deviation, gap.error), (2.0, 1.0, 1.0 / math.sqrt(3.0)), rtol=1e-12)
    assert (gap.seeds, gap.broken, str(gap)) == (3, 0, "+2.00 ± 0.58 %")


def test_pairs_cancel_what_seeds_share():
    rng = np.random.default_rng(0)
    baseline = dict(enumerate(rng.uniform(1.0, 5.0, 50)))
    true = dict(enumerate(rng.normal(0.3, 0.1, 50)))
    gap = paired_gap({seed: loss * (1 + true[seed] / 100) for seed, loss in baseline.items()}, baseline)
    assert gap.mean == pytest.approx(np.mean(list(true.values())), rel=1e-9)
    assert gap.error == pytest.approx(np.std(list(true.values()), ddof=1) / np.sqrt(50), rel=1e-9)


def test_what_diverged_is_counted_and_not_averaged():
    gap = paired_gap({0: 1.1, 1: math.nan, 2: math.inf, 3: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0, 3: math.nan})
    assert (gap.seeds, gap.broken) == (1, 2)
    assert gap.mean == pytest.approx(10.0)
    assert math.isnan(gap.error)
    assert str(paired_gap({0: math.nan}, {0: 1.0})) == "not finite"
    records = {0: {"losses": [1.0, math.nan], "validation": [(2, 1.0)]}, 1: {"losses": [1.0], "validation": [(2, 3.0)]}}
    np.testing.assert_equal(final(records), {0: math.nan, 1: 3.0})


def test_thinned_curves_are_means():
    assert thinned([1.0, 2.0, 3.0, 5.0, 7.0], 2) == [1.5, 4.0, 7.0]


def test_a_seed_that_is_on_disk_is_not_run_again(tmp_path):
    def run(seed):
        ran.append(seed)
        if seed == 2 and len(ran) == 3:
            raise KeyboardInterrupt
        return {"losses": [float(seed)]}

    ran, found = [], []
    file = RunFile(tmp_path, "a run", Schedule())
    with pytest.raises(KeyboardInterrupt):
        file.complete(range(4), run, found.append)
    # What ended before the interruption is kept, and nothing else is run.
    assert file.complete(range(4), run, found.append)[3] == {"losses": [3.0]}
    assert (ran, found) == ([0, 1, 2, 2, 3], [0, 1])
    assert RunFile(tmp_path, "a run", Schedule(steps=3)).read() == {}
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_schedules_are_for_all_steps():
    schedule = Schedule(steps=100, learning_rate=2.0)
    rates = schedule.learning_rates()
    assert rates.shape == (100,)
    assert rates.min() > 0.0
    assert rates.max() == pytest.approx(2.0, rel=1e-3)
    for name, largest in (("constant", 1.0), ("growing", 1.1**99), ("spikes", 2.0**16)):
        assert dataclasses.replace(schedule, loss_scales=name).scales().max() == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize("suite", SUITES)
def test_each_variant_differs_from_the_others(suite):
    variants = list(SUITES[suite].values())
    assert len(variants) == len(set(map(repr, variants)))


class Line(eqx.Module):
    """A linear layer, and a head that is not used: variants name it."""

    body: eqx.nn.Linear
    head: eqx.nn.Linear


@dataclasses.dataclass(frozen=True)
class Lines(AbstractTask):
    """A linear layer learns to be another: the smallest task there is."""

    @property
    def loss(self):
        return square_error

    def init(self, key):
        linear = eqx.nn.Linear(16, 8, use_bias=False, key=key)
        return Line(linear, linear)

    def batches(self, seed, steps):
        x = np.random.default_rng(seed).normal(size=(steps, self.batch, 16)).astype(np.float32)
        return x, x[..., ::2].copy()

    def validation(self, seed):
        return self.batches(99, 2)


def square_error(model, x, y):
    return jnp.mean((jax.vmap(model.body)(x) - y) ** 2)


def run_command(tmp_path, *arguments, seeds=2, variant="^delayed$|ulp"):
    """What `--curves` writes, of a model that is tiny and a validation in few batches."""
    curves = tmp_path / "curves.json"
    sizes = ["--layers=1", "--batch=64", "--steps=4", "--every=2"]
    chosen = [f"--seeds={seeds}", f"--variant={variant}", f"--out={tmp_path / 'runs'}", f"--curves={curves}"]
    recipes_train_like_bf16.main([*arguments, *sizes, *chosen, "--markdown", "--quiet"])
    return json.loads(curves.read_text())["rows"]


@pytest.mark.more
def test_the_command_prints_and_writes_what_it_measured(tmp_path, capsys):
    arguments = ["--task=digits", "--hidden=16"]
    rows = run_command(tmp_path, *arguments)
    assert [(row["case"], row["variant"]) for row in rows] == [
        ("digits", variant) for variant in ("bf16", "bf16 + 1 ulp", "delayed")
    ]
    bf16, _, delayed = rows
    gaps = [100 * (delayed["final"][seed] / bf16["final"][seed] - 1) for seed in ("0", "1")]
    assert delayed["mean"] == pytest.approx(np.mean(gaps), rel=1e-9)
    assert delayed["error"] == pytest.approx(abs(gaps[0] - gaps[1]) / 2, rel=1e-9)
    assert 0 < np.abs(gaps).max() < 5
    assert len(bf16["curves"]["0"]) == 4
    assert [step for step, _ in bf16["validation"]["0"]] == [2, 4]
    first = capsys.readouterr().out
    assert f"| {delayed['gap']} |" in first

    run_command(tmp_path, *arguments)
    assert capsys.readouterr().out == first

    # That was read and not run: planted numbers stay, also where seeds are added.
    planted = 7.0
    for path in (tmp_path / "runs").iterdir():
        content = json.loads(path.read_text())
        content["records"]["0"]["validation"][-1][1] = planted
        path.write_text(json.dumps(content))
    assert [row["final"]["0"] for row in run_command(tmp_path, *arguments)] == [planted] * 3
    _, ulp, _ = run_command(tmp_path, *arguments, seeds=3, variant="ulp")
    assert ulp["final"].keys() == {"0", "1", "2"}
    assert ulp["final"]["0"] == planted and ulp["final"]["2"] < planted


@pytest.mark.more
def test_a_run_is_the_loop_written_out():
    """Three steps of AdamW with clipping, in float64 NumPy, with a schedule and scales of the loss."""
    task, schedule = Lines(batch=8), Schedule(steps=3, every=3, learning_rate=0.1, loss_scales="growing")
    found = train(task, schedule, Variant(), 0)
    w = np.asarray(task.init(jax.random.key(0)).body.weight, float)
    first, second, losses = np.zeros_like(w), np.zeros_like(w), []
    for step, (x, y) in enumerate(zip(*(np.asarray(a, float) for a in task.batches(0, 3)), strict=True)):
        residual = x @ w.T - y
        losses.append((residual**2).mean())
        gradient = 2.0 * residual.T @ x / residual.size
        gradient /= max(1.0, np.sqrt((gradient**2).sum()))
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
        update = first / (1 - 0.9 ** (step + 1)) / (np.sqrt(second / (1 - 0.95 ** (step + 1))) + 1e-8) + 0.1 * w
        w = w - schedule.learning_rates()[step] * update
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)


@pytest.mark.more
def test_one_ulp_and_parts_of_training():
    schedule = Schedule(steps=4, every=4)
    losses = lambda *config, **variant: train(Lines(), schedule, Variant(*config, **variant), 0)["losses"]
    plain, ulp = losses(), losses(ulp=True)
    assert plain != ulp
    np.testing.assert_allclose(plain, ulp, rtol=1e-5)
    delayed, current = fp8.Fp8Config(recipe=fp8.DelayedScaling(4)), fp8.Fp8Config(recipe="current")
    switched, whole = losses(current, switches=((0.5, delayed),)), losses(current)
    assert switched[:2] == whole[:2]
    assert switched[2:] != whole[2:]
    middle = losses(None, switches=((0.5, current), (0.75, None)))
    assert middle[:2] == plain[:2]
    assert len({plain[2], middle[2], whole[2]}) == len({plain[3], middle[3], whole[3]}) == 3
    # Static scales come from calibration alone, which has to happen where the model is converted.
    static = fp8.Fp8Config(recipe="static")
    assert np.isfinite(losses(None, calibrated=True, switches=((0.5, static), (0.75, None)))).all()
    np.testing.assert_equal(np.isfinite(losses(None, switches=((0.5, static),))), [True, True, False, False])


@pytest.mark.more
def test_switches_keep_weights_and_moments():
    """Switching to the same configuration changes nothing where there is no state."""
    current = fp8.Fp8Config(recipe="current")
    losses = lambda *switches: train(Lines(), Schedule(steps=4, every=4), Variant(current, switches=switches), 0)
    np.testing.assert_allclose(losses((0.25, current), (0.75, current))["losses"], losses()["losses"], rtol=1e-6)


@pytest.mark.more
def test_a_language_model_trains(tmp_path):
    of_another_task = {"case": "digits", "variant": "bf16", "steps": 4}
    (tmp_path / "curves.json").write_text(json.dumps({"rows": [of_another_task]}))
    text = tmp_path / "text"
    text.write_bytes(source_text()[:80_000])
    kept, bf16, _, delayed = run_command(tmp_path, f"--task={text}", "--hidden=32", "--length=32")
    assert kept == of_another_task
    assert {bf16["case"], delayed["case"]} == {str(text)}
    # The first loss is that of a model that knows nothing.
    np.testing.assert_allclose(bf16["curves"]["0"][0], np.log(256), rtol=0.1)
    np.testing.assert_allclose(delayed["final"]["0"], bf16["final"]["0"], rtol=0.05)
