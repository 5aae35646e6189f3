"""Measured scaling: any scaling, with a record of what quantization does to the operand."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from ..._numerics.formats import Format
from ..._numerics.quantized_array import QuantizedArray
from ...devices.device import MatrixUnits
from .base import AbstractScaling, AbstractStatefulScaling, OperandUse


@dataclasses.dataclass(frozen=True)
class MeasuredScaling(AbstractStatefulScaling):
    """Quantizes as another scaling does, and records amax, saturation, underflow and squared error.

    The row is that of the scaling, unchanged, followed by the four numbers.

    Args:
        scaling: The scaling that quantizes.
        format: The format that it quantizes to.
    """

    scaling: AbstractScaling
    format: Format

    measures: ClassVar[int] = 4

    @property
    def quantizes(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the scaling."""
        return self.scaling.quantizes

    @property
    def units(self) -> MatrixUnits:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the scaling."""
        return self.scaling.units

    @property
    def directional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the scaling."""
        return self.scaling.directional

    @property
    def stores_scale(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the scaling."""
        return isinstance(self.scaling, AbstractStatefulScaling) and self.scaling.stores_scale

    @property
    def first_row(self) -> tuple[float, ...]:
        """That of the scaling, then zeros."""
        return (*self._inner_row, *(0.0,) * self.measures)

    @property
    def _inner_row(self) -> tuple[float, ...]:
        return self.scaling.first_row if isinstance(self.scaling, AbstractStatefulScaling) else (1.0,)

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """As the scaling does."""
        return self.scaling.quantize(x, use)

    def with_scale(
        self, data: Float[Array, "*shape"], stored: Float32[Array, " *ensemble"], ensemble: int
    ) -> QuantizedArray:
        """As the scaling does."""
        assert isinstance(self.scaling, AbstractStatefulScaling)
        return self.scaling.with_scale(data, stored, ensemble)

    def measure(
        self, x: Float[Array, "*shape"], quantized: QuantizedArray, ensemble: int
    ) -> Float32[Array, "*ensemble 4 1"]:
        """Amax; the shares of elements clipped and flushed to zero; and `|x - q|^2 / |x|^2`.

        An element is clipped if it ends at the format's maximum and lost more than rounding would have cost. Where
        rotation mixes elements before they are quantized, shares are those of the values after it is undone.
        """
        axes = tuple(range(ensemble, x.ndim))
        x, values = x.astype(jnp.float32), quantized.dequantize()
        magnitude, rounded = jnp.abs(x), jnp.abs(values)
        top = jnp.abs(quantized.data.astype(jnp.float32)) >= self.format.max
        top = top if quantized.rotation is None else jnp.zeros(x.shape, bool)
        flushed = (rounded == 0.0) & (magnitude > 0.0)
        # Half the distance from the largest value to what would be the next.
        half = 2.0 ** (math.floor(math.log2(self.format.max)) - self.format.mantissa_bits - 1)
        clipped = top & ~flushed & (magnitude > rounded * jnp.float32(1.0 + half / self.format.max))
        count = jnp.float32(max(1, math.prod(x.shape[ensemble:])))
        amax = jnp.max(magnitude, axes, initial=0.0, keepdims=True)
        # Squares of what is below 1e-19, as gradients are, would be flushed to zero.
        unit = jnp.where((amax > 0.0) & jnp.isfinite(amax), amax, jnp.float32(1.0))
        squares = jnp.sum((x / unit) ** 2, axes)
        error = jnp.sum(((x - values) / unit) ** 2, axes) / jnp.where(squares > 0.0, squares, jnp.float32(1.0))
        amax = amax.reshape(x.shape[:ensemble])
        shares = [jnp.sum(condition.astype(jnp.float32), axes) / count for condition in (clipped, flushed)]
        return jnp.stack([amax, *shares, error], axis=-1)[..., None]

    def head(
        self,
        rows: Float32[Array, "*ensemble operands columns"],
        measured: Float32[Array, "*ensemble operands 4"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands columns"]:
        """The scaling's row as it is, and what was measured."""
        kept = lax.slice_in_dim(rows, 0, len(self._inner_row), axis=rows.ndim - 1)
        return lax.concatenate([kept, measured], rows.ndim - 1)

    def newest(self, rows: Float32[Array, "*ensemble operands columns"]) -> Float32[Array, "*ensemble operands 4"]:
        """The last four columns."""
        return lax.slice_in_dim(rows, len(self._inner_row), len(self.first_row), axis=rows.ndim - 1)
