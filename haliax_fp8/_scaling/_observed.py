"""Observed scaling: high precision, while the state that another scaling needs is recorded."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from .._formats import Format
from .._quantized_array import QuantizedArray
from ._base import AbstractScaling


@dataclasses.dataclass(frozen=True)
class ObservedScaling(AbstractScaling):
    """Leaves an operand as it is, and lets its amax be recorded for the scaling that will be used later.

    Calibration runs a model with it: every product is that of high precision, so that one bad scale does not spoil the
    amaxes of the layers behind it.

    Args:
        scaling: The scaling whose state is recorded.
    """

    scaling: AbstractScaling

    @property
    def stateful(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the scaling that is observed for."""
        return self.scaling.stateful

    def quantize(
        self, x: Float[Array, "*shape"], format: Format, stored: Float32[Array, "*ensemble 1"] | None, ensemble: int
    ) -> QuantizedArray:
        """The operand itself, with scales of 1."""
        return _unscaled(x, ensemble)

    def with_scale(
        self, data: Float[Array, "*shape"], stored: Float32[Array, "*ensemble 1"], ensemble: int
    ) -> QuantizedArray:
        """As `quantize`."""
        return _unscaled(data, ensemble)


def _unscaled(x: Float[Array, "*shape"], ensemble: int) -> QuantizedArray:
    return QuantizedArray(x, jnp.ones((*x.shape[:ensemble], *(1,) * (x.ndim - ensemble)), jnp.float32))
