"""Groups and the rows that belong to them: from a number for each group to one for each row, and the reverse."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

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
    of_rows = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
    of_examples = of_rows.reshape(len(valid), -1, out.shape[1])
    return jnp.where(valid[:, None, None], of_examples, np.asarray(np.nan, out.dtype))
