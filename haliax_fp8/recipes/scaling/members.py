"""Members: which elements of an operand belong together, and have an amax, a scale and statistics of their own."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from ..._numerics.quantized_array import QuantizedArray


type Measure = Callable[[Array, QuantizedArray, int], Array]
"""`AbstractMemory.measure` of a memory."""


@dataclasses.dataclass(frozen=True)
class Members:
    """The indices of the leading axes; a contraction may have others, such as groups of rows.

    Args:
        ensemble: How many leading axes of an operand number members.
        devices: Inside `shard_map`, the mesh axes over which devices hold parts of a member. Replicas count once. They
            are recognized by equal sums, as JAX marks a kernel that all devices hold as different on each of them.
        contracted: The axes that the first product with the operand sums over: a row is all along them.

    Example:
        >>> x = jnp.array([[3.5, -7.0], [1.75, 0.0]])
        >>> CurrentScaling().quantize(x, OperandUse(E4M3, contracted=(1,), members=Members(1))).scale.ravel()
        Array([0.015625  , 0.00390625], dtype=float32)
    """

    ensemble: int = 0
    devices: tuple[str, ...] = ()
    contracted: tuple[int, ...] = ()

    def over(self, devices: tuple[str, ...]) -> "Members":
        """The same members, of which devices hold parts."""
        return dataclasses.replace(self, devices=devices) if devices else self

    def counted(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """The operand, zero where it is in no product: that must not enter a scale."""
        return x

    def of_state(self, values: Float32[Array, "*states"]) -> Float32[Array, "*ensemble"]:
        """What the state has, for each index of the leading axes."""
        return values

    def measured(
        self, measure: Measure, x: Float[Array, "*shape"], quantized: QuantizedArray
    ) -> Float[Array, "*members numbers parts"]:
        """What `AbstractMemory.measure`, which knows leading axes alone, finds of these."""
        return measure(x, quantized, self.ensemble)

    def reached(self, recorded: Float32[Array, "*members numbers"]) -> Float32[Array, "*members numbers"]:
        """What a step records, `-inf` where a member was in no product."""
        return recorded

    # --- statistics ---

    def active(self) -> Float32[Array, "..."]:
        """The share of experts that have rows; 1 without experts."""
        return jnp.float32(1.0)

    def totals(self, *values: Float32[Array, "*shape"]) -> list[Float32[Array, "*members"]]:
        """The sums of values over the elements of each member, on this device."""
        return [self._joined(jnp.sum(x, self._axes(x)), jnp.sum, 0.0) for x in values]

    def counts(self, *kinds: Bool[Array, "*shape"]) -> list[Float32[Array, "*members"]]:
        """How many elements of each member are of each kind, on this device. An element is of one kind at most.

        Two kinds at a time: each sum reads, and casts, all that the kinds come from.
        """
        packs = kinds[0].ndim > self.ensemble and kinds[0].shape[-1] < 2**15
        if not packs:
            return self.totals(*(x.astype(jnp.float32) for x in kinds))
        counted = []
        for pair in itertools.batched(kinds, 2):
            words = jnp.int32(0)
            for kind, word in zip(pair, (1, 2**16), strict=False):
                words = jnp.where(kind, jnp.int32(word), words)
            # Of one axis, so that no half overflows.
            words = jnp.sum(words, axis=-1)
            halves = [words & jnp.int32(2**16 - 1), words >> jnp.int32(16)]
            counted += self.totals(*(x.astype(jnp.float32) for x in halves[: len(pair)]))
        return counted

    def largest(self, values: Float32[Array, "*shape"]) -> Float32[Array, "*members"]:
        """The largest value of each member on all devices; 0 if all are negative or none exists."""
        return self.largest_of_devices(self._joined(jnp.max(values, self._axes(values), initial=0.0), jnp.max, 0.0))

    def smallest(self, values: Float32[Array, "*shape"]) -> Float32[Array, "*members"]:
        """The smallest value of each member on all devices; infinity if none exists."""
        smallest = self._joined(jnp.min(values, self._axes(values), initial=jnp.inf), jnp.min, np.inf)
        return lax.pmin(smallest, self.devices) if self.devices else smallest

    def largest_of_devices(self, numbers: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
        """The largest of what devices found."""
        return lax.pmax(numbers, self.devices) if self.devices else numbers

    def elements(self, shape: tuple[int, ...]) -> Float32[Array, "*members"]:
        """How many elements each member has, on this device."""
        of_index = math.prod(shape[self.ensemble :])
        return self._joined(jnp.ones(shape[: self.ensemble], jnp.float32), jnp.sum, 0.0) * of_index

    def at_elements(self, numbers: Float32[Array, "*members"], ndim: int) -> Float32[Array, "..."]:
        """What its member has, for each element of an operand of a rank."""
        numbers = self.of_state(numbers)
        return lax.expand_dims(numbers, range(numbers.ndim, ndim))

    def replicas(self, sums: Sequence[Float32[Array, "*members"]]) -> Float32[Array, "*members"]:
        """How many devices hold each part of a member, judging by its sums.

        Every part has the same number of replicas, so parts that are equal by chance, such as zeros, do not count.
        """
        if not self.devices:
            return jnp.ones_like(sums[0])
        here = jnp.stack(sums, axis=-1)
        everywhere = lax.all_gather(here, self.devices)
        # NaN is what a scale that is not finite makes of the error; it is not equal to itself.
        same = (everywhere == here) | (jnp.isnan(everywhere) & jnp.isnan(here))
        return lax.pmin(jnp.sum(jnp.all(same, axis=-1).astype(jnp.float32), axis=0), self.devices)

    def of_all_devices(
        self, sums: Sequence[Float32[Array, "*members"]], replicas: Float32[Array, "*members"]
    ) -> list[Float32[Array, "*members"]]:
        """Sums over all devices, of which replicas count once."""
        return list(lax.psum([x / replicas for x in sums], self.devices)) if self.devices else list(sums)

    def _axes(self, values: Array) -> tuple[int, ...]:
        return tuple(range(self.ensemble, values.ndim))

    def _joined(
        self, values: Float32[Array, "*ensemble"], reduce: Callable[..., Array], initial: float
    ) -> Float32[Array, "*members"]:
        """Numbers of the leading axes, reduced to those of members."""
        del reduce, initial
        return values
