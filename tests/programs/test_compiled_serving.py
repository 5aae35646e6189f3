"""Models for inference, as a GPU that is not here would run them: weights read as they are stored, and never copied."""

import dataclasses
import sys
from pathlib import Path

import jax
import pytest
from compiled_models import on


sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from decode_reads_half_the_bytes import row, served  # noqa: E402
from lib.models import LLAMA_8B  # noqa: E402


# Nothing is allocated, and programs are as large as those of smaller layers, which XLA fuses in other ways.
SIZES = dataclasses.replace(LLAMA_8B, llama=dataclasses.replace(LLAMA_8B.llama, layers=2))
WEIGHTS = sum(x.size for x in jax.tree.leaves(served("BF16", SIZES)) if x.ndim > 1)


@pytest.mark.parametrize(("layout", "device"), on(["FP8", "W8A16"], ["h100"]))
def test_kernels_are_not_copied(layout, device):
    """For one row: a byte for each weight, and beside them what activations take."""
    quantized, bf16 = (row(name, 1, "XLA's defaults", device, SIZES) for name in (layout, "BF16"))
    assert quantized["fp8"] == (quantized["products"] if layout == "FP8" else 0)
    assert quantized["arguments"] == pytest.approx(WEIGHTS, rel=0.02) and bf16["arguments"] >= 2 * WEIGHTS
    assert quantized["temporaries"] - bf16["temporaries"] < 0.03 * WEIGHTS
    assert quantized["others"] < 0.5 * WEIGHTS


@pytest.mark.parametrize(("layout", "device"), on(["FP8"], ["h100"]))
def test_what_unstacking_is_for(layout, device):
    """In a loop, each kernel is copied before it is multiplied: read and written once more."""
    apart, in_loop = (
        row(layout, 16, "XLA's defaults", device, SIZES, stacked=True, unstack=unstack) for unstack in (True, False)
    )
    assert apart["fp8"] == apart["products"] > 0
    assert in_loop["others"] - apart["others"] > WEIGHTS
