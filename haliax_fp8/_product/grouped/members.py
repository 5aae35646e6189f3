"""Rows in groups as members: of one state, or each group of its own."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from ..._numerics.quantized_array import QuantizedArray
from ...recipes.scaling.members import Measure, Members
from .one_device import in_group, largest_of_groups, of_each_row, used_rows


@dataclasses.dataclass(frozen=True)
class RowsInGroups(Members):
    """Rows `[*leading, rows, columns]` of groups that have one state: those beyond the last group are in no product.

    Args:
        sizes: How many rows each group has.
    """

    sizes: Int[Array, "*leading groups"] = dataclasses.field(kw_only=True)

    def counted(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """The rows, zero beyond the last group."""
        return jnp.where(used_rows(self.sizes, x.shape[-2]), x, np.asarray(0.0, x.dtype))

    def measured(
        self, measure: Measure, x: Float[Array, "*shape"], quantized: QuantizedArray
    ) -> Float[Array, "*members numbers parts"]:
        """What it finds of each row, zero beyond the last group: the rows are read once."""
        of_rows = jnp.max(measure(x, quantized, x.ndim - 1), axis=-1)
        of_rows = jnp.where(used_rows(self.sizes, x.shape[-2]), of_rows, np.asarray(0.0, of_rows.dtype))
        leading = x.shape[: self.ensemble]
        return jnp.moveaxis(of_rows, -1, self.ensemble).reshape(*leading, of_rows.shape[-1], -1)

    def active(self) -> Float32[Array, "..."]:
        """The share of groups that have rows; the largest over devices, since each may have groups of its own."""
        has_rows = jnp.any(self.sizes > 0, axis=tuple(range(self.ensemble, self.sizes.ndim - 1)))
        return self.largest_of_devices(jnp.mean(has_rows.astype(jnp.float32), axis=-1))


@dataclasses.dataclass(frozen=True)
class GroupsOfRows(Members):
    """Groups of rows that each have a state: the last of the leading axes numbers rows.

    Args:
        sizes: How many rows each group has.
        rows: How many rows there are, in groups or not.
    """

    sizes: Int[Array, "*leading groups"] = dataclasses.field(kw_only=True)
    rows: int = dataclasses.field(kw_only=True)

    def of_state(self, values: Float32[Array, "*leading groups"]) -> Float32[Array, "*leading rows"]:
        """What each row's group has; 1 for rows beyond the last group."""
        return of_each_row(values, self.sizes, self.rows)

    def measured(
        self, measure: Measure, x: Float[Array, "*shape"], quantized: QuantizedArray
    ) -> Float[Array, "*leading groups numbers 1"]:
        """What it finds of each row, then of each group."""
        return largest_of_groups(jnp.max(measure(x, quantized, self.ensemble), axis=-1), self.sizes)[..., None]

    def reached(self, recorded: Float32[Array, "*members numbers"]) -> Float32[Array, "*members numbers"]:
        """`-inf` for groups without rows."""
        has_rows = lax.expand_dims(self.sizes > 0, (recorded.ndim - 1,))
        return jnp.where(has_rows, recorded, np.float32(-np.inf))

    def _joined(
        self, values: Float32[Array, "*leading rows"], reduce: Callable[..., Array], initial: float
    ) -> Float32[Array, "*leading groups"]:
        mask: Bool[Array, "*leading rows groups"] = in_group(self.sizes, self.rows)
        return reduce(jnp.where(mask, values[..., None], np.float32(initial)), axis=-2, initial=initial)
