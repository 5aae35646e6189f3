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
from .dimensions import DotDimensions
from .scaled_dot import scaled_dot


@dataclasses.dataclass(frozen=True)
class DotContraction(AbstractContraction):
    """The contraction of `lax.dot_general`.

    Args:
        dimensions: Which axes are contracted, batched and kept.
        kernel_first: Whether the kernel is the first operand of `lax.dot_general`: `einsum` may swap the two. Nothing
            else knows.
    """

    dimensions: DotDimensions
    kernel_first: bool = False

    extras = 0

    def placed[A](self, input: A, kernel: A) -> tuple[A, A]:
        """Input and kernel as `lax.dot_general` takes them; or back."""
        return (kernel, input) if self.kernel_first else (input, kernel)

    def out_shape(self, input_shape: Sequence[int], kernel_shape: Sequence[int]) -> tuple[int, ...]:
        """Batch axes, free axes of the first operand, free axes of the second."""
        return self.dimensions.out_shape(*self.placed(input_shape, kernel_shape))

    def with_batch_axes(self, count: int) -> "DotContraction":
        """Batched over `count` leading axes."""
        return dataclasses.replace(self, dimensions=self.dimensions.with_batch_axes(count)) if count else self

    def fold(
        self, operands: Sequence[Array], axes: Sequence[int | None], size: int, ensemble: int
    ) -> tuple[Sequence[Array], "DotContraction", int]:
        """The mapped axis is a free axis of the operand that has it, or a batch axis of both."""
        (lhs, rhs), (lhs_axis, rhs_axis) = self.placed(*operands), self.placed(*axes)
        if rhs_axis is None:
            dimensions, out_axis = self.dimensions.with_axis_in_lhs()
        elif lhs_axis is None:
            dimensions, out_axis = self.dimensions.with_axis_in_rhs()
        else:
            dimensions, out_axis = self.dimensions.with_batch_axis()
        lhs = lhs if lhs_axis is None else to_front(lhs, lhs_axis, size, ensemble)
        rhs = rhs if rhs_axis is None else to_front(rhs, rhs_axis, size, ensemble)
        return self.placed(lhs, rhs), dataclasses.replace(self, dimensions=dimensions), out_axis

    def contracted(self, product: ProductName) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of `lax.dot_general` and its two gradients."""
        dimensions, _, swapped = self._products[product]
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
        lhs, rhs = self.placed(input, kernel)
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
        dimensions, layout, swapped = self._products[product]
        a, b = reversed(operands) if swapped else operands
        out = scaled_dot(a, b, dimensions, precision, dtype, scale, in_a_sum=product == "dgrad")
        return out if layout == tuple(range(out.ndim)) else lax.transpose(out, layout)

    @functools.cached_property
    def _products(self) -> dict[ProductName, tuple[DotDimensions, tuple[int, ...], bool]]:
        """The axes of each product, the layout of its result, and whether it takes its operands in the other order."""
        dims = self.dimensions
        of_lhs, of_rhs = dims.gradient_of_lhs(), dims.gradient_of_rhs()
        dgrad, wgrad = (of_rhs, of_lhs) if self.kernel_first else (of_lhs, of_rhs)
        fprop = dims, tuple(range(dims.out_ndim)), self.kernel_first
        # The output's gradient comes first.
        return {"fprop": fprop, "dgrad": (*dgrad, False), "wgrad": (*wgrad, True)}
