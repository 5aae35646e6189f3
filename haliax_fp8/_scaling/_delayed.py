"""Delayed scaling: the scale of a step comes from the amaxes of the steps before it."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
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
        self, x: Float[Array, "*shape"], format: Format, stored: Float32[Array, "*ensemble"] | None, ensemble: int
    ) -> QuantizedArray:
        """Quantizes with the stored scale, one for all elements of each member."""
        assert stored is not None
        # A trainer that overwrites state with the zero gradient of a layer that no loss reached leaves a scale of 0.
        usable = jnp.where(stored > 0.0, stored, jnp.ones_like(stored))
        return quantize(x, usable.reshape(usable.shape + (1,) * (x.ndim - ensemble)), format)

    def update(
        self,
        scale: Float32[Array, "*ensemble operands"],
        history: Float32[Array, "*ensemble operands length"],
        amax: Float32[Array, "*ensemble operands"],
        limits: tuple[float, ...],
    ) -> tuple[Float32[Array, "*ensemble operands"], Float32[Array, "*ensemble operands length"]]:
        """The state after a step: the amax enters the history, and the history gives the next step's scale.

        `history = roll(history, -1)`, then `history[0] = amax`;
        `scale = 1 / ((limit / max(history)) / 2**margin)`.
        The double reciprocal is Flax's: `amax / limit` differs from it in the last bit for half of all amaxes. Where
        the history holds nothing above zero, the scale stays. The scale never falls with the amax, so that taking the
        maximum over several uses of one state gives the state of their largest amax.

        An amax that is infinite or NaN is entered as `-inf`, which no maximum sees: peers record it, and keep the
        scale frozen until it leaves the history.

        Args:
            scale: The scales of this step, per operand.
            history: The amaxes of the steps before, newest first, then (cyclically) oldest to newest.
            amax: This step's amaxes.
            limits: The largest value of each operand's format.
        """
        amax = jnp.where(jnp.isfinite(amax), amax, jnp.full_like(amax, -jnp.inf))
        history = jnp.concatenate(
            [amax[..., None], history[..., 2:], history[..., : min(1, history.shape[-1] - 1)]], -1
        )
        largest = jnp.max(history, axis=-1)
        limit = jnp.asarray(limits, jnp.float32)
        limit = limit.reshape((1,) * (scale.ndim - 1) + limit.shape)
        inverse = jnp.where(largest > 0.0, (limit / largest) / jnp.float32(2.0**self.margin), 1.0 / scale)
        return jnp.maximum(1.0 / inverse, jnp.float32(_SMALLEST_SCALE)), history
