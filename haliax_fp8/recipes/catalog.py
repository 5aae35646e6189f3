"""Recipes by name, for configuration files; with the names that TransformerEngine and torchao use as aliases."""

import dataclasses
from typing import Any

from .._arguments import nearest
from .._numerics.rounding import Rounding
from ..formats import E2M1, E4M3
from .recipe import Quantization, Recipe
from .scaling import (
    AbstractScaling,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    HadamardScaling,
    HighPrecision,
    MXFP8Scaling,
    NVFP4Scaling,
    RowwiseScaling,
    StaticScaling,
)


def _rowwise_wgrad_bf16() -> Recipe:
    high = Quantization(E4M3, HighPrecision())
    return dataclasses.replace(
        Recipe.of(RowwiseScaling()),
        kernel_for_dgrad=Quantization(E4M3, CurrentScaling(power_of_two=True)),
        input_for_wgrad=high,
        output_grad_for_wgrad=high,
    )


def _nvfp4(scaling: NVFP4Scaling) -> Recipe:
    """NVIDIA's recipe for training: gradients rounded stochastically, wgrad's operands rotated first."""
    recipe, rotated = Recipe.of(scaling, forward=E2M1), HadamardScaling(scaling)
    return dataclasses.replace(
        recipe,
        output_grad=dataclasses.replace(recipe.output_grad, rounding=Rounding.STOCHASTIC),
        input_for_wgrad=Quantization(E2M1, rotated),
        output_grad_for_wgrad=Quantization(E2M1, rotated, Rounding.STOCHASTIC),
    )


def _mxfp4_mxfp8() -> Recipe:
    """Weights in MXFP4, activations and gradients in MXFP8."""
    mxfp8 = Recipe.of(MXFP8Scaling())
    return dataclasses.replace(mxfp8, kernel=Quantization(E2M1, MXFP8Scaling()))


def _mxfp8_square() -> Recipe:
    """MXFP8 with kernels in square blocks, whose codes both products read: devices that share a kernel send it once."""
    return dataclasses.replace(Recipe.of(MXFP8Scaling()), kernel=Quantization(E4M3, MXFP8Scaling(square=True)))


named: dict[str, Recipe] = {
    "delayed": Recipe.of(DelayedScaling()),
    "current": Recipe.of(CurrentScaling()),
    "rowwise": Recipe.of(RowwiseScaling()),
    "rowwise_wgrad_bf16": _rowwise_wgrad_bf16(),
    "deepseek": Recipe.of(BlockScaling()),
    "mxfp8": Recipe.of(MXFP8Scaling()),
    "mxfp8_square": _mxfp8_square(),
    "nvfp4": _nvfp4(NVFP4Scaling()),
    "nvfp4_delayed": _nvfp4(NVFP4Scaling(delayed=DelayedScaling())),
    "mxfp4_mxfp8": _mxfp4_mxfp8(),
    "static": Recipe.of(StaticScaling()),
}
"""Every named recipe."""

aliases: dict[str, str] = {
    # TransformerEngine's classes
    "DelayedScaling": "delayed",
    "Float8CurrentScaling": "current",
    "Float8BlockScaling": "deepseek",
    "MXFP8BlockScaling": "mxfp8",
    "NVFP4BlockScaling": "nvfp4",
    # torchao's recipe names
    "tensorwise": "current",
    "blockwise": "deepseek",
    "rowwise_with_gw_hp": "rowwise_wgrad_bf16",
    "mxfp8_rceil": "mxfp8",
}
"""Other libraries' names."""

_FORWARD_ONLY, _BACKWARD_ONLY = "_fprop", "_bprop"


type RecipeLike = Recipe | AbstractScaling | str


def as_recipe(recipe: Any, name: str = "recipe") -> Recipe:
    """A recipe from what a user gave.

    Args:
        recipe: A `Recipe`, the name of one, or a scaling to use for all operands.
        name: The argument's name, for errors.

    Raises:
        ValueError: If it is not one of these.
    """
    if isinstance(recipe, str):
        recipe = by_name(recipe)
    if isinstance(recipe, AbstractScaling):
        recipe = Recipe.of(recipe)
    if not isinstance(recipe, Recipe):
        if isinstance(recipe, type) and issubclass(recipe, AbstractScaling | Recipe):
            raise ValueError(f"{name} is the class {recipe.__name__}; call it to make a recipe: {recipe.__name__}(...)")
        raise ValueError(f"{name}={recipe!r} is not a recipe; use a name such as 'delayed', a scaling, or Recipe(...)")
    return recipe


def by_name(name: str) -> Recipe:
    """The recipe with a name.

    Args:
        name: A key of `named` or of `aliases`. With `_fprop` at its end, the recipe of the rest of the name, with its
            backward pass in high precision: see `Recipe.forward_only`. With `_bprop`, its forward pass is: see
            `Recipe.backward_only`.

    Raises:
        ValueError: If there is none; the nearest names are listed.

    Example:
        >>> print(by_name("rowwise_with_gw_hp"))
        fprop RowwiseScaling E4M3/E4M3, dgrad RowwiseScaling+CurrentScaling E4M3/E4M3, wgrad in high precision
    """
    if not isinstance(name, str):
        raise ValueError(f"name={name!r} is not the name of a recipe; use one such as 'delayed', out of {[*named]}")
    suffix = next((suffix for suffix in (_FORWARD_ONLY, _BACKWARD_ONLY) if name.endswith(suffix)), "")
    base = name.removesuffix(suffix)
    recipe = named.get(aliases.get(base, base))
    if recipe is None:
        listed = lambda names: ", ".join(map(repr, names))
        near = nearest(name, [*named, *aliases])
        hint = f"the nearest are {listed(near)}; " if near else ""
        raise ValueError(
            f"recipe={name!r} is unknown; {hint}all are {listed(named)}, and by other libraries' names "
            f"{listed(aliases)}; with {_FORWARD_ONLY!r} at its end, the backward pass is in high precision, and with "
            f"{_BACKWARD_ONLY!r} the forward pass"
        )
    if not suffix:
        return recipe
    return recipe.forward_only() if suffix == _FORWARD_ONLY else recipe.backward_only()
