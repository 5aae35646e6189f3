"""Groups and the rows that belong to them: from a number for each group to one for each row, and the reverse."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .tiles import within_bounds


def _group_of_row(group_sizes: Int[Array, " groups"], rows: int) -> Int[Array, " rows"]:
    """The group of each row; the number of groups for rows beyond the last."""
    ends = jnp.cumsum(within_bounds(group_sizes, rows))
    return jnp.searchsorted(ends, jnp.arange(rows, dtype=ends.dtype), side="right")


def of_each_row(
    of_groups: Float[Array, "*members groups"], group_sizes: Int[Array, "*members groups"], rows: int
) -> Float[Array, "*members rows"]:
    """What a row's group has; 1 for rows beyond the last group."""
    if group_sizes.ndim > 1:
        return jax.vmap(lambda x, sizes: of_each_row(x, sizes, rows))(of_groups, group_sizes)
    return jnp.append(of_groups, jnp.ones(1, of_groups.dtype))[_group_of_row(group_sizes, rows)]


def largest_of_groups(
    of_rows: Float[Array, "*members rows numbers"], group_sizes: Int[Array, "*members groups"]
) -> Float[Array, "*members groups numbers"]:
    """The largest numbers of each group's rows, none of them negative; 0 for a group without rows."""
    if group_sizes.ndim > 1:
        return jax.vmap(largest_of_groups)(of_rows, group_sizes)
    count = len(group_sizes)
    found = jax.ops.segment_max(of_rows, _group_of_row(group_sizes, len(of_rows)), count + 1, indices_are_sorted=True)
    return jnp.where(group_sizes[:, None] > 0, found[:count], np.asarray(0.0, of_rows.dtype))
