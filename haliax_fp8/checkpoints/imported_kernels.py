"""FP8 data and scales of a checkpoint as a layer for inference multiplies by them."""

import dataclasses
from typing import Any

import equinox as eqx
import haliax.nn as hnn
import numpy as np

from .._numerics.formats import FORMATS
from ..layers.kernel import Kernel, axes_of
from ..layers.multiplied import named_behind
from ..recipes.scaling import (
    AbstractScaling,
    BlockScaling,
    CurrentScaling,
    MXFP8Scaling,
    RowwiseScaling,
    StaticScaling,
)
from ..serving.kernel import ServedKernel
from ..serving.layers import ServedEquinoxLinear, ServedLinear, ServedMoELinear
from ..serving.scheme import Scheme
from .layout import Inputs
from .model.matrices import Parts, plain
from .model.tree import ModelPath
from .scaled_matrix import ScaledMatrix, are_exponents


def served_layer(
    layer: Any,
    kernel: Kernel,
    compute_dtype: np.dtype | None,
    parts: Parts,
    path: ModelPath,
    found: list[tuple[tuple[int, ...], ScaledMatrix]],
    inputs: Inputs | None,
) -> Any:
    """The layer with the kernels of a checkpoint instead of its weight, data and scales as they are.

    Args:
        layer: The plain layer.
        kernel: Its kernel, as its rule describes it.
        compute_dtype: The dtype that its product computes in, if the layer says so.
        parts: Where the matrices lie in its weight.
        path: Where it is.
        found: The matrices, by their index along the axes of ensembles, stacks and experts.
        inputs: How the checkpoint says that inputs are quantized; None if they are not.

    Raises:
        ValueError: If no product of this package takes such scales, or the class has no form for inference.
    """
    experts = () if kernel.Experts is None else axes_of(kernel.Experts)
    matrices = _Matrices.of(path, parts, found, len(experts), inputs)
    scheme = matrices.scheme(path, inputs)
    if experts and scheme.input is None:
        raise ValueError(
            f"{path} multiplies each row by the kernel of its expert. There is no such product of an input in high "
            "precision and kernels stored in FP8: import with weights='dequantized' or weights='frozen'"
        )
    stack = tuple(axis for axis, block in zip(path.stack, parts.blocks, strict=True) if block is not None)
    # Kernels of experts are read as `[in, out]`, and so are their scales.
    sharded = lambda x, transposed=False: parts.sharded_like(x, kernel.weight, transposed=transposed)
    named = lambda x, leading, transposed=False: named_behind(sharded(x, transposed), stack, leading)
    leading, rank = matrices.leading, 2 + len(experts)
    # Experts are `[experts, in, out]`, as their layers hand them over; the data always have the sum last.
    order = (*range(len(experts)), rank - 1, rank - 2) if experts else (0, 1)
    scale, block = matrices.scale(transposed=bool(experts))
    of_inputs = matrices.input_scale
    served = ServedKernel(
        named(matrices.data, leading),
        named(scale, leading, bool(experts)),
        None if of_inputs is None else named(_bits(of_inputs), leading),
        scheme,
        order,
        (rank - 2,) if experts else (1,),
        block,
        _significant_bits(matrices.scales),
        compute_dtype,
        np.dtype(plain(kernel.weight).dtype),
        "scales of the checkpoint",
        input_bits=24 if of_inputs is None else _significant_bits(of_inputs),
        per_expert=matrices.per_expert,
    )
    match layer:
        case hnn.Linear():
            return ServedLinear.of_matrix(layer, served)
        case hnn.MoELinear():
            return ServedMoELinear.of(layer, served)
        case eqx.nn.Linear():
            return ServedEquinoxLinear(layer, served)
    raise ValueError(
        f"{path} is a {type(layer).__name__}, which has no FP8 form for inference; import it with "
        "weights='dequantized', and quantize that with serving.quantize_for_inference"
    )


@dataclasses.dataclass(frozen=True)
class _Matrices:
    """The matrices of a layer, stacked.

    Args:
        data: Bits, `[*leading, *experts, out, in]`.
        scales: `[*leading, *experts, rows of blocks, columns of blocks]`, float32.
        input_scale: Those of inputs, `[*leading]`, and where experts differ `[*leading, *experts]`; None without.
        scaling: How the kernel was quantized.
        format: The dtype of the data.
        leading: How many axes of ensembles and stacks are in front.
        per_expert: Whether each expert has one scale of its kernel, and one of its input.
    """

    data: np.ndarray
    scales: np.ndarray
    input_scale: np.ndarray | None
    scaling: AbstractScaling
    format: np.dtype
    leading: int
    per_expert: bool

    @staticmethod
    def of(
        path: ModelPath,
        parts: Parts,
        found: list[tuple[tuple[int, ...], ScaledMatrix]],
        experts: int,
        inputs: Inputs | None,
    ) -> "_Matrices":
        """The matrices of a layer.

        Args:
            path: Where it is.
            parts: Where its matrices lie.
            found: The matrices.
            experts: How many axes number experts.
            inputs: How inputs are quantized.
        """
        first = found[0][1]
        if any((matrix.block, matrix.data.dtype) != (first.block, first.data.dtype) for _, matrix in found):
            raise ValueError(f"the blocks of {path} have scales of different shapes; import it dequantized")
        data = np.empty((*parts.leading, *first.data.shape), np.uint8)
        scales = np.empty((*parts.leading, *first.scale.shape), np.float32)
        is_static = inputs is not None and not inputs.dynamic
        of_inputs = np.empty(parts.leading, np.float32) if is_static else None
        for index, matrix in found:
            data[index], scales[index] = matrix.data.view(np.uint8), matrix.scale
            if of_inputs is not None:
                if matrix.input_scale is None:
                    raise ValueError(f"the checkpoint says that the input of {path} is static, but has no scale for it")
                of_inputs[index] = matrix.input_scale
        scaling = _scaling(path, scales, first, inputs)
        if isinstance(scaling, StaticScaling):
            scales = scales[..., :1, :1]
        leading = len(parts.leading) - experts
        axes = tuple(range(leading, leading + experts))
        numbers = [scales, *([] if of_inputs is None else [of_inputs])]
        differ = any((x != x.max(axes, keepdims=True)).any() for x in numbers)
        per_expert = bool(experts) and differ and is_static and isinstance(scaling, StaticScaling)
        if experts and of_inputs is not None and not per_expert:
            if (of_inputs != of_inputs.max(axes, keepdims=True)).any():
                raise ValueError(
                    f"the experts of {path} have static inputs with a scale each, and kernels with scales of rows, "
                    f"which no grouped product takes; {_OTHERWISE}"
                )
            of_inputs = of_inputs[(..., *(0,) * experts)]
        if experts and differ and not per_expert and isinstance(scaling, StaticScaling):
            # Of dynamic inputs rows have scales, and so have the rows of kernels: equal ones in each expert.
            scaling = RowwiseScaling(power_of_two=_powers(scales))
            scales = np.broadcast_to(scales, (*data.shape[:-1], 1))
        return _Matrices(data, scales, of_inputs, scaling, first.data.dtype, leading, per_expert)

    def scheme(self, path: ModelPath, inputs: Inputs | None) -> Scheme:
        """How the layer multiplies.

        Args:
            path: Where it is.
            inputs: How inputs are quantized.
        """
        # As in the recipes of training: where weights have powers of two, inputs do.
        powers, of_input = _powers(self.scales), None
        if inputs is not None:
            match inputs.strategy, inputs.dynamic:
                case ("tensor", False):
                    of_input = StaticScaling()
                case ("tensor", True):
                    of_input = CurrentScaling()
                case ("token", _):
                    of_input = RowwiseScaling(power_of_two=powers)
                case _ if isinstance(self.scaling, MXFP8Scaling):
                    of_input = MXFP8Scaling()
                case _:
                    of_input = BlockScaling(inputs.size, power_of_two=powers)
        try:
            return Scheme(self.scaling, of_input, FORMATS[self.format])
        except ValueError as error:
            raise ValueError(f"{path} cannot be served as it is: {error}; {_OTHERWISE}") from None

    def scale(self, *, transposed: bool) -> tuple[np.ndarray, tuple[int, ...] | None]:
        """Bits of the scales in the layout of the kernel, and its blocks.

        Args:
            transposed: Whether the kernel has inputs before outputs.
        """
        if isinstance(self.scaling, StaticScaling):
            # One for each layer, or for each expert.
            scales = self.scales[..., 0, 0]
            scales = scales if self.per_expert else scales[(..., *(0,) * (scales.ndim - self.leading))]
            return _bits(scales), None
        ones = (1,) * (self.data.ndim - 2 - self.leading)
        match self.scaling:
            case BlockScaling(size=size):
                block = (*ones, size, size)
            case MXFP8Scaling():
                block = (*ones, 32, 1) if transposed else (*ones, 1, 32)
            case _:
                block = None
        scales = np.swapaxes(self.scales, -1, -2) if transposed else self.scales
        bits = _bits(scales)
        return ((bits >> 23).astype(np.uint8) if isinstance(self.scaling, MXFP8Scaling) else bits), block


def _scaling(path: ModelPath, scales: np.ndarray, first: ScaledMatrix, inputs: Inputs | None) -> AbstractScaling:
    """How a kernel was quantized, as far as a product has to know."""
    (height, width), (rows, columns) = first.block, first.data.shape
    if inputs is not None and inputs.strategy == "group":
        if (height, width, inputs.size) == (1, 32, 32) and are_exponents(scales):
            return MXFP8Scaling()
        if height == width:
            return BlockScaling(width, square=True, power_of_two=_powers(scales))
    elif (height, width) == (rows, columns):
        return StaticScaling()
    elif height == 1 and width >= columns:
        is_static = inputs is not None and not inputs.dynamic
        # Rows of equal scales, as engines want them, are one scale again: one product with one scale.
        if is_static and (scales == scales[..., :1, :1]).all():
            return StaticScaling()
        return RowwiseScaling(power_of_two=_powers(scales))
    raise ValueError(f"{path} has scales for blocks of {first.block}, which no product takes; {_OTHERWISE}")


def _powers(scales: np.ndarray) -> bool:
    """Whether all are powers of two."""
    return bool((np.frexp(scales)[0] == 0.5).all())


_OTHERWISE = "import the checkpoint with weights='frozen' or 'dequantized'"


def _bits(scales: np.ndarray) -> np.ndarray:
    """The bits of float32, in an array of its own."""
    return np.array(scales, np.float32, order="C").view(np.uint32)


def _significant_bits(scales: np.ndarray) -> int:
    """The significant bits of the scale that has the most, of 24: the leading one included."""
    words = _bits(scales) & np.uint32(0x7FFFFF)
    word = int(np.bitwise_or.reduce(words, axis=None))
    return 24 - ((word & -word).bit_length() - 1) if word else 1
