"""A grouped product on many devices: each multiplies its share of the rows, wherever groups begin and end.

XLA cannot divide a Pallas kernel, and would have every device multiply all rows. So it sees a call that says which axes
belong together; once it has divided everything else, each device's rows are divided among the groups anew.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir
from jaxtyping import Array, Float, Float32, Int

from ..._jax.custom_partitioning import has_its_part, knows_devices, lower_after_partitioning, platforms_of
from ..._jax.meshes import all_varying, aval_of_result
from ..._jax.primitives import define, mapped_in_front
from ..._numerics.quantized_array import QuantizedArray
from ...devices.device import Device
from ...devices.grouped import GroupedImplementation
from ...recipes.recipe import ProductName
from ..partition import ArraySharding, Factors, Partition, special_factors
from .one_device import OneDevice
from .tiles import within_bounds


# Rows, inputs, outputs and groups of the data, and of the result. Members come first.
_DATA: dict[ProductName, tuple[Factors, Factors, Factors]] = {
    "fprop": (("row", "input"), ("group", "input", "output"), ("row", "output")),
    "dgrad": (("row", "output"), ("group", "input", "output"), ("row", "input")),
    "wgrad": (("row", "input"), ("row", "output"), ("group", "input", "output")),
}


def divided_over_devices(
    work: OneDevice,
    a: QuantizedArray,
    b: QuantizedArray,
    group_sizes: Int[Array, "*members groups"],
    scale: Float32[Array, "..."] | None,
) -> Float[Array, "..."]:
    """`work(a, b, group_sizes, scale)`, of which each device computes a part.

    On one device, and under a `shard_map` over the whole mesh, that is all.
    """
    # JAX's interpreter runs Pallas kernels on CPUs, with side effects that a primitive would hide.
    is_interpreted = work.implementation is not GroupedImplementation.XLA and Device.default().platform == "cpu"
    if is_interpreted or any(x.rotation is not None or not x.data.size for x in (a, b)):
        return work(a, b, group_sizes, scale)
    a, b = (x if x.scale.ndim else dataclasses.replace(x, scale=x.scale.reshape((1,) * x.data.ndim)) for x in (a, b))
    # No array without axes: Shardy has no name for it.
    leaves, structure = jax.tree.flatten((a, b, group_sizes, None if scale is None else scale[..., None]))
    leaves = all_varying(*leaves)
    return grouped_product_p.bind(*leaves, work=work, structure=structure, platform=Device.default().platform)


def _whole(*leaves: Array, work: OneDevice, structure: Any) -> Array:
    """The product of whole operands."""
    a, b, sizes, scale = jax.tree.unflatten(structure, leaves)
    return work(a, b, sizes, None if scale is None else scale[..., 0])


def _part(*leaves: Array, work: OneDevice, structure: Any, rows: int, axes: tuple[str, ...]) -> Array:
    """The product of what a device has of the rows, which `axes` of the mesh divide; a member has `rows` in all."""
    a, b, sizes, scale = jax.tree.unflatten(structure, leaves)
    here = a.data.shape[work.batch]
    first = lax.axis_index(axes) * here if axes else 0
    inside = within_bounds(sizes, rows)
    ends = jnp.cumsum(inside, axis=-1)
    sizes_here = jnp.clip(ends - first, 0, here) - jnp.clip(ends - inside - first, 0, here)
    return work(a, b, sizes_here, None if scale is None else scale[..., 0])


@dataclasses.dataclass(frozen=True)
class _Factors:
    """How the axes of a grouped product's arrays belong together.

    Args:
        leaves: The factors of each array.
        out: Those of the result.
        sizes: Of each factor of data; where scales belong to blocks, how many.
        blocks: The size of the blocks of a factor, whose elements stay together.
        whole: Factors that devices do not divide: groups, and axes with blocks that do not fit.
    """

    leaves: tuple[Factors, ...]
    out: Factors
    sizes: dict[str, int]
    blocks: dict[str, int]
    whole: frozenset[str]

    @staticmethod
    def of(product: ProductName, batch: int, structure: Any, shapes: Sequence[tuple[int, ...]]) -> "_Factors":
        """The factors of arrays with these shapes."""
        members = tuple(f"member{i}" for i in range(batch))
        *data, out = ((*members, *factors) for factors in _DATA[product])
        a, b, group_sizes, scale = jax.tree.unflatten(structure, shapes)
        sizes, blocks_of = {"group": group_sizes[-1]}, {}
        for x, factors in zip((a, b), data, strict=True):
            sizes |= dict(zip(factors, x.data, strict=True))
            for axis, (factor, count) in enumerate(zip(factors, x.scale, strict=True)):
                block = sizes[factor] // count if x.block is None else x.block[axis]
                blocks_of.setdefault(factor, set()).update({(count, block)} if count > 1 else ())
        blocks, whole = {}, {"group"}
        for factor, shapes_of_blocks in blocks_of.items():
            if shapes_of_blocks <= {(sizes[factor], 1)}:
                continue
            ((count, block), *others) = shapes_of_blocks
            if others or count * block != sizes[factor]:
                whole.add(factor)
            else:
                sizes[factor], blocks[factor] = count, block
        leaves = []
        for name, x, factors in zip("ab", (a, b), data, strict=True):
            # A factor of its own where all have the same scale, or blocks do not fit.
            alone = [f"{name}{axis}" for axis in range(len(factors))]
            scaled = [sizes[factor] == count > 1 for factor, count in zip(factors, x.scale, strict=True)]
            leaves += [factors, tuple(f if fits else o for f, o, fits in zip(factors, alone, scaled, strict=True))]
        leaves.append((*members, "size"))
        if scale is not None:
            leaves.append((*members, *(["size"] if len(scale) == batch + 2 else []), "one"))
        return _Factors(tuple(leaves), out, sizes, blocks, frozenset(whole))

    def rule(self, product: ProductName) -> str:
        """The rule for Shardy: which axes belong together; elements of a block stay together.

        What is summed has a name in each operand, lest rows that nothing divides are divided by feature as kernels are.
        """
        in_blocks = lambda factor: f"({factor} {factor}element)" if factor in self.blocks else factor
        data = lambda factors: " ".join(map(in_blocks, factors))
        a, scale_a, b, scale_b, *others = self.leaves
        renamed = lambda text: re.sub(r"\b(input|output)(element)?\b", r"\1a\2", text) if product != "wgrad" else text
        arrays = renamed(data(a)), renamed(" ".join(scale_a)), data(b), " ".join(scale_b)
        return f"{', '.join([*arrays, *(' '.join(factors) for factors in others)])} -> {data(self.out)}"

    def named(self, product: ProductName) -> dict[str, Any]:
        """What the rule does not say."""
        rule, names = self.rule(product), lambda factor: (factor, f"{factor}a")
        elements = {f"{name}element": size for factor, size in self.blocks.items() for name in names(factor)}
        elements = {name: size for name, size in elements.items() if name in rule}
        # Scales of blocks that do not fit, too.
        scale_factors = {factor for factors in (self.leaves[1], self.leaves[3]) for factor in factors} - {*self.sizes}
        whole = {"size", *elements, *scale_factors, *(name for factor in self.whole for name in names(factor))} - {
            "group"
        }
        return {**elements, **special_factors(rule, ["row"] if product == "wgrad" else [], whole)}

    def partition(
        self, work: OneDevice, structure: Any, whole: Callable[..., Array], mesh: Any, args: Sequence[Any], result: Any
    ) -> Any:
        """What each device computes, as `custom_partitioning` asks for it.

        A mesh axis may divide the rows even where XLA divides nothing over it: devices would all compute the same.
        """
        del whole
        a, b = ArraySharding.of(args[0], self.leaves[0]), ArraySharding.of(args[2], self.leaves[2])
        partition = Partition.of(
            mesh, (a, b), ArraySharding.of(result, self.out), self.sizes, whole=self.whole, free_factor="row"
        )

        def on_each(*leaves: Array) -> Array:
            rows, axes = self.sizes["row"] * self.blocks.get("row", 1), partition.axes["row"]
            return partition.finished(_part(*leaves, work=work, structure=structure, rows=rows, axes=axes))

        return mesh, on_each, partition.result_sharding, tuple(map(partition.sharding, self.leaves))


def _aval(*leaves: Any, work: OneDevice, structure: Any, platform: str) -> Any:
    del platform
    a, b, sizes, _ = jax.tree.unflatten(structure, leaves)
    shape = {
        "fprop": (*a.data.shape[:-1], b.data.shape[-1]),
        "dgrad": (*a.data.shape[:-1], b.data.shape[-2]),
        "wgrad": (*sizes.shape, a.data.shape[-1], b.data.shape[-1]),
    }[work.product]
    return aval_of_result(a.data, shape, work.dtype)


def _batched(leaves: Any, axes: Any, *, work: OneDevice, structure: Any, platform: str) -> tuple[Array, int]:
    """Mapped examples are members."""
    a, b, sizes, scale = jax.tree.unflatten(structure, mapped_in_front(leaves, axes))
    a, b = (x if x.block is None else dataclasses.replace(x, block=(1, *x.block)) for x in (a, b))
    leaves, structure = jax.tree.flatten((a, b, sizes, scale))
    work = dataclasses.replace(work, batch=work.batch + 1)
    return grouped_product_p.bind(*leaves, work=work, structure=structure, platform=platform), 0


def _lowered(context: Any, *operands: Any, work: OneDevice, structure: Any, platform: str) -> Any:
    # XLA's product on an accelerator was allowed, whatever it costs; on a CPU it is the only one.
    runs_anywhere = work.implementation is GroupedImplementation.XLA and platform != "cpu"
    if (others := set(platforms_of(context)) - {platform}) and not runs_anywhere:
        raise ValueError(
            f"a grouped product was traced for {platform} and cannot be lowered for {', '.join(sorted(others))}: the "
            "device that it is traced for decides which Pallas kernel multiplies. Trace it where such a device is, or "
            'in the context Device.by_name("h100").as_default(); or leave these layers in high precision, with '
            "Fp8Config(exclude=...)"
        )
    whole = functools.partial(_whole, work=work, structure=structure)
    if has_its_part(context) or (work.implementation is GroupedImplementation.XLA and not knows_devices(context)):
        return mlir.lower_fun(whole, multiple_results=False)(context, *operands)
    factors = _Factors.of(work.product, work.batch, structure, [x.shape for x in context.avals_in])
    return lower_after_partitioning(
        context,
        *operands,
        name="a grouped product",
        function=whole,
        part=whole,
        rule=factors.rule(work.product),
        sizes=factors.named(work.product),
        partition=functools.partial(factors.partition, work, structure),
        of_blocks=(1, 3),
        remedy="leave these layers in high precision, with Fp8Config(exclude=...)",
    )


grouped_product_p = define("fp8_grouped_product", aval=_aval, batch=_batched, lower=_lowered, with_devices=True)
