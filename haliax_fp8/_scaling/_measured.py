"""Measured scaling: any scaling, with a record of what quantization does to the operand."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from .._quantized_array import QuantizedArray
from ._base import AbstractScaling, AbstractStatefulScaling, OperandUse


@dataclasses.dataclass(frozen=True)
class MeasuredScaling(AbstractStatefulScaling):
    """Quantizes as another scaling does, and records amax, saturation, underflow and squared error.

    The row is that of the scaling, which stays as it is, and the four numbers behind it.

    Args:
        scaling: The scaling that quantizes.
        limit: The largest value of the format.
    """

    scaling: AbstractScaling
    limit: float

    measures: ClassVar[int] = 4

    @property
    def quantizes(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the scaling."""
        return self.scaling.quantizes

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
    ) -> Float32[Array, "*ensemble 1 4"]:
        """Amax; the shares of elements clipped and flushed to zero; and `|x - q|^2 / |x|^2`.

        Clipped is what ends at the format's maximum and was larger. A block recipe clips nothing; where rotation mixes
        elements before they are quantized, shares are those of the values after it is undone.
        """
        axes = tuple(range(ensemble, x.ndim))
        x, values = x.astype(jnp.float32), quantized.dequantize()
        magnitude, rounded = jnp.abs(x), jnp.abs(values)
        top = jnp.abs(quantized.data.astype(jnp.float32)) >= self.limit
        top = top if quantized.rotation is None else jnp.zeros(x.shape, bool)
        # Rounding moves a value by at most half of its distance to the next; clipping by more.
        clipped = top & (magnitude > rounded * jnp.float32(1.0 + 2.0**-4))
        flushed = (rounded == 0.0) & (magnitude > 0.0)
        count = jnp.float32(max(1, math.prod(x.shape[ensemble:])))
        squares = jnp.sum(x * x, axes)
        error = jnp.sum((x - values) ** 2, axes) / jnp.where(squares > 0.0, squares, jnp.float32(1.0))
        amax = jnp.max(magnitude, axes, initial=0.0)
        shares = [jnp.sum(condition.astype(jnp.float32), axes) / count for condition in (clipped, flushed)]
        return jnp.expand_dims(jnp.stack([amax, *shares, error], axis=-1), ensemble)

    def update(
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
