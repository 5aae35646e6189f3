"""A grouped product on Hopper: `wgmma` multiplies FP8 of both formats from shared memory into registers."""

import functools
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


def hopper_product(
    a: Float[Array, "a_rows a_depth"],
    b: Float[Array, "b_rows b_depth"],
    jobs: Jobs,
    scales: GroupedScales,
    out: jax.ShapeDtypeStruct,
    tile: Tile,
    *,
    fast: bool,
    whole: bool,
) -> Float[Array, "out_rows columns"]:
    """`a @ b.T` for each job, times the scales, rounded once.

    Tensor cores of Hopper add FP8 products with some 14 bits. Unless that will do, each piece is summed alone and added
    in float32, as cuBLASLt does without fast accumulation.

    Args:
        a: FP8 of either format.
        b: FP8 of either format.
        jobs: What each row of blocks does.
        scales: The scales of both operands.
        out: Shape and dtype of the result.
        tile: The tiles.
        fast: Whether tensor cores add up all pieces.
        whole: Whether all tiles of the result are whole.
    """
    assert not (fast and scales.change_along_sum)
    body = functools.partial(_body, fast=fast, whole=whole)
    name = name_of_tile(tile.rows, tile.columns, tile.depth)
    return call(body, a, b, jobs.stacked(), scales, out, tile, name)


def _body(
    a: Any,
    b: Any,
    jobs: Any,
    groups: Any,
    *refs: Any,
    tile: Tile,
    dtype: Any,
    change_along_sum: bool,
    fast: bool,
    whole: bool,
) -> None:
    *vectors, out = refs
    job = Job.of(jobs, tile)
    shape, layout = (tile.rows, tile.columns), plgpu.Layout.WGMMA
    transforms = swizzled(tile.depth, a.dtype)
    specs = [
        plgpu.BlockSpec((rows, tile.depth), piece, transforms=transforms, delay_release=int(fast))
        for rows, piece in (
            (tile.rows, lambda step: (0, job.a_piece(step))),
            (tile.columns, lambda step: (0, job.b_piece(step))),
        )
    ]
    operands = a.at[pl.ds(job.a_row, tile.rows)], b.at[pl.ds(job.b_row + job.column, tile.columns)]
    pipeline = functools.partial(
        plgpu.emit_pipeline, grid=(job.steps,), in_specs=specs, max_concurrent_steps=tile.stages
    )

    def multiply(into: Any, a: Any, b: Any) -> None:
        plgpu.wgmma(into, a, b.transpose((1, 0)))

    def all_pieces(into: Any) -> Array:
        def add_to_sum(_: Any, a: Any, b: Any) -> None:
            multiply(into, a, b)
            # The piece before is multiplied, and its memory free, which `delay_release` lets the pipeline rely on.
            plgpu.wgmma_wait(1)

        pipeline(add_to_sum)(*operands)
        return into[...]

    def add_piece(indices: tuple[Array, ...], a: Any, b: Any, total: Array) -> Array:
        def one_piece(into: Any) -> Array:
            multiply(into, a, b)
            return into[...]

        piece = pl.run_scoped(one_piece, plgpu.ACC(shape))
        if change_along_sum:
            piece = scaled(piece, vectors, job, job.b_piece(indices[0]), tile, layout)
        return total + piece

    if fast:
        total = pl.run_scoped(all_pieces, plgpu.ACC(shape))
    else:
        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
        total = pipeline(add_piece, init_carry=zero)(*operands)
    total = total * groups[job.group]
    if not change_along_sum:
        total = scaled(total, vectors, job, 0, tile, layout)
    result = lax.convert_element_type(total, dtype)
    pl.run_scoped(
        lambda smem: store(result, smem, out, job, tile, jobs_are_whole=whole),
        plgpu.SMEM(shape, dtype, transforms=stored_transforms(whole, tile, dtype)),
    )
