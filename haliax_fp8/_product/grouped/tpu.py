"""Grouped products on a TPU: its matrix units multiply FP8 of both formats, and sum in float32.

Memory is read in aligned tiles, so a tile of rows that several groups share is multiplied once for each, and each
stores its own rows. Operands may lie along the sum or across it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from ..._jax.meshes import as_varying, varying_axes
from ..._jax.opaque import on_one_device
from ..._numerics.quantized_array import QuantizedArray
from ...recipes.recipe import ProductName
from ...scopes import name_of_tile
from .tiles import Tile, alike, lines, padded


class Visits(NamedTuple):
    """Which tile of rows a block multiplies, for which group; one entry for each row of blocks.

    Args:
        tile: The tile of rows.
        group: The group, whose kernel and scale it takes.
        begin: The group's first row.
        end: The end of its rows; `begin` for an entry that multiplies nothing.
        edge: 1 for the first visit for a group, 2 for the last, 3 for one that is both, else 0.
        multiplies: 1 if there is something to multiply; rows beyond the last group are zeros.
    """

    tile: Int32[Array, " visits"]
    group: Int32[Array, " visits"]
    begin: Int32[Array, " visits"]
    end: Int32[Array, " visits"]
    edge: Int32[Array, " visits"]
    multiplies: Int32[Array, " visits"]


def visits(sizes: Int32[Array, "members groups"], rows: int, length: int, tile: int, *, by_row: bool) -> Visits:
    """The visits of a product.

    Args:
        sizes: How many rows each group has; members' rows follow each other.
        rows: How many rows a member has.
        length: How many all have, padded to a multiple of a tile.
        tile: The rows of a tile.
        by_row: Whether each row is multiplied by a kernel: then rows beyond the last group are written, as zeros. Else
            each group is a sum, and one without rows is visited to write zeros.
    """
    members, groups = sizes.shape
    ends = jnp.cumsum(sizes, axis=1)
    if by_row:
        sizes = jnp.concatenate([sizes, rows - ends[:, -1:]], axis=1)
        ends = jnp.concatenate([ends, jnp.full((members, 1), rows, ends.dtype)], axis=1)
    ends = (ends + rows * jnp.arange(members, dtype=ends.dtype)[:, None]).reshape(-1)
    begins = ends - sizes.reshape(-1)
    first = jnp.minimum(begins, length - 1) // tile
    count = jnp.where(ends > begins, (ends - 1) // tile - first + 1, 0 if by_row else 1)
    last = jnp.cumsum(count)
    job = jnp.arange(length // tile + len(ends), dtype=jnp.int32)
    in_use = job < last[-1]
    job = jnp.minimum(job, last[-1] - 1)
    which = jnp.searchsorted(last, job, side="right")
    within = job - (last - count)[which]
    begin = begins[which]
    end = jnp.where(in_use, ends[which], begin)
    member, group = which // (groups + by_row), which % (groups + by_row)
    multiplies = (end > begin) & (group < groups)
    is_first, is_last = (x.astype(jnp.int32) for x in (within == 0, within == count[which] - 1))
    edge = jnp.where(in_use, is_first + 2 * is_last, 0)
    group = member * groups + jnp.minimum(group, groups - 1)
    return Visits(*(x.astype(jnp.int32) for x in (first[which] + within, group, begin, end, edge, multiplies)))


def tpu_product(
    product: ProductName,
    a: QuantizedArray,
    b: QuantizedArray,
    sizes: Int32[Array, "members groups"],
    rows: int,
    group_scale: Float32[Array, " all_groups"] | None,
    dtype: np.dtype,
) -> Float[Array, "..."]:
    """fprop, dgrad or wgrad of groups; members' rows and groups follow each other in the result.

    Args:
        product: Which of the three.
        a: Its first operand, as in `grouped_product`.
        b: Its second.
        sizes: How many rows each group has.
        rows: How many rows a member has.
        group_scale: The scale of both operands for each group; None if rows and columns have their own.
        dtype: The dtype of the result.
    """
    scale = jnp.ones(sizes.size, jnp.float32) if group_scale is None else group_scale
    x, y = alike(a.data, b.data)
    x = x.reshape(-1, x.shape[-1])
    height = 256 if rows >= 1024 * sizes.shape[1] else 128
    if product == "wgrad":
        y = y.reshape(-1, y.shape[-1])
        tile = Tile(_size(x.shape[1]), _size(y.shape[1]), height)
        vectors = () if group_scale is not None else (lines(a, (1, x.shape[1])), lines(b, (1, y.shape[1])))
        vectors = tuple(padded(v, (1, n)) for v, n in zip(vectors, (tile.rows, tile.columns), strict=False))
        width, columns = x.shape[1], y.shape[1]
        x, y = padded(x, (height, tile.rows)), padded(y, (height, tile.columns))
        visited = visits(sizes, rows, len(x), height, by_row=False)
        return tpu_sums(x, y, visited, scale, vectors, dtype, tile)[:, :width, :columns]
    is_fprop = product == "fprop"
    y = y.reshape(-1, *y.shape[-2:])
    total, columns = len(x), y.shape[2 if is_fprop else 1]
    tile = Tile(height, _size(columns), _size(x.shape[1]))
    vectors = ()
    if group_scale is None:
        column_scales = lines(b, (len(y), 1, columns) if is_fprop else (len(y), columns, 1)).reshape(len(y), 1, columns)
        vectors = padded(lines(a, (rows, 1)), (height, 1)), padded(column_scales, (1, 1, tile.columns))
    x = padded(x, (height, tile.depth))
    y = padded(y, (1, tile.depth, tile.columns) if is_fprop else (1, tile.columns, tile.depth))
    visited = visits(sizes, rows, len(x), height, by_row=True)
    out = tpu_rows(x, y, visited, scale, vectors, dtype, tile, inputs_are_summed=is_fprop)
    return out[:total, :columns]


def _size(length: int) -> int:
    """The side of a tile along an axis: as large as divides it, of those that matrix units take."""
    return next((size for size in (512, 256) if length % size == 0), 128)


def tpu_rows(
    a: Float[Array, "rows depth"],
    kernels: Float[Array, "groups inputs outputs"],
    visited: Visits,
    group_scale: Float32[Array, " groups"],
    vectors: tuple[Array, ...],
    dtype: np.dtype,
    tile: Tile,
    *,
    inputs_are_summed: bool,
) -> Float[Array, "rows columns"]:
    """Each row times its group's kernel, over the kernel's inputs or outputs.

    Args:
        a: The rows, padded to whole tiles.
        kernels: The kernels, padded to whole tiles too.
        visited: The visits.
        group_scale: The scale of each group.
        vectors: Scales of rows `[rows, 1]` and of the kernels' columns `[groups, 1, columns]`; may be none.
        dtype: The dtype of the result.
        tile: The tiles.
        inputs_are_summed: Whether the kernels' inputs are summed over.
    """
    depth, columns = kernels.shape[1:] if inputs_are_summed else kernels.shape[:0:-1]
    rows_of, pieces = (tile.rows, tile.depth), depth // tile.depth
    kernel = (tile.depth, tile.columns) if inputs_are_summed else (tile.columns, tile.depth)

    def kernel_index(j: Any, i: Any, s: Any, tiles: Any, groups: Any, *_: Any) -> tuple[Any, ...]:
        return (groups[i], s, j) if inputs_are_summed else (groups[i], j, s)

    def body(tiles: Any, groups: Any, begin: Any, end: Any, edge: Any, multiplies: Any, *refs: Any) -> None:
        del edge
        scale, a, b, *lines, out, total = refs
        visit, piece = pl.program_id(1), pl.program_id(2)

        @pl.when(piece == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        @pl.when(multiplies[visit] > 0)
        def _() -> None:
            numbers = (((1,), (0 if inputs_are_summed else 1,)), ((), ()))
            total[...] += lax.dot_general(a[...], b[0], numbers, preferred_element_type=jnp.float32)

        @pl.when(piece == pieces - 1)
        def _() -> None:
            value = total[...] * scale[groups[visit]]
            if lines:
                value = value * lines[0][...] * lines[1][0]
            in_group = _in_group(tiles, begin, end, visit, out.shape)
            out[...] = jnp.where(in_group, value, out[...].astype(jnp.float32)).astype(dtype)

    specs = [
        pl.BlockSpec(memory_space=pltpu.SMEM),
        pl.BlockSpec(rows_of, lambda j, i, s, tiles, *_: (tiles[i], s)),
        pl.BlockSpec((1, *kernel), kernel_index),
    ]
    if vectors:
        specs += [
            pl.BlockSpec((tile.rows, 1), lambda j, i, s, tiles, *_: (tiles[i], 0)),
            pl.BlockSpec((1, 1, tile.columns), lambda j, i, s, tiles, groups, *_: (groups[i], 0, j)),
        ]
    return _call(
        body,
        (group_scale, a, kernels, *vectors),
        visited,
        (columns // tile.columns, len(visited.tile), pieces),
        specs,
        pl.BlockSpec((tile.rows, tile.columns), lambda j, i, s, tiles, *_: (tiles[i], j)),
        jax.ShapeDtypeStruct((len(a), columns), dtype),
        tile,
    )


def tpu_sums(
    a: Float[Array, "rows width"],
    b: Float[Array, "rows columns"],
    visited: Visits,
    group_scale: Float32[Array, " groups"],
    vectors: tuple[Array, ...],
    dtype: np.dtype,
    tile: Tile,
) -> Float[Array, "groups width columns"]:
    """For each group, the sum of the outer products of its rows.

    Args:
        a: Rows of the first operand, padded to whole tiles.
        b: Those of the second, padded the same way.
        visited: The visits.
        group_scale: The scale of each group.
        vectors: Scales of both operands' columns, `[1, width]` and `[1, columns]`; may be none.
        dtype: The dtype of the result.
        tile: The tiles; the depth is that of rows.
    """
    width, columns = a.shape[1], b.shape[1]
    shape = tile.rows, tile.columns

    def body(tiles: Any, groups: Any, begin: Any, end: Any, edge: Any, multiplies: Any, *refs: Any) -> None:
        scale, a, b, *lines, out, total = refs
        visit = pl.program_id(2)

        @pl.when(edge[visit] % 2 == 1)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        @pl.when(multiplies[visit] > 0)
        def _() -> None:
            in_group = _in_group(tiles, begin, end, visit, a.shape)
            # Rows of other groups; FP8 numbers have no selection of their own.
            rows = jnp.where(in_group, a[...].astype(jnp.float32), 0.0).astype(a.dtype)
            numbers = (((0,), (0,)), ((), ()))
            total[...] += lax.dot_general(rows, b[...], numbers, preferred_element_type=jnp.float32)

        @pl.when(edge[visit] >= 2)
        def _() -> None:
            value = total[...] * scale[groups[visit]]
            if lines:
                value = value * lines[0][...].reshape(-1, 1) * lines[1][...]
            out[0] = value.astype(dtype)

    specs = [
        pl.BlockSpec(memory_space=pltpu.SMEM),
        pl.BlockSpec((tile.depth, tile.rows), lambda i, j, v, tiles, *_: (tiles[v], i)),
        pl.BlockSpec((tile.depth, tile.columns), lambda i, j, v, tiles, *_: (tiles[v], j)),
    ]
    if vectors:
        specs += [
            pl.BlockSpec((1, tile.rows), lambda i, j, v, *_: (0, i)),
            pl.BlockSpec((1, tile.columns), lambda i, j, v, *_: (0, j)),
        ]
    return _call(
        body,
        (group_scale, a, b, *vectors),
        visited,
        (width // tile.rows, columns // tile.columns, len(visited.tile)),
        specs,
        pl.BlockSpec((1, *shape), lambda i, j, v, tiles, groups, *_: (groups[v], i, j)),
        jax.ShapeDtypeStruct((len(group_scale), width, columns), dtype),
        tile,
    )


def _in_group(tiles: Any, begin: Any, end: Any, visit: Array, shape: tuple[int, ...]) -> Array:
    """Which of a tile's rows are the group's."""
    row = tiles[visit] * shape[0] + lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= begin[visit]) & (row < end[visit])


def _call(
    body: Any,
    operands: tuple[Array, ...],
    visited: Visits,
    grid: tuple[int, ...],
    specs: list[Any],
    out_spec: Any,
    out: jax.ShapeDtypeStruct,
    tile: Tile,
) -> Array:
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(visited),
        grid=grid,
        in_specs=specs,
        out_specs=out_spec,
        scratch_shapes=[pltpu.VMEM((tile.rows, tile.columns), jnp.float32)],
    )
    name = name_of_tile(tile.rows, tile.columns, tile.depth)
    launch = pl.pallas_call(body, out_shape=out, grid_spec=grid_spec, name=name)
    operands = (*visited, *operands)
    if not any(map(varying_axes, operands)):
        return launch(*operands)
    return as_varying(on_one_device(launch, *operands), operands)
