"""The conditions of the checks: each sees one kind of problem among all operands of a model, with its numbers."""

from collections.abc import Iterable

import numpy as np

from ..formats import E2M1, E4M3, E5M2
from ..recipes import (
    AmaxHistory,
    CurrentScaling,
    DelayedScaling,
    MaxOfHistory,
    MostRecent,
    Percentile,
    RecoveringMax,
    StaticScaling,
)
from .finding import HISTORY
from .operand import Operand, Seen
from .thresholds import Thresholds


# The scalings that give a tensor one scale.
_ONE_SCALE = DelayedScaling, StaticScaling, CurrentScaling
# With these, the next step's scale fits the newest amax, however large.
_FITS_NEWEST = MaxOfHistory, MostRecent, RecoveringMax
_NEARLY_ALL = 0.99
_BLOCKS_FOLLOW = 2.0**14


def not_finite(name: str, all: list[Operand], thresholds: Thresholds) -> Iterable[Seen]:
    """The first operand of a name with elements that are not finite: the others follow from it.

    A kernel spoils the inputs of later layers, an input the gradients; and gradients come from the last layer.
    """
    del thresholds
    bad = [operand for operand in all if operand["nonfinite"] > 0]
    if of_name := [operand for operand in bad if operand.name == name]:
        first = of_name[-1 if name == "output_grad" else 0]
        others = tuple(f"{operand.numbered_layer}/{operand.name}" for operand in bad if operand is not first)
        count = {"others_affected": len(others)} if others else {}
        yield Seen(first, {"nonfinite": first["nonfinite"], **count}, {"nonfinite": 0.0}, others)


def formats_swapped(all: list[Operand], thresholds: Thresholds) -> Iterable[Seen]:
    """E5M2 forward and E4M3 backward: the wrong way round."""
    del thresholds
    for operand in all:
        forward, backward = operand.recipe.input, operand.recipe.output_grad
        if operand.name == "input" and (forward.format, backward.format) == (E5M2, E4M3):
            yield Seen(operand, {}, {})


def not_calibrated(all: list[Operand], thresholds: Thresholds) -> Iterable[Seen]:
    """Scales at 1 that have seen no step, and do not fit; or those of all layers, whatever they do."""
    with_history = [operand for operand in all if operand.history is not None and operand["amax"] > 0.0]
    fresh = [o for o in with_history if o.history is not None and o.history.largest <= 0.0 and o.history.scale == 1.0]
    unfit = [o for o in fresh if _is_clipped(o, thresholds) or _is_flushed(o, thresholds)]
    # Of a model whose state no step has written, one finding says it.
    everywhere = {"all_operands": len(with_history)} if len(fresh) == len(with_history) else {}
    limits = {"saturation": thresholds.saturation, "underflow": thresholds.underflow} if unfit else {}
    for operand in unfit or fresh[: len(everywhere)]:
        yield Seen(operand, {"scale": 1.0, **everywhere, "amax": operand["amax"], **_shares(operand)}, limits)


def moved_at_once(all: list[Operand], thresholds: Thresholds) -> Iterable[Seen]:
    """Most kernels changed that much in one step: the learning rate. No scale fits after that, so it explains all."""
    changes = [(change, operand) for operand in all if (change := _change(operand)) is not None]
    moved = [(change, operand) for change, operand in changes if change > thresholds.kernel_jump]
    if len(changes) < 3 or 2 * len(moved) <= len(changes):
        return
    change, worst = max(moved, key=lambda pair: pair[0])
    assert worst.history is not None
    counts = {"moved": len(moved), "kernels": len(changes)}
    seen = {"amax": worst["amax"], "recorded": worst.history.newest, "kernel_jump": change, **counts}
    names = tuple(operand.numbered_layer for _, operand in moved)
    yield Seen(worst, seen, {"kernel_jump": thresholds.kernel_jump}, names)


def short_history(all: list[Operand], thresholds: Thresholds) -> Iterable[Seen]:
    """Operands that are clipped because their scale looks back on too few steps to have seen so large an amax."""
    for operand in all:
        history, memory = operand.history, operand.quantization.scaling.memory
        if history is None or not isinstance(memory, AmaxHistory) or not _is_clipped(operand, thresholds):
            continue
        length = 1 if isinstance(memory.amax_compute, MostRecent) else memory.length
        seen_by_scale = history.amaxes[-length:]
        if length >= HISTORY or not isinstance(memory.amax_compute, _FITS_NEWEST) or not seen_by_scale.all():
            continue
        # What grows in every step outgrows any history.
        last = history.amaxes[history.amaxes > 0.0][-thresholds.growth_steps :]
        grows = len(last) > 1 and bool((np.diff([*last, operand["amax"]]) > 0.0).all())
        if operand["amax"] > seen_by_scale.max() and not grows:
            past = {"largest": float(seen_by_scale.max()), "steps": length}
            yield Seen(operand, {"amax": operand["amax"], **past, **_shares(operand)}, {"history": HISTORY})


def jump(all: list[Operand], thresholds: Thresholds, *, of_gradient: bool, fits_next: bool) -> Iterable[Seen]:
    """Operands that are clipped because they are far larger than in any step that the history remembers: gradients or
    others, whose next scale fits or not."""
    for operand in all:
        history = operand.history
        if history is None or history.largest <= 0.0 or not _is_clipped(operand, thresholds):
            continue
        factor, memory = operand["amax"] / history.largest, operand.quantization.scaling.memory
        if factor > thresholds.jump and (operand.name == "output_grad") == of_gradient:
            assert isinstance(memory, AmaxHistory)
            if (memory.update_interval == 1 and isinstance(memory.amax_compute, _FITS_NEWEST)) == fits_next:
                seen = {"amax": operand["amax"], "jump": factor, **_shares(operand)}
                yield Seen(operand, seen, {"jump": thresholds.jump})


def growth(all: list[Operand], thresholds: Thresholds) -> Iterable[Seen]:
    """Amaxes that grow in every step: each step is clipped by the scale of the one before. One finding for a layer."""
    factor = lambda o: 1.0 if o.history is None else o.history.growth(thresholds.growth_steps)
    growing = [operand for operand in all if factor(operand) > thresholds.growth]
    # A kernel that grows makes gradients grow.
    growing.sort(key=lambda operand: operand.name != "kernel")
    reported: set[tuple[str, tuple[int, ...]]] = set()
    for operand in growing:
        key = operand.layer, operand.index
        if key in reported:
            continue
        reported.add(key)
        others = tuple(o.name for o in growing if (o.layer, o.index) == key and o is not operand)
        steps = {"growth_steps": thresholds.growth_steps}
        yield Seen(
            operand, {"growth": factor(operand), **steps, **_shares(operand)}, {"growth": thresholds.growth}, others
        )


def saturation(all: list[Operand], thresholds: Thresholds, *, delayed: bool) -> Iterable[Seen]:
    """Operands that are clipped, for no reason that the history shows."""
    for operand in all:
        if _is_clipped(operand, thresholds) and isinstance(operand.quantization.scaling.memory, AmaxHistory) == delayed:
            seen = {"saturation": operand["saturation"], "format_max": operand.format.max}
            yield Seen(operand, seen, {"saturation": thresholds.saturation})


def outliers(all: list[Operand], thresholds: Thresholds, *, in_rows: bool) -> Iterable[Seen]:
    """Inputs and kernels with a few elements so large that one scale for all flushes others to zero; in a few rows, or
    in so many that they are a channel."""
    limits = {"kurtosis": thresholds.kurtosis, "underflow_of_outliers": thresholds.underflow_of_outliers}
    for operand in all:
        if operand.name == "output_grad" or not isinstance(operand.quantization.scaling, _ONE_SCALE):
            continue
        if operand.amax_of_scale > thresholds.jump * operand["amax"]:
            continue  # The scale was made for other steps.
        if (operand["wide_rows"] <= thresholds.wide_rows) != in_rows:
            continue
        seen = {
            "wide_rows": operand["wide_rows"],
            "kurtosis": operand["kurtosis"],
            "underflow_of_outliers": operand["underflow"],
        }
        if operand["kurtosis"] > thresholds.kurtosis and operand["underflow"] > thresholds.underflow_of_outliers:
            yield Seen(operand, seen, limits)


def old_spike(all: list[Operand], thresholds: Thresholds, *, is_long: bool) -> Iterable[Seen]:
    """Operands flushed to zero by a scale that follows a larger amax of the history, a long or a short one."""
    for operand in _flushed(all, thresholds):
        history, memory = operand.history, operand.quantization.scaling.memory
        if not isinstance(memory, AmaxHistory) or history is None or not _is_old_spike(operand, memory, thresholds):
            continue
        if (memory.length > HISTORY) == is_long:
            past = {"largest": history.largest, "age": history.age, "amax": operand["amax"]}
            yield Seen(operand, {"underflow": operand["underflow"], **past}, {"underflow": thresholds.underflow})


def underflow(all: list[Operand], thresholds: Thresholds, *, gains_from_rows: bool) -> Iterable[Seen]:
    """Operands flushed to zero by a scale that has another reason, or by values of their own."""
    for operand in _flushed(all, thresholds):
        has_one_scale, history = isinstance(operand.quantization.scaling, _ONE_SCALE), operand.history
        is_of_other_steps = has_one_scale and operand.amax_of_scale > thresholds.jump * operand["amax"]
        has_narrow_rows = has_one_scale and operand["wide_rows"] <= thresholds.wide_rows
        # A scale per row in FP8 improves on blocks in FP4, but not on blocks in FP8.
        if (is_of_other_steps or has_narrow_rows or operand.format == E2M1) != gains_from_rows:
            continue
        seen = {"underflow": operand["underflow"], "amax": operand["amax"]}
        if history is not None and history.newest > thresholds.jump * operand["amax"]:
            seen["fell_from"] = history.newest
        elif is_of_other_steps:
            seen["amax_of_scale"] = operand.amax_of_scale
        else:
            seen |= {"dynamic_range": operand["dynamic_range"], "format_dynamic_range": operand.format.dynamic_range}
        yield Seen(operand, seen, {"underflow": thresholds.underflow})


def noise(all: list[Operand], thresholds: Thresholds) -> Iterable[Seen]:
    """Output gradients smaller than sqrt(3) times the noise of their quantization."""
    for operand in all:
        if operand.name == "output_grad" and operand["error"] > 1.0 / (3.0 * thresholds.over_noise**2):
            over_noise = (3.0 * operand["error"]) ** -0.5
            yield Seen(operand, {"over_noise": over_noise}, {"over_noise": thresholds.over_noise})


def expert_without_rows(all: list[Operand], thresholds: Thresholds) -> Iterable[Seen]:
    """Experts with a state each that the router sends nothing."""
    del thresholds
    idle = _idle(all)
    for operand in all:
        if operand.name == "input" and (operand.layer, operand.index) in idle:
            seen = {"expert": operand.index[-1], "active": 0.0}
            yield Seen(operand, seen, {}, (operand.layer_of_experts,))


def experts_without_rows(all: list[Operand], thresholds: Thresholds) -> Iterable[Seen]:
    """Layers of experts that share their state, to some of which the router sends nothing."""
    del thresholds
    for operand in all:
        if operand.name == "input" and operand.is_reached and operand["active"] < 1.0:
            seen = {"active": operand["active"], "idle": 1.0 - operand["active"]}
            yield Seen(operand, seen, {"active": 1.0}, (operand.layer_of_experts,))


def dead(all: list[Operand], thresholds: Thresholds) -> Iterable[Seen]:
    """Layers that nothing goes into, or that get no gradient.

    Two kinds are left out: layers in one module with a kernel of zeros, as in LoRA, and layers whose gradient was
    flushed to zero on its way.
    """
    del thresholds
    flushed = any(o.name == "output_grad" and o["underflow"] > _NEARLY_ALL for o in all)
    parents = {_parent(o.layer) for o in all if o.name == "kernel" and o["amax"] == 0.0}
    idle, reported = _idle(all), set()
    for operand in all:
        key = operand.layer, operand.index
        # Of a layer of experts that the loss does not reach, one finding says it.
        layer = operand.layer, operand.index[:-1] if operand.numbers_experts and not operand.is_reached else key[1]
        if operand.name == "kernel" or _parent(operand.layer) in parents or key in idle or layer in reported:
            continue
        if operand.is_reached and (operand["amax"] > 0.0 or (flushed and operand.name == "output_grad")):
            continue
        reported |= {key, layer}
        yield Seen(operand, {"amax": 0.0} if operand.is_reached else {"is_reached": False}, {})


def _flushed(operands: list[Operand], thresholds: Thresholds) -> list[Operand]:
    """Operands of which too much is flushed to zero.

    Gradients come from the last layer, so the last is named first: those before it get what is left.
    """
    flushed = [operand for operand in operands if _is_flushed(operand, thresholds)]
    gradients = [operand for operand in flushed if operand.name == "output_grad"]
    return [*(operand for operand in flushed if operand.name != "output_grad"), *reversed(gradients)]


def _is_flushed(operand: Operand, thresholds: Thresholds) -> bool:
    # In E2M1, where ordinary tensors lose 5 to 20 %, that must also cost more than rounding.
    costs = operand.format != E2M1 or operand["error"] > operand.format.relative_error**2
    return operand["underflow"] > thresholds.underflow and costs


def _is_old_spike(operand: Operand, memory: AmaxHistory, thresholds: Thresholds) -> bool:
    """Whether the scale follows the largest amax of the history, which is far above this step's and the last one's."""
    history = operand.history
    # Scales of blocks, in E4M3, follow values this far below the tensor's.
    jump = thresholds.jump if operand.quantization.scaling.stores_scale else _BLOCKS_FOLLOW
    if history is None or history.largest <= jump * max(operand["amax"], history.newest):
        return False
    # Scales are rounded up, to the next power of two at most.
    amax_of_scale = history.scale * operand.format.max / 2.0**memory.margin
    return 0.9 < amax_of_scale / history.largest < 2.1


def _is_clipped(operand: Operand, thresholds: Thresholds) -> bool:
    """Whether clipping costs more than rounding ever could: a few elements just above the maximum do no harm."""
    return operand["saturation"] > thresholds.saturation and operand["error"] > operand.format.relative_error**2


def _change(kernel: Operand) -> float | None:
    """By what factor a kernel's amax differs from what the last step recorded; None if it recorded another number."""
    history, memory = kernel.history, kernel.quantization.scaling.memory
    if kernel.name != "kernel" or history is None or min(history.newest, kernel["amax"]) <= 0.0:
        return None
    if isinstance(memory, AmaxHistory) and isinstance(memory.amax_compute, Percentile):
        return None
    ratio = kernel["amax"] / history.newest
    return max(ratio, 1.0 / ratio)


def _shares(operand: Operand) -> dict[str, float]:
    return {name: operand[name] for name in ("saturation", "underflow")}


def _idle(all: list[Operand]) -> set[tuple[str, tuple[int, ...]]]:
    """Experts with a state each that the loss does not reach, in layers that it does reach."""
    inputs = [o for o in all if o.name == "input" and o.numbers_experts]
    reached = {(o.layer, o.index[:-1]) for o in inputs if o.is_reached}
    return {(o.layer, o.index) for o in inputs if not o.is_reached and (o.layer, o.index[:-1]) in reached}


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
