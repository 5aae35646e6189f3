"""Products and sums that are divided over the devices of a mesh."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec as P, Sharding
from jaxtyping import Array, Float, Float32

from .._jax.custom_partitioning import knows_devices, lower_after_partitioning
from .._jax.primitives import define, mapped_in_front
from .._jax.xla import lowered_for_cuda
from .._numerics.quantized_array import QuantizedArray
from .dimensions import DotDimensions
from .scaled_product import aval_of, dot_times_scale, is_exact


type Factors = tuple[str, ...]
"""A name for each axis of an array; axes of the same name have the same size and are divided alike."""


def special_factors(rule: str, summed: Collection[str], whole: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Which factors of a rule for Shardy are summed, and which stay whole, as `custom_partitioning` takes it."""
    # In the order of the rule.
    names = dict.fromkeys(re.findall(r"\w+", rule))
    return {
        "reduction_factors": tuple(name for name in names if name in summed and name not in whole),
        "need_replication_factors": tuple(name for name in names if name in whole),
    }


@dataclasses.dataclass(frozen=True)
class ArraySharding:
    """An array as XLA would hand it over: its factors, the mesh axes over which each is divided, its size in bytes."""

    factors: Factors
    spec: tuple[tuple[str, ...], ...]
    bytes: int

    @staticmethod
    def of(array: Any, factors: Factors) -> "ArraySharding":
        """An operand or result, as `custom_partitioning` describes it."""
        parts = [*array.sharding.spec, *[None] * len(factors)][: len(factors)]
        spec = tuple(part if isinstance(part, tuple) else () if part is None else (part,) for part in parts)
        return ArraySharding(factors, spec, math.prod(array.shape) * array.dtype.itemsize)

    def factor_over(self, axis: str) -> str | None:
        """The factor that a mesh axis divides; None if it divides none."""
        return next((factor for factor, axes in zip(self.factors, self.spec, strict=True) if axis in axes), None)

    def bytes_over(self, axis: str, sizes: Mapping[str, int]) -> float:
        """The bytes that devices hold together if they differ only in this mesh axis."""
        others = [other for axes in self.spec for other in axes if other != axis]
        return self.bytes / math.prod(sizes[other] for other in others)


@dataclasses.dataclass(frozen=True)
class Partition:
    """Each device's share of a product's factors, and what turns that into its part of the result.

    Args:
        mesh: The mesh.
        axes: The mesh axes that divide each factor.
        scattered: Mesh axes that divide a sum, and the position of the result's axis over which its parts are spread.
        added: Mesh axes that divide a sum that every device needs as a whole.
        gathered: Mesh axes that divide an axis of the result that every device needs as a whole, and its position.
        out_axes: The mesh axes that divide each axis of the result in the end.
    """

    mesh: Any
    axes: Mapping[str, tuple[str, ...]]
    scattered: tuple[tuple[str, int], ...]
    added: tuple[str, ...]
    gathered: tuple[tuple[str, int], ...]
    out_axes: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(
        mesh: Any,
        operands: tuple[ArraySharding, ArraySharding],
        out: ArraySharding,
        sizes: Mapping[str, int],
        *,
        whole: Collection[str] = (),
        free_factor: str | None = None,
    ) -> "Partition":
        """Each mesh axis divides one factor of all arrays that have it, the one that moves the fewest bytes.

        Over an axis that divides a sum, partial sums are added up in the result's dtype: to the part that the device
        keeps, if the result is divided over that axis.

        Args:
            mesh: The mesh.
            operands: Both operands, as XLA has divided them.
            out: The result, as XLA has divided it.
            sizes: The size of each factor.
            whole: Factors that are not divided.
            free_factor: What any mesh axis may divide, even one over which XLA has divided nothing. Without it, devices
                that differ in such an axis all compute the same.
        """
        chosen = _chosen(mesh.shape, operands, out, sizes, whole, free_factor)
        axes = dict.fromkeys(sizes, ()) | {factor: tuple(divisors) for factor, divisors in chosen.items()}
        out_axes = [axes[factor] for factor in out.factors]
        left = [sizes[f] // math.prod(mesh.shape[axis] for axis in axes[f]) for f in out.factors]
        summed = [axis for factor in sizes if factor not in out.factors for axis in axes[factor]]
        scattered = []
        for axis in summed:
            position = next((position for position, axes_there in enumerate(out.spec) if axis in axes_there), None)
            if position is not None and left[position] % mesh.shape[axis] == 0:
                scattered.append((axis, position))
                out_axes[position] += (axis,)
                left[position] //= mesh.shape[axis]
        gathered = [(axis, position) for position, factor in enumerate(out.factors) for axis in axes[factor]]
        gathered = [(axis, position) for axis, position in gathered if axis not in out.spec[position]]
        for axis, position in gathered:
            out_axes[position] = tuple(other for other in out_axes[position] if other != axis)
        added = tuple(axis for axis in summed if axis not in dict(scattered))
        return Partition(mesh, axes, tuple(scattered), added, tuple(gathered), tuple(out_axes))

    def finished(self, part: Array) -> Array:
        """A device's part of the result, from what it has computed."""
        for axis, position in self.scattered:
            part = lax.psum_scatter(part, axis, scatter_dimension=position, tiled=True)
        part = lax.psum(part, self.added) if self.added else part
        for axis, position in reversed(self.gathered):
            part = lax.all_gather(part, axis, axis=position, tiled=True)
        return part

    def sharding(self, factors: Factors) -> NamedSharding:
        """The sharding of an operand; factors that the product does not know are whole."""
        return self._sharding([self.axes.get(factor, ()) for factor in factors])

    @property
    def result_sharding(self) -> NamedSharding:
        """The sharding of the result."""
        return self._sharding(self.out_axes)

    def _sharding(self, parts: Sequence[tuple[str, ...]]) -> NamedSharding:
        return NamedSharding(self.mesh, P(*(axes or None for axes in parts)))


def _chosen(
    mesh: Mapping[str, int],
    operands: tuple[ArraySharding, ArraySharding],
    out: ArraySharding,
    sizes: Mapping[str, int],
    whole: Collection[str],
    free_factor: str | None,
) -> dict[str, list[str]]:
    """The mesh axes that divide each factor."""
    chosen: dict[str, list[str]] = {}
    arrays = (out, *operands)
    in_use = dict.fromkeys(axis for array in arrays for axes in array.spec for axis in axes)
    for axis in in_use if free_factor is None else dict.fromkeys([*in_use, *mesh]):

        def fits(factor: str, axis: str = axis) -> bool:
            devices = math.prod(mesh[other] for other in chosen.get(factor, ())) * mesh[axis]
            return factor not in whole and sizes[factor] % devices == 0

        result_factor = out.factor_over(axis)
        fitting = [
            factor
            for factor in dict.fromkeys([*(array.factor_over(axis) for array in arrays), free_factor])
            # XLA has divided what reads the result. It cannot always move a result from one axis to another.
            if factor and (result_factor in (None, factor) or factor not in out.factors)
            if fits(factor)
        ]
        if fitting:
            best = min(fitting, key=lambda factor: _sent(factor, axis, mesh, operands, out))
            chosen.setdefault(best, []).append(axis)
    return chosen


def _sent(
    factor: str, axis: str, mesh: Mapping[str, int], operands: tuple[ArraySharding, ArraySharding], out: ArraySharding
) -> float:
    """About how many bytes devices receive if a mesh axis divides a factor; to divide another one, XLA gathers."""
    share = (mesh[axis] - 1) / mesh[axis]
    total = sum(x.bytes_over(axis, mesh) for x in operands if x.factor_over(axis) not in (None, factor))
    result_factor = out.factor_over(axis)
    if factor not in out.factors:
        total += out.bytes_over(axis, mesh) * (2 if result_factor is None else 1)
    elif result_factor != factor:
        total += out.bytes_over(axis, mesh)
    return total * share


@dataclasses.dataclass(frozen=True)
class PartitionedProduct:
    """A product on a mesh: of data and exponents, `product(lhs, of_lhs, rhs, of_rhs)`; or with one scale for all, which
    is an array of one element, `product(lhs, rhs, scale)`.

    Each axis of its arrays is named by a factor: `b` for batch axes, `m` and `n` for the free ones of lhs and rhs, `c`
    for those that are summed, the last of them in blocks.

    Args:
        dimensions: What is contracted; blocks run along the last pair of axes.
        block: How many elements of the last contracted axis share a scale; None with one scale.
        blocks: How many blocks that axis has.
    """

    dimensions: DotDimensions
    block: int | None = None
    blocks: int = 1

    @functools.cached_property
    def lhs(self) -> Factors:
        """The factors of lhs."""
        dims = self.dimensions
        return _named(dims.lhs_ndim, b=dims.lhs_batch, m=dims.lhs_free, c=dims.lhs_contract)

    @functools.cached_property
    def rhs(self) -> Factors:
        """The factors of rhs."""
        dims = self.dimensions
        return _named(dims.rhs_ndim, b=dims.rhs_batch, n=dims.rhs_free, c=dims.rhs_contract)

    @functools.cached_property
    def out(self) -> Factors:
        """The factors of the result."""
        lhs_axes, rhs_axes = self.dimensions.lhs_batch + self.dimensions.lhs_free, self.dimensions.rhs_free
        return (*(self.lhs[axis] for axis in lhs_axes), *(self.rhs[axis] for axis in rhs_axes))

    @property
    def _last(self) -> str:
        return f"c{len(self.dimensions.lhs_contract) - 1}"

    @property
    def rule(self) -> str:
        """The rule for Shardy: which axes belong together; elements of a block stay together."""
        if self.block is None:
            return f"{' '.join(self.lhs)}, {' '.join(self.rhs)}, one -> {' '.join(self.out)}"
        # Shardy takes no factor of size one beside others.
        in_blocks = f"({self._last} element)" if self.blocks > 1 else "element"
        data = lambda axes: " ".join(in_blocks if axis == self._last else axis for axis in axes)
        arrays = data(self.lhs), " ".join(self.lhs), data(self.rhs), " ".join(self.rhs)
        return f"{', '.join(arrays)} -> {' '.join(self.out)}"

    @property
    def named(self) -> dict[str, Any]:
        """What the rule does not say."""
        size = {"element": self.block} if self.block is not None and self.blocks > 1 else {}
        summed = [f"c{i}" for i in range(len(self.dimensions.lhs_contract))]
        return {**size, **special_factors(self.rule, summed, ["element"])}

    def partition(self, product: Callable[..., Array], mesh: Any, args: Sequence[Any], result: Any) -> Any:
        """What each device computes of its parts, as `custom_partitioning` asks for it.

        Args:
            product: What a device computes of its part.
            mesh: The mesh.
            args: What `product` takes: shapes, dtypes and the shardings that XLA has found.
            result: The same of the result.
        """
        positions = (0, 1) if self.block is None else (0, 2)
        lhs, rhs = (ArraySharding.of(args[i], axes) for i, axes in zip(positions, (self.lhs, self.rhs), strict=True))
        lhs_shape, rhs_shape = (args[i].shape for i in ((0, 1) if self.block is None else (1, 3)))
        sizes = dict(zip(self.lhs + self.rhs, (*lhs_shape, *rhs_shape), strict=True))
        partition = Partition.of(mesh, (lhs, rhs), ArraySharding.of(result, self.out), sizes)

        def on_each(*arrays: Array) -> Array:
            return partition.finished(product(*arrays))

        lhs_sharding, rhs_sharding, scale_sharding = (
            partition.sharding(axes) for axes in (self.lhs, self.rhs, ("one",))
        )
        shardings = (
            (lhs_sharding, rhs_sharding, scale_sharding)
            if self.block is None
            else (lhs_sharding, lhs_sharding, rhs_sharding, rhs_sharding)
        )
        return mesh, on_each, partition.result_sharding, shardings


def _named(ndim: int, **by_letter: tuple[int, ...]) -> Factors:
    names = {axis: f"{letter}{i}" for letter, axes in by_letter.items() for i, axis in enumerate(axes)}
    return tuple(names[axis] for axis in range(ndim))


def scaled_by_each_device(
    a: QuantizedArray,
    b: QuantizedArray,
    scale: Float32[Array, ""],
    dimensions: DotDimensions,
    precision: lax.PrecisionLike,
    dtype: np.dtype,
) -> Float[Array, "..."]:
    """Like `scaled_product`, where devices add up their parts of the result.

    Args:
        a: The first operand.
        b: The second.
        scale: The product of their scales.
        dimensions: What is contracted.
        precision: The precision of the product.
        dtype: The dtype of the result.
    """
    params = {"dimensions": dimensions, "precision": precision, "dtype": dtype, "exact": is_exact(a, b, dtype)}
    return divided_sum_p.bind(a.data, b.data, lax.reshape(scale, (1,)), **params)


def _of_part(a: Array, b: Array, scale: Array, **params: Any) -> Array:
    """The product of what one device has."""
    return dot_times_scale(a, b, lax.squeeze(scale, (0,)), **params)


def _batched(args: Any, axes: Any, *, dimensions: DotDimensions, exact: bool, **params: Any) -> tuple[Array, int]:
    """The mapped axis is a batch axis of both operands."""
    (a, b, scale), (*axes, scale_axis) = args, axes
    if scale_axis is not None:
        # Not in the dtype: for which platform is not known yet.
        each = functools.partial(_of_part, dimensions=dimensions, in_dtype=False, **params)
        return jax.vmap(each, in_axes=(*axes, scale_axis))(a, b, scale), 0
    a, b = mapped_in_front((a, b), axes)
    dimensions, out_axis = dimensions.with_batch_axis()
    return divided_sum_p.bind(a, b, scale, dimensions=dimensions, exact=exact, **params), out_axis


def _lowered(context: Any, *operands: Any, dimensions: DotDimensions, exact: bool, **params: Any) -> Any:
    # A switch between platforms, as on one device, would be divided with what surrounds it.
    in_dtype = exact and lowered_for_cuda(context)
    product = functools.partial(_of_part, dimensions=dimensions, in_dtype=in_dtype, **params)
    if not knows_devices(context):
        return mlir.lower_fun(product, multiple_results=False)(context, *operands)
    partitioned = PartitionedProduct(dimensions)
    return lower_after_partitioning(
        context,
        *operands,
        name="a product with one scale",
        function=product,
        part=product,
        rule=partitioned.rule,
        sizes=partitioned.named,
        partition=partitioned.partition,
        remedy="choose another recipe",
    )


divided_sum_p = define("fp8_divided_sum", aval=aval_of, batch=_batched, lower=_lowered, with_devices=True)


# --- What is sent once, or computed again -----------------------------------------------------------------------------


def recomputed_unless_sent(saved: Array, recomputed: Array, *, in_blocks: bool = False) -> Array:
    """Of two arrays with the same values, the first if devices would have to send each other the second; else that.

    `saved` is in memory since the forward pass, `recomputed` follows from what is in memory anyway. XLA knows only when
    it has divided the program whether devices hold parts of an array, and which parts its user needs. On one device,
    inside `shard_map` and on TPUs, whose compiler does not ask, the second array is used. XLA drops the other one.

    Args:
        saved: The array that is sent once, for its other user and for this one.
        recomputed: The array computed again.
        in_blocks: Whether its user is a product of blocks, which says what its devices need only after this is
            decided: several devices then take the first array.
    """
    return recomputed_unless_sent_p.bind(saved, recomputed, in_blocks=in_blocks)


def _recomputed_unless_sent_batched(args: Any, axes: Any, *, in_blocks: bool) -> tuple[Array, int]:
    return recomputed_unless_sent_p.bind(*mapped_in_front(args, axes), in_blocks=in_blocks), 0


def _recomputed_unless_sent_lowered(context: Any, saved: Any, recomputed: Any, *, in_blocks: bool) -> Any:
    if not knows_devices(context):
        return [recomputed]
    if in_blocks:
        return [saved]
    ndim = context.avals_in[0].ndim
    # Each array has axes of its own: the user alone says how it needs the result divided.
    arrays = [" ".join(f"{letter}{axis}" for axis in range(ndim)) for letter in "sro"]
    return lower_after_partitioning(
        context,
        saved,
        recomputed,
        name="a kernel",
        function=_second,
        part=_second,
        rule=f"{arrays[0]}, {arrays[1]} -> {arrays[2]}",
        # A mesh has no name for every way in which XLA divides an array.
        sizes={"decode_shardings": False},
        partition=_recomputed_unless_sent_partition,
        remedy="choose another KernelResidual",
    )


def _first(saved: Array, recomputed: Array) -> Array:
    del recomputed
    return saved


def _second(saved: Array, recomputed: Array) -> Array:
    del saved
    return recomputed


def _recomputed_unless_sent_partition(part: Any, mesh: Any, args: Sequence[Any], result: Any) -> Any:
    """What each device takes, as `custom_partitioning` asks for it."""
    del part
    saved, recomputed = (x.sharding for x in args)
    if _covers(recomputed, result.sharding, result.shape):
        return mesh, _second, result.sharding, (saved, result.sharding)
    return mesh, _first, result.sharding, (result.sharding, recomputed)


def _covers(sharding: Sharding, needed: Sharding, shape: tuple[int, ...]) -> bool:
    """Whether each device can cut what it needs of an array out of its part in a sharding."""
    if sharding.is_fully_replicated or sharding.is_equivalent_to(needed, len(shape)):
        return True
    parts = (x.devices_indices_map(shape) for x in (sharding, needed))
    local_parts, needed_parts = ({device: _ends(x, shape) for device, x in part.items()} for part in parts)
    return all(
        begin <= needed_begin and needed_end <= end
        for device, ends in local_parts.items()
        for (begin, end), (needed_begin, needed_end) in zip(ends, needed_parts[device], strict=True)
    )


def _ends(indices: Sequence[slice], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Where a part of an array begins and ends along each axis."""
    return [index.indices(size)[:2] for index, size in zip(indices, shape, strict=True)]


recomputed_unless_sent_p = define(
    "fp8_recomputed_unless_sent",
    aval=lambda saved, recomputed, in_blocks: recomputed,
    batch=_recomputed_unless_sent_batched,
    lower=_recomputed_unless_sent_lowered,
    with_devices=True,
)
