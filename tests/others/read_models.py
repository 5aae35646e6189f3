"""Loads what `write_models.py` wrote: our logits are Transformers', or an error names the key.

    python tests/others/read_models.py FOLDER [BACK]

With BACK, each model is also exported there in BF16, for `compare_back.py`.
"""

import json
import pathlib
import sys

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from haliax_fp8.huggingface import check_folder, export_model, load


LIMIT = 2e-5


def main(root: pathlib.Path, back: pathlib.Path | None = None) -> int:
    """The number of folders that load as another model than Transformers', or are refused for another reason."""
    failures = 0
    for folder in sorted(root.iterdir()):
        family, key, *_ = folder.name.split("--")
        expected = json.loads((folder / "logits.json").read_text())
        try:
            with jax.default_matmul_precision("highest"):
                model = load(folder, dtype=jnp.float32)
                logits = model(hax.named(jnp.array(expected["tokens"]), ("batch", "position")))
        except ValueError as error:
            names_key = bool(key) and any(part in str(error) for part in (key, "rope_type", "max_length"))
            print(f"{'ok  ' if names_key else 'FAIL'} {family} {key}: refused: {error}")
            failures += not names_key
            continue
        logits = np.asarray(logits.rearrange(("batch", "position", "vocab")).array)
        reference = np.array(expected["logits"], np.float32)
        error = float(np.abs(logits - reference).max() / np.abs(reference).max())
        print(f"{'ok  ' if error < LIMIT else 'FAIL'} {family} {key}: logits differ by {error:.1e}")
        failures += error >= LIMIT
        if errors := check_folder(folder).errors:
            print(f"FAIL {family} {key}: check calls it broken: {errors[0]}")
            failures += 1
        if back is not None:
            export_model(load(folder, dtype=jnp.bfloat16), back / folder.name, "BF16")
    return failures


if __name__ == "__main__":
    sys.exit(min(1, main(*map(pathlib.Path, sys.argv[1:]))))
