"""The contraction of `lax.dot_general`."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .._jax.mapped_axis import to_front
from .._numerics.quantized_array import QuantizedArray
from .contraction import AbstractContraction, ProductName
from .dimensions import DotDimensions
from .scales import quantized_dot


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
        return quantized_dot(lhs, rhs, self.dimensions, precision, dtype, scale)

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
        return _transposed(quantized_dot(grad, rhs, dimensions, precision, dtype, scale), layout)

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
        return _transposed(quantized_dot(grad, lhs, dimensions, precision, dtype, scale), layout)


def _in_order(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Pairs of contracted axes in the order of the first operand's: blocks run along the last pair, in both."""
    pairs = sorted(zip(a, b, strict=True))
    return tuple(axis for axis, _ in pairs), tuple(axis for _, axis in pairs)


def _transposed(x: Array, layout: tuple[int, ...]) -> Array:
    return x if layout == tuple(range(x.ndim)) else lax.transpose(x, layout)
