"""Quantized data and scales of a checkpoint as layers: frozen ones, and those that multiply in FP8 for inference."""

from collections.abc import Mapping, Sequence
from typing import Any

import haliax as hax
import haliax.nn as hnn
import numpy as np

from ..folders.four_bits import E2M1, packed
from ..folders.scaled_matrix import ScaledMatrix, Unit, are_exponents
from ..layers import AbstractQuantizedLayer, axes_of, with_names_of_stacks
from ..layouts import Layout
from ..recipes import AbstractScaling, BlockScaling, CurrentScaling, MXFP8Scaling, RowwiseScaling, StaticScaling
from ..serving import QuantizedKernel, StoredArray
from ..serving.constructors import Constructor, quantized_layer
from ..serving.layout import scaling_of_kernel, why_not_served
from .model import Leaf, plain, uncopied


type Matrices = Sequence[tuple[tuple[int, ...], ScaledMatrix]]
"""The matrices of a layer, by their index along the axes of ensembles, stacks and experts."""


def _stacked(leaf: Leaf, matrices: Matrices) -> tuple[ScaledMatrix, np.ndarray, np.ndarray, np.ndarray | None]:
    """The first matrix; the bits of the data, float32 scales, and those of inputs, where all matrices have them."""
    first = matrices[0][1]
    kind = lambda matrix: (matrix.block, matrix.data.dtype, matrix.unit and matrix.unit.divides)
    if any(kind(matrix) != kind(first) for _, matrix in matrices):
        raise ValueError(
            f"the blocks of {leaf.site.place} have other formats, or scales for blocks of other sizes; import it "
            "dequantized"
        )
    data = uncopied((*leaf.leading, *first.data.shape), np.uint8)
    scales = np.empty((*leaf.leading, *first.scale.shape), np.float32)
    has_inputs = all(matrix.input_scale is not None for _, matrix in matrices)
    of_inputs = np.empty(leaf.leading, np.float64) if has_inputs else None
    for index, matrix in matrices:
        data[index], scales[index] = matrix.data.view(np.uint8), matrix.scale
        if of_inputs is not None:
            of_inputs[index] = matrix.input_scale
    return first, data, scales, of_inputs


def frozen_layer(
    layer: Any, leaf: Leaf, matrices: Matrices, constructors: Mapping[type, Constructor]
) -> AbstractQuantizedLayer:
    """The layer with quantized data and scales instead of its weight, and exact gradients to its inputs.

    Args:
        layer: The plain layer.
        leaf: Its weight.
        matrices: Its matrices, by index.
        constructors: What makes it, by class.

    Raises:
        ValueError: If the class has no such form.
    """
    first, data, scales, of_inputs = _stacked(leaf, matrices)
    scale, units, divides = _bits(scales), None, False
    if first.data.dtype == E2M1:
        data = packed(data)
        if first.unit is not None:
            units, divides = np.empty(leaf.leading, np.float32), first.unit.divides
            for index, matrix in matrices:
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
    layout: Layout | None,
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
    matrices: Matrices,
    constructors: Mapping[type, Constructor],
    layout: Layout,
    compute_dtype: np.dtype | None,
) -> AbstractQuantizedLayer:
    """The layer with the kernels of a checkpoint instead of its weight, data and scales as they are.

    Args:
        layer: The plain layer.
        leaf: Its weight.
        matrices: Its matrices, by index.
        constructors: What makes it, by class.
        layout: The checkpoint's layout of it.
        compute_dtype: The dtype that its product computes in, if the layer says so.

    Raises:
        ValueError: If no product of this package takes such scales, or the class has no form for inference.
    """
    path = str(leaf.site.place)
    first, data, scales, of_inputs = _stacked(leaf, matrices)
    scaling = _scaling(path, scales, first, layout)
    if layout.is_static and of_inputs is None:
        raise ValueError(f"the checkpoint says that the input of {path} is static, but has no scale for it")
    of_inputs = of_inputs if layout.is_static else None
    experts, leading = _experts(leaf)
    is_whole = isinstance(scaling, StaticScaling | CurrentScaling)
    scales = scales[..., :1, :1] if is_whole else scales
    per_expert = False
    if experts:
        axes = tuple(range(leading, leading + experts))
        differ = lambda x: x is not None and bool((x != x.max(axes, keepdims=True)).any())
        any_differ = differ(scales) or differ(of_inputs)
        per_expert = any_differ and layout.is_static and is_whole
        if of_inputs is not None and not per_expert:
            if differ(of_inputs):
                raise ValueError(
                    f"the experts of {path} have static inputs with a scale each, and kernels with scales of rows, "
                    f"which no grouped product takes; {_OTHERWISE}"
                )
            of_inputs = of_inputs[(..., *(0,) * experts)]
        if any_differ and not per_expert and is_whole:
            # Of dynamic inputs rows have scales, and so have the rows of kernels: equal ones in each expert.
            scaling = RowwiseScaling(power_of_two=_powers(scales))
            scales = np.broadcast_to(scales, (*data.shape[:-1], 1))
    if experts and layout.inputs is None:
        raise ValueError(
            f"{path} multiplies each row by the kernel of its expert. There is no such product of an input in high "
            "precision and kernels stored in FP8: import with weights='dequantized' or weights='frozen'"
        )

    block, bits = None, _bits(scales)
    match scaling:
        case StaticScaling() | CurrentScaling():
            # One for each layer, or for each expert.
            bits = np.array(bits[..., 0, 0] if per_expert else bits[(..., *(0,) * experts, 0, 0)])
        case BlockScaling():
            block = (scaling.size, scaling.size)
        case MXFP8Scaling():
            block, bits = (1, 32), (bits >> 23).astype(np.uint8)
    stored = _stored(leaf, first, data, bits, block, scale_bits=_significant_bits(scales))
    return _with_kernel(layer, leaf, constructors, stored, of_inputs, layout, compute_dtype)


def _scaling(path: str, scales: np.ndarray, first: ScaledMatrix, layout: Layout) -> AbstractScaling:
    """How a kernel was quantized, as far as a product has to know; raises a ValueError if none takes such scales."""
    if why := why_not_served(layout):
        raise ValueError(f"{path} cannot be served as it is: {why}; {_OTHERWISE}")
    (height, width), (rows, columns) = first.block, first.data.shape
    is_whole = (height, width) == (rows, columns)
    is_of_rows = height == 1 and width >= columns
    in_blocks = layout.strategy in ("block", "group")
    if first.block != layout.size if in_blocks else not (is_whole or is_of_rows):
        raise ValueError(f"{path} has scales for blocks of {first.block}, which no product takes; {_OTHERWISE}")
    # Rows of equal scales, as engines want them, are one scale again: one product with one scale.
    is_one = layout.is_static and (scales == scales[..., :1, :1]).all()
    is_whole = not in_blocks and (is_whole or bool(is_one))
    return scaling_of_kernel(layout, is_whole=is_whole, power_of_two=_powers(scales))


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
