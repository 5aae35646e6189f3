"""Imports what `write_checkpoints.py` wrote, and compares every tensor with its bytes in the file.

python tests/others/read_checkpoints.py FOLDER
"""

import json
import pathlib
import struct
import sys

import equinox as eqx
import jax
import ml_dtypes
import numpy as np

from haliax_fp8.huggingface import check_folder, import_model, names, serving_tensors
from haliax_fp8.models import Transformer, TransformerConfig


CONFIG = TransformerConfig(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, mlp=512, vocab=64)
E8M0 = ml_dtypes.float8_e8m0fnu
DTYPES = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "U8": np.uint8,
    "F8_E8M0": E8M0,
}
LAYOUTS = {"FP8": "FP8_TENSOR", "fp8": "HF_FP8", "fp8-ue8m0": "HF_FP8"}


def stored(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a file, by an independent reader."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, data = json.loads(data[8 : 8 + length]), data[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


def equal(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether bytes are equal; or values, if it is a scale in bfloat16 or E8M0, which we write in float32."""
    if theirs.dtype in (ml_dtypes.bfloat16, E8M0) and ours.dtype == np.float32:
        theirs = theirs.astype(np.float32)
    return (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) and ours.tobytes() == theirs.tobytes()


def main(root: pathlib.Path) -> int:
    """The number of folders in which something differs."""
    abstract = eqx.filter_eval_shape(lambda: Transformer.init(CONFIG, key=jax.random.key(0)))
    failures = 0
    for folder in sorted(root.iterdir()):
        theirs = stored(folder / "model.safetensors")
        sound = not check_folder(folder).errors
        for weights in ("frozen", "served"):
            model = import_model(folder, abstract, names=names.LLAMA, weights=weights)
            ours = dict(serving_tensors(model, LAYOUTS.get(folder.name, folder.name), names=names.LLAMA))
            same = sum(name in ours and equal(ours[name], tensor) for name, tensor in theirs.items())
            print(f"{folder.name}, {weights}: {same} of {len(theirs)} tensors equal, {len(ours)} ours; check: {sound}")
            failures += not (same == len(theirs) == len(ours) and sound)
    return failures


if __name__ == "__main__":
    sys.exit(min(1, main(pathlib.Path(sys.argv[1]))))
