"""convert_folder: a checkpoint in another layout, with the same numbers where that is possible."""

import dataclasses
import json
import os
import pathlib
import shutil

import numpy as np
from jaxtyping import DTypeLike
from rich.console import RenderableType
from rich.text import Text

from .._printing import Printable, new_table
from ..layers.tensor_names import WEIGHT, is_linear
from .check import check_folder
from .convert_weight import ConversionTask, Converted, ScaleRounding
from .files import BrokenCheckpoint, TensorFolder, TensorSpec, new_folder, write_tensors
from .files.folder import CONFIG, INDEX
from .layout import CACHE_SCALES, KEY, SCALES, Layout, as_layout, read_layout


@dataclasses.dataclass(frozen=True, repr=False)
class Conversion(Printable):
    """What a conversion did.

    Args:
        directory: The new folder.
        before: The layout of the old one.
        after: The layout of the new one.
        weights: What became of each weight that is in FP8 before or after.
        copied: The number of tensors that are as they were.
        left_out: Scales that the new layout does not hold.
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
        more = f" and {len(self.left_out) - 3} more" if len(self.left_out) > 3 else ""
        caption = f"Not written: {', '.join(self.left_out[:3])}{more}" if self.left_out else ""
        table = new_table(f"{self.directory.resolve().name}: {self.before} -> {self.after}, checked", caption)
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
    layout: str | Layout,
    *,
    scales: ScaleRounding | str = ScaleRounding.BFLOAT16,
    dtype: DTypeLike = "bfloat16",
    shard_bytes: int = 5 * 10**9,
    follow_links: bool = False,
) -> Conversion:
    """Writes a checkpoint in another layout.

    A weight keeps its data where its scales can be written in the new layout as they are: one for a tensor as equal
    ones for rows or blocks, powers of two as E8M0. Otherwise `data * scale` is quantized again, and the error measured.
    One weight is read at a time, and the new folder is checked before it takes its name: it is complete or absent.

    Args:
        directory: The folder, which has to be sound.
        destination: The new folder; new or empty.
        layout: As in `export_model`; `"BF16"` for plain weights.
        scales: The rounding of new scales: `"float32"`, `"bfloat16"` or `"power-of-two"`.
        dtype: The dtype of plain weights: with `"float32"` they are `data * scale` as engines compute it in float32.
        shard_bytes: The most bytes of a file; more make several, and an index.
        follow_links: As in `check_folder`.

    Returns:
        What became of each weight.

    Raises:
        BrokenCheckpoint: If the folder is not sound; names the file and the tensor of the first fault.
        ValueError: If the layout needs scales of inputs that the folder lacks, or the destination is not empty or
            cannot be made.
    """
    chosen, kind, rounding = as_layout(layout), np.dtype(dtype), _rounding(scales)
    report = check_folder(directory, follow_links=follow_links)
    if report.errors:
        first = report.errors[0]
        raise BrokenCheckpoint(first.file, first.problem, first.tensor)
    folder = TensorFolder.open(directory, follow_links=follow_links)
    before = read_layout(folder)
    task = ConversionTask(folder, before, chosen, rounding, kind)
    groups, found, copied, left_out, high = [], [], 0, [], []
    for name, stored in folder.tensors.items():
        layer, kind_of_name = name.removesuffix(WEIGHT), name.rpartition(".")[2]
        if kind_of_name in SCALES:
            continue
        if kind_of_name in CACHE_SCALES and (chosen is None or (before and before.cached)):
            left_out.append(name)  # The new configuration does not mention caches.
        elif name.endswith(WEIGHT) and task.converts(layer):
            groups.append((task.specs(layer), task.maker(layer, found)))
        else:
            if name.endswith(WEIGHT) and is_linear(layer, len(stored.shape)):
                high.append(layer)
            groups.append(([TensorSpec(name, stored.dtype, stored.shape)], lambda name=name: [folder[name]]))
            copied += 1
    with new_folder(destination, "destination") as new:
        write_tensors(new, groups, shard_bytes)
        _write_config(new, folder, chosen, high)
        _copy_others(folder.directory, new, follow_links)
        if (after := check_folder(new)).errors:
            raise ValueError(f"the new folder would be broken, and was not written: {after.errors[0]}; report this")
    name = layout if isinstance(layout, str) else type(layout).__name__
    return Conversion(pathlib.Path(destination), report.layout, name, tuple(found), copied, tuple(left_out))


def _rounding(scales: ScaleRounding | str) -> ScaleRounding:
    try:
        return ScaleRounding(scales)
    except ValueError:
        options = ", ".join(repr(member.value) for member in ScaleRounding)
        raise ValueError(f"scales={scales!r} must be one of {options}") from None


def _write_config(new: pathlib.Path, folder: TensorFolder, layout: Layout | None, high: list[str]) -> None:
    config = {name: value for name, value in folder.config.items() if name not in (KEY, "compression_config")}
    described, files = ({}, {}) if layout is None else layout.config_files(high)
    for name, content in {**files, CONFIG: {**config, **described}}.items():
        (new / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


def _copy_others(old: pathlib.Path, new: pathlib.Path, follow_links: bool) -> None:
    """Copies the tokenizer and other files, except weights and files that were written already."""
    weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
    for path in sorted(old.iterdir()):
        is_ours = path.name in (CONFIG, INDEX, "hf_quant_config.json") or path.suffix in weights
        is_here = follow_links or path.resolve().parent == old.resolve()
        if path.is_file() and is_here and not is_ours:
            shutil.copyfile(path, new / path.name)
