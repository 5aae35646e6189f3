"""What is wrong with each tensor of a folder, and with the folder as a whole."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator

import numpy as np

from .._printing.progress import Watcher, progress_of
from .._tensor_names import SAME_INPUT, WEIGHT, is_embedding, is_head, is_linear, is_norm, is_router, is_table
from .beside import has_tied_head
from .codes import Codes, count_codes, looked_through
from .configuration import presented, read_layout
from .folder import CONFIG, TensorFolder
from .four_bits import E2M1, TwoLevels
from .header import Stored
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
)
from .model_keys import input_scales, model_faults
from .patterns import REGEX, matcher
from .sizes import multiplies_by_norms, size_faults
from .strict_json import BrokenCheckpoint


# A weight whose data, times their scales, are as large as this has lost its scales, or was quantized twice.
_LARGE, _LIMIT = 112.0, 448.0

# And one whose largest is below this adds nothing to any output; trained ones are about 2**30 times as large.
_SMALL = 2.0**-30

# What the largest element of each row is where data were made for float8_e4m3fnuz, which ends at 240; vLLM takes 224.
_FNUZ_LIMITS, _FEW_BLOCKS = (224.0, 240.0), 16

# Calibrations of one input differ less than by this factor.
_SAME_INPUT_FACTOR = 64

# No weight in four bits has so many scales and all of them equal to 1.
_FEW_SCALES = 32

# Engines flush smaller scales to zero; and what is larger overflows.
_SMALLEST, _LARGEST = np.float32(2.0**-126), float(np.finfo(np.float32).max)

# What a target is that names a class of layers; other classes have no weights that are multiplied.
_CLASSES = re.compile(r"(Linear|Experts?|MoE)$")

# One scale for keys and values, as older libraries wrote it.
_OLD_CACHE_SCALE = "kv_scale"

WRITE_AGAIN = "copy the folder again, or write it again with the library that made it"
_QUANTIZE_AGAIN = "quantize the weight again from the one in high precision"
_DEQUANTIZE = "write it in bfloat16, and add its layer to `ignore`"


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something wrong with a folder.

    Args:
        file: The file, by its name in the folder.
        tensor: The tensor, or the part of the configuration; empty if it is the file as a whole.
        problem: What is wrong.
        remedy: What to do.
        is_error: Whether the checkpoint is broken; otherwise some engines compute other numbers than others.
    """

    file: str
    tensor: str
    problem: str
    remedy: str
    is_error: bool = True

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.file, self.tensor, self.line)))

    @property
    def line(self) -> str:
        """The problem and the remedy."""
        return f"{self.problem}; {self.remedy}"

    @property
    def error(self) -> BrokenCheckpoint:
        """The error that says the same."""
        return BrokenCheckpoint(self.file, self.line, self.tensor)


def layout_name(layout: Layout | None) -> str:
    """What reports call a layout."""
    return "not quantized" if layout is None else layout.name


def is_quantized(stored: Stored) -> bool:
    """Whether a tensor is in one of the formats of floating point of eight bits or four."""
    dtype = stored.dtype
    return dtype == E2M1 or (dtype.itemsize == 1 and dtype.name.startswith("float8") and dtype != E8M0)


def bits_of(stored: Stored) -> str:
    """What messages call the format of a quantized weight."""
    return "four bits" if stored.dtype == E2M1 else "FP8"


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
            NotSupported: If its layout is not read here.
        """
        found = Checked(presented(folder), read_layout(folder))
        _ = found.ignored, found.targeted  # A pattern that cannot be read breaks the folder.
        return found

    @property
    def tensors(self) -> dict[str, Stored]:
        return self.folder.tensors

    @functools.cached_property
    def layers(self) -> list[str]:
        return [name.removesuffix(WEIGHT) for name in self.tensors if name.endswith(WEIGHT)]

    @functools.cached_property
    def _misfits(self) -> set[str]:
        """The tensors that have other shapes than config.json says."""
        return {tensor for _, tensor, *_ in size_faults(self.folder)}

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
        method = "" if self.layout is None else self.layout.method
        matchers = [matcher(key, entry, method) for entry in entries]
        return {layer for layer in self.layers if any(matches(layer) for matches in matchers)}

    def _fault(self, name: str, problem: str, remedy: str, *, is_error: bool = True) -> Fault:
        """A fault of a tensor, in its file."""
        stored = self.tensors[name]
        return Fault(stored.file.name, stored.name, problem, remedy, is_error)

    def _value(self, name: str) -> np.ndarray:
        return as_float32(self.folder[name])

    def faults(self, progress: Watcher | None) -> Iterator[Fault]:
        """Everything that is wrong."""
        sizes = {name: stored.bytes for name, stored in self.tensors.items()}
        with progress_of("checking", sum(sizes.values()), progress) as advance:
            for name, size in sizes.items():
                yield from self.of_tensor(name)
                advance(name, size)
        yield from self.of_folder()

    def of_tensor(self, name: str) -> Iterator[Fault]:
        """What is wrong with one tensor, whose values are read."""
        stored = self.tensors[name]
        if self.folder.has_changed(name):
            yield self._fault(name, "its bytes have changed since it was written", "copy the file again")
            return
        if is_quantized(stored):
            yield from self._of_data(name, stored)
        elif name.rpartition(".")[2] in SCALES + CACHE_SCALES:
            yield from self._of_scale(name, stored)
        if stored.unreadable is not None:
            yield self._fault(name, stored.unreadable, "or leave it out if the model does not need it")
        elif not is_quantized(stored) and "scale" not in name.rpartition(".")[2]:
            yield from self._of_plain(name)

    def of_folder(self) -> Iterator[Fault]:
        """What is wrong with the configuration, and with tensors that do not fit it or each other."""
        yield from (Fault(*found) for found in size_faults(self.folder))
        yield from (Fault(*found) for found in model_faults(self.folder, self.layout))
        yield from self._of_caches()
        if self.layout is not None:
            yield from self._of_configuration(self.layout)
            yield from self._of_merged_layers(self.layout)
            yield from self._of_input_scales(self.layout)

    def _of_plain(self, name: str) -> Iterator[Fault]:
        """What is wrong with the values of a tensor in high precision."""
        count, is_zero = looked_through(self.folder[name])
        if count:
            problem = f"{count} of its elements are infinite or NaN"
            yield self._fault(name, problem, "take a checkpoint from before the training diverged")
        elif is_zero and name.endswith(WEIGHT):
            yield self._all_zero(name)

    def _all_zero(self, name: str) -> Fault:
        # Norms of some models scale by 1 + weight, and some layers begin as zero.
        is_error = multiplies_by_norms(self.folder)
        problem = "all of its elements are zero" + (", and so are the outputs of the model's layer" if is_error else "")
        return self._fault(name, problem, "copy the weight again from the trained model", is_error=is_error)

    # --- Weights in FP8, and their scales ---

    def _of_data(self, name: str, stored: Stored) -> Iterator[Fault]:
        layer, axes, bits = name.removesuffix(WEIGHT), len(stored.shape), bits_of(stored)
        layout = None if self.layout is None else self.layout.of(layer)
        remedy = f"dequantize {layer} with its scale and write it in bfloat16"
        if layout is None:
            wrong = (
                f"it is in {bits}, and config.json has no quantization_config: engines take its bytes for the weights"
            )
            remedy = f"add the {KEY} of the layout that the folder was written in"
        elif stored.dtype not in (E4M3, E2M1):
            wrong = f"it is in {stored.shown}; weights for engines are in float8_e4m3fn"
            remedy = "dequantize it, and quantize it again in that dtype"
        elif name.endswith(WEIGHT) and stored.dtype != layout.format.dtype and layer not in self.ignored:
            wrong = f"it is in {bits}, and the layout {layout.name} has weights in {layout.format.dtype}"
            remedy = f"name its layer in the group of config.json that has it in {bits}, or quantize it again"
        elif not name.endswith(WEIGHT):
            wrong = f"it is in {bits} without a scale; only weights of layers may be in {bits}"
        elif is_table(layer) or (is_norm(layer) and axes == 1):
            wrong = f"it is in {bits}, and engines read embeddings and norms without scales"
        elif axes not in (2, 3):
            wrong = f"it is in {bits} with shape {stored.shape}; weights of linear layers have the axes [out, in]"
        elif layer in self.ignored:
            wrong = f"it is in {bits}, and `ignore` lists the layer: engines take its bytes for the weights"
            remedy = f"remove {layer} from `ignore`"
        elif is_head(layer) and self.folder.config.get("tie_word_embeddings"):
            wrong = f"it is in {bits}, and tie_word_embeddings is true: some engines use the embedding in its place"
            remedy = "remove the head and its scales, or set tie_word_embeddings to false"
        else:
            codes = count_codes(self.folder[name], layout.block((stored.shape[-2], stored.shape[-1])))
            yield from self._of_codes(name, codes)
            if not codes.nan:
                yield from self._of_layer(layer, stored, layout, codes)
            return
        yield self._fault(name, wrong, remedy)

    def _of_codes(self, name: str, codes: Codes) -> Iterator[Fault]:
        """What the data of a weight show without its scales."""
        looks_fnuz = self.tensors[name].dtype == E4M3 and codes.zeros >= 32 and not codes.has_negative_zeros
        remedy = "view its bytes as float8_e4m3fnuz, dequantize that, and quantize it again in float8_e4m3fn"
        if codes.nan:
            hint = ": they look like float8_e4m3fnuz" if looks_fnuz else ""
            yield self._fault(
                name, f"{codes.nan} of its elements are NaN{hint}", remedy if looks_fnuz else _QUANTIZE_AGAIN
            )
        elif looks_fnuz and codes.amaxes.any():
            problem = f"{codes.zeros} of its elements are zero and none is -0, as in float8_e4m3fnuz, whose codes mean "
            yield self._fault(
                name, f"{problem}half as much", f"if it was written on an AMD GPU, {remedy}", is_error=False
            )

    def _of_layer(self, layer: str, stored: Stored, layout: Layout, codes: Codes) -> Iterator[Fault]:
        """What is wrong with the scales of a weight in E4M3."""
        name, scale_name = layer + WEIGHT, self._present(layer, layout.scale_names)
        if is_embedding(layer) or is_norm(layer):
            problem = "its name is like that of an embedding or a norm, which engines read without scales"
            remedy = f"if it is a linear layer, do nothing; otherwise {_DEQUANTIZE}"
            yield self._fault(name, problem, remedy, is_error=False)
        if layout.is_static:
            yield from self._of_input(self._present(layer, layout.input_scale_names), stored)
        if (scale := self.tensors.get(scale_name)) is None:
            names = " or ".join((scale_name, *layout.scale_names[1:]))
            problem = f"it is in {bits_of(stored)} and has no {names}: some engines take its bytes for the weights"
            yield self._fault(name, problem, "add the scale that multiplies it, or export the folder again")
            return
        # With `fp8`, exponents may be powers of two in float32, as DeepSeek-V3.1 has them.
        right = FLOATS if not layout.exponents else EXPONENTS + (FLOATS if layout.method == "fp8" else ())
        shapes = layout.scale_shapes(stored.shape)
        if layout.has_units and (found := self._of_unit(scale, stored)) is not None:
            yield found
        elif scale.dtype not in right:
            expected = " or ".join(dtype.name for dtype in right)
            yield self._fault(
                scale_name, f"it is in {scale.shown}; its layout has {expected}", f"write it in {right[0].name}"
            )
        elif scale.shape not in shapes:
            transposed = scale.shape in layout.scale_shapes((*stored.shape[:-2], *stored.shape[:-3:-1]))
            # Blocks of a transposed weight are those of a transposed scale: the sizes of the model decide.
            is_scale = scale.shape[-2:] == shapes[0][:-3:-1] and name not in self._misfits
            hint = "; it fits the transposed weight, which has to be [out, in]" if transposed and not is_scale else ""
            hint = "; it is transposed" if is_scale else hint
            has = f"a weight of shape {stored.shape} has {' or '.join(map(str, shapes))} in this layout"
            remedy = "transpose the weight" if transposed else "correct the strategy or block size in config.json"
            remedy = "transpose the scale" if is_scale else remedy
            yield self._fault(scale_name, f"it has shape {scale.shape}; {has}{hint}", remedy)
        elif found := self._bad_values(scale_name, or_zero=layout.has_units):
            yield self._fault(scale_name, *found)
        elif math.prod(stored.shape):
            yield from self._of_magnitudes(name, scale_name, layout, codes)

    def _of_unit(self, scale: Stored, weight: Stored) -> Fault | None:
        """What is wrong with the two levels of scales of a weight in NVFP4."""
        fault = lambda part, problem, remedy: Fault(part.file.name, part.name, problem, remedy)
        blocks, name = (scale.blocks, scale.tensor_name) if isinstance(scale, TwoLevels) else (scale, "")
        if blocks.dtype != E4M3:
            return fault(blocks, f"it is in {blocks.shown}; its layout has {E4M3}", f"write it in {E4M3}")
        assert isinstance(scale, TwoLevels)
        if (unit := scale.tensor) is None:
            problem = (
                f"it is missing, and blocks in NVFP4 have scales that it {'divides' if scale.divides else 'multiplies'}"
            )
            return Fault(blocks.file.name, name, problem, "copy it from the original folder, or quantize it again")
        experts = math.prod(weight.shape[:-2])
        if unit.dtype not in FLOATS:
            return fault(unit, f"it is in {unit.shown}; scales of tensors are in float32", "write it in float32")
        if math.prod(unit.shape) not in {1, experts}:
            return fault(unit, f"it has shape {unit.shape}; a weight has one", "write the one of the weight")
        values = as_float32(unit.array())
        if not (np.isfinite(values) & (values > 0)).all():
            problem = f"it is {float(values[~(np.isfinite(values) & (values > 0))][0])}; a scale is a positive factor"
            return fault(unit, problem, "compute it again: amax / 2688 of the weight, or 2688 / amax if it divides")
        return None

    def _of_input(self, name: str, weight: Stored) -> Iterator[Fault]:
        if (stored := self.tensors.get(name)) is None:
            problem = "it is missing, and inputs are static: engines need the scale"
            yield Fault(weight.file.name, name, problem, "add it, or convert to a layout with dynamic inputs")
        elif stored.dtype not in FLOATS:
            yield self._fault(name, f"it is in {stored.shown}; scales of inputs are in float32", "write it in float32")
        elif math.prod(stored.shape) != max(1, math.prod(weight.shape[:-2])):
            problem = f"it has shape {stored.shape}; a static input has one scale"
            yield self._fault(name, problem, "write the largest of them alone")
        elif found := self._bad_values(name):
            yield self._fault(name, *found)
        elif (values := self._value(name)).min() < _SMALLEST or float(values.max()) * _LIMIT > _LARGEST:
            problem = f"it is {float(values.min())}: engines divide inputs by it, and get NaN or zeros"
            yield self._fault(name, problem, "calibrate the layer's input again: amax / 448")

    def _of_magnitudes(self, name: str, scale_name: str, layout: Layout, codes: Codes) -> Iterator[Fault]:
        """Data and scales that do not belong together."""
        shape, found, limit = self.tensors[name].shape, codes.amaxes, layout.format.max
        scale = self._value(scale_name).reshape(found.shape)
        if not (found.any() and scale.any()):
            yield self._all_zero(name)
            return
        with np.errstate(over="ignore"):
            largest = float((found * scale).max())
        is_zero = (scale == 0) & layout.has_units
        if count := int(((scale < _SMALLEST) & (found > 0) & ~is_zero).sum()):
            problem = f"{count} of {scale.size} scales are below 2**-126, which engines flush to zero"
            yield self._fault(scale_name, problem, _QUANTIZE_AGAIN)
        elif not math.isfinite(largest) or (largest >= _LARGE and scale.min() * limit >= _LARGE):
            problem = f"data * scale reaches {largest:.0f}: the scales are lost, or it was quantized twice"
            yield self._fault(scale_name, problem, _QUANTIZE_AGAIN)
        elif largest < _SMALL:
            problem = f"data * scale reaches {largest:.1e} at most, and the layer adds nothing: the scales are lost"
            yield self._fault(scale_name, problem, _QUANTIZE_AGAIN)
        elif limit < _LARGE and scale.size >= _FEW_SCALES and (scale == 1).all():
            problem = "all of its scales are 1, and data * scale are the codes alone: the scales are lost"
            yield self._fault(scale_name, problem, _QUANTIZE_AGAIN)
        elif codes.is_clipped:
            problem = f"{codes.limits / math.prod(shape):.1%} of its elements are 448 or -448: its scales are too small"
            yield self._fault(
                name, f"{problem}, and larger weights were clipped", f"{_QUANTIZE_AGAIN}: scale = amax / 448"
            )
        elif layout.strategy == "channel" and codes.is_unused:
            problem = f"none of its elements is above {found.max():g} of 448: its scales are {_LIMIT / found.max():.0f}"
            remedy = f"{_QUANTIZE_AGAIN}: scale = amax / 448"
            yield self._fault(name, f"{problem} times too large, and small weights were rounded to zero", remedy)
        elif found.size >= _FEW_BLOCKS and found.max() in _FNUZ_LIMITS and (found == found.max()).all():
            problem = f"the largest of each block is {found.max():g} and not 448, as in data for float8_e4m3fnuz"
            remedy = "if its bytes or scales were adapted to another format, compare it with the original weight"
            yield self._fault(name, problem, remedy, is_error=False)
        # The largest of each row is 448 then, and of the columns that of some.
        elif layout.strategy == "channel" and len(shape) == 2 and shape[0] == shape[1] >= 16:
            columns = count_codes(self.folder[name], (shape[0], 1)).amaxes if np.unique(scale).size > 1 else found
            if (columns == _LIMIT).all() and not (found == _LIMIT).all():
                rows = "each of its columns reaches 448, but not each row, although rows have the scales"
                yield self._fault(name, f"{rows}: it is transposed", "transpose the weight: it has to be [out, in]")

    def _of_scale(self, name: str, stored: Stored) -> Iterator[Fault]:
        """What is wrong with a scale as such: whose it is, and its values."""
        layer, _, kind = name.rpartition(".")
        weight, layout = self.tensors.get(layer + WEIGHT), self.layout and self.layout.of(layer)
        if kind in CACHE_SCALES:
            if stored.is_known and (found := self._bad_values(name, positive_or_absent=True)):
                yield self._fault(name, *found)
        elif weight is None:
            problem = f"it is a scale, but {layer}{WEIGHT} is missing"
            yield self._fault(name, problem, "add the weight, or remove the scale")
        elif not is_quantized(weight):
            problem = f"it is a scale, and {layer}{WEIGHT} is in {weight.shown}, which has none"
            yield self._fault(name, problem, "remove the scale, or quantize the weight")
        elif layout is not None:
            names = layout.input_scale_names if kind in INPUT_SCALES else layout.scale_names
            if kind not in names:
                yield self._fault(
                    name, f"engines look for {' or '.join(names)} in this layout", f"rename it to {layer}.{names[0]}"
                )
            elif (first := self._present(layer, names)) != name:
                yield self._fault(name, f"{first} is there too: each engine reads one of them", "remove one of them")
            elif kind in INPUT_SCALES and not layout.is_static:
                problem = "inputs are not static: engines ignore it"
                yield self._fault(name, problem, "remove it, or say dynamic: false in config.json", is_error=False)

    def _present(self, layer: str, names: tuple[str, ...]) -> str:
        """The first scale of a layer that is there by one of its names; by the first of these if there is none."""
        return next((name for kind in names if (name := f"{layer}.{kind}") in self.tensors), f"{layer}.{names[0]}")

    def _bad_values(
        self, name: str, *, positive_or_absent: bool = False, or_zero: bool = False
    ) -> tuple[str, str] | None:
        """A problem of a scale's values and its remedy."""
        scale = self._value(name)
        # Engines write -1 for a scale of keys and values that is not there.
        wrong = {
            "NaN": np.isnan(scale),
            "infinite": np.isinf(scale),
            # In NVFP4 small blocks of a tensor may have the scale 0.
            "zero or negative; a scale is a positive factor": (scale < 0 if or_zero else scale <= 0)
            & ~((scale == -1) & positive_or_absent),
        }
        what = next((what for what, x in wrong.items() if x.any()), None)
        remedy = "compute it again: amax / 448 of what it scales"
        return None if what is None else (f"{int(wrong[what].sum())} of {scale.size} scales are {what}", remedy)

    # --- The configuration, and layers that belong together ---

    def _of_configuration(self, layout: Layout) -> Iterator[Fault]:
        strict = layout.method == "compressed-tensors"
        if strict and layout.status != "compressed":
            problem = f"quantization_status is {layout.status}; without 'compressed', Transformers quantizes the "
            problem += "weights again, or ignores their scales, and computes other numbers"
            remedy, is_error = "set quantization_status to 'compressed'", layout.status != "frozen"
            yield Fault(CONFIG, KEY, problem, remedy, is_error)
        if not any(map(is_quantized, self.tensors.values())):
            yield Fault(CONFIG, KEY, "it is there, but no tensor is in FP8 or four bits", f"remove {KEY}")
        for layer in self.layers:
            stored = self.tensors[layer + WEIGHT]
            if is_quantized(stored) or layer in self.ignored or not is_linear(layer, len(stored.shape)):
                continue
            kind = "head" if is_head(layer) else "router" if is_router(layer, self.tensors) else "linear layer"
            # Other methods' engines leave heads and routers alone by themselves.
            is_meant = "Linear" in layout.targets or layer in self.targeted
            if (is_meant and (strict or kind == "linear layer")) or stored.dtype.kind in "iu":
                problem = f"this {kind} is in {stored.shown}, and `ignore` does not list {layer}"
                yield self._fault(
                    layer + WEIGHT, f"{problem}: engines look for its scale", f"add {layer} to `ignore`, or quantize it"
                )
        yield from self._of_targets(layout)
        for entry in layout.ignore:
            tied = has_tied_head(self.folder.config, self.layers)
            tied = tied and (is_head(entry) or matcher("ignore", entry, layout.method)("lm_head"))
            if not (tied or self._matched("ignore", [entry])):
                kind = "matches" if entry.startswith(REGEX) else "is the name of"
                problem = f"{entry!r:.80} {kind} no layer of the checkpoint"
                yield Fault(CONFIG, "ignore", problem, "correct or remove it", is_error=False)

    def _of_targets(self, layout: Layout) -> Iterator[Fault]:
        """Layers in FP8 that no target means."""
        by_class = any(_CLASSES.search(target) for target in layout.targets if not target.startswith(REGEX))
        if by_class or not layout.targets:
            return
        missed = [
            name for name in self.layers if is_quantized(self.tensors[name + WEIGHT]) and name not in self.targeted
        ]
        if missed:
            more = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
            problem = (
                f"{list(layout.targets)!r:.80} do not mean {missed[0]}{more}, which are in FP8: engines take their "
            )
            yield Fault(
                CONFIG, "targets", f"{problem}bytes for the weights", "add 'Linear', or the names of the layers"
            )

    def _of_caches(self) -> Iterator[Fault]:
        """Scales of keys and values that are not complete, or that no engine reads."""
        partners, cached = {"k_scale": "v_scale", "v_scale": "k_scale"}, self.layout and self.layout.cached
        found = [name for name in self.tensors if name.rpartition(".")[2] in (*partners, _OLD_CACHE_SCALE)]
        for name in found:
            stored, (layer, _, kind) = self.tensors[name], name.rpartition(".")
            if kind == _OLD_CACHE_SCALE:
                problem = "it is the old name of one scale for keys and values, which vLLM reads and others ignore"
                yield self._fault(name, problem, "write it twice, as k_scale and as v_scale", is_error=False)
            else:
                other = f"{layer}.{partners[kind]}".replace(f".{kind[0]}_proj.", f".{partners[kind][0]}_proj.")
                if other not in self.tensors:
                    problem = f"{other} is missing: keys and values both need a scale, or neither"
                    yield self._fault(name, problem, f"add it, or remove {kind}")
            if math.prod(stored.shape) != 1 or stored.dtype not in FLOATS:
                problem = f"it is {stored.shown}{stored.shape}; a scale of keys or values is one floating-point number"
                yield self._fault(name, problem, "write the largest alone, in float32")
            if not cached:
                problem = "config.json does not say that keys and values are in FP8: engines ignore it"
                remedy = "add a kv_cache_scheme to the quantization_config, or remove the scale"
                yield self._fault(name, problem, remedy, is_error=False)
        if cached and not found:
            problem = "it says that keys and values are in FP8, but no tensor holds their scales: engines take 1"
            remedy = "add k_scale and v_scale to each attention, or remove kv_cache_scheme"
            yield Fault(CONFIG, KEY, problem, remedy, is_error=False)

    def _of_merged_layers(self, layout: Layout) -> Iterator[Fault]:
        """Layers that engines make one, and that do not fit together."""
        for names in SAME_INPUT:
            for first in [name for name in self.tensors if name.endswith(f".{names[0]}{WEIGHT}")]:
                parent = first.removesuffix(f"{names[0]}{WEIGHT}")
                partners, what = [f"{parent}{name}" for name in names], ", ".join(names)
                weights = [self.tensors.get(f"{partner}{WEIGHT}") for partner in partners]
                if None in weights:
                    continue
                are_quantized = {is_quantized(weight) for weight in weights if weight}
                if len(are_quantized) > 1:
                    bits = next(bits_of(weight) for weight in weights if weight and is_quantized(weight))
                    problem = f"some of {what} are in {bits} and some are not; engines merge them"
                    yield self._fault(first, problem, "quantize all of them, or add all to `ignore`")
                elif True in are_quantized:
                    if len({id(layout.of(partner)) for partner in partners}) > 1:
                        problem = f"{what} are in different groups of config_groups; engines merge them"
                        yield self._fault(first, problem, "quantize all of them in one layout")
                    else:
                        yield from self._of_partners(layout.of(partners[0]), partners, first, what)

    def _of_input_scales(self, layout: Layout) -> Iterator[Fault]:
        """Scales of inputs that are far from all others: of a large model with outliers, or wrong."""
        names = [name for name in self.tensors if name.rpartition(".")[2] in layout.input_scale_names]
        stored = [name for name in names if self.tensors[name].dtype in FLOATS and self.tensors[name].bytes]
        scales = {name: float(self._value(name).max()) for name in stored}
        scales = {name: scale for name, scale in scales.items() if 0 < scale < math.inf}
        for name, factor in input_scales(scales):
            problem = f"it is {factor:.3g} times the median of the folder's input scales"
            remedy = "if the layer's inputs are not that large, calibrate them again: amax / 448"
            yield self._fault(name, problem, remedy, is_error=False)

    def _of_units(self, partners: list[str], first: str, what: str) -> Iterator[Fault]:
        """Scales of tensors in NVFP4 that differ where engines have one."""
        scales = [self.tensors.get(f"{partner}.weight_scale") for partner in partners]
        units = [scale.tensor for scale in scales if isinstance(scale, TwoLevels) and scale.tensor is not None]
        if len(units) == len(partners) and len({unit.array().tobytes() for unit in units if unit.is_known}) > 1:
            kind = units[0].name.rpartition(".")[2]
            problem = (
                f"{kind} of {what} differ: engines that merge them take one for all, and scale some weights wrongly"
            )
            yield self._fault(first, problem, "quantize them again with one for all", is_error=False)

    def _of_partners(self, layout: Layout, partners: list[str], first: str, what: str) -> Iterator[Fault]:
        if layout.has_units:
            yield from self._of_units(partners, first, what)
        kinds = [layout.scale_names] if layout.strategy == "tensor" else []
        kinds += [layout.input_scale_names] if layout.is_static else []
        for kind in kinds:
            names = [self._present(partner, kind) for partner in partners]
            stored = [self.tensors.get(name) for name in names]
            if any(scale is None or not scale.is_known or math.prod(scale.shape) != 1 for scale in stored):
                continue
            scales = [float(self._value(name).reshape(())) for name in names]
            factor = max(scales) / min(scales) if min(scales) > 0 else 0
            if kind == layout.input_scale_names and _SAME_INPUT_FACTOR <= factor < math.inf:
                far, last = names[scales.index(max(scales))], names[0].rpartition(".")[2]
                problem = f"{last} of {what} differ by a factor of {factor:.0f}, although they have one input"
                yield self._fault(far, problem, "calibrate the input again: amax / 448")
            elif len(set(scales)) > 1 and all(map(math.isfinite, scales)):
                problem = f"{names[0].rpartition('.')[2]} of {what} differ: engines that merge them quantize again"
                is_weight = kind == layout.scale_names
                remedy = "convert to FP8" if layout.is_static else "convert to FP8_DYNAMIC"
                remedy = f"{remedy}, which has a scale for each row" if is_weight else "give all of them the largest"
                yield self._fault(first, f"{problem}, with the largest", remedy, is_error=False)
        rows = [self.tensors[f"{partner}{WEIGHT}"].shape[0] for partner in partners[:-1]]
        height = (layout.size or (1, 1))[0]
        if any(row % height for row in rows):
            problem = f"{what} have {rows} outputs, not multiples of {height}: engines that merge them refuse that"
            yield self._fault(first, problem, "convert to FP8_DYNAMIC, which has a scale for each row", is_error=False)
