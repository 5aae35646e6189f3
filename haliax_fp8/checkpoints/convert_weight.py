"""One weight of a checkpoint in another layout, some rows at a time; experts in one array, one expert at a time."""

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from ..layers.tensor_names import WEIGHT, is_head, is_linear, is_router
from .check import is_fp8
from .files import TensorFolder, TensorSpec
from .layout import SCALES, Layout, decode, require_elements
from .scaled_matrix import Rows, ScaledMatrix, are_exponents, parts_of, quantized, spread


class ScaleRounding(enum.Enum):
    """How new scales are rounded; those that stay as they are do not change."""

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


@dataclasses.dataclass(frozen=True)
class ConversionTask:
    """How the weights of a folder are converted.

    Args:
        folder: The folder.
        before: What its configuration says.
        layout: The new layout; None for plain weights.
        scales: The rounding of new scales.
        dtype: The dtype of plain weights.
    """

    folder: TensorFolder
    before: Layout | None
    layout: Layout | None
    scales: ScaleRounding
    dtype: np.dtype

    def converts(self, layer: str) -> bool:
        """Whether a weight is in FP8 before or after.

        Args:
            layer: The layer's name.
        """
        stored = self.folder.tensors[layer + WEIGHT]
        if is_fp8(stored):
            return True
        # What a quantized checkpoint left alone stays so. Weights with three axes may be convolutions'.
        may_be = len(stored.shape) == 2 or "experts" in layer.split(".")
        chosen = is_linear(layer, len(stored.shape)) and may_be and self.before is None
        return self.layout is not None and chosen and not (is_head(layer) or is_router(layer, self.folder.tensors))

    def specs(self, layer: str) -> list[TensorSpec]:
        """The tensors of a layer in the new layout.

        Args:
            layer: Its name.

        Raises:
            ValueError: If the layout needs a scale of the input that is not there, or the weight has no elements.
        """
        shape = self.folder.tensors[layer + WEIGHT].shape
        if self.layout is None:
            return [TensorSpec(layer + WEIGHT, self.dtype, shape)]
        require_elements(layer + WEIGHT, shape)
        if self.layout.is_static and self._input_scale(layer) is None:
            raise ValueError(
                f"{layer} has no scale for its input, which the layout needs; calibrate the model, or choose a layout "
                "with dynamic inputs such as 'FP8_DYNAMIC'"
            )
        parts = self.layout.tensors((shape[-2], shape[-1]))
        return [
            TensorSpec(f"{layer}.{part}", dtype, (*shape[:-2], *of_part)) for part, (dtype, of_part) in parts.items()
        ]

    def maker(self, layer: str, found: list[Converted]) -> Callable[[], Sequence[np.ndarray]]:
        """What makes these tensors, and notes what became of the weight.

        Args:
            layer: The layer's name.
            found: Where it is noted.
        """

        def make() -> Sequence[np.ndarray]:
            specs = self.specs(layer)
            front = specs[0].shape[:-2]
            if not front:
                arrays, error = self._made(layer, ())
                found.append(_noted(layer + WEIGHT, [error]))
                return arrays
            arrays, errors = [np.empty(spec.shape, spec.dtype) for spec in specs], []
            for index in itertools.product(*map(range, front)):
                parts, error = self._made(layer, index)
                errors.append(error)
                for array, part in zip(arrays, parts, strict=True):
                    array[index] = part
            found.append(_noted(layer + WEIGHT, errors))
            return arrays

        return make

    def _made(self, layer: str, index: tuple[int, ...]) -> tuple[Sequence[np.ndarray], tuple[float, float]]:
        """The new tensors of a matrix, and the squares of what changed and of what was there."""
        matrix = self._decoded(layer, index)
        values: Rows = self.folder[layer + WEIGHT][index] if matrix is None else matrix
        if self.layout is None:
            plain = np.empty(values.shape, self.dtype)
            for rows in parts_of(values.shape):
                plain[rows] = values[rows].astype(self.dtype)
            return [plain], _compared(values, plain)
        block = self.layout.block((values.shape[0], values.shape[1]))
        new = None if matrix is None else spread(matrix, block)
        if new is None or (self.layout.exponents and not are_exponents(new.scale)):
            new = self._quantized(layer, values, block)
        if self.layout.is_static:
            scale = self._input_scale(layer)
            assert scale is not None
            scale = scale.astype(np.float32).reshape(-1)
            front = self.folder.tensors[layer + WEIGHT].shape[:-2]
            which = int(np.ravel_multi_index(index, front)) if index and scale.size > 1 else 0
            new = dataclasses.replace(new, input_scale=float(scale[which]))
        return list(self.layout.encode(new).values()), _compared(values, new)

    def _input_scale(self, layer: str) -> np.ndarray | None:
        names = () if self.before is None else self.before.input_scale_names
        found = [f"{layer}.{name}" for name in names if f"{layer}.{name}" in self.folder.tensors]
        return self.folder[found[0]] if found else None

    def _decoded(self, layer: str, index: tuple[int, ...]) -> ScaledMatrix | None:
        if self.before is None or not is_fp8(self.folder.tensors[layer + WEIGHT]):
            return None
        tensors = {}
        for name in ("weight", *SCALES):
            if f"{layer}.{name}" in self.folder.tensors:
                array = self.folder[f"{layer}.{name}"]
                tensors[name] = array[index] if array.ndim >= len(index) else array
        return decode(layer, tensors, self.before.size)

    def _quantized(self, layer: str, values: Rows, block: tuple[int, int]) -> ScaledMatrix:
        assert self.layout is not None
        try:
            return quantized(
                values,
                block,
                bf16_scales=self.scales is not ScaleRounding.FLOAT32,
                powers_of_two=self.scales is ScaleRounding.POWER_OF_TWO,
                exponents=self.layout.exponents,
            )
        except ValueError as error:
            raise ValueError(f"{layer}{WEIGHT} cannot be converted: {error}") from None


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
