"""Conditions that compare kernels with what the last step recorded of them, one update of the weights earlier."""

import math
from collections.abc import Iterable, Sequence

from ..recipes.scaling import DelayedScaling
from ..recipes.scaling.amax_of_history import Percentile
from .operand import Operand, Seen
from .thresholds import Thresholds


UNUSUAL = 4.0
"""How much further a kernel has to move than it did in any recorded step, and than a quarter of all kernels."""

# So many recorded steps tell how far one moves.
_ENOUGH_STEPS = 4
# Another layer's inputs or gradients differ in the state as well, so the kernel need not differ as much.
_SMALLEST = math.log2(1.02)
# A kernel within one step of what was recorded.
_ALIKE = math.log2(1.05)


def moved_at_once(all: list[Operand], thresholds: Thresholds) -> Iterable[Seen]:
    """Most kernels changed that much in one step: the learning rate. No scale fits after that, so it explains all."""
    kernels = _recorded(all)
    limit, moved = _moved_together(kernels, thresholds)
    if not moved:
        return
    worst = max(moved, key=_distance)
    names = tuple(operand.numbered_layer for operand in moved)
    counts = {"moved": len(moved), "kernels": len(kernels)}
    yield Seen(worst, {**_numbers(worst), "kernel_jump": _factor(worst), **counts}, {"kernel_jump": limit}, names)


def foreign_state(all: list[Operand], thresholds: Thresholds) -> Iterable[Seen]:
    """Kernels whose amax is not what the last step recorded, while others are: the state is that of another layer.

    A few steps tell how far a kernel moves in one, and so do the other kernels. Further than that, and noticeably, none
    goes; or, if the inputs or gradients of the layer differ from its state as well, hardly.
    """
    kernels = _recorded(all)
    if _moved_together(kernels, thresholds)[1]:
        return
    moved = _beyond(math.log2(thresholds.kernel_jump), kernels)
    by_layer: dict[tuple[str, tuple[int, ...]], list[Operand]] = {}
    for operand in all:
        by_layer.setdefault((operand.layer, operand.index), []).append(operand)
    distances = sorted(map(_distance, kernels))
    usual = distances[(len(distances) - 1) // 4] if len(kernels) >= 3 else None
    others = lambda kernel: [o for o in by_layer[kernel.layer, kernel.index] if o is not kernel]
    named = [o for o in kernels if o in moved or _is_unusual(o, others(o), usual, thresholds)]
    # Of two states that were exchanged, one may fit nearly.
    named += [o for o in kernels if o not in named and any(_are_exchanged(o, other, usual) for other in named)]
    for operand in named:
        name = "kernel_jump" if operand in moved else "kernel_mismatch"
        numbers, (fits, owners) = _numbers(operand), _whose(operand, kernels, named)
        seen = {**numbers, name: _factor(operand), **({fits: len(owners)} if owners else {})}
        yield Seen(operand, seen, {name: getattr(thresholds, name)}, owners)


def _recorded(all: list[Operand]) -> list[Operand]:
    """Kernels of which the last step recorded the amax: not those whose state has a percentile instead."""
    kernels = [o for o in all if o.name == "kernel" and o.history and o.history.newest > 0.0 and o["amax"] > 0.0]
    of_percentile = lambda s: isinstance(s, DelayedScaling) and isinstance(s.amax_compute, Percentile)
    return [operand for operand in kernels if not of_percentile(operand.quantization.scaling)]


def _beyond(binades: float, kernels: list[Operand]) -> list[Operand]:
    return [o for o in kernels if _distance(o) > binades]


def _moved_together(kernels: list[Operand], thresholds: Thresholds) -> tuple[float, list[Operand]]:
    """The kernels that moved, if most did, and by what factor or more: that which would be odd in one of them, or the
    root of it."""
    for limit in (thresholds.kernel_jump, math.sqrt(thresholds.kernel_jump)):
        moved = _beyond(math.log2(limit), kernels)
        if len(kernels) >= 3 and len(moved) > len(kernels) / 2:
            return limit, moved
    return math.inf, []


def _is_unusual(kernel: Operand, others: Sequence[Operand], usual: float | None, thresholds: Thresholds) -> bool:
    assert kernel.history is not None
    # A kernel that began with zeros, as LoRA's, has been recorded in fewer steps than its input.
    steps = max((o.history.recorded for o in others if o.history), default=0)
    known = kernel.history.recorded >= max(steps, _ENOUGH_STEPS)
    if kernel.history.recorded < steps or (usual is None and not known):
        return False
    distance, ordinary = _distance(kernel), max(usual or 0.0, kernel.history.largest_change)
    if distance <= UNUSUAL * ordinary:
        return False
    misfit = any(_factor(o) > thresholds.jump for o in others)
    return distance > (_SMALLEST if misfit else math.log2(thresholds.kernel_mismatch))


def _are_exchanged(kernel: Operand, named: Operand, usual: float | None) -> bool:
    """Whether each of two kernels fits the record of the other better than its own, and moved further than before."""
    assert kernel.history is not None
    ordinary = max(usual or 0.0, kernel.history.largest_change)
    better = all(_between(a, b) < _distance(a) for a, b in ((kernel, named), (named, kernel)))
    return better and _distance(kernel) > ordinary


def _whose(kernel: Operand, kernels: list[Operand], named: list[Operand]) -> tuple[str, tuple[str, ...]]:
    """The kernels whose amax the state recorded: one, if no other fits that has no state of its own either.

    Otherwise the record may be that of the kernel before it was replaced: layers of one shape begin with equal bounds.

    Returns:
        "owners"; "alike" or "several" if they need not be; and their names.
    """
    near = [o for o in kernels if o is not kernel and _between(o, kernel) < min(_ALIKE, _distance(kernel))]
    owners = [o for o in near if o in named]
    candidates = owners if len(owners) == 1 else near
    fits = "owners" if candidates is owners else "alike" if len(near) == 1 else "several"
    return fits, tuple(operand.numbered_layer for operand in candidates)


def _factor(operand: Operand) -> float:
    """How far the amax is from that of the last step, in either direction; 1 if one of them is not known."""
    history = operand.history
    if history is None or not history.newest > 0.0 or not operand["amax"] > 0.0:
        return 1.0
    return 2.0 ** abs(math.log2(operand["amax"] / history.newest))


def _distance(operand: Operand) -> float:
    return _between(operand, operand)


def _between(kernel: Operand, other: Operand) -> float:
    """How far a kernel's amax is from what the last step recorded of another, in binades."""
    assert other.history is not None
    return abs(math.log2(kernel["amax"] / other.history.newest))


def _numbers(operand: Operand) -> dict[str, float]:
    assert operand.history is not None
    return {"amax": operand["amax"], "recorded": operand.history.newest}
