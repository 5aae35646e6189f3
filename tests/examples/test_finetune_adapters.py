"""The example `examples/finetune_adapters.py`: from an FP8 folder to adapters, a merged folder, a picture and text."""

import json

import pytest

from examples import finetune_adapters
from haliax_fp8.huggingface import check_folder


@pytest.mark.slow
def test_finetunes_a_folder(tmp_path, capsys):
    out = tmp_path / "out"
    assert finetune_adapters.main(["--out", str(out), "--steps", "25", "--rank", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip().split(": ") for line in lines if line.startswith("  ")]
    loss = {row[0]: float(row[1]) for row in rows if len(row) == 2 and row[1][:1].isdigit()}
    assert loss["adapters"] < loss["base"] - 0.1
    assert abs(loss["merged, served in FP8"] - loss["adapters"]) < 0.05
    assert any(line.startswith("merged writes: 'def ") for line in lines)
    assert all(check_folder(out / name).is_sound for name in ("base", "merged"))
    assert json.loads((out / "adapter" / "adapter_config.json").read_text())["r"] == 4
    assert (out / "loss.png").stat().st_size > 1000
