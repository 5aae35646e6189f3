"""apply_remedies: a model with what a diagnosis recommends."""

import dataclasses
import logging
from collections.abc import Collection
from typing import Any

import haliax as hax

from ..formats import E4M3, E5M2
from ..layers import Fp8DotGeneral, LayerRule, default_rules
from ..layers.checks import check_not_modified, require_layers
from ..layers.walk import map_layers_in_stacks, named_ops, rule_of
from ..recipes import DelayedScaling, MaxOfHistory, MostRecent, Recipe, by_name
from ..training import OpState
from .finding import HISTORY, Diagnosis, Finding, Remedy


# As `TrainStep`'s: a library does not print.
_logger = logging.getLogger("haliax_fp8")


def apply_remedies[M](
    model: M,
    diagnosis: Diagnosis,
    remedies: Collection[Remedy] = tuple(Remedy),
    *,
    rules: tuple[LayerRule, ...] = default_rules,
) -> M:
    """Changes the recipes of the layers that a diagnosis names. Each change is logged to `haliax_fp8` at level INFO.

    Layers of one stack share a recipe, so all of them change. Scales carry over, histories start again. What a change
    of the model cannot mend, such as a learning rate, stays as it is. So do ops in classes without a rule, with a
    warning in the log.

    Args:
        model: The model that was diagnosed.
        diagnosis: What `diagnose` returned.
        remedies: Which remedies to apply; all by default.
        rules: The rules of `Fp8Config(rules=...)` that the model was converted with.

    Returns:
        The changed model; the given one stays as it is. Begin a new optimizer state only if a layer went to high
        precision or came from it: the parameters are the same.

    Raises:
        ValueError: If an argument has the wrong type, the diagnosis is of another model, or anything but its own update
            changed the state of a layer.

    Example:
        >>> model = fp8_linear_layers(model)
        >>> diagnosis = diagnose(model, quantization_statistics(model, loss_fn, x))
        >>> model = apply_remedies(model, diagnosis, [Remedy.MARGIN, Remedy.SHORTER_HISTORY])
    """
    require_layers(model, "apply_remedies(model, diagnosis, remedies)")
    if not isinstance(diagnosis, Diagnosis):
        raise ValueError(
            f"diagnosis={type(diagnosis).__name__} of apply_remedies is not a Diagnosis; pass what "
            "diagnose(model, statistics) returns"
        )
    if not isinstance(remedies, Collection) or not all(isinstance(remedy, Remedy) for remedy in remedies):
        raise ValueError(
            f"remedies={remedies!r} of apply_remedies is not a collection of Remedy; use [Remedy.MARGIN], or "
            "leave it out to apply all"
        )
    check_not_modified(model)
    chosen: dict[str, list[Finding]] = {}
    for finding in diagnosis.findings:
        if finding.remedy is not Remedy.NONE and finding.remedy in remedies:
            chosen.setdefault(finding.layer, []).append(finding)
    if unknown := chosen.keys() - dict(named_ops(model)).keys():
        raise ValueError(
            f"diagnosis names {min(unknown)!r}, where the model has no FP8 product; pass a diagnosis of this model"
        )
    unchanged = set(chosen)

    def apply(path: str, layer: Any, stack: tuple[hax.Axis, ...]) -> Any:
        rule = rule_of(layer, rules)
        op = rule.op(layer)
        if op is None or path not in chosen:
            return layer
        unchanged.discard(path)
        for finding in chosen[path]:
            where = f"{path or 'model'} ({finding.operand}, {finding.problem.value})"
            _logger.info("%s: %s", where, finding.remedy.value)
        if any(finding.remedy is Remedy.HIGH_PRECISION for finding in chosen[path]):
            return rule.with_op(layer, None)
        recipe = op.recipe
        for finding in chosen[path]:
            recipe = _changed(recipe, finding)
        made = rule.kernel(layer).init_op(recipe, op.compute_dtype, stack, scale_per_expert=op.state_per_group)
        return rule.with_op(layer, _with_scales(dataclasses.replace(op, recipe=recipe, state=made.state), op))

    changed = map_layers_in_stacks(apply, model, rules)
    for path in sorted(unchanged):
        _logger.warning("%s: not changed, because its layer's class has no LayerRule; change its recipe yourself", path)
    return changed


def _changed(recipe: Recipe, finding: Finding) -> Recipe:
    if finding.remedy in (Remedy.SHORTER_HISTORY, Remedy.LONGER_HISTORY):
        return _with_history(recipe, longer=finding.remedy is Remedy.LONGER_HISTORY)
    if finding.remedy is Remedy.SCALE_PER_ROW:
        return by_name("rowwise")
    if finding.remedy is Remedy.STANDARD_FORMATS:
        formats = {"input": E4M3, "kernel": E4M3, "output_grad": E5M2}
        changed = {name: dataclasses.replace(getattr(recipe, name), format=format) for name, format in formats.items()}
        return dataclasses.replace(recipe, **changed)
    assert finding.remedy is Remedy.MARGIN
    return recipe.with_delayed(
        lambda scaling: dataclasses.replace(scaling, margin=scaling.margin + 1), [finding.operand]
    )


def _with_history(recipe: Recipe, *, longer: bool) -> Recipe:
    """A recipe whose shorter histories, or longer ones, have `HISTORY` steps; the scale looks back on all of a longer
    one."""

    def changed(scaling: DelayedScaling) -> DelayedScaling:
        length = max(HISTORY, scaling.amax_history_length) if longer else min(HISTORY, scaling.amax_history_length)
        scaling = dataclasses.replace(scaling, amax_history_length=length)
        if longer and isinstance(scaling.amax_compute, MostRecent):
            scaling = dataclasses.replace(scaling, amax_compute=MaxOfHistory())
        return scaling

    return recipe.with_delayed(changed)


def _with_scales(op: Fp8DotGeneral, before: Fp8DotGeneral) -> Fp8DotGeneral:
    """The op with the scales of another, where both keep them."""
    of_op, of_before = op.state, before.state
    if not isinstance(of_op, OpState) or not isinstance(of_before, OpState):
        return op
    return dataclasses.replace(op, state=of_op.with_scale(of_before.scale))
