"""The matrices of layers for inference: their FP8 data and scales as they are, `[out, in]`."""

import dataclasses
import math
from typing import Any

import numpy as np

from ...layers.kernel import axes_of
from ...layers.served import AbstractServedLayer
from ...serving.kernel import ServedKernel
from ..layout import as_float32
from ..scaled_matrix import ScaledMatrix
from .matrices import Parts
from .tree import ModelPath


@dataclasses.dataclass(frozen=True)
class ServedMatrices:
    """Where the matrices of a kernel for inference lie.

    Args:
        kernel: The kernel.
        leading: How many axes of ensembles and stacks are in front.
        experts: Which axes of the kernel number experts.
        outputs: Which are outputs, in the order of a checkpoint.
        inputs: Which are inputs.
    """

    kernel: ServedKernel
    leading: int
    experts: tuple[int, ...]
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]

    @staticmethod
    def of(layer: AbstractServedLayer) -> "ServedMatrices":
        """The matrices of a layer.

        Args:
            layer: A layer for inference.
        """
        kernel: ServedKernel = layer.kernel
        leading, described = kernel.data.array.ndim - len(kernel.order), layer.described
        names = [axis.name for axis in getattr(layer, "axes", ())]
        positions = lambda axes: tuple(names.index(axis.name) for axis in axes if axis.name in names)
        experts = () if described.Experts is None else positions(axes_of(described.Experts))
        if names and not isinstance(described.In, int | str | None) and not isinstance(described.Out, int | str | None):
            outputs, inputs = positions(axes_of(described.Out)), positions(axes_of(described.In))
            if len(experts) + len(outputs) + len(inputs) == len(names):
                return ServedMatrices(kernel, leading, experts, outputs, inputs)
        free = tuple(axis for axis in sorted(kernel.order) if axis not in (*kernel.contracted, *experts))
        return ServedMatrices(kernel, leading, experts, free, kernel.contracted)

    @property
    def _sizes(self) -> tuple[int, ...]:
        """The sizes of the kernel's axes, in the kernel's order."""
        stored = self.kernel.data.array.shape[self.leading :]
        return tuple(stored[self.kernel.order.index(axis)] for axis in range(len(stored)))

    def parts(self, path: ModelPath) -> Parts:
        """Which leading axis numbers which blocks.

        Args:
            path: Where the layer is.
        """
        sizes, data = self._sizes, self.kernel.data
        members = data.array.ndim - len(data.axis_names)
        front = data.axis_names[: self.leading - members]
        blocks = tuple(members + front.index(axis.name) if axis.name in front else None for axis in path.stack)
        size = lambda axes: math.prod(sizes[axis] for axis in axes)
        leading = (*data.array.shape[: self.leading], *(sizes[axis] for axis in self.experts))
        shape = size(self.outputs), size(self.inputs)
        return Parts(tuple(range(len(leading) + 2)), leading, blocks, shape, shape)

    def matrix(self, index: tuple[int, ...]) -> ScaledMatrix:
        """The FP8 data and scales of one matrix.

        Args:
            index: Which, along the axes of ensembles, stacks and experts.

        Raises:
            ValueError: If its scales are of blocks that `[out, in]` has no rows and columns for.
        """
        kernel, sizes = self.kernel, self._sizes
        shape = tuple(math.prod(sizes[axis] for axis in axes) for axes in (self.outputs, self.inputs))
        stored = np.asarray(kernel.data.array[index[: self.leading]])
        own = tuple(axis for axis in (*self.experts, *self.outputs, *self.inputs))
        stored = stored.transpose([kernel.order.index(axis) for axis in own])[index[self.leading :]]
        data = np.ascontiguousarray(stored).reshape(shape).view(kernel.scheme.format.dtype)
        scale, block = self._scale(index, (shape[0], shape[1]))
        inputs = None
        if kernel.input_scale is not None:
            of_inputs = np.asarray(kernel.input_scale.array)
            inputs = float(of_inputs[index[: of_inputs.ndim]].view(np.float32))
        return ScaledMatrix(data, scale, block, "FP8 in the model", inputs)

    def _scale(self, index: tuple[int, ...], shape: tuple[int, int]) -> tuple[np.ndarray, tuple[int, int]]:
        kernel = self.kernel
        stored = np.asarray(kernel.scale.array)
        if stored.ndim <= self.leading + len(self.experts):
            # One scale for a layer, or an expert of it.
            return _float32(stored[index[: stored.ndim]]).reshape(1, 1), shape
        stored = stored[index[: self.leading]].transpose((*self.experts, *self.outputs, *self.inputs))
        for number, count in zip(index[self.leading :], stored.shape[: len(self.experts)], strict=True):
            stored = stored[number if count > 1 else 0]
        rows, height = self._along(self.outputs, stored.shape[: len(self.outputs)])
        columns, width = self._along(self.inputs, stored.shape[len(self.outputs) :])
        return _float32(stored).reshape(rows, columns), (height, width)

    def _along(self, axes: tuple[int, ...], counts: tuple[int, ...]) -> tuple[int, int]:
        """How many blocks are along the outputs or inputs, and how many of these a block has."""
        sizes = [self._sizes[axis] for axis in axes]
        if math.prod(counts) == 1:
            return 1, math.prod(sizes)
        last = sizes[-1] // counts[-1] if self.kernel.block is None else min(self.kernel.block[axes[-1]], sizes[-1])
        if list(counts[:-1]) == sizes[:-1] and (len(axes) == 1 or sizes[-1] % last == 0):
            return math.prod(counts), last
        raise ValueError(
            f"a kernel has scales for {counts} blocks of axes of {sizes}, which are not blocks of a matrix; dequantize "
            "the model, and export that"
        )


def _float32(bits: Any) -> np.ndarray:
    """Scales from what kernels hold: bits of float32, or exponents."""
    bits = np.ascontiguousarray(bits)
    return as_float32(bits) if bits.dtype == np.uint8 else bits.view(np.float32)
