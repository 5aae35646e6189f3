"""Groups and the rows that belong to them: from a number for each group to one for each row, and the reverse."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from ..._jax.xla import keep_cast
from ..._numerics.quantized_array import QuantizedArray
from ...devices.grouped import GroupedImplementation
from ...recipes.recipe import ProductName
from ..scaled_product import each_row_scaled, members_dot
from .implementation import grouped_product, takes
from .tiles import within_bounds


def _group_of_row(group_sizes: Int[Array, " groups"], rows: int) -> Int[Array, " rows"]:
    """The group of each row; the number of groups for rows beyond the last."""
    ends = jnp.cumsum(within_bounds(group_sizes, rows))
    return jnp.searchsorted(ends, jnp.arange(rows, dtype=ends.dtype), side="right")


def used_rows(group_sizes: Int[Array, "*members groups"], rows: int) -> Bool[Array, "*members rows 1"]:
    """Whether each row belongs to a group, or lies beyond the last."""
    shape = (*group_sizes.shape[:-1], rows)
    index = lax.broadcasted_iota(group_sizes.dtype, shape, len(shape) - 1)
    return (index < jnp.sum(group_sizes, axis=-1, keepdims=True))[..., None]


def in_group(group_sizes: Int[Array, "*members groups"], rows: int) -> Bool[Array, "*members rows groups"]:
    """Whether each row is in each group."""
    if group_sizes.ndim > 1:
        return jax.vmap(lambda sizes: in_group(sizes, rows))(group_sizes)
    return _group_of_row(group_sizes, rows)[:, None] == jnp.arange(len(group_sizes))[None]


def of_each_row(
    group_values: Float[Array, "*members groups"], group_sizes: Int[Array, "*members groups"], rows: int
) -> Float[Array, "*members rows"]:
    """What a row's group has; 1 for rows beyond the last group."""
    if group_sizes.ndim > 1:
        return jax.vmap(lambda x, sizes: of_each_row(x, sizes, rows))(group_values, group_sizes)
    return jnp.append(group_values, jnp.ones(1, group_values.dtype))[_group_of_row(group_sizes, rows)]


def largest_of_groups(
    row_values: Float[Array, "*members rows numbers"], group_sizes: Int[Array, "*members groups"]
) -> Float[Array, "*members groups numbers"]:
    """The largest numbers of each group's rows, none of them negative; 0 for a group without rows."""
    if group_sizes.ndim > 1:
        return jax.vmap(largest_of_groups)(row_values, group_sizes)
    count = len(group_sizes)
    largest = jax.ops.segment_max(
        row_values, _group_of_row(group_sizes, len(row_values)), count + 1, indices_are_sorted=True
    )
    return jnp.where(group_sizes[:, None] > 0, largest[:count], np.asarray(0.0, row_values.dtype))


def together(
    rows: Float[Array, "examples rows width"], group_sizes: Int[Array, "examples groups"]
) -> tuple[Float[Array, "all_rows width"], Int[Array, " groups"], Int[Array, " all_rows"], Bool[Array, " examples"]]:
    """The rows of several examples with the same groups, sorted by group: one product instead of one for each.

    Args:
        rows: The rows of each example, sorted by group.
        group_sizes: How many rows each group of an example has.

    Returns:
        The rows; the sizes of the groups; which row each was; and the examples whose sizes fit their rows.
    """
    count = rows.shape[1]
    sizes = jax.vmap(lambda sizes: within_bounds(sizes, count))(group_sizes)
    order = jnp.argsort(jax.vmap(lambda sizes: _group_of_row(sizes, count))(sizes).reshape(-1), stable=True)
    valid = jnp.all(sizes == group_sizes, axis=1)
    return rows.reshape(-1, rows.shape[2])[order], jnp.sum(sizes, axis=0), order, valid


def apart(
    out: Float[Array, "all_rows columns"], order: Int[Array, " all_rows"], valid: Bool[Array, " examples"]
) -> Float[Array, "examples rows columns"]:
    """Results of rows that stand together, split by example; NaN where sizes did not fit.

    Args:
        out: The results.
        order: Which row each was, see `together`.
        valid: The examples whose sizes fit their rows.
    """
    row_values = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
    per_example = row_values.reshape(len(valid), -1, out.shape[1])
    return jnp.where(valid[:, None, None], per_example, np.asarray(np.nan, out.dtype))


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
            group_scale = scale if self.state_per_group else None
            return grouped_product(
                self.implementation, self.product, a, b, group_sizes, self.precision, self.dtype, group_scale
            )
        dot = self.dot(group_sizes)
        # XLA may widen them, and drop a rounding that nothing keeps.
        a, b = (dataclasses.replace(x, data=keep_cast(x.data)) for x in (a, b))
        if self.state_per_group and self.product != "wgrad":
            assert scale is not None
            row_scale = of_each_row(scale, group_sizes, a.data.shape[self.batch])
            return each_row_scaled(dot(a.data, b.data), row_scale, self.dtype)
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
