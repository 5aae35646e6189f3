"""The example `examples/rl_weight_sync.py`: the engine samples with the weights of each round."""

import dataclasses
import os

import numpy as np
import pytest

from examples import rl_weight_sync


VLLM = os.environ.get("HALIAX_FP8_VLLM_PYTHON")


@pytest.mark.slow
def test_our_own_engine(monkeypatch):
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "head_dim": 16, "mlp": 64, "unroll": 1}
    monkeypatch.setattr(rl_weight_sync, "CONFIG", dataclasses.replace(rl_weight_sync.CONFIG, **sizes))
    rounds = rl_weight_sync.main(["--rounds", "3"])
    assert rounds[-1].reward > rounds[0].reward
    for each in rounds:
        # The folder has training's scales, so in one layer the served model may even be equal.
        assert 0.0 <= float(each.static.mean) < float(each.dynamic.mean)
        # Rows are quantized one by one, so a sample has the same numbers token by token as all at once.
        np.testing.assert_array_equal(each.engine.mismatch.mean, each.dynamic.mean)
        assert float(each.engine.mismatch.tokens) == rl_weight_sync.SAMPLES * rl_weight_sync.TOKENS
        assert 0.9 < float(each.engine.effective_sample_size) < 1.0


@pytest.mark.slow
@pytest.mark.skipif(VLLM is None, reason="HALIAX_FP8_VLLM_PYTHON names no Python; see tests/others/README.md")
def test_vllm():
    for each in rl_weight_sync.main(["--rounds", "4", "--engine-python", str(VLLM)]):
        # With the weights of an earlier round, it would be several times as far as our served model of the same folder.
        assert 0.0 < float(each.engine.mismatch.mean) < 1.5 * float(each.dynamic.mean)
