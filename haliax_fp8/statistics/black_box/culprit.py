"""Culprit: the operand that spoils a product, and the element or channel in it."""

import dataclasses

import numpy as np

from ...recipes.recipe import USES, OperandName, ProductName
from .box import BlackBox


# From where on a slice counts as an outlier: its amax, in multiples of the median of all slices. Heuristic.
_OUTLIER = 16.0
# Few slices, or they are no outliers.
_FEW = 0.05

_ORDER: tuple[OperandName, ...] = ("kernel", "input", "output_grad")


@dataclasses.dataclass(frozen=True)
class Culprit:
    """What is wrong with the operands of a black box, in the order in which one thing follows from another.

    Args:
        operand: The operand.
        product: The first product that reads it.
        place: Where in it: the index of an element, or of a slice, with None for the axes that it runs along; empty if
            no place stands out.
        seen: What is there, in words.
    """

    operand: OperandName
    product: ProductName
    place: tuple[int | None, ...]
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
        of_operands = [(name, *found) for name in _ORDER if (found := _outlier(values[name])) is not None]
        if of_operands:
            name, place, factor = max(of_operands, key=lambda found: found[2])
            seen = f"an outlier, {factor:.0f} times as large as the median of its kind"
            return Culprit(name, USES[name][0], place, seen)
        return Culprit(box.operand, box.product, (), box.reason)

    @property
    def where(self) -> str:
        """The operand with the place in it, as `input[:, 17]`."""
        if not self.place:
            return self.operand
        return f"{self.operand}[{', '.join(':' if i is None else str(i) for i in self.place)}]"

    def __str__(self) -> str:
        return f"{self.where}, which {self.product} reads first: {self.seen}"


def _outlier(x: np.ndarray) -> tuple[tuple[int | None, ...], float] | None:
    """The slice along one axis whose amax stands out most; None if none does."""
    found: tuple[tuple[int | None, ...], float] | None = None
    for axis in range(x.ndim):
        amaxes = np.abs(x).max(tuple(i for i in range(x.ndim) if i != axis))
        median = float(np.median(amaxes))
        if len(amaxes) < 8 or median <= 0.0:
            continue
        factors = amaxes / median
        factor = float(factors.max())
        few = max(1, int(_FEW * len(amaxes)))
        if factor > _OUTLIER and int((factors > _OUTLIER).sum()) <= few and (found is None or factor > found[1]):
            place: list[int | None] = [None] * x.ndim
            place[axis] = int(factors.argmax())
            found = tuple(place), factor
    if found is None:
        return None
    # A single element stands out along every axis, a channel along one.
    (axis,) = [i for i, index in enumerate(found[0]) if index is not None]
    inside = np.abs(np.take(x, found[0][axis], axis))
    if inside.size > 1 and int((inside > inside.max() / 2).sum()) == 1 and inside.max() > _OUTLIER * np.median(inside):
        return tuple(int(i) for i in np.unravel_index(int(np.abs(x).argmax()), x.shape)), found[1]
    return found
