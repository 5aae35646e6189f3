"""Kernels quantized once per step, as a GPU that is not here would: no microbatch casts or transposes one again."""

import sys
from pathlib import Path

import jax
import pytest
from compiled_models import on


sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from a_third_fewer_bytes_in_microbatches import MicrobatchSizes, row  # noqa: E402


SIZES = MicrobatchSizes()
WEIGHTS = SIZES.inputs * SIZES.hidden


@pytest.mark.parametrize(("name", "device"), on(["delayed"], ["h100", "b200"]))
def test_microbatches_read_the_copies(name, device):
    """With XLA's flags, every microbatch reads two kernels of bfloat16 and writes two for fprop and one for dgrad."""
    with jax.numpy_dtype_promotion("standard"):
        each, once = (row(name, way, "XLA's defaults", device) for way in ("in each microbatch", "once"))
    assert each["fp8_flops"] == once["fp8_flops"] == 1.0
    saved = (SIZES.microbatches * (2 * 2 + 3) - (2 * 2 + 2)) * WEIGHTS
    # The copy for dgrad, transposed: read and written once.
    assert each["other_gb"] - once["other_gb"] == pytest.approx((saved - 2 * WEIGHTS) / 1e9, rel=0.01)


@pytest.mark.parametrize(("name", "device"), on(["delayed"], ["h100"]))
def test_cublaslt_finds_what_it_reads(name, device):
    """The kernel of dgrad transposed, as it lies in memory: else each microbatch would transpose it again."""
    with jax.numpy_dtype_promotion("standard"):
        each, once = (row(name, way, "cuBLASLt alone", device) for way in ("in each microbatch", "once"))
    assert each["fp8_flops"] == once["fp8_flops"] == 1.0
    # A cast reads two bytes and writes one, also if it transposes; transposing FP8 reads one and writes one.
    saved = (SIZES.microbatches * (3 + 3 + 3) - (3 + 3 + 2)) * WEIGHTS
    assert each["other_gb"] - once["other_gb"] == pytest.approx(saved / 1e9, rel=0.01)
