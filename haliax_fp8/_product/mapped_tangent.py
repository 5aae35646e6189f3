"""The batching rule for the linear half of a product, for when JAX differentiates first and batches afterwards.

With a `jax.custom_jvp` around a layer, or in an implicit layer, JAX maps the tangent of a product, with its residuals.
The mapped axis belongs in the contraction, as in the product itself: one state serves all examples, with one gradient
of the kernel and one amax. Only if state is mapped too does each example have its own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from .._jax.primitives import to_front
from .._numerics.quantized_array import QuantizedArray
from .._numerics.stored_array import StoredArray
from .spec import ProductSpec
from .three_products import Residuals, residual_array


class TangentArguments(NamedTuple):
    """The inputs of a product's tangent; or the mapped axis of each array, None if it has none.

    Args:
        tangents: The tangents of input, kernel and, if there is one, the state; None where zero.
        residuals: What the product saved.
        group_sizes: How many rows each group has; None without groups.
    """

    tangents: Sequence[Any]
    residuals: Residuals
    group_sizes: Any


def with_mapped_axis(
    args: TangentArguments, axes: TangentArguments, size: int, spec: ProductSpec
) -> tuple[TangentArguments, ProductSpec, int]:
    """The product's tangent over all examples: its arguments, what is static, and where the result has the axis.

    Args:
        args: The arguments, some with a mapped axis.
        axes: Where that is.
        size: Its size.
        spec: What is static about the product of one example.
    """
    if _has_members(args, axes) or not (_is_mapped(axes, 0) or _is_mapped(axes, 1) or args.group_sizes is not None):
        return _as_members(args, axes, size), dataclasses.replace(spec, ensemble=spec.ensemble + 1), 0
    return _in_contraction(args, axes, size, spec)


def _has_members(args: TangentArguments, axes: TangentArguments) -> bool:
    """Whether examples have scales or keys of their own."""
    if axes.residuals.key is not None or any(axis is not None for axis in axes.tangents[2:]):
        return True
    # The scales lie with what was measured, which is mapped in any case. Their tangent is, if they are; without it
    # nobody knows, and members that share what they need not are right as well.
    return axes.residuals.record is not None and args.tangents[2] is None


def _is_mapped(axes: TangentArguments, index: int) -> bool:
    """Whether the input (index 0) or the kernel (index 1) has the axis, or its tangent has."""
    # JAX does not count None as a leaf.
    return axes.tangents[index] is not None or bool(jax.tree.leaves(axes.residuals[index]))


def _as_members(args: TangentArguments, axes: TangentArguments, size: int) -> TangentArguments:
    """Every array with the mapped axis in front."""

    def in_front(x: Any, axis: Any) -> Any:
        if x is None:
            return None
        if isinstance(x, QuantizedArray):
            return _with_axis(x, axis, size, 0, per_example=True)
        if isinstance(x, StoredArray):
            return x.with_leading_axis(axis, size, 0)
        return to_front(x, axis, size, 0)

    return TangentArguments(
        [in_front(x, axis) for x, axis in zip(args.tangents, axes.tangents, strict=True)],
        Residuals(*(in_front(x, axis) for x, axis in zip(args.residuals, axes.residuals, strict=True))),
        in_front(args.group_sizes, axes.group_sizes),
    )


def _in_contraction(
    args: TangentArguments, axes: TangentArguments, size: int, spec: ProductSpec
) -> tuple[TangentArguments, ProductSpec, int]:
    position = spec.ensemble

    def with_axis(index: int) -> Any:
        residual: Any = args.residuals[index]
        axis: Any = axes.residuals[index]
        if isinstance(residual, QuantizedArray):
            return _with_axis(residual, axis, size, position, per_example=False)
        if isinstance(residual, StoredArray):
            return residual.with_leading_axis(axis, size, position)
        return to_front(residual, axis, size, position)

    operands = [with_axis(index) if _is_mapped(axes, index) else args.residuals[index] for index in (0, 1)]
    arrays: list[Any] = [residual_array(x) for x in operands]
    operand_axes = [position if _is_mapped(axes, index) else None for index in (0, 1)]
    sizes, axes_of_sizes = ([], []) if args.group_sizes is None else ([args.group_sizes], [axes.group_sizes])
    moved, contraction, out_axis = spec.contraction.fold(
        (*arrays, *sizes), (*operand_axes, *axes_of_sizes), size, spec.ensemble
    )
    # A contraction may want the axis in an operand that was not mapped.
    has_axis = [x.ndim > y.ndim or axis is not None for x, y, axis in zip(moved, arrays, operand_axes, strict=False)]
    operands = [with_axis(index) if has_axis[index] else operands[index] for index in (0, 1)]
    tangents = [
        to_front(t, axis, size, position) if t is not None and moves else t
        for t, axis, moves in zip(args.tangents[:2], axes.tangents[:2], has_axis, strict=True)
    ]
    record, axis = args.residuals.record, axes.residuals.record
    if record is not None and isinstance(axis, int):
        # The scales are the same in all examples.
        record = lax.reduce_max(record, (axis,))
    residuals = args.residuals._replace(input=operands[0], kernel=operands[1], record=record, sent_kernel=None)
    arguments = TangentArguments([*tangents, *args.tangents[2:]], residuals, moved[2] if sizes else None)
    return arguments, dataclasses.replace(spec, contraction=contraction), out_axis + spec.ensemble


def _with_axis(x: QuantizedArray, axes: Any, size: int, position: int, *, per_example: bool) -> QuantizedArray:
    """The array with the mapped axis at a position.

    Args:
        x: The array.
        axes: Where its parts have the axis.
        size: The size of the axis.
        position: Where to move it.
        per_example: Whether every example has its own scale, even if it was not mapped.
    """
    data = to_front(x.data, axes.data, size, position)
    scale, is_mapped = x.scale, axes.scale is not None
    if scale.ndim == int(is_mapped):
        # One number for the whole array: an axis of size 1 for each of the data's.
        if is_mapped or per_example:
            shape = [1] * data.ndim
            shape[position] = size if is_mapped else 1
            scale = lax.reshape(scale, shape)
            if not is_mapped:
                scale = lax.broadcast_in_dim(scale, (size, *shape[1:]), range(data.ndim))
    elif is_mapped or per_example:
        scale = to_front(scale, axes.scale, size, position)
    else:
        scale = lax.expand_dims(scale, (position,))
    block, rotation = x.block, x.rotation
    if block is not None:
        block = (*block[:position], 1 if scale.shape[position] == size else size, *block[position:])
    if rotation is not None and rotation.axis >= position:
        rotation = dataclasses.replace(rotation, axis=rotation.axis + 1)
    tensor_scale = x.tensor_scale
    if tensor_scale is not None:
        if per_example:
            tensor_scale = to_front(tensor_scale, axes.tensor_scale, size, position)
        elif axes.tensor_scale is not None:
            # A product may sum over the examples, so it has to scale before the sum; `scale` includes this one.
            tensor_scale = None
        else:
            tensor_scale = lax.expand_dims(tensor_scale, (position,))
    changed = {"scale": scale, "tensor_scale": tensor_scale, "block": block, "rotation": rotation}
    return dataclasses.replace(x, data=data, **changed, swizzled=None, amax=None)
