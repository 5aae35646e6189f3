"""PyTorch, Transformers and compressed-tensors read what we export, wherever an environment with them is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


SCRIPTS = Path(__file__).parents[1] / "others"
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
