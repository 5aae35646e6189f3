"""Loads what `write_adapters.py` wrote into PEFT: its logits are ours, and those of the merged export.

python tests/others/read_adapters.py FOLDER

The interpreter is Python 3.11 with the packages of `requirements.txt`.
"""

import pathlib
import sys

import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM


def main(root: pathlib.Path) -> int:
    """The number of comparisons that fail."""
    failures = 0
    for folder in sorted(root.iterdir()):
        for what, (ours, theirs, is_same) in compared(folder).items():
            error = float(np.abs(ours - theirs).max() / np.abs(ours).max())
            is_right = error < 1e-5 if is_same else error > 0.01
            print(f"{'ok  ' if is_right else 'FAIL'} {folder.name}: {what}: {error:.1e}")
            failures += not is_right
    print(f"torch {torch.__version__}, peft {peft.__version__}")
    return failures


def compared(folder: pathlib.Path) -> dict[str, tuple[np.ndarray, np.ndarray, bool]]:
    """Pairs of logits, and whether they are to be equal."""
    expected = np.load(folder / "expected.npz")
    tokens = torch.from_numpy(expected["tokens"].astype(np.int64))

    def load(name: str) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()

    def logits(model: torch.nn.Module) -> np.ndarray:
        return model(tokens).logits.detach().numpy()

    adapted = peft.PeftModel.from_pretrained(load("base"), folder / "adapter").eval()
    of_peft = logits(adapted)
    return {
        "the adapter does something": (expected["base"], of_peft, False),
        "PEFT, and our model with adapters": (expected["adapter"], of_peft, True),
        "PEFT, and our merged export": (logits(load("merged")), of_peft, True),
        "PEFT, and its own merge": (logits(adapted.merge_and_unload()), of_peft, True),
    }


if __name__ == "__main__":
    sys.exit(min(1, main(pathlib.Path(sys.argv[1]))))
