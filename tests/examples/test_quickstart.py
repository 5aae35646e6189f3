"""The example `examples/quickstart.py`: it runs as a script, and FP8 learns what bf16 learns."""

import pathlib
import runpy

import jax
import numpy as np
import pytest


SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "quickstart.py"


def test_a_few_steps(capsys):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        bf16, fp8, other = runpy.run_path(str(SCRIPT))["main"](steps=40)
    assert len(bf16) == len(fp8) == len(other) == 40
    assert fp8 != bf16, "the second model is not in FP8"
    # Rounding to E4M3 moves each product by a few percent, and the loss by less.
    np.testing.assert_allclose(fp8, bf16, rtol=0.05)
    assert max(bf16[-1], fp8[-1]) < 0.5 * min(bf16[0], fp8[0])
    printed = capsys.readouterr().out
    assert "2 of 3 linear layers in FP8" in printed and "No amax recorded" not in printed
    rows = [line.split() for line in printed.splitlines()[-7:-3]]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    means = np.reshape([bf16, fp8], (2, 4, 10)).mean(axis=-1)
    # Half a unit in the last place that is printed, and as much again for float32.
    np.testing.assert_allclose([[float(row[i]) for row in rows] for i in (1, 2)], means, atol=1e-5)
    percent = 100 * (means[1] / means[0] - 1)
    np.testing.assert_allclose([float(row[3]) for row in rows], percent, atol=0.1)
    ends = float(printed.partition("The losses end ")[2].partition(" % apart")[0])
    assert ends == pytest.approx(abs(percent[-1]), abs=0.1)
    by_chance = float(printed.partition(" two seeds in bf16 ")[2].partition(" %.")[0])
    of_other = np.reshape(other, (4, 10)).mean(axis=-1)
    assert by_chance == pytest.approx(abs(100 * (of_other[-1] / means[0, -1] - 1)), abs=0.1) and by_chance > 0.0
