"""Recipe: a format and a scaling for each operand of a linear layer's three products."""

import dataclasses
from typing import Literal

from ._formats import E4M3, E5M2, Format
from ._scaling import AbstractScaling, DelayedScaling, ObservedScaling


OperandName = Literal["input", "kernel", "output_grad"]


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How one operand is quantized.

    Args:
        format: The element type that hardware multiplies.
        scaling: Where its scale comes from.
    """

    format: Format
    scaling: AbstractScaling


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A format and a scaling for each operand of the products fprop, dgrad and wgrad.

    Args:
        input: The layer's input, an operand of fprop and wgrad.
        kernel: The layer's weight, an operand of fprop and dgrad.
        output_grad: The gradient of the layer's output, an operand of dgrad and wgrad.

    Raises:
        ValueError: If two operands use delayed scaling with different settings: their histories are updated together.

    Example:
        >>> Recipe.of(DelayedScaling(amax_history_length=16)).output_grad.format
        E5M2
    """

    input: Quantization
    kernel: Quantization
    output_grad: Quantization

    def __post_init__(self) -> None:
        delayed = {q.scaling for q in self.quantizations if q.scaling.stateful}
        if len(delayed) > 1:
            raise ValueError(
                f"recipe uses {len(delayed)} different settings of delayed scaling {sorted(map(repr, delayed))}; "
                "the histories of one layer are updated together, so give all of its delayed operands the same one"
            )

    @staticmethod
    def of(scaling: AbstractScaling, *, forward: Format = E4M3, backward: Format = E5M2) -> "Recipe":
        """One scaling for all operands, with one format for the forward and one for the backward pass.

        The default pair is TransformerEngine's `HYBRID`: precision forward, range backward.

        Args:
            scaling: How every operand gets its scale.
            forward: The format of input and kernel.
            backward: The format of the output's gradient.
        """
        return Recipe(
            input=Quantization(forward, scaling),
            kernel=Quantization(forward, scaling),
            output_grad=Quantization(backward, scaling),
        )

    @property
    def quantizations(self) -> tuple[Quantization, Quantization, Quantization]:
        """The three operands in the order in which state stores them."""
        return (self.input, self.kernel, self.output_grad)

    @property
    def limits(self) -> tuple[float, ...]:
        """The largest value of each operand's format, in that order."""
        return tuple(q.format.max for q in self.quantizations)

    @property
    def delayed(self) -> DelayedScaling | None:
        """The delayed scaling that some operand uses, or None if the recipe keeps no history."""
        for quantization in self.quantizations:
            scaling = quantization.scaling
            scaling = scaling.scaling if isinstance(scaling, ObservedScaling) else scaling
            if isinstance(scaling, DelayedScaling):
                return scaling
        return None

    @property
    def observed(self) -> "Recipe":
        """This recipe in high precision, recording what its state needs."""
        return Recipe(*(dataclasses.replace(q, scaling=ObservedScaling(q.scaling)) for q in self.quantizations))

    def with_amax_history_length(self, length: int) -> "Recipe":
        """This recipe with another history length in its delayed scalings.

        Args:
            length: How many steps they remember.

        Raises:
            ValueError: If it is not a positive integer.
        """

        def replace(quantization: Quantization) -> Quantization:
            if not isinstance(quantization.scaling, DelayedScaling):
                return quantization
            scaling = dataclasses.replace(quantization.scaling, amax_history_length=length)
            return dataclasses.replace(quantization, scaling=scaling)

        return Recipe(*map(replace, self.quantizations))

    def __str__(self) -> str:
        formats = "/".join(q.format.name for q in self.quantizations)
        scalings = {type(q.scaling).__name__: None for q in self.quantizations}
        return f"{'+'.join(scalings)} {formats}"
