"""The example `examples/serve_lm.py`: from a checkpoint to a table, folders and text."""

import pytest

from examples import serve_lm
from examples.train_lm import train
from haliax_fp8.huggingface import check_folder


TINY = (
    "--steps 3 --layers 2 --hidden 32 --heads 2 --kv-heads 1 --head-dim 16 --mlp 64 --seq-len 32 --batch-size 4 "
    "--amax-history-length 4 --eval-batches 2 --sample-bytes 0 --unroll 1 --no-baseline"
).split()


def test_without_a_checkpoint(tmp_path, capsys):
    assert serve_lm.main(["--run", str(tmp_path)]) == 2
    assert "train first: python -m examples.train_lm --out" in capsys.readouterr().out


@pytest.mark.slow
def test_serves_what_was_trained(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert train.main([*TINY, "--out", str(tmp_path)]) == 0
    folder = tmp_path / "served"
    arguments = ["--run", str(tmp_path), "--export", str(folder), "--layouts", "FP8", "--bytes", "8"]
    assert serve_lm.main(arguments) == 0
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if line.split()[:1] == ["FP8"] and "kB" in line]
    # The mean change of log p from training: none.
    assert row.split()[-1] == "0.0000"
    assert "FP8 writes: 'The " in out
    assert f"\n  vllm serve {folder / 'FP8_DYNAMIC'} --max-model-len 32\n" in out, "a command in one piece"
    assert check_folder(folder / "FP8").is_sound and check_folder(folder / "BF16").is_sound
