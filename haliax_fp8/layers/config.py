"""Fp8Config: which layers are converted and with which recipe, and the rules of the layer classes."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import equinox as eqx
import haliax.nn as hnn
from jaxtyping import DTypeLike

from .._arguments import require_bool
from .._product.arguments import floating_dtype
from .._product.spec import KernelResidual
from ..recipes.catalog import RecipeLike, as_recipe
from ..recipes.recipe import Recipe
from ..recipes.scaling import AmaxHistory, DelayedScaling
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


class Fp8Options(TypedDict, total=False):
    """The fields of `Fp8Config` as keywords of `fp8_linear_layers`, for editors."""

    targets: Targets | FasterOn | Sequence[Pattern | FasterOn] | None
    exclude: Targets
    recipe: RecipeLike
    overrides: Mapping[Pattern, RecipeLike | None]
    amax_history_length: int | None
    compute_dtype: DTypeLike | None
    kernel_residual: KernelResidual
    one_pass: bool
    scale_per_expert: bool
    allow_dense_groups: bool
    emulate: bool
    rules: tuple[LayerRule, ...]


@dataclasses.dataclass(frozen=True)
class Fp8Config:
    """Which layers are converted, and with which recipe.

    A pattern is the last component of a path (`"up_proj"`), a full dotted path, a glob, a regular expression (both
    match in full), a compiled regular expression, a class of layers, or a function `(path, layer) -> bool`.

    Args:
        targets: Patterns of the layers to convert; None converts all. `FasterOn("h100", tokens=8192)`, alone or among
            them, selects the layers that are predicted to be faster, beside those that the other patterns select.
        exclude: Patterns of layers to leave alone, whatever `targets` says.
        recipe: A recipe, its name, or a scaling to use for all operands.
        overrides: A recipe for each pattern; None leaves the selected layers alone. The first pattern that matches
            wins.
        amax_history_length: Sets the history length of every delayed scaling; at least one recipe must have it. None
            keeps the lengths of the recipes (1024 by default).
        compute_dtype: The dtype that the products' operands and results are rounded to; None does not round.
        kernel_residual: What the backward pass keeps of kernels, a `KernelResidual`. Changes memory and speed, not
            values.
        one_pass: Lets GPU kernels quantize operands in blocks on a B200: bfloat16 is read once, and scales are written
            in cuDNN's order. For whole tiles of 128 x 128 on one device, or inside `shard_map`; all else is as without.
            The same values, in fewer launches and bytes. None has run on a B200 yet: the first use multiplies known
            numbers, and raises if they come out wrong.
        scale_per_expert: Gives each expert of a mixture scales and histories of its own, of its kernel and of the rows
            that it gets; one without rows keeps them as they are. By default a layer's experts share theirs. For
            recipes that store scales.
        allow_dense_groups: Lets grouped products (mixture of experts) multiply every row by the kernels of all groups
            where the device has no grouped products in FP8, or none for the recipe. By default that raises.
        emulate: Converts even if the default device is an accelerator without the units for a recipe's products; see
            `supported`. A CPU always emulates, with the same rounding.
        rules: The rules of the layer classes; see `LayerRule`.

    Raises:
        ValueError: If an argument is of the wrong kind, `targets` is empty, the history length is below 1 or no recipe
            keeps a history, or `compute_dtype` is not a floating-point dtype of at least 16 bits.

    Example:
        >>> Fp8Config(targets=["up_proj", "down_proj"], exclude="*.head").recipe
        DelayedScaling(amax_history_length=1024, margin=0)
    """

    targets: Targets | FasterOn | Sequence[Pattern | FasterOn] | None = None
    exclude: Targets = ()
    recipe: RecipeLike = DelayedScaling()
    overrides: Mapping[Pattern, RecipeLike | None] = dataclasses.field(default_factory=dict)
    amax_history_length: int | None = None
    compute_dtype: DTypeLike | None = None
    kernel_residual: KernelResidual = KernelResidual.REQUANTIZE_WHERE_CHEAP
    one_pass: bool = False
    scale_per_expert: bool = False
    allow_dense_groups: bool = False
    emulate: bool = False
    rules: tuple[LayerRule, ...] = default_rules

    def __post_init__(self) -> None:
        if self.targets is not None and not self.named_targets and not self.faster_on:
            raise ValueError(f"targets={self.targets!r} selects no layer; None converts every layer")
        as_patterns("exclude", self.exclude)
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
        for name in ("one_pass", "scale_per_expert", "allow_dense_groups", "emulate"):
            require_bool(name, getattr(self, name), of="Fp8Config")
        if not isinstance(self.rules, tuple) or not all(isinstance(rule, LayerRule) for rule in self.rules):
            raise ValueError(
                f"rules={self.rules!r} must be a tuple of LayerRule instances, such as (MyRule(), *default_rules); "
                "to select layers of a model, use targets or exclude"
            )

    @functools.cached_property
    def named_targets(self) -> tuple[Pattern, ...]:
        """The patterns of `targets` that select layers whether or not they are faster."""
        targets: Any = () if self.targets is None else self.targets
        if isinstance(targets, list | tuple):
            targets = [pattern for pattern in targets if not isinstance(pattern, FasterOn)]
        return () if isinstance(targets, FasterOn) else as_patterns("targets", targets)

    @functools.cached_property
    def faster_on(self) -> tuple[FasterOn, ...]:
        """The patterns of `targets` that select layers because they are faster."""
        targets = self.targets if isinstance(self.targets, list | tuple) else (self.targets,)
        return tuple(pattern for pattern in targets if isinstance(pattern, FasterOn))

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
        ValueError: If it is something else, or both were given.
    """
    if config is None:
        return Fp8Config(**options or {})
    if isinstance(config, Fp8Config):
        if not options:
            return config
        keywords = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ValueError(
            f"config was given together with {keywords}: pass a config or keywords, not both. "
            f"dataclasses.replace(config, {keywords}) is the config with these changes"
        )
    shown = type(config).__name__ if isinstance(config, eqx.Module) else str(config)
    raise ValueError(f"config={shown} is not an Fp8Config; use {call}recipe=..., targets=...)")


def _keeps_history(recipe: Recipe) -> bool:
    return any(isinstance(scaling.memory, AmaxHistory) for scaling in recipe.scalings)
