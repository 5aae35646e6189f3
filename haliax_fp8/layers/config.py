"""Fp8Config: which layers are converted and with which recipe, and the rules of the layer classes."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, TypedDict

import equinox as eqx
import haliax.nn as hnn
from jaxtyping import DTypeLike

from .._numerics.checks import explains_options, require_bool, require_known
from .._product.arguments import floating_dtype
from .._product.spec import KernelResidual
from ..recipes.catalog import RecipeLike, aliases, as_recipe, named
from ..recipes.recipe import Recipe
from ..recipes.scaling import AbstractScaling, DelayedScaling
from .equinox import EquinoxLinear
from .haliax import HaliaxEmbedding, HaliaxLinear, HaliaxMoELinear
from .only_where_faster import FasterOn
from .quantized import QuantizedLayers
from .rule import LayerRule, Refused
from .walk import Pattern, Targets, as_patterns


default_rules: tuple[LayerRule, ...] = (
    QuantizedLayers(),
    HaliaxLinear(),
    HaliaxMoELinear(),
    HaliaxEmbedding(),
    EquinoxLinear(),
    Refused(
        (eqx.nn.GRUCell, eqx.nn.LSTMCell),
        "a recurrent cell multiplies by raw weight matrices; use Fp8DotGeneral in a cell of your own",
    ),
    Refused((eqx.nn.Conv, eqx.nn.ConvTranspose, hnn.Conv, hnn.ConvTranspose), "convolutions have no FP8 product"),
)
"""The default rules of `Fp8Config`; the first one that fits a layer decides."""


# What other libraries and people call these options, where the letters do not say it.
_SYNONYMS = {
    **dict.fromkeys(("skip", "skip_layers", "ignore", "ignored_layers", "modules_to_not_convert", "filter"), "exclude"),
    **dict.fromkeys(("only", "include", "layers", "modules", "module_filter_fn"), "targets"),
    **dict.fromkeys(("format", "fp8_format", "scaling", "preset"), "recipe"),
    **dict.fromkeys(("history", "history_length", "amax_history_len"), "amax_history_length"),
    **dict.fromkeys(("dtype", "precision"), "compute_dtype"),
}


class Fp8Options(TypedDict, total=False):
    """The fields of `Fp8Config` as keywords of `fp8_linear_layers`, for editors."""

    targets: Targets | None
    exclude: Targets
    recipe: RecipeLike
    overrides: Mapping[Pattern, RecipeLike | None]
    amax_history_length: int | None
    compute_dtype: DTypeLike | None
    kernel_residual: KernelResidual
    scale_per_expert: bool
    allow_dense_groups: bool
    emulate: bool
    rules: tuple[LayerRule, ...]
    only_if: FasterOn | None


@explains_options(_SYNONYMS)
@dataclasses.dataclass(frozen=True)
class Fp8Config:
    """Which layers are converted, and with which recipe.

    A pattern is the last component of a path (`"up_proj"`), a full dotted path, a glob, a regular expression (both
    match in full), a compiled regular expression, a class of layers, or a function `(path, layer) -> bool`.

    Args:
        targets: Patterns of the layers to convert; None converts all.
        exclude: Patterns of layers to leave alone, whatever `targets` says.
        recipe: A recipe, its name, or a scaling to use for all operands.
        overrides: A recipe for each pattern; None leaves the selected layers alone. The first pattern that matches
            wins.
        amax_history_length: Sets the history length of every delayed scaling; at least one recipe must have it. None
            keeps the lengths of the recipes (1024 by default).
        compute_dtype: The dtype that the products' operands and results are rounded to; None does not round.
        kernel_residual: What the backward pass keeps of kernels, a `KernelResidual`. Changes memory and speed, not
            values.
        scale_per_expert: Gives each expert of a mixture scales and histories of its own, of its kernel and of the rows
            that it gets; one without rows keeps them as they are. By default a layer's experts share theirs. For
            recipes that store scales.
        allow_dense_groups: Lets grouped products (mixture of experts) multiply every row by the kernels of all groups
            where the device has no grouped products in FP8, or none for the recipe. By default that raises.
        emulate: Converts even if the default device is an accelerator without the units for a recipe's products; see
            `supported`. A CPU always emulates, with the same rounding.
        rules: The rules of the layer classes; see `LayerRule`.
        only_if: Converts a selected layer only if it is predicted to be faster, such as
            `FasterOn("h100", tokens=8192)`; None converts all. Conversion raises if none is.

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
    scale_per_expert: bool = False
    allow_dense_groups: bool = False
    emulate: bool = False
    rules: tuple[LayerRule, ...] = default_rules
    only_if: FasterOn | None = None

    def __post_init__(self) -> None:
        if self.targets is not None and not as_patterns("targets", self.targets):
            raise ValueError(f"targets={self.targets!r} selects no layer; None converts every layer")
        as_patterns("exclude", self.exclude)
        if not isinstance(self.overrides, Mapping):
            raise ValueError(f"overrides={self.overrides!r} must be a mapping from patterns to recipes (or None)")
        as_patterns("overrides", tuple(self.overrides))
        resolved = [
            recipe for recipe in (self.resolved_recipe, *self.resolved_overrides.values()) if recipe is not None
        ]
        if self.amax_history_length is not None and not any(map(_keeps_history, resolved)):
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
        for name in ("scale_per_expert", "allow_dense_groups", "emulate"):
            require_bool(name, getattr(self, name), of="Fp8Config")
        if not isinstance(self.rules, tuple) or not all(isinstance(rule, LayerRule) for rule in self.rules):
            raise ValueError(
                f"rules={self.rules!r} must be a tuple of LayerRule instances, such as (MyRule(), *default_rules); "
                "to select layers of a model, use targets or exclude"
            )
        if self.only_if is not None and not isinstance(self.only_if, FasterOn):
            raise ValueError(
                f"only_if={self.only_if!r} must be a FasterOn(device, tokens=...), or None to convert every layer that "
                "is selected"
            )

    @functools.cached_property
    def resolved_recipe(self) -> Recipe:
        """`recipe`, with this configuration's history length."""
        return self.resolve(self.recipe)

    @functools.cached_property
    def resolved_overrides(self) -> Mapping[Pattern, Recipe | None]:
        """`overrides`, with this configuration's history length."""
        return {
            pattern: None if recipe is None else self.resolve(recipe, f"overrides[{pattern!r}]")
            for pattern, recipe in self.overrides.items()
        }

    def resolve(self, recipe: Any, name: str = "recipe") -> Recipe:
        """The recipe that an argument names, with this configuration's history length.

        Args:
            recipe: A `Recipe`, the name of one, or a scaling.
            name: The argument's name, for errors.

        Raises:
            ValueError: If it is not one of these, or the history length is not a positive integer.
        """
        recipe = as_recipe(recipe, name)
        if self.amax_history_length is None:
            return recipe
        return recipe.with_amax_history_length(self.amax_history_length)


def as_config(config: Any, options: Mapping[str, Any] | None = None, *, call: str = "Fp8Config(") -> Fp8Config:
    """The configuration from an argument `config` or from keywords.

    Args:
        config: The argument; None for the default.
        options: Fields of `Fp8Config` as keywords.
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
        keywords = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ValueError(
            f"config was given together with {keywords}: pass a config or keywords, not both. "
            f"dataclasses.replace(config, {keywords}) is the config with these changes"
        )
    if isinstance(config, type) and issubclass(config, Fp8Config):
        raise ValueError("config is the class Fp8Config, but must be an instance; did you mean Fp8Config()?")
    is_pattern = lambda value: isinstance(value, str | re.Pattern) or (callable(value) and not isinstance(value, type))
    match config:
        case list() | tuple() | set() if config and all(map(is_pattern, config)):
            meant = f"targets={config!r}"
        case re.Pattern():
            meant = f"targets={config!r}"
        case Mapping():
            meant = ", ".join(f"{name}={value!r}" for name, value in _known(config).items())
        case str():
            meant = f"{'recipe' if config in (*named, *aliases) else 'targets'}={config!r}"
        case AbstractScaling():
            meant = f"recipe={config!r}"
        case type() if issubclass(config, AbstractScaling):
            meant = f"recipe={config.__name__}()"
        case type():
            meant = f"targets={config.__name__}"
        case _:
            meant = "recipe=..."
    if isinstance(config, eqx.Module):
        raise ValueError(f"config is a model of class {type(config).__name__}, not an Fp8Config; the model comes first")
    shown = str(config) if isinstance(config, Recipe) else repr(config)
    raise ValueError(f"config={shown} is not an Fp8Config; did you mean {call}{meant})?")


def _known(options: Mapping[Any, Any]) -> Mapping[str, Any]:
    """The options, if all are fields of `Fp8Config`; raises with the nearest if not."""
    require_known(options, [field.name for field in dataclasses.fields(Fp8Config)], _SYNONYMS, "Fp8Config")
    return options


def _keeps_history(recipe: Recipe) -> bool:
    return any(isinstance(scaling, DelayedScaling) for scaling in recipe.scalings)
