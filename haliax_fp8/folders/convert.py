"""convert_folder: a checkpoint in another layout, with the same numbers where that is possible."""

import dataclasses
import functools
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import DTypeLike
from rich.console import RenderableType
from rich.text import Text

from .._printing import Printable, new_table
from .._printing.progress import Watcher
from .._tensor_names import WEIGHT, is_head, is_linear, is_router
from ..layouts import PLAIN, Layout, as_layout
from .beside import copy_others, left_alone, with_dtype, write_config
from .check import check_folder
from .configuration import presented, read_layout
from .folder import TensorFolder, new_folder, write_tensors
from .layout import CACHE_SCALES, exponent_rounding, input_scale_names, require_quantizable
from .scaled_matrix import (
    Rows,
    ScaledMatrix,
    are_exponents,
    coarsened,
    in_two_levels,
    largest,
    parts_of,
    quantized,
    quantized_in_two_levels,
    recast,
    spread,
)
from .tensors import Tensor, Values, fused_with, tensors_in


ScalePrecision = Literal["float32", "bfloat16", "power-of-two"]


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
        skipped: Scales of keys and values, which a plain checkpoint has no place for.
    """

    directory: pathlib.Path
    before: str
    after: str
    weights: tuple[Converted, ...]
    copied: int
    skipped: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether all weights have the same values as before, and nothing was left out."""
        return not self.skipped and all(weight.is_exact for weight in self.weights)

    @property
    def error(self) -> float:
        """The largest error of a weight."""
        return max((weight.error for weight in self.weights), default=0.0)

    def __rich__(self) -> RenderableType:
        """A row for what is exact and one for what is not, with the worst weight."""
        more = f" and {len(self.skipped) - 3} more" if len(self.skipped) > 3 else ""
        caption = f"Not written: {', '.join(self.skipped[:3])}{more}" if self.skipped else ""
        table = new_table(f"{self.directory.resolve().name}: {self.before} -> {self.after}, checked", caption)
        for column in ("weights", "number", "largest error", "of"):
            table.add_column(column, overflow="fold")
        rounded = [weight for weight in self.weights if not weight.is_exact]
        table.add_row("the same values", str(len(self.weights) - len(rounded)), "0", "")
        if rounded:
            worst = max(rounded, key=lambda weight: weight.error)
            table.add_row("rounded", str(len(rounded)), f"{worst.error:.3%}", Text(worst.name))
        table.add_row("other tensors, unchanged", str(self.copied), "", "")
        return table


def convert_folder(
    directory: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    layout: str | Layout,
    *,
    scales: ScalePrecision = "bfloat16",
    dtype: DTypeLike = "bfloat16",
    shard_bytes: int = 5 * 10**9,
    follow_links: bool = False,
    progress: Watcher | None = None,
) -> Conversion:
    """Writes a checkpoint in another layout.

    A weight keeps its data where its scales can be written in the new layout as they are: one for a tensor as equal
    ones for rows or blocks, powers of two as E8M0. Otherwise `data * scale` is quantized again, and the error measured.
    One weight is read at a time, and the new folder is checked before it takes its name: it is complete or absent.

    Scales of keys and values stay, by the names of the new layout; a plain checkpoint has none. The configuration of
    `"HF_FP8"` does not mention them: tell the engine to keep keys and values in FP8, as with vLLM's
    `kv_cache_dtype="fp8"`. Scales of inputs are left out where engines compute them.

    Args:
        directory: The folder, which has to be sound.
        destination: The new folder; new or empty.
        layout: As in `export_model`; `"BF16"` for plain weights.
        scales: How precise new scales are: `"float32"`, any number; `"bfloat16"`, rounded up to those, so that engines
            that cast them change nothing; `"power-of-two"`, so that a product with one is exact in any dtype.
        dtype: The dtype of plain weights: with `"float32"` they are `data * scale` as engines compute it in float32.
        shard_bytes: The most bytes of a file; more make several, and an index.
        follow_links: As in `check_folder`.
        progress: As in `export_model`.

    Returns:
        What became of each weight.

    Raises:
        BrokenCheckpoint: If the folder is not sound; names the file and the tensor of the first fault.
        ValueError: If the layout needs scales of inputs that the folder lacks, or the destination is not empty or
            cannot be made.
    """
    chosen, kind = as_layout(layout), np.dtype(dtype)
    if scales not in get_args(ScalePrecision):
        raise ValueError(f"scales={scales!r} must be one of {', '.join(map(repr, get_args(ScalePrecision)))}")
    report = check_folder(directory, follow_links=follow_links, progress=progress)
    if report.errors:
        raise report.errors[0].error
    folder = TensorFolder.open(directory, follow_links=follow_links)
    before = read_layout(folder)
    if chosen is not None and before is not None:
        chosen = dataclasses.replace(chosen, cached=before.cached)
    tensors, folder = tensors_in(folder), presented(folder)

    @functools.cache
    def amax(names: tuple[str, ...], index: tuple[int, ...]) -> float:
        return max(largest(tensors[name].read(index)) for name in names)

    groups, outcomes, copied, skipped, high = [], [], 0, [], []
    for name, tensor in tensors.items():
        if chosen is None and name.rpartition(".")[2] in CACHE_SCALES:
            skipped.append(name)
        elif _converts(tensor, chosen, before, folder):
            if chosen is not None:
                _require_convertible(tensor, chosen, before, folder)
            new = dataclasses.replace(tensor, layout=chosen, dtype=kind if chosen is None else chosen.format.dtype)
            # Engines have one scale of tensors for the layers that they fuse.
            of_all = functools.partial(amax, fused_with(name, tensors))
            groups.append((new.specs, lambda old=tensor, new=new, amax=of_all: _made(old, new, scales, outcomes, amax)))
        else:
            if tensor.is_weight and is_linear(tensor.path, len(tensor.shape)):
                high.append(tensor.path)
            new = tensor if chosen is None else dataclasses.replace(tensor, name=_cache_name(name, chosen, folder))
            groups.append((new.specs, lambda name=name: [folder[name]]))
            copied += 1
    with new_folder(destination, "destination") as new:
        write_tensors(new, groups, shard_bytes, progress)
        layers = (name.removesuffix(WEIGHT) for name in folder.tensors if name.endswith(WEIGHT))
        config = with_dtype(folder.config, kind.name) if chosen is None and before is not None else folder.config
        write_config(new, config, chosen, left_alone(config, high, layers))
        copy_others(folder.directory, new, follow_links=follow_links)
        if (after := check_folder(new, progress=progress)).errors:
            raise ValueError(f"the new folder would be broken, and was not written: {after.errors[0]}; report this")
    name = PLAIN if chosen is None else chosen.name
    return Conversion(pathlib.Path(destination), report.layout, name, tuple(outcomes), copied, tuple(skipped))


def _converts(tensor: Tensor, layout: Layout | None, before: Layout | None, folder: TensorFolder) -> bool:
    """Whether it is a weight that is in FP8 before or after."""
    if not tensor.is_weight or tensor.layout is not None:
        return tensor.layout is not None
    # What a quantized checkpoint left alone stays so. Weights with three axes may be convolutions'.
    path, axes = tensor.path, len(tensor.shape)
    may_be = axes == 2 or "experts" in path.split(".")
    chosen = is_linear(path, axes) and may_be and before is None
    return layout is not None and chosen and not (is_head(path) or is_router(path, folder.tensors))


def _cache_name(name: str, layout: Layout, folder: TensorFolder) -> str:
    """The name of a tensor in a layout: ModelOpt has scales of keys and values beside the layers that make them."""
    parent, _, kind = name.rpartition(".")
    projection = {"k_scale": "k_proj", "v_scale": "v_proj"}.get(kind)
    if projection is None:
        return name
    parent = parent.removesuffix(f".{projection}")
    beside = layout.method == "modelopt" and f"{parent}.{projection}.weight" in folder.tensors
    new = f"{parent}.{projection}.{kind}" if beside else f"{parent}.{kind}"
    return name if new in folder.tensors else new


def _require_convertible(tensor: Tensor, layout: Layout, before: Layout | None, folder: TensorFolder) -> None:
    require_quantizable(tensor.name, tensor.shape, layout)
    names = () if before is None else input_scale_names(before)
    if layout.is_static and not any(f"{tensor.path}.{name}" in folder.tensors for name in names):
        raise ValueError(
            f"{tensor.path} has no scale for its input, which the layout needs; calibrate the model, or choose a "
            "layout with dynamic inputs such as 'FP8_DYNAMIC'"
        )


type _Amax = Callable[[tuple[int, ...]], float]
"""The largest magnitude of an expert, or of the weight, and of those that engines fuse with it."""


def _made(
    old: Tensor, new: Tensor, precision: ScalePrecision, outcomes: list[Converted], amax: _Amax
) -> Sequence[np.ndarray]:
    """The new tensors of a weight, one expert at a time; notes what became of it."""
    front, squares, arrays = old.shape[:-2], [], []
    if front:
        arrays = [np.empty(spec.shape, spec.dtype) for spec in new.specs]
    for index in itertools.product(*map(range, front)):
        before = old.read(index)
        after = _converted(before, new, precision, functools.partial(amax, index))
        squares.append(_compared(before, after))
        if not front:
            arrays = new.encoded(after)
        else:
            for array, part in zip(arrays, new.encoded(after), strict=True):
                array[index] = part
    outcomes.append(_noted(old.name, squares))
    return arrays


def _converted(values: Values, new: Tensor, precision: ScalePrecision, amax: Callable[[], float]) -> Values:
    """A matrix in a new layout, some rows at a time."""
    if (layout := new.layout) is None:
        made = np.empty(values.shape, new.dtype)
        for rows in parts_of(values.shape):
            made[rows] = values[rows].astype(new.dtype)
        return made
    block = layout.block((values.shape[0], values.shape[1]))
    if (made := _without_rounding(values, layout, block) if isinstance(values, ScaledMatrix) else None) is None:
        try:
            made = (
                quantized_in_two_levels(values, block, amax())
                if layout.has_units
                else quantized(
                    values,
                    block,
                    bf16_scales=precision != "float32",
                    powers_of_two=precision == "power-of-two",
                    exponents=exponent_rounding(layout),
                    format=layout.format,
                )
            )
        except ValueError as error:
            raise ValueError(f"{new.name} cannot be converted: {error}") from None
    inputs = values.input_scale if isinstance(values, ScaledMatrix) and layout.is_static else None
    if inputs is not None and isinstance(values, ScaledMatrix):
        inputs *= values.input_limit / made.input_limit
    return dataclasses.replace(made, input_scale=inputs)


def _without_rounding(values: ScaledMatrix, layout: Layout, block: tuple[int, int]) -> ScaledMatrix | None:
    """The values as they are in another layout; None if it does not hold them."""
    made = spread(values, block) or coarsened(values, block)
    made = None if made is None else recast(made, layout.format)
    if layout.has_units:
        return None if made is None else in_two_levels(made)
    if made is None or (layout.exponents and not are_exponents(made.scale)):
        return None
    return dataclasses.replace(made, unit=None)


def _compared(before: Rows, after: Rows) -> tuple[float, float]:
    """The sums of squares of differences and of values; the first is 0 if nothing differs."""
    difference = norm = 0.0
    for rows in parts_of(before.shape):
        old, new = before[rows].astype(np.float32), after[rows].astype(np.float32)
        if np.array_equal(old, new):
            norm += float(np.square(old, dtype=np.float64).sum())
            continue
        # Not 0 where the square of a difference is too small for float64.
        difference += max(float(np.square(new.astype(np.float64) - old).sum()), float(np.finfo(np.float64).tiny))
        norm += float(np.square(old, dtype=np.float64).sum())
    return difference, norm


def _noted(name: str, errors: list[tuple[float, float]]) -> Converted:
    difference, norm = (sum(numbers) for numbers in zip(*errors, strict=True))
    if difference == 0.0:
        return Converted(name, True, 0.0)
    return Converted(name, False, math.sqrt(difference / norm) if norm else math.inf)
