"""vLLM's log-probabilities of an export in FP8 against ours; and those after it took tensors while it ran.

    python tests/others/log_p_with_vllm.py FOLDER

FOLDER is what `write_exports.py` wrote. Exits with 1 if the engine, given the stream of another model, computes other
bits than from that model's folder. It imports neither JAX nor us.
"""

import os
import pathlib
import sys


os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402  (reads the settings above when it is imported)


DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float32": torch.float32}


def engine(folder: pathlib.Path) -> LLM:
    """The engine, with an export."""
    return LLM(model=str(folder), dtype="bfloat16", max_model_len=128, enforce_eager=True, max_logprobs=256, seed=0)


def log_p(model: LLM, tokens: list[int]) -> np.ndarray:
    """Of every byte at every position but the first, `[position, byte]`."""
    parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=256)
    log_probs = model.generate([{"prompt_token_ids": tokens}], parameters)[0].prompt_logprobs
    return np.array([[position[byte].logprob for byte in range(256)] for position in log_probs[1:]], np.float32)


def stream(path: pathlib.Path) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors as `serving_tensors` yielded them."""
    with np.load(path) as file:
        dtypes = dict(zip(file["names"].tolist(), file["dtypes"].tolist(), strict=True))
        return [(name, torch.from_numpy(file[f"bits/{name}"]).view(DTYPES[dtypes[name]])) for name in dtypes]


def main(root: pathlib.Path) -> int:
    """1 if a reloaded engine computes other bits."""
    expected = np.load(root / "expected.npz")
    tokens = expected["tokens"][0].tolist()
    model = engine(root / "FP8_DYNAMIC")
    of_vllm = log_p(model, tokens)
    for name in ("served", "training", "plain"):
        difference = np.abs(of_vllm - expected[f"log_p/{name}"][:-1])
        same = (of_vllm.argmax(1) == expected[f"log_p/{name}"][:-1].argmax(1)).mean()
        print(
            f"vLLM, FP8_DYNAMIC, and ours, {name}: log p differs by {difference.mean():.4f} in the mean, "
            f"{difference.max():.4f} at most; {same:.0%} of greedy bytes"
        )
    floor = np.abs(expected["log_p/training, rounded otherwise"] - expected["log_p/training"])
    print(f"the floor, training rounded otherwise: {floor.mean():.4f} in the mean, {floor.max():.4f} at most")
    model.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(stream(root / "stream.npz"))})
    reloaded = log_p(model, tokens)
    from_disk = log_p(engine(root / "other"), tokens)
    changed, same = bool((reloaded != of_vllm).any()), bool((reloaded == from_disk).all())
    print(f"reload_weights with serving_tensors: changed {changed}, bit-equal to the folder {same}")
    return 0 if changed and same else 1


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
