"""Quantized data and scales of a checkpoint as layers: frozen ones, and those that multiply in FP8 for inference."""

from collections.abc import Mapping, Sequence
from typing import Any

import haliax as hax
import haliax.nn as hnn
import numpy as np

from ..folders.four_bits import E2M1, packed
from ..folders.layout import Inputs
from ..folders.scaled_matrix import ScaledMatrix, Unit, are_exponents
from ..formats import FORMATS
from ..layers import AbstractQuantizedLayer, axes_of, with_names_of_stacks
from ..recipes import AbstractScaling, BlockScaling, CurrentScaling, MXFP8Scaling, RowwiseScaling, StaticScaling
from ..serving import QuantizedKernel, ServedLayout, StoredArray
from ..serving.constructors import Constructor, quantized_layer
from .model import Leaf, plain, uncopied


type Found = Sequence[tuple[tuple[int, ...], ScaledMatrix]]
"""The matrices of a layer, by their index along the axes of ensembles, stacks and experts."""


def _stacked(leaf: Leaf, found: Found) -> tuple[ScaledMatrix, np.ndarray, np.ndarray, np.ndarray | None]:
    """The first matrix; the bits of the data, float32 scales, and those of inputs, where all matrices have them."""
    first = found[0][1]
    kind = lambda matrix: (matrix.block, matrix.data.dtype, matrix.unit and matrix.unit.divides)
    if any(kind(matrix) != kind(first) for _, matrix in found):
        raise ValueError(
            f"the blocks of {leaf.site.place} have other formats, or scales for blocks of other sizes; import it "
            "dequantized"
        )
    data = uncopied((*leaf.leading, *first.data.shape), np.uint8)
    scales = np.empty((*leaf.leading, *first.scale.shape), np.float32)
    has_inputs = all(matrix.input_scale is not None for _, matrix in found)
    of_inputs = np.empty(leaf.leading, np.float64) if has_inputs else None
    for index, matrix in found:
        data[index], scales[index] = matrix.data.view(np.uint8), matrix.scale
        if of_inputs is not None:
            of_inputs[index] = matrix.input_scale
    return first, data, scales, of_inputs


def frozen_layer(
    layer: Any, leaf: Leaf, found: Found, constructors: Mapping[type, Constructor]
) -> AbstractQuantizedLayer:
    """The layer with quantized data and scales instead of its weight, and exact gradients to its inputs.

    Args:
        layer: The plain layer.
        leaf: Its weight.
        found: The matrices.
        constructors: What makes it, by class.

    Raises:
        ValueError: If the class has no such form.
    """
    first, data, scales, of_inputs = _stacked(leaf, found)
    scale, units, divides = _bits(scales), None, False
    if first.data.dtype == E2M1:
        data = packed(data)
        if first.unit is not None:
            units, divides = np.empty(leaf.leading, np.float32), first.unit.divides
            for index, matrix in found:
                assert matrix.unit is not None
                units[index] = matrix.unit.value
            scale = Unit(units[..., None, None], divides).blocks(scales).view(np.uint8)
            # In float64 the reciprocal of a reciprocal has the bits of the original.
            of_inputs = 1 / of_inputs if of_inputs is not None and divides else of_inputs
        elif are_exponents(scales):
            scale = (scale >> 23).astype(np.uint8)
    stored = _stored(leaf, first, data, scale, first.block, tensor_scale=units, divides=divides)
    return _with_kernel(layer, leaf, constructors, stored, of_inputs, None, None)


def _stored(
    leaf: Leaf,
    first: ScaledMatrix,
    data: np.ndarray,
    scale: np.ndarray,
    block: tuple[int, int] | None,
    *,
    tensor_scale: np.ndarray | None = None,
    **others: Any,
) -> StoredArray[hax.NamedArray]:
    """The bits of matrices `[*leading, out, in]`, named and divided as the layer's weight is.

    Experts are `[experts, in, out]`, as their layers hand them over, and so are their scales; data have the sum last.
    """
    (experts, _), swaps = _experts(leaf), _has_inputs_first(leaf)
    if is_of_blocks := scale.ndim > len(leaf.leading):
        scale = np.swapaxes(scale, -1, -2) if swaps else scale
    rank, sides = 2 + experts, None if block is None else (block[::-1] if swaps else block)
    return StoredArray(
        _named(leaf, data),
        _named(leaf, np.asarray(scale, order="C"), transposed=swaps and is_of_blocks),
        None if tensor_scale is None else _named(leaf, _bits(tensor_scale)),
        dtype=first.data.dtype,
        order=(*range(experts), *((rank - 1, rank - 2) if swaps else (rank - 2, rank - 1))),
        block=None if sides is None else (*(1,) * experts, *sides),
        **others,
    )


def _experts(leaf: Leaf) -> tuple[int, int]:
    """How many axes number experts, and how many are before them."""
    experts = leaf.site.kernel.Experts
    number = 0 if experts is None else len(axes_of(experts))
    return number, len(leaf.leading) - number


def _has_inputs_first(leaf: Leaf) -> bool:
    """Whether the kernel is `[in, out]`: that of experts, and of one's own layers whose weight is."""
    if leaf.site.kernel.Experts is not None:
        return True
    # Haliax's layers flatten several axes into the two of a matrix.
    if isinstance(leaf.site.node, hnn.Linear):
        return False
    *_, outputs, inputs = leaf.order
    return inputs < outputs


def _named(leaf: Leaf, array: np.ndarray, *, transposed: bool = False) -> hax.NamedArray:
    return with_names_of_stacks(leaf.sharded(array, transposed=transposed), leaf.stack, _experts(leaf)[1])


def _with_kernel(
    layer: Any,
    leaf: Leaf,
    constructors: Mapping[type, Constructor],
    stored: StoredArray[hax.NamedArray],
    of_inputs: np.ndarray | None,
    layout: ServedLayout | None,
    compute_dtype: np.dtype | None,
) -> AbstractQuantizedLayer:
    """The layer with data and scales instead of its weight."""
    site, (experts, _) = leaf.site, _experts(leaf)
    if len(leaf.split) != 2 and not isinstance(layer, hnn.Linear):
        raise ValueError(
            f"the weight of {site.place} has {len(leaf.split)} axes, and its data and scales are a matrix; {_PLAIN}"
        )
    kernel = QuantizedKernel(
        stored,
        None if of_inputs is None else _named(leaf, _bits(of_inputs)),
        layout,
        (experts + (0 if _has_inputs_first(leaf) else 1),),
        compute_dtype,
        np.dtype(plain(site.kernel.weight).dtype),
        "scales of the checkpoint",
        input_bits=24 if of_inputs is None else _significant_bits(of_inputs),
    )
    assert site.rule is not None
    return quantized_layer(str(site.place), site.rule, layer, kernel, constructors, _PLAIN)


def served_layer(
    layer: Any,
    leaf: Leaf,
    found: Found,
    constructors: Mapping[type, Constructor],
    inputs: Inputs | None,
    compute_dtype: np.dtype | None,
) -> AbstractQuantizedLayer:
    """The layer with the kernels of a checkpoint instead of its weight, data and scales as they are.

    Args:
        layer: The plain layer.
        leaf: Its weight.
        found: The matrices.
        constructors: What makes it, by class.
        inputs: How the checkpoint says that inputs are quantized; None if they are not.
        compute_dtype: The dtype that its product computes in, if the layer says so.

    Raises:
        ValueError: If no product of this package takes such scales, or the class has no form for inference.
    """
    path = str(leaf.site.place)
    first, data, scales, of_inputs = _stacked(leaf, found)
    if first.data.dtype == E2M1:
        raise ValueError(f"{path} is in four bits, and no product for inference takes these; {_OTHERWISE}")
    if inputs is not None and inputs.bound is not None:
        raise ValueError(
            f"{path} clips inputs at activation_scale_ub={inputs.bound:g}, which no product of this package does; "
            f"convert the folder to FP8_DYNAMIC, which does not clip, or {_OTHERWISE}"
        )
    is_static = inputs is not None and not inputs.dynamic
    if is_static and of_inputs is None:
        raise ValueError(f"the checkpoint says that the input of {path} is static, but has no scale for it")
    of_inputs = of_inputs if is_static else None
    experts, leading = _experts(leaf)
    scaling = _scaling(path, scales, first, inputs)
    scales = scales[..., :1, :1] if isinstance(scaling, StaticScaling) else scales
    per_expert = False
    if experts:
        axes = tuple(range(leading, leading + experts))
        differ = lambda x: x is not None and bool((x != x.max(axes, keepdims=True)).any())
        any_differ = differ(scales) or differ(of_inputs)
        per_expert = any_differ and is_static and isinstance(scaling, StaticScaling)
        if of_inputs is not None and not per_expert:
            if differ(of_inputs):
                raise ValueError(
                    f"the experts of {path} have static inputs with a scale each, and kernels with scales of rows, "
                    f"which no grouped product takes; {_OTHERWISE}"
                )
            of_inputs = of_inputs[(..., *(0,) * experts)]
        if any_differ and not per_expert and isinstance(scaling, StaticScaling):
            # Of dynamic inputs rows have scales, and so have the rows of kernels: equal ones in each expert.
            scaling = RowwiseScaling(power_of_two=_powers(scales))
            scales = np.broadcast_to(scales, (*data.shape[:-1], 1))
    layout = _served_layout(path, scaling, _powers(scales), inputs, first.data.dtype)
    if experts and layout.input is None:
        raise ValueError(
            f"{path} multiplies each row by the kernel of its expert. There is no such product of an input in high "
            "precision and kernels stored in FP8: import with weights='dequantized' or weights='frozen'"
        )

    block, bits = None, _bits(scales)
    match scaling:
        case StaticScaling():
            # One for each layer, or for each expert.
            bits = np.array(bits[..., 0, 0] if per_expert else bits[(..., *(0,) * experts, 0, 0)])
        case BlockScaling():
            block = (scaling.size, scaling.size)
        case MXFP8Scaling():
            block, bits = (1, 32), (bits >> 23).astype(np.uint8)
    stored = _stored(leaf, first, data, bits, block, scale_bits=_significant_bits(scales))
    return _with_kernel(layer, leaf, constructors, stored, of_inputs, layout, compute_dtype)


def _served_layout(
    path: str, scaling: AbstractScaling, powers: bool, inputs: Inputs | None, format: np.dtype
) -> ServedLayout:
    """How the layer multiplies. As in the recipes of training: where weights have powers of two, inputs do."""
    of_input = None
    if inputs is not None:
        match inputs.strategy, inputs.dynamic:
            case ("tensor", False):
                of_input = StaticScaling()
            case ("tensor", True):
                of_input = CurrentScaling()
            case ("token", _):
                of_input = RowwiseScaling(power_of_two=powers)
            case _ if isinstance(scaling, MXFP8Scaling):
                of_input = MXFP8Scaling()
            case _:
                of_input = BlockScaling(inputs.size, power_of_two=powers)
    try:
        return ServedLayout(scaling, of_input, FORMATS[format])
    except ValueError as error:
        raise ValueError(f"{path} cannot be served as it is: {error}; {_OTHERWISE}") from None


def _scaling(path: str, scales: np.ndarray, first: ScaledMatrix, inputs: Inputs | None) -> AbstractScaling:
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


_PLAIN = "import the checkpoint with weights='dequantized'"
_OTHERWISE = "import the checkpoint with weights='frozen' or 'dequantized'"


def _bits(scales: np.ndarray) -> np.ndarray:
    """The bits of float32, in an array of its own."""
    return np.array(scales, np.float32, order="C").view(np.uint32)


def _significant_bits(scales: np.ndarray) -> int:
    """The significant bits of the scale that has the most, of 24: the leading one included."""
    words = _bits(scales) & np.uint32(0x7FFFFF)
    word = int(np.bitwise_or.reduce(words, axis=None))
    return 24 - ((word & -word).bit_length() - 1) if word else 1
