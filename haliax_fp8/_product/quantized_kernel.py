"""Kernels that were quantized before their products: the copies that a product takes instead of quantizing again."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._jax.max_grad import is_max_grad
from .._jax.primitives import to_front
from .._numerics.quantized_array import QuantizedArray
from ..recipes.recipe import USES, ProductName, Recipe
from .contraction import AbstractContraction


class Bits[A](eqx.Module):
    """An array as whole numbers of its bits: floating-point arrays in a model count as parameters, and get gradients.

    Args:
        words: Unsigned integers.
        dtype: The dtype of the array.
    """

    words: A
    dtype: np.dtype = eqx.field(static=True)

    @staticmethod
    def of(x: Array) -> "Bits[Array]":
        """The bits of an array.

        Args:
            x: The array.
        """
        return Bits(lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}")), x.dtype)


def array_of(bits: Bits[Array]) -> Array:
    """The array again."""
    return lax.bitcast_convert_type(bits.words, bits.dtype)


class KernelCopy[A](eqx.Module):
    """A kernel as one of its products takes it.

    The data are stored with what the product sums over last, where FP8 units up to Hopper's read it. Leading axes, of
    members or of a stack, are not counted in what is static.

    Args:
        data: The quantized kernel, its axes in another order.
        scale: Its scales, in the order of the kernel; None if the state has them.
        order: Which axis of the kernel each axis of the data is.
        block: The shape of a block, see `QuantizedArray`.
        scale_bits: See `QuantizedArray`.
    """

    data: Bits[A]
    scale: Bits[A] | None
    order: tuple[int, ...] = eqx.field(static=True)
    block: tuple[int, ...] | None = eqx.field(static=True)
    scale_bits: int = eqx.field(static=True)


def values_of(copy: KernelCopy[Array]) -> Array | QuantizedArray:
    """What the product reads, in the layout of the kernel: data alone where the state has the scale."""
    data = lax.transpose(array_of(copy.data), _inverse(copy))
    if copy.scale is None:
        return data
    block = copy.block
    if block is not None:
        block = (*(1,) * (data.ndim - len(block)), *block)
    return QuantizedArray(data, array_of(copy.scale), block, scale_bits=copy.scale_bits)


def shape_of(copy: KernelCopy[Array]) -> tuple[int, ...]:
    """The shape of the kernel."""
    return tuple(copy.data.words.shape[axis] for axis in _inverse(copy))


def _inverse(copy: KernelCopy[Array]) -> tuple[int, ...]:
    leading = copy.data.words.ndim - len(copy.order)
    return (*range(leading), *(leading + int(axis) for axis in np.argsort(copy.order)))


def with_leading_axis(copy: KernelCopy[Any], axes: KernelCopy[Any], size: int, position: int) -> KernelCopy[Any]:
    """A copy with a mapped axis among the leading ones.

    Args:
        copy: The copy.
        axes: Where its parts have the axis; None where they have none.
        size: The size of the axis.
        position: Where to move it.
    """

    def moved(bits: Bits[Any] | None, axis: Bits[Any] | None) -> Bits[Any] | None:
        if bits is None or axis is None:
            return None
        return Bits(to_front(bits.words, axis.words, size, position), bits.dtype)

    data = moved(copy.data, axes.data)
    assert data is not None
    return KernelCopy(data, moved(copy.scale, axes.scale), copy.order, copy.block, copy.scale_bits)


class KernelCopies[A](eqx.Module):
    """A kernel as its products take it, and what a step measures of it.

    Args:
        fprop: For fprop; None if that is in high precision.
        dgrad: For dgrad; None if that is in high precision.
        measured: What the state records, `[*leading, numbers, 1]`; None if nothing.
        dtype: The dtype that the kernel was rounded to before it was quantized.
        exact_scales: Whether its scales are as products in float32 take them.
        contracted: The axes of the kernel that fprop and dgrad sum over, where scales depend on them; else None.
        scale_dtype: The dtype of the state that the kernel's scale came from, see `dtype_of_scales`.
    """

    fprop: KernelCopy[A] | None
    dgrad: KernelCopy[A] | None
    measured: Bits[A] | None
    dtype: np.dtype = eqx.field(static=True)
    exact_scales: bool = eqx.field(static=True)
    contracted: tuple[tuple[int, ...], ...] | None = eqx.field(static=True)
    scale_dtype: np.dtype | None = eqx.field(static=True)

    def of(self, product: ProductName) -> KernelCopy[A] | None:
        """The copy for a product; None if there is none.

        Args:
            product: The product.
        """
        return {"fprop": self.fprop, "dgrad": self.dgrad}.get(product)


def dtype_of_scales(state: Array | None, recipe: Recipe) -> np.dtype | None:
    """The dtype of the state that a kernel's scale comes from; None if no cast of the model reaches it.

    Args:
        state: In the dtype that it has in the model.
        recipe: The recipe of its op.
    """
    if state is None or is_max_grad(state):
        return None
    stored = any(recipe.uses["kernel", product].scaling.stores_scale for product in USES["kernel"])
    return np.dtype(state.dtype) if stored else None


def require_fit(
    copies: KernelCopies[Array],
    shape: tuple[int, ...],
    dtype: np.dtype,
    contraction: AbstractContraction,
    *,
    exact_scales: bool,
    scale_dtype: np.dtype | None,
) -> None:
    """Raises a ValueError unless copies are those of the kernel that a product was given, as far as one can see.

    Args:
        copies: The copies.
        shape: The shape of the kernel.
        dtype: The dtype that the product rounds it to.
        contraction: What is multiplied.
        exact_scales: Whether the product takes exact scales.
        scale_dtype: The dtype of the product's state, see `dtype_of_scales`.
    """
    if scale_dtype is not None and copies.scale_dtype not in (None, scale_dtype):
        raise ValueError(
            f"the kernel's scale is in {scale_dtype}, but quantize_kernels quantized the kernel with a scale in "
            f"{copies.scale_dtype}: the model was cast afterwards. Cast it before quantize_kernels; "
            "cast_params(model, dtype) leaves FP8 state as it is"
        )
    found = next(shape_of(copy) for copy in (copies.fprop, copies.dgrad) if copy is not None)
    if found != shape:
        raise ValueError(
            f"kernel has shape {shape}, but the copies that quantize_kernels made for this product are of a kernel of "
            f"shape {found}. It takes the layer's weight as it is stored: a layer that multiplies by anything else "
            "needs a model without quantized kernels, or a LayerRule whose Kernel describes what it multiplies by. "
            "Layers of a stack or an ensemble are called in a scan or under vmap"
        )
    if (dtype, exact_scales) != (copies.dtype, copies.exact_scales):
        multiplied = "float32" if exact_scales else "bfloat16"
        raise ValueError(
            f"kernel has dtype {dtype} in a product in {multiplied}, but quantize_kernels quantized it in "
            f"{copies.dtype}: a loss that casts its parameters rounds kernels before they are quantized. Give the "
            "layers the dtype that they compute in, fp8_linear_layers(model, compute_dtype=jnp.bfloat16), or cast the "
            "model before quantize_kernels"
        )
    if copies.contracted is None:
        return
    products: tuple[ProductName, ...] = ("fprop", "dgrad")
    summed = {axis for product in products for axis in contraction.contracted(product)[1]}
    batched = tuple(axis for axis in range(len(shape)) if axis not in summed)
    for product, expected in zip(products, copies.contracted, strict=True):
        axes = contraction.contracted(product)[1]
        if (set(axes), axes[-1:]) == (set(expected), expected[-1:]):
            continue
        if batched and product == "dgrad":
            raise ValueError(
                f"kernel has batch axes {batched}, but quantize_kernels quantized it for a dgrad that sums over "
                f"{expected}: its scales run along those. Call the layer under vmap over its batch axes, or give the "
                "loss the model without quantized kernels"
            )
        raise ValueError(
            f"kernel is summed over axes {axes} in {product}, but quantize_kernels quantized it for a sum over "
            f"{expected}: its scales run along those. Give the Kernel of the layer's LayerRule the axes that are "
            f"contracted, Kernel(..., contracted={contraction.contracted('fprop')[1]})"
        )


def is_mapped(axes: KernelCopies[Any] | None) -> bool:
    """Whether examples have copies of their own.

    Args:
        axes: Where copies have the axis that `vmap` maps; None where they have none.
    """
    return axes is not None and bool(jax.tree.leaves((axes.fprop, axes.dgrad)))


def folded(
    copies: KernelCopies[Any], axes: KernelCopies[Any], size: int, position: int, *, kernel_has_axis: bool
) -> KernelCopies[Any]:
    """Copies of a kernel into which `vmap`'s axis was folded.

    Args:
        copies: The copies.
        axes: Where they have the axis; None where they have none.
        size: Its size.
        position: Where the kernel has it now.
        kernel_has_axis: Whether the kernel has it.
    """

    def moved(copy: KernelCopy[Any] | None, at: KernelCopy[Any] | None) -> KernelCopy[Any] | None:
        if copy is None or at is None or not kernel_has_axis:
            return copy
        return with_leading_axis(copy, at, size, position)

    measured = copies.measured
    if measured is not None and axes.measured is not None and axes.measured.words is not None:
        # One state for all of them: it records the largest.
        measured = Bits.of(jnp.max(array_of(measured), axes.measured.words))
    return KernelCopies(
        moved(copies.fprop, axes.fprop),
        moved(copies.dgrad, axes.dgrad),
        measured,
        copies.dtype,
        copies.exact_scales,
        copies.contracted,
        copies.scale_dtype,
    )
