"""explain_folder: what a checkpoint holds, what its products are, and who loads it."""

import dataclasses
import os
import pathlib
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from .._printing import Printable, new_table
from .check import is_fp8, layout_name
from .files import TensorFolder
from .layout import CACHE_SCALES, FLOATS, SCALES, Layout, read_layout


class Engine(NamedTuple):
    """What becomes of a layout in an engine.

    Args:
        layouts: The layouts, by their names.
        engine: The engine and its version.
        hardware: Where it runs.
        verdict: What becomes of the checkpoint, and by what.
        evidence: How that is known.
    """

    layouts: str
    engine: str
    hardware: str
    verdict: str
    evidence: str


_EMULATED, _GARBAGE = "rounds as FP8 does, multiplies in high precision", "computes garbage, silently"
_FP8 = "multiplies in FP8"
_CPU = "vLLM 0.32.0", "CPU, AVX-512 without AMX"
_TRANSFORMERS = "Transformers 5.23.0, compressed-tensors 0.20.0", "CPU"
_TPU, _SGLANG = ("tpu-inference b8692ff, flax_nnx", "TPU"), ("sglang-jax cddbf6f", "TPU, GPU")
_RUN, _LOADED, _CODE, _SAYS = "seen running", "seen loading", "its source", "its documentation"
_ON_GPUS = "FP8 FP8_TENSOR FP8_DYNAMIC FP8_BLOCK HF_FP8 modelopt"

engines = (
    Engine("FP8_DYNAMIC", *_CPU, f"{_FP8}; ChannelWiseTorchFP8ScaledMMLinearKernel, torch._scaled_mm", _RUN),
    Engine("FP8", *_CPU, "refuses; loads, but its CPU kernel fails on an input scale without axes", _LOADED),
    Engine("FP8_TENSOR modelopt", *_CPU, "refuses; loads, but static_scaled_fp8_quant is missing", _LOADED),
    Engine("FP8_BLOCK HF_FP8", *_CPU, "refuses; needs AMX", _RUN),
    Engine("W8A16 MXFP8", *_CPU, "refuses; no CPU kernel", _RUN),
    Engine("FP8 FP8_TENSOR FP8_DYNAMIC FP8_BLOCK", *_TRANSFORMERS, f"{_EMULATED}; casts scales to bfloat16", _RUN),
    Engine("W8A16", *_TRANSFORMERS, "dequantizes; in bfloat16 it casts scales to bfloat16 before", _RUN),
    Engine("MXFP8", *_TRANSFORMERS, f"{_EMULATED}; in bfloat16 alone: dtype=float32 is an error", _RUN),
    Engine("HF_FP8", "Transformers 5.23.0, accelerate 1.15.0", "CPU", "dequantizes; to bfloat16 alone", _RUN),
    Engine("modelopt", "Transformers 5.23.0", "CPU", f"{_GARBAGE}; loads the data without their scales", _RUN),
    Engine(_ON_GPUS, "vLLM 0.32.0", "NVIDIA from 8.9 on", _FP8, _SAYS),
    Engine("W8A16", "vLLM 0.32.0", "NVIDIA from 8.0 on", "dequantizes; Marlin, in the GPU kernel", _SAYS),
    Engine("MXFP8", "vLLM 0.32.0", "NVIDIA Blackwell", _FP8, _SAYS),
    Engine(_ON_GPUS, "SGLang", "NVIDIA from 8.9 on", _FP8, _SAYS),
    Engine("modelopt", "TensorRT-LLM", "NVIDIA from 8.9 on", _FP8, _SAYS),
    Engine("FP8_DYNAMIC HF_FP8", *_TPU, f"{_FP8}; layers of Qwen2, Qwen3, Gemma 4, DeepSeek; not Llama's", _CODE),
    Engine("FP8_BLOCK", *_TPU, "refuses; blocks of merged layers (gate and up) are an error", _CODE),
    Engine("FP8_TENSOR", *_TPU, "refuses; a scale is reshaped to one for each output", _CODE),
    Engine("W8A16 MXFP8", *_TPU, "refuses; NotImplementedError", _CODE),
    Engine("FP8_DYNAMIC HF_FP8", *_SGLANG, f"{_FP8}; needs format float-quantized, or fp8", _CODE),
    Engine("MXFP8", *_SGLANG, f"{_GARBAGE}; ignores other formats, with a warning", _CODE),
    Engine("HF_FP8", "MaxText, from 2026-08 on", "TPU, GPU", "dequantizes; reads files with PyTorch", _SAYS),
)
"""Findings of November 2026; other versions of engines may differ."""


class Held(NamedTuple):
    """How many tensors of a kind there are, and the bytes that they take."""

    count: int = 0
    bytes: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Printable):
    """What a folder holds.

    Args:
        directory: The folder.
        quantization: What its configuration says; None if nothing is quantized.
        held: The tensors: weights in FP8, scales, those in high precision, and those of unknown types.
        engines: The engines that load it.
        unknown_types: The names of unknown types in the files.
        scale_types: The dtypes of the scales of weights.
    """

    directory: pathlib.Path
    quantization: Layout | None
    held: dict[str, Held]
    engines: tuple[Engine, ...]
    unknown_types: tuple[str, ...] = ()
    scale_types: tuple[str, ...] = ()

    @property
    def layout(self) -> str:
        """The name of the layout."""
        return layout_name(self.quantization)

    def __rich__(self) -> RenderableType:
        """A table of what is there, and one of engines."""
        table = new_table(f"{self.directory.resolve().name}: {self.layout}", self._products)
        for column in ("tensors", "number", "bytes", "format"):
            table.add_column(column, overflow="fold", justify="right" if column in ("number", "bytes") else "left")
        formats = {_WEIGHTS: "E4M3", _SCALES: self._scales, _UNKNOWN: ", ".join(self.unknown_types)}
        for kind, (count, bytes) in self.held.items():
            if count or kind != _UNKNOWN:
                table.add_row(kind, str(count), f"{bytes:,}", Text(formats.get(kind, "") if count else ""))
        all = Held(*map(sum, zip(*self.held.values(), strict=True)))
        plain = all.bytes + self.held[_WEIGHTS].bytes - self.held[_SCALES].bytes
        table.add_row("all", str(all.count), f"{all.bytes:,}", f"{all.bytes / max(1, plain):.3f} of bf16")
        if self.quantization is None:
            return table  # Engines load it as they load any other.
        if not self.engines:
            return Group(table, Text("It is not known which engines read this layout."))
        loading = new_table("Engines that load it", "Other versions of engines may differ.")
        for column in ("engine", "hardware", "what it does", "known from"):
            loading.add_column(column, overflow="fold")
        for row in self.engines:
            loading.add_row(*map(Text, row[1:]))
        return Group(table, loading)

    @property
    def _scales(self) -> str:
        if (found := self.quantization) is None:
            return ""
        one = {"tensor": "one for a weight", "channel": "one for an output"}.get(found.strategy)
        one = one or f"one for {found.size} elements"
        floats = [name for name in self.scale_types if name in map(str, FLOATS)]
        kinds = ["E8M0"] if len(floats) < max(1, len(self.scale_types)) else []
        kinds += [f"powers of two in {' and '.join(floats)}"] if floats else []
        return f"{one}, {', and '.join(kinds)}" if found.exponents else one

    @property
    def _products(self) -> str:
        if self.quantization is None:
            return "All products are in high precision."
        if self.quantization.inputs is None:
            return "Products: weights are dequantized, inputs stay in high precision."
        return f"Products: E4M3 by E4M3; inputs have {self.quantization.inputs}."


_WEIGHTS, _SCALES, _OTHERS, _UNKNOWN = "weights in FP8", "scales", "in high precision", "of unknown types"


def explain_folder(directory: str | os.PathLike[str], *, follow_links: bool = False) -> Explanation:
    """Says what a folder holds: layout, formats of products, bytes; and which engine does what with it.

    Only headers and the configuration are read. `check_folder` says whether the tensors are as they should be.

    Args:
        directory: The folder.
        follow_links: As in `check_folder`.

    Raises:
        BrokenCheckpoint: If the folder cannot be read; names the file, and the tensor if it is one.
    """
    folder = TensorFolder.open(directory, follow_links=follow_links)
    layout, held = read_layout(folder), dict.fromkeys((_WEIGHTS, _SCALES, _OTHERS, _UNKNOWN), Held())
    unknown, of_scales = set[str](), set[str]()
    for name, stored in folder.tensors.items():
        last, kind = name.rpartition(".")[2], _OTHERS
        if not stored.is_known:
            kind = _UNKNOWN
            unknown.add(stored.type)
        elif is_fp8(stored):
            kind = _WEIGHTS
        elif last in SCALES + CACHE_SCALES:
            kind = _SCALES
        if layout is not None and last in layout.scale_names:
            of_scales.add(stored.shown)
        held[kind] = Held(held[kind].count + 1, held[kind].bytes + stored.bytes)
    rows = tuple(row for row in engines if layout is not None and layout.name in row.layouts.split())
    return Explanation(pathlib.Path(directory), layout, held, rows, tuple(sorted(unknown)), tuple(sorted(of_scales)))
