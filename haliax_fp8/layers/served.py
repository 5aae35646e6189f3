"""Layers whose kernels are quantized for good: what they all have, and their rule."""

import abc
import dataclasses
from typing import Any

import equinox as eqx
from jaxtyping import DTypeLike

from .._op import Fp8DotGeneral
from .kernel import Kernel
from .rule import LayerRule


class AbstractServedLayer(eqx.Module):
    """A layer that `serving.quantize_for_inference` made: FP8 data and scales in place of a weight, for inference.

    One of your own holds a `serving.ServedKernel`, and is made by the `served` of its class's `LayerRule`.
    """

    kernel: eqx.AbstractVar[Any]

    @property
    @abc.abstractmethod
    def described(self) -> Kernel:
        """Its kernel's axes, without a weight."""

    @abc.abstractmethod
    def dequantized(self, dtype: DTypeLike) -> Any:
        """The plain layer, with the weight in a dtype."""


@dataclasses.dataclass(frozen=True)
class ServedLayers(LayerRule):
    """Layers that are quantized for good: they are listed, and not converted again."""

    @property
    def layer_type(self) -> type:
        """All of them."""
        return AbstractServedLayer

    def refusal(self, layer: AbstractServedLayer) -> str:
        """They have no weight to train."""
        return "its kernel is in FP8 for inference; serving.dequantize(model) makes plain layers"

    def kernel(self, layer: AbstractServedLayer) -> Kernel:
        """Its axes, without a weight."""
        return layer.described

    def op(self, layer: AbstractServedLayer) -> None:
        """None: it has no state."""
        return None

    def with_op(self, layer: AbstractServedLayer, op: Fp8DotGeneral | None) -> AbstractServedLayer:
        """The layer without an op; with one, raises a ValueError with the reason."""
        if op is not None:
            raise ValueError(f"a {type(layer).__name__} cannot be converted: {self.refusal(layer)}")
        return layer
