"""Measured scaling: any scaling, with a record of what quantization does to the operand."""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from ..._jax.xla import made_before_it_is_measured
from ..._numerics.formats import Format
from ..._numerics.quantized_array import QuantizedArray
from ...devices.device import MatrixUnits
from .base import AbstractScaling, AbstractStatefulScaling, OperandUse


STATISTICS = (
    "amax",
    "scale",
    "saturation",
    "underflow",
    "last_bin",
    "error",
    "rms_error",
    "norm",
    "dynamic_range",
    "kurtosis",
    "nonfinite",
)
"""What is measured, in the order of the columns."""


@dataclasses.dataclass(frozen=True)
class MeasuredScaling(AbstractStatefulScaling):
    """Quantizes and records as another scaling does, and records what quantization does to the operand.

    A row is that of the scaling, updated as by itself, followed by one number for each of `STATISTICS`.

    Args:
        scaling: The scaling that quantizes.
        format: The format that it quantizes to.
    """

    scaling: AbstractScaling
    format: Format

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
        return self._stateful is not None and self._stateful.stores_scale

    @property
    def measures(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the scaling measures, then the statistics."""
        return self._inner_measures + len(STATISTICS)

    @property
    def first_row(self) -> tuple[float, ...]:
        """That of the scaling, then zeros."""
        return (*self._inner_row, *(0.0,) * len(STATISTICS))

    @property
    def _stateful(self) -> AbstractStatefulScaling | None:
        return self.scaling if isinstance(self.scaling, AbstractStatefulScaling) else None

    @property
    def _inner_row(self) -> tuple[float, ...]:
        return (1.0,) if self._stateful is None else self._stateful.first_row

    @property
    def _inner_measures(self) -> int:
        return 0 if self._stateful is None else self._stateful.measures

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """As the scaling does."""
        return self.scaling.quantize(x, use)

    def measure(
        self, x: Float[Array, "*shape"], quantized: QuantizedArray, ensemble: int
    ) -> Float32[Array, "*ensemble measures 1"]:
        """What the scaling measures, and the statistics of the operand.

        All but `nonfinite` are those of the finite elements. An element is clipped if it ends at the format's maximum
        and lost more than rounding would have cost. Where rotation mixes elements before they are quantized, the
        shares are those of the values after it is undone, and none counts as clipped or in the last bin.
        """
        statistics = statistics_of(*made_before_it_is_measured((x, quantized)), ensemble, self.format)[..., None]
        if self._stateful is None or not self._inner_measures:
            return statistics
        inner = self._stateful.measure(x, quantized, ensemble)
        inner = jnp.max(inner.astype(jnp.float32), axis=-1, keepdims=True)
        return lax.concatenate([inner, statistics], statistics.ndim - 2)

    def head(
        self,
        rows: Float32[Array, "*ensemble operands columns"],
        measured: Float32[Array, "*ensemble operands measures"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands columns"]:
        """The scaling's row after the step, and the statistics."""
        axis, count = rows.ndim - 1, self._inner_measures
        inner = lax.slice_in_dim(rows, 0, len(self._inner_row), axis=axis)
        if self._stateful is not None and count:
            inner = self._stateful.update(inner, lax.slice_in_dim(measured, 0, count, axis=axis), limits)
        return lax.concatenate([inner, lax.slice_in_dim(measured, count, self.measures, axis=axis)], axis)

    def newest(
        self, rows: Float32[Array, "*ensemble operands columns"]
    ) -> Float32[Array, "*ensemble operands measures"]:
        """What the scaling measured, and the statistics."""
        axis, width = rows.ndim - 1, len(self._inner_row)
        statistics = self.statistics(rows)
        if self._stateful is None or not self._inner_measures:
            return statistics
        inner = self._stateful.newest(lax.slice_in_dim(rows, 0, width, axis=axis))
        return lax.concatenate([inner, statistics], axis)

    def statistics(
        self, rows: Float32[Array, "*ensemble operands columns"]
    ) -> Float32[Array, "*ensemble operands statistics"]:
        """The last columns: one for each of `STATISTICS`."""
        return lax.slice_in_dim(rows, len(self._inner_row), len(self.first_row), axis=rows.ndim - 1)


def statistics_of(
    x: Float[Array, "*shape"], quantized: QuantizedArray, ensemble: int, format: Format
) -> Float32[Array, "*ensemble statistics"]:
    """Each of `STATISTICS` for an operand, see `MeasuredScaling.measure`.

    Args:
        x: The operand.
        quantized: What it was quantized to.
        ensemble: How many leading axes number members.
        format: The format of the data.
    """
    axes, members = tuple(range(ensemble, x.ndim)), x.shape[:ensemble]
    x, values = x.astype(jnp.float32), quantized.dequantize()
    finite = jnp.isfinite(x)
    x = jnp.where(finite, x, jnp.float32(0.0))
    magnitude, rounded = jnp.abs(x), jnp.abs(values)
    nonzero = magnitude > 0.0

    top = jnp.abs(quantized.data.astype(jnp.float32)) >= format.max
    top = top & finite if quantized.rotation is None else jnp.zeros(x.shape, bool)
    flushed = (rounded == 0.0) & nonzero
    # Half the distance from the largest value to what would be the next.
    half = 2.0 ** (math.floor(math.log2(format.max)) - format.mantissa_bits - 1)
    clipped = top & ~flushed & (magnitude > rounded * jnp.float32(1.0 + half / format.max))

    total = lambda values: jnp.sum(values.astype(jnp.float32), axes)
    count = jnp.float32(max(1, math.prod(x.shape[ensemble:])))
    amax = jnp.max(magnitude, axes, initial=0.0, keepdims=True)
    # Squares of what is below 1e-19, as gradients are, would be flushed to zero.
    unit = jnp.where(amax > 0.0, amax, jnp.float32(1.0))
    parts = x / unit
    squares, lost = total(parts**2), total(jnp.where(finite, (x - values) / unit, jnp.float32(0.0)) ** 2)
    # About the mean: an operand that is everywhere the same has no tails.
    numbers = jnp.maximum(jnp.sum(finite.astype(jnp.float32), axes, keepdims=True), jnp.float32(1.0))
    centered = jnp.where(finite, parts - jnp.sum(parts, axes, keepdims=True) / numbers, jnp.float32(0.0))
    numbers = numbers.reshape(members)
    kurtosis = _ratio(total(centered**4) / numbers, (total(centered**2) / numbers) ** 2)
    smallest = jnp.min(jnp.where(nonzero, jnp.abs(parts), jnp.float32(1.0)), axes, initial=1.0)
    scale = jnp.broadcast_to(quantized.scale, (*members, *quantized.scale.shape[ensemble:]))
    by_name = {
        "amax": amax.reshape(members),
        "scale": jnp.max(scale, tuple(range(ensemble, scale.ndim)), initial=0.0),
        "saturation": total(clipped) / count,
        "underflow": total(flushed) / count,
        "last_bin": total(top & ~flushed) / count,
        "error": _ratio(lost, squares),
        "rms_error": jnp.sqrt(lost / count) * unit.reshape(members),
        "norm": jnp.sqrt(squares) * unit.reshape(members),
        "dynamic_range": -jnp.log2(smallest),
        "kurtosis": kurtosis,
        "nonfinite": total(~finite),
    }
    return jnp.stack([by_name[name] for name in STATISTICS], axis=-1)


def _ratio(a: Array, b: Array) -> Array:
    return a / jnp.where(b > 0.0, b, jnp.float32(1.0))
