"""A grouped product on Blackwell: `tcgen05` multiplies FP8 of both formats and sums in float32, in tensor memory."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from ...scopes import name_of_tile
from .mosaic import Job, call, scaled, store, stored_transforms, swizzled
from .tiles import GroupedScales, Jobs, Tile


# The warps of a block that load and multiply.
_LOADS, _MULTIPLIES = 0, 1

# A block multiplies a multiple of so many rows, the least that hold those it writes. Less gains nothing: already at 64,
# tensor cores wait for shared memory.
_PART = 64


def blackwell_product(
    a: Float[Array, "a_rows a_depth"],
    b: Float[Array, "b_rows b_depth"],
    jobs: Jobs,
    scales: GroupedScales,
    out: jax.ShapeDtypeStruct,
    tile: Tile,
    *,
    whole: bool,
) -> Float[Array, "out_rows columns"]:
    """`a @ b.T` for each job, times the scales, rounded once.

    Args:
        a: FP8 of either format.
        b: FP8 of either format.
        jobs: What each row of blocks does.
        scales: The scales of both operands, the same for all that is summed.
        out: Shape and dtype of the result.
        tile: The tiles, of 128 rows and columns.
        whole: Whether all tiles of the result are whole. Their rows are the lanes of tensor memory, of which there are
            128; else its columns are, and a tile may have any multiple of eight rows.
    """
    assert not scales.change_along_sum
    stages, lanes, others = tile.stages, *((tile.rows, tile.columns) if whole else (tile.columns, tile.rows))
    scratch = [
        plgpu.SMEM((stages, tile.rows, tile.depth), a.dtype, transforms=swizzled(tile.depth, a.dtype)),
        plgpu.SMEM((stages, tile.columns, tile.depth), b.dtype, transforms=swizzled(tile.depth, b.dtype)),
        plgpu.SMEM((tile.rows, tile.columns), out.dtype, transforms=stored_transforms(whole, tile, out.dtype)),
        plgpu.TMEM((lanes, others), jnp.float32),
        # Both operands of a piece are loaded.
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        # A piece is multiplied, and its memory free; and all are.
        plgpu.Barrier(num_arrivals=1, num_barriers=stages, orders_tensor_core=True),
        plgpu.Barrier(num_arrivals=1, orders_tensor_core=True),
    ]
    part = tile.rows if whole else _PART
    body, name = functools.partial(_body, part=part, whole=whole), name_of_tile(part, tile.columns, tile.depth)
    return call(body, a, b, jobs.stacked(), scales, out, tile, name, scratch)


def _body(
    a: Any,
    b: Any,
    jobs: Any,
    groups: Any,
    *refs: Any,
    tile: Tile,
    dtype: Any,
    change_along_sum: bool,
    part: int,
    whole: bool,
) -> None:
    del change_along_sum
    *vectors, out, a_smem, b_smem, out_smem, total_tmem, loaded, free, done = refs
    job = Job.of(jobs, tile)

    def slot_of(step: Array) -> Array:
        return lax.rem(step, jnp.int32(tile.stages))

    def for_rows(run: Callable[[int], None]) -> None:
        """Runs for the first rows of a tile, as many parts as hold those that the block writes."""
        for rows in range(part, tile.rows + 1, part):
            end = job.skip + job.writes
            pl.when((end > rows - part) & (end <= rows))(lambda rows=rows: run(rows))

    def load(step: Array, _: None) -> None:
        slot = slot_of(step)
        pl.when(step >= tile.stages)(lambda: plgpu.barrier_wait(free.at[slot]))

        def copy(operand: Any, smem: Any, row: Array, rows: int, piece: Array) -> None:
            source = operand.at[pl.ds(row, rows), pl.ds(piece * tile.depth, tile.depth)]
            plgpu.copy_gmem_to_smem(source, smem.at[slot, pl.ds(0, rows)], loaded.at[slot])

        for_rows(lambda rows: copy(a, a_smem, job.a_row, rows, job.a_piece(step)))
        copy(b, b_smem, job.b_row + job.column, tile.columns, job.b_piece(step))

    def multiply(step: Array, _: None) -> None:
        slot = slot_of(step)
        plgpu.barrier_wait(loaded.at[slot])

        def mma(rows: int) -> None:
            first, second = a_smem.at[slot, pl.ds(0, rows)], b_smem.at[slot]
            if not whole:
                first, second = second, first
            total = total_tmem.at[:, pl.ds(0, second.shape[0])]
            plgpu.tcgen05_mma(total, first, second.transpose((1, 0)), free.at[slot], accumulate=step > 0)

        for_rows(mma)

    @plgpu.warp_map
    def _(warp: Array) -> None:
        @pl.when(warp == _LOADS)
        def _() -> None:
            lax.fori_loop(0, job.steps, load, None)

        @pl.when(warp == _MULTIPLIES)
        def _() -> None:
            lax.fori_loop(0, job.steps, multiply, None)
            plgpu.tcgen05_commit_arrive(done)

    plgpu.barrier_wait(done)
    layout = plgpu.Layout.TCGEN05
    total = plgpu.async_load_tmem(total_tmem, layout=layout)
    plgpu.wait_load_tmem()
    # Nothing was written for a block without rows.
    total = jnp.where(job.steps > 0, total * groups[job.group], 0.0)
    result = lax.convert_element_type(scaled(total, vectors, job, 0, tile, layout, transposed=not whole), dtype)
    store(result, out_smem, out, job, tile, jobs_are_whole=whole, transposed=not whole)
