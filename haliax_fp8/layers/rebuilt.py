"""Modules made from attributes, as JAX makes one from its leaves: without their constructors."""

from collections.abc import Mapping
from typing import Any


def rebuilt(cls: Any, attributes: Mapping[str, Any]) -> Any:
    """A module of a class with these attributes.

    A constructor would draw new weights, and may take other arguments.

    Args:
        cls: The class.
        attributes: All that the module has, by name.
    """
    module = object.__new__(cls)
    for name, value in attributes.items():
        object.__setattr__(module, name, value)
    return module
