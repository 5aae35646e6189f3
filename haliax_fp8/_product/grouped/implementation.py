"""Which implementation of grouped products a device has, and operands and scales as it takes them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from ..._jax.meshes import automatic_axes
from ..._numerics.quantized_array import QuantizedArray
from ...devices.device import Device
from ...devices.grouped import BLOCK, GroupedImplementation
from ...recipes.recipe import ProductName, Recipe
from ...recipes.support import Outcome, supported_in_groups
from .tiles import (
    FP8,
    ROWS,
    GroupedScales,
    Jobs,
    Tile,
    alike,
    groups_jobs,
    lines,
    padded,
    rows_jobs,
    with_edges,
    within_bounds,
)


_SIXTEEN_BITS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def implementation_for(recipe: Recipe, *, allow_dense: bool) -> GroupedImplementation:
    """What multiplies groups on the device that this is traced for.

    Args:
        recipe: How operands are quantized.
        allow_dense: Whether to fall back on XLA's dense products where the device has nothing else.

    Raises:
        ValueError: If the device has none for the recipe, and dense products are not allowed.
    """
    support = supported_in_groups(recipe, Device.default())
    implementation = GroupedImplementation.of(support.device)
    if support.outcome is not Outcome.REFUSED and implementation is not None:
        return GroupedImplementation.XLA if allow_dense and _is_divided_by_xla(implementation) else implementation
    if not allow_dense:
        raise ValueError(
            f"a grouped product with the recipe {recipe} cannot run in FP8: {support.reason}. Choose another recipe; "
            "or leave these layers in high precision, with Fp8Config(exclude=...); or let every row be multiplied by "
            "the kernels of all groups, with Fp8Config(allow_dense_groups=True)"
        )
    return GroupedImplementation.XLA


def _is_divided_by_xla(implementation: GroupedImplementation) -> bool:
    """Whether XLA divides work inside a `shard_map` over a part of the mesh; on TPUs it has no dense product in FP8."""
    is_manual = bool(jax.sharding.get_abstract_mesh().manual_axes)
    return is_manual and bool(automatic_axes()) and implementation is not GroupedImplementation.TPU


def takes(a: QuantizedArray, b: QuantizedArray) -> bool:
    """Whether Pallas kernels multiply such data: FP8, or what a recipe leaves in 16 bits. XLA takes empty operands."""
    known = (*FP8, *_SIXTEEN_BITS)
    return all(x.data.dtype in known and x.data.size for x in (a, b))


def grouped_product(
    implementation: GroupedImplementation,
    product: ProductName,
    a: QuantizedArray,
    b: QuantizedArray,
    group_sizes: Int[Array, "*members groups"],
    precision: lax.PrecisionLike,
    dtype: np.dtype,
    group_scale: Float32[Array, "*members groups"] | None = None,
) -> Float[Array, "..."]:
    """fprop, dgrad or wgrad of groups, by a device's implementation.

    Args:
        implementation: The device's; not XLA's.
        product: Which of the three.
        a: The rows `[*members, rows, sum]`; of wgrad the inputs `[*members, rows, inputs]`.
        b: The kernels `[*members, groups, inputs, outputs]`; of wgrad the output gradients.
        group_sizes: How many rows each group has.
        precision: DEFAULT lets Hopper's tensor cores add up with fewer bits than float32 has.
        dtype: The dtype of the result.
        group_scale: The scale of both operands for each group, instead of theirs.

    Raises:
        ValueError: If the implementation does not take the scales of the operands.
    """
    *members, groups = group_sizes.shape
    if group_scale is None:
        group_scale = _scale_of_groups(a, b, group_sizes.shape, is_wgrad=product == "wgrad")
    if members and group_scale is None:
        # Rows and columns have scales, other ones for each member.
        one = lambda member: grouped_product(implementation, product, member[0], member[1], member[2], precision, dtype)
        return lax.map(one, (a, b, group_sizes))
    sizes = within_bounds(group_sizes.reshape(-1, groups), a.data.shape[len(members)])
    flat = None if group_scale is None else group_scale.reshape(-1)
    if implementation is GroupedImplementation.TPU:
        from .tpu import tpu_product

        out = tpu_product(product, a, b, sizes, a.data.shape[len(members)], flat, dtype)
        return out.reshape(*members, *([groups] if product == "wgrad" else [-1]), *out.shape[1:])
    work = _Work(implementation, sizes, a.data.shape[len(members)], flat, precision == lax.Precision.DEFAULT, dtype)
    if product == "wgrad":
        out = work.sums_over_groups(a, b)
        return out.reshape(*members, groups, *out.shape[1:])
    out = work.rows_by_kernels(a, b, inputs_are_summed=product == "fprop")
    return out.reshape(*members, -1, out.shape[1])


@dataclasses.dataclass(frozen=True)
class _Work:
    """A grouped product, but for its operands.

    Args:
        implementation: What multiplies.
        sizes: Of each member's groups.
        rows: How many rows a member has.
        group_scale: The scale of both operands for each group; None if rows and columns have their own.
        fast: Whether fewer bits will do for the sum.
        dtype: The dtype of the result.
    """

    implementation: GroupedImplementation
    sizes: Int32[Array, "members groups"]
    rows: int
    group_scale: Float32[Array, " all_groups"] | None
    fast: bool
    dtype: np.dtype

    def rows_by_kernels(
        self, a: QuantizedArray, b: QuantizedArray, *, inputs_are_summed: bool
    ) -> Float[Array, "all_rows columns"]:
        """Each row times its group's kernel, over the kernel's inputs or outputs."""
        (x, kernel), depth = alike(a.data, b.data), a.data.shape[-1]
        x, kernel = x.reshape(-1, depth), kernel.reshape(-1, *kernel.shape[-2:])
        # Tensor cores read FP8 along the sum.
        kernel = jnp.swapaxes(kernel, 1, 2) if inputs_are_summed else kernel
        columns, pieces, vectors = kernel.shape[1], 1, ()
        if self.group_scale is None:
            pieces = self._pieces((a, 1), (b, 1 if inputs_are_summed else 2))
            shape = (pieces, columns) if inputs_are_summed else (columns, pieces)
            column_scales = lines(b, (self.sizes.size, *shape))
            vectors = lines(a, (self.rows, pieces)).T, jnp.moveaxis(column_scales, 1 if inputs_are_summed else 2, 0)
        fast = self.fast and pieces == 1
        tile = self._tile(x.dtype, columns, depth, fast=fast, blocks=pieces > 1)
        total = len(x)
        x, kernel = padded(x, (ROWS, tile.depth), least=tile.rows), padded(kernel, (1, tile.columns, tile.depth))
        if vectors:
            column_scales = padded(vectors[1], (1, 1, tile.columns)).reshape(pieces, -1)
            vectors = padded(vectors[0].T, (ROWS, 1), least=tile.rows).T, column_scales
        jobs = rows_jobs(self.sizes, self.rows, len(x), kernel.shape[1], tile, x.shape[1])
        shape, kernel = (len(x), kernel.shape[1]), kernel.reshape(-1, kernel.shape[2])
        out = self._run(x, kernel, jobs, vectors, shape, tile, fast=fast, whole=False)
        return out[:total, :columns]

    def sums_over_groups(self, a: QuantizedArray, b: QuantizedArray) -> Float[Array, "all_groups width columns"]:
        """For each group, the sum of the outer products of its rows."""
        x, y = alike(a.data, b.data)
        x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        width, columns, pieces, vectors = x.shape[1], y.shape[1], 1, ()
        if self.group_scale is None:
            pieces = self._pieces((a, 0), (b, 0))
            vectors = lines(a, (pieces, width)), lines(b, (pieces, columns))
        tile = self._tile(x.dtype, columns, self.rows, fast=False, blocks=pieces > 1)
        x, y = padded(x, (tile.depth, tile.rows)), padded(y, (tile.depth, tile.columns))
        if vectors:
            vectors = padded(vectors[0], (1, tile.rows)), padded(vectors[1], (1, tile.columns))
        jobs = groups_jobs(self.sizes, self.rows, len(x), x.shape[1], tile)
        edged, shape = with_edges(x, self.sizes, self.rows, tile.depth), (self.sizes.size * x.shape[1], y.shape[1])
        out = self._run(edged.T, y.T, jobs, vectors, shape, tile, fast=False, whole=True)
        return out.reshape(self.sizes.size, -1, out.shape[1])[:, :width, :columns]

    def _run(
        self,
        a: Array,
        b: Array,
        jobs: Jobs,
        vectors: tuple[Array, ...],
        shape: tuple[int, int],
        tile: Tile,
        *,
        fast: bool,
        whole: bool,
    ) -> Array:
        # Pallas and its compiler take half a second to import; most programs have no experts.
        from .blackwell import blackwell_product
        from .hopper import hopper_product

        ones = self.group_scale
        if ones is None:
            ones = jnp.ones(self.sizes.size, jnp.float32)
        scales, out = GroupedScales(ones, *vectors), jax.ShapeDtypeStruct(shape, self.dtype)
        if self.implementation is GroupedImplementation.BLACKWELL:
            return blackwell_product(a, b, jobs, scales, out, tile, whole=whole)
        return hopper_product(a, b, jobs, scales, out, tile, fast=fast, whole=whole)

    def _tile(self, dtype: np.dtype, columns: int, depth: int, *, fast: bool, blocks: bool) -> Tile:
        """The tiles of a product.

        What lies beyond a group's last row is multiplied in vain, so small groups have small tiles.

        Args:
            dtype: Of the data.
            columns: Of the result.
            depth: How much is summed.
            fast: Whether one sum is kept. Two of 128 rows do not fit into Hopper's registers.
            blocks: Whether each piece of the sum has scales, which are those of `BLOCK` elements.
        """
        is_hopper = self.implementation is GroupedImplementation.HOPPER
        are_small = depth <= 64 or self.rows < 1024 * self.sizes.shape[1]
        rows = 64 if is_hopper and (are_small or not fast) else 128
        deep = BLOCK if blocks else (64 if are_small else 128) // dtype.itemsize
        # Columns are lanes of Blackwell's tensor memory, of which there are 128.
        return Tile(rows, 64 if is_hopper and columns <= 64 else 128, deep)

    def _pieces(self, *operands: tuple[QuantizedArray, int]) -> int:
        """How many parts of the sum have scales of their own, which is along the axis given with each operand."""
        pieces = 1
        for x, axis in operands:
            if x.scale.ndim == 0 or x.scale.shape[axis] == 1:
                continue
            size = x.data.shape[axis]
            block = size // x.scale.shape[axis] if x.block is None else x.block[axis]
            if block != BLOCK or self.implementation is not GroupedImplementation.HOPPER:
                raise ValueError(
                    f"recipe has a scale for each {block} elements of a sum, which the grouped Pallas kernel for "
                    f"{self.implementation.value} does not take; use a recipe that supported_in_groups calls native"
                )
            pieces = -(-size // BLOCK)
        return pieces


def _scale_of_groups(
    a: QuantizedArray, b: QuantizedArray, shape: tuple[int, ...], *, is_wgrad: bool
) -> Float32[Array, "*members groups"] | None:
    """The scales of both operands multiplied, where each has one for a group, a member or all; else None."""
    both = jnp.ones(shape, jnp.float32)
    for x, leading in ((a, len(shape) - 1), (b, len(shape) - is_wgrad)):
        if any(count > 1 for count in x.scale.shape[leading:]):
            return None
        leading_scale = x.scale.reshape(x.scale.shape[:leading])
        both = both * leading_scale.reshape(leading_scale.shape + (1,) * (len(shape) - leading_scale.ndim))
    return both
