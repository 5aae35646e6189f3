"""What a scaling has to say: whether it remembers, and how it quantizes an operand at this use."""

import abc
import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float, Float32

from .._formats import E5M2, Format
from .._quantized_array import QuantizedArray


@dataclasses.dataclass(frozen=True)
class AbstractScaling(abc.ABC):
    """How one operand gets its scale: which elements share one, and when their amax is measured.

    A scaling is a value: frozen, hashable, compared by its fields. What it remembers between steps is not in it but in
    the state of the op that uses it.
    """

    stateful: ClassVar[bool]
    """Whether the scale comes from state that is carried from step to step."""

    directional: ClassVar[bool]
    """Whether the scales depend on which axes are contracted. An operand of two products is then quantized twice."""

    gradient_format: ClassVar[Format] = E5M2
    """The format that output gradients take with this scaling, unless a recipe says otherwise."""

    @property
    def for_kernel(self) -> "AbstractScaling":
        """The scaling that a kernel takes where this one is used for all operands."""
        return self

    @abc.abstractmethod
    def quantize(
        self,
        x: Float[Array, "*shape"],
        format: Format,
        stored: Float32[Array, "*ensemble 1 1"] | None,
        ensemble: int,
        contracted: tuple[int, ...],
    ) -> QuantizedArray:
        """Quantizes an operand for this use.

        Args:
            x: The operand. Its first `ensemble` axes are independent members, each with scales of its own.
            format: The format to round to.
            stored: The scales that the state holds, one per member; None if the scaling is stateless.
            ensemble: How many leading axes of `x` number members.
            contracted: The axes of `x` that the product sums over.
        """

    def with_scale(
        self, data: Float[Array, "*shape"], stored: Float32[Array, "*ensemble 1 1"], ensemble: int
    ) -> QuantizedArray:
        """What `quantize` returned, from its data: the backward pass need not keep scales that the state holds.

        Args:
            data: The data that `quantize` returned.
            stored: As in `quantize`.
            ensemble: As in `quantize`.

        Raises:
            ValueError: If the scaling is stateless.
        """
        raise ValueError(f"{self} is stateless: its scales are not stored")
