"""Delayed scaling: the scale of a step comes from the amaxes of the steps before it."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .._formats import Format
from .._quantized_array import QuantizedArray, quantize
from ._base import AbstractScaling


# The smallest scale that is not flushed to zero. Below it stand tensors whose amax is under 1e-35.
_SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)


@dataclasses.dataclass(frozen=True)
class DelayedScaling(AbstractScaling):
    """One scale per tensor, from the largest amax of the last steps.

    `scale = amax / max * 2**margin` with `amax = max(history)`; the history is that of the steps *before* this one, so
    the tensor is read once, not twice. What exceeds the range then is clipped in this step and fits in the next.

    Args:
        amax_history_length: How many steps the history remembers. A spike keeps the scale large for that many steps;
            16 to 32 reacts faster, 1024 is the field's default.
        margin: Headroom as a power of two: the scale is multiplied by `2**margin`.

    Raises:
        ValueError: If `amax_history_length` is below 1, or one of the arguments is not an integer.

    References:
        `flax.linen.fp8_ops` (the arithmetic, kept bit for bit); TransformerEngine's `DelayedScaling`;
        arXiv:2209.05433, section 3.

    Example:
        >>> import haliax_fp8
        >>> haliax_fp8.DelayedScaling(amax_history_length=16)
        DelayedScaling(amax_history_length=16, margin=0)
    """

    amax_history_length: int = 1024
    margin: int = 0

    stateful: ClassVar[bool] = True
    directional: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("amax_history_length", "margin"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name}={value!r} of DelayedScaling must be an integer")
        if self.amax_history_length < 1:
            raise ValueError(
                f"amax_history_length={self.amax_history_length} must be at least 1: "
                "the history has to hold the amax of the last step (the field's default is 1024)"
            )

    def quantize(
        self,
        x: Float[Array, "*shape"],
        format: Format,
        stored: Float32[Array, "*ensemble 1 1"] | None,
        ensemble: int,
        contracted: tuple[int, ...],
    ) -> QuantizedArray:
        """Quantizes with the stored scale, one for all elements of each member."""
        assert stored is not None
        return quantize(x, self._shaped(stored, x.ndim, ensemble), format)

    def with_scale(
        self, data: Float[Array, "*shape"], stored: Float32[Array, "*ensemble 1 1"], ensemble: int
    ) -> QuantizedArray:
        """The data with the stored scale."""
        return QuantizedArray(data, self._shaped(stored, data.ndim, ensemble))

    def _shaped(self, stored: Float32[Array, "*ensemble 1 1"], ndim: int, ensemble: int) -> Float32[Array, "*blocks"]:
        shape = (*stored.shape[:ensemble], *(1,) * (ndim - ensemble))
        return stored if stored.shape == shape else lax.reshape(stored, shape)

    def update(
        self,
        table: Float32[Array, "*ensemble operands columns"],
        amax: Float32[Array, "*ensemble operands 1"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands columns"]:
        """The state after a step: the amax enters the history, and the history gives the next step's scale.

        `history = roll(history, -1)`, then `history[0] = amax`;
        `scale = 1 / ((limit / max(history)) / 2**margin)`.
        The double reciprocal is Flax's: `amax / limit` differs from it in the last bit for half of all amaxes. Where
        the history holds nothing above zero, the scale stays. The scale never falls with the amax, so that taking the
        maximum over several uses of one state gives the state of their largest amax.

        An amax that is infinite or NaN is entered as `-inf`, which no maximum sees: peers record it, and keep the
        scale frozen until it leaves the history.

        Args:
            table: For each operand the scale of this step, then the amaxes of the steps before.
            amax: This step's amaxes.
            limits: The largest value of each operand's format.
        """
        axis, columns = table.ndim - 1, table.shape[-1]
        scale = lax.slice_in_dim(table, 0, 1, axis=axis)
        newest = lax.select(lax.is_finite(amax), amax, lax.full_like(amax, -jnp.inf))
        rest = lax.slice_in_dim(table, min(3, columns), columns, axis=axis)
        last = lax.slice_in_dim(table, 1, min(2, columns - 1), axis=axis)
        history = lax.concatenate([newest, rest, last], axis)
        largest = lax.expand_dims(lax.reduce_max(history, (axis,)), (axis,))
        limit = lax.broadcast_in_dim(np.asarray(limits, np.float32), scale.shape, (axis - 1,))
        zero, one = lax.full_like(scale, 0.0), lax.full_like(scale, 1.0)
        inverse = lax.div(lax.div(limit, largest), lax.full_like(scale, 2.0**self.margin))
        inverse = lax.select(lax.gt(largest, zero), inverse, lax.div(one, usable(scale)))
        scale = lax.max(lax.div(one, inverse), lax.full_like(scale, _SMALLEST_SCALE))
        return lax.concatenate([scale, history], axis)


def usable(scale: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Scales of 0 as 1: a trainer that overwrites state with a zero gradient leaves those."""
    return lax.select(lax.gt(scale, lax.full_like(scale, 0.0)), scale, lax.full_like(scale, 1.0))
