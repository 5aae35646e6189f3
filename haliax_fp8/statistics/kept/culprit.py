"""Culprit: the operand that spoils a product, and the element or channel in it."""

import dataclasses
from typing import NamedTuple

import numpy as np

from ...recipes.recipe import USES, OperandName, ProductName
from .box import BlackBox


# From where on a slice counts as an outlier: its amax, in multiples of the median of all slices. Heuristic.
_OUTLIER = 16.0
# An outlier is rare: of many slices, few are.
_FEW = 0.05

_ORDER: tuple[OperandName, ...] = ("kernel", "input", "output_grad")


@dataclasses.dataclass(frozen=True)
class Culprit:
    """What is wrong with the operands of a black box, in the order in which one thing follows from another.

    Args:
        operand: The operand.
        product: The first product that reads it.
        index: Where in it: the index of an element, or of a slice, with None for the axes that it runs along; empty if
            none stands out.
        seen: What is there, in words.
    """

    operand: OperandName
    product: ProductName
    index: tuple[int | None, ...]
    seen: str

    @staticmethod
    def of(box: BlackBox) -> "Culprit":
        """The first operand with an element that is not finite; else the one with the largest outlier; else the one
        that the box was kept for.

        Args:
            box: The operands.
        """
        values = {name: getattr(box, name).astype(np.float32) for name in _ORDER}
        for name in _ORDER:
            bad = ~np.isfinite(values[name])
            if count := int(bad.sum()):
                first = tuple(int(i) for i in np.argwhere(bad)[0])
                more = "the only one" if count == 1 else f"the first of {count}"
                return Culprit(name, USES[name][0], first, f"{values[name][first]}, {more} that is not finite")
        outliers: dict[OperandName, _Outlier] = {
            name: found for name in _ORDER if (found := _outlier(values[name])) is not None
        }
        if outliers:
            name = max(outliers, key=lambda name: outliers[name].factor)
            index, factor = outliers[name].indices, outliers[name].factor
            seen = f"an outlier, {factor:.3g} times as large as the median of its kind"
            return Culprit(name, USES[name][0], index, seen)
        return Culprit(box.operand, box.product, (), box.reason)

    @property
    def where(self) -> str:
        """The operand with the index, as `input[:, 17]`."""
        if not self.index:
            return self.operand
        return f"{self.operand}[{', '.join(':' if i is None else str(i) for i in self.index)}]"

    def __str__(self) -> str:
        return f"{self.where}, which {self.product} reads first: {self.seen}"


class _Outlier(NamedTuple):
    indices: tuple[int | None, ...]
    factor: float


def _outlier(x: np.ndarray) -> _Outlier | None:
    """The slice along one axis whose amax stands out most; None if none does."""
    magnitude, found = np.abs(x), None
    for axis in range(x.ndim):
        amaxes = magnitude.max(tuple(i for i in range(x.ndim) if i != axis))
        median = float(np.median(amaxes))
        if len(amaxes) < 8 or median <= 0.0:
            continue
        factors = amaxes / median
        largest, few = float(factors.max()), max(1, int(_FEW * len(amaxes)))
        if largest <= _OUTLIER or int((factors > _OUTLIER).sum()) > few or (found and largest <= found.factor):
            continue
        index = int(factors.argmax())
        found = _Outlier(tuple(index if i == axis else None for i in range(x.ndim)), largest)
        # A single element stands out along every axis, a channel along one.
        inside = np.take(magnitude, index, axis)
        if inside.size > 1 and inside.max() > _OUTLIER * np.median(inside) and (inside > inside.max() / 2).sum() == 1:
            element = np.unravel_index(int(magnitude.argmax()), x.shape)
            found = _Outlier(tuple(int(i) for i in element), largest)
    return found
