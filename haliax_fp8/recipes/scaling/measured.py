"""Scalings that measure: what quantization does to an operand, and what calibration observes."""

import dataclasses
import functools
import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, UInt

from ..._jax.xla import computed_before_measured
from ..._numerics.quantized_array import QuantizedArray, expand
from ...devices.device import MatrixUnits
from ...formats import Format
from .base import AbstractScaling, CastCost, OperandUse
from .high_precision import unscaled
from .members import Members
from .memory import AbstractMemory


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
    "wide_rows",
    "nonfinite",
    "active",
)
"""The measured numbers, in the order of the columns."""

# A row this close to the amax of all gains three binades from a scale of its own, at most.
_WIDE = 8.0


def statistics_of(
    x: Float[Array, "*shape"],
    quantized: QuantizedArray,
    members: Members,
    format: Format,
) -> Float32[Array, "*members statistics"]:
    """Each of `STATISTICS` for an operand; all but `nonfinite` of its finite elements.

    An element is clipped if it ends at the format's maximum and lost more than rounding would have cost. Where rotation
    mixes elements before they are quantized, the shares are those of the values after it is undone. Then none counts as
    clipped or in the last bin, and neither does an element that stays in high precision.

    Args:
        x: The operand.
        quantized: What it was quantized to.
        members: Whose statistics to take.
        format: The format of the data.
    """
    x, values = x.astype(jnp.float32), quantized.dequantize()
    finite = jnp.isfinite(x)
    x = jnp.where(finite, x, jnp.float32(0.0))
    magnitude = jnp.abs(x)
    nonzero = magnitude > 0.0
    if quantized.rotation is None and quantized.data.dtype == format.storage:
        # The bits tell without a cast, which on a CPU takes longer than all that is done with its result.
        bits, scale = _bits_of_magnitude(quantized.data), expand(quantized.scale, x.shape, quantized.block)
        scaled = scale > 0.0  # a block's scale may itself be flushed to zero
        top = (bits >= _bits_of_magnitude(np.asarray(format.max, format.storage))) & scaled & finite
        # With a scale that is not finite nothing became zero, but NaN, which the bits of the data need not say.
        flushed = ((bits == 0) | ~scaled) & jnp.isfinite(scale) & nonzero
        # Half the distance from the largest value to what would be the next.
        half = 2.0 ** (math.floor(math.log2(format.max)) - format.mantissa_bits - 1)
        clipped = top & (magnitude > scale * jnp.float32(format.max + half))
    else:
        top = clipped = jnp.zeros(x.shape, bool)
        flushed = (values == 0.0) & nonzero

    amax = members.largest(magnitude)
    smallest = jnp.minimum(members.smallest(jnp.where(nonzero, magnitude, jnp.float32(jnp.inf))), amax)
    # Squares of what is below 1e-19, as gradients are, would be flushed to zero; so would the inverse of 2**127.
    unit = jnp.clip(amax, jnp.float32(2.0**-126), jnp.float32(2.0**126))
    inverse = members.at_elements(jnp.float32(1.0) / unit, x.ndim)
    parts = x * inverse
    lost = jnp.where(finite, (x - values) * inverse, jnp.float32(0.0))
    counts = members.counts(clipped, top & ~clipped, flushed, ~finite)
    local = [*members.totals(parts, parts**2, lost**2), *counts]
    replicas = members.replicas([unit, *local])
    total, squares, lost, clipped, rounded, flushed, nonfinite, count = members.of_all_devices(
        [*local, members.elements(x.shape)], replicas
    )

    count = _positive(count - nonfinite)  # what all else is of
    # About the mean: an operand that is everywhere the same has no tails.
    mean = members.at_elements(total / count, x.ndim)
    centered = jnp.where(finite, parts - mean, jnp.float32(0.0)) ** 2
    # Of a row that devices share, each part counts as one.
    amax_of_row = jnp.max(magnitude, members.contracted, keepdims=True)
    has_values = amax_of_row > 0.0
    is_wide = has_values & (amax_of_row * jnp.float32(_WIDE) >= members.at_elements(amax, x.ndim))
    sums = [*members.totals(centered, centered**2), *members.totals(*map(jnp.float32, (is_wide, has_values)))]
    variance, fourth, wide, rows = members.of_all_devices(sums, replicas)
    scale = quantized.scale
    scale = jnp.broadcast_to(scale, (*x.shape[: members.ensemble], *scale.shape[members.ensemble :]))
    by_name = {
        "amax": amax,
        "scale": members.largest(scale),
        "saturation": clipped / count,
        "underflow": flushed / count,
        "last_bin": (clipped + rounded) / count,
        "error": lost / _positive(squares),
        "rms_error": jnp.sqrt(lost / count) * unit,
        "norm": jnp.sqrt(squares) * unit,
        "dynamic_range": jnp.log2(_positive(amax)) - jnp.log2(_positive(smallest)),
        "kurtosis": (fourth / count) / _positive((variance / count) ** 2),
        "wide_rows": wide / _positive(rows),
        "nonfinite": nonfinite,
        "active": jnp.broadcast_to(members.active(), amax.shape),
    }
    return jnp.stack([by_name[name] for name in STATISTICS], axis=-1)


def _bits_of_magnitude(a: Float[Array | np.ndarray, "*shape"]) -> UInt[Array, "*shape"]:
    """The bits below the sign, in the order of the magnitudes."""
    unsigned = np.dtype(f"uint{8 * a.dtype.itemsize}")
    return lax.bitcast_convert_type(a, unsigned) & unsigned.type(np.iinfo(unsigned).max // 2)


def _positive(a: Array) -> Array:
    return jnp.where(a > 0.0, a, jnp.float32(1.0))


@dataclasses.dataclass(frozen=True)
class MeasuredScaling(AbstractScaling):
    """Quantizes and records as another scaling does, and records what quantization does to the operand.

    Args:
        scaling: The scaling that quantizes.
        format: The format that it quantizes to.
    """

    scaling: AbstractScaling
    format: Format

    @property
    def quantizes(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the scaling that quantizes rounds its operand at all."""
        return self.scaling.quantizes

    @property
    def units(self) -> MatrixUnits:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The hardware that multiplies operands with the scales of that scaling."""
        return self.scaling.units

    @property
    def per_axis(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether those scales depend on which axes are contracted."""
        return self.scaling.per_axis

    @property
    def exact_scales(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether products in bfloat16 take its stored scales as they are."""
        return self.scaling.exact_scales

    @property
    def cast_cost(self) -> CastCost:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The cost of that scaling; measuring is not a cast."""
        return self.scaling.cast_cost

    @functools.cached_property
    def stores_scale(self) -> bool:
        """Whether that scaling keeps its scale in the state; a stateless one does not."""
        return self.scaling.stores_scale

    @functools.cached_property
    def memory(self) -> "MeasuredMemory":
        """What that scaling remembers, and the statistics of the last step."""
        return MeasuredMemory(self.scaling, self.format)

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """Quantizes as the scaling does."""
        quantized = self.scaling.quantize(x, use)
        # Here, so that the products read it too; otherwise they would quantize the operand again.
        return dataclasses.replace(quantized, data=computed_before_measured(quantized.data))


@dataclasses.dataclass(frozen=True)
class MeasuredMemory(AbstractMemory):
    """What a scaling remembers, and what it does to the operand.

    A row is that of the scaling, updated as by itself, followed by one number for each of `STATISTICS`.

    Args:
        scaling: The scaling that quantizes.
        format: The format that it quantizes to.
    """

    scaling: AbstractScaling
    format: Format

    @functools.cached_property
    def numbers(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the scaling's memory measures, then the statistics."""
        return self._inner_numbers + len(STATISTICS)

    @property
    def first_row(self) -> tuple[float, ...]:
        """The first row of the scaling's memory, then zeros."""
        return (*self._inner_row, *(0.0,) * len(STATISTICS))

    @property
    def _inner_row(self) -> tuple[float, ...]:
        return (1.0,) if self.scaling.memory is None else self.scaling.memory.first_row

    @property
    def _inner_numbers(self) -> int:
        return 0 if self.scaling.memory is None else self.scaling.memory.numbers

    def measure(
        self, x: Float[Array, "*shape"], quantized: QuantizedArray, ensemble: int
    ) -> Float32[Array, "*ensemble numbers 1"]:
        """What the scaling's memory measures, and the statistics of the operand."""
        return self.measure_members(x, quantized, Members(ensemble))

    def measure_members(
        self, x: Float[Array, "*shape"], quantized: QuantizedArray, members: Members
    ) -> Float32[Array, "*members numbers 1"]:
        """The same, of members that leading axes need not number."""
        counted = dataclasses.replace(quantized, data=members.counted(quantized.data))
        statistics = statistics_of(computed_before_measured(members.counted(x)), counted, members, self.format)
        if self.scaling.memory is not None and self._inner_numbers:
            inner = jnp.max(self.scaling.memory.measure_members(x, quantized, members).astype(jnp.float32), axis=-1)
            statistics = lax.concatenate([members.largest_of_devices(inner), statistics], statistics.ndim - 1)
        return statistics[..., None]

    def head(
        self,
        rows: Float32[Array, "*ensemble operands columns"],
        measured: Float32[Array, "*ensemble operands numbers"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands columns"]:
        """The row of the scaling's memory after the step, and the statistics."""
        axis, count = rows.ndim - 1, self._inner_numbers
        inner = lax.slice_in_dim(rows, 0, len(self._inner_row), axis=axis)
        if self.scaling.memory is not None and count:
            inner = self.scaling.memory.update(inner, lax.slice_in_dim(measured, 0, count, axis=axis), limits)
        return lax.concatenate([inner, lax.slice_in_dim(measured, count, self.numbers, axis=axis)], axis)

    def newest(
        self, rows: Float32[Array, "*ensemble operands columns"]
    ) -> Float32[Array, "*ensemble operands numbers"]:
        """What the scaling's memory measured, and the statistics."""
        axis, width = rows.ndim - 1, len(self._inner_row)
        statistics = self.statistics(rows)
        if self.scaling.memory is None or not self._inner_numbers:
            return statistics
        inner = self.scaling.memory.newest(lax.slice_in_dim(rows, 0, width, axis=axis))
        return lax.concatenate([inner, statistics], axis)

    def statistics(
        self, rows: Float32[Array, "*ensemble operands columns"]
    ) -> Float32[Array, "*ensemble operands statistics"]:
        """The last columns: one for each of `STATISTICS`."""
        return lax.slice_in_dim(rows, len(self._inner_row), len(self.first_row), axis=rows.ndim - 1)


@dataclasses.dataclass(frozen=True)
class ObservedScaling(AbstractScaling):
    """Does not quantize the operand, but records what the later scaling needs.

    Calibration runs a model with it: every product runs in high precision, so one bad scale does not spoil the amaxes
    of later layers.

    Args:
        scaling: The scaling whose state is recorded.
    """

    scaling: AbstractScaling

    quantizes: ClassVar[bool] = False
    per_axis: ClassVar[bool] = False

    @functools.cached_property
    def memory(self) -> AbstractMemory | None:
        """That of the scaling, which every step calibrates; None if it has none."""
        return None if self.scaling.memory is None else ObservedMemory(self.scaling.memory)

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """The operand itself, with scales of 1."""
        return unscaled(x, use.ensemble)


@dataclasses.dataclass(frozen=True)
class ObservedMemory(AbstractMemory):
    """Another memory, calibrated in every step.

    Args:
        memory: The other memory.
    """

    memory: AbstractMemory

    @property
    def numbers(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As many as the other memory measures; one where only calibration records it."""
        return max(self.memory.numbers, 1)

    @property
    def first_row(self) -> tuple[float, ...]:
        """The first row of the other memory."""
        return self.memory.first_row

    def measure(
        self, x: Float[Array, "*shape"], quantized: QuantizedArray, ensemble: int
    ) -> Float[Array, "*ensemble numbers parts"]:
        """Measures as the other memory does when it is calibrated."""
        return self.memory.measure_for_calibration(x, quantized, ensemble)

    def head(
        self,
        rows: Float32[Array, "*ensemble operands columns"],
        measured: Float32[Array, "*ensemble operands numbers"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands columns"]:
        """Updates the row as the other memory does when it is calibrated."""
        return self.memory.calibrated(rows, measured, limits)

    def newest(
        self, rows: Float32[Array, "*ensemble operands columns"]
    ) -> Float32[Array, "*ensemble operands numbers"]:
        """Where the other memory has it; behind the scale if only calibration records it."""
        return self.memory.newest(rows) if self.memory.numbers else lax.slice_in_dim(rows, 1, 2, axis=rows.ndim - 1)
