"""The example `examples/quickstart.py`: it runs as a script, and FP8 learns what bf16 learns."""

import pathlib
import re
import runpy

import jax
import numpy as np


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
    ends = np.array([bf16, fp8, other])[:, -10:].mean(axis=1)
    falls = re.search(r"falls from (\S+) to (\S+) in bf16, and to (\S+) in FP8\.", printed)
    # Half a unit in the last place that is printed, and as much again for float32.
    np.testing.assert_allclose([float(x) for x in falls.groups()], [bf16[0], *ends[:2]], atol=1e-4)
    apart = re.search(r"end (\S+) % apart, two seeds in bf16 (\S+) %", printed)
    percent = 100 * np.abs(ends[1:] / ends[0] - 1)
    np.testing.assert_allclose([float(x) for x in apart.groups()], percent, atol=0.1)
    assert percent[1] > 0.0
