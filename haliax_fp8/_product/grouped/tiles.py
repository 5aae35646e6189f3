"""Operands and scales of grouped products as Pallas kernels take them: of one width, padded, a scale for each line."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from ..._numerics.quantized_array import QuantizedArray, expand


FP8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
"""The formats that Pallas kernels multiply."""

ROWS = 8
"""How many rows lie together in the shared memory of a GPU, and are copied there together: what the number of rows, and
the row where a copy begins, is a multiple of."""


def alike(a: Array, b: Array) -> tuple[Array, Array]:
    """Data of the same width: FP8 of either format, or both in the wider dtype."""
    wide = [x.dtype for x in (a, b) if x.dtype not in FP8]
    return (lax.convert_element_type(a, wide[0]), lax.convert_element_type(b, wide[0])) if wide else (a, b)


def lines(x: QuantizedArray, shape: tuple[int, ...]) -> Float32[Array, "..."]:
    """The scales of an operand, repeated to a shape that is the data's, but for the number of pieces of the sum."""
    scale = x.scale if x.scale.ndim else x.scale.reshape((1,) * len(shape))
    return expand(scale, shape, x.block)


def padded(x: Array, multiples: tuple[int, ...], least: int = 0) -> Array:
    """Padded with zeros to multiples of something along each of its axes, and to so many rows at least.

    Axes in front of those with a multiple stay as they are.
    """
    missing = [-size % multiple for size, multiple in zip(x.shape, multiples, strict=True)]
    missing[0] = max(missing[0], least - x.shape[0])
    return jnp.pad(x, [(0, count) for count in missing]) if any(missing) else x


@dataclasses.dataclass(frozen=True)
class Tile:
    """The size of a block's work.

    Args:
        rows: The rows of the result.
        columns: The columns of the result.
        depth: What a block multiplies at once, of what it sums over.
        stages: How many such pieces are in shared memory.
    """

    rows: int
    columns: int
    depth: int
    stages: int = 4


class Jobs(NamedTuple):
    """The work of each row of blocks.

    Args:
        a_row: Where its rows of `a` begin.
        b_row: Where the rows of `b` begin that belong to its first column.
        out_row: Where its rows of the result begin.
        skip: How many of them are another block's work; any number for a block that has nothing to do.
        writes: How many of the next it writes; 0 for a block that has nothing to do.
        steps: How many pieces it sums up; 0 writes zeros.
        first: The first of these pieces.
        edges: Where `a` has the first and the last piece once more, with nothing of other groups; -1 if nowhere.
        group: The group, whose scale the sum is multiplied by.
    """

    a_row: Int32[Array, " jobs"]
    b_row: Int32[Array, " jobs"]
    out_row: Int32[Array, " jobs"]
    skip: Int32[Array, " jobs"]
    writes: Int32[Array, " jobs"]
    steps: Int32[Array, " jobs"]
    first: Int32[Array, " jobs"]
    edges: Int32[Array, " jobs"]
    group: Int32[Array, " jobs"]

    def stacked(self) -> Int32[Array, "fields jobs"]:
        """All fields as one array, for a GPU kernel to read."""
        return jnp.stack([x.astype(jnp.int32) for x in self])


class GroupedScales(NamedTuple):
    """The scales of a grouped product, `[pieces]` being 1 where they are the same for all that is summed.

    Args:
        groups: The scale of each group, both operands' multiplied.
        rows: The scales of the rows of `a`; None if they all have the group's.
        columns: The scales of the rows of `b`; None together with `rows`.
    """

    groups: Float32[Array, " groups"]
    rows: Float32[Array, "pieces a_rows"] | None = None
    columns: Float32[Array, "pieces b_rows"] | None = None

    @property
    def change_along_sum(self) -> bool:
        """Whether each piece of the sum has scales of its own."""
        return self.rows is not None and self.rows.shape[0] > 1


def rows_jobs(
    sizes: Int32[Array, "members groups"], rows: int, length: int, columns: int, tile: Tile, depth: int
) -> Jobs:
    """The work of a product that multiplies each row by the kernel of its group.

    A group's tiles begin at its first row, or up to seven rows before it: in shared memory rows lie in bundles of
    `ROWS`, which are copied from where one begins in `a`. A copy that begins within a bundle has zeros for the rows of
    the next one. Its last tile may be partial. What follows the last group is a group of its own, whose rows are zeros.
    A tile that would run over the end of `a` begins earlier. Rows that a tile has too many are left to those whose they
    are.

    Args:
        sizes: How many rows each group has; members' rows follow each other. The sum of a member's is at most `rows`.
        rows: How many rows a member has.
        length: How many all have, padded to a multiple of `ROWS`, and to at least the rows of a tile.
        columns: How many columns the kernels have.
        tile: The tiles.
        depth: What is summed over.
    """
    members, groups = sizes.shape
    ends = jnp.cumsum(sizes, axis=1)
    sizes = jnp.concatenate([sizes, rows - ends[:, -1:]], axis=1)
    ends = jnp.concatenate([ends, jnp.full((members, 1), rows, ends.dtype)], axis=1)
    starts = (ends - sizes + rows * jnp.arange(members, dtype=ends.dtype)[:, None]).reshape(-1)
    sizes = sizes.reshape(-1)
    begins = starts // ROWS * ROWS
    tiles = jnp.where(sizes > 0, (starts - begins + sizes + (tile.rows - 1)) // tile.rows, 0)
    last = jnp.cumsum(tiles)
    # As many as there can be: of each group, the first tile may lack seven rows, and the last have only one.
    count = (members * rows + len(sizes) * (tile.rows + ROWS - 2)) // tile.rows
    job = jnp.arange(count, dtype=jnp.int32)
    which = jnp.minimum(jnp.searchsorted(last, job, side="right"), len(sizes) - 1)
    begin = begins[which] + (job - (last - tiles)[which]) * tile.rows
    first_row = jnp.maximum(begin, starts[which])
    end_row = jnp.minimum(begin + tile.rows, (starts + sizes)[which])
    in_use = job < last[-1]
    # What has nothing to do reads somewhere within `a`, and writes nothing.
    writes = jnp.where(in_use, end_row - first_row, 0)
    base = jnp.minimum(begin, length - tile.rows)
    skip = first_row - base
    member, group = which // (groups + 1), which % (groups + 1)
    has_kernel = (group < groups) & in_use
    group = member * groups + jnp.minimum(group, groups - 1)
    nowhere = jnp.full_like(job, -1)
    steps = jnp.where(has_kernel, depth // tile.depth, 0)
    return Jobs(base, group * columns, base, skip, writes, steps, jnp.zeros_like(job), nowhere, group)


def groups_jobs(sizes: Int32[Array, "members groups"], rows: int, length: int, width: int, tile: Tile) -> Jobs:
    """The work of a product that sums over the rows of each group.

    The rows lie along the last axis of both operands. `a` is what `with_edges` returned, transposed.

    Args:
        sizes: As in `rows_jobs`.
        rows: How many rows a member has.
        length: How many all have, padded to a multiple of the tile's depth.
        width: The rows of a group's result.
        tile: The tiles.
    """
    first, steps = _pieces(sizes, rows, tile.depth)
    count, tiles = first.size, width // tile.rows
    group = jnp.repeat(jnp.arange(count, dtype=jnp.int32), tiles)
    row = jnp.tile(tile.rows * jnp.arange(tiles, dtype=jnp.int32), count)
    edges = length // tile.depth + 2 * group
    none, whole = jnp.zeros_like(group), jnp.full_like(group, tile.rows)
    return Jobs(row, none, group * width + row, none, whole, steps[group], first[group], edges, group)


def with_edges(
    x: Float[Array, "length width"], sizes: Int32[Array, "members groups"], rows: int, depth: int
) -> Float[Array, "length_and_edges width"]:
    """Rows, followed by the first and the last piece of each group once more, where the rows of other groups are zero.

    So a GPU kernel sums over whole pieces, aligned in memory, without a mask. It takes two pieces for each group.

    Args:
        x: The rows of all members, padded to a multiple of the depth.
        sizes: As in `rows_jobs`.
        rows: How many rows a member has.
        depth: How many rows a piece has.
    """
    first, steps = _pieces(sizes, rows, depth)
    starts, ends = _bounds(sizes, rows)
    pieces = jnp.stack([first, first + jnp.maximum(steps - 1, 0)], axis=1)
    at = pieces[:, :, None] * depth + jnp.arange(depth, dtype=jnp.int32)[None, None]
    at = at.reshape(len(starts), -1)
    in_group = (at >= starts[:, None]) & (at < ends[:, None])
    taken = jnp.take(x, at.reshape(-1), axis=0, mode="clip")
    return lax.concatenate([x, jnp.where(in_group.reshape(-1, 1), taken, jnp.zeros((), x.dtype))], 0)


def _bounds(sizes: Int32[Array, "members groups"], rows: int) -> tuple[Array, Array]:
    """Where each group's rows begin and end."""
    ends = jnp.cumsum(sizes, axis=1) + rows * jnp.arange(len(sizes), dtype=jnp.int32)[:, None]
    return (ends - sizes).reshape(-1), ends.reshape(-1)


def _pieces(sizes: Int32[Array, "members groups"], rows: int, depth: int) -> tuple[Array, Array]:
    """The first piece that each group has rows in, and how many it has them in."""
    starts, ends = _bounds(sizes, rows)
    first = starts // depth
    return first, jnp.where(ends > starts, (ends + depth - 1) // depth - first, 0)


def within_bounds(sizes: Int32[Array, "*members groups"], rows: int) -> Int32[Array, "*members groups"]:
    """Sizes that no GPU kernel reads or writes beyond its operands with: none negative, their sum at most `rows`.

    Where that changes them, the product is NaN, see `RaggedContraction`.
    """
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(sizes, 0), axis=-1), rows)
    return jnp.diff(ends, axis=-1, prepend=0).astype(jnp.int32)
