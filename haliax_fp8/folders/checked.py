"""What is wrong with each tensor of a folder."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from .._tensor_names import WEIGHT, is_embedding, is_head, is_norm, is_table
from ..layouts import Layout
from .beside import TIED
from .codes import Codes, count_codes, looked_through
from .configuration import presented, read_layout
from .folder import TensorFolder
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
    as_float32,
    input_scale_names,
    layout_of_layer,
    scale_names,
    scale_shapes,
)
from .patterns import matcher
from .sizes import multiplies_by_norms, size_faults
from .strict_json import BrokenCheckpoint


# A weight whose data, times their scales, are as large as this has lost its scales, or was quantized twice.
_LARGE, _LIMIT = 112.0, 448.0

# And one whose largest is below this adds nothing to any output; trained ones are about 2**30 times as large.
_SMALL = 2.0**-30

# What the largest element of each row is where data were made for float8_e4m3fnuz, which ends at 240; vLLM takes 224.
_FNUZ_LIMITS, _FEW_BLOCKS = (224.0, 240.0), 16

# No weight in four bits has so many scales and all of them equal to 1.
_FEW_SCALES = 32

# Engines flush smaller scales to zero; and what is larger overflows.
_SMALLEST, _LARGEST = np.float32(2.0**-126), float(np.finfo(np.float32).max)

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
        checked = Checked(presented(folder), read_layout(folder))
        _ = checked.ignored, checked.targeted  # A pattern that cannot be read breaks the folder.
        return checked

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
        return self.matched("ignore", self.layout.ignore if self.layout else ())

    @functools.cached_property
    def targeted(self) -> set[str]:
        """The layers that the configuration names, or matches, as quantized; classes of layers match none."""
        return self.matched("targets", self.layout.targets if self.layout else ())

    def matched(self, key: str, entries: Iterable[str]) -> set[str]:
        """The layers that the entries of a list mean."""
        method = "" if self.layout is None else self.layout.method
        matchers = [matcher(key, entry, method) for entry in entries]
        return {layer for layer in self.layers if any(matches(layer) for matches in matchers)}

    def fault(self, name: str, problem: str, remedy: str, *, is_error: bool = True) -> Fault:
        """A fault of a tensor, in its file."""
        stored = self.tensors[name]
        return Fault(stored.file.name, stored.name, problem, remedy, is_error)

    def value(self, name: str) -> np.ndarray:
        return as_float32(self.folder[name])

    def of_tensor(self, name: str) -> Iterator[Fault]:
        """What is wrong with one tensor, whose values are read."""
        stored = self.tensors[name]
        if self.folder.has_changed(name):
            yield self.fault(name, "its bytes have changed since it was written", "copy the file again")
            return
        if is_quantized(stored):
            yield from self._of_data(name, stored)
        elif name.rpartition(".")[2] in SCALES + CACHE_SCALES:
            yield from self._of_scale(name, stored)
        if stored.unreadable is not None:
            yield self.fault(name, stored.unreadable, "or leave it out if the model does not need it")
        elif not is_quantized(stored) and "scale" not in name.rpartition(".")[2]:
            yield from self._of_plain(name)

    def _of_plain(self, name: str) -> Iterator[Fault]:
        """What is wrong with the values of a tensor in high precision."""
        count, is_zero = looked_through(self.folder[name])
        if count:
            problem = f"{count} of its elements are infinite or NaN"
            yield self.fault(name, problem, "take a checkpoint from before the training diverged")
        elif is_zero and name.endswith(WEIGHT):
            yield self._all_zero(name)

    def _all_zero(self, name: str) -> Fault:
        # Norms of some models scale by 1 + weight, and some layers begin as zero.
        is_error = multiplies_by_norms(self.folder)
        problem = "all of its elements are zero" + (", and so are the outputs of the model's layer" if is_error else "")
        return self.fault(name, problem, "copy the weight again from the trained model", is_error=is_error)

    # --- Weights in FP8, and their scales ---

    def _of_data(self, name: str, stored: Stored) -> Iterator[Fault]:
        layer, axes, bits = name.removesuffix(WEIGHT), len(stored.shape), bits_of(stored)
        layout = None if self.layout is None else layout_of_layer(self.layout, layer)
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
        elif is_head(layer) and self.folder.config.get(TIED):
            wrong = f"it is in {bits}, and tie_word_embeddings is true: some engines use the embedding in its place"
            remedy = "remove the head and its scales, or set tie_word_embeddings to false"
        else:
            codes = count_codes(self.folder[name], layout.block((stored.shape[-2], stored.shape[-1])))
            yield from self._of_codes(name, codes)
            if not codes.nan:
                yield from self._of_layer(layer, stored, layout, codes)
            return
        yield self.fault(name, wrong, remedy)

    def _of_codes(self, name: str, codes: Codes) -> Iterator[Fault]:
        """What the data of a weight show without its scales."""
        looks_fnuz = self.tensors[name].dtype == E4M3 and codes.zeros >= 32 and not codes.has_negative_zeros
        remedy = "view its bytes as float8_e4m3fnuz, dequantize that, and quantize it again in float8_e4m3fn"
        if codes.nan:
            hint = ": they look like float8_e4m3fnuz" if looks_fnuz else ""
            yield self.fault(
                name, f"{codes.nan} of its elements are NaN{hint}", remedy if looks_fnuz else _QUANTIZE_AGAIN
            )
        elif looks_fnuz and codes.amaxes.any():
            problem = f"{codes.zeros} of its elements are zero and none is -0, as in float8_e4m3fnuz, whose codes mean "
            yield self.fault(
                name, f"{problem}half as much", f"if it was written on an AMD GPU, {remedy}", is_error=False
            )

    def _of_layer(self, layer: str, stored: Stored, layout: Layout, codes: Codes) -> Iterator[Fault]:
        """What is wrong with the scales of a weight in E4M3."""
        name, scale_name = layer + WEIGHT, self.present(layer, scale_names(layout))
        if is_embedding(layer) or is_norm(layer):
            problem = "its name is like that of an embedding or a norm, which engines read without scales"
            remedy = f"if it is a linear layer, do nothing; otherwise {_DEQUANTIZE}"
            yield self.fault(name, problem, remedy, is_error=False)
        if layout.is_static:
            yield from self._of_input(self.present(layer, input_scale_names(layout)), stored)
        if (scale := self.tensors.get(scale_name)) is None:
            names = " or ".join((scale_name, *scale_names(layout)[1:]))
            problem = f"it is in {bits_of(stored)} and has no {names}: some engines take its bytes for the weights"
            yield self.fault(name, problem, "add the scale that multiplies it, or export the folder again")
            return
        # With `fp8`, exponents may be powers of two in float32, as DeepSeek-V3.1 has them.
        right = FLOATS if not layout.exponents else EXPONENTS + (FLOATS if layout.method == "fp8" else ())
        shapes = scale_shapes(layout, stored.shape)
        if layout.has_units and (fault := self._of_unit(scale, stored)) is not None:
            yield fault
        elif scale.dtype not in right:
            expected = " or ".join(dtype.name for dtype in right)
            yield self.fault(
                scale_name, f"it is in {scale.shown}; its layout has {expected}", f"write it in {right[0].name}"
            )
        elif scale.shape not in shapes:
            transposed = scale.shape in scale_shapes(layout, (*stored.shape[:-2], *stored.shape[:-3:-1]))
            # Blocks of a transposed weight are those of a transposed scale: the sizes of the model decide.
            is_scale = scale.shape[-2:] == shapes[0][:-3:-1] and name not in self._misfits
            hint = "; it fits the transposed weight, which has to be [out, in]" if transposed and not is_scale else ""
            hint = "; it is transposed" if is_scale else hint
            has = f"a weight of shape {stored.shape} has {' or '.join(map(str, shapes))} in this layout"
            remedy = "transpose the weight" if transposed else "correct the strategy or block size in config.json"
            remedy = "transpose the scale" if is_scale else remedy
            yield self.fault(scale_name, f"it has shape {scale.shape}; {has}{hint}", remedy)
        elif problem_and_remedy := self._bad_values(scale_name, or_zero=layout.has_units):
            yield self.fault(scale_name, *problem_and_remedy)
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
            yield self.fault(name, f"it is in {stored.shown}; scales of inputs are in float32", "write it in float32")
        elif math.prod(stored.shape) != max(1, math.prod(weight.shape[:-2])):
            problem = f"it has shape {stored.shape}; a static input has one scale"
            yield self.fault(name, problem, "write the largest of them alone")
        elif problem_and_remedy := self._bad_values(name):
            yield self.fault(name, *problem_and_remedy)
        elif (values := self.value(name)).min() < _SMALLEST or float(values.max()) * _LIMIT > _LARGEST:
            problem = f"it is {float(values.min())}: engines divide inputs by it, and get NaN or zeros"
            yield self.fault(name, problem, "calibrate the layer's input again: amax / 448")

    def _of_magnitudes(self, name: str, scale_name: str, layout: Layout, codes: Codes) -> Iterator[Fault]:
        """Data and scales that do not belong together."""
        shape, amaxes, limit = self.tensors[name].shape, codes.amaxes, layout.format.max
        scale = self.value(scale_name).reshape(amaxes.shape)
        if not (amaxes.any() and scale.any()):
            yield self._all_zero(name)
            return
        with np.errstate(over="ignore"):
            largest = float((amaxes * scale).max())
        is_zero = (scale == 0) & layout.has_units
        if count := int(((scale < _SMALLEST) & (amaxes > 0) & ~is_zero).sum()):
            problem = f"{count} of {scale.size} scales are below 2**-126, which engines flush to zero"
            yield self.fault(scale_name, problem, _QUANTIZE_AGAIN)
        elif not math.isfinite(largest) or (largest >= _LARGE and scale.min() * limit >= _LARGE):
            problem = f"data * scale reaches {largest:.0f}: the scales are lost, or it was quantized twice"
            yield self.fault(scale_name, problem, _QUANTIZE_AGAIN)
        elif largest < _SMALL:
            problem = f"data * scale reaches {largest:.1e} at most, and the layer adds nothing: the scales are lost"
            yield self.fault(scale_name, problem, _QUANTIZE_AGAIN)
        elif limit < _LARGE and scale.size >= _FEW_SCALES and (scale == 1).all():
            problem = "all of its scales are 1, and data * scale are the codes alone: the scales are lost"
            yield self.fault(scale_name, problem, _QUANTIZE_AGAIN)
        elif codes.is_clipped:
            problem = f"{codes.limits / math.prod(shape):.1%} of its elements are 448 or -448: its scales are too small"
            yield self.fault(
                name, f"{problem}, and larger weights were clipped", f"{_QUANTIZE_AGAIN}: scale = amax / 448"
            )
        elif layout.strategy == "channel" and codes.is_unused:
            problem = f"none of its elements is above {amaxes.max():g} of 448: its scales are "
            problem += f"{_LIMIT / amaxes.max():.0f} times too large, and small weights were rounded to zero"
            yield self.fault(name, problem, f"{_QUANTIZE_AGAIN}: scale = amax / 448")
        elif amaxes.size >= _FEW_BLOCKS and amaxes.max() in _FNUZ_LIMITS and (amaxes == amaxes.max()).all():
            problem = f"the largest of each block is {amaxes.max():g} and not 448, as in data for float8_e4m3fnuz"
            remedy = "if its bytes or scales were adapted to another format, compare it with the original weight"
            yield self.fault(name, problem, remedy, is_error=False)
        # The largest of each row is 448 then, and of the columns that of some.
        elif layout.strategy == "channel" and len(shape) == 2 and shape[0] == shape[1] >= 16:
            columns = count_codes(self.folder[name], (shape[0], 1)).amaxes if np.unique(scale).size > 1 else amaxes
            if (columns == _LIMIT).all() and not (amaxes == _LIMIT).all():
                rows = "each of its columns reaches 448, but not each row, although rows have the scales"
                yield self.fault(name, f"{rows}: it is transposed", "transpose the weight: it has to be [out, in]")

    def _of_scale(self, name: str, stored: Stored) -> Iterator[Fault]:
        """What is wrong with a scale as such: whose it is, and its values."""
        layer, _, kind = name.rpartition(".")
        weight, layout = self.tensors.get(layer + WEIGHT), self.layout and layout_of_layer(self.layout, layer)
        if kind in CACHE_SCALES:
            if stored.is_known and (problem_and_remedy := self._bad_values(name, positive_or_absent=True)):
                yield self.fault(name, *problem_and_remedy)
        elif weight is None:
            problem = f"it is a scale, but {layer}{WEIGHT} is missing"
            yield self.fault(name, problem, "add the weight, or remove the scale")
        elif not is_quantized(weight):
            problem = f"it is a scale, and {layer}{WEIGHT} is in {weight.shown}, which has none"
            yield self.fault(name, problem, "remove the scale, or quantize the weight")
        elif layout is not None:
            names = input_scale_names(layout) if kind in INPUT_SCALES else scale_names(layout)
            if kind not in names:
                yield self.fault(
                    name, f"engines look for {' or '.join(names)} in this layout", f"rename it to {layer}.{names[0]}"
                )
            elif (first := self.present(layer, names)) != name:
                yield self.fault(name, f"{first} is there too: each engine reads one of them", "remove one of them")
            elif kind in INPUT_SCALES and not layout.is_static:
                problem = "inputs are not static: engines ignore it"
                yield self.fault(name, problem, "remove it, or say dynamic: false in config.json", is_error=False)

    def present(self, layer: str, names: tuple[str, ...]) -> str:
        """The first scale of a layer that is there by one of its names; by the first of these if there is none."""
        return next((name for kind in names if (name := f"{layer}.{kind}") in self.tensors), f"{layer}.{names[0]}")

    def _bad_values(
        self, name: str, *, positive_or_absent: bool = False, or_zero: bool = False
    ) -> tuple[str, str] | None:
        """A problem of a scale's values and its remedy."""
        scale = self.value(name)
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
