"""Reads the exports with other people's code alone: PyTorch, Transformers, compressed-tensors. Neither JAX nor us.

    python tests/others/read_exports.py FOLDER

Prints a table; exits with 1 if anything differs from what `write_exports.py` noted.
"""

import importlib.metadata
import pathlib
import sys
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline


COMPRESSED = ("FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "FP8", "FP8_TENSOR", "W8A16", "MXFP4", "MXFP4A16")
# Decompressed with scales that are divided in bfloat16.
ROUNDED = ("NVFP4", "NVFP4A16")


def main(folder: pathlib.Path) -> int:
    """Compares everything; the number of failures."""
    expected, rows = np.load(folder / "expected.npz"), []

    def note(what: str, passed: bool, figure: str) -> None:
        rows.append((what, passed, figure))
        print(f"{'ok  ' if passed else 'FAIL'} {what:45} {figure}", flush=True)

    tokens = torch.from_numpy(expected["tokens"]).long()
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder / "FP32", dtype=torch.float32)
        logits = model(tokens).logits.numpy()
    error = np.linalg.norm(logits - expected["logits"]) / np.linalg.norm(expected["logits"])
    note("float32 logits in Transformers", error < 1e-5, f"{error:.1e} relative")

    for layout in (*COMPRESSED, *ROUNDED, "HF_FP8"):
        # Some decompress to bfloat16 only; scales that bfloat16 holds make that exact up to its rounding.
        dtype = torch.bfloat16 if layout in ("MXFP8", "HF_FP8") or "FP4" in layout else torch.float32
        model = AutoModelForCausalLM.from_pretrained(folder / layout, dtype=dtype)
        with torch.no_grad():
            finite = bool(model(tokens).logits.isfinite().all())  # which also decompresses
        state, different, count = model.state_dict(), 0, 0
        for key in (key for key in expected if key.startswith(f"{layout}/")):
            ours = torch.from_numpy(expected[key]).to(dtype)
            theirs = state[key.removeprefix(f"{layout}/")]
            if layout in ROUNDED:
                ours, theirs = ours.float(), theirs.float()
                different += int(((ours - theirs).abs() > 2**-6 * ours.abs()).sum())
            else:
                different += int((ours != theirs).sum()) if theirs.dtype == dtype else ours.numel()
            count += ours.numel()
        note(f"{layout}: decompressed weights", different == 0 and finite, f"{different} of {count} differ, {dtype}")

    with safe_open(folder / "FP8" / "model.safetensors", "pt") as file:
        name = "model.layers.1.mlp.gate_proj"
        weight, scale = file.get_tensor(f"{name}.weight"), file.get_tensor(f"{name}.weight_scale")
        input_scale = file.get_tensor(f"{name}.input_scale")
    x = torch.from_numpy(expected["product/x"]).view(torch.bfloat16)
    data = (x.float() / input_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    same = bool((data.view(torch.uint8) == torch.from_numpy(expected["product/input"])).all())
    note("FP8: bytes of the quantized input", same, f"{data.numel()} bytes")
    # One scale for the whole kernel, as rows of equal scales.
    equal = bool((scale == scale[0]).all())
    product = torch._scaled_mm(data, weight.T, scale_a=input_scale, scale_b=scale[0], out_dtype=torch.bfloat16)
    share = (product == torch.from_numpy(expected["product/out"]).view(torch.bfloat16)).float().mean().item()
    note(
        "FP8: torch._scaled_mm, and our product", share >= 0.999 and equal, f"{100 * share:.2f} % of outputs bit-equal"
    )

    for layout in ("FP8_DYNAMIC", "FP8", "HF_FP8", "sharded"):
        tokenizer = AutoTokenizer.from_pretrained(folder / layout)
        exact = tokenizer("The über\n").input_ids == list("The über\n".encode())
        write = pipeline("text-generation", model=str(folder / layout), tokenizer=tokenizer)
        text = write("The ", max_new_tokens=8, do_sample=False)[0]["generated_text"]
        note(f"{layout}: tokenizer and generated text", exact and len(text) > 4, repr(text))

    read_experts(folder / "experts", tokens, expected, note)
    read_tied(folder / "tied", tokens, expected, note)
    read_layer(folder / "FP8_DYNAMIC", expected, note)

    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "compressed-tensors")}
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{name} {v}' for name, v in versions.items())}")
    return sum(not passed for _, passed, _ in rows)


def read_experts(folder: pathlib.Path, tokens: torch.Tensor, expected: Any, note: Any) -> None:
    """A mixture of experts: logits of the unquantized export, and experts that Transformers decompressed."""
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder / "BF16", dtype=torch.float32)
        logits = model(tokens).logits.numpy()
    error = np.linalg.norm(logits - expected["experts/logits"]) / np.linalg.norm(expected["experts/logits"])
    note("experts: float32 logits in Transformers", error < 1e-5, f"{error:.1e} relative")
    for layout in ("FP8_DYNAMIC", "HF_FP8"):
        try:
            model = AutoModelForCausalLM.from_pretrained(folder / layout, dtype=torch.bfloat16)
            with torch.no_grad():
                finite = bool(model(tokens).logits.isfinite().all())
            state = model.state_dict()
            names = [name for name in state if name.endswith("layers.1.mlp.experts.down_proj")]
            ours = torch.from_numpy(expected[f"experts/{layout}"]).to(torch.bfloat16)
            different = int((ours != state[names[0]]).sum()) if names else ours.numel()
            note(
                f"experts, {layout}: decompressed weights",
                different == 0 and finite,
                f"{different} of {ours.numel()} differ",
            )
        except Exception as failure:
            note(f"experts, {layout}", False, f"{type(failure).__name__}: {str(failure)[:200]}")


def read_tied(folder: pathlib.Path, tokens: torch.Tensor, expected: Any, note: Any) -> None:
    """Models without a head: logits near those of the same weights, and text that ends where the folder says."""
    for name in sorted(key.removeprefix("tied/") for key in expected if key.startswith("tied/")):
        if name.endswith("modelopt"):  # Transformers loads it without its scales.
            continue
        is_plain, ours = name == "BF16", expected[f"tied/{name}"]
        # Inputs in eight bits and in four; where they are in high precision, the noise of bfloat16.
        limit = 1e-5 if is_plain else 0.03 if "A16" in name else 0.6 if "FP4" in name else 0.2
        try:
            kind = torch.float32 if is_plain else torch.bfloat16
            model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=kind)
            with torch.no_grad():
                theirs = model(tokens).logits.float().numpy()
            error = np.linalg.norm(theirs - ours) / np.linalg.norm(ours)
            note(f"tied, {name}: logits", bool(error < limit), f"{error:.1e} relative")
            if is_plain:
                text = model.generate(tokens, max_new_tokens=24)[0, tokens.shape[1] :].numpy()
                is_same = bool(np.array_equal(text, expected[f"tied text/{name}"])) and 1 < len(text) < 24
                note("tied: text of both, and its end", is_same, str(text.tolist()))
        except Exception as failure:
            note(f"tied, {name}", False, f"{type(failure).__name__}: {str(failure)[:200]}")


def read_layer(folder: pathlib.Path, expected: Any, note: Any) -> None:
    """One layer with the same input: compressed-tensors' own forward in float32, and our product."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model(torch.zeros((1, 4), dtype=torch.long))  # which decompresses
        theirs = model.model.layers[1].mlp.down_proj(torch.from_numpy(expected["layer/x"])).numpy()
    error = np.linalg.norm(theirs - expected["layer/y"]) / np.linalg.norm(theirs)
    note("FP8_DYNAMIC: one layer, quantized inputs", error < 1e-6, f"{error:.1e} relative")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    sys.exit(min(1, main(pathlib.Path(sys.argv[1]))))
