"""What GPU kernels for Hopper and Blackwell have in common: operands in shared memory, scales, storing a tile."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from ..._jax.meshes import as_varying, varying_axes
from ..._jax.opaque import on_one_device
from .tiles import GroupedScales, Jobs, Tile


class Job(NamedTuple):
    """The work of one block, as the GPU kernel has read it."""

    a_row: Array
    b_row: Array
    out_row: Array
    skip: Array
    writes: Array
    steps: Array
    first: Array
    edges: Array
    group: Array
    column: Array

    @staticmethod
    def of(jobs: Any, tile: Tile) -> "Job":
        """The job of the calling block."""
        row, column = lax.axis_index("rows"), lax.axis_index("columns")
        fields = {name: jobs[i, row] for i, name in enumerate(Jobs._fields)}
        return Job(**fields, column=column * tile.columns)

    def a_piece(self, step: Array) -> Array:
        """The piece of `a` that a step multiplies."""
        last = jnp.where(step == self.steps - 1, self.edges + 1, self.first + step)
        return jnp.where(self.edges < 0, step, jnp.where(step == 0, self.edges, last))

    def b_piece(self, step: Array) -> Array:
        """The piece of `b` that a step multiplies."""
        return self.first + step


def swizzled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """How tiles lie in shared memory, for tensor cores to read and without conflicts between threads."""
    itemsize = np.dtype(dtype).itemsize
    swizzle = min(128, columns * itemsize)
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    return tiling((8, swizzle // itemsize)), swizzling(swizzle)


def scaled(
    x: Array, refs: Sequence[Any], job: Job, piece: Any, tile: Tile, layout: Any, *, transposed: bool = False
) -> Array:
    """A tile times the scales of its rows and columns.

    Args:
        x: The tile, in registers.
        refs: The scales of rows and columns; may be none.
        job: The block's work.
        piece: Which piece of the sum it is; 0 if all have the same.
        tile: The tile's size.
        layout: The tile's layout in registers.
        transposed: Whether the tile's columns are its first axis.
    """
    if not refs:
        return x
    rows, columns = refs
    vectors = (
        (rows.at[piece, pl.ds(job.a_row, tile.rows)], int(transposed)),
        (columns.at[piece, pl.ds(job.b_row + job.column, tile.columns)], int(not transposed)),
    )
    for ref, axis in vectors:
        line = plgpu.load(ref, layout=layout.reduce(1 - axis), optimized=False)
        x = x * plgpu.layout_cast(lax.broadcast_in_dim(line, x.shape, (axis,)), layout)
    return x


def stored_transforms(jobs_are_whole: bool, tile: Tile, dtype: Any) -> tuple[Any, ...]:
    """How a tile of the result lies in shared memory: as it is read best, unless single rows are read."""
    return swizzled(tile.columns, dtype) if jobs_are_whole else ()


def store(
    tile_value: Array, smem: Any, out: Any, job: Job, tile: Tile, *, jobs_are_whole: bool, transposed: bool = False
) -> None:
    """Writes a tile of the result, or those of its rows that are the block's.

    A copy needs a number of rows that is known when the GPU kernel is compiled: a partial tile is copied in parts of
    64, 32, ... rows, those among them that add up to its number.
    """
    columns = pl.ds(job.column, tile.columns)
    if jobs_are_whole:
        smem[...] = tile_value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out.at[pl.ds(job.out_row, tile.rows), columns])
    else:
        store_unoptimized(smem.transpose((1, 0)) if transposed else smem, tile_value)
        plgpu.commit_smem()
        begin, part = job.skip, tile.rows
        while part:

            @pl.when(job.writes & part != 0)
            def _(begin: Array = begin, part: int = part) -> None:
                rows = pl.ds(begin, part), pl.ds(job.out_row + begin, part)
                plgpu.copy_smem_to_gmem(smem.at[rows[0]], out.at[rows[1], columns])

            begin, part = begin + (job.writes & part), part // 2
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def call(
    body: Any,
    a: Float[Array, "a_rows a_depth"],
    b: Float[Array, "b_rows b_depth"],
    jobs: Int32[Array, "fields jobs"],
    scales: GroupedScales,
    out: jax.ShapeDtypeStruct,
    tile: Tile,
    name: str,
    scratch: Sequence[Any] = (),
) -> Float[Array, "out_rows columns"]:
    """Runs a GPU kernel's body in a block for each tile of the result."""
    vectors = [scale for scale in (scales.rows, scales.columns) if scale is not None]
    launch = plgpu.kernel(
        functools.partial(body, tile=tile, dtype=out.dtype, change_along_sum=scales.change_along_sum),
        out_type=out,
        grid=(jobs.shape[1], out.shape[1] // tile.columns),
        grid_names=("rows", "columns"),
        kernel_name=name,
        scratch_types=list(scratch),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    operands = (a, b, jobs, scales.groups, *vectors)
    if not any(map(varying_axes, operands)):
        return launch(*operands)
    return as_varying(on_one_device(launch, *operands), operands)


def store_unoptimized(ref: Any, value: Array) -> None:
    """Stores `value` in `ref`, whatever the layout.

    Since JAX 0.12 a plain assignment refuses layouts in which stores have bank conflicts, and `plgpu.store` takes them.
    JAX 0.11 has no `plgpu.store`, and an assignment takes them all.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
