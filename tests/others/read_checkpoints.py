"""Imports what `write_checkpoints.py` wrote, and compares every tensor with its bytes in the file.

python tests/others/read_checkpoints.py FOLDER
"""

import dataclasses
import json
import pathlib
import struct
import sys
import tempfile

import equinox as eqx
import jax
import ml_dtypes
import numpy as np

from haliax_fp8.huggingface import check_folder, convert_folder, import_model, names, serving_tensors
from haliax_fp8.models import Transformer, TransformerConfig
from haliax_fp8.recipes import E2M1, E4M3, MXFP8Scaling, OperandUse


CONFIG = TransformerConfig(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, mlp=512, vocab=64)
E8M0 = ml_dtypes.float8_e8m0fnu
DTYPES = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "U8": np.uint8,
    "F8_E8M0": E8M0,
}
TIED = dataclasses.replace(CONFIG, tied_head=True)
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


def dequantized(folder: pathlib.Path, abstract: Transformer, theirs: dict[str, np.ndarray]) -> int:
    """Whether weights in four bits are not their codes times their scales, in float32."""
    model = import_model(folder, abstract, names=names.LLAMA)
    ours, same, count = dict(serving_tensors(model, "BF16", names=names.LLAMA, dtype=None)), 0, 0
    for name in (name.removesuffix("_packed") for name in theirs if name.endswith("weight_packed")):
        codes, scale = theirs[f"{name}_packed"], theirs[f"{name}_scale"]
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        both = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
        data = values[both & 7] * np.where(both & 8, np.float32(-1), np.float32(1))
        if scale.dtype == np.uint8:
            scale = np.exp2(scale.astype(np.float32) - 127)
        else:
            scale = scale.astype(np.float32) / theirs[f"{name}_global_scale"]
        same += np.array_equal(ours[name], data * np.repeat(scale, data.shape[1] // scale.shape[1], 1))
        count += 1
    print(f"{folder.name}, dequantized: {same} of {count} weights are codes times scales, bit for bit")
    return same != count or not count


def there_and_back(folder: pathlib.Path) -> int:
    """Whether MXFP4 in FP8, in blocks of 128x128, does not give the bytes of the original again."""
    with tempfile.TemporaryDirectory() as name:
        there = convert_folder(folder, f"{name}/there", "HF_FP8")
        back = convert_folder(f"{name}/there", f"{name}/back", "MXFP4")
        ours, theirs = (stored(pathlib.Path(x) / "model.safetensors") for x in (f"{name}/back", folder))
    same = sum(x.tobytes() == ours[name].tobytes() for name, x in theirs.items())
    print(f"{folder.name} -> HF_FP8 -> MXFP4: exact {there.is_exact and back.is_exact}, {same} of {len(theirs)} equal")
    return not (there.is_exact and back.is_exact and same == len(theirs) == len(ours))


def loses_the_head(folder: pathlib.Path) -> bool:
    """Whether a conversion does not leave the head alone, which the original does, and which has no tensor."""
    with tempfile.TemporaryDirectory() as name:
        convert_folder(folder, f"{name}/new", "FP8_BLOCK")
        configs = [json.loads((path / "config.json").read_text()) for path in (folder, pathlib.Path(name, "new"))]
    ignored = [config["quantization_config"]["ignore"] for config in configs]
    print(f"{folder.name}, converted: ignored before and after {ignored}")
    return not all("lm_head" in names for names in ignored)


def scale_rounding(file: pathlib.Path) -> int:
    """Whether a scale of `MXFP8Scaling(scale_rounding="nearest")` is not that of compressed-tensors."""
    theirs, failures = np.load(file), 0
    blocks = np.zeros((theirs["amax"].size, 32), np.float32)
    blocks[:, 0] = theirs["amax"]
    for format, key in ((E2M1, "bits4"), (E4M3, "bits8")):
        ours = MXFP8Scaling(scale_rounding="nearest").quantize(blocks, OperandUse(format, contracted=(1,))).scale
        exponents = (np.asarray(ours)[:, 0].view(np.uint32) >> 23).astype(np.uint8)
        same = int((exponents == theirs[key].astype(np.uint8)).sum())
        print(f"scales in {format}: {same} of {exponents.size} equal")
        failures += same != exponents.size
    return failures


def main(root: pathlib.Path) -> int:
    """The number of folders in which something differs."""
    of = lambda config: eqx.filter_eval_shape(lambda: Transformer.init(config, key=jax.random.key(0)))
    failures = scale_rounding(root / "scale_rounding.npz") + there_and_back(root / "MXFP4")
    for folder in sorted(path for path in root.iterdir() if (path / "config.json").exists()):
        theirs, abstract = stored(folder / "model.safetensors"), of(TIED if folder.name.endswith("-tied") else CONFIG)
        sound = not check_folder(folder).errors
        in_four = any(name.endswith("weight_packed") for name in theirs)
        if in_four:
            failures += dequantized(folder, abstract, theirs)
        if folder.name == "mixed":  # It has no layout to be written in.
            failures += not sound
            continue
        if folder.name.endswith("-tied"):
            failures += loses_the_head(folder)
        for weights in ("frozen",) if in_four else ("frozen", "served"):
            model = import_model(folder, abstract, names=names.LLAMA, weights=weights)
            layout = LAYOUTS.get(folder.name, folder.name.removesuffix("-tied"))
            ours = dict(serving_tensors(model, layout, names=names.LLAMA))
            same = sum(name in ours and equal(ours[name], tensor) for name, tensor in theirs.items())
            print(f"{folder.name}, {weights}: {same} of {len(theirs)} tensors equal, {len(ours)} ours; check: {sound}")
            failures += not (same == len(theirs) == len(ours) and sound)
    return failures


if __name__ == "__main__":
    sys.exit(min(1, main(pathlib.Path(sys.argv[1]))))
