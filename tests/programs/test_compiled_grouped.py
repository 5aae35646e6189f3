"""A mixture-of-experts layer as GPUs that are not here would run it: useful products alone, in FP8 tensor cores."""

import json
import os
import pathlib
import subprocess
import sys

import expert_parallel
import grouped_layer
import pytest
from expert_parallel import DEVICES, EXPERTS, INPUTS, OUTPUTS, ROWS
from grouped_layer import SHAPES

from haliax_fp8.preflight import compilable_devices


# Executed FLOPs, gigabytes of other launches, megabytes of temporaries; XLA's dense products take 46.2e12 and 18.1e12.
LIMITS = {
    "h100": {"8 experts": (6.4e12, 5.7, 400), "64 experts": (0.35e12, 2.0, 140)},
    "b200": {"8 experts": (6.4e12, 5.7, 400), "64 experts": (0.35e12, 2.0, 140)},
}
# On Hopper with the formats of both operands, each way round.
INSTRUCTIONS = {
    "h100": {"e4m3.e4m3", "e5m2.e4m3", "e4m3.e5m2"},
    "b200": {"tcgen05.mma.cta_group::1.kind::f8f6f4"},
}


@pytest.mark.slow
@pytest.mark.skipif(compilable_devices["h100"].missing() is not None, reason="needs XLA's compiler for NVIDIA's GPUs")
@pytest.mark.parametrize("device", LIMITS)
def test_experts_cost_what_is_useful(device):
    program = pathlib.Path(grouped_layer.__file__)
    # JAX prints the GPU kernels' machine code.
    environment = {**os.environ, "MOSAIC_GPU_DUMP_PTX": "1"}
    command = [sys.executable, program, device]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    cases = json.loads(ran.stdout.splitlines()[-1])
    for name, case in cases.items():
        assert case["products"] == [[product, "grouped f8", "bf16"] for product in ("dgrad", "fprop", "wgrad")], name
        assert case["fp8_share"] == 1.0
    for name, (flops, gigabytes, megabytes) in LIMITS[device].items():
        _, rows, inputs, outputs = SHAPES[name]
        assert cases[name]["useful_flops"] == 3 * 2 * rows * inputs * outputs < cases[name]["flops"] <= flops
        assert cases[name]["gigabytes"] <= gigabytes and cases[name]["megabytes"] <= megabytes
    words = {word for word in (ran.stdout + ran.stderr).split() if word.startswith(("wgmma.mma_async", "tcgen05.mma."))}
    assert {word.split(".f32.")[-1] for word in words} == INSTRUCTIONS[device]


@pytest.mark.slow
@pytest.mark.skipif(compilable_devices["h100"].missing() is not None, reason="needs XLA's compiler for NVIDIA's GPUs")
@pytest.mark.parametrize("device", ["h100", "b200"])
def test_each_device_multiplies_its_own_rows_and_experts(device):
    """Rows travel in FP8, gradients in bfloat16. With automatic axes kernels do, once; theirs are added up in parts."""
    command = [sys.executable, expert_parallel.__file__, device]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    cases = json.loads(ran.stdout.splitlines()[-1])
    rows, experts = ROWS // DEVICES, EXPERTS // DEVICES
    # Less than a kilobyte is a state's.
    sent = {
        "shard_map": {f"f8e4m3fn[{rows},{INPUTS}] all-to-all", f"bf16[{rows},{INPUTS}] all-to-all"},
        "automatic axes": {
            f"f8e4m3fn[{experts},{INPUTS},{OUTPUTS}] all-gather",
            f"bf16[{EXPERTS},{INPUTS},{OUTPUTS}] reduce-scatter",
        },
    }
    for name, case in cases.items():
        assert case["products"] == {"dgrad": "grouped f8", "wgrad": "grouped f8"}
        assert case["useful"] == 2 * 2 * ROWS * INPUTS * OUTPUTS // DEVICES
        # Amaxes travel as whole numbers, of which NaN is the largest.
        assert {" ".join(send) for send in case["sent"] if not {"f32[7]", "s32[7]"} & {*send}} == sent[name]
    # XLA's dense products, 16 experts for each row, would be 16 times as much; tiles of small groups are not full.
    assert cases["shard_map"]["computed"] <= 1.25 * cases["shard_map"]["useful"]
    assert cases["automatic axes"]["computed"] <= 3 * cases["automatic axes"]["useful"]


@pytest.mark.slow
@pytest.mark.skipif(compilable_devices["h100"].missing() is not None, reason="needs XLA's compiler for NVIDIA's GPUs")
def test_the_second_architecture_of_a_process_is_refused_with_the_reason():
    """JAX and XLA say only that a pass failed."""
    code = "import grouped_layer; [grouped_layer.figures(name, 4, 1024, 512, 512) for name in ('h100', 'b200')]"
    folder = pathlib.Path(grouped_layer.__file__).parent
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder)
    assert "could not be compiled for b200: JAX compiles Pallas kernels for one architecture per process" in ran.stderr
