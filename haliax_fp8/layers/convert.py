"""fp8_linear_layers: walks a model's tree and gives its linear layers an FP8 product."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

import haliax as hax
from jaxtyping import DTypeLike

from .._op import Fp8DotGeneral
from .._product.arguments import floating_dtype
from .._product.kernel_residual import KernelResidual
from ..devices.device import Device
from ..devices.xla_flags import XlaFlags
from ..recipes.compiler_options import log_cost_of_flags
from ..recipes.named import RecipeLike, aliases, as_recipe, recipes
from ..recipes.recipe import Recipe
from ..recipes.scaling import AbstractScaling, DelayedScaling
from ..recipes.support import require_support
from .default import default_layers
from .patterns import Pattern, Targets, as_patterns, matches, unmatched_error
from .prediction import Prediction
from .rule import LayerRule
from .walk import find_layers, map_layers, nothing_to_convert, rule_of
from .where_pays import WherePays


@dataclasses.dataclass(frozen=True)
class Fp8Config:
    """Which layers are converted, and with which recipe.

    A pattern is the last component of a path (`"up_proj"`), a full dotted path, a glob, a regular expression (both
    match in full), a compiled regular expression, or a function `(path, layer) -> bool`.

    Args:
        targets: Patterns of the layers to convert; None converts all.
        exclude: Patterns of layers to leave alone, whatever `targets` says.
        recipe: A recipe, its name, or a scaling to use for all operands.
        overrides: A recipe for each pattern; None leaves the selected layers alone. The first pattern that matches
            wins.
        amax_history_length: Sets the history length of every delayed scaling, of which there has to be one; None
            keeps the lengths of the recipes (1024 by default).
        compute_dtype: The dtype that the products' operands and results are rounded to; None does not round.
        kernel_residual: What the backward pass keeps of kernels, a `KernelResidual`. Changes memory and speed, not
            values.
        emulate: Converts even if the default device is an accelerator without the units for a recipe's products; see
            `supported`. A CPU always emulates, with the same rounding.
        layers: The rules of the layer classes; see `LayerRule`.
        where: Converts only those selected layers that are faster in FP8 on a named device; None converts all.

    Raises:
        ValueError: If an argument is of the wrong kind, `targets` is empty, the history length is below 1 or no recipe
            keeps a history, or `compute_dtype` is not a floating-point dtype of at least 16 bits.

    Example:
        >>> Fp8Config(targets=["up_proj", "down_proj"], exclude="*.head").recipe
        DelayedScaling(amax_history_length=1024, margin=0)
    """

    targets: Targets | None = None
    exclude: Targets = ()
    recipe: RecipeLike = DelayedScaling()
    overrides: Mapping[Pattern, RecipeLike | None] = dataclasses.field(default_factory=dict)
    amax_history_length: int | None = None
    compute_dtype: DTypeLike | None = None
    kernel_residual: KernelResidual = KernelResidual.REQUANTIZE_WHERE_CHEAP
    emulate: bool = False
    layers: tuple[LayerRule, ...] = default_layers
    where: WherePays | None = None

    def __post_init__(self) -> None:
        if self.targets is not None and not as_patterns("targets", self.targets):
            raise ValueError(f"targets={self.targets!r} selects no layer; None converts every layer")
        as_patterns("exclude", self.exclude)
        if not isinstance(self.overrides, Mapping):
            raise ValueError(f"overrides={self.overrides!r} must be a mapping from patterns to recipes (or None)")
        as_patterns("overrides", tuple(self.overrides))
        resolved = []
        for name, recipe in (("recipe", self.recipe), *((f"overrides[{k!r}]", r) for k, r in self.overrides.items())):
            if recipe is None and name != "recipe":
                continue
            resolved.append(self.resolve(recipe, name))
        if self.amax_history_length is not None and all(recipe.delayed is None for recipe in resolved):
            raise ValueError(
                f"amax_history_length={self.amax_history_length} has no effect on recipe={self.recipe!r}, which keeps "
                "no history; leave it out, or use recipe='delayed'"
            )
        if self.compute_dtype is not None:
            floating_dtype("compute_dtype", self.compute_dtype)
        if not isinstance(self.kernel_residual, KernelResidual):
            raise ValueError(
                f"kernel_residual={self.kernel_residual!r} is not a KernelResidual; use one of "
                f"{', '.join(map(str, KernelResidual))}"
            )
        if not isinstance(self.emulate, bool):
            raise ValueError(f"emulate={self.emulate!r} must be True or False")
        if not isinstance(self.layers, tuple) or not all(isinstance(rule, LayerRule) for rule in self.layers):
            raise ValueError(
                f"layers={self.layers!r} must be a tuple of LayerRule instances, such as (MyRule(), *default_layers); "
                "to select layers of a model, use targets or exclude"
            )
        if self.where is not None and not isinstance(self.where, WherePays):
            raise ValueError(
                f"where={self.where!r} must be a WherePays(device, tokens=...), or None to convert every layer that is "
                "selected"
            )

    def resolve(self, recipe: Any, name: str = "recipe") -> Recipe:
        """A recipe from what the user gave, with this configuration's history length.

        Args:
            recipe: A `Recipe`, the name of one, or a scaling.
            name: The argument's name, for errors.

        Raises:
            ValueError: If it is none of these, or the history length is not a positive integer.
        """
        recipe = as_recipe(recipe, name)
        if self.amax_history_length is None:
            return recipe
        return recipe.with_amax_history_length(self.amax_history_length)


def as_config(config: Any, options: Mapping[str, Any] | None = None, *, call: str = "Fp8Config(") -> Fp8Config:
    """The configuration given by an argument `config` or by keywords.

    Args:
        config: The argument; None for the default.
        options: Fields of `Fp8Config` given as keywords.
        call: The beginning of a call that takes these fields as keywords, for errors.

    Raises:
        ValueError: If it is something else, both were given, or `Fp8Config` has no such field.
    """
    options = _known(options or {})
    if config is None:
        return Fp8Config(**options)
    if isinstance(config, Fp8Config):
        if not options:
            return config
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ValueError(
            f"config was given together with {given}: pass a config or keywords, not both. "
            f"dataclasses.replace(config, {given}) is the config with these changes"
        )
    if isinstance(config, type) and issubclass(config, Fp8Config):
        raise ValueError("config is the class Fp8Config, but must be an instance; did you mean Fp8Config()?")
    match config:
        case Mapping():
            meant = ", ".join(f"{name}={value!r}" for name, value in _known(config).items())
        case str():
            meant = f"{'recipe' if config in (*recipes, *aliases) else 'targets'}={config!r}"
        case AbstractScaling():
            meant = f"recipe={config!r}"
        case type() if issubclass(config, AbstractScaling):
            meant = f"recipe={config.__name__}()"
        case _:
            meant = "recipe=..."
    shown = str(config) if isinstance(config, Recipe) else repr(config)
    raise ValueError(f"config={shown} is not an Fp8Config; did you mean {call}{meant})?")


def _known(options: Mapping[Any, Any]) -> Mapping[str, Any]:
    """The options, if all are fields of `Fp8Config`; raises with the nearest if not."""
    fields = [field.name for field in dataclasses.fields(Fp8Config)]
    for name, value in options.items():
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, n=1)
            hint = f"did you mean {near[0]}? All are" if near else "all of them are"
            raise ValueError(f"{name}={value!r} is not an option of Fp8Config; {hint} {', '.join(fields)}")
    return options


@dataclasses.dataclass(frozen=True)
class Decision:
    """What happens to one layer: its recipe, or the reason it is left alone; and the predicted gain of FP8."""

    path: str
    layer: Any
    rule: LayerRule
    stack: tuple[hax.Axis, ...]
    recipe: Recipe | None
    reason: str
    prediction: Prediction | None = None

    @property
    def is_convertible(self) -> bool:
        """Whether the layer is converted, or could be with other targets, overrides or tokens."""
        if self.recipe is not None or self.rule.op(self.layer) is not None:
            return True
        return self.rule.refusal(self.layer) is None and self.rule.only_if_named(self.layer) is None


def fp8_linear_layers[M](module: M, config: Fp8Config | None = None, **options: Any) -> M:
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
        The converted model. `module` is unchanged.

    Raises:
        ValueError: If the model has no layer that can be converted; if a pattern selects no layer (the nearest paths
            are listed), or `targets` selects one that cannot be converted; if the default device lacks the units for a
            recipe and `emulate` is False; or if `config` is not an `Fp8Config`, an option is unknown, or both are
            given.

    Example:
        >>> In, Out = hax.Axis("in", 64), hax.Axis("out", 128)
        >>> layer = fp8_linear_layers(hnn.Linear.init(In, Out, key=jax.random.key(0)), recipe="current")
        >>> layer.dot_general
        Fp8DotGeneral(CurrentScaling E4M3/E4M3/E5M2)
    """
    config = as_config(config, options, call="fp8_linear_layers(model, ")
    decisions = decide(module, config)
    # With `where`, it is fine if no layer pays.
    if config.where is None and not any(decision.is_convertible for decision in decisions.values()):
        left = {path: decision.reason for path, decision in decisions.items()}
        raise nothing_to_convert(module, config.layers, left)
    if not config.emulate:
        device = Device.default()
        chosen = [(decision, decision.recipe) for decision in decisions.values() if decision.recipe is not None]
        for decision, recipe in chosen:
            require_support(recipe, decision.rule.kernel(decision.layer).support(recipe, device))
        log_cost_of_flags(XlaFlags.of_environment(), device, dict.fromkeys(recipe for _, recipe in chosen))
    converted: dict[Any, Any] = {}

    def convert(path: str, layer: Any) -> Any:
        decision = decisions[path]
        if decision.recipe is None:
            return layer
        op, rule = decision.rule.op(layer), decision.rule
        if op is not None and (op.recipe, op.compute_dtype) == (decision.recipe, config.compute_dtype):
            return _keeping(rule, layer, op, config.kernel_residual)
        # The same object in two places stays one object, unless an override gives one of the places another recipe.
        key = id(layer), decision.recipe
        if key not in converted:
            op = rule.kernel(layer).init_op(decision.recipe, config.compute_dtype, decision.stack)
            converted[key] = rule.with_op(layer, dataclasses.replace(op, kernel_residual=config.kernel_residual))
        return converted[key]

    return map_layers(convert, module, config.layers)


def _keeping(rule: LayerRule, layer: Any, op: Fp8DotGeneral, kernel_residual: KernelResidual) -> Any:
    """The converted layer with another choice of what is kept of its kernel."""
    if op.kernel_residual == kernel_residual:
        return layer
    return rule.with_op(layer, dataclasses.replace(op, kernel_residual=kernel_residual))


def restore_linear_layers[M](module: M, config: Fp8Config | None = None) -> M:
    """Removes FP8 from a model: the inverse of `fp8_linear_layers`.

    Args:
        module: A converted model.
        config: Only its `layers` matter; needed if the model was converted with custom rules.

    Returns:
        The model with plain layers and without FP8 state.
    """
    rules = as_config(config).layers

    def restore(path: str, layer: Any) -> Any:
        rule = rule_of(layer, rules)
        return layer if rule.op(layer) is None else rule.with_op(layer, None)

    return map_layers(restore, module, rules)


def decide(module: Any, config: Fp8Config) -> dict[str, Decision]:
    """The decision for each layer, by path; raises as described in `fp8_linear_layers`."""
    found = find_layers(module, config.layers)
    targets = None if config.targets is None else as_patterns("targets", config.targets)
    exclude = as_patterns("exclude", config.exclude)
    for name, patterns in (("targets", targets or ()), ("exclude", exclude), ("overrides", tuple(config.overrides))):
        for pattern in patterns:
            if not any(matches(pattern, path, layer) for path, (layer, _) in found.items()):
                raise unmatched_error(name, pattern, list(found))
    decisions = {}
    for path, (layer, stack) in found.items():
        rule = rule_of(layer, config.layers)
        recipe, reason, named = _choose(path, layer, config, targets, exclude)
        refusal = rule.refusal(layer) if rule.op(layer) is None else None
        if recipe is not None and not named and (condition := rule.only_if_named(layer)) is not None:
            recipe, reason = None, condition
        if recipe is not None and refusal is not None:
            if named:
                raise ValueError(f"the targets or overrides select {path}, which cannot be converted: {refusal}")
            recipe, reason = None, refusal
        prediction = None
        if recipe is not None and config.where is not None:
            prediction = config.where.predict(rule, layer, stack, recipe, config.kernel_residual)
            overridden = any(matches(pattern, path, layer) for pattern in config.overrides)
            if not overridden and (slower := config.where.refusal(rule, layer, prediction, recipe)) is not None:
                recipe, reason = None, slower
        decisions[path] = Decision(path, layer, rule, stack, recipe, reason, prediction)
    return decisions


def _choose(
    path: str, layer: Any, config: Fp8Config, targets: tuple[Pattern, ...] | None, exclude: tuple[Pattern, ...]
) -> tuple[Recipe | None, str, bool]:
    """The recipe, or the reason for none; and whether a pattern named this layer."""
    for pattern in exclude:
        if matches(pattern, path, layer):
            return None, f"excluded by {pattern!r}", True
    for pattern, recipe in config.overrides.items():
        if matches(pattern, path, layer):
            if recipe is None:
                return None, f"left alone by the override {pattern!r}", True
            return config.resolve(recipe), "", True
    if targets is not None and not any(matches(pattern, path, layer) for pattern in targets):
        return None, "not among the targets", False
    return config.resolve(config.recipe), "", targets is not None
