"""Static scaling: scales that are given, or come from calibration, and never change."""

import dataclasses
import functools
import math
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from ..._arguments import require_number
from ..._numerics.quantized_array import QuantizedArray
from ...devices.device import FP8_UNITS, MatrixUnits
from .amax_of_history import amaxes_of_rows
from .base import AbstractScaling, CastCost, OperandUse, require_margin
from .delayed import COST_WITH_STORED_SCALE, finite_or_none, quantize_by_stored_scale, scale_of_amax
from .memory import AbstractMemory


_SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)


@dataclasses.dataclass(frozen=True)
class StaticScaling(AbstractScaling):
    """One scale per tensor that training does not move.

    For inference, `calibrate` derives the scale from the largest amax that it saw, `scale = amax / max * 2**margin`.
    For models whose activations have a known size by construction, as in unit scaling, the scale is given. No amax is
    computed while the model runs.

    Without a given scale, the model has to be calibrated before its first step. Until then the scale is infinite, and
    every product that uses it is NaN; `TrainStep` and `quantization_statistics` raise, and `describe` says so.

    Args:
        scale: The scale before calibration; None if calibration has to find it.
        margin: Headroom of calibrated scales, as a power of two.

    Raises:
        ValueError: If `scale` is not positive and finite, or `margin` is not an integer between -17 and 17.

    References:
        vLLM's and TensorRT-LLM's static activation scales; Unit Scaling (arXiv:2303.11257), where the scale is 1.

    Example:
        >>> op = Fp8DotGeneral.init(StaticScaling(scale=0.25))
        >>> op.scale("kernel")
        Array(0.25, dtype=float32)
    """

    scale: float | None = None
    margin: int = 0

    units: ClassVar[MatrixUnits] = FP8_UNITS
    per_axis: ClassVar[bool] = False
    cast_cost: ClassVar[CastCost] = COST_WITH_STORED_SCALE

    def __post_init__(self) -> None:
        if self.scale is not None:
            require_number("scale", self.scale, "1.0", of="StaticScaling")
            if not self.scale > 0.0:
                raise ValueError(
                    f"scale={self.scale} of StaticScaling must be positive and finite: values are divided by it. "
                    "Use None to let calibration find it"
                )
            if self.scale < _SMALLEST_SCALE:
                raise ValueError(
                    f"scale={self.scale} of StaticScaling is below {_SMALLEST_SCALE:.3g}, the smallest normal float32, "
                    "which devices flush to zero; use a larger one, or None to let calibration find it"
                )
        require_margin(self.margin, of="StaticScaling")

    @functools.cached_property
    def memory(self) -> "FixedScale":
        """The scale, and the largest amax of calibration."""
        return FixedScale(self.scale, self.margin)

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """Quantizes with the stored scale."""
        return quantize_by_stored_scale(x, use)


@dataclasses.dataclass(frozen=True)
class FixedScale(AbstractMemory):
    """A scale that steps leave as it is, and that calibration computes from the largest amax.

    Args:
        scale: The scale before calibration; None if calibration has to find it.
        margin: Headroom of calibrated scales, as a power of two.
    """

    scale: float | None
    margin: int

    numbers: ClassVar[int] = 0

    @property
    def first_row(self) -> tuple[float, ...]:
        """The scale, infinite until calibration finds it; and the largest amax of calibration so far."""
        # Not NaN: `jax.debug_nans` would stop where the model is converted, not where the scale is used.
        return (math.inf if self.scale is None else self.scale, 0.0)

    def measure(
        self, x: Float[Array, "*shape"], quantized: QuantizedArray, ensemble: int
    ) -> Float[Array, "*ensemble 1 parts"]:
        """The amaxes of rows; asked for in calibration only."""
        del quantized
        return amaxes_of_rows(x, ensemble)

    def head(
        self,
        rows: Float32[Array, "*ensemble operands columns"],
        measured: Float32[Array, "*ensemble operands numbers"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands columns"]:
        """The rows as they are."""
        del measured, limits
        return rows

    def calibrated(
        self,
        rows: Float32[Array, "*ensemble operands columns"],
        measured: Float32[Array, "*ensemble operands 1"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands columns"]:
        """The scale from the largest amax of all batches so far; 0 where none was above zero and no scale is known."""
        axis = rows.ndim - 1
        before, largest = [lax.slice_in_dim(rows, i, i + 1, axis=axis) for i in (0, 1)]
        amax = finite_or_none(lax.max(measured, largest))
        scale = scale_of_amax(amax, before, limits, margin=self.margin)
        # Microbatches are combined by maximum, in which what one of them did not find must not win. State is not
        # overwritten by a scale of 0.
        known = lax.select(lax.is_finite(scale), scale, lax.full_like(scale, 0.0))
        return lax.concatenate([known, amax], axis)
