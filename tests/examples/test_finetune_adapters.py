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
    loss = {name: float(line.split(": ")[1]) for line in lines for name in [line.split(":")[0].strip()] if line[:2] == "  "
            and line[2:6] in ("base", "adap", "merg")}  # fmt: skip
    assert loss["adapters"] < loss["base"] - 0.1
    assert abs(loss["merged, served in FP8"] - loss["adapters"]) < 0.05
    assert any(line.startswith("merged writes: 'def ") for line in lines)
    assert all(check_folder(out / name).is_sound for name in ("base", "merged"))
    assert json.loads((out / "adapter" / "adapter_config.json").read_text())["r"] == 4
    assert (out / "loss.png").stat().st_size > 1000
