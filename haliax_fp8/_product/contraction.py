"""What a product sums over: all that a contraction has to provide, with its two gradients."""

import abc
from collections.abc import Sequence

import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .._numerics.quantized_array import QuantizedArray
from ..recipes.recipe import ProductName


class AbstractContraction(abc.ABC):
    """A bilinear map of input and kernel, with the two gradients that it has. Frozen and hashable.

    Laws: dgrad is the transpose of `input -> fprop(input, kernel)` at the output's gradient, and wgrad that of
    `kernel -> fprop(input, kernel)`; `fold` is what `jax.vmap` of fprop would compute. Operands come in the order of
    `OPERANDS`, whichever order the hardware's product takes them in.
    """

    groups: frozenset[ProductName] = frozenset()
    """The products that do not sum over their last contracted axis as a whole, but over groups of it."""

    state_per_group: bool = False
    """Whether each group is a member of an ensemble with a state of its own; `extras` holds the groups' sizes."""

    extras: int
    """The number of operands besides input and kernel; integers, not differentiated."""

    @abc.abstractmethod
    def out_shape(self, input_shape: Sequence[int], kernel_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the output."""

    @abc.abstractmethod
    def with_batch_axes(self, count: int) -> "AbstractContraction":
        """The contraction with `count` new leading axes in every operand and the output."""

    @abc.abstractmethod
    def fold(
        self, operands: Sequence[Array], axes: Sequence[int | None], size: int, ensemble: int
    ) -> tuple[Sequence[Array], "AbstractContraction", int]:
        """Takes an axis that `vmap` maps into the contraction.

        Args:
            operands: Input, kernel and extras, each with the mapped axis and `ensemble` leading axes before it.
            axes: Where each operand has the mapped axis; None where it has none.
            size: The size of the mapped axis.
            ensemble: The number of leading axes that this contraction does not count.

        Returns:
            The operands, the contraction that multiplies them, and where the output has the axis.
        """

    @abc.abstractmethod
    def contracted(self, product: ProductName) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes that a product sums over, in each of its operands."""

    @abc.abstractmethod
    def dot(
        self,
        input: Float[Array, "..."],
        kernel: Float[Array, "..."],
        extras: tuple[Array, ...],
        precision: lax.PrecisionLike,
    ) -> Float32[Array, "..."]:
        """The product of two plain arrays, accumulated in float32."""

    @abc.abstractmethod
    def product(
        self,
        product: ProductName,
        operands: tuple[QuantizedArray, QuantizedArray],
        extras: tuple[Array, ...],
        precision: lax.PrecisionLike,
        dtype: np.dtype,
        scale: Float32[Array, "*members"] | None,
    ) -> Float[Array, "..."]:
        """A product of two quantized arrays, times their scales, in `dtype`; `scales.py` says where that is rounded.

        Args:
            product: Which of the three.
            operands: Its operands.
            extras: What else the contraction takes.
            precision: The precision of the product.
            dtype: The dtype of the result, which has the layout of the output, the input or the kernel.
            scale: The product of the operands' scales, if that is computed already; of groups with a state each,
                theirs.
        """
