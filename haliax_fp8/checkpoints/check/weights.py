"""The FP8 weights of a folder, and their scales."""

import math
import re
from collections.abc import Iterator

import numpy as np

from ...layers.tensor_names import SAME_INPUT, WEIGHT, is_embedding, is_norm
from ..files import TensorFolder
from ..files.header import Stored
from ..layouts.quantization import CheckpointQuantization
from .report import Fault
from .values import BF16, E4M3, E8M0, amaxes, not_finite


SCALES = ("weight_scale", "weight_scale_inv", "input_scale", "activation_scale")
CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "prob_scale")
OF_INPUTS = ("input_scale", "activation_scale")

FLOATS = (np.dtype(np.float32), BF16, np.dtype(np.float16))
BYTES = (np.dtype(np.uint8), E8M0)

# A weight whose data, times their scales, are as large as this has lost its scales, or was quantized twice.
_LARGE = 112.0

_LIMIT = 448.0

# What models of Hugging Face call tables of embeddings, and nothing else.
_TABLES = re.compile(
    r"(^|\.)(embed_tokens|embed_positions|tok_embeddings|(word|position)_embeddings|wte|wpe)$|^shared$"
)
_UNLIKELY = (
    "its name is like that of an embedding or a norm, which engines read without scales; "
    "if it is a linear layer, ignore this"
)


def is_fp8(stored: Stored) -> bool:
    """Whether a tensor is in one of the 8-bit formats of floating point."""
    return stored.dtype.itemsize == 1 and stored.dtype.name.startswith("float8") and stored.dtype != E8M0


def weight_faults(
    folder: TensorFolder, quantization: CheckpointQuantization | None, ignored: set[str]
) -> Iterator[Fault]:
    """What is wrong with the weights that are in FP8, and with those that should be.

    Args:
        folder: The folder.
        quantization: What its configuration says.
        ignored: The layers that it leaves alone.
    """
    for name, stored in folder.tensors.items():
        layer = name.removesuffix(WEIGHT)
        if is_fp8(stored):
            wrong = _wrongly_in_fp8(name, layer, stored, quantization, ignored)
            if wrong:
                yield Fault(stored.file.name, name, wrong)
            elif quantization is not None:
                yield from _scaled(folder, quantization, layer)
                if is_embedding(layer) or is_norm(layer):
                    yield Fault(stored.file.name, name, _UNLIKELY, is_error=False)
        elif name.rpartition(".")[2] in SCALES + CACHE_SCALES:
            yield from _owner(folder, quantization, name)


def _wrongly_in_fp8(
    name: str, layer: str, stored: Stored, quantization: CheckpointQuantization | None, ignored: set[str]
) -> str:
    if quantization is None:
        return "it is in FP8, and config.json has no quantization_config: engines take its bytes for the weights"
    if stored.dtype != E4M3:
        return f"it is in {stored.shown}; weights for engines are in float8_e4m3fn"
    if not name.endswith(WEIGHT):
        return "it is in FP8 without a scale; only weights of layers may be in FP8"
    if _TABLES.search(layer) or (is_norm(layer) and len(stored.shape) == 1):
        return "it is in FP8, and engines read embeddings and norms without scales"
    if len(stored.shape) not in (2, 3):
        return f"it is in FP8 with shape {stored.shape}; weights of linear layers have the axes [out, in]"
    if layer in ignored:
        return "it is in FP8, and `ignore` lists the layer: engines take its bytes for the weights"
    return ""


def _owner(folder: TensorFolder, quantization: CheckpointQuantization | None, name: str) -> Iterator[Fault]:
    """What is wrong with a scale as such: whose it is, and its values."""
    layer, _, kind = name.rpartition(".")
    stored = folder.tensors[name]
    if kind in CACHE_SCALES:
        if stored.is_known and (problem := _bad_values(folder, name, positive_or_absent=True)):
            yield Fault(stored.file.name, name, problem)
        return
    weight = folder.tensors.get(layer + WEIGHT)
    if weight is None:
        yield Fault(stored.file.name, name, f"it is a scale, but {layer}{WEIGHT} is missing")
    elif not is_fp8(weight):
        yield Fault(stored.file.name, name, f"it is a scale, and {layer}{WEIGHT} is in {weight.shown}, which has none")
    elif quantization is not None:
        names = quantization.input_scale_names if kind in OF_INPUTS else quantization.scale_names
        if kind not in names:
            yield Fault(stored.file.name, name, f"engines look for {' or '.join(names)} in this layout")
        elif (first := _present(folder, layer, names)) != name:
            yield Fault(stored.file.name, name, f"{first} is there too: each engine reads one of them")
        elif kind in OF_INPUTS and not quantization.is_static:
            yield Fault(stored.file.name, name, "inputs are not static: engines ignore it", is_error=False)


def _present(folder: TensorFolder, layer: str, names: tuple[str, ...]) -> str:
    """The first scale of a layer that is there by one of its names; by the first of these if there is none."""
    return next((name for kind in names if (name := f"{layer}.{kind}") in folder.tensors), f"{layer}.{names[0]}")


def _scaled(folder: TensorFolder, quantization: CheckpointQuantization, layer: str) -> Iterator[Fault]:
    """What is wrong with a weight in E4M3 and its scales."""
    name, scale_name = layer + WEIGHT, _present(folder, layer, quantization.scale_names)
    stored = folder.tensors[name]
    if count := not_finite(folder[name]):
        yield Fault(stored.file.name, name, f"{count} of its elements are NaN")
        return
    if quantization.is_static:
        yield from _input_scale(folder, _present(folder, layer, quantization.input_scale_names), stored)
    scale = folder.tensors.get(scale_name)
    if scale is None:
        names = " or ".join((scale_name, *quantization.scale_names[1:]))
        problem = f"it is in FP8 and has no {names}: some engines take its bytes for the weights"
        yield Fault(stored.file.name, name, problem)
        return
    right = BYTES if quantization.exponents else FLOATS
    if quantization.exponents and quantization.method == "fp8":
        right = BYTES + FLOATS  # Powers of two in float32, as DeepSeek-V3.1 has them.
    if scale.dtype not in right:
        expected = " or ".join(dtype.name for dtype in right)
        yield Fault(scale.file.name, scale_name, f"it is in {scale.shown}; its layout has {expected}")
        return
    expected_shapes = quantization.scale_shapes(stored.shape)
    if scale.shape not in expected_shapes:
        reversed_shape = (*stored.shape[:-2], *stored.shape[:-3:-1])
        transposed = scale.shape in quantization.scale_shapes(reversed_shape)
        hint = "; it fits the transposed weight, which has to be [out, in]" if transposed else ""
        yield Fault(scale.file.name, scale_name, _shape_problem(scale.shape, expected_shapes, stored.shape) + hint)
        return
    if problem := _bad_values(folder, scale_name):
        yield Fault(scale.file.name, scale_name, problem)
        return
    if len(stored.shape) == 2 and math.prod(stored.shape):
        yield from _magnitudes(folder, quantization, name, scale_name)


def _input_scale(folder: TensorFolder, name: str, weight: Stored) -> Iterator[Fault]:
    stored = folder.tensors.get(name)
    if stored is None:
        yield Fault(weight.file.name, name, "it is missing, and inputs are static: engines need the scale")
    elif stored.dtype not in FLOATS:
        yield Fault(stored.file.name, name, f"it is in {stored.shown}; scales of inputs are in float32")
    elif math.prod(stored.shape) != max(1, math.prod(weight.shape[:-2])):
        yield Fault(stored.file.name, name, f"it has shape {stored.shape}; a static input has one scale")
    elif problem := _bad_values(folder, name):
        yield Fault(stored.file.name, name, problem)


def _shape_problem(shape: tuple[int, ...], expected: tuple[tuple[int, ...], ...], weight: tuple[int, ...]) -> str:
    return f"it has shape {shape}; a weight of shape {weight} has {' or '.join(map(str, expected))} in this layout"


def _bad_values(folder: TensorFolder, name: str, *, positive_or_absent: bool = False) -> str:
    scale = scale_values(folder[name])
    if count := int(np.isnan(scale).sum()):
        return f"{count} of {scale.size} scales are NaN"
    if count := int(np.isinf(scale).sum()):
        return f"{count} of {scale.size} scales are infinite"
    # Engines write -1 for a scale of keys and values that is not there.
    if count := int(((scale <= 0) & ~((scale == -1) & positive_or_absent)).sum()):
        return f"{count} of {scale.size} scales are zero or negative; a scale is a positive factor"
    return ""


def scale_values(scale: np.ndarray) -> np.ndarray:
    """Scales as they multiply, in float32; exponents in bytes become powers of two.

    Args:
        scale: As stored.
    """
    if scale.dtype in BYTES:
        bits = scale.view(np.uint8).astype(np.int32)
        return np.where(bits == 255, np.float32(np.nan), np.ldexp(np.float32(1.0), np.minimum(bits, 254) - 127)).astype(
            np.float32
        )
    return scale.astype(np.float32)


def _magnitudes(
    folder: TensorFolder, quantization: CheckpointQuantization, name: str, scale_name: str
) -> Iterator[Fault]:
    """Data and scales that do not belong together."""
    data, scale = folder[name], scale_values(folder[scale_name])
    shape = data.shape
    block = {"tensor": shape, "channel": (1, shape[1])}.get(quantization.strategy, quantization.block or shape)
    found = amaxes(data, (block[0], block[1]))
    file = folder.tensors[name].file.name
    if not found.any():
        yield Fault(file, name, "all of its elements are zero", is_error=False)
        return
    scale = scale.reshape(found.shape)
    if (found * scale).max() >= _LARGE and scale.min() >= 0.25:
        yield Fault(
            folder.tensors[scale_name].file.name,
            scale_name,
            f"data * scale reaches {float((found * scale).max()):.0f}: the scales are lost, or it was quantized twice",
        )
        return
    # The largest of each row is 448 then, and of the columns that of some.
    if quantization.strategy == "channel" and shape[0] == shape[1] >= 16 and np.unique(scale).size > 1:
        columns = amaxes(data, (shape[0], 1))
        if (columns == _LIMIT).all() and not (found == _LIMIT).all():
            problem = (
                "each of its columns reaches 448, but not each row, although rows have the scales: it is transposed"
            )
            yield Fault(file, name, problem)


def cache_faults(folder: TensorFolder, quantization: CheckpointQuantization | None) -> Iterator[Fault]:
    """Scales of keys and values that are not complete, or that no engine reads.

    Args:
        folder: The folder.
        quantization: What its configuration says.
    """
    partners = {"k_scale": "v_scale", "v_scale": "k_scale"}
    found = [name for name in folder.tensors if name.rpartition(".")[2] in partners]
    for name in found:
        stored, (layer, _, kind) = folder.tensors[name], name.rpartition(".")
        other = f"{layer}.{partners[kind]}".replace(f".{kind[0]}_proj.", f".{partners[kind][0]}_proj.")
        if other not in folder.tensors:
            yield Fault(stored.file.name, name, f"{other} is missing: keys and values both need a scale, or neither")
        if math.prod(stored.shape) != 1 or stored.dtype not in FLOATS:
            problem = f"it is {stored.shown}{stored.shape}; a scale of keys or values is one floating-point number"
            yield Fault(stored.file.name, name, problem)
        if quantization is None or not quantization.cached:
            problem = "config.json does not say that keys and values are in FP8: engines ignore it"
            yield Fault(stored.file.name, name, problem, is_error=False)
    if quantization is not None and quantization.cached and not found:
        problem = "it says that keys and values are in FP8, but no tensor holds their scales: engines take 1"
        yield Fault("config.json", "quantization_config", problem, is_error=False)


def fused_faults(folder: TensorFolder, quantization: CheckpointQuantization) -> Iterator[Fault]:
    """Layers that engines make one, and that do not fit together.

    Args:
        folder: The folder.
        quantization: What its configuration says.
    """
    for names in SAME_INPUT:
        for first in [name for name in folder.tensors if name.endswith(f".{names[0]}{WEIGHT}")]:
            parent = first.removesuffix(f"{names[0]}{WEIGHT}")
            partners = [f"{parent}{name}" for name in names]
            if not all(f"{partner}{WEIGHT}" in folder.tensors for partner in partners):
                continue
            weights = [folder.tensors[f"{partner}{WEIGHT}"] for partner in partners]
            file, what = weights[0].file.name, ", ".join(names)
            if len({is_fp8(weight) for weight in weights}) > 1:
                yield Fault(file, first, f"some of {what} are in FP8 and some are not; engines merge them")
            elif is_fp8(weights[0]):
                yield from _partners(folder, quantization, partners, first, what)


def _partners(
    folder: TensorFolder, quantization: CheckpointQuantization, partners: list[str], first: str, what: str
) -> Iterator[Fault]:
    file = folder.tensors[first].file.name
    kinds = [quantization.scale_names] if quantization.strategy == "tensor" else []
    kinds += [quantization.input_scale_names] if quantization.is_static else []
    for kind in kinds:
        names = [_present(folder, partner, kind) for partner in partners]
        stored = [folder.tensors.get(name) for name in names]
        if any(scale is None or not scale.is_known or math.prod(scale.shape) != 1 for scale in stored):
            continue
        scales = [float(scale_values(folder[name]).reshape(())) for name in names]
        if len(set(scales)) > 1 and all(map(math.isfinite, scales)):
            called = names[0].rpartition(".")[2]
            problem = f"{called} of {what} differ: engines that merge them quantize again, with the largest"
            yield Fault(file, first, problem, is_error=False)
    rows = [folder.tensors[f"{partner}{WEIGHT}"].shape[0] for partner in partners[:-1]]
    height = (quantization.block or (1, 1))[0]
    if any(row % height for row in rows):
        problem = f"{what} have {rows} outputs, not multiples of {height}: engines that merge them refuse that"
        yield Fault(file, first, problem, is_error=False)
