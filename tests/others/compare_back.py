"""Compares what `read_models.py` exported in BF16 with what it had loaded, in Transformers.

    python tests/others/compare_back.py FOLDER BACK

Exits with 1 unless each model has the same tensors, and computes the same, bit for bit.
"""

import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM
from write_models import TOKENS


def tensors_and_logits(folder: pathlib.Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A model's weights in BF16, and what it computes with them in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        return weights, model.to(torch.float32)(TOKENS).logits


def main(root: pathlib.Path, back: pathlib.Path) -> int:
    """The number of models that differ."""
    failures = 0
    for folder in sorted(back.iterdir()):
        (before, expected), (after, logits) = tensors_and_logits(root / folder.name), tensors_and_logits(folder)
        same_weights = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        same = same_weights and torch.equal(expected, logits)
        print(f"{'ok  ' if same else 'FAIL'} {folder.name}: {len(after)} tensors, logits {logits.abs().max():.3g}")
        failures += not same
    return failures


if __name__ == "__main__":
    sys.exit(min(1, main(*map(pathlib.Path, sys.argv[1:]))))
