"""The interface of scalings: how they quantize an operand at one use, and what they remember, if anything."""

import abc
import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Key

from ..._numerics.formats import E5M2, Format
from ..._numerics.quantized_array import QuantizedArray
from ..._numerics.rounding import Rounding
from ...devices.device import MatrixUnits


class OperandUse(NamedTuple):
    """What a scaling needs to know of one use of an operand.

    Args:
        format: The format to round to.
        contracted: The axes of the operand that the product sums over.
        ensemble: How many leading axes number independent members, each with its own scales.
        stored: The scales that the state holds, `[*ensemble]`; None if the scaling is stateless.
        rounding: How to round.
        key: For a rounding that is random, one key for each member.
        mixable: Whether the product sums over the last contracted axis as a whole. A grouped product does not: there,
            neighbours may belong to different groups.
        scale_bits: How many significant bits a scale for the whole tensor may have, see `QuantizedArray`.
        devices: Inside `shard_map`, the mesh axes over which devices hold parts of the operand; () elsewhere.
        used: Which elements are in the product at all, in a shape that broadcasts to the operand's; None if all are.
    """

    format: Format
    contracted: tuple[int, ...]
    ensemble: int = 0
    stored: Float32[Array, " *ensemble"] | None = None
    rounding: Rounding = Rounding.TO_NEAREST
    key: Key[Array, "*ensemble"] | None = None
    mixable: bool = True
    scale_bits: int = 24
    devices: tuple[str, ...] = ()
    used: Bool[Array, "*shape"] | None = None

    def counted(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """The operand as its amaxes are taken: zero where it is not in the product."""
        return x if self.used is None else jnp.where(self.used, x, np.asarray(0.0, x.dtype))

    def cast(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Rounds to the format as this use does, clipping what lies beyond its maximum."""
        return self.rounding.cast(x, self.format, self.key)


@dataclasses.dataclass(frozen=True)
class AbstractScaling(abc.ABC):
    """How one operand gets its scale: which elements share one, and when their amax is measured.

    A scaling is a value: frozen, hashable, compared by its fields. What it remembers between steps is stored in the
    state of the op that uses it.
    """

    quantizes: ClassVar[bool] = True
    """Whether the operand is rounded at all; False leaves it in high precision."""

    units: ClassVar[MatrixUnits]
    """The hardware that multiplies operands with such scales as they are, if the scaling quantizes.

    `FP8_UNITS` take scales of tensors or rows, which factor out of the sum, and `MX_UNITS` powers of two for whole
    blocks of 32. All other scales are for `NO_UNITS`: operands are dequantized first, and `supported` says so.
    """

    directional: ClassVar[bool]
    """Whether the scales depend on which axes are contracted. An operand of two products is then quantized twice."""

    stores_scale: ClassVar[bool] = False
    """Whether `quantize` divides by the state's scale, one for each member, so that nothing else need keep it."""

    rounds_scale: ClassVar[bool] = False
    """Whether `quantize` itself rounds its scale up to `OperandUse.scale_bits`, for products in bfloat16.

    Stored scales are rounded too, but where they are read from the state.
    """

    gradient_format: ClassVar[Format] = E5M2
    """The format that output gradients take with this scaling, unless a recipe says otherwise."""

    cast_bytes: ClassVar[float] = 5.0
    """The bytes that quantizing reads and writes per element: bfloat16 for the amax and again for the cast, and FP8."""

    cast_launches: ClassVar[int] = 3
    """The launches that it takes: the amax of parts, the amax of those, the cast."""

    @property
    def for_kernel(self) -> "AbstractScaling":
        """The scaling that a kernel takes where this one is used for all operands."""
        return self

    @abc.abstractmethod
    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """Quantizes an operand.

        Args:
            x: The operand.
            use: What is done with it.
        """


@dataclasses.dataclass(frozen=True)
class AbstractStatefulScaling(AbstractScaling):
    """A scaling whose scale comes from state that is carried from step to step.

    The state is a row of a table per operand: first the scale for the next use, then whatever the scaling remembers. A
    step measures each operand, and records the result.
    """

    directional: ClassVar[bool] = False

    # The scale is known before the operand is read: one pass.
    cast_bytes: ClassVar[float] = 3.0
    cast_launches: ClassVar[int] = 1

    stores_scale: ClassVar[bool] = True

    numbers: ClassVar[int]
    """How many numbers a step records of an operand; with 0 it records none, and the rows do not change."""

    @property
    @abc.abstractmethod
    def first_row(self) -> tuple[float, ...]:
        """The row before the first step."""

    @abc.abstractmethod
    def measure(
        self, x: Float[Array, "*shape"], quantized: QuantizedArray, ensemble: int
    ) -> Float[Array, "*ensemble numbers parts"]:
        """What a step measures of parts of an operand, in any dtype. It records their maximum, as several uses do.

        A maximum over all of a large operand takes two launches; of parts, operands share the second.

        Args:
            x: The operand; it may have no elements.
            quantized: What `quantize` made of it.
            ensemble: How many leading axes number members.
        """

    @abc.abstractmethod
    def head(
        self,
        rows: Float32[Array, "*ensemble operands columns"],
        measured: Float32[Array, "*ensemble operands numbers"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands changed"]:
        """The first columns of the rows after a step: those that are computed from several others.

        Args:
            rows: The rows before it, of the operands with this scaling.
            measured: What this step measured of them; where it is not finite, the scale must not come from it.
            limits: The largest value of each of these operands' formats.
        """

    def tail(
        self, rows: Float32[Array, "*ensemble operands columns"]
    ) -> list[Float32[Array, "*ensemble operands others"]]:
        """The other columns after a step, in parts: moved, or computed element by element. By default a row has none.

        Args:
            rows: The rows before it.
        """
        del rows
        return []

    def update(
        self,
        rows: Float32[Array, "*ensemble operands columns"],
        measured: Float32[Array, "*ensemble operands numbers"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands columns"]:
        """The rows after a step: `head`, then `tail`."""
        return lax.concatenate([self.head(rows, measured, limits), *self.tail(rows)], rows.ndim - 1)

    def calibrated(
        self,
        rows: Float32[Array, "*ensemble operands columns"],
        measured: Float32[Array, "*ensemble operands numbers"],
        limits: tuple[float, ...],
    ) -> Float32[Array, "*ensemble operands columns"]:
        """The rows after a step of calibration; as `update` for a scaling that learns from every step."""
        return self.update(rows, measured, limits)

    def newest(
        self, rows: Float32[Array, "*ensemble operands columns"]
    ) -> Float32[Array, "*ensemble operands numbers"]:
        """What the last update entered into rows: they travel as a gradient, which may be a sum or a maximum."""
        return lax.slice_in_dim(rows, 1, 1 + self.numbers, axis=rows.ndim - 1)


def of_all_elements(scale: Float32[Array, " *ensemble"], ndim: int) -> Float32[Array, "*blocks"]:
    """A scale for each member, as `QuantizedArray` takes it; a single one stays a scalar.

    Args:
        scale: The scales that the state holds.
        ndim: The rank of the operand, whose first axes number the members.
    """
    return lax.reshape(scale, (*scale.shape, *(1,) * (ndim - scale.ndim))) if scale.ndim else scale
