"""Benchmarks of training: a comparison of losses at a toy size, and what others count with."""

import json
import sys
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest


sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(150):
        (folder / f"{index}.md").write_text(f"Chapter {index}. " + "It was the best of times. " * 40)
    (folder / "copy.md").write_text((folder / "0.md").read_text())
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_runs_of_two_calls_are_compared_in_one_file(tmp_path, folder, capsys):
    from loss_at_75_million_weights import main

    results = tmp_path / "results.json"
    asked = lambda *runs, steps=6: main(
        ["--smoke", "--quiet", "--bytes", "20000", "--json", str(results), "--markdown"]
        + ["--folder", str(folder), "--steps", str(steps), "--runs", *runs]
    )
    asked("bf16:0", "delayed+first_quarter_in_bf16:0")
    asked("delayed:0")
    content = json.loads(results.read_text())
    runs = content["runs"]
    assert set(runs) == {"bf16:0", "delayed:0", "delayed+first_quarter_in_bf16:0"}
    # The variants share weights and batches, and the one that starts in bf16 is bf16 until it is converted.
    assert runs["bf16:0"]["losses"][:3] == runs["delayed+first_quarter_in_bf16:0"]["losses"][:3]
    assert runs["bf16:0"]["losses"] != runs["delayed:0"]["losses"]
    assert all(len(run["losses"]) == 6 and run["losses"][-1] < run["losses"][0] for run in runs.values())
    loss = {name: run["validations"][-1][1] for name, run in runs.items()}
    gap = 100 * (loss["delayed:0"] / loss["bf16:0"] - 1)
    assert f"| delayed | 0 | 6 | {loss['delayed:0']:.4f} | {gap:+.2f} % |" in capsys.readouterr().out
    # One of two equal files was read.
    names = {line.split("  ")[-1] for line in results.with_suffix(".files.txt").read_text().splitlines()}
    assert len({Path(name).name for name in names} & {"0.md", "copy.md"}) <= 1

    with pytest.raises(ValueError, match="steps=6"):
        asked("delayed:0", steps=3)
    assert json.loads(results.read_text()) == content


@pytest.mark.usefixtures("standard_promotion")
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
