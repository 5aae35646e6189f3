"""What devices send each other in steps for eight GPUs that are not here: kernels in FP8, and how often."""

import sys
from pathlib import Path

import jax
import pytest
from compiled_models import on


sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from kernels_travel_once_in_fp8 import CASES, TINY, row  # noqa: E402


WEIGHTS = sum(x.size for x in jax.tree.leaves(CASES["FSDP, bf16"].model(TINY)) if x.ndim > 1)
OF_MLP = sum(x.size for x in jax.tree.leaves(CASES["MLP, 4 microbatches, bf16"].model(TINY)))
EXPECTED = {
    # Half of bf16's; twice in a block that is recomputed, as bf16's are.
    "FSDP": WEIGHTS,
    "FSDP, kernels quantized again": 2 * WEIGHTS,
    "FSDP, scan + checkpointing": 2 * WEIGHTS,
    "MLP": OF_MLP,
    "MLP, 4 microbatches": 4 * OF_MLP,
    "MLP, kernels quantized once": 4 * OF_MLP,
    "MLP, kernels gathered once": OF_MLP,
}


@pytest.mark.parametrize("name, device", on(EXPECTED, ["h100"]))
def test_kernels_travel_in_fp8(name, device):
    with jax.numpy_dtype_promotion("standard"):
        figures = row(CASES[name], device, TINY)
    # A byte per weight; norms and their like travel in bfloat16.
    assert figures["gathered_fp8"] == pytest.approx(EXPECTED[name], rel=0.02)
    assert figures["gathered_wider"] <= 0.02 * WEIGHTS
    # One of the amaxes, and one of the loss with the norm of the gradients.
    assert name != "FSDP" or figures["reductions"] == 2


@pytest.mark.parametrize("name, device", on(["data-parallel"], ["h100"]))
def test_replicated_kernels_are_not_kept(name, device):
    """The same memory as if every kernel were quantized again; kept kernels would take a byte per weight more."""
    with jax.numpy_dtype_promotion("standard"):
        by_default, again = (row(CASES[case], device, TINY) for case in (name, f"{name}, kernels quantized again"))
    assert by_default == again


@pytest.mark.parametrize("name, device", on(["FSDP, current scaling"], ["h100"]))
def test_amaxes_of_all_kernels_are_one_reduction(name, device):
    """Each block has eight tensors between products whose amax the next one waits for; and there is one of the loss."""
    with jax.numpy_dtype_promotion("standard"):
        assert row(CASES[name], device, TINY)["reductions"] == 2 * 8 + 1 + 1


@pytest.mark.parametrize("name, device", on(["reduced once, in float32", "reduced once, in bf16"], ["h100"]))
def test_gradients_travel_once(name, device):
    """With four microbatches, in the dtype asked for: a quarter of bf16's bytes, or half in float32."""
    (case,) = (case for known, case in CASES.items() if known.endswith(name))
    with jax.numpy_dtype_promotion("standard"):
        figures = row(case, device, TINY)
    assert figures["scattered"] == pytest.approx((4 if "float32" in name else 2) * OF_MLP, rel=0.02)
    assert figures["gathered_wider"] <= 0.02 * OF_MLP
    # One of the amaxes, one of the loss, and one of the gradients' norm.
    assert figures["reductions"] <= 3
    assert figures["fp8_flops"] == 1.0


# A whole activation between layers, in bfloat16, of devices that divide features.
ACTIVATION = 2 * TINY.tokens * TINY.config.hidden
LIMITS = {
    # Two sums for each half of a block, forward and backward: whichever layers read its input.
    "tensor-parallel": 2 * 8 * ACTIVATION,
    # Scattered; and gathered in FP8: what enters seven layers, or the output's gradient of two of them.
    "tensor-parallel + sequence": (8 + 14 / 2) * ACTIVATION,
}


@pytest.mark.parametrize("name, device", on(LIMITS, ["h100"]))
def test_gradients_of_one_tensor_are_one_sum(name, device):
    with jax.numpy_dtype_promotion("standard"):
        figures = row(CASES[name], device, TINY)
    # Amaxes of rows are no less than an activation's part here, where rows are short.
    assert figures["gathered_wider"] < ACTIVATION / 2
    assert figures["wire"] <= 7 / 8 * LIMITS[name] + ACTIVATION
