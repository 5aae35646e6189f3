"""vLLM's build for CPUs generates text from an export, with its own FP8 CPU kernels and without changes to its code.

    python tests/others/generate_with_vllm.py FOLDER/FP8_DYNAMIC

vLLM 0.32 asks for other versions of Transformers and compressed-tensors than `read_exports.py`: see `README.md`.
"""

import os
import sys


os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")

from vllm import LLM, SamplingParams  # noqa: E402  (reads the settings above when it is imported)


model = LLM(model=sys.argv[1], dtype="bfloat16", max_model_len=128, enforce_eager=True)
output = model.generate(["The "], SamplingParams(temperature=0, max_tokens=16))[0].outputs[0]
print(repr(output.text), output.token_ids)
assert len(output.token_ids) == 16
