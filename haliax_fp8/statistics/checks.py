"""The checks of `diagnose`, as a table: what can be wrong, how one sees it, what to do, and what can be applied.

The order is that of urgency. An operand is reported once: what comes first explains what comes after.
"""

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial

from .conditions import (
    dead,
    expert_without_rows,
    experts_without_rows,
    formats_swapped,
    growth,
    jump,
    moved_at_once,
    noise,
    not_calibrated,
    not_finite,
    old_spike,
    outliers,
    saturation,
    short_history,
    underflow,
)
from .finding import Finding, Problem, Remedy, Words
from .operand import Operand, Seen
from .thresholds import Thresholds


type Condition = Callable[[list[Operand], Thresholds], Iterable[Seen]]


@dataclasses.dataclass(frozen=True)
class Check:
    """A row of the table.

    Args:
        problem: What is wrong.
        condition: Sees it, in any of the operands.
        words: How it is printed, with the advice.
        remedy: What `apply_remedies` does about it.
        explains_all: Whether it explains all else that is wrong with the model.
    """

    problem: Problem
    condition: Condition
    words: Words
    remedy: Remedy = Remedy.NONE
    explains_all: bool = False

    def findings(self, all: list[Operand], thresholds: Thresholds) -> list[Finding]:
        """What it finds among the operands of a model."""
        return [
            Finding(
                seen.operand.layer,
                seen.operand.index,
                seen.operand.name,
                self.problem,
                remedy=self.remedy,
                seen=seen.numbers,
                limits=seen.limits,
                others=seen.others,
                words=self.words,
            )
            for seen in self.condition(all, thresholds)
        ]


_SHARES = {"saturation": "{saturation:.2%} clipped, ", "underflow": "{underflow:.2%} flushed to zero"}
_FLUSHED = {"underflow": "{underflow:.1%} of the elements are flushed to zero"}
_UNDERFLOW = {
    **_FLUSHED,
    "fell_from": ": the amax fell from {fell_from:.2g} in the last step to {amax:.2g}",
    "amax_of_scale": ": its scale is made for an amax of {amax_of_scale:.2g}, but this step's is {amax:.2g}",
    "dynamic_range": "; its values span {dynamic_range:.0f} bits, the format holds {format_dynamic_range:.0f}",
}
_OLD_SPIKE = {
    **_FLUSHED,
    "largest": ": the scale follows an amax of {largest:.2g} from {age:g} steps ago, this step's is {amax:.2g}",
}
_CLIPPED = {"saturation": "{saturation:.2%} of the elements are clipped at {format_max:g} times the scale"}
_LIMIT_OF_UNDERFLOW = {"underflow": "{underflow:.0%}"}
_ANOTHER_LOSS = (
    "if this is not the loss that the model trains with, take its gradient with a forward-only recipe, such as "
    "delayed_fprop or rowwise_fprop; if the loss was multiplied or has another number of microbatches, calibrate "
    "again. Otherwise "
)
_BALANCE = "balance the router: an auxiliary loss, a bias for each expert, or noise"
_DOES_NOT_LEARN = "an expert without rows does not learn"

FINITE = tuple(
    Check(
        Problem.NOT_FINITE,
        partial(not_finite, operand),
        Words(
            {
                "nonfinite": ("1 element is infinite or NaN", "{nonfinite:g} elements are infinite or NaN"),
                "": f", first in {product}",
                "others_affected": (
                    "; 1 more operand is affected or has its own",
                    "; {others_affected} more operands are affected or have their own",
                ),
            },
            {"nonfinite": "{nonfinite:g} elements"},
            advice,
            source="any of them makes the loss or a gradient NaN",
        ),
        explains_all=True,
    )
    for operand, product, advice in (
        (
            "kernel",
            "fprop and dgrad",
            "the weight itself is spoiled: go back to the last checkpoint, and skip steps whose gradients are not "
            "finite (optax.apply_if_finite)",
        ),
        (
            "input",
            "fprop",
            "look for the first NaN in the batch and in what comes before this layer; clean the data or skip the step "
            "(optax.apply_if_finite)",
        ),
        (
            "output_grad",
            "dgrad",
            "the loss's gradient is not finite after this layer: look for log(0), 0/0 or an overflow in the loss; skip "
            "the step (optax.apply_if_finite)",
        ),
    )
)
"""The checks that everything is finite."""

CHECKS: tuple[Check, ...] = (
    *FINITE,
    Check(
        Problem.FORMATS_SWAPPED,
        formats_swapped,
        Words(
            {"": "inputs are in E5M2, with 2 bits of mantissa, and output gradients in E4M3"},
            {"": "E4M3 for inputs and kernels, E5M2 for output gradients"},
            "use a named recipe, or Recipe.of(scaling), which has the formats the right way round",
            source="arXiv:2209.05433, section 3",
        ),
        Remedy.STANDARD_FORMATS,
    ),
    Check(
        Problem.NOT_CALIBRATED,
        not_calibrated,
        Words(
            {
                "scale": "scale 1 and an empty history",
                "all_operands": ", as those of all {all_operands} operands",
                "amax": "; amax {amax:.2g}, ",
                **_SHARES,
            },
            {
                "": "a step or a calibration that has written the state",
                "saturation": "; {saturation:.1%} clipped or ",
                "underflow": "{underflow:.0%} flushed to zero",
            },
            "calibrate the model before training: model = step.calibrate(model, *batch). If it has been trained, its "
            "state is not updated: apply the overwrites of every step",
        ),
    ),
    Check(
        Problem.JUMP,
        moved_at_once,
        Words(
            {
                "recorded": "amax {amax:.2g}; the last step recorded {recorded:.2g}",
                "moved": ". {moved} of {kernels} kernels moved that far: {others}. Everything else that is wrong "
                "follows from it",
            },
            {"kernel_jump": "a factor of {kernel_jump:.2g} in most kernels"},
            "lower the learning rate, lengthen its warmup or clip gradients (optax.clip_by_global_norm), and go back "
            "to a checkpoint",
        ),
        explains_all=True,
    ),
    Check(
        Problem.SHORT_HISTORY,
        short_history,
        Words(
            {
                "largest": "amax {amax:.2g}, but the scale is made for {largest:.2g}",
                "steps": (", the amax of the last step; ", ", the largest of the last {steps} steps; "),
                **_SHARES,
            },
            {"history": "a history of {history} steps"},
            "remember more steps, DelayedScaling(amax_history_length=16): a scale that has seen the largest amax does "
            "not clip the next one",
        ),
        Remedy.LONGER_HISTORY,
    ),
    *(
        Check(
            Problem.JUMP,
            partial(jump, of_gradient=of_gradient, fits_next=fits_next),
            Words(
                {"jump": "amax {amax:.2g}, {jump:.2g} times the largest of the history; ", **_SHARES},
                {"jump": "a factor of {jump:g}"},
                (_ANOTHER_LOSS if of_gradient else "")
                + ("the next step's scale will fit. If" if fits_next else "if")
                + " it happens again and again, look for the batch or layer that causes it, and use a recipe that "
                "measures the amax in the step itself: rowwise or mxfp8",
            ),
            Remedy.SCALE_PER_ROW,
        )
        for of_gradient in (False, True)
        for fits_next in (True, False)
    ),
    Check(
        Problem.GROWTH,
        growth,
        Words(
            {
                "growth": "amax grew in each of the last {growth_steps} steps, {growth:.2g} times in all",
                "others": ", and so did that of {others}",
                "": "; ",
                **_SHARES,
            },
            {"growth": "a factor of {growth:g}"},
            "training diverges, or warms up: look at the learning rate and at normalization. Until it settles, a "
            "margin of one binade keeps growing operands from being clipped",
        ),
        Remedy.MARGIN,
    ),
    Check(
        Problem.SATURATION,
        partial(saturation, delayed=True),
        Words(
            _CLIPPED,
            {"saturation": "{saturation:.1%}"},
            "give the operand headroom, DelayedScaling(margin=1), or a recipe that measures the amax in the step "
            "itself",
        ),
        Remedy.MARGIN,
    ),
    Check(
        Problem.SATURATION,
        partial(saturation, delayed=False),
        Words(
            _CLIPPED,
            {"saturation": "{saturation:.1%}"},
            "calibrate the scale on more batches, or use a recipe that measures the amax in the step itself",
        ),
        Remedy.SCALE_PER_ROW,
    ),
    *(
        Check(
            Problem.OUTLIERS,
            partial(outliers, in_rows=in_rows),
            Words(
                {
                    "kurtosis": "kurtosis {kurtosis:.0f} (a normal distribution has 3), and ",
                    "underflow_of_outliers": "{underflow_of_outliers:.1%} of the elements are flushed to zero: a few ",
                    "wide_rows": f"{few} determine the scale of all",
                },
                {"kurtosis": "{kurtosis:g} and ", "underflow_of_outliers": "{underflow_of_outliers:.0%}"},
                advice,
            ),
            remedy,
        )
        for in_rows, few, advice, remedy in (
            (
                True,
                "rows",
                "scales per row or block confine outliers: rowwise, deepseek or mxfp8",
                Remedy.SCALE_PER_ROW,
            ),
            (
                False,
                "channels, in {wide_rows:.0%} of the rows,",
                "a scale per row does not confine what lies in every row: scales per block, mxfp8 or deepseek, or this "
                "layer in high precision",
                Remedy.HIGH_PRECISION,
            ),
        )
    ),
    Check(
        Problem.OLD_SPIKE,
        partial(old_spike, is_long=True),
        Words(
            _OLD_SPIKE,
            _LIMIT_OF_UNDERFLOW,
            "use a shorter history, or DelayedScaling(amax_compute=RecoveringMax())",
        ),
        Remedy.SHORTER_HISTORY,
    ),
    Check(
        Problem.OLD_SPIKE,
        partial(old_spike, is_long=False),
        Words(
            _OLD_SPIKE,
            _LIMIT_OF_UNDERFLOW,
            "use a recipe that measures the amax in the step itself: rowwise or mxfp8",
        ),
        Remedy.SCALE_PER_ROW,
    ),
    Check(
        Problem.UNDERFLOW,
        partial(underflow, gains_from_rows=True),
        Words(
            _UNDERFLOW,
            _LIMIT_OF_UNDERFLOW,
            "E5M2 for output gradients, finer scales (rowwise, mxfp8), or this layer in high precision",
        ),
        Remedy.SCALE_PER_ROW,
    ),
    Check(
        Problem.UNDERFLOW,
        partial(underflow, gains_from_rows=False),
        Words(
            _UNDERFLOW,
            _LIMIT_OF_UNDERFLOW,
            "this layer in high precision: its rows or blocks have scales, or would gain nothing from them",
        ),
        Remedy.HIGH_PRECISION,
    ),
    Check(
        Problem.NOISE,
        noise,
        Words(
            {"over_noise": "the gradient is {over_noise:.2g} · sqrt(3) times as large as its quantization noise"},
            {"over_noise": "{over_noise:g} · sqrt(3)"},
            "finer scales (rowwise, mxfp8), more mantissa for gradients, or this layer in high precision",
            source="arXiv:2505.19115, section 5",
        ),
        Remedy.HIGH_PRECISION,
    ),
    Check(
        Problem.NO_ROWS,
        expert_without_rows,
        Words(
            {"expert": "expert {expert} of {others} received no rows"},
            {"": "any row"},
            _BALANCE,
            source=_DOES_NOT_LEARN,
        ),
    ),
    Check(
        Problem.NO_ROWS,
        experts_without_rows,
        Words(
            {"idle": "{idle:.1%} of the experts of {others} received no rows"},
            {"": "a row for each expert"},
            f"{_BALANCE}. Experts that share their scales are not told apart; after Fp8Config(scale_per_expert=True) "
            "this names them",
            source=_DOES_NOT_LEARN,
        ),
    ),
    Check(
        Problem.DEAD,
        dead,
        Words(
            {
                "amax": "the {operand} is zero everywhere",
                "is_reached": "the {operand} is not reached by the loss",
            },
            {"": "any element that is not zero"},
            "if the layer is an expert, it got no rows: balance the router. Otherwise look for activations that are "
            "zero for every input, a mask, a stopped gradient, or a layer that the model does not call",
            source="a layer without input or gradient does not learn",
        ),
    ),
)
"""All checks, the most urgent first."""
