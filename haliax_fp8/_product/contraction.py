"""What a product sums over: all that a contraction has to provide, with its two gradients."""

import abc
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .._numerics.quantized_array import QuantizedArray


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
