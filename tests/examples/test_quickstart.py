"""The example `examples/quickstart.py`: it runs as a script, and FP8 learns what bf16 learns."""

import pathlib
import runpy

import jax
import numpy as np


SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "quickstart.py"


def test_a_few_steps(capsys):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        bf16, fp8 = runpy.run_path(str(SCRIPT))["main"](steps=40)
    assert len(bf16) == len(fp8) == 40
    assert fp8 != bf16, "the second model is not in FP8"
    # Rounding to E4M3 moves each product by a few percent, and the loss by less.
    np.testing.assert_allclose(fp8, bf16, rtol=0.05)
    assert max(bf16[-1], fp8[-1]) < 0.5 * min(bf16[0], fp8[0])
    printed = capsys.readouterr().out
    assert "2 of 3 linear layers in FP8" in printed
    # A quarter of the steps in each line.
    assert [line.split()[0] for line in printed.splitlines()[-6:-2]] == ["1-10", "11-20", "21-30", "31-40"]
    difference = 100 * (sum(fp8[30:]) / sum(bf16[30:]) - 1)
    assert f"FP8 ends {abs(difference):.1f} % {'above' if difference > 0 else 'below'} bf16" in printed
    assert f"{np.mean(bf16[30:]):.5f}" in printed and f"{np.mean(fp8[30:]):.5f}" in printed
