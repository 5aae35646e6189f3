"""How a product that XLA does not see is divided over devices: what stays divided, what is gathered or added up.

XLA divides its own products by such a rule. Here it is spelled out, because XLA does not see these products until it
has divided everything else.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array

from .dimensions import DotDimensions


type _Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class DividedProduct:
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
    def lhs(self) -> _Axes:
        """The factors of lhs."""
        dims = self.dimensions
        return _named(dims.lhs_ndim, b=dims.lhs_batch, m=dims.lhs_free, c=dims.lhs_contract)

    @functools.cached_property
    def rhs(self) -> _Axes:
        """The factors of rhs."""
        dims = self.dimensions
        return _named(dims.rhs_ndim, b=dims.rhs_batch, n=dims.rhs_free, c=dims.rhs_contract)

    @functools.cached_property
    def out(self) -> _Axes:
        """The factors of the result."""
        of_lhs, of_rhs = self.dimensions.lhs_batch + self.dimensions.lhs_free, self.dimensions.rhs_free
        return (*(self.lhs[axis] for axis in of_lhs), *(self.rhs[axis] for axis in of_rhs))

    @property
    def _last(self) -> str:
        return f"c{len(self.dimensions.lhs_contract) - 1}"

    @property
    def rule(self) -> str:
        """For Shardy: which axes belong together; elements of a block stay together."""
        if self.block is None:
            return f"{' '.join(self.lhs)}, {' '.join(self.rhs)}, one -> {' '.join(self.out)}"
        # Shardy takes no factor of size one beside others.
        in_blocks = f"({self._last} element)" if self.blocks > 1 else "element"
        data = lambda axes: " ".join(in_blocks if axis == self._last else axis for axis in axes)
        arrays = data(self.lhs), " ".join(self.lhs), data(self.rhs), " ".join(self.rhs)
        return f"{', '.join(arrays)} -> {' '.join(self.out)}"

    @property
    def sizes(self) -> dict[str, Any]:
        """What the rule does not show."""
        summed = tuple(f"c{i}" for i in range(len(self.dimensions.lhs_contract)))
        if self.block is None:
            return {"reduction_factors": summed}
        size = {"element": self.block} if self.blocks > 1 else {}
        return {**size, "reduction_factors": summed, "need_replication_factors": ("element",)}

    def partition(self, product: Callable[..., Array], mesh: Any, args: Sequence[Any], result: Any) -> Any:
        """What each device computes of its parts, as `custom_partitioning` asks for it.

        Each mesh axis divides one factor of all arrays that have it, the one that moves the fewest bytes. Over an axis
        that divides a sum, partial sums are added up in the result's dtype: to the part that the device keeps, if the
        result is divided over that axis.

        Args:
            product: What a device computes of its part.
            mesh: The mesh.
            args: What `product` takes: shapes, dtypes and the shardings that XLA has found.
            result: The same of the result.
        """
        *places, of_sizes = (0, 1, (0, 1)) if self.block is None else (0, 2, (1, 3))
        lhs, rhs = (_Held.of(args[place], axes) for place, axes in zip(places, (self.lhs, self.rhs), strict=True))
        out = _Held.of(result, self.out)
        sizes = dict(zip(self.lhs + self.rhs, (n for place in of_sizes for n in args[place].shape), strict=True))
        chosen = _chosen(mesh.shape, (lhs, rhs), out, sizes)
        divided = dict.fromkeys(sizes, ()) | {factor: tuple(axes) for factor, axes in chosen.items()}
        scattered, kept = [], {place: divided[factor] for place, factor in enumerate(self.out)}
        left = {place: size // _count(mesh, divided[factor]) for place, factor, size in out.axes(result.shape)}
        summed = [axis for factor in sizes if factor not in self.out for axis in divided[factor]]
        for axis in summed:
            place = next((p for p, axes in enumerate(out.spec) if axis in axes), None)
            if place is not None and left[place] % mesh.shape[axis] == 0:
                scattered.append((axis, place))
                kept[place] += (axis,)
                left[place] //= mesh.shape[axis]
        added = tuple(axis for axis in summed if axis not in [axis for axis, _ in scattered])

        gathered = [(axis, place) for place, factor in enumerate(self.out) for axis in divided[factor]]
        gathered = [(axis, place) for axis, place in gathered if axis not in out.spec[place]]
        for axis, place in gathered:
            kept[place] = tuple(other for other in kept[place] if other != axis)

        def on_each(*arrays: Array) -> Array:
            part = product(*arrays)
            for axis, place in scattered:
                part = lax.psum_scatter(part, axis, scatter_dimension=place, tiled=True)
            part = lax.psum(part, added) if added else part
            for axis, place in reversed(gathered):
                part = lax.all_gather(part, axis, axis=place, tiled=True)
            return part

        spec = lambda parts: NamedSharding(mesh, P(*(axes or None for axes in parts)))
        of_lhs, of_rhs = (spec(divided[factor] for factor in axes) for axes in (self.lhs, self.rhs))
        of_args = (of_lhs, of_rhs, spec(())) if self.block is None else (of_lhs, of_lhs, of_rhs, of_rhs)
        return mesh, on_each, spec(kept[place] for place in range(len(self.out))), of_args


@dataclasses.dataclass(frozen=True)
class _Held:
    """An array as XLA would hand it over: its factors, the mesh axes over which each is divided, its size in bytes."""

    factors: _Axes
    spec: tuple[_Axes, ...]
    bytes: int

    @staticmethod
    def of(array: Any, factors: _Axes) -> "_Held":
        """From what `custom_partitioning` says of it."""
        parts = [*array.sharding.spec, *[None] * len(factors)][: len(factors)]
        spec = tuple(part if isinstance(part, tuple) else () if part is None else (part,) for part in parts)
        return _Held(factors, spec, math.prod(array.shape) * array.dtype.itemsize)

    def axes(self, shape: Sequence[int]) -> list[tuple[int, str, int]]:
        """Place, factor and size of each axis."""
        return [(place, factor, shape[place]) for place, factor in enumerate(self.factors)]

    def factor_over(self, axis: str) -> str | None:
        """The factor that a mesh axis divides; None if it divides none."""
        return next((factor for factor, axes in zip(self.factors, self.spec, strict=True) if axis in axes), None)

    def bytes_over(self, axis: str, sizes: Any) -> float:
        """What devices that differ in this mesh axis alone have together."""
        others = [other for axes in self.spec for other in axes if other != axis]
        return self.bytes / math.prod(sizes[other] for other in others)


def _chosen(mesh: Any, operands: tuple[_Held, _Held], out: _Held, sizes: dict[str, int]) -> dict[str, list[str]]:
    """The mesh axes that divide each factor; one that divides nothing in the end has every device do the same."""
    chosen: dict[str, list[str]] = {}
    arrays = (out, *operands)
    for axis in dict.fromkeys(axis for held in arrays for axes in held.spec for axis in axes):
        wanted = out.factor_over(axis)
        fitting = [
            factor
            for factor in dict.fromkeys(held.factor_over(axis) for held in arrays)
            # XLA has divided what reads the result. It cannot always move a result from one axis to another.
            if factor and (wanted in (None, factor) or factor not in out.factors)
            if sizes[factor] % (math.prod(mesh[other] for other in chosen.get(factor, ())) * mesh[axis]) == 0
        ]
        if fitting:
            best = min(fitting, key=lambda factor: _sent(factor, axis, mesh, operands, out))
            chosen.setdefault(best, []).append(axis)
    return chosen


def _sent(factor: str, axis: str, mesh: Any, operands: tuple[_Held, _Held], out: _Held) -> float:
    """About how many bytes devices receive if a mesh axis divides a factor; to divide another one, XLA gathers."""
    share = (mesh[axis] - 1) / mesh[axis]
    total = sum(x.bytes_over(axis, mesh) for x in operands if x.factor_over(axis) not in (None, factor))
    held = out.factor_over(axis)
    if factor not in out.factors:
        total += out.bytes_over(axis, mesh) * (2 if held is None else 1)
    elif held != factor:
        total += out.bytes_over(axis, mesh)
    return total * share


def _named(ndim: int, **places: tuple[int, ...]) -> _Axes:
    names = {axis: f"{letter}{i}" for letter, axes in places.items() for i, axis in enumerate(axes)}
    return tuple(names[axis] for axis in range(ndim))


def _count(mesh: Any, axes: _Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
