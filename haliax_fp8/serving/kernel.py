"""ServedKernel: FP8 data and scales, with which a layer multiplies in place of a weight."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, DTypeLike, Float, Int

from .._jax.meshes import explicit_axes_of, sharding_of_product, with_automatic_axes
from .._numerics.formats import Format
from .._numerics.quantized_array import QuantizedArray
from .._product.arguments import precision_of
from .._product.contraction import AbstractContraction, DotContraction
from .._product.dimensions import DimensionNumbers
from .._product.grouped.contraction import RaggedContraction
from .._product.grouped.implementation import implementation_for
from ..recipes.recipe import SCALE_BITS, Recipe
from ..recipes.scaling import StaticScaling
from ..recipes.scaling.block import power_of_two
from .layout import ServedLayout
from .product import ServedProduct, served_product


class ServedKernel(eqx.Module):
    """A kernel for products in inference: one byte per weight, and scales.

    Its arrays have the axes of ensembles and stacks first, named so that Haliax can divide them. They hold bits as
    integers: no optimizer treats them as parameters, and casting the model to another dtype leaves them alone.

    Args:
        data: The bits of the rounded weights, with the summed axes last.
        scale: The bits of float32 scales, in the kernel's order of axes; for MXFP8 the exponents, E8M0.
        input_scale: The bits of the stored scale of the input; None if the layout has none.
        layout: How kernel and inputs are quantized.
        order: For each axis of the data, the axis of the kernel that it is.
        contracted: The axes of the kernel that its product sums over.
        block: The shape of a block, see `QuantizedArray`.
        scale_bits: See `QuantizedArray`.
        compute_dtype: The dtype that input and output are rounded to around the product; None leaves them unchanged.
        dtype: The dtype of the weight.
        origin: Where the scales come from, in words.
        input_bits: The number of significant bits of the stored input scale; None if the same as in training.
        per_expert: Whether each expert has one scale for its kernel and one for its input, along a last axis of both.
    """

    data: hax.NamedArray
    scale: hax.NamedArray
    input_scale: hax.NamedArray | None
    layout: ServedLayout = eqx.field(static=True)
    order: tuple[int, ...] = eqx.field(static=True)
    contracted: tuple[int, ...] = eqx.field(static=True)
    block: tuple[int, ...] | None = eqx.field(static=True)
    scale_bits: int = eqx.field(static=True)
    compute_dtype: np.dtype | None = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)
    origin: str = eqx.field(static=True)
    input_bits: int | None = eqx.field(static=True, default=None)
    per_expert: bool = eqx.field(static=True, default=False)

    @property
    def text(self) -> str:
        """The layout, and where its scales come from."""
        return f"for inference: {self.layout}, {self.origin}"

    @property
    def storage(self) -> Format:
        """The format of the data."""
        return self.layout.format

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of its product; None if inputs are in high precision."""
        return self.layout.recipe

    @property
    def bytes(self) -> int:
        """The size of data and scales."""
        arrays = (self.data.array, self.scale.array, *([] if self.input_scale is None else [self.input_scale.array]))
        return sum(x.size * x.dtype.itemsize for x in arrays)

    @property
    def quantized(self) -> QuantizedArray:
        """Data and scales in the kernel's order of axes, after the axes of ensembles and stacks."""
        data, scale = lax.bitcast_convert_type(self.data.array, self.layout.format.dtype), self.scale.array
        if scale.dtype == jnp.uint8:
            scale = power_of_two(scale.astype(jnp.int32))
        else:
            scale = lax.bitcast_convert_type(scale, jnp.float32)
        leading = data.ndim - len(self.order)
        inverse = tuple(leading + int(axis) for axis in np.argsort(self.order))
        if inverse != tuple(range(leading, data.ndim)):
            data = lax.transpose(data, (*range(leading), *inverse))
        if scale.ndim == leading + self.per_expert and scale.ndim:
            scale = scale.reshape(*scale.shape, *(1,) * (len(self.order) - self.per_expert))
        block = None if self.block is None else (*(1,) * leading, *self.block)
        return QuantizedArray(data, scale, block, scale_bits=self.scale_bits)

    def values(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """`data * scale`, computed in float32 and rounded to a dtype, in the kernel's order of axes."""
        return self.quantized.dequantize().astype(dtype)

    def dot_general(
        self,
        input: Float[Array, "..."],
        dimension_numbers: DimensionNumbers,
        preferred_element_type: DTypeLike | None = None,
    ) -> Float[Array, "..."]:
        """Multiplies an input as `lax.dot_general(input, kernel, dimension_numbers)` would.

        Args:
            input: The input, the first operand.
            dimension_numbers: `((input_contract, kernel_contract), (input_batch, kernel_batch))`.
            preferred_element_type: The dtype of the output; by default that of the computation.

        Raises:
            ValueError: If the kernel was quantized for a sum over other axes, or for an input of another dtype.

        Returns:
            The product; axes in the order batch, free of input, free of kernel.
        """
        kernel = self._of_one_layer()
        contraction = DotContraction.of(dimension_numbers, None, input.shape, kernel.data.shape)
        sharding = None
        if any(map(explicit_axes_of, (input, kernel.data, jax.sharding.get_abstract_mesh()))):
            sharding = sharding_of_product(input, kernel.data.astype(input.dtype), contraction.dimensions.numbers, None)
        out_dtype = None if preferred_element_type is None else np.dtype(preferred_element_type)
        return self._multiply(input, kernel, (), contraction, out_dtype, sharding)

    def ragged_dot(
        self, rows: Float[Array, "rows inputs"], group_sizes: Int[Array, " groups"]
    ) -> Float[Array, "rows outputs"]:
        """Multiplies groups of rows, each by its own kernel, as `lax.ragged_dot` does.

        Args:
            rows: The rows of all groups, one group after the other.
            group_sizes: How many rows each group has.

        Raises:
            ValueError: If the device has no grouped product in FP8 for the layout.
        """
        recipe = self.layout.recipe
        assert recipe is not None
        implementation = implementation_for(recipe, allow_dense=False)
        contraction = RaggedContraction(implementation=implementation, state_per_group=self.per_expert)
        return self._multiply(rows, self._of_one_layer(), (group_sizes,), contraction)

    def _of_one_layer(self) -> QuantizedArray:
        if self.data.array.ndim != len(self.order):
            raise ValueError(
                f"a kernel of shape {self.data.array.shape} was called with {self.data.array.ndim - len(self.order)} "
                "extra axes of a stack or an ensemble; call it in a scan or under vmap"
            )
        return self.quantized

    def result_dtype(self, input: Float[Array, "..."]) -> np.dtype:
        """The dtype that an input and the weight promote to."""
        return np.dtype(jnp.promote_types(input.dtype, self.dtype))

    def _multiply(
        self,
        input: Array,
        kernel: QuantizedArray,
        extras: tuple[Array, ...],
        contraction: AbstractContraction,
        out_dtype: np.dtype | None = None,
        sharding: NamedSharding | None = None,
    ) -> Array:
        out_dtype = out_dtype or self.compute_dtype or self.result_dtype(input)
        computed_in = self.compute_dtype or out_dtype
        self._require_fit(contraction, computed_in, input.dtype)
        bits = self.input_bits
        if bits is None:
            bits = 24 if computed_in != jnp.bfloat16 else SCALE_BITS["input"]
        spec = ServedProduct(self.layout, contraction, self.compute_dtype, out_dtype, bits, precision_of(None))
        scale = None
        if self.input_scale is not None:
            scale = lax.bitcast_convert_type(self.input_scale.array, jnp.float32)

        def multiply(input: Array, *arrays: Array) -> Array:
            data, of_kernel, *of_input = arrays
            quantized = QuantizedArray(data, of_kernel, kernel.block, scale_bits=kernel.scale_bits)
            return served_product(input, quantized, of_input[0] if of_input else None, extras, spec)

        arrays = (kernel.data, kernel.scale, *([] if scale is None else [scale]))
        return with_automatic_axes(multiply, sharding, input, *arrays)

    def _require_fit(self, contraction: AbstractContraction, computed_in: np.dtype, dtype: np.dtype) -> None:
        axes = contraction.contracted("fprop")[1]
        per_axis = self.layout.kernel.per_axis
        if per_axis and (set(axes), axes[-1:]) != (set(self.contracted), self.contracted[-1:]):
            raise ValueError(
                f"a kernel is summed over axes {axes}, but its scales were made for a sum over {self.contracted}. Set "
                f"contracted={axes} in the Kernel that the layer's LayerRule returns"
            )
        # A checkpoint's scales do not depend on the dtype.
        is_of_training = self.input_bits is None
        rounds = is_of_training and (isinstance(self.layout.kernel, StaticScaling) or self.layout.kernel.rounds_scale)
        made_for = self.compute_dtype or self.dtype
        if rounds and (made_for == jnp.bfloat16) != (computed_in == jnp.bfloat16):
            raise ValueError(
                f"the input has dtype {dtype}, but the kernel was quantized for products in {made_for}, whose scales "
                "differ: cast the model to the dtype of its inputs before quantize_for_inference, with "
                "cast_params, or convert it with fp8_linear_layers(model, compute_dtype=...)"
            )
