"""Grouped products: rows of one operand multiplied by the kernel of the group that each is in (mixture of experts)."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .._jax.mapped_axis import to_front
from .._numerics.quantized_array import QuantizedArray
from .contraction import AbstractContraction, ProductName


_ROWS_BY_KERNEL = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
_GRAD_BY_KERNEL = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
_ROWS_BY_GRAD = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


@dataclasses.dataclass(frozen=True)
class RaggedContraction(AbstractContraction):
    """`lax.ragged_dot`: rows `[M, K]`, kernels `[G, K, N]`, group sizes `[G]`; the product is `[M, N]`.

    Row `m` is multiplied by the kernel of its group; groups are consecutive, and rows after the last group give 0.
    dgrad is the same with transposed kernels; wgrad sums over the rows of each group: `[G, K, N]`.

    Args:
        batch: The number of leading axes of all operands and the product; each entry is a separate product.
    """

    batch: int = 0

    extras = 1
    groups = frozenset[ProductName]({"gradient_of_rhs"})

    def out_shape(self, lhs_shape: Sequence[int], rhs_shape: Sequence[int]) -> tuple[int, ...]:
        """`[*batch, M, N]`."""
        return (*lhs_shape[:-1], rhs_shape[-1])

    def with_batch_axes(self, count: int) -> "RaggedContraction":
        """Batched over `count` more leading axes."""
        return RaggedContraction(self.batch + count)

    def fold(
        self, operands: Sequence[Array], axes: Sequence[int | None], size: int, ensemble: int
    ) -> tuple[Sequence[Array], "RaggedContraction", int]:
        """A batch axis of every operand: examples have their own groups."""
        moved = [to_front(x, axis, size, ensemble) for x, axis in zip(operands, axes, strict=True)]
        return moved, self.with_batch_axes(1), 0

    def contracted(self, product: ProductName, lhs_ndim: int, rhs_ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Inputs for the product, outputs for the gradient of the rows, rows for that of the kernels."""
        if product == "product":
            return (lhs_ndim - 1,), (rhs_ndim - 2,)
        if product == "gradient_of_lhs":
            return (lhs_ndim - 1,), (rhs_ndim - 1,)
        return (lhs_ndim - 2,), (lhs_ndim - 2,)

    def dot(
        self,
        lhs: Float[Array, "..."],
        rhs: Float[Array, "..."],
        extras: tuple[Array, ...],
        precision: lax.PrecisionLike,
    ) -> Float32[Array, "..."]:
        """`lax.ragged_dot_general`."""
        return self._dot(_ROWS_BY_KERNEL, precision)(lhs, rhs, *extras)

    def product(
        self,
        lhs: QuantizedArray,
        rhs: QuantizedArray,
        extras: tuple[Array, ...],
        precision: lax.PrecisionLike,
        dtype: np.dtype,
        scale: Float32[Array, ""] | None,
    ) -> Float[Array, "..."]:
        """Rows times kernels."""
        return self._scaled(_ROWS_BY_KERNEL, lhs, rhs, extras, precision, scale).astype(dtype)

    def gradient_of_lhs(
        self,
        grad: QuantizedArray,
        rhs: QuantizedArray,
        extras: tuple[Array, ...],
        precision: lax.PrecisionLike,
        dtype: np.dtype,
        scale: Float32[Array, ""] | None,
    ) -> Float[Array, "..."]:
        """Rows of the output's gradient times transposed kernels."""
        return self._scaled(_GRAD_BY_KERNEL, grad, rhs, extras, precision, scale).astype(dtype)

    def gradient_of_rhs(
        self,
        grad: QuantizedArray,
        lhs: QuantizedArray,
        extras: tuple[Array, ...],
        precision: lax.PrecisionLike,
        dtype: np.dtype,
        scale: Float32[Array, ""] | None,
    ) -> Float[Array, "..."]:
        """For each group, the sum over its rows of outer products."""
        return self._scaled(_ROWS_BY_GRAD, lhs, grad, extras, precision, scale).astype(dtype)

    def _scaled(
        self,
        numbers: lax.RaggedDotDimensionNumbers,
        a: QuantizedArray,
        b: QuantizedArray,
        extras: tuple[Array, ...],
        precision: lax.PrecisionLike,
        scale: Float32[Array, "..."] | None,
    ) -> Float32[Array, "..."]:
        if not (_one_scale(a, self.batch) and _one_scale(b, self.batch)):
            return self._dot(numbers, precision)(a.dequantize(), b.dequantize(), *extras)
        out = self._dot(numbers, precision)(a.data, b.data, *extras)
        if scale is None:
            scale = _of_batch(a, self.batch) * _of_batch(b, self.batch)
        return out * scale.reshape(scale.shape + (1,) * (out.ndim - scale.ndim))

    def _dot(self, numbers: lax.RaggedDotDimensionNumbers, precision: lax.PrecisionLike) -> Callable[..., Array]:
        def dot(lhs: Array, rhs: Array, group_sizes: Array) -> Array:
            return lax.ragged_dot_general(
                lhs, rhs, group_sizes, numbers, precision=precision, preferred_element_type=jnp.float32
            )

        for _ in range(self.batch):
            dot = jax.vmap(dot)
        return dot


def _one_scale(x: QuantizedArray, batch: int) -> bool:
    return all(count == 1 for count in x.scale.shape[batch:])


def _of_batch(x: QuantizedArray, batch: int) -> Float32[Array, "..."]:
    return x.scale.reshape(x.scale.shape[:batch])
