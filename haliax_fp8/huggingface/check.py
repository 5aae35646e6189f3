"""check_folder: whether a folder holds a quantized checkpoint that engines can load, without running one."""

import dataclasses
import fnmatch
import functools
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import RenderableType
from rich.text import Text

from .._files.header import Stored
from .._files.strict_json import BrokenCheckpoint
from .._printing import Printable, new_table
from ..layers.tensor_names import SAME_INPUT, WEIGHT, is_embedding, is_head, is_linear, is_norm, is_router
from .folder import CONFIG, TensorFolder
from .layout import (
    CACHE_SCALES,
    E4M3,
    E8M0,
    EXPONENTS,
    FLOATS,
    INPUT_SCALES,
    KEY,
    SCALES,
    Layout,
    as_float32,
    read_layout,
)
from .sizes import size_faults


# A weight whose data, times their scales, are as large as this has lost its scales, or was quantized twice.
_LARGE, _LIMIT = 112.0, 448.0

# How entries of the configuration's lists begin that are regular expressions; longer ones are not read.
_REGEX, _LONGEST_PATTERN = "re:", 2_000

# What models of Hugging Face call tables of embeddings, and nothing else.
_TABLES = re.compile(
    r"(^|\.)(embed_tokens|embed_positions|tok_embeddings|(word|position)_embeddings|wte|wpe)$|^shared$"
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something wrong with a folder.

    Args:
        file: The file, by its name in the folder.
        tensor: The tensor, or the part of the configuration; empty if it is the file as a whole.
        problem: What is wrong.
        is_error: Whether the checkpoint is broken; otherwise some engines compute other numbers than others.
    """

    file: str
    tensor: str
    problem: str
    is_error: bool = True

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.file, self.tensor, self.problem)))

    @property
    def error(self) -> BrokenCheckpoint:
        """The error that says the same."""
        return BrokenCheckpoint(self.file, self.problem, self.tensor)


@dataclasses.dataclass(frozen=True, repr=False)
class CheckReport(Printable):
    """What a check of a folder found.

    Args:
        directory: The folder.
        layout: Its layout; empty if it could not be read.
        quantized: The number of weights in FP8.
        tensors: The number of tensors.
        faults: What is wrong; errors first.
    """

    directory: pathlib.Path
    layout: str
    quantized: int
    tensors: int
    faults: tuple[Fault, ...]

    @property
    def errors(self) -> tuple[Fault, ...]:
        """The faults that break the checkpoint."""
        return tuple(fault for fault in self.faults if fault.is_error)

    @property
    def is_sound(self) -> bool:
        """Whether nothing breaks the checkpoint."""
        return not self.errors

    def __rich__(self) -> RenderableType:
        """A row for each fault, or a line that there is none."""
        summary = f"{self.directory.resolve().name}: {self.layout or 'not readable'}"
        if self.layout:
            summary += f", {self.tensors} tensors, {self.quantized} weights in FP8"
        if not self.faults:
            return Text(f"{summary}; sound", "green")
        table = new_table(f"{summary}; {'sound, with remarks' if self.is_sound else 'broken'}")
        for column in ("file", "tensor", "problem"):
            table.add_column(column, overflow="fold")
        for fault in self.faults:
            problem = Text(fault.problem if fault.is_error else f"remark: {fault.problem}")
            table.add_row(Text(fault.file, "red" if fault.is_error else "yellow"), Text(fault.tensor), problem)
        return table


def check_folder(directory: str | os.PathLike[str], *, follow_links: bool = False) -> CheckReport:
    """Checks a checkpoint against its own configuration: names, shapes, dtypes and all values.

    Engines accept a checkpoint without scales, with a NaN among them or with an FP8 head, and compute garbage without
    a word. Each tensor is read once, in parts; nothing is executed, and neither PyTorch nor an accelerator is needed.

    Args:
        directory: The folder: `config.json` beside `model.safetensors`, or beside the files of an index.
        follow_links: Whether files may be links that lead out of the folder, as in the cache of Hugging Face's hub.

    Returns:
        What is wrong, by file and tensor. A folder that cannot be read has one fault.
    """
    if not isinstance(directory, str | os.PathLike):
        raise ValueError(f"directory={directory!r} is not a path; use check_folder('a/folder')")
    path = pathlib.Path(directory)
    try:
        checked = Checked.of(TensorFolder.open(path, follow_links=follow_links))
    except BrokenCheckpoint as broken:
        return CheckReport(path, "", 0, 0, (Fault(broken.file, broken.tensor, broken.problem),))
    faults = sorted(dict.fromkeys(checked.faults()), key=lambda fault: not fault.is_error)
    quantized = sum(map(is_fp8, checked.tensors.values()))
    return CheckReport(path, layout_name(checked.layout), quantized, len(checked.tensors), tuple(faults))


def layout_name(layout: Layout | None) -> str:
    """What reports call a layout."""
    return "not quantized" if layout is None else layout.name


def is_fp8(stored: Stored) -> bool:
    """Whether a tensor is in one of the 8-bit formats of floating point."""
    return stored.dtype.itemsize == 1 and stored.dtype.name.startswith("float8") and stored.dtype != E8M0


@dataclasses.dataclass(frozen=True)
class Checked:
    """A folder, and what its configuration says; `check_folder` asks for all faults, an import for those it meets."""

    folder: TensorFolder
    layout: Layout | None

    @staticmethod
    def of(folder: TensorFolder) -> "Checked":
        """A folder whose headers were read.

        Raises:
            BrokenCheckpoint: If its configuration cannot be read.
        """
        found = Checked(folder, read_layout(folder))
        _ = found.ignored, found.targeted  # A pattern that cannot be read breaks the folder.
        return found

    @property
    def tensors(self) -> dict[str, Stored]:
        return self.folder.tensors

    @functools.cached_property
    def layers(self) -> list[str]:
        return [name.removesuffix(WEIGHT) for name in self.tensors if name.endswith(WEIGHT)]

    @functools.cached_property
    def ignored(self) -> set[str]:
        """The layers that the configuration leaves alone."""
        return self._matched("ignore", self.layout.ignore if self.layout else ())

    @functools.cached_property
    def targeted(self) -> set[str]:
        """The layers that the configuration names, or matches, as quantized; classes of layers match none."""
        return self._matched("targets", self.layout.targets if self.layout else ())

    def _matched(self, key: str, entries: Iterable[str]) -> set[str]:
        """The layers that the entries of a list mean."""
        matchers = [_matcher(key, entry, self.layout) for entry in entries]
        return {layer for layer in self.layers if any(matches(layer) for matches in matchers)}

    def _fault(self, name: str, problem: str, *, is_error: bool = True) -> Fault:
        """A fault of a tensor, in its file."""
        return Fault(self.tensors[name].file.name, name, problem, is_error)

    def _value(self, name: str) -> np.ndarray:
        return as_float32(self.folder[name])

    def faults(self) -> Iterator[Fault]:
        """Everything that is wrong."""
        for name in self.tensors:
            yield from self.of_tensor(name)
        yield from self.of_folder()

    def of_tensor(self, name: str) -> Iterator[Fault]:
        """What is wrong with one tensor, whose values are read."""
        stored = self.tensors[name]
        if self.folder.has_changed(name):
            yield self._fault(name, "its bytes have changed since it was written; copy the file again")
            return
        if is_fp8(stored):
            yield from self._of_data(name, stored)
        elif name.rpartition(".")[2] in SCALES + CACHE_SCALES:
            yield from self._of_scale(name, stored)
        if stored.unreadable is not None:
            yield self._fault(name, stored.unreadable)
        elif not is_fp8(stored) and "scale" not in name.rpartition(".")[2]:
            if count := not_finite(self.folder[name]):
                yield self._fault(name, f"{count} of its elements are infinite or NaN")

    def of_folder(self) -> Iterator[Fault]:
        """What is wrong with the configuration, and with tensors that do not fit it or each other."""
        yield from (Fault(*found) for found in size_faults(self.folder))
        yield from self._of_caches()
        if self.layout is not None:
            yield from self._of_configuration(self.layout)
            yield from self._of_merged_layers(self.layout)

    # --- Weights in FP8, and their scales ---

    def _of_data(self, name: str, stored: Stored) -> Iterator[Fault]:
        layer, layout = name.removesuffix(WEIGHT), self.layout
        if layout is None:
            wrong = "it is in FP8, and config.json has no quantization_config: engines take its bytes for the weights"
        elif stored.dtype != E4M3:
            wrong = f"it is in {stored.shown}; weights for engines are in float8_e4m3fn"
        elif not name.endswith(WEIGHT):
            wrong = "it is in FP8 without a scale; only weights of layers may be in FP8"
        elif _TABLES.search(layer) or (is_norm(layer) and len(stored.shape) == 1):
            wrong = "it is in FP8, and engines read embeddings and norms without scales"
        elif len(stored.shape) not in (2, 3):
            wrong = f"it is in FP8 with shape {stored.shape}; weights of linear layers have the axes [out, in]"
        elif layer in self.ignored:
            wrong = "it is in FP8, and `ignore` lists the layer: engines take its bytes for the weights"
        elif count := not_finite(self.folder[name]):
            wrong = f"{count} of its elements are NaN"
        else:
            yield from self._of_layer(layer, stored, layout)
            return
        yield self._fault(name, wrong)

    def _of_layer(self, layer: str, stored: Stored, layout: Layout) -> Iterator[Fault]:
        """What is wrong with the scales of a weight in E4M3."""
        name, scale_name = layer + WEIGHT, self._present(layer, layout.scale_names)
        if is_embedding(layer) or is_norm(layer):
            problem = (
                "its name is like that of an embedding or a norm, which engines read without scales; "
                "if it is a linear layer, ignore this"
            )
            yield self._fault(name, problem, is_error=False)
        if layout.is_static:
            yield from self._of_input(self._present(layer, layout.input_scale_names), stored)
        if (scale := self.tensors.get(scale_name)) is None:
            names = " or ".join((scale_name, *layout.scale_names[1:]))
            yield self._fault(name, f"it is in FP8 and has no {names}: some engines take its bytes for the weights")
            return
        # With `fp8`, exponents may be powers of two in float32, as DeepSeek-V3.1 has them.
        right = FLOATS if not layout.exponents else EXPONENTS + (FLOATS if layout.method == "fp8" else ())
        shapes = layout.scale_shapes(stored.shape)
        if scale.dtype not in right:
            expected = " or ".join(dtype.name for dtype in right)
            yield self._fault(scale_name, f"it is in {scale.shown}; its layout has {expected}")
        elif scale.shape not in shapes:
            transposed = scale.shape in layout.scale_shapes((*stored.shape[:-2], *stored.shape[:-3:-1]))
            hint = "; it fits the transposed weight, which has to be [out, in]" if transposed else ""
            has = f"a weight of shape {stored.shape} has {' or '.join(map(str, shapes))} in this layout"
            yield self._fault(scale_name, f"it has shape {scale.shape}; {has}{hint}")
        elif problem := self._bad_values(scale_name):
            yield self._fault(scale_name, problem)
        elif len(stored.shape) == 2 and math.prod(stored.shape):
            yield from self._of_magnitudes(name, scale_name, layout)

    def _of_input(self, name: str, weight: Stored) -> Iterator[Fault]:
        if (stored := self.tensors.get(name)) is None:
            yield Fault(weight.file.name, name, "it is missing, and inputs are static: engines need the scale")
        elif stored.dtype not in FLOATS:
            yield self._fault(name, f"it is in {stored.shown}; scales of inputs are in float32")
        elif math.prod(stored.shape) != max(1, math.prod(weight.shape[:-2])):
            yield self._fault(name, f"it has shape {stored.shape}; a static input has one scale")
        elif problem := self._bad_values(name):
            yield self._fault(name, problem)

    def _of_magnitudes(self, name: str, scale_name: str, layout: Layout) -> Iterator[Fault]:
        """Data and scales that do not belong together."""
        data = self.folder[name]
        shape = data.shape[0], data.shape[1]
        found = amaxes(data, layout.block(shape))
        if not found.any():
            yield self._fault(name, "all of its elements are zero", is_error=False)
            return
        scale = self._value(scale_name).reshape(found.shape)
        with np.errstate(over="ignore"):
            largest = float((found * scale).max())
        if largest >= _LARGE and scale.min() >= 0.25:
            problem = f"data * scale reaches {largest:.0f}: the scales are lost, or it was quantized twice"
            yield self._fault(scale_name, problem)
        # The largest of each row is 448 then, and of the columns that of some.
        elif layout.strategy == "channel" and shape[0] == shape[1] >= 16 and np.unique(scale).size > 1:
            columns = amaxes(data, (shape[0], 1))
            if (columns == _LIMIT).all() and not (found == _LIMIT).all():
                rows = "each of its columns reaches 448, but not each row, although rows have the scales"
                yield self._fault(name, f"{rows}: it is transposed")

    def _of_scale(self, name: str, stored: Stored) -> Iterator[Fault]:
        """What is wrong with a scale as such: whose it is, and its values."""
        layer, _, kind = name.rpartition(".")
        weight, layout = self.tensors.get(layer + WEIGHT), self.layout
        if kind in CACHE_SCALES:
            if stored.is_known and (problem := self._bad_values(name, positive_or_absent=True)):
                yield self._fault(name, problem)
        elif weight is None:
            yield self._fault(name, f"it is a scale, but {layer}{WEIGHT} is missing")
        elif not is_fp8(weight):
            yield self._fault(name, f"it is a scale, and {layer}{WEIGHT} is in {weight.shown}, which has none")
        elif layout is not None:
            names = layout.input_scale_names if kind in INPUT_SCALES else layout.scale_names
            if kind not in names:
                yield self._fault(name, f"engines look for {' or '.join(names)} in this layout")
            elif (first := self._present(layer, names)) != name:
                yield self._fault(name, f"{first} is there too: each engine reads one of them")
            elif kind in INPUT_SCALES and not layout.is_static:
                yield self._fault(name, "inputs are not static: engines ignore it", is_error=False)

    def _present(self, layer: str, names: tuple[str, ...]) -> str:
        """The first scale of a layer that is there by one of its names; by the first of these if there is none."""
        return next((name for kind in names if (name := f"{layer}.{kind}") in self.tensors), f"{layer}.{names[0]}")

    def _bad_values(self, name: str, *, positive_or_absent: bool = False) -> str:
        scale = self._value(name)
        # Engines write -1 for a scale of keys and values that is not there.
        wrong = {
            "NaN": np.isnan(scale),
            "infinite": np.isinf(scale),
            "zero or negative; a scale is a positive factor": (scale <= 0) & ~((scale == -1) & positive_or_absent),
        }
        return next((f"{int(x.sum())} of {scale.size} scales are {what}" for what, x in wrong.items() if x.any()), "")

    # --- The configuration, and layers that belong together ---

    def _of_configuration(self, layout: Layout) -> Iterator[Fault]:
        strict = layout.method == "compressed-tensors"
        if strict and layout.status not in ("compressed", "frozen"):
            problem = f"quantization_status is {layout.status}; without 'compressed', Transformers quantizes the "
            yield Fault(CONFIG, KEY, f"{problem}weights again and computes other numbers")
        if not any(map(is_fp8, self.tensors.values())):
            yield Fault(CONFIG, KEY, "it is there, but no tensor is in FP8")
        for layer in self.layers:
            stored = self.tensors[layer + WEIGHT]
            if is_fp8(stored) or layer in self.ignored or not is_linear(layer, len(stored.shape)):
                continue
            kind = "head" if is_head(layer) else "router" if is_router(layer, self.tensors) else "linear layer"
            # Other methods' engines leave heads and routers alone by themselves.
            if ("Linear" in layout.targets or layer in self.targeted) and (strict or kind == "linear layer"):
                problem = f"this {kind} is in {stored.shown}, and `ignore` does not list {layer}"
                yield self._fault(layer + WEIGHT, f"{problem}: engines look for its scale")
        for entry in layout.ignore:
            tied = self.folder.config.get("tie_word_embeddings") and is_head(entry)
            if not (tied or self._matched("ignore", [entry])):
                kind = "matches" if entry.startswith(_REGEX) else "is the name of"
                yield Fault(CONFIG, "ignore", f"{entry!r:.80} {kind} no layer of the checkpoint", is_error=False)

    def _of_caches(self) -> Iterator[Fault]:
        """Scales of keys and values that are not complete, or that no engine reads."""
        partners, cached = {"k_scale": "v_scale", "v_scale": "k_scale"}, self.layout and self.layout.cached
        found = [name for name in self.tensors if name.rpartition(".")[2] in partners]
        for name in found:
            stored, (layer, _, kind) = self.tensors[name], name.rpartition(".")
            other = f"{layer}.{partners[kind]}".replace(f".{kind[0]}_proj.", f".{partners[kind][0]}_proj.")
            if other not in self.tensors:
                yield self._fault(name, f"{other} is missing: keys and values both need a scale, or neither")
            if math.prod(stored.shape) != 1 or stored.dtype not in FLOATS:
                problem = f"it is {stored.shown}{stored.shape}; a scale of keys or values is one floating-point number"
                yield self._fault(name, problem)
            if not cached:
                problem = "config.json does not say that keys and values are in FP8: engines ignore it"
                yield self._fault(name, problem, is_error=False)
        if cached and not found:
            problem = "it says that keys and values are in FP8, but no tensor holds their scales: engines take 1"
            yield Fault(CONFIG, KEY, problem, is_error=False)

    def _of_merged_layers(self, layout: Layout) -> Iterator[Fault]:
        """Layers that engines make one, and that do not fit together."""
        for names in SAME_INPUT:
            for first in [name for name in self.tensors if name.endswith(f".{names[0]}{WEIGHT}")]:
                parent = first.removesuffix(f"{names[0]}{WEIGHT}")
                partners, what = [f"{parent}{name}" for name in names], ", ".join(names)
                weights = [self.tensors.get(f"{partner}{WEIGHT}") for partner in partners]
                if None in weights:
                    continue
                in_fp8 = {is_fp8(weight) for weight in weights if weight}
                if len(in_fp8) > 1:
                    yield self._fault(first, f"some of {what} are in FP8 and some are not; engines merge them")
                elif True in in_fp8:
                    yield from self._of_partners(layout, partners, first, what)

    def _of_partners(self, layout: Layout, partners: list[str], first: str, what: str) -> Iterator[Fault]:
        kinds = [layout.scale_names] if layout.strategy == "tensor" else []
        kinds += [layout.input_scale_names] if layout.is_static else []
        for kind in kinds:
            names = [self._present(partner, kind) for partner in partners]
            stored = [self.tensors.get(name) for name in names]
            if any(scale is None or not scale.is_known or math.prod(scale.shape) != 1 for scale in stored):
                continue
            scales = [float(self._value(name).reshape(())) for name in names]
            if len(set(scales)) > 1 and all(map(math.isfinite, scales)):
                problem = f"{names[0].rpartition('.')[2]} of {what} differ: engines that merge them quantize again"
                yield self._fault(first, f"{problem}, with the largest", is_error=False)
        rows = [self.tensors[f"{partner}{WEIGHT}"].shape[0] for partner in partners[:-1]]
        height = (layout.size or (1, 1))[0]
        if any(row % height for row in rows):
            problem = f"{what} have {rows} outputs, not multiples of {height}: engines that merge them refuse that"
            yield self._fault(first, problem, is_error=False)


def _matcher(key: str, entry: str, layout: Layout | None) -> Callable[[str], Any]:
    """Tells whether an entry of a list means a layer: by its name, a pattern of ModelOpt's, or a regular expression.

    Raises:
        BrokenCheckpoint: If it is not a regular expression, or a very long one.
    """
    method = "" if layout is None else layout.method
    if method == "modelopt" and "*" in entry:
        return lambda layer: fnmatch.fnmatchcase(layer, entry)
    if not entry.startswith(_REGEX):
        # The lists of other methods name modules, and mean all layers in them.
        return lambda layer: layer == entry or (method != "compressed-tensors" and f".{entry}." in f".{layer}.")
    if len(entry) > _LONGEST_PATTERN:
        raise BrokenCheckpoint(
            CONFIG, f"a pattern of {len(entry)} characters; at most {_LONGEST_PATTERN} are read", key
        )
    try:
        return re.compile(entry.removeprefix(_REGEX)).match
    except (re.error, RecursionError, OverflowError) as error:
        raise BrokenCheckpoint(CONFIG, f"{entry!r:.80} is not a regular expression: {error}", key) from None


# How many elements are looked at together.
_PART = 1 << 20


def not_finite(array: np.ndarray) -> int:
    """The number of infinities and NaNs, found by the bits, some megabytes at a time."""
    if array.dtype not in (E4M3, *FLOATS, np.float64):
        return 0
    info, words = ml_dtypes.finfo(array.dtype), np.dtype(f"u{array.dtype.itemsize}")
    # All bits of the exponent; E4M3 has numbers there too, and NaN alone has all bits.
    mask = words.type(0x7F if array.dtype == E4M3 else ((1 << info.nexp) - 1) << info.nmant)
    flat = array.reshape(-1)
    parts = (flat[start : start + _PART].view(words) for start in range(0, flat.size, _PART))
    return sum(int(((part & mask) == mask).sum()) for part in parts)


def amaxes(data: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The largest magnitudes of the blocks of E4M3 data `[out, in]`, in float32."""
    height, width = block
    columns = np.arange(0, data.shape[1], width)
    step = max(1, _PART // max(1, height * data.shape[1])) * height
    found = []
    for start in range(0, data.shape[0], step):
        # Without its sign, a larger byte is a larger magnitude.
        bits = np.maximum.reduceat(data[start : start + step].view(np.uint8) & 0x7F, columns, axis=1)
        found.append(np.maximum.reduceat(bits, np.arange(0, bits.shape[0], height), axis=0))
    return np.concatenate(found).view(E4M3).astype(np.float32)
