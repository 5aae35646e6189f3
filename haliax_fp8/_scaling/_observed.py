"""Observed scaling: high precision, while the state that another scaling needs is recorded."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float, Float32

from .._formats import Format
from .._quantized_array import QuantizedArray
from ._base import AbstractScaling
from ._high_precision import unscaled


@dataclasses.dataclass(frozen=True)
class ObservedScaling(AbstractScaling):
    """Leaves an operand as it is, and lets its amax be recorded for the scaling that will be used later.

    Calibration runs a model with it: every product is that of high precision, so that one bad scale does not spoil the
    amaxes of the layers behind it.

    Args:
        scaling: The scaling whose state is recorded.
    """

    scaling: AbstractScaling

    directional: ClassVar[bool] = False

    @property
    def stateful(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the scaling that is observed for."""
        return self.scaling.stateful

    def quantize(
        self,
        x: Float[Array, "*shape"],
        format: Format,
        stored: Float32[Array, "*ensemble 1 1"] | None,
        ensemble: int,
        contracted: tuple[int, ...],
    ) -> QuantizedArray:
        """The operand itself, with scales of 1."""
        return unscaled(x, ensemble)

    def with_scale(
        self, data: Float[Array, "*shape"], stored: Float32[Array, "*ensemble 1 1"], ensemble: int
    ) -> QuantizedArray:
        """As `quantize`."""
        return unscaled(data, ensemble)
