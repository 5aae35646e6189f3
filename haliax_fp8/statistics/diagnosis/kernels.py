"""Checks that compare kernels with what the last step recorded of them, one update of the weights earlier."""

import math
from collections.abc import Iterable, Sequence

from ...recipes.scaling import DelayedScaling
from ...recipes.scaling.amax_of_history import Percentile
from .finding import Finding, Problem
from .new_finding import new_finding
from .operand import Operand
from .thresholds import Thresholds


# How much further a kernel has to move than it did in any recorded step, and than a quarter of all kernels.
_UNUSUAL = 4.0
# So many recorded steps tell how far one moves.
_ENOUGH_STEPS = 4
# Another layer's inputs or gradients differ in the state as well, so the kernel need not differ as much.
_SMALLEST = math.log2(1.02)
# A kernel within one step of what was recorded.
_ALIKE = math.log2(1.05)


def moved_at_once(all: list[Operand], thresholds: Thresholds) -> Iterable[Finding]:
    """Most kernels changed that much in one step: the learning rate. No scale fits after that, so it explains all."""
    kernels = _recorded(all)
    moved = _moved_together(kernels, thresholds)
    if not moved:
        return
    names = ", ".join(operand.numbered_layer for operand in moved[:3]) + (" ..." if len(moved) > 3 else "")
    worst = max(moved, key=_distance)
    most = math.sqrt(thresholds.kernel_jump)
    yield new_finding(
        worst,
        Problem.JUMP,
        seen=f"{_seen(worst)}. {len(moved)} of {len(kernels)} kernels moved that far: {names}. Everything "
        "else that is wrong follows from it",
        threshold=f"a factor of {thresholds.kernel_jump:g}, or of {most:.2g} in most kernels",
        source="heuristic",
        advice="lower the learning rate, lengthen its warmup or clip gradients (optax.clip_by_global_norm), and go "
        "back to a checkpoint",
    )


def foreign_state(all: list[Operand], thresholds: Thresholds) -> Iterable[Finding]:
    """Kernels whose amax is not what the last step recorded, while others are: the state is that of another layer.

    A few steps tell how far a kernel moves in one, and so do the other kernels. Further than that, and noticeably, none
    goes; or, if the inputs or gradients of the layer differ from its state as well, hardly.
    """
    kernels = _recorded(all)
    if _moved_together(kernels, thresholds):
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
        yield new_finding(
            operand,
            Problem.FOREIGN_STATE,
            seen=_seen(operand) + _whose(operand, kernels, named),
            threshold=f"a factor of {thresholds.kernel_jump:g}"
            if operand in moved
            else f"a factor of {thresholds.kernel_mismatch:g}, where other steps and kernels move {_UNUSUAL:g} times "
            "less",
            source="heuristic",
            advice="the state is not that of this layer: it was loaded from elsewhere, or the weight was replaced. "
            "Calibrate again: model = step.calibrate(model, *batch); or load matching state",
        )


def _recorded(all: list[Operand]) -> list[Operand]:
    """Kernels of which the last step recorded the amax: not those whose state has a percentile instead."""
    kernels = [o for o in all if o.name == "kernel" and o.history and o.history.newest > 0.0 and o["amax"] > 0.0]
    of_percentile = lambda s: isinstance(s, DelayedScaling) and isinstance(s.amax_compute, Percentile)
    return [operand for operand in kernels if not of_percentile(operand.quantization.scaling)]


def _beyond(binades: float, kernels: list[Operand]) -> list[Operand]:
    return [o for o in kernels if _distance(o) > binades]


def _moved_together(kernels: list[Operand], thresholds: Thresholds) -> list[Operand]:
    """The kernels that moved, if most did: by as much as would be odd in one of them, or by half as many binades."""
    binades = math.log2(thresholds.kernel_jump)
    for least in (binades, binades / 2):
        moved = _beyond(least, kernels)
        if len(kernels) >= 3 and len(moved) > len(kernels) / 2:
            return moved
    return []


def _is_unusual(kernel: Operand, others: Sequence[Operand], usual: float | None, thresholds: Thresholds) -> bool:
    assert kernel.history is not None
    # A kernel that began with zeros, as LoRA's, has been recorded in fewer steps than its input.
    steps = max((o.history.recorded for o in others if o.history), default=0)
    known = kernel.history.recorded >= max(steps, _ENOUGH_STEPS)
    if kernel.history.recorded < steps or (usual is None and not known):
        return False
    distance, ordinary = _distance(kernel), max(usual or 0.0, kernel.history.largest_change)
    if distance <= _UNUSUAL * ordinary:
        return False
    misfit = any(_factor(o) > thresholds.jump for o in others)
    return distance > (_SMALLEST if misfit else math.log2(thresholds.kernel_mismatch))


def _are_exchanged(kernel: Operand, named: Operand, usual: float | None) -> bool:
    """Whether each of two kernels fits the record of the other better than its own, and moved further than before."""
    assert kernel.history is not None
    ordinary = max(usual or 0.0, kernel.history.largest_change)
    better = all(_between(a, b) < _distance(a) for a, b in ((kernel, named), (named, kernel)))
    return better and _distance(kernel) > ordinary


def _whose(kernel: Operand, kernels: list[Operand], named: list[Operand]) -> str:
    """Whose amax the state recorded, if only one kernel fits that has no state of its own either.

    Otherwise the record may be that of the kernel before it was replaced: layers of one shape begin with equal bounds.
    """
    near = [o for o in kernels if o is not kernel and _between(o, kernel) < min(_ALIKE, _distance(kernel))]
    owners = [o for o in near if o in named]
    if len(owners) == 1:
        return f", the amax of {owners[0].numbered_layer}"
    if len(near) == 1:
        return f", about the amax that {near[0].numbered_layer} has too"
    return f", about the amax of {len(near)} other kernels" if near else ""


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


def _seen(operand: Operand) -> str:
    assert operand.history is not None
    return f"amax {operand['amax']:.2g}; the last step recorded {operand.history.newest:.2g}"
