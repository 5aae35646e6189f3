"""The contraction of `lax.dot_general`."""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .._jax.mapped_axis import to_front
from .._numerics.quantized_array import QuantizedArray
from ..recipes.recipe import ProductName
from .contraction import AbstractContraction
from .dimensions import DimensionNumbers, DotDimensions
from .scaled_dot import scaled_dot


@dataclasses.dataclass(frozen=True)
class DotContraction(AbstractContraction):
    """The contraction of `lax.dot_general`.

    Args:
        dimensions: Which axes are contracted, batched and kept.
        kernel_first: Whether the kernel is the first operand of `lax.dot_general`: `einsum` may swap the two.
    """

    dimensions: DotDimensions
    kernel_first: bool = False

    extras = 0

    @staticmethod
    def of(
        numbers: DimensionNumbers,
        kernel_shape: tuple[int, ...] | None,
        lhs_shape: Sequence[int],
        rhs_shape: Sequence[int],
    ) -> "DotContraction":
        """Like `DotDimensions.of`; the kernel is the first operand if only that one has the kernel's free axes.

        Args:
            numbers: In the form that `lax.dot_general` takes.
            kernel_shape: The sizes of the kernel's free axes; if None, it is the second operand.
            lhs_shape: The shape of the first operand.
            rhs_shape: The shape of the second.
        """
        dims = DotDimensions.of(numbers, lhs_shape, rhs_shape)
        if kernel_shape is None:
            return DotContraction(dims)
        batch = [lhs_shape[axis] for axis in dims.lhs_batch]

        def fits(shape: Sequence[int], free_axes: tuple[int, ...]) -> bool:
            free = [shape[axis] for axis in free_axes]
            # A free axis of the kernel is a batch axis of the product where the input has it too.
            return free == [*kernel_shape] or sorted(free + batch) == sorted(kernel_shape)

        return DotContraction(dims, fits(lhs_shape, dims.lhs_free) and not fits(rhs_shape, dims.rhs_free))

    def ordered[A](self, input: A, kernel: A) -> tuple[A, A]:
        """Input and kernel as `lax.dot_general` takes them; or back."""
        return (kernel, input) if self.kernel_first else (input, kernel)

    def out_shape(self, input_shape: Sequence[int], kernel_shape: Sequence[int]) -> tuple[int, ...]:
        """Batch axes, free axes of the first operand, free axes of the second."""
        return self.dimensions.out_shape(*self.ordered(input_shape, kernel_shape))

    def with_batch_axes(self, count: int) -> "DotContraction":
        """Batched over `count` leading axes."""
        return dataclasses.replace(self, dimensions=self.dimensions.with_batch_axes(count)) if count else self

    def with_axis(self, input: bool, kernel: bool) -> tuple["DotContraction", int]:
        """Adds a leading axis to one operand, or a batch axis to both; also returns where the output has it."""
        dimensions, out_axis = self.dimensions.with_axis(*self.ordered(input, kernel))
        return dataclasses.replace(self, dimensions=dimensions), out_axis

    def fold(
        self, operands: Sequence[Array], axes: Sequence[int | None], size: int, ensemble: int
    ) -> tuple[Sequence[Array], "DotContraction", int]:
        """The mapped axis is a free axis of the operand that has it, or a batch axis of both."""
        contraction, out_axis = self.with_axis(*[axis is not None for axis in axes])
        pairs = zip(operands, axes, strict=True)
        moved = [x if axis is None else to_front(x, axis, size, ensemble) for x, axis in pairs]
        return moved, contraction, out_axis

    def contracted(self, product: ProductName) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The contracted axes of `lax.dot_general` and its two gradients."""
        dimensions, _, swapped = _products_of(self)[product]
        # Pairs in the order of the first operand's axes: blocks run along the last pair, in both.
        pairs = sorted(zip(dimensions.lhs_contract, dimensions.rhs_contract, strict=True))
        first, second = map(tuple, zip(*pairs, strict=True)) if pairs else ((), ())
        return (second, first) if swapped else (first, second)

    def dot(
        self,
        input: Float[Array, "..."],
        kernel: Float[Array, "..."],
        extras: tuple[Array, ...],
        precision: lax.PrecisionLike,
    ) -> Float32[Array, "..."]:
        """`lax.dot_general`."""
        lhs, rhs = self.ordered(input, kernel)
        return lax.dot_general(
            lhs, rhs, self.dimensions.numbers, precision=precision, preferred_element_type=jnp.float32
        )

    def product(
        self,
        product: ProductName,
        operands: tuple[QuantizedArray, QuantizedArray],
        extras: tuple[Array, ...],
        precision: lax.PrecisionLike,
        dtype: np.dtype,
        scale: Float32[Array, ""] | None,
    ) -> Float[Array, "..."]:
        """`dot(a.data, b.data) * (a.scale * b.scale)`, in the layout that the product's result has."""
        dimensions, layout, swapped = _products_of(self)[product]
        a, b = reversed(operands) if swapped else operands
        out = scaled_dot(a, b, dimensions, precision, dtype, scale, in_a_sum=product == "dgrad")
        return out if layout == tuple(range(out.ndim)) else lax.transpose(out, layout)


# Layers of all sizes share them.
@functools.cache
def _products_of(contraction: DotContraction) -> dict[ProductName, tuple[DotDimensions, tuple[int, ...], bool]]:
    """The axes of each product, the layout of its result, and whether it takes its operands in the other order."""
    dims = contraction.dimensions
    of_lhs, of_rhs = dims.gradient_of_lhs(), dims.gradient_of_rhs()
    dgrad, wgrad = (of_rhs, of_lhs) if contraction.kernel_first else (of_lhs, of_rhs)
    fprop = dims, tuple(range(dims.out_ndim)), contraction.kernel_first
    # The output's gradient comes first.
    return {"fprop": fprop, "dgrad": (*dgrad, False), "wgrad": (*wgrad, True)}
