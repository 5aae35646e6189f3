"""StoredArray: a quantized array as its bits, in the order in which products read it."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float32, UInt8

from .._jax.primitives import to_front
from .._jax.xla import divisor_of_each
from ..formats import E2M1
from .quantized_array import QuantizedArray, expand


class StoredArray[A](eqx.Module):
    """A `QuantizedArray` as its bits, in whole numbers: no parameters, for `jax.grad`, `optax`, weight decay and casts.

    Everything static is about one array. Its axes are the last ones of `data`; those of members, ensembles and stacks
    come first, and are not counted.

    Args:
        data: The bits of the data, their axes in another order. Of E2M1's own dtype two codes in a byte, the lower half
            first, along the last axis.
        scale: The bits of the scales, with the axes of the array: of float32; in bytes, of E8M0, or with a
            `tensor_scale` of E4M3. With fewer axes than the data, one scale for all of what the others number. None if
            it is kept elsewhere.
        tensor_scale: The bits of float32, see `QuantizedArray`; scales in float32 include it. None if scales have one
            level.
        dtype: The dtype of the data.
        order: Which axis of the array each axis of the data is.
        block: The shape of a block, see `QuantizedArray`.
        scale_bits: See `QuantizedArray`.
        tensor_scale_bits: See `QuantizedArray`.
        divides: Whether `tensor_scale` is the reciprocal, as compressed-tensors has it in NVFP4.

    Example:
        >>> data, scale = jnp.array([[0x38, 0xC0]], jnp.uint8), jnp.array([[128]], jnp.uint8)  # E4M3 times E8M0
        >>> stored = StoredArray(data, scale, dtype=np.dtype(jnp.float8_e4m3fn), order=(0, 1))
        >>> stored.values(jnp.float32)  # 1 and -2, times 2
        Array([[ 2., -4.]], dtype=float32)
    """

    data: A
    scale: A | None
    tensor_scale: A | None = None
    dtype: np.dtype = eqx.field(static=True, kw_only=True)
    order: tuple[int, ...] = eqx.field(static=True, kw_only=True)
    block: tuple[int, ...] | None = eqx.field(static=True, default=None, kw_only=True)
    scale_bits: int = eqx.field(static=True, default=24, kw_only=True)
    tensor_scale_bits: int = eqx.field(static=True, default=24, kw_only=True)
    divides: bool = eqx.field(static=True, default=False, kw_only=True)

    @property
    def leading(self) -> int:
        """How many axes the data have before those of the array."""
        return _plain(self.data).ndim - len(self.order)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the data, in the order of the array."""
        return tuple(_plain(self.data).shape[axis] for axis in self._inverse)

    @property
    def bytes(self) -> int:
        """The size of data and scales."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

    @property
    def _inverse(self) -> tuple[int, ...]:
        return (*range(self.leading), *(self.leading + int(axis) for axis in np.argsort(self.order)))

    @property
    def values_of_data(self) -> Float[Array, "..."]:
        """The data, in the order of the array."""
        data = array_of(_plain(self.data), self.dtype)
        return data if self._inverse == tuple(range(data.ndim)) else lax.transpose(data, self._inverse)

    @property
    def quantized(self) -> QuantizedArray:
        """The array, after the axes of members; it has to have its scale."""
        data = self.values_of_data
        tensor_scale = None if self.tensor_scale is None else array_of(_plain(self.tensor_scale), np.dtype(np.float32))
        scale = _with_rank(self._scales(tensor_scale), data.ndim)
        block = None if self.block is None else (*(1,) * self.leading, *self.block)
        tensor_scale = None if tensor_scale is None else _with_rank(tensor_scale, data.ndim)
        return QuantizedArray(
            data,
            scale,
            block,
            tensor_scale=tensor_scale,
            scale_bits=self.scale_bits,
            tensor_scale_bits=self.tensor_scale_bits,
        )

    def _scales(self, tensor_scale: Float32[Array, "..."] | None) -> Float32[Array, "..."]:
        scale = _plain(self.scale)
        if scale.dtype != jnp.uint8:
            return array_of(scale, np.dtype(np.float32))
        if tensor_scale is None:
            return power_of_two(scale.astype(jnp.int32))
        blocks, one = lax.bitcast_convert_type(scale, jnp.float8_e4m3fn).astype(jnp.float32), tensor_scale
        one = _with_rank(one, blocks.ndim)
        return blocks / divisor_of_each(one, blocks.shape) if self.divides else blocks * one

    def values(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """`data * scale`, computed in float32 and rounded to a dtype."""
        x = self.quantized
        return (x.data.astype(jnp.float32) * expand(x.scale, x.data.shape, x.block)).astype(dtype)

    def with_leading_axis(self, axes: "StoredArray[Any]", size: int, position: int) -> "StoredArray[A]":
        """The array with a mapped axis among its leading ones.

        Args:
            axes: Where its arrays have the axis; None where they have none.
            size: The size of the axis.
            position: Where to move it.
        """
        names = ("data", "scale", "tensor_scale")
        arrays = [(getattr(self, name), getattr(axes, name)) for name in names]
        moved = [None if x is None else to_front(x, axis, size, position) for x, axis in arrays]
        return dataclasses.replace(self, **dict(zip(names, moved, strict=True)))


def bits_of(x: Array) -> Array:
    """The bits of an array as unsigned integers; of complex numbers those of both parts, along one more axis."""
    parts = jnp.stack([x.real, x.imag], axis=-1) if jnp.iscomplexobj(x) else x
    return lax.bitcast_convert_type(parts, np.dtype(f"uint{8 * parts.dtype.itemsize}"))


def array_of(bits: Array, dtype: np.dtype) -> Array:
    """The inverse of `bits_of`; of E2M1 the values in float32, from two codes in a byte."""
    if dtype == E2M1.dtype:
        return _of_codes(bits)
    if dtype.kind != "c":
        return lax.bitcast_convert_type(bits, dtype)
    parts = lax.bitcast_convert_type(bits, f"float{4 * dtype.itemsize}")
    return lax.complex(parts[..., 0], parts[..., 1])


def power_of_two(exponent: Array) -> Float32[Array, "*shape"]:
    """`2**(exponent - 127)` for a biased exponent from 0 to 254; NaN for 255."""
    bits = jnp.where(exponent == 0, 0x400000, jnp.minimum(exponent, 254) << 23)
    value = lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.float32)
    return jnp.where(exponent > 254, jnp.float32(jnp.nan), value)


def _plain(x: Any) -> Any:
    # Of a `haliax.NamedArray` its array: layers give their names to what they store.
    return getattr(x, "array", x)


def _with_rank(scale: Array, ndim: int) -> Array:
    """A scale for all of what the last axes number; a single one stays a scalar."""
    return scale.reshape(*scale.shape, *(1,) * (ndim - scale.ndim)) if scale.ndim else scale


def _of_codes(packed: UInt8[Array, "..."]) -> Float32[Array, "..."]:
    halves = jnp.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    codes = halves.reshape(*packed.shape[:-1], 2 * packed.shape[-1]).astype(jnp.uint32)
    magnitude, sign = codes & np.uint32(7), (codes & np.uint32(8)) << np.uint32(28)
    # Exponent and mantissa where float32 has them; only 0.5 is subnormal.
    normal = (magnitude << np.uint32(22)) + np.uint32(126 << 23)
    bits = jnp.where(magnitude < 2, magnitude * np.uint32(0x3F000000), normal)
    return lax.bitcast_convert_type(bits | sign, jnp.float32)
