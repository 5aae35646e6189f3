"""The checks of `diagnose`: each finds one kind of problem among all operands of a model.

Their order is that of urgency. An operand is reported once: what comes first explains what comes after.
"""

import math
from collections.abc import Callable, Iterable

from ..._numerics.formats import E2M1, E4M3, E5M2
from ...recipes.scaling import CurrentScaling, DelayedScaling, StaticScaling
from ...recipes.scaling.amax_of_history import MaxOfHistory, MostRecent, RecoveringMax
from .dead import dead, experts_without_rows
from .finding import SHORTER_HISTORY, Finding, Problem, Remedy
from .kernels import foreign_state, moved_at_once
from .new_finding import new_finding
from .operand import Operand
from .thresholds import Thresholds


type Check = Callable[[list[Operand], Thresholds], Iterable[Finding]]

# The scalings that give a tensor one scale.
_ONE_SCALE = DelayedScaling, StaticScaling, CurrentScaling
# With these, the next step's scale fits the newest amax, however large.
_FITS_NEWEST = MaxOfHistory, MostRecent, RecoveringMax

_ANOTHER_LOSS = (
    "if this is not the loss that the model trains with, take its gradient with a forward-only recipe, such as "
    "delayed_fprop or rowwise_fprop; if the loss was multiplied or has another number of microbatches, calibrate "
    "again. Otherwise "
)
_PAPER_OF_FORMATS = "arXiv:2209.05433, section 3"
_PAPER_OF_NOISE = "arXiv:2505.19115, section 5"


def not_finite(all: list[Operand], thresholds: Thresholds) -> Iterable[Finding]:
    """The first operand with elements that are not finite: the others follow from it."""
    del thresholds
    bad = [operand for operand in all if operand["nonfinite"] > 0]
    for name, order, product in (("kernel", 0, "fprop and dgrad"), ("input", 0, "fprop"), ("output_grad", -1, "dgrad")):
        # A kernel spoils the inputs of later layers, an input the gradients; and gradients come from the last layer.
        if of_name := [operand for operand in bad if operand.name == name]:
            count, others = int(of_name[order]["nonfinite"]), len(bad) - 1
            seen = "1 element is infinite or NaN" if count == 1 else f"{count} elements are infinite or NaN"
            rest = "operand is affected or has its own" if others == 1 else "operands are affected or have their own"
            more = f"; {others} more {rest}" if others else ""
            yield new_finding(
                of_name[order],
                Problem.NOT_FINITE,
                seen=f"{seen}, first in {product}{more}",
                threshold="0 elements",
                source="any of them makes the loss or a gradient NaN",
                advice={
                    "kernel": "the weight itself is spoiled: go back to the last checkpoint, and skip steps whose "
                    "gradients are not finite (optax.apply_if_finite)",
                    "input": "look for the first NaN in the batch and in what comes before this layer; clean the data "
                    "or skip the step (optax.apply_if_finite)",
                    "output_grad": "the loss's gradient is not finite after this layer: look for log(0), 0/0 or an "
                    "overflow in the loss; skip the step (optax.apply_if_finite)",
                }[name],
            )
            return


def formats_swapped(all: list[Operand], thresholds: Thresholds) -> Iterable[Finding]:
    """E5M2 forward and E4M3 backward: the wrong way round."""
    del thresholds
    for operand in all:
        forward, backward = operand.recipe.input, operand.recipe.output_grad
        if operand.name == "input" and (forward.format, backward.format) == (E5M2, E4M3):
            yield new_finding(
                operand,
                Problem.FORMATS_SWAPPED,
                seen="inputs are in E5M2, with 2 bits of mantissa, and output gradients in E4M3",
                threshold="E4M3 for inputs and kernels, E5M2 for output gradients",
                source=_PAPER_OF_FORMATS,
                advice="use a named recipe, or Recipe.of(scaling), which has the formats the right way round",
                remedy=Remedy.STANDARD_FORMATS,
            )


def not_calibrated(all: list[Operand], thresholds: Thresholds) -> Iterable[Finding]:
    """Scales at 1 that have seen no step, and do not fit; or those of all layers, whatever they do."""
    kept = [operand for operand in all if operand.history is not None and operand["amax"] > 0.0]
    fresh = [o for o in kept if o.history is not None and o.history.largest <= 0.0 and o.history.scale == 1.0]
    unfit = [o for o in fresh if _is_clipped(o, thresholds) or o["underflow"] > thresholds.underflow]
    # Of a model whose state no step has written, one finding says it.
    everywhere = f", as those of all {len(kept)} operands" if len(fresh) == len(kept) else ""
    for operand in unfit or fresh[: bool(everywhere)]:
        yield new_finding(
            operand,
            Problem.NOT_CALIBRATED,
            seen=f"scale 1 and an empty history{everywhere}; amax {operand['amax']:.2g}, {_shares(operand)}",
            threshold=_limits(thresholds) if unfit else "a step or a calibration that has written the state",
            source="heuristic",
            advice="calibrate the model before training: model = step.calibrate(model, *batch). If it has been "
            "trained, its state is not updated: apply the overwrites of every step",
        )


def jump(all: list[Operand], thresholds: Thresholds) -> Iterable[Finding]:
    """Operands that are clipped because they are far larger than in any step that the history remembers."""
    for operand in all:
        history = operand.history
        if history is None or history.largest <= 0.0 or not _is_clipped(operand, thresholds):
            continue
        factor, scaling = operand["amax"] / history.largest, operand.quantization.scaling
        if factor > thresholds.jump:
            assert isinstance(scaling, DelayedScaling)
            fits = scaling.update_interval == 1 and isinstance(scaling.amax_compute, _FITS_NEWEST)
            yield new_finding(
                operand,
                Problem.JUMP,
                seen=f"amax {operand['amax']:.2g}, {factor:.2g} times the largest of the history; {_shares(operand)}",
                threshold=f"a factor of {thresholds.jump:g}",
                source="heuristic",
                advice=(_ANOTHER_LOSS if operand.name == "output_grad" else "")
                + ("the next step's scale will fit. If" if fits else "if")
                + " it happens again and again, look for the batch or layer that causes it, and use a recipe that "
                "measures the amax in the step itself: rowwise or mxfp8",
                remedy=Remedy.SCALE_PER_ROW,
            )


def growth(all: list[Operand], thresholds: Thresholds) -> Iterable[Finding]:
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
        others = [o.name.replace("_", " ") for o in growing if (o.layer, o.index) == key and o is not operand]
        too = f", and so did that of the {' and the '.join(others)}" if others else ""
        yield new_finding(
            operand,
            Problem.GROWTH,
            seen=f"amax grew in each of the last {thresholds.growth_steps} steps, {factor(operand):.2g} times in all"
            f"{too}; {_shares(operand)}",
            threshold=f"a factor of {thresholds.growth:g}",
            source="heuristic",
            advice="training diverges, or warms up: look at the learning rate and at normalization. Until it "
            "settles, a margin of one binade keeps growing operands from being clipped",
            remedy=Remedy.MARGIN,
        )


def saturation(all: list[Operand], thresholds: Thresholds) -> Iterable[Finding]:
    """Operands that are clipped, for no reason that the history shows."""
    for operand in all:
        if _is_clipped(operand, thresholds):
            delayed = isinstance(operand.quantization.scaling, DelayedScaling)
            yield new_finding(
                operand,
                Problem.SATURATION,
                seen=f"{operand['saturation']:.2%} of the elements are clipped at {operand.format.max:g} times the "
                "scale",
                threshold=f"{thresholds.saturation:.1%}",
                source="heuristic",
                advice="give the operand headroom, DelayedScaling(margin=1), or a recipe that measures the amax in the "
                "step itself"
                if delayed
                else "calibrate the scale on more batches, or use a recipe that measures the amax in the step itself",
                remedy=Remedy.MARGIN if delayed else Remedy.SCALE_PER_ROW,
            )


def outliers(all: list[Operand], thresholds: Thresholds) -> Iterable[Finding]:
    """Inputs and kernels with a few elements so large that one scale for all flushes others to zero."""
    for operand in all:
        if operand.name == "output_grad" or not isinstance(operand.quantization.scaling, _ONE_SCALE):
            continue
        if operand.amax_of_scale > thresholds.jump * operand["amax"]:
            continue  # The scale was made for other steps.
        if operand["kurtosis"] > thresholds.kurtosis and operand["underflow"] > thresholds.underflow_of_outliers:
            yield new_finding(
                operand,
                Problem.OUTLIERS,
                seen=f"kurtosis {operand['kurtosis']:.0f} (a normal distribution has 3), and "
                f"{operand['underflow']:.1%} of the elements are flushed to zero: a few elements or channels determine "
                "the scale of all",
                threshold=f"{thresholds.kurtosis:g} and {thresholds.underflow_of_outliers:.0%}",
                source="heuristic",
                advice="scales per row or block confine outliers: rowwise, deepseek or mxfp8",
                remedy=Remedy.SCALE_PER_ROW,
            )


def underflow(all: list[Operand], thresholds: Thresholds) -> Iterable[Finding]:
    """Operands flushed to zero in large part: by a scale that follows larger amaxes, or by values of their own.

    Gradients come from the last layer, so the last is named first: those before it get what is left.
    """
    flushed = [operand for operand in all if _is_flushed(operand, thresholds)]
    gradients = [operand for operand in flushed if operand.name == "output_grad"]
    for operand in [*(o for o in flushed if o.name != "output_grad"), *reversed(gradients)]:
        history, seen = operand.history, f"{operand['underflow']:.1%} of the elements are flushed to zero"
        limit = f"{thresholds.underflow:.0%}"
        if _is_old_spike(operand, thresholds):
            scaling = operand.quantization.scaling
            assert history is not None and isinstance(scaling, DelayedScaling)
            is_long = scaling.amax_history_length > SHORTER_HISTORY
            yield new_finding(
                operand,
                Problem.OLD_SPIKE,
                seen=f"{seen}: the scale follows an amax of {history.largest:.2g} from {history.age} steps ago, this "
                f"step's is {operand['amax']:.2g}",
                threshold=limit,
                source="heuristic",
                advice="use a shorter history, or DelayedScaling(amax_compute=RecoveringMax())"
                if is_long
                else "use a recipe that measures the amax in the step itself: rowwise or mxfp8",
                remedy=Remedy.SHORTER_HISTORY if is_long else Remedy.SCALE_PER_ROW,
            )
            continue
        has_one_scale, scale_of = isinstance(operand.quantization.scaling, _ONE_SCALE), operand.amax_of_scale
        if history is not None and history.newest > thresholds.jump * operand["amax"]:
            why = f": the amax fell from {history.newest:.2g} in the last step to {operand['amax']:.2g}"
        elif has_one_scale and scale_of > thresholds.jump * operand["amax"]:
            why = f": its scale is made for an amax of {scale_of:.2g}, but this step's is {operand['amax']:.2g}"
        else:
            why = (
                f"; its values span {operand['dynamic_range']:.0f} bits, {operand.format.name} holds "
                f"{operand.format.dynamic_range:.0f}"
            )
        # A scale per row in FP8 improves on blocks in FP4, but not on blocks in FP8.
        gains_from_rows = has_one_scale or operand.format == E2M1
        yield new_finding(
            operand,
            Problem.UNDERFLOW,
            seen=seen + why,
            threshold=limit,
            source="heuristic",
            advice="E5M2 for output gradients, finer scales (rowwise, mxfp8), or this layer in high precision"
            if gains_from_rows
            else "this layer in high precision: each of its rows or blocks already has a scale",
            remedy=Remedy.SCALE_PER_ROW if gains_from_rows else Remedy.HIGH_PRECISION,
        )


def noise(all: list[Operand], thresholds: Thresholds) -> Iterable[Finding]:
    """Output gradients smaller than sqrt(3) times the noise of their quantization."""
    for operand in all:
        if operand.name == "output_grad" and operand["error"] > 1.0 / (3.0 * thresholds.over_noise**2):
            yield new_finding(
                operand,
                Problem.NOISE,
                seen=f"the gradient is {1 / math.sqrt(operand['error']):.2g} times as large as its quantization noise",
                threshold=f"sqrt(3) * {thresholds.over_noise:g}",
                source=_PAPER_OF_NOISE,
                advice="finer scales (rowwise, mxfp8), more mantissa for gradients, or this layer in high precision",
                remedy=Remedy.HIGH_PRECISION,
            )


CHECKS: tuple[Check, ...] = (
    not_finite,
    formats_swapped,
    not_calibrated,
    moved_at_once,
    foreign_state,
    jump,
    growth,
    saturation,
    outliers,
    underflow,
    noise,
    experts_without_rows,
    dead,
)
"""All checks, the most urgent first."""

EXPLAIN_ALL: tuple[Check, ...] = (not_finite, moved_at_once)
"""The checks for problems that make all other numbers meaningless."""


def _is_flushed(operand: Operand, thresholds: Thresholds) -> bool:
    """Whether too much is flushed to zero.

    In E2M1, where ordinary tensors lose 5 to 20 %, that must also cost more than rounding.
    """
    costs = operand.format != E2M1 or operand["error"] > operand.format.relative_error**2
    return operand["underflow"] > thresholds.underflow and costs


def _is_old_spike(operand: Operand, thresholds: Thresholds) -> bool:
    """Whether the scale follows the largest amax of the history, which is far above this step's and the last one's."""
    history = operand.history
    if history is None or history.largest <= thresholds.jump * max(operand["amax"], history.newest):
        return False
    # Scales are rounded up, to the next power of two at most.
    return 0.9 < operand.amax_of_scale / history.largest < 2.1


def _is_clipped(operand: Operand, thresholds: Thresholds) -> bool:
    """Whether clipping costs more than rounding ever could: a few elements just above the maximum do no harm."""
    return operand["saturation"] > thresholds.saturation and operand["error"] > operand.format.relative_error**2


def _shares(operand: Operand) -> str:
    return f"{operand['saturation']:.2%} clipped, {operand['underflow']:.2%} flushed to zero"


def _limits(thresholds: Thresholds) -> str:
    return f"{thresholds.saturation:.1%} clipped or {thresholds.underflow:.0%} flushed to zero"
