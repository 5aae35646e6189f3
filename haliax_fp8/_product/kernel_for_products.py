"""Kernels that were quantized before their products, which then do not quantize them again."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .._jax.max_grad import is_max_grad
from .._numerics.stored_array import StoredArray, bits_of
from ..recipes.recipe import USES, ProductName, Recipe
from .contraction import AbstractContraction


class KernelForProducts[A](eqx.Module):
    """A kernel as its products take it, and what a step measures of it.

    Args:
        fprop: For fprop; None if that is in high precision.
        dgrad: For dgrad; None if that is in high precision.
        measured: What the state records, the bits of float32 `[*leading, numbers, 1]`; None if nothing.
        dtype: The dtype that the kernel was rounded to before it was quantized.
        exact_scales: Whether its scales are as products in float32 take them.
        contracted: The axes of the kernel that fprop and dgrad sum over, where scales depend on them; else None.
        scale_dtype: The dtype of the state that the kernel's scale came from, see `dtype_of_scales`.
    """

    fprop: StoredArray[A] | None
    dgrad: StoredArray[A] | None
    measured: A | None
    dtype: np.dtype = eqx.field(static=True)
    exact_scales: bool = eqx.field(static=True)
    contracted: tuple[tuple[int, ...], ...] | None = eqx.field(static=True)
    scale_dtype: np.dtype | None = eqx.field(static=True)

    def operand(self, product: ProductName) -> StoredArray[A] | None:
        """The kernel for a product; None if there is none."""
        return {"fprop": self.fprop, "dgrad": self.dgrad}.get(product)


def dtype_of_scales(state: Array | None, recipe: Recipe) -> np.dtype | None:
    """The dtype of the state that a kernel's scale comes from; None if no cast of the model reaches it.

    Args:
        state: In the dtype that it has in the model.
        recipe: The recipe of its op.
    """
    if state is None or is_max_grad(state):
        return None
    stored = any(recipe.uses["kernel", product].scaling.memory is not None for product in USES["kernel"])
    return np.dtype(state.dtype) if stored else None


def require_fit(
    quantized: KernelForProducts[Array],
    shape: tuple[int, ...],
    dtype: np.dtype,
    contraction: AbstractContraction,
    *,
    exact_scales: bool,
    scale_dtype: np.dtype | None,
) -> None:
    """Raises a ValueError unless a kernel was quantized from the one that a product was given, as far as one can see.

    Args:
        quantized: The quantized kernel.
        shape: The shape of the kernel.
        dtype: The dtype that the product rounds it to.
        contraction: What is multiplied.
        exact_scales: Whether the product takes exact scales.
        scale_dtype: The dtype of the product's state, see `dtype_of_scales`.
    """
    if scale_dtype is not None and quantized.scale_dtype not in (None, scale_dtype):
        raise ValueError(
            f"the kernel's scale is in {scale_dtype}, but quantize_kernels quantized the kernel with a scale in "
            f"{quantized.scale_dtype}: the model was cast afterwards. Cast it before quantize_kernels; "
            "cast_params(model, dtype) leaves FP8 state as it is"
        )
    quantized_shape = next(x.shape for x in (quantized.fprop, quantized.dgrad) if x is not None)
    if quantized_shape != shape:
        raise ValueError(
            f"kernel has shape {shape}, but quantize_kernels quantized a kernel of shape {quantized_shape}. It takes "
            "the layer's weight as it is stored: a layer that multiplies by anything else needs a model without "
            "quantized kernels, or a LayerRule whose Kernel describes what it multiplies by. Layers of a stack or an "
            "ensemble are called in a scan or under vmap"
        )
    if (dtype, exact_scales) != (quantized.dtype, quantized.exact_scales):
        computed_in = "float32" if exact_scales else "bfloat16"
        raise ValueError(
            f"kernel has dtype {dtype} in a product in {computed_in}, but quantize_kernels quantized it in "
            f"{quantized.dtype}: a loss that casts its parameters rounds kernels before they are quantized. Give the "
            "layers the dtype that they compute in, fp8_linear_layers(model, compute_dtype=jnp.bfloat16), or cast the "
            "model before quantize_kernels"
        )
    if quantized.contracted is None:
        return
    products: tuple[ProductName, ...] = ("fprop", "dgrad")
    summed = {axis for product in products for axis in contraction.contracted(product)[1]}
    batched = tuple(axis for axis in range(len(shape)) if axis not in summed)
    for product, expected in zip(products, quantized.contracted, strict=True):
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


def is_mapped(axes: KernelForProducts[Any] | None) -> bool:
    """Whether examples have quantized kernels of their own.

    Args:
        axes: Where the kernel's arrays have the axis that `vmap` maps; None where they have none.
    """
    return axes is not None and bool(jax.tree.leaves((axes.fprop, axes.dgrad)))


def kernel_with_axis(
    quantized: KernelForProducts[Any], axes: KernelForProducts[Any], size: int, position: int, *, kernel_has_axis: bool
) -> KernelForProducts[Any]:
    """A quantized kernel into which `vmap`'s axis was folded.

    Args:
        quantized: The quantized kernel.
        axes: Where its arrays have the axis; None where they have none.
        size: Its size.
        position: Where the kernel has it now.
        kernel_has_axis: Whether the kernel has it.
    """

    def moved(operand: StoredArray[Any] | None, at: StoredArray[Any] | None) -> StoredArray[Any] | None:
        if operand is None or at is None or not kernel_has_axis:
            return operand
        return operand.with_leading_axis(at, size, position)

    measured = quantized.measured
    if measured is not None and axes.measured is not None:
        # One state for all of them: it records the largest.
        measured = bits_of(jnp.max(lax.bitcast_convert_type(measured, np.float32), axes.measured))
    fprop, dgrad = moved(quantized.fprop, axes.fprop), moved(quantized.dgrad, axes.dgrad)
    return dataclasses.replace(quantized, fprop=fprop, dgrad=dgrad, measured=measured)
