"""Layers that hold data and scales in place of a weight, for inference or frozen: their interfaces and their rule."""

import abc
import dataclasses
from typing import Any

import equinox as eqx
import jax
from jaxtyping import DTypeLike

from .._op import Fp8DotGeneral
from .kernel import Kernel
from .rule import LayerRule
from .walk import path_string


class AbstractQuantizedLayer(eqx.Module):
    """A layer that holds data and scales in place of a weight.

    Its kernel has a `storage`, the format of the data; a `text`, which says what it is; and the `recipe` that it
    multiplies with, None in high precision.
    """

    kernel: eqx.AbstractVar[Any]

    @property
    @abc.abstractmethod
    def described(self) -> Kernel:
        """Its kernel's axes, without a weight."""

    @property
    @abc.abstractmethod
    def refusal(self) -> str:
        """Why it cannot be converted."""


class AbstractFrozenLayer(AbstractQuantizedLayer):
    """A layer whose quantized weight never changes; it multiplies in high precision, with gradients to its inputs."""

    @property
    def refusal(self) -> str:
        """It has no weight to train."""
        return "its weight is frozen; huggingface.thaw(model) makes plain layers"

    @abc.abstractmethod
    def thawed(self, dtype: DTypeLike) -> Any:
        """The plain layer, with the weight in a dtype."""


class AbstractServedLayer(AbstractQuantizedLayer):
    """A layer that `serving.quantize_for_inference` made: FP8 data and scales in place of a weight, for inference.

    One of your own holds a `serving.ServedKernel`; `quantize_for_inference(served_layers=...)` makes it.
    """

    @property
    def refusal(self) -> str:
        """It has no weight to train."""
        return "its kernel is in FP8 for inference; serving.dequantize(model) makes plain layers"

    @abc.abstractmethod
    def dequantized(self, dtype: DTypeLike) -> Any:
        """The plain layer, with the weight in a dtype."""


@dataclasses.dataclass(frozen=True)
class QuantizedLayers(LayerRule):
    """Layers that hold data and scales in place of a weight: they are listed, and not converted."""

    @property
    def layer_type(self) -> type:
        """Their common base class."""
        return AbstractQuantizedLayer

    def refusal(self, layer: AbstractQuantizedLayer) -> str:
        """As its class says."""
        return layer.refusal

    def kernel(self, layer: AbstractQuantizedLayer) -> Kernel:
        """Its axes, without a weight."""
        return layer.described

    def op(self, layer: AbstractQuantizedLayer) -> None:
        """None: it has no state."""
        return None

    def with_op(self, layer: AbstractQuantizedLayer, op: Fp8DotGeneral | None) -> AbstractQuantizedLayer:
        """The layer without an op; with one, raises a ValueError with the reason."""
        if op is not None:
            raise ValueError(f"a {type(layer).__name__} cannot be converted: {self.refusal(layer)}")
        return layer


def require_weights(model: Any, name: str, remedy: str) -> None:
    """Raises a ValueError that names the layers without a weight, if `quantize_for_inference` made any.

    Args:
        model: A model, or any tree.
        name: The argument's name.
        remedy: What to do, other than make plain layers.
    """
    is_served = lambda node: isinstance(node, AbstractServedLayer)
    nodes = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_served)[0]
    paths = [path_string(path) or "the model itself" for path, node in nodes if is_served(node)]
    if not paths:
        return
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    raise ValueError(
        f"{name} was made by quantize_for_inference: it has FP8 data in place of the weight of {', '.join(paths[:3])}"
        f"{more}. {remedy}; or take plain layers, whose weights are the rounded ones: serving.dequantize(model)"
    )
