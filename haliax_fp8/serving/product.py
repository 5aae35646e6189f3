"""One product in inference: an input, which may be quantized, times a kernel that is quantized already."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .._jax.meshes import automatic_axes, axes_of_parts
from .._jax.xla import on_cuda, operand_per_sharer
from .._numerics.quantized_array import QuantizedArray
from .._product.contraction import AbstractContraction, DotContraction
from .._product.grouped.one_device import apart, together
from .._product.operands import round_to
from ..recipes.recipe import Quantization
from ..recipes.scaling import OperandUse


# The fewest rows that XLA multiplies with tensor cores. With fewer, it dequantizes the kernel and sums products in
# higher precision, and for blocks of 32 its GPU compiler fails.
ROWS = 16


@dataclasses.dataclass(frozen=True)
class ServedProduct:
    """The static arguments of a product.

    Args:
        input: How the input is quantized; None if it stays in high precision.
        contraction: The contraction, without the axes of the ensemble.
        compute_dtype: The dtype that input and output are rounded to around the product; None leaves them unchanged.
        out_dtype: The dtype of the output.
        input_bits: The number of significant bits of a whole input's scale.
        precision: The precision of the product.
        ensemble: How many leading axes of every array index independent members.
    """

    input: Quantization | None
    contraction: AbstractContraction
    compute_dtype: np.dtype | None
    out_dtype: np.dtype
    input_bits: int
    precision: lax.Precision = lax.Precision.DEFAULT
    ensemble: int = 0

    @property
    def batched(self) -> AbstractContraction:
        """The contraction with the axes of the ensemble."""
        # Experts that each have a scale are members too, in all arrays but the rows.
        return self.contraction.with_batch_axes(self.ensemble + self.contraction.state_per_group)


def served_product(
    input: Float[Array, "..."],
    kernel: QuantizedArray,
    input_scale: Float32[Array, "*ensemble"] | None,
    group_sizes: Array | None,
    spec: ServedProduct,
) -> Float[Array, "..."]:
    """fprop as training computes it, with a kernel that is quantized already.

    `vmap` folds into the product, as in training; only a mapped kernel makes members. It has no gradient.

    Args:
        input: The input.
        kernel: The quantized kernel.
        input_scale: The stored scale of the input; None if the layout has none.
        group_sizes: How many rows each group has; None without groups.
        spec: The static arguments.

    Raises:
        ValueError: If it is differentiated.
    """

    @jax.custom_jvp
    def multiply(input: Array, kernel: QuantizedArray, input_scale: Any, group_sizes: Any) -> Array:
        return _foldable(input, kernel, input_scale, group_sizes, spec)

    @multiply.defjvp
    def no_gradient(primals: Any, tangents: Any) -> Any:
        del primals, tangents
        raise ValueError(
            "a model made by quantize_for_inference was differentiated, but it keeps nothing for gradients. Train the "
            "model that it was made from; or train adapters on FP8 weights, with huggingface.import_model(..., "
            "weights='frozen'); serving.dequantize(model) gives plain layers"
        )

    return multiply(input, kernel, input_scale, group_sizes)


def _foldable(input: Array, kernel: QuantizedArray, input_scale: Any, group_sizes: Any, spec: ServedProduct) -> Array:
    @jax.custom_batching.custom_vmap
    def multiply(input: Array, kernel: QuantizedArray, input_scale: Any, group_sizes: Any) -> Array:
        return _multiply(input, kernel, input_scale, group_sizes, spec)

    @multiply.def_vmap
    def mapped(size: int, is_mapped: Any, *operands: Any) -> tuple[Array, bool]:
        return _mapped(size, is_mapped, operands, spec), True

    return multiply(input, kernel, input_scale, group_sizes)


def _mapped(size: int, is_mapped: Any, operands: Any, spec: ServedProduct) -> Array:
    """The product of arrays whose first axis is mapped."""
    input, kernel, input_scale, group_sizes = operands
    if any(jax.tree.leaves(is_mapped[1:3])):
        repeated = lambda x, mapped: x if mapped else jnp.broadcast_to(x, (size, *x.shape))
        input, kernel, input_scale, group_sizes = jax.tree.map(repeated, tuple(operands), tuple(is_mapped))
        spec = dataclasses.replace(spec, ensemble=spec.ensemble + 1)
        return _foldable(input, _with_rank_of_data(kernel, spec), input_scale, group_sizes, spec)
    if not isinstance(spec.contraction, DotContraction):
        are_mapped = (jax.tree.leaves(is_mapped[0])[0], jax.tree.leaves(is_mapped[3])[0])
        rows, sizes = (
            jnp.moveaxis(x if mapped else jnp.broadcast_to(x, (size, *x.shape)), 0, spec.ensemble)
            for x, mapped in zip((input, group_sizes), are_mapped, strict=True)
        )
        gather, spread = together, apart
        for _ in range(spec.ensemble):
            gather, spread = jax.vmap(gather), jax.vmap(spread)
        rows, sizes, order, valid = gather(rows, sizes)
        out = _foldable(rows, kernel, input_scale, sizes, spec)
        return jnp.moveaxis(spread(out, order, valid), spec.ensemble, 0)
    axes = (0 if jax.tree.leaves(is_mapped[0])[0] else None, None)
    (input, data), contraction, out_axis = spec.contraction.fold((input, kernel.data), axes, size, spec.ensemble)
    kernel, spec = dataclasses.replace(kernel, data=data), dataclasses.replace(spec, contraction=contraction)
    out = _foldable(input, kernel, input_scale, group_sizes, spec)
    return jnp.moveaxis(out, out_axis + spec.ensemble, 0)


def _with_rank_of_data(x: QuantizedArray, spec: ServedProduct) -> QuantizedArray:
    """Gives the members' scales, one per member, and their blocks the rank of the data."""

    def ranked(scale: Array) -> Array:
        return scale.reshape(*scale.shape, *(1,) * (x.data.ndim - scale.ndim))

    block = None if x.block is None else (*(1,) * (x.data.ndim - len(x.block)), *x.block)
    tensor_scale = None if x.tensor_scale is None else ranked(x.tensor_scale)
    return dataclasses.replace(x, scale=ranked(x.scale), block=block, tensor_scale=tensor_scale)


def _multiply(
    input: Array, kernel: QuantizedArray, input_scale: Any, group_sizes: Array | None, spec: ServedProduct
) -> Array:
    dtype = spec.compute_dtype or spec.out_dtype
    input = round_to(input, spec.compute_dtype)
    if spec.input is None:
        # The scale of the kernel factors out, so that the product itself reads FP8 data.
        quantized = QuantizedArray(not_joined(input, kernel), jnp.ones((), jnp.float32))
        kernel = dataclasses.replace(kernel, data=lax.convert_element_type(kernel.data, input.dtype))
        return round_to(_product(quantized, kernel, group_sizes, spec, dtype), spec.out_dtype)
    if spec.contraction.state_per_group:
        return round_to(_product_of_experts(input, kernel, input_scale, group_sizes, spec, dtype), spec.out_dtype)
    quantized = quantized_input(input, input_scale, group_sizes, spec)
    # After the cast: XLA may keep extra bits of a value that it rounds twice; here it does so as in training.
    quantized = dataclasses.replace(quantized, data=not_joined(quantized.data, kernel))
    if rows_of(input.shape, spec) >= ROWS:
        return round_to(_product(quantized, kernel, group_sizes, spec, dtype), spec.out_dtype)

    def as_it_is(quantized: QuantizedArray, kernel: QuantizedArray) -> Array:
        return _product(quantized, kernel, group_sizes, spec, dtype)

    def padded(quantized: QuantizedArray, kernel: QuantizedArray) -> Array:
        return padded_product(quantized, kernel, group_sizes, spec, dtype)

    return round_to(on_cuda(padded, as_it_is, quantized, kernel), spec.out_dtype)


def _product_of_experts(
    input: Array, kernel: QuantizedArray, input_scale: Array, group_sizes: Array | None, spec: ServedProduct, dtype: Any
) -> Array:
    """The product of rows and experts that each have a scale, applied to the result, as in training."""
    one = jnp.ones((), jnp.float32)
    rows = dataclasses.replace(quantized_input(input, input_scale, group_sizes, spec), scale=one)
    of_experts = jnp.multiply(input_scale, kernel.scale.reshape(input_scale.shape))
    both = rows, dataclasses.replace(kernel, scale=one)
    return spec.batched.product("fprop", both, group_sizes, spec.precision, dtype, of_experts)


def quantized_input(input: Array, input_scale: Any, group_sizes: Array | None, spec: ServedProduct) -> QuantizedArray:
    """The input in FP8.

    Args:
        input: The input, in the dtype of the computation.
        input_scale: Its stored scale; None if the layout has none.
        group_sizes: How many rows each group has; None without groups.
        spec: The static arguments.
    """
    assert spec.input is not None
    ensemble = spec.ensemble + spec.contraction.state_per_group
    members = spec.batched.members("input", input.shape, group_sizes, ensemble).over(axes_of_parts(input))
    use = OperandUse(
        format=spec.input.format,
        contracted=spec.batched.contracted("fprop")[0],
        members=members,
        stored_scale=None if input_scale is None else members.of_state(input_scale),
        scale_bits=spec.input_bits,
    )
    return spec.input.scaling.quantize(input, use)


def not_joined(data: Array, kernel: QuantizedArray) -> Array:
    """The input as the operand of one product only; unchanged on several devices, which would send it for each product.

    Otherwise XLA would join layers with the same input into one product, and copy their kernels next to each other in
    each call.

    Args:
        data: The input.
        kernel: The kernel; its scale is the one stored array that only this product reads.
    """
    return data if automatic_axes() else operand_per_sharer(data, kernel.scale)


def rows_of(shape: tuple[int, ...], spec: ServedProduct) -> int:
    """The number of rows of a member's input; `ROWS` for grouped products, and where `jax.export` leaves it open.

    Args:
        shape: The shape of the input.
        spec: The static arguments.
    """
    contraction = spec.batched
    if not isinstance(contraction, DotContraction):
        return ROWS
    dims = contraction.dimensions
    of_input, _ = contraction.ordered(dims.lhs_free, dims.rhs_free)
    rows = math.prod(shape[axis] for axis in of_input)
    # A symbolic size does not compare with a number. Values do not depend on it, only what a GPU does with few rows.
    return rows if isinstance(rows, int) else ROWS


def padded_product(
    input: QuantizedArray, kernel: QuantizedArray, group_sizes: Array | None, spec: ServedProduct, dtype: np.dtype
) -> Array:
    """The product of an input that is padded with rows of zeros to at least `ROWS` rows.

    Args:
        input: The quantized input.
        kernel: The quantized kernel.
        group_sizes: How many rows each group has; None without groups.
        spec: The static arguments.
        dtype: The dtype of the result.
    """
    count = -(-ROWS // max(rows_of(input.data.shape, spec), 1))
    position = spec.ensemble

    def padded(x: Array, value: float) -> Array:
        x = lax.expand_dims(x, (position,))
        padding = [(0, count - 1 if axis == position else 0, 0) for axis in range(x.ndim)]
        return lax.pad(x, jnp.asarray(value, x.dtype), padding)

    both, contraction, out_axis = spec.contraction.fold(
        (padded(input.data, 0.0), kernel.data), (position, None), count, position
    )

    def of_rows(scale: Array) -> Array:
        if input.block is not None or scale.size > 1:
            return padded(scale, 1.0)
        return lax.expand_dims(scale, (position,)) if scale.ndim else scale

    block = None if input.block is None else (*input.block[:position], 1, *input.block[position:])
    tensor_scale = None if input.tensor_scale is None else of_rows(input.tensor_scale)
    wide = dataclasses.replace(input, data=both[0], scale=of_rows(input.scale), block=block, tensor_scale=tensor_scale)
    spec = dataclasses.replace(spec, contraction=contraction)
    out = _product(wide, dataclasses.replace(kernel, data=both[1]), group_sizes, spec, dtype)
    return lax.index_in_dim(out, 0, axis=out_axis + spec.ensemble, keepdims=False)


def _product(
    input: QuantizedArray, kernel: QuantizedArray, group_sizes: Array | None, spec: ServedProduct, dtype: np.dtype
) -> Array:
    return spec.batched.product("fprop", (input, kernel), group_sizes, spec.precision, dtype, None)
