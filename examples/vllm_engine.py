"""vLLM in a process of its own, for `examples.rl_weight_sync`: it takes weights while it runs, and samples.

    PYTHON examples/vllm_engine.py FOLDER

Needs PyTorch and vLLM, and neither JAX nor this library. FOLDER is an export. Standard input has one request on each
line, and standard output one answer, both in JSON:

    {"weights": "/dev/shm/weights.safetensors"}
    {"prompt": [84, 104, 101, 32], "samples": 64, "tokens": 16, "seed": 0}
"""

import json
import os
import sys
from collections.abc import Iterator


# Standard output is for answers. What vLLM prints goes to standard error.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

# With its engine in this process, vLLM takes an iterator. The second setting matters on a CPU alone: GiB for its cache.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402  # pyright: ignore[reportMissingImports]
from safetensors import safe_open  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402  # pyright: ignore[reportMissingImports]


def tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a safetensors file, which is mapped into memory: vLLM's own copy is the only one."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():
            yield name, file.get_tensor(name)


def take(model: LLM, path: str) -> None:
    """Gives the running engine other weights; the keys and values that it has cached are those of the old ones."""
    model.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors(path)})
    model.reset_prefix_cache()


def sample(model: LLM, prompt: list[int], samples: int, tokens: int, seed: int) -> dict[str, list[list]]:
    """The tokens of each sample, and their log-probabilities."""
    settings = SamplingParams(
        n=samples, max_tokens=tokens, seed=seed, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False
    )
    (request,) = model.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)
    samples_drawn = [list(zip(output.token_ids, output.logprobs, strict=True)) for output in request.outputs]
    return {
        "tokens": [[token for token, _ in drawn] for drawn in samples_drawn],
        "log_p": [[log_p[token].logprob for token, log_p in drawn] for drawn in samples_drawn],
    }


def main(folder: str) -> None:
    """Answers requests until standard input ends."""
    model = LLM(model=folder, dtype="bfloat16", enforce_eager=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = take(model, request["weights"]) if "weights" in request else sample(model, **request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
