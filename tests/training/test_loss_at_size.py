"""benchmarks/loss_at_75_million_weights.py at a toy size: a comparison, and calls that add to it."""

import json
import sys
from pathlib import Path

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
