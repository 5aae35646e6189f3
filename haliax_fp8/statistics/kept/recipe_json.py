"""Recipes as JSON: classes by name, with their fields."""

import dataclasses
from typing import Any

from ..._numerics.formats import E2M1, FORMATS, Format
from ..._numerics.rounding import Rounding
from ...recipes import scaling
from ...recipes.recipe import Quantization, Recipe


_FORMATS = {format.name: format for format in (*FORMATS.values(), E2M1)}

# As files name them.
_ROUNDINGS = {"ToNearest": Rounding.TO_NEAREST, "Stochastic": Rounding.STOCHASTIC}
_NAMES = {rounding: name for name, rounding in _ROUNDINGS.items()}


def recipe_to_json(value: Any) -> Any:
    """A recipe, or what it consists of, as JSON has it.

    Args:
        value: A recipe.

    Raises:
        ValueError: If it has a scaling that this package does not define.
    """
    if isinstance(value, Format):
        return {"format": value.name}
    if isinstance(value, Rounding):
        return {"class": _NAMES[value]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        if _classes().get(name) is not type(value):
            raise ValueError(f"{name} is not one of haliax_fp8's own classes, so a file cannot name it")
        fields = dataclasses.fields(value)
        return {"class": name} | {field.name: recipe_to_json(getattr(value, field.name)) for field in fields}
    return value


def recipe_from_json(value: Any) -> Any:
    """The inverse of `recipe_to_json`.

    Args:
        value: What JSON had.

    Raises:
        ValueError: If it names a class or format that is not known.
    """
    if not isinstance(value, dict):
        return value
    if "class" not in value:
        name = value.get("format")
        if name not in _FORMATS:
            raise ValueError(f"format={name!r} is not one of {sorted(_FORMATS)}")
        return _FORMATS[name]
    if value["class"] in _ROUNDINGS:
        return _ROUNDINGS[value["class"]]
    cls = _classes().get(value["class"])
    if cls is None:
        raise ValueError(f"class={value['class']!r} is not one of {sorted([*_classes(), *_ROUNDINGS])}")
    return cls(**{name: recipe_from_json(x) for name, x in value.items() if name != "class"})


def _classes() -> dict[str, type]:
    found = [Recipe, Quantization]
    found += [x for x in vars(scaling).values() if isinstance(x, type) and dataclasses.is_dataclass(x)]
    return {cls.__name__: cls for cls in found}
