"""convert_folder: a checkpoint in another layout, with the same numbers where that is possible."""

import dataclasses
import enum
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import DTypeLike
from rich.console import RenderableType
from rich.text import Text

from .._tables import Printable, new_table
from ..layers.roles import WEIGHT, is_head, is_linear, is_router
from .check import check_folder
from .check.folder import ignored_layers, open_checkpoint
from .check.weights import CACHE_SCALES, SCALES, is_fp8
from .files import BrokenCheckpoint, TensorFolder, TensorSpec, new_folder, write_tensors
from .files.folder import CONFIG, INDEX
from .layouts import AbstractLayout, as_layout
from .layouts.base import decode
from .layouts.quantization import KEY, Quantization
from .quantize import ScaledMatrix, expanded, quantized, spread


class Scales(enum.Enum):
    """What new scales may be; those that stay as they are are not asked."""

    FLOAT32 = "float32"
    """Any number."""
    BFLOAT16 = "bfloat16"
    """Rounded up to bfloat16: engines that cast scales change nothing."""
    POWER_OF_TWO = "power-of-two"
    """Rounded up to a power of two: a product with one is exact in any dtype."""


@dataclasses.dataclass(frozen=True)
class Converted:
    """What became of a weight.

    Args:
        name: Its name.
        is_exact: Whether it has the same values as before.
        error: `|after - before| / |before|`, over all elements.
    """

    name: str
    is_exact: bool
    error: float


@dataclasses.dataclass(frozen=True, repr=False)
class Conversion(Printable):
    """What a conversion did.

    Args:
        directory: The new folder.
        before: The layout of the old one.
        after: The layout of the new one.
        weights: What became of each weight that is in FP8 before or after.
        copied: The number of tensors that are as they were.
        left_out: Scales that the new layout has no place for.
    """

    directory: pathlib.Path
    before: str
    after: str
    weights: tuple[Converted, ...]
    copied: int
    left_out: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether all weights have the same values as before."""
        return all(weight.is_exact for weight in self.weights)

    @property
    def error(self) -> float:
        """The largest error of a weight."""
        return max((weight.error for weight in self.weights), default=0.0)

    def __rich__(self) -> RenderableType:
        """A row for what is exact and one for what is not, with the worst weight."""
        caption = (
            f"Not written: {', '.join(self.left_out[:3])}{' …' * (len(self.left_out) > 3)}" if self.left_out else ""
        )
        table = new_table(f"{self.directory.name}: {self.before} -> {self.after}, checked", caption)
        for column in ("weights", "number", "largest error", "of"):
            table.add_column(column, overflow="fold")
        exact = sum(weight.is_exact for weight in self.weights)
        table.add_row("the same values", str(exact), "0", "")
        if not self.is_exact:
            worst = max(self.weights, key=lambda weight: weight.error)
            table.add_row("rounded", str(len(self.weights) - exact), f"{worst.error:.3%}", Text(worst.name))
        table.add_row("other tensors, unchanged", str(self.copied), "", "")
        return table


def convert_folder(
    directory: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    layout: str | AbstractLayout,
    *,
    scales: Scales | str = Scales.BFLOAT16,
    dtype: DTypeLike = "bfloat16",
    shard_bytes: int = 5 * 10**9,
    follow_links: bool = False,
) -> Conversion:
    """Writes a checkpoint in another layout.

    A weight keeps its data where its scales can be written in the new layout as they are: one for a tensor as equal
    ones for rows or blocks, powers of two as E8M0. Otherwise `data * scale` is quantized anew, and the error measured.
    One weight is read at a time, and the new folder is checked before it takes its name: it is complete or absent.

    Args:
        directory: The folder, which has to be sound.
        destination: The new folder; new or empty.
        layout: As in `export_model`; `"BF16"` for plain weights.
        scales: What new scales may be: `"float32"`, `"bfloat16"` or `"power-of-two"`.
        dtype: That of plain weights: with `"float32"` they are exactly `data * scale`.
        shard_bytes: The most bytes of a file; more make several, and an index.
        follow_links: As in `check_folder`.

    Returns:
        What became of each weight.

    Raises:
        BrokenCheckpoint: If the folder is not sound; names the file and the tensor of the first fault.
        ValueError: If the layout needs scales of inputs that the folder has not, or the destination is not empty.
    """
    chosen, kind, rounding = as_layout(layout), np.dtype(dtype), _scales(scales)
    report = check_folder(directory, follow_links=follow_links)
    if report.errors:
        first = report.errors[0]
        raise BrokenCheckpoint(first.file, first.problem, first.tensor)
    folder, before = open_checkpoint(pathlib.Path(directory), follow_links=follow_links)
    task = _Task(folder, before, chosen, rounding, kind, set() if before is None else ignored_layers(folder, before))
    groups, found, copied, left_out, high = [], [], 0, [], []
    for name, stored in folder.tensors.items():
        layer, kind_of_name = name.removesuffix(WEIGHT), name.rpartition(".")[2]
        if kind_of_name in SCALES:
            continue
        if kind_of_name in CACHE_SCALES and (chosen is None or (before and before.cached)):
            left_out.append(name)  # The new configuration says nothing of caches.
        elif name.endswith(WEIGHT) and task.converts(layer):
            groups.append((task.specs(layer), task.maker(layer, found)))
        else:
            if name.endswith(WEIGHT) and is_linear(layer, len(stored.shape)):
                high.append(layer)
            groups.append(([TensorSpec(name, stored.dtype, stored.shape)], lambda name=name: [folder[name]]))
            copied += 1
    with new_folder(destination) as new:
        write_tensors(new, groups, shard_bytes)
        _write_config(new, folder, chosen, high)
        _copy_others(folder.directory, new, follow_links)
        if (after := check_folder(new)).errors:
            raise ValueError(f"the new folder would be broken, and was not written: {after.errors[0]}; report it")
    name = layout if isinstance(layout, str) else type(layout).__name__
    return Conversion(pathlib.Path(destination), report.layout, name, tuple(found), copied, tuple(left_out))


def _scales(scales: Scales | str) -> Scales:
    try:
        return Scales(scales)
    except ValueError:
        options = ", ".join(repr(member.value) for member in Scales)
        raise ValueError(f"scales={scales!r} must be one of {options}") from None


@dataclasses.dataclass(frozen=True)
class _Task:
    """How weights are converted."""

    folder: TensorFolder
    before: Quantization | None
    layout: AbstractLayout | None
    scales: Scales
    dtype: np.dtype
    ignored: set[str]

    def converts(self, layer: str) -> bool:
        """Whether a weight is in FP8 before or after."""
        stored = self.folder.tensors[layer + WEIGHT]
        if is_fp8(stored):
            return True
        # What a quantized checkpoint left alone stays so.
        chosen = is_linear(layer, len(stored.shape)) and len(stored.shape) == 2 and self.before is None
        return self.layout is not None and chosen and not (is_head(layer) or is_router(layer, self.folder.tensors))

    def specs(self, layer: str) -> list[TensorSpec]:
        """The tensors of a layer in the new layout."""
        shape = self.folder.tensors[layer + WEIGHT].shape
        if len(shape) != 2:
            raise ValueError(f"{layer}{WEIGHT} has shape {shape}; weights with two axes, [out, in], are converted")
        if self.layout is None:
            return [TensorSpec(layer + WEIGHT, self.dtype, shape)]
        if self.layout.is_static and self._input_scale(layer) is None:
            raise ValueError(
                f"{layer} has no scale for its input, which the layout needs; calibrate the model, or choose a layout "
                "with dynamic inputs such as 'FP8_DYNAMIC'"
            )
        parts = self.layout.tensors((shape[0], shape[1]))
        return [TensorSpec(f"{layer}.{part}", dtype, shape) for part, (dtype, shape) in parts.items()]

    def _input_scale(self, layer: str) -> np.ndarray | None:
        name = f"{layer}.{self.before.input_scale_name}" if self.before is not None else ""
        return self.folder[name] if name in self.folder.tensors else None

    def maker(self, layer: str, found: list[Converted]) -> Callable[[], Sequence[np.ndarray]]:
        """What makes these tensors, and notes what became of the weight."""

        def make() -> Sequence[np.ndarray]:
            arrays, values, after = self._made(layer)
            found.append(_compared(layer + WEIGHT, values, after))
            return arrays

        return make

    def _made(self, layer: str) -> tuple[Sequence[np.ndarray], np.ndarray, np.ndarray]:
        """The new tensors, and the values before and after."""
        matrix = self._decoded(layer)
        values = matrix.dequantized() if matrix is not None else self.folder[layer + WEIGHT].astype(np.float32)
        if self.layout is None:
            plain = values.astype(self.dtype)
            return [plain], values, plain.astype(np.float32)
        block = self.layout.block((values.shape[0], values.shape[1]))
        new = None if matrix is None else spread(matrix, block)
        if new is None or (self.layout.is_microscaled and not _are_exponents(new.scale)):
            new = self._quantized(layer, values, block)
        if self.layout.is_static:
            scale = self._input_scale(layer)
            assert scale is not None
            new = dataclasses.replace(new, input_scale=float(scale.astype(np.float32).reshape(())))
        return list(self.layout.encode(new).values()), values, new.dequantized()

    def _decoded(self, layer: str) -> ScaledMatrix | None:
        if self.before is None or not is_fp8(self.folder.tensors[layer + WEIGHT]):
            return None
        names = ("weight", *SCALES)
        tensors = {n: self.folder[f"{layer}.{n}"] for n in names if f"{layer}.{n}" in self.folder.tensors}
        return decode(layer, tensors, self.before.block)

    def _quantized(self, layer: str, values: np.ndarray, block: tuple[int, int]) -> ScaledMatrix:
        try:
            made = quantized(values, block, bf16_scales=self.scales is not Scales.FLOAT32)
        except ValueError as error:
            raise ValueError(f"{layer}{WEIGHT} cannot be converted: {error}") from None
        if self.scales is not Scales.POWER_OF_TWO or block == (1, 32):
            return made
        significand, exponent = np.frexp(made.scale)
        scale = np.ldexp(np.float32(1.0), np.where(significand == 0.5, exponent - 1, exponent)).astype(np.float32)
        data = np.clip(values / expanded(scale, values.shape, block), -448, 448).astype(made.data.dtype)
        return dataclasses.replace(made, data=data, scale=scale)


def _are_exponents(scale: np.ndarray) -> bool:
    """Whether E8M0 holds all scales."""
    return bool((np.frexp(scale)[0] == 0.5).all())


def _compared(name: str, before: np.ndarray, after: np.ndarray) -> Converted:
    if np.array_equal(before, after):
        return Converted(name, True, 0.0)
    rows = max(1, (1 << 22) // max(1, before.shape[1]))  # in parts: float64 takes eight bytes
    difference = norm = 0.0
    for start in range(0, before.shape[0], rows):
        old = before[start : start + rows].astype(np.float64)
        difference += float(np.square(after[start : start + rows] - old).sum())
        norm += float(np.square(old).sum())
    return Converted(name, False, math.sqrt(difference / norm) if norm else math.inf)


def _write_config(new: pathlib.Path, folder: TensorFolder, layout: AbstractLayout | None, high: list[str]) -> None:
    config = {name: value for name, value in folder.config.items() if name not in (KEY, "compression_config")}
    described, files = ({}, {}) if layout is None else layout.config_files(high)
    for name, content in {**files, CONFIG: {**config, **described}}.items():
        (new / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


def _copy_others(old: pathlib.Path, new: pathlib.Path, follow_links: bool) -> None:
    """The tokenizer and whatever lies beside, but for weights and what was written anew."""
    weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
    for path in sorted(old.iterdir()):
        is_ours = path.name in (CONFIG, INDEX, "hf_quant_config.json") or path.suffix in weights
        is_here = follow_links or path.resolve().parent == old.resolve()
        if path.is_file() and is_here and not is_ours:
            shutil.copyfile(path, new / path.name)
