"""The contraction of grouped products: rows multiplied by the kernel of the group that each is in (experts)."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from ..._jax.primitives import to_front
from ..._numerics.quantized_array import QuantizedArray
from ...devices.grouped import GroupedImplementation
from ...recipes.recipe import OperandName, ProductName
from ...recipes.scaling.members import Members
from ..contraction import AbstractContraction
from .divided import divided_over_devices
from .members import GroupsOfRows, RowsInGroups
from .one_device import NUMBERS, OneDevice
from .tiles import within_bounds


@dataclasses.dataclass(frozen=True)
class RaggedContraction(AbstractContraction):
    """`lax.ragged_dot`: rows `[M, K]`, kernels `[G, K, N]`, group sizes `[G]`; the product is `[M, N]`.

    Row `m` is multiplied by the kernel of its group; groups are consecutive, and rows after the last group give 0.
    dgrad is the same with transposed kernels; wgrad sums over the rows of each group: `[G, K, N]`.

    Sizes that are negative, or that add up to more than the rows, make all of a product NaN: where they are known only
    on the device, nothing else shows them at no cost.

    Args:
        batch: The number of leading axes of all operands and the product; each entry is a separate product.
        implementation: What multiplies.
        state_per_group: Whether each group has a state of its own, and so scales: the last axis of the ensemble numbers
            groups, and rows do not have it.
    """

    batch: int = 0
    implementation: GroupedImplementation = GroupedImplementation.XLA
    state_per_group: bool = False

    is_grouped = True
    groups = frozenset[ProductName]({"wgrad"})

    def out_shape(self, input_shape: Sequence[int], kernel_shape: Sequence[int]) -> tuple[int, ...]:
        """`[*batch, M, N]`."""
        return (*input_shape[:-1], kernel_shape[-1])

    def with_batch_axes(self, count: int) -> "RaggedContraction":
        """Batched over `count` more leading axes; of these, one may number the groups."""
        return dataclasses.replace(self, batch=self.batch + count - self.state_per_group)

    def fold(
        self, operands: Sequence[Array], axes: Sequence[int | None], size: int, ensemble: int
    ) -> tuple[Sequence[Array], "RaggedContraction", int]:
        """A batch axis of every operand: examples have their own groups."""
        if self.state_per_group:
            raise ValueError(
                "vmap maps a grouped product whose experts have a state each (scale_per_expert=True) over examples "
                "that share it; call it once for the rows of all examples, or convert with scale_per_expert=False"
            )
        moved = [to_front(x, axis, size, ensemble) for x, axis in zip(operands, axes, strict=True)]
        return moved, self.with_batch_axes(1), 0

    def contracted(self, product: ProductName) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Inputs for fprop, outputs for dgrad, rows for wgrad."""
        ((first, second), _) = NUMBERS[product].dot_dimension_numbers
        return (self.batch + first[0],), (self.batch + second[0],)

    @property
    def applies_scales(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Where each group has a scale."""
        return self.state_per_group

    def members(
        self, operand: OperandName, shape: tuple[int, ...], group_sizes: Array | None, ensemble: int
    ) -> Members:
        """Of rows, those that are in groups."""
        members = super().members(operand, shape, group_sizes, ensemble)
        if operand == "kernel":
            return members
        assert group_sizes is not None
        if self.state_per_group:
            rows = shape[ensemble - 1]
            return GroupsOfRows(ensemble, contracted=members.contracted, sizes=group_sizes, rows=rows)
        return RowsInGroups(ensemble, contracted=members.contracted, sizes=group_sizes)

    def dot(
        self,
        input: Float[Array, "..."],
        kernel: Float[Array, "..."],
        group_sizes: Array | None,
        precision: lax.PrecisionLike,
    ) -> Float32[Array, "..."]:
        """`lax.ragged_dot_general`."""
        assert group_sizes is not None
        return self._one_device("fprop", precision, np.dtype(np.float32)).dot(group_sizes)(input, kernel)

    def product(
        self,
        product: ProductName,
        operands: tuple[QuantizedArray, QuantizedArray],
        group_sizes: Array | None,
        precision: lax.PrecisionLike,
        dtype: np.dtype,
        scale: Float32[Array, "*members"] | None,
    ) -> Float[Array, "..."]:
        """Rows times kernels; rows of the output's gradient times transposed kernels; for each group, the sum of the
        outer products of its rows."""
        assert group_sizes is not None
        a, b = operands
        in_bounds = jnp.all(group_sizes == within_bounds(group_sizes, a.data.shape[self.batch]))
        valid = jnp.where(in_bounds, jnp.float32(1.0), jnp.float32(np.nan))
        a = dataclasses.replace(a, scale=a.scale * valid)
        scale = None if scale is None else scale * valid
        return divided_over_devices(self._one_device(product, precision, dtype), a, b, group_sizes, scale)

    def _one_device(self, product: ProductName, precision: lax.PrecisionLike, dtype: np.dtype) -> OneDevice:
        return OneDevice(product, self.implementation, self.batch, self.state_per_group, precision, dtype)
