"""What a product sums over: the contraction of `dot_general`, and what any other contraction has to provide."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
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
    """How many operands there are beside lhs and rhs; integers, not differentiated."""

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
        self, lhs: Float[Array, "..."], rhs: Float[Array, "..."], extras: tuple[Array, ...], precision: lax.Precision
    ) -> Float32[Array, "..."]:
        """The product of two plain arrays, accumulated in float32."""

    @abc.abstractmethod
    def product(
        self,
        lhs: QuantizedArray,
        rhs: QuantizedArray,
        extras: tuple[Array, ...],
        precision: lax.Precision,
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
        self, lhs: Float[Array, "..."], rhs: Float[Array, "..."], extras: tuple[Array, ...], precision: lax.Precision
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
        precision: lax.Precision,
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
        dtype: np.dtype,
        scale: Float32[Array, ""] | None,
    ) -> Float[Array, "..."]:
        """Contracts the free axes of rhs."""
        dimensions, layout = self.dimensions.gradient_of_lhs()
        return _transposed(_product(grad, rhs, dimensions, lax.Precision.HIGHEST, dtype, scale), layout)

    def gradient_of_rhs(
        self,
        grad: QuantizedArray,
        lhs: QuantizedArray,
        extras: tuple[Array, ...],
        dtype: np.dtype,
        scale: Float32[Array, ""] | None,
    ) -> Float[Array, "..."]:
        """Contracts the free axes of lhs."""
        dimensions, layout = self.dimensions.gradient_of_rhs()
        return _transposed(_product(grad, lhs, dimensions, lax.Precision.HIGHEST, dtype, scale), layout)


def _in_order(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Pairs of contracted axes in the order of the first operand's: blocks run along the last pair, in both."""
    pairs = sorted(zip(a, b, strict=True))
    return tuple(axis for axis, _ in pairs), tuple(axis for _, axis in pairs)


def _product(
    a: QuantizedArray,
    b: QuantizedArray,
    dims: DotDimensions,
    precision: lax.Precision,
    dtype: np.dtype,
    scale: Float32[Array, ""] | None,
) -> Array:
    """`dot(a, b)` in a dtype; scales that are constant along what is contracted factor out of the sum."""

    def dot(x: Array, y: Array, dtype: np.dtype) -> Array:
        return lax.dot_general(x, y, dims.numbers, precision=precision, preferred_element_type=dtype)

    if not (_factors_out(a, dims.lhs_contract) and _factors_out(b, dims.rhs_contract)):
        return lax.convert_element_type(scaled_product(a, b, dims, precision), dtype)
    if a.scale.size == b.scale.size == 1:
        # What the product reads as it is stored, and so is there in any case; else an output's gradient, which another
        # product reads so.
        pairs = (a, dims.lhs_contract), (b, dims.rhs_contract)
        stored = [x.data for x, axes in pairs if axes == tuple(range(x.data.ndim))[-len(axes) :]] or [a.data]
        if scale is None:
            scale = lax.mul(_scalar(a.scale), _scalar(b.scale))
        return _rescaled(dot, a.data, b.data, scale, stored, dtype)
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


def _rescaled(
    dot: Callable[..., Array], a: Array, b: Array, scale: Float32[Array, ""], stored: Sequence[Array], dtype: np.dtype
) -> Array:
    """`dot(a, b) * scale`, multiplied in float32 and rounded to a dtype once.

    On NVIDIA's devices a product in bfloat16 is written so that one kernel makes it, the product of dequantized
    operands: XLA hands cuBLASLt the FP8 data and the scale, which it takes through bfloat16 without rounding it (what
    `xla_allow_excess_precision`, its default, says). Where it does not, see the design notes, each operand is rounded.
    Multiplied afterwards in float32, the product would be stored in float32, and another kernel would scale and round
    it. Multiplied afterwards in bfloat16, the scale would be rounded wherever XLA puts something between: a sum over
    devices, a slice of what it padded or merged.

    The barrier makes the scale this product's own. XLA merges small products that share an operand: what it then
    multiplies is a concatenation of dequantized operands, in bfloat16.
    """

    def after(a: Array, b: Array, scale: Array, *stored: Array) -> Array:
        del stored
        return lax.convert_element_type(lax.mul(dot(a, b, _FLOAT32), scale), dtype)

    def within(a: Array, b: Array, scale: Array, *stored: Array) -> Array:
        scales = lax.optimization_barrier((scale, np.float32(1.0), *stored))[:2]
        a, b = (
            lax.mul(lax.convert_element_type(x, dtype), lax.convert_element_type(of_x, dtype))
            for x, of_x in zip((a, b), scales, strict=True)
        )
        return dot(a, b, dtype)

    def unscaled(a: Array, b: Array, scale: Array, *stored: Array) -> Array:
        del stored
        return lax.mul(dot(a, b, dtype), lax.convert_element_type(scale, dtype))

    if dtype != jnp.bfloat16:
        return after(a, b, scale)
    in_fp8 = [x.dtype.itemsize == 1 for x in (a, b)]
    if all(in_fp8):
        on_nvidia = _for_one_scale(within, after)
    else:
        # Operands in high precision have a scale of 1, which bfloat16 holds; an FP8 one beside them has not.
        on_nvidia = after if any(in_fp8) else unscaled
    return lax.platform_dependent(a, b, scale, *stored, cuda=on_nvidia, default=after)


def _for_one_scale(function: Callable[..., Array], otherwise: Callable[..., Array]) -> Callable[..., Array]:
    """A function of operands and their scale, and another one where `vmap` gives each member a scale of its own."""
    call = jax.custom_batching.custom_vmap(lambda *args: function(*args))

    @call.def_vmap
    def mapped(axis_size: int, are_mapped: Sequence[bool], *args: Array) -> tuple[Array, bool]:
        axes = tuple(0 if is_mapped else None for is_mapped in are_mapped)
        in_one, in_many = (jax.vmap(f, in_axes=axes, axis_size=axis_size) for f in (function, otherwise))
        scale = 2
        return (in_many(*args) if are_mapped[scale] else _for_one_scale(in_one, in_many)(*args)), True

    return call


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
