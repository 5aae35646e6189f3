"""QuantizedKernel: data and scales, with which a layer multiplies in place of a weight."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, DTypeLike, Float, Int

from .._jax.meshes import explicit_axes_of, sharding_of_product, with_automatic_axes
from .._numerics.quantized_array import QuantizedArray
from .._numerics.stored_array import StoredArray
from .._product.arguments import precision_of
from .._product.contraction import AbstractContraction, DotContraction
from .._product.dimensions import DimensionNumbers
from .._product.grouped.contraction import RaggedContraction
from .._product.grouped.implementation import implementation_for
from ..formats import E2M1, FORMATS, Format
from ..layouts import Layout
from ..recipes.recipe import SCALE_BITS, Quantization, Recipe
from .layout import recipe_of_fprop, scaling_of_input, scaling_of_kernel
from .product import ServedProduct, served_product


class QuantizedKernel(eqx.Module):
    """A kernel whose weight is data and scales, which never change; one byte per weight, or half of one.

    With a `layout` it multiplies in FP8, for inference: bit for bit as in training, and without gradients. Without one
    the weight is computed from data and scales in each product, in the dtype of the input, and once more for the
    backward pass: gradients reach the input as those of a plain layer.

    Its arrays have the axes of ensembles and stacks first, named so that Haliax can divide them. They hold bits as
    integers: no optimizer treats them as parameters, and casting the model to another dtype leaves them alone.

    Args:
        stored: Data and scales, with the summed axes last.
        input_scale: The bits of the stored scale of the input; None if there is none. With one more axis than ensembles
            and stacks, each expert has one scale for its kernel and one for its input.
        layout: How kernel and inputs are quantized; None if products are in high precision.
        contracted: The axes of the kernel that its product sums over.
        compute_dtype: The dtype that input and output are rounded to around the product; None leaves them unchanged.
        dtype: The dtype of the weight.
        origin: Where the scales come from, in words.
        input_bits: The number of significant bits of the stored input scale; None if the same as in training.
    """

    stored: StoredArray[hax.NamedArray]
    input_scale: hax.NamedArray | None
    layout: Layout | None = eqx.field(static=True)
    contracted: tuple[int, ...] = eqx.field(static=True)
    compute_dtype: np.dtype | None = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)
    origin: str = eqx.field(static=True)
    input_bits: int | None = eqx.field(static=True, default=None)

    @property
    def has_gradient(self) -> bool:
        """Whether gradients reach the input."""
        return self.layout is None

    @property
    def text(self) -> str:
        """The layout, and where its scales come from; or that it is frozen."""
        if self.layout is None:
            return "frozen"
        return f"for inference: {self.layout.name}, {self.origin}"

    @property
    def storage(self) -> Format:
        """The format of the data."""
        return {**FORMATS, E2M1.dtype: E2M1}[self.stored.dtype]

    @property
    def input(self) -> Quantization | None:
        """How inputs are quantized; None if they are in high precision."""
        if self.layout is None:
            return None
        scaling = scaling_of_input(self.layout, power_of_two=self._power_of_two)
        return None if scaling is None else Quantization(self.storage, scaling)

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of its product; None if inputs are in high precision."""
        if (input := self.input) is None:
            return None
        assert self.layout is not None
        scaling = scaling_of_kernel(self.layout, is_whole=self._is_whole, power_of_two=self._power_of_two)
        return recipe_of_fprop(input, Quantization(self.storage, scaling))

    @property
    def _power_of_two(self) -> bool:
        return self.stored.scale_bits == 1

    @property
    def _is_whole(self) -> bool:
        """Whether one scale is for the whole kernel, or for that of each expert."""
        assert self.stored.scale is not None
        return self.stored.scale.array.ndim < self.stored.data.array.ndim

    @property
    def per_expert(self) -> bool:
        """Whether each expert has a scale of its input."""
        return self.input_scale is not None and self.input_scale.array.ndim > self.stored.leading

    @property
    def bytes(self) -> int:
        """The size of data and scales."""
        return self.stored.bytes + (0 if self.input_scale is None else self.input_scale.array.nbytes)

    @property
    def quantized(self) -> QuantizedArray:
        """Data and scales in the kernel's order of axes, after the axes of ensembles and stacks."""
        return self.stored.quantized

    def values(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """`data * scale`, computed in float32 and rounded to a dtype, in the kernel's order of axes."""
        return self.stored.values(dtype)

    def dot_general(
        self,
        input: Float[Array, "..."],
        dimension_numbers: DimensionNumbers,
        preferred_element_type: DTypeLike | None = None,
    ) -> Float[Array, "..."]:
        """Multiplies an input as `lax.dot_general(input, kernel, dimension_numbers)` would.

        Frozen, by the weight in the dtype of the input.

        Args:
            input: The input, the first operand.
            dimension_numbers: `((input_contract, kernel_contract), (input_batch, kernel_batch))`.
            preferred_element_type: The dtype of the output; by default that of the computation.

        Raises:
            ValueError: If the kernel was quantized for a sum over other axes, or for an input of another dtype.

        Returns:
            The product; axes in the order batch, free of input, free of kernel.
        """
        self._require_one_layer()
        out_dtype = None if preferred_element_type is None else np.dtype(preferred_element_type)
        if self.has_gradient:
            return _by_weight(self, input, dimension_numbers, out_dtype)
        kernel = self.quantized
        contraction = DotContraction.of(dimension_numbers, None, input.shape, kernel.data.shape)
        sharding = None
        if any(map(explicit_axes_of, (input, kernel.data, jax.sharding.get_abstract_mesh()))):
            sharding = sharding_of_product(input, kernel.data.astype(input.dtype), contraction.dimensions.numbers, None)
        return self._multiply(input, kernel, None, contraction, out_dtype, sharding)

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
        self._require_one_layer()
        if self.has_gradient:
            return _rows_by_weight(self, rows, group_sizes)
        if (recipe := self.recipe) is None:
            raise ValueError(
                f"no grouped product multiplies {self.storage.name} kernels by inputs in high precision, as in "
                "'W8A16'; use 'FP8_DYNAMIC'"
            )
        implementation = implementation_for(recipe, allow_dense=False)
        contraction = RaggedContraction(implementation=implementation, state_per_group=self.per_expert)
        return self._multiply(rows, self.quantized, group_sizes, contraction)

    def _require_one_layer(self) -> None:
        if (extra := self.stored.leading) != 0:
            raise ValueError(
                f"a kernel of shape {self.stored.data.array.shape} was called with {extra} extra axes of a stack or an "
                "ensemble; call it in a scan or under vmap"
            )

    def result_dtype(self, input: Float[Array, "..."]) -> np.dtype:
        """The dtype that an input and the weight promote to."""
        return np.dtype(jnp.promote_types(input.dtype, self.dtype))

    def _multiply(
        self,
        input: Array,
        kernel: QuantizedArray,
        group_sizes: Array | None,
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
        spec = ServedProduct(self.input, contraction, self.compute_dtype, out_dtype, bits, precision_of(None))
        scale = None
        if self.input_scale is not None:
            scale = lax.bitcast_convert_type(self.input_scale.array, jnp.float32)

        arrays, structure = jax.tree.flatten((kernel, scale))

        def multiply(input: Array, *arrays: Array) -> Array:
            quantized, of_input = jax.tree.unflatten(structure, arrays)
            return served_product(input, quantized, of_input, group_sizes, spec)

        return with_automatic_axes(multiply, sharding, input, *arrays)

    def _require_fit(self, contraction: AbstractContraction, computed_in: np.dtype, dtype: np.dtype) -> None:
        axes = contraction.contracted("fprop")[1]
        # One scale, and one for each block of a square, serve a sum over any axes.
        is_along = not self._is_whole and self.layout is not None and self.layout.strategy != "block"
        if is_along and (set(axes), axes[-1:]) != (set(self.contracted), self.contracted[-1:]):
            raise ValueError(
                f"a kernel is summed over axes {axes}, but its scales were made for a sum over {self.contracted}. Set "
                f"contracted={axes} in the Kernel that the layer's LayerRule returns"
            )
        # A checkpoint's scales do not depend on the dtype.
        rounds = self.input_bits is None and (self._is_whole or self.stored.tensor_scale is not None)
        made_for = self.compute_dtype or self.dtype
        if rounds and (made_for == jnp.bfloat16) != (computed_in == jnp.bfloat16):
            raise ValueError(
                f"the input has dtype {dtype}, but the kernel was quantized for products in {made_for}, whose scales "
                "differ: cast the model to the dtype of its inputs before quantize_for_inference, with "
                "cast_params, or convert it with fp8_linear_layers(model, compute_dtype=...)"
            )


# The backward pass makes the weight again, so that only data and scales are kept.
@eqx.filter_checkpoint
def _by_weight(kernel: QuantizedKernel, input: Array, numbers: DimensionNumbers, out_dtype: np.dtype | None) -> Array:
    weight = kernel.values(input.dtype)
    return lax.dot_general(input, weight, numbers, preferred_element_type=out_dtype)


@eqx.filter_checkpoint
def _rows_by_weight(kernel: QuantizedKernel, rows: Array, group_sizes: Array) -> Array:
    return lax.ragged_dot(rows, kernel.values(rows.dtype), group_sizes)
