"""Grouped products of arrays that XLA divides over devices: what each device multiplies.

XLA cannot divide a kernel's work: it would gather all operands, and every device would compute everything.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, Int

from ..._numerics.quantized_array import QuantizedArray
from ...devices.grouped import GroupedKernels
from ...recipes.recipe import ProductName
from .kernels import grouped_product


# The axes of both operands and of the product. Rows and what is summed come first where there is a choice.
_AXES: dict[ProductName, tuple[str, str, str]] = {
    "fprop": ("r s", "g s c", "r c"),
    "dgrad": ("r s", "g c s", "r c"),
    "wgrad": ("r i", "r c", "g i c"),
}
_SUMMED: dict[ProductName, str] = {"fprop": "s", "dgrad": "s", "wgrad": "r"}


@dataclasses.dataclass(frozen=True)
class PartitionedProduct:
    """`grouped_product`, of operands that may be divided over the automatic axes of a mesh.

    Devices that have different rows multiply these, each with its part of every group. Where rows are not divided, but
    kernels are, over experts, each device multiplies the rows of its own. Where both are, over the same axes, kernels
    are gathered, in FP8. Inputs and outputs may be divided too; parts of a sum are added up.

    Args:
        kernels: Of the device.
        product: Which of the three.
        precision: See `grouped_product`.
        dtype: Of the result.
        statics: What is static about both operands.
    """

    kernels: GroupedKernels
    product: ProductName
    precision: lax.Precision
    dtype: np.dtype
    statics: tuple[Any, Any]

    @staticmethod
    def of(
        kernels: GroupedKernels,
        product: ProductName,
        a: QuantizedArray,
        b: QuantizedArray,
        sizes: Int[Array, "*members groups"],
        precision: lax.PrecisionLike,
        dtype: np.dtype,
    ) -> Float[Array, "..."]:
        """The arguments are those of `grouped_product`."""
        if sizes.ndim > 1 or jax.sharding.get_abstract_mesh().manual_axes:
            return grouped_product(kernels, product, a, b, sizes, precision, dtype)
        given = lax.Precision.DEFAULT if precision is None else lax.Precision(precision)
        of = tuple((x.block, x.scale_bits, x.rotation) for x in (a, b))
        work = PartitionedProduct(kernels, product, given, np.dtype(dtype), (of[0], of[1]))
        scales = (x.scale.reshape((1,) * x.data.ndim) if x.scale.ndim == 0 else x.scale for x in (a, b))
        return work.on_devices(a.data, b.data, *scales, sizes)

    def local(self, a: Array, b: Array, a_scale: Array, b_scale: Array, sizes: Array) -> Array:
        """What one device computes."""
        both = (
            QuantizedArray(data, scale, *static)
            for data, scale, static in zip((a, b), (a_scale, b_scale), self.statics, strict=True)
        )
        return grouped_product(self.kernels, self.product, *both, sizes, self.precision, self.dtype)

    @property
    def on_devices(self) -> Any:
        """`local` of all devices together."""
        return _on_devices(self)

    def rule(self, mesh: Any, args: Any, result: Any) -> str:
        """Which axes of operands and result are the same, for XLA to find out where the result is."""
        del mesh
        names = [axes.split() for axes in _AXES[self.product]]
        others = iter(range(100))
        scales = [
            [name if count > 1 and count == size else f"z{next(others)}" for name, count, size in zip(n, s, d, strict=True)]
            for n, s, d in zip(names, (args[2].shape, args[3].shape), (args[0].shape, args[1].shape), strict=False)
        ]
        del result
        operands = ", ".join(" ".join(part) for part in (*names[:2], *scales, ["h"]))
        return f"{operands} -> {' '.join(names[2])}"

    def partition(self, mesh: Any, args: Sequence[Any], result: Any) -> tuple[Any, Any, Any, Any]:
        """The function of each device, and where its operands and its result are."""
        a, b, out = (names.split() for names in _AXES[self.product])
        places: dict[str, tuple[str, ...]] = {}
        taken: set[str] = set()
        known = [*zip(a, _spec(args[0]), strict=True), *zip(b, _spec(args[1]), strict=True)]
        known += [*zip(out, _spec(result), strict=True)]
        # Rows first: a device that has rows multiplies them.
        for name, axes in sorted(known, key=lambda item: item[0] != "r"):
            if name not in places or not places[name]:
                places[name] = tuple(axis for axis in axes if axis not in taken)
                taken |= set(places[name])
        specs = []
        for names, data, scale in ((a, args[0], args[2]), (b, args[1], args[3])):
            for name, size, count in zip(names, data.shape, scale.shape, strict=True):
                if 1 < count < size:
                    # Blocks stay whole.
                    places[name] = ()
        for names, data, scale in ((a, args[0], args[2]), (b, args[1], args[3])):
            specs.append((P(*(places[name] for name in names)), data, scale, names))
        of_data = [NamedSharding(mesh, spec) for spec, *_ in specs]
        of_scales = [
            NamedSharding(mesh, P(*(places[n] if count > 1 else None for n, count in zip(names, scale.shape, strict=True))))
            for _, _, scale, names in specs
        ]
        whole = NamedSharding(mesh, P())
        operands = (*of_data, *of_scales, whole)
        return mesh, functools.partial(self.of_device, places), NamedSharding(mesh, P(*(places[n] for n in out))), operands

    def of_device(
        self, places: dict[str, tuple[str, ...]], a: Array, b: Array, a_scale: Array, b_scale: Array, sizes: Array
    ) -> Array:
        """`local`, with the device's groups; then what other devices have to the same sums is added."""
        of_rows, of_groups, length = places["r"], places["g"], a.shape[0]
        ends = jnp.cumsum(sizes)
        starts = ends - sizes
        first_row = lax.axis_index(of_rows) * length if of_rows else 0
        starts, ends = (jnp.clip(x - first_row, 0, length) for x in (starts, ends))
        sizes = jnp.where(_fit(sizes, length, of_rows), ends - starts, -1).astype(sizes.dtype)
        summed = places[_SUMMED[self.product]]
        if not of_groups:
            out = self.local(a, b, a_scale, b_scale, sizes)
            return lax.psum(out, summed) if summed else out
        parts = int(np.prod([lax.axis_size(axis) for axis in of_groups]))
        count = len(sizes) // parts
        first = lax.axis_index(of_groups) * count
        begin = lax.dynamic_index_in_dim(starts, first, keepdims=False)
        own = lax.dynamic_slice_in_dim(sizes, first, count)
        to_front = lambda x: jnp.roll(x, -begin, 0) if x.shape[0] == length else x
        a, a_scale = to_front(a), to_front(a_scale)
        if self.product == "wgrad":
            out = self.local(a, to_front(b), a_scale, to_front(b_scale), own)
        else:
            out = jnp.roll(self.local(a, b, a_scale, b_scale, own), begin, 0)
            summed = (*summed, *of_groups)
        return lax.psum(out, summed) if summed else out


def _fit(sizes: Array, length: int, of_rows: tuple[str, ...]) -> Array:
    """Whether sizes are those of groups: none negative, all together at most the rows."""
    rows = length * int(np.prod([lax.axis_size(axis) for axis in of_rows]))
    return jnp.all(sizes >= 0) & (jnp.sum(sizes) <= rows)


def _spec(aval: Any) -> list[tuple[str, ...]]:
    """The mesh axes that each axis of an array is divided over."""
    spec = getattr(aval.sharding, "spec", ())
    entries = [*spec, *[None] * (len(aval.shape) - len(spec))]
    return [() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in entries]


@functools.cache
def _on_devices(work: PartitionedProduct) -> Any:
    divided = custom_partitioning(work.local)
    divided.def_partition(partition=work.partition, sharding_rule=work.rule)
    # JAX has no rule for a mapped one.
    mapped = custom_vmap(divided)

    @mapped.def_vmap
    def _(size: int, are_mapped: Sequence[bool], *args: Array) -> tuple[Array, bool]:
        del size
        return jax.vmap(work.local, [0 if is_mapped else None for is_mapped in are_mapped])(*args), True

    return mapped
