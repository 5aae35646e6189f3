"""The function that makes the layer for inference, for each class of layers; those of the user's own classes too."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import haliax.nn as hnn

from ..layers.quantized import AbstractQuantizedLayer
from ..layers.rule import LayerRule
from .kernel import QuantizedKernel
from .layers import QuantizedEmbedding, QuantizedEquinoxLinear, QuantizedLinear, QuantizedMoELinear


__all__ = [
    "OF_MATRICES",
    "Constructor",
    "constructors_with",
    "quantized_layer",
]


type Constructor = Callable[[Any, QuantizedKernel], AbstractQuantizedLayer]
"""Makes the layer for inference from a layer, converted or not, and the kernel that replaces its weight."""

BUILT_IN: Mapping[type, Constructor] = {
    hnn.Linear: QuantizedLinear.of,
    hnn.MoELinear: QuantizedMoELinear.of,
    hnn.Embedding: QuantizedEmbedding.of,
    eqx.nn.Linear: QuantizedEquinoxLinear,
}

OF_MATRICES: Mapping[type, Constructor] = {
    hnn.Linear: QuantizedLinear.of_matrix,
    hnn.MoELinear: QuantizedMoELinear.of,
    eqx.nn.Linear: QuantizedEquinoxLinear,
}
"""For the matrices of a checkpoint."""


def constructors_with(
    of_user: Mapping[type, Constructor] | None,
    rules: tuple[LayerRule, ...],
    built_in: Mapping[type, Constructor] = BUILT_IN,
) -> dict[type, Constructor]:
    """The constructors by class: the built-in ones, and a user's, which take precedence.

    Args:
        of_user: The user's argument `quantized_layers`; None for no classes.
        rules: The rules of the layer classes.
        built_in: The constructors of other classes.

    Raises:
        ValueError: If `of_user` is not a mapping from classes to functions, or no rule matches one of the classes.
    """
    of_user = {} if of_user is None else of_user
    if not isinstance(of_user, Mapping) or not all(isinstance(cls, type) and callable(of_user[cls]) for cls in of_user):
        raise ValueError(
            f"quantized_layers={of_user!r} must be a mapping from classes of layers to functions (layer, kernel), such "
            "as {Dense: QuantizedDense.of}"
        )
    for cls in of_user:
        if not any(issubclass(cls, rule.layer_type) for rule in rules):
            raise ValueError(
                f"quantized_layers names {cls.__name__}, but no rule matches that class; pass its LayerRule too, as in "
                "rules=(MyRule(), *default_rules)"
            )
    return {**built_in, **of_user}


def quantized_layer(
    path: str,
    rule: LayerRule,
    layer: Any,
    kernel: QuantizedKernel,
    constructors: Mapping[type, Constructor],
    otherwise: str = "exclude the layer",
) -> AbstractQuantizedLayer:
    """The quantized layer in place of one, by the constructor of its class, or of the nearest one that it extends.

    Args:
        path: Its path, for errors.
        rule: Its rule. A class that the rule is not for does not count: the rule's own class may multiply otherwise.
        layer: The layer, converted or not.
        kernel: Its weight, quantized.
        constructors: The constructors by class.
        otherwise: What else to do about a class without one.

    Raises:
        ValueError: If the class has no constructor; or if the constructor does not accept a layer and a kernel, or does
            not return an `AbstractQuantizedLayer`.
    """
    name, class_name = path or "the model itself", type(layer).__name__
    of = next((cls for cls in type(layer).__mro__ if cls in constructors and issubclass(cls, rule.layer_type)), None)
    if of is None:
        raise ValueError(
            f"{name} is a {class_name}, which has no form with data and scales: pass a function that makes it, "
            f"quantized_layers={{{class_name}: make}}, where make(layer, kernel) returns an AbstractQuantizedLayer "
            f"that multiplies with kernel.dot_general(...); or {otherwise}"
        )
    try:
        inspect.signature(constructors[of]).bind(layer, kernel)
    except TypeError as error:
        raise ValueError(
            f"{name} is a {class_name}, but quantized_layers[{of.__name__}] does not take (layer, kernel): {error}. "
            f"Give a function, as in quantized_layers={{{of.__name__}: lambda layer, kernel: ...}}"
        ) from error
    made = constructors[of](layer, kernel)
    if not isinstance(made, AbstractQuantizedLayer):
        raise ValueError(
            f"{name} is a {class_name}, for which quantized_layers[{of.__name__}](layer, kernel) returned {made!r}: "
            "it must return an AbstractQuantizedLayer that multiplies with kernel.dot_general(...)"
        )
    return made
