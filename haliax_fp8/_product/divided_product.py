"""How devices divide a product of two operands that XLA does not see, by the axes that belong together."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array

from .dimensions import DotDimensions
from .division import Division, Factors, Held, special_factors


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
        of_lhs, of_rhs = self.dimensions.lhs_batch + self.dimensions.lhs_free, self.dimensions.rhs_free
        return (*(self.lhs[axis] for axis in of_lhs), *(self.rhs[axis] for axis in of_rhs))

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
        lhs, rhs = (Held.of(args[i], axes) for i, axes in zip(positions, (self.lhs, self.rhs), strict=True))
        of_lhs, of_rhs = (args[i].shape for i in ((0, 1) if self.block is None else (1, 3)))
        sizes = dict(zip(self.lhs + self.rhs, (*of_lhs, *of_rhs), strict=True))
        division = Division.of(mesh, (lhs, rhs), Held.of(result, self.out), sizes)

        def on_each(*arrays: Array) -> Array:
            return division.finished(product(*arrays))

        of_lhs, of_rhs, of_scale = (division.sharding(axes) for axes in (self.lhs, self.rhs, ("one",)))
        of_args = (of_lhs, of_rhs, of_scale) if self.block is None else (of_lhs, of_lhs, of_rhs, of_rhs)
        return mesh, on_each, division.of_result, of_args


def _named(ndim: int, **by_letter: tuple[int, ...]) -> Factors:
    names = {axis: f"{letter}{i}" for letter, axes in by_letter.items() for i, axis in enumerate(axes)}
    return tuple(names[axis] for axis in range(ndim))
