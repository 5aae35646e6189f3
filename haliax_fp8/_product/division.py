"""How devices divide a product that XLA does not see: what stays divided, what is gathered or added up.

XLA divides its own products by a rule that names the axes of their arrays. Here it is spelled out, because XLA does not
see these products until it has divided everything else.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array


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
class Held:
    """An array as XLA would hand it over: its factors, the mesh axes over which each is divided, its size in bytes."""

    factors: Factors
    spec: tuple[tuple[str, ...], ...]
    bytes: int

    @staticmethod
    def of(array: Any, factors: Factors) -> "Held":
        """An operand or result, as `custom_partitioning` describes it."""
        parts = [*array.sharding.spec, *[None] * len(factors)][: len(factors)]
        spec = tuple(part if isinstance(part, tuple) else () if part is None else (part,) for part in parts)
        return Held(factors, spec, math.prod(array.shape) * array.dtype.itemsize)

    def factor_over(self, axis: str) -> str | None:
        """The factor that a mesh axis divides; None if it divides none."""
        return next((factor for factor, axes in zip(self.factors, self.spec, strict=True) if axis in axes), None)

    def bytes_over(self, axis: str, sizes: Mapping[str, int]) -> float:
        """The bytes that devices hold together if they differ only in this mesh axis."""
        others = [other for axes in self.spec for other in axes if other != axis]
        return self.bytes / math.prod(sizes[other] for other in others)


@dataclasses.dataclass(frozen=True)
class Division:
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
        operands: tuple[Held, Held],
        out: Held,
        sizes: Mapping[str, int],
        *,
        whole: Collection[str] = (),
        otherwise: str | None = None,
    ) -> "Division":
        """Each mesh axis divides one factor of all arrays that have it, the one that moves the fewest bytes.

        Over an axis that divides a sum, partial sums are added up in the result's dtype: to the part that the device
        keeps, if the result is divided over that axis.

        Args:
            mesh: The mesh.
            operands: Both operands, as XLA has divided them.
            out: The result, as XLA has divided it.
            sizes: The size of each factor.
            whole: Factors that are not divided.
            otherwise: What any mesh axis may divide, even one over which XLA has divided nothing. Without it, devices
                that differ in such an axis all compute the same.
        """
        chosen = _chosen(mesh.shape, operands, out, sizes, whole, otherwise)
        axes = dict.fromkeys(sizes, ()) | {factor: tuple(found) for factor, found in chosen.items()}
        out_axes = [axes[factor] for factor in out.factors]
        left = [sizes[f] // math.prod(mesh.shape[axis] for axis in axes[f]) for f in out.factors]
        summed = [axis for factor in sizes if factor not in out.factors for axis in axes[factor]]
        scattered = []
        for axis in summed:
            position = next((position for position, of_axis in enumerate(out.spec) if axis in of_axis), None)
            if position is not None and left[position] % mesh.shape[axis] == 0:
                scattered.append((axis, position))
                out_axes[position] += (axis,)
                left[position] //= mesh.shape[axis]
        gathered = [(axis, position) for position, factor in enumerate(out.factors) for axis in axes[factor]]
        gathered = [(axis, position) for axis, position in gathered if axis not in out.spec[position]]
        for axis, position in gathered:
            out_axes[position] = tuple(other for other in out_axes[position] if other != axis)
        added = tuple(axis for axis in summed if axis not in dict(scattered))
        return Division(mesh, axes, tuple(scattered), added, tuple(gathered), tuple(out_axes))

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
    def of_result(self) -> NamedSharding:
        """The sharding of the result."""
        return self._sharding(self.out_axes)

    def _sharding(self, parts: Sequence[tuple[str, ...]]) -> NamedSharding:
        return NamedSharding(self.mesh, P(*(axes or None for axes in parts)))


def _chosen(
    mesh: Mapping[str, int],
    operands: tuple[Held, Held],
    out: Held,
    sizes: Mapping[str, int],
    whole: Collection[str],
    otherwise: str | None,
) -> dict[str, list[str]]:
    """The mesh axes that divide each factor."""
    chosen: dict[str, list[str]] = {}
    arrays = (out, *operands)
    in_use = dict.fromkeys(axis for held in arrays for axes in held.spec for axis in axes)
    for axis in in_use if otherwise is None else dict.fromkeys([*in_use, *mesh]):

        def fits(factor: str, axis: str = axis) -> bool:
            devices = math.prod(mesh[other] for other in chosen.get(factor, ())) * mesh[axis]
            return factor not in whole and sizes[factor] % devices == 0

        wanted = out.factor_over(axis)
        fitting = [
            factor
            for factor in dict.fromkeys([*(held.factor_over(axis) for held in arrays), otherwise])
            # XLA has divided what reads the result. It cannot always move a result from one axis to another.
            if factor and (wanted in (None, factor) or factor not in out.factors)
            if fits(factor)
        ]
        if fitting:
            best = min(fitting, key=lambda factor: _sent(factor, axis, mesh, operands, out))
            chosen.setdefault(best, []).append(axis)
    return chosen


def _sent(factor: str, axis: str, mesh: Mapping[str, int], operands: tuple[Held, Held], out: Held) -> float:
    """About how many bytes devices receive if a mesh axis divides a factor; to divide another one, XLA gathers."""
    share = (mesh[axis] - 1) / mesh[axis]
    total = sum(x.bytes_over(axis, mesh) for x in operands if x.factor_over(axis) not in (None, factor))
    held = out.factor_over(axis)
    if factor not in out.factors:
        total += out.bytes_over(axis, mesh) * (2 if held is None else 1)
    elif held != factor:
        total += out.bytes_over(axis, mesh)
    return total * share
