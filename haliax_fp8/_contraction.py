"""What a product sums over: the contraction of `dot_general`, and what any other contraction has to provide."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Shaped

from ._dimension_numbers import DotDimensions
from ._quantized_array import QuantizedArray, expand
from ._scaled_product import scaled_product


ProductName = Literal["product", "gradient_of_lhs", "gradient_of_rhs"]


class AbstractContraction(abc.ABC):
    """A bilinear map of two operands, with the two gradients that it has. Frozen and hashable.

    Laws: `gradient_of_lhs(g, rhs)` is the transpose of `lhs -> product(lhs, rhs)` at `g`, and the same for rhs;
    `fold` is what `jax.vmap` of the product would compute.
    """

    groups: frozenset[ProductName] = frozenset()
    """The products that do not sum over their last contracted axis as a whole, but over groups of it."""

    extras: int
    """The number of operands besides lhs and rhs; integers, not differentiated."""

    @abc.abstractmethod
    def out_shape(self, lhs_shape: Sequence[int], rhs_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the product."""

    @abc.abstractmethod
    def with_batch_axes(self, count: int) -> "AbstractContraction":
        """The contraction with `count` new leading axes in every operand and the product."""

    @abc.abstractmethod
    def fold(
        self, operands: Sequence[Array], axes: Sequence[int | None], size: int, ensemble: int
    ) -> tuple[Sequence[Array], "AbstractContraction", int]:
        """Takes an axis that `vmap` maps into the contraction.

        Args:
            operands: lhs, rhs and extras, each with the mapped axis and `ensemble` leading axes before it.
            axes: Where each operand has the mapped axis; None where it has none.
            size: The size of the mapped axis.
            ensemble: The number of leading axes that this contraction does not count.

        Returns:
            The operands, the contraction that multiplies them, and where the product has the axis.
        """

    @abc.abstractmethod
    def contracted(self, product: ProductName, lhs_ndim: int, rhs_ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes that a product sums over, in each of its operands.

        Args:
            product: `"product"`, of lhs and rhs; `"gradient_of_lhs"`, of the output's gradient and rhs; or
                `"gradient_of_rhs"`, of the output's gradient and lhs.
            lhs_ndim: The rank of lhs.
            rhs_ndim: The rank of rhs.
        """

    @abc.abstractmethod
    def dot(
        self,
        lhs: Float[Array, "..."],
        rhs: Float[Array, "..."],
        extras: tuple[Array, ...],
        precision: lax.PrecisionLike,
    ) -> Float32[Array, "..."]:
        """The product of two plain arrays, accumulated in float32."""

    @abc.abstractmethod
    def product(
        self,
        lhs: QuantizedArray,
        rhs: QuantizedArray,
        extras: tuple[Array, ...],
        precision: lax.PrecisionLike,
        dtype: np.dtype,
        scale: Float32[Array, ""] | None,
    ) -> Float[Array, "..."]:
        """The product of two quantized arrays, scales applied in float32, rounded to `dtype` once.

        `scale` is the product of their scales, if that is computed already.
        """

    @abc.abstractmethod
    def gradient_of_lhs(
        self,
        grad: QuantizedArray,
        rhs: QuantizedArray,
        extras: tuple[Array, ...],
        precision: lax.PrecisionLike,
        dtype: np.dtype,
        scale: Float32[Array, ""] | None,
    ) -> Float[Array, "..."]:
        """The gradient of lhs, in its layout, from that of the product; in `dtype`."""

    @abc.abstractmethod
    def gradient_of_rhs(
        self,
        grad: QuantizedArray,
        lhs: QuantizedArray,
        extras: tuple[Array, ...],
        precision: lax.PrecisionLike,
        dtype: np.dtype,
        scale: Float32[Array, ""] | None,
    ) -> Float[Array, "..."]:
        """The gradient of rhs, in its layout, from that of the product; in `dtype`."""


def to_front(x: Shaped[Array, "..."], axis: int | None, size: int, position: int) -> Shaped[Array, "..."]:
    """Moves an axis to a position near the front, or makes a new one there by repeating."""
    if axis is not None:
        return x if axis == position else jnp.moveaxis(x, axis, position)
    shape = (*x.shape[:position], size, *x.shape[position:])
    return jnp.broadcast_to(jnp.expand_dims(x, position), shape)


@dataclasses.dataclass(frozen=True)
class DotContraction(AbstractContraction):
    """The contraction of `lax.dot_general`.

    Args:
        dimensions: Which axes are contracted, batched and kept.
    """

    dimensions: DotDimensions

    extras = 0

    def out_shape(self, lhs_shape: Sequence[int], rhs_shape: Sequence[int]) -> tuple[int, ...]:
        """Batch axes, free axes of lhs, free axes of rhs."""
        return self.dimensions.out_shape(lhs_shape, rhs_shape)

    def with_batch_axes(self, count: int) -> "DotContraction":
        """Batched over `count` leading axes."""
        return DotContraction(self.dimensions.with_batch_axes(count))

    def fold(
        self, operands: Sequence[Array], axes: Sequence[int | None], size: int, ensemble: int
    ) -> tuple[Sequence[Array], "DotContraction", int]:
        """The mapped axis is a free axis of the operand that has it, or a batch axis of both."""
        (lhs, rhs), (lhs_axis, rhs_axis) = operands, axes
        if rhs_axis is None:
            dimensions, out_axis = self.dimensions.with_axis_in_lhs()
        elif lhs_axis is None:
            dimensions, out_axis = self.dimensions.with_axis_in_rhs()
        else:
            dimensions, out_axis = self.dimensions.with_batch_axis()
        lhs = lhs if lhs_axis is None else to_front(lhs, lhs_axis, size, ensemble)
        rhs = rhs if rhs_axis is None else to_front(rhs, rhs_axis, size, ensemble)
        return (lhs, rhs), DotContraction(dimensions), out_axis

    def contracted(self, product: ProductName, lhs_ndim: int, rhs_ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of `lax.dot_general` and its two gradients."""
        dimensions = self.dimensions
        if product == "gradient_of_lhs":
            dimensions = dimensions.gradient_of_lhs()[0]
        elif product == "gradient_of_rhs":
            dimensions = dimensions.gradient_of_rhs()[0]
        return _in_order(dimensions.lhs_contract, dimensions.rhs_contract)

    def dot(
        self,
        lhs: Float[Array, "..."],
        rhs: Float[Array, "..."],
        extras: tuple[Array, ...],
        precision: lax.PrecisionLike,
    ) -> Float32[Array, "..."]:
        """`lax.dot_general`."""
        return lax.dot_general(
            lhs, rhs, self.dimensions.numbers, precision=precision, preferred_element_type=jnp.float32
        )

    def product(
        self,
        lhs: QuantizedArray,
        rhs: QuantizedArray,
        extras: tuple[Array, ...],
        precision: lax.PrecisionLike,
        dtype: np.dtype,
        scale: Float32[Array, ""] | None,
    ) -> Float[Array, "..."]:
        """`dot(lhs.data, rhs.data) * (lhs.scale * rhs.scale)`."""
        return _product(lhs, rhs, self.dimensions, precision, dtype, scale)

    def gradient_of_lhs(
        self,
        grad: QuantizedArray,
        rhs: QuantizedArray,
        extras: tuple[Array, ...],
        precision: lax.PrecisionLike,
        dtype: np.dtype,
        scale: Float32[Array, ""] | None,
    ) -> Float[Array, "..."]:
        """Contracts the free axes of rhs."""
        dimensions, layout = self.dimensions.gradient_of_lhs()
        return _transposed(_product(grad, rhs, dimensions, precision, dtype, scale), layout)

    def gradient_of_rhs(
        self,
        grad: QuantizedArray,
        lhs: QuantizedArray,
        extras: tuple[Array, ...],
        precision: lax.PrecisionLike,
        dtype: np.dtype,
        scale: Float32[Array, ""] | None,
    ) -> Float[Array, "..."]:
        """Contracts the free axes of lhs."""
        dimensions, layout = self.dimensions.gradient_of_rhs()
        return _transposed(_product(grad, lhs, dimensions, precision, dtype, scale), layout)


def _in_order(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Pairs of contracted axes in the order of the first operand's: blocks run along the last pair, in both."""
    pairs = sorted(zip(a, b, strict=True))
    return tuple(axis for axis, _ in pairs), tuple(axis for _, axis in pairs)


def _product(
    a: QuantizedArray,
    b: QuantizedArray,
    dims: DotDimensions,
    precision: lax.PrecisionLike,
    dtype: np.dtype,
    scale: Float32[Array, ""] | None,
) -> Array:
    """`dot(a, b)` in a dtype; scales that are constant along what is contracted factor out of the sum."""

    def dot(x: Array, y: Array, dtype: np.dtype) -> Array:
        return lax.dot_general(x, y, dims.numbers, precision=precision, preferred_element_type=dtype)

    if not (_factors_out(a, dims.lhs_contract) and _factors_out(b, dims.rhs_contract)):
        return lax.convert_element_type(scaled_product(a, b, dims, precision), dtype)
    if a.scale.size == b.scale.size == 1:
        if scale is None:
            scale = lax.mul(_scalar(a.scale), _scalar(b.scale))
        return _rescaled(dot, a.data, b.data, scale, dtype, exact=a.scale_bits + b.scale_bits <= _BFLOAT16_BITS)
    out = dot(a.data, b.data, _FLOAT32)
    a, b = (
        QuantizedArray(x.data, x.scale if x.scale.ndim else lax.reshape(x.scale, (1,) * x.data.ndim)) for x in (a, b)
    )
    batch, kept_a, kept_b = len(dims.lhs_batch), len(dims.lhs_free), len(dims.rhs_free)
    scale_a = lax.transpose(a.scale, dims.lhs_batch + dims.lhs_free + dims.lhs_contract)
    scale_b = lax.transpose(b.scale, dims.rhs_batch + dims.rhs_free + dims.rhs_contract)
    scale_a = lax.reshape(scale_a, scale_a.shape[: batch + kept_a] + (1,) * kept_b)
    scale_b = lax.reshape(scale_b, scale_b.shape[:batch] + (1,) * kept_a + scale_b.shape[batch : batch + kept_b])
    out = lax.mul(out, lax.mul(expand(scale_a, out.shape), expand(scale_b, out.shape)))
    return lax.convert_element_type(out, dtype)


_FLOAT32 = np.dtype(np.float32)


# The significant bits of a bfloat16, the leading one included.
_BFLOAT16_BITS = 8


def _rescaled(
    dot: Callable[..., Array], a: Array, b: Array, scale: Float32[Array, ""], dtype: np.dtype, *, exact: bool
) -> Array:
    """`dot(a, b) * scale` in a dtype.

    On NVIDIA GPUs a product in bfloat16 is the product of the FP8 data, in bfloat16, times the scale. cuBLASLt computes
    both at once and rounds once. Triton's kernels, which XLA prefers by default, read FP8 only if the FP8 data are
    multiplied directly: for dequantized operands they read bfloat16. And whatever XLA puts between product and scale (a
    sum over devices, a slice of a padded product), the scale stays exact, because bfloat16 can represent it.

    Elsewhere the product is stored in float32, multiplied, and rounded.

    Args:
        dot: The product of two arrays in a dtype.
        a: The data of the first operand.
        b: Of the second.
        scale: The product of their scales.
        dtype: Of the result.
        exact: Whether bfloat16 holds `scale`.
    """

    def in_float32(a: Array, b: Array, scale: Array) -> Array:
        return lax.convert_element_type(lax.mul(dot(a, b, _FLOAT32), scale), dtype)

    def in_dtype(a: Array, b: Array, scale: Array) -> Array:
        return lax.mul(dot(a, b, dtype), lax.convert_element_type(scale, dtype))

    if dtype != jnp.bfloat16 or not exact:
        return in_float32(a, b, scale)
    return lax.platform_dependent(a, b, scale, cuda=in_dtype, default=in_float32)


def _factors_out(x: QuantizedArray, contract: tuple[int, ...]) -> bool:
    """Whether one scale serves everything that is summed, and blocks are whole axes or single elements."""
    if x.scale.ndim == 0:
        return True
    whole = all(count in (1, size) for count, size in zip(x.scale.shape, x.data.shape, strict=True))
    return whole and all(x.scale.shape[axis] == 1 for axis in contract)


def _scalar(x: Array) -> Array:
    return x if x.ndim == 0 else lax.reshape(x, ())


def _transposed(x: Array, layout: tuple[int, ...]) -> Array:
    return x if layout == tuple(range(x.ndim)) else lax.transpose(x, layout)
