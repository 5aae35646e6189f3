"""fp8_linear_layers and restore_linear_layers, and the decision for each layer."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, Unpack

import haliax as hax

from .._op import Fp8DotGeneral, Skipped
from ..devices.device import Device
from ..devices.xla_flags import XlaFlags
from ..recipes.compiler_options import log_cost_of_flags
from ..recipes.recipe import Recipe
from ..recipes.support import require_support, supported
from .checks import require_layers, require_weights
from .config import Fp8Config, Fp8Options, as_config, default_rules
from .quantized import is_quantized_layer
from .roles import only_if_named
from .rule import LayerRule, OnlyIfNamed
from .walk import Pattern, as_patterns, find_layers, map_layers, matches, nothing_to_convert, rule_of, unmatched_error


def fp8_linear_layers[M](module: M, config: Fp8Config | None = None, **options: Unpack[Fp8Options]) -> M:
    """Converts the linear layers of a model to FP8.

    Replaces the `dot_general` of every selected layer with an `Fp8DotGeneral`; weights, and everything else in the
    tree, do not change. Works on any tree: attributes, lists, dicts, `haliax.nn.Stacked` and `BlockSeq` at any depth,
    ensembles made by `eqx.filter_vmap`, and abstract models (`eqx.filter_eval_shape`). A layer that is already
    converted keeps its state if it would get the same recipe.

    Args:
        module: The model, or any tree that contains linear layers.
        config: What to convert, and how; the default converts every linear layer with delayed scaling.
        **options: Fields of `Fp8Config`, instead of `config`: `fp8_linear_layers(model, recipe="rowwise")`.

    Returns:
        The converted model. `module` is unchanged. A warning names frozen layers, and patterns that leave no layer.

    Raises:
        ValueError: If the model has no layer that can be converted, or but for frozen ones none is left; if a pattern
            selects no layer (the nearest paths are listed, or the reasons of `FasterOn`), or `targets` names one that
            cannot be converted; if `serving.quantize_for_inference` made layers that are to be converted; if the
            default device lacks the units for a recipe and `emulate` is False; or if `config` is not an `Fp8Config`, or
            options are given too.

    Example:
        >>> In, Out = hax.Axis("in", 64), hax.Axis("out", 128)
        >>> layer = fp8_linear_layers(hnn.Linear.init(In, Out, key=jax.random.key(0)), recipe="current")
        >>> layer.dot_general
        Fp8DotGeneral(CurrentScaling E4M3/E4M3/E5M2)
    """
    config = as_config(config, options, call="fp8_linear_layers(model, ")
    require_layers(module, "fp8_linear_layers(module)", "module")
    decisions = decide(module, config)
    chosen = {path: made.layer for path, made in decisions.items() if _select(path, made.layer, config)[0] is not None}
    require_weights(chosen, "module", "Convert the model that it was made from")
    if not any(decision.is_convertible for decision in decisions.values()):
        refusals = {path: decision.reason for path, decision in decisions.items()}
        raise nothing_to_convert(module, config.rules, refusals)
    _check_what_is_left(decisions, [path for path, layer in chosen.items() if is_quantized_layer(layer)])
    if not config.emulate:
        device = Device.default()
        chosen = [(decision, decision.recipe) for decision in decisions.values() if decision.recipe is not None]
        for decision, recipe in chosen:
            kernel = decision.rule.kernel(decision.layer)
            dense = config.allow_dense_groups and kernel.Experts is not None
            require_support(recipe, supported(recipe, device) if dense else kernel.support(recipe, device))
        log_cost_of_flags(XlaFlags.of_environment(), device, dict.fromkeys(recipe for _, recipe in chosen))
    converted: dict[Any, Any] = {}
    skipped = Skipped({path: decision.reason for path, decision in decisions.items() if decision.recipe is None})

    def convert(path: str, layer: Any) -> Any:
        decision = decisions[path]
        if decision.recipe is None:
            return layer
        op, rule = decision.rule.op(layer), decision.rule
        kernel = rule.kernel(layer)
        per_expert = config.scale_per_expert and kernel.Experts is not None
        made_of = decision.recipe, config.compute_dtype, per_expert
        if op is not None and (op.recipe, op.compute_dtype, op.state_per_group) == made_of:
            return _with_choices(rule, layer, op, config, skipped)
        # The same object at two paths stays one object, unless an override gives one of the paths another recipe.
        key = id(layer), decision.recipe
        if key not in converted:
            choices = {"scale_per_expert": config.scale_per_expert}
            op = kernel.init_op(decision.recipe, config.compute_dtype, decision.stack, **choices)
            converted[key] = _with_choices(rule, layer, op, config, skipped)
        return converted[key]

    return map_layers(convert, module, config.rules)


def _check_what_is_left(decisions: Mapping[str, "Decision"], frozen: list[str]) -> None:
    """Warns of selected layers that are frozen, and of patterns that leave none; raises if all left are frozen."""
    is_any = any(made.recipe is not None or made.rule.op(made.layer) is not None for made in decisions.values())
    if frozen:
        more = f" and {len(frozen) - 3} more" if len(frozen) > 3 else ""
        message = (
            f"{', '.join(frozen[:3])}{more} cannot be converted: their weights are quantized and frozen. Make plain "
            "layers of them first, before adapters: fp8_linear_layers(serving.dequantize(model))"
        )
        if not is_any:
            raise ValueError(f"module has no other layer to convert, and {message}")
        warnings.warn(message, stacklevel=3)
    elif not is_any:
        reasons = dict.fromkeys(made.reason for made in decisions.values() if made.is_convertible)
        warnings.warn(f"fp8_linear_layers converted no layer: {'; '.join(reasons)}", stacklevel=3)


def _with_choices(rule: LayerRule, layer: Any, op: Fp8DotGeneral, config: Fp8Config, skipped: Skipped) -> Any:
    """The layer with an op that computes as the configuration says: what changes neither recipe nor state."""
    # Emulated, a grouped product is dense in any case.
    dense = config.allow_dense_groups or config.emulate
    choices = {"kernel_residual": config.kernel_residual, "one_pass": config.one_pass, "allow_dense_groups": dense}
    is_same = all(getattr(op, name) == choice for name, choice in choices.items())
    says_why = op.skipped is not None and op.skipped.reasons == skipped.reasons
    if rule.op(layer) is op and is_same and says_why:
        return layer
    return rule.with_op(layer, dataclasses.replace(op, **choices, skipped=skipped))


def restore_linear_layers[M](model: M, *, rules: tuple[LayerRule, ...] = default_rules) -> M:
    """Removes FP8 from a model: the inverse of `fp8_linear_layers`.

    Args:
        model: A converted model.
        rules: The rules that it was converted with.

    Returns:
        The model with plain layers and without FP8 state.

    Raises:
        ValueError: If `model` was made by `serving.quantize_for_inference`, whose layers have no weights.
    """
    require_layers(model, "restore_linear_layers(model)")
    require_weights(model, "model", "Restore the model that it was made from")

    def restore(path: str, layer: Any) -> Any:
        rule = rule_of(layer, rules)
        return layer if rule.op(layer) is None else rule.with_op(layer, None)

    return map_layers(restore, model, rules)


# --- the decision for each layer


@dataclasses.dataclass(frozen=True)
class Decision:
    """What happens to one layer.

    Args:
        layer: The layer.
        rule: Its rule.
        stack: The stacks that it is in.
        recipe: The recipe that it gets; None if it stays in high precision.
        reason: Why it stays in high precision; empty otherwise.
        refusal: Why it cannot be converted, or is converted only if it is named; None for most layers.
    """

    layer: Any
    rule: LayerRule
    stack: tuple[hax.Axis, ...]
    recipe: Recipe | None
    reason: str
    refusal: str | OnlyIfNamed | None

    @property
    def is_convertible(self) -> bool:
        """Whether the layer is converted, or could be with other targets, overrides or tokens."""
        return self.recipe is not None or self.rule.op(self.layer) is not None or self.refusal is None


def decide(module: Any, config: Fp8Config) -> dict[str, Decision]:
    """The decision for each layer, by path; raises as described in `fp8_linear_layers`."""
    layers = find_layers(module, config.rules)
    for name, patterns in (
        ("targets", config.named_targets),
        ("exclude", config.exclude),
        ("overrides", (*config.overrides,)),
    ):
        for pattern in as_patterns(name, patterns):
            if not any(matches(pattern, path, layer) for path, (layer, _) in layers.items()):
                raise unmatched_error(name, pattern, list(layers))
    rules = {path: rule_of(layer, config.rules) for path, (layer, _) in layers.items()}
    kernels = {path: rules[path].kernel(layer) for path, (layer, _) in layers.items()}
    optional = only_if_named(module, {path: layer for path, (layer, _) in layers.items()}, kernels)
    decisions, judged = {}, {}
    for path, (layer, stack) in layers.items():
        rule = rules[path]
        refusal = _refusal(layer, rule, optional.get(path))
        recipe, reason, is_named = _select(path, layer, config)
        match refusal:
            case str():
                if recipe is not None and is_named:
                    raise ValueError(f"the targets or overrides select {path}, which cannot be converted: {refusal}")
                recipe, reason = None, refusal
            case OnlyIfNamed() if recipe is not None and not is_named:
                recipe, reason = None, refusal.reason
        if recipe is not None and not is_named and config.faster_on:
            slower = [one.refusal(rule, layer, stack, recipe, config.kernel_residual) or "" for one in config.faster_on]
            judged[path] = reason = "" if "" in slower else slower[0]
            recipe = None if reason else recipe
        decisions[path] = Decision(layer, rule, stack, recipe, reason, refusal)
    if judged and all(judged.values()):
        shown = "; ".join(f"{path or 'the module itself'}: {reason}" for path, reason in list(judged.items())[:3])
        more = f"; and {len(judged) - 3} more" if len(judged) > 3 else ""
        raise ValueError(
            f"targets=FasterOn(...) selects no layer: {shown}{more}. Train the model without converting it, or name "
            "layers to convert anyway; print(describe(model, predict=FasterOn(...))) shows every layer's gain"
        )
    return decisions


def _refusal(layer: Any, rule: LayerRule, of_role: OnlyIfNamed | None) -> str | OnlyIfNamed | None:
    """Why a layer cannot be converted, or only if it is named: as its rule says, and what it is in the model."""
    refusal = rule.refusal(layer)
    if not isinstance(refusal, str | OnlyIfNamed | None):
        raise ValueError(
            f"{type(rule).__name__}.refusal(layer) returned {refusal!r}: it must return a reason, OnlyIfNamed(reason), "
            "or None for a layer that can be converted"
        )
    if isinstance(refusal, str):
        if rule.op(layer) is None:
            return refusal
        refusal = None
    return refusal if of_role is None else of_role


def _select(path: str, layer: Any, config: Fp8Config) -> tuple[Recipe | None, str, bool]:
    """The recipe, or the reason for none; and whether a pattern names this layer."""
    for pattern in as_patterns("exclude", config.exclude):
        if matches(pattern, path, layer):
            return None, f"excluded by {pattern!r}", True
    if (pattern := _override(path, layer, config)) is not None:
        recipe = config.resolved_overrides[pattern]
        return recipe, "" if recipe is not None else f"left alone by the override {pattern!r}", True
    if any(matches(pattern, path, layer) for pattern in config.named_targets):
        return config.resolved_recipe, "", True
    if config.targets is None or config.faster_on:
        return config.resolved_recipe, "", False
    return None, "not among the targets", False


def _override(path: str, layer: Any, config: Fp8Config) -> Pattern | None:
    """The first override that selects a layer."""
    return next((pattern for pattern in config.overrides if matches(pattern, path, layer)), None)
