"""Layers that hold data and scales in place of a weight, for inference or frozen: their interface and their rule."""

import abc
import dataclasses
from typing import Any

import equinox as eqx
from jaxtyping import DTypeLike

from .._op import Fp8DotGeneral
from .kernel import Kernel
from .rule import LayerRule


class AbstractQuantizedLayer(eqx.Module):
    """A layer with data and scales in place of a weight: made for inference, or the frozen base of adapters.

    One of your own holds a `serving.QuantizedKernel`; `quantize_for_inference(quantized_layers=...)` makes it.
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
class QuantizedLayers(LayerRule):
    """Layers that hold data and scales in place of a weight: they are listed, and not converted."""

    @property
    def layer_type(self) -> type:
        """Their common base class."""
        return AbstractQuantizedLayer

    def refusal(self, layer: AbstractQuantizedLayer) -> str:
        """They have no weight to train."""
        what = "its weight is frozen" if layer.kernel.has_gradient else "its kernel is in FP8 for inference"
        return f"{what}; serving.dequantize(model) makes plain layers"

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


def is_quantized_layer(node: Any) -> bool:
    """Whether it is a layer with data and scales in place of a weight."""
    return isinstance(node, AbstractQuantizedLayer)
