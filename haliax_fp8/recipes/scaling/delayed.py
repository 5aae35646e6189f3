"""Delayed scaling: the scale of a step comes from the amaxes of the steps before it."""

import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from ..._arguments import require_bool, require_integer
from ..._numerics.quantized_array import QuantizedArray, divide_by
from ...devices.device import FP8_UNITS, MatrixUnits
from .amax_of_history import AbstractAmaxCompute, MaxOfHistory, Percentile
from .base import AbstractScaling, CastCost, OperandUse, of_all_elements, require_margin
from .memory import AbstractMemory
from .multiplier import positive_or_one, round_down_to_power_of_two


# The smallest scale that is not flushed to zero. Below it stand tensors whose amax is under 1e-35.
_SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)

COST_WITH_STORED_SCALE = CastCost(bytes=3.0, launches=1)
"""The cost of a cast whose scale is known before the operand is read: one pass."""


_LONGEST_HISTORY, _LONGEST_INTERVAL = 2**16, 2**24


@dataclasses.dataclass(frozen=True)
class DelayedScaling(AbstractScaling):
    """One scale per tensor, from the largest amax of the last steps.

    `scale = amax / max * 2**margin` with `amax = max(history)`. The history covers the steps *before* this one, so the
    tensor is read once, not twice. A value that exceeds the range is clipped in this step and fits in the next.

    Args:
        amax_history_length: How many steps the history remembers. A spike keeps the scale large for that many steps,
            and a spike a million times too large flushes everything else to zero for as long. 16 to 32 reacts faster;
            1024 is the default in the field. `amax_compute=RecoveringMax()` bounds that time for any length.
        margin: Headroom as a power of two: the scale is multiplied by `2**margin`.
        amax_compute: What a step measures of a tensor, and how the history is reduced to one number.
        update_interval: The scale is updated in the first step and then every `update_interval` steps; the history
            records every step.
        power_of_two: Round scales up to powers of two.

    Raises:
        ValueError: If `amax_history_length` is not from 1 to 65536, `update_interval` not from 1 to 2**24 or `margin`
            beyond ±17, the binades that E4M3 has; or if an argument is of the wrong kind.

    References:
        `flax.linen.fp8_ops` (the arithmetic, kept bit for bit); TransformerEngine's `DelayedScaling`;
        arXiv:2209.05433, section 3.

    Example:
        >>> import haliax_fp8
        >>> haliax_fp8.DelayedScaling(amax_history_length=16, margin=1)
        DelayedScaling(amax_history_length=16, margin=1)
    """

    amax_history_length: int = 1024
    margin: int = 0
    amax_compute: AbstractAmaxCompute = MaxOfHistory()
    update_interval: int = 1
    power_of_two: bool = False

    units: ClassVar[MatrixUnits] = FP8_UNITS
    per_axis: ClassVar[bool] = False
    cast_cost: ClassVar[CastCost] = COST_WITH_STORED_SCALE

    def __post_init__(self) -> None:
        for name in ("amax_history_length", "update_interval"):
            require_integer(name, getattr(self, name), of="DelayedScaling")
        require_margin(self.margin, of="DelayedScaling")
        require_bool("power_of_two", self.power_of_two, of="DelayedScaling")
        if self.amax_history_length < 1:
            raise ValueError(
                f"amax_history_length={self.amax_history_length} must be at least 1: "
                "the history has to hold the amax of the last step (the field's default is 1024)"
            )
        if self.amax_history_length > _LONGEST_HISTORY:
            raise ValueError(
                f"amax_history_length={self.amax_history_length} must be at most {_LONGEST_HISTORY}: every layer keeps "
                "as many amaxes of each operand; 1024 is usual"
            )
        if not 1 <= self.update_interval <= _LONGEST_INTERVAL:
            raise ValueError(
                f"update_interval={self.update_interval} must be at least 1, an update at every step, and at most "
                f"{_LONGEST_INTERVAL}: steps are counted in float32"
            )
        if not isinstance(self.amax_compute, AbstractAmaxCompute):
            raise ValueError(
                f"amax_compute={self.amax_compute!r} is not a rule for the amax; use MaxOfHistory(), MostRecent(), "
                "RecoveringMax(), MovingAverage() or Percentile()"
            )

    def __repr__(self) -> str:
        arguments = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name in ("amax_history_length", "margin") or getattr(self, field.name) != field.default
        ]
        return f"DelayedScaling({', '.join(arguments)})"

    @functools.cached_property
    def memory(self) -> "AmaxHistory":
        """The amaxes of the last steps."""
        return AmaxHistory(
            self.amax_history_length, self.margin, self.amax_compute, self.update_interval, self.power_of_two
        )

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """Quantizes with the stored scale, one for all elements of each member."""
        return quantize_by_stored_scale(x, use)


@dataclasses.dataclass(frozen=True)
class AmaxHistory(AbstractMemory):
    """The amaxes of the last steps, and the scale that follows from them.

    Args:
        length: How many steps the history remembers.
        margin: Headroom as a power of two.
        amax_compute: What a step measures of a tensor, and how the history is reduced to one number.
        update_interval: How many steps use a scale.
        power_of_two: Whether scales are rounded up to powers of two.

    Example:
        Delayed scaling has it as its memory, and so does a scaling that one is part of:

        >>> NVFP4Scaling(delayed=DelayedScaling(amax_history_length=16)).memory.length
        16
    """

    length: int
    margin: int
    amax_compute: AbstractAmaxCompute
    update_interval: int
    power_of_two: bool

    numbers: ClassVar[int] = 1

    @property
    def first_row(self) -> tuple[float, ...]:
        """A scale of 1, and a history of zeros: newest first, then oldest to newest. Last the steps since an update."""
        counter = (0.0,) if self.update_interval > 1 else ()
        return (1.0, *(0.0,) * self.length, *counter)

    def measure(
        self, x: Float[Array, "*shape"], quantized: QuantizedArray, ensemble: int
    ) -> Float[Array, "*ensemble 1 parts"]:
        """The amaxes of rows; that of all, where quantizing has found it already."""
        amax = quantized.amax
        if amax is not None and amax.ndim == ensemble + 2 and not isinstance(self.amax_compute, Percentile):
            return amax
        return self.amax_compute.measure(x, ensemble)

    def head(
        self,
        rows: Float32[Array, "*ensemble operands columns"],
        measured: Float32[Array, "*ensemble operands 1"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands 2"]:
        """The next step's scale, from a history that this step's amax has entered; and that amax.

        `scale = 1 / ((limit / max(history)) / 2**margin)`, where the newest amax has replaced the oldest.
        The double reciprocal is Flax's: `amax / limit` differs from it in the last bit for half of all amaxes. Where
        the history holds nothing above zero, the scale stays. The scale never falls with the amax, so that taking the
        maximum over several uses of one state gives the state of their largest amax.

        An infinite or NaN amax is recorded as `-inf`, which no maximum sees. Other libraries record it unchanged, and
        their scale is stuck until it leaves the history.

        Args:
            rows: For each operand the scale of this step, then the amaxes of the steps before.
            measured: This step's amaxes.
            limits: The largest value of each operand's format.
        """
        axis, end = rows.ndim - 1, 1 + self.length
        scale = lax.slice_in_dim(rows, 0, 1, axis=axis)
        newest = finite_or_none(measured)
        new_scale = self.scale_of(newest, lax.concatenate(self._moved(rows), axis), scale, limits)
        if self.update_interval > 1:
            counter = lax.slice_in_dim(rows, end, end + 1, axis=axis)
            new_scale = lax.select(lax.eq(counter, np.float32(0.0)), new_scale, scale)
        return lax.concatenate([new_scale, newest], axis)

    def tail(
        self, rows: Float32[Array, "*ensemble operands columns"]
    ) -> list[Float32[Array, "*ensemble operands others"]]:
        """The rest of `roll(history, -1)`, and the steps since an update."""
        axis, end = rows.ndim - 1, 1 + self.length
        columns = self._moved(rows)
        if self.update_interval > 1:
            counter = lax.slice_in_dim(rows, end, end + 1, axis=axis)
            columns.append(lax.rem(counter + np.float32(1.0), np.float32(self.update_interval)))
        return columns

    def _moved(self, rows: Array) -> list[Array]:
        """`roll(history, -1)` without its first entry, which this step's amax takes."""
        axis, end = rows.ndim - 1, 1 + self.length
        rest = lax.slice_in_dim(rows, min(3, end), end, axis=axis)
        return [rest, lax.slice_in_dim(rows, 1, min(2, end - 1), axis=axis)]

    def calibrated(
        self,
        rows: Float32[Array, "*ensemble operands columns"],
        measured: Float32[Array, "*ensemble operands 1"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands columns"]:
        """Like `update`, with a scale that moves at every batch whatever `update_interval` is, and in the next step."""
        if self.update_interval == 1:
            return self.update(rows, measured, limits)
        history = lax.slice_in_dim(rows, 0, 1 + self.length, axis=rows.ndim - 1)
        new = self.update(jnp.concatenate([history, jnp.zeros_like(measured)], -1), measured, limits)
        return new.at[..., -1].set(0.0)

    def scale_of(
        self,
        newest: Float32[Array, "*ensemble operands 1"],
        older: Float32[Array, "*ensemble operands others"],
        scale: Float32[Array, "*ensemble operands 1"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands 1"]:
        """The scale that follows from a history; where that holds nothing above zero, the scale as it was.

        Args:
            newest: The newest amax.
            older: Those before it, from the oldest on.
            scale: The scale before.
            limits: The largest value of each operand's format.
        """
        amax = self.amax_compute.of_history(newest, older)
        return scale_of_amax(amax, scale, limits, margin=self.margin, power_of_two=self.power_of_two)


def quantize_by_stored_scale(x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
    """Quantizes with the scale that the state holds, one for all elements of each member.

    Args:
        x: The operand.
        use: What is done with it.

    Raises:
        ValueError: If `use` has no stored scale.

    Example:
        >>> use = OperandUse(E4M3, contracted=(0,), stored_scale=jnp.float32(0.5))
        >>> quantize_by_stored_scale(jnp.array([0.25, 1000.0]), use).data
        Array([0.5, 448], dtype=float8_e4m3fn)
    """
    return divide_by(x, of_all_elements(stored_scale_of(use), x.ndim), use.cast, scale_bits=use.scale_bits)


def stored_scale_of(use: OperandUse) -> Float32[Array, " *ensemble"]:
    """The scales that the state holds; raises a ValueError if `use` has none."""
    if use.stored_scale is None:
        raise ValueError(
            "use.stored_scale=None: this scaling takes its scale from state; call OperandUse(..., stored_scale=scale), "
            "with a float32 scale for each member"
        )
    return use.stored_scale


def scale_of_amax(
    amax: Float32[Array, "*ensemble operands 1"],
    scale: Float32[Array, "*ensemble operands 1"],
    limits: tuple[float, ...],
    *,
    margin: int = 0,
    power_of_two: bool = False,
) -> Float32[Array, "*ensemble operands 1"]:
    """`1 / ((limit / amax) / 2**margin)`; the scale before where the amax is not above zero, or not finite.

    Args:
        amax: The amax of each operand.
        scale: The scale before.
        limits: The largest value of each operand's format.
        margin: Headroom, as a power of two.
        power_of_two: Whether to round the scale up to a power of two.

    Example:
        >>> amax, before = jnp.array([[896.0], [jnp.nan]]), jnp.array([[1.0], [0.5]])
        >>> scale_of_amax(amax, before, (E4M3.max, E5M2.max))
        Array([[2. ],
               [0.5]], dtype=float32)
    """
    limit = lax.broadcast_in_dim(np.asarray(limits, np.float32), scale.shape, (scale.ndim - 2,))
    one = np.float32(1.0)
    inverse = lax.div(limit, amax)
    if margin:
        inverse = lax.div(inverse, np.float32(2.0**margin))
    known = lax.bitwise_and(lax.gt(amax, np.float32(0.0)), lax.is_finite(amax))
    inverse = lax.select(known, inverse, lax.div(one, positive_or_one(scale)))
    if power_of_two:
        inverse = round_down_to_power_of_two(inverse)
    return lax.max(lax.div(one, inverse), np.float32(_SMALLEST_SCALE))


def finite_or_none(measured: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Amaxes, `-inf` instead of those that are infinite or NaN: no maximum sees it."""
    return lax.select(lax.is_finite(measured), measured, lax.full_like(measured, -jnp.inf))
