"""PyTorch, Transformers and compressed-tensors read what we export, wherever an environment with them is named."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from haliax_fp8.huggingface import export_model, serving_tensors
from haliax_fp8.models import Transformer, TransformerConfig
from haliax_fp8.recipes import E2M1, E4M3, FolderScaling, OperandUse


SCRIPTS = Path(__file__).parents[1] / "others"
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
PYTHON = os.environ.get("HALIAX_FP8_TORCH_PYTHON")
VLLM = os.environ.get("HALIAX_FP8_VLLM_PYTHON")


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="HALIAX_FP8_TORCH_PYTHON names no Python; see tests/others/README.md")
def test_other_libraries_agree(tmp_path):
    subprocess.run([sys.executable, SCRIPTS / "write_exports.py", tmp_path], check=True)
    read = subprocess.run([str(PYTHON), SCRIPTS / "read_exports.py", tmp_path], capture_output=True, text=True)
    assert read.returncode == 0, read.stdout


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="HALIAX_FP8_TORCH_PYTHON names no Python; see tests/others/README.md")
def test_what_other_libraries_wrote_is_imported(tmp_path):
    subprocess.run([str(PYTHON), SCRIPTS / "write_checkpoints.py", tmp_path], check=True)
    read = subprocess.run([sys.executable, SCRIPTS / "read_checkpoints.py", tmp_path], capture_output=True, text=True)
    assert read.returncode == 0, read.stdout + read.stderr


# By presets of compressed-tensors: blocks and rule of scales, of weights and of dynamic inputs.
QUANTIZERS = {
    "FP8": [("weight", (0, 0), "float32")],
    "FP8_DYNAMIC": [("weight", (1, 0), "float32"), ("input", (1, 0), "float32")],
    "FP8_BLOCK": [("weight", (128, 128), "float32"), ("input", (1, 128), "float32")],
    "MXFP8": [("weight", (1, 32), "e8m0_nearest"), ("input", (1, 32), "e8m0_nearest")],
    "MXFP4": [("weight", (1, 32), "e8m0_nearest"), ("input", (1, 32), "e8m0_nearest")],
    "NVFP4": [("weight", (1, 16), "two_levels")],
}


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="HALIAX_FP8_TORCH_PYTHON names no Python; see tests/others/README.md")
def test_matrices_are_rounded_as_compressed_tensors_rounds_them(tmp_path):
    """Weights that moved, so that no scale is known."""
    subprocess.run([str(PYTHON), SCRIPTS / "write_quantizers.py", tmp_path / "theirs.npz"], check=True)
    theirs = np.load(tmp_path / "theirs.npz")
    for preset, operands in QUANTIZERS.items():
        for operand, block, rule in operands:
            use = OperandUse(E2M1 if "FP4" in preset else E4M3, contracted=(1,))
            ours = jax.jit(functools.partial(FolderScaling(block, rule).quantize, use=use))(theirs[operand])
            np.testing.assert_array_equal(ours.data.astype(np.float32), theirs[f"{preset}/{operand}"])
            np.testing.assert_array_equal(ours.scale.ravel(), theirs[f"{preset}/{operand}_scale"].ravel())


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="HALIAX_FP8_TORCH_PYTHON names no Python; see tests/others/README.md")
def test_models_of_every_family_compute_what_transformers_computes(tmp_path):
    subprocess.run([str(PYTHON), SCRIPTS / "write_models.py", tmp_path], check=True)
    read = subprocess.run([sys.executable, SCRIPTS / "read_models.py", tmp_path], capture_output=True, text=True)
    assert read.returncode == 0, read.stdout + read.stderr


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="HALIAX_FP8_TORCH_PYTHON names no Python; see tests/others/README.md")
def test_peft_computes_what_our_adapters_and_our_merged_export_do(tmp_path):
    subprocess.run([sys.executable, SCRIPTS / "write_adapters.py", tmp_path], check=True)
    read = subprocess.run([str(PYTHON), SCRIPTS / "read_adapters.py", tmp_path], capture_output=True, text=True)
    assert read.returncode == 0, read.stdout + read.stderr


@pytest.mark.slow
@pytest.mark.skipif(VLLM is None, reason="HALIAX_FP8_VLLM_PYTHON names no Python; see tests/others/README.md")
def test_an_engine_takes_tensors_while_it_runs(tmp_path):
    subprocess.run([sys.executable, SCRIPTS / "write_exports.py", tmp_path], check=True)
    run = [str(VLLM), SCRIPTS / "log_p_with_vllm.py", tmp_path]
    read = subprocess.run(run, capture_output=True, text=True)
    assert read.returncode == 0, read.stdout[-2000:] + read.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(VLLM is None, reason="HALIAX_FP8_VLLM_PYTHON names no Python; see tests/others/README.md")
def test_the_program_of_the_page_takes_weights(tmp_path):
    """An engine that took a model's weights samples what one samples that started with them."""
    (program,) = re.findall(r"```py\n(import os\n.*?)```", PAGE.read_text(), re.DOTALL)
    sizes = TransformerConfig(layers=1, hidden=128, heads=2, head_dim=64, mlp=256)
    first, second = (Transformer.init(sizes, key=jax.random.key(seed)) for seed in (0, 1))
    sampled = []
    for name, started in (("took", first), ("started", second)):
        folder = tmp_path / name
        folder.mkdir()
        export_model(started, folder / "llama", "FP8_DYNAMIC")
        save_file(dict(serving_tensors(second, "FP8_DYNAMIC")), folder / "weights.safetensors")
        (folder / "engine.py").write_text(program)
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        command = [str(VLLM), "engine.py"]
        run = subprocess.run(command, cwd=folder, env=environment, input="\n", capture_output=True, text=True)
        sampled.append(re.findall(r"^sampled \[.*\]$", run.stdout, re.MULTILINE))
        assert len(sampled[-1]) == 1, run.stdout[-2000:] + run.stderr[-2000:]
    assert sampled[0] == sampled[1]
