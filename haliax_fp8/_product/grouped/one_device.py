"""fprop, dgrad or wgrad of groups as one device computes it: by its implementation, or by XLA."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from ..._jax.still_rounded import still_rounded
from ..._numerics.quantized_array import QuantizedArray
from ...devices.grouped import GroupedImplementation
from ...recipes.recipe import ProductName
from ..scales import each_row_scaled, members_dot
from .implementation import grouped_product, takes
from .rows import of_each_row


NUMBERS: dict[ProductName, lax.RaggedDotDimensionNumbers] = {
    "fprop": lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0]),
    "dgrad": lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0]),
    "wgrad": lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], []),
}
"""What `lax.ragged_dot_general` contracts in each product, without members."""


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """A grouped product, but for its operands.

    Args:
        product: Which of the three.
        implementation: What multiplies.
        batch: The number of leading axes of all operands, which number members.
        state_per_group: Whether each group has a scale of its own.
        precision: The precision of the product.
        dtype: The dtype of the result.
    """

    product: ProductName
    implementation: GroupedImplementation
    batch: int
    state_per_group: bool
    precision: lax.PrecisionLike
    dtype: np.dtype

    def __call__(
        self,
        a: QuantizedArray,
        b: QuantizedArray,
        group_sizes: Int[Array, "*members groups"],
        scale: Float32[Array, "..."] | None,
    ) -> Float[Array, "..."]:
        """The product.

        Args:
            a: The rows `[*members, rows, sum]`; of wgrad the inputs `[*members, rows, inputs]`.
            b: The kernels `[*members, groups, inputs, outputs]`; of wgrad the output gradients.
            group_sizes: How many rows each group has.
            scale: The scales of both operands multiplied, of each member, or of each group if those have their own;
                None if it is not known.
        """
        if self.implementation is not GroupedImplementation.XLA and takes(a, b):
            of_groups = scale if self.state_per_group else None
            return grouped_product(
                self.implementation, self.product, a, b, group_sizes, self.precision, self.dtype, of_groups
            )
        dot = self.dot(group_sizes)
        # XLA may widen them, and drop a rounding that nothing keeps.
        a, b = (dataclasses.replace(x, data=still_rounded(x.data)) for x in (a, b))
        if self.state_per_group and self.product != "wgrad":
            assert scale is not None
            of_rows = of_each_row(scale, group_sizes, a.data.shape[self.batch])
            return each_row_scaled(dot(a.data, b.data), of_rows, self.dtype)
        return members_dot(dot, a, b, self.batch, self.dtype, scale)

    def dot(self, group_sizes: Int[Array, "*members groups"]) -> Callable[[Array, Array], Array]:
        """`lax.ragged_dot_general` of two arrays, in float32."""

        def dot(a: Array, b: Array, group_sizes: Array) -> Array:
            return lax.ragged_dot_general(
                a, b, group_sizes, NUMBERS[self.product], precision=self.precision, preferred_element_type=jnp.float32
            )

        for _ in range(self.batch):
            dot = jax.vmap(dot)
        return lambda a, b: dot(a, b, group_sizes)
