"""The interface of scalings: how they quantize an operand at one use, and what that costs."""

import abc
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

from jax import lax
from jaxtyping import Array, Float, Float32, Key

from ..._arguments import require_integer
from ..._numerics.quantized_array import QuantizedArray
from ..._numerics.rounding import Rounding
from ...devices.device import MatrixUnits
from ...formats import E5M2, Format
from .members import Members
from .memory import AbstractMemory


class OperandUse(NamedTuple):
    """What a scaling needs to know of one use of an operand.

    Args:
        format: The format to round to.
        contracted: The axes of the operand that the product sums over.
        members: Which elements belong together, and have scales of their own.
        stored_scale: The scales that the state holds, `[*ensemble]`; None if the scaling is stateless.
        rounding: How to round.
        key: For a rounding that is random, one key for each member.
        contiguous_sum: Whether the product sums over the last contracted axis as a whole. A grouped product does not:
            there, neighbours may belong to different groups.
        scale_bits: How many significant bits a scale for the whole tensor may have, see `QuantizedArray`.
        folder: Of a kernel from a published folder, the `FolderScales` there; else None.
    """

    format: Format
    contracted: tuple[int, ...]
    members: Members = Members()
    stored_scale: Float32[Array, " *ensemble"] | None = None
    rounding: Rounding = Rounding.TO_NEAREST
    key: Key[Array, "*ensemble"] | None = None
    contiguous_sum: bool = True
    scale_bits: int = 24
    folder: Any = None

    @property
    def ensemble(self) -> int:
        """How many leading axes number members."""
        return self.members.ensemble

    @property
    def devices(self) -> tuple[str, ...]:
        """Inside `shard_map`, the mesh axes over which devices hold parts of the operand; () elsewhere."""
        return self.members.devices

    def counted(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """The operand as its amaxes are taken: zero where it is in no product."""
        return self.members.counted(x)

    def cast(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Rounds to the format as this use does, clipping what lies beyond its maximum."""
        return self.rounding.cast(x, self.format, self.key)


class CastCost(NamedTuple):
    """What quantizing an operand costs.

    Args:
        bytes: The bytes that it reads and writes per element.
        launches: The launches that it takes.
    """

    bytes: float
    launches: int


@dataclasses.dataclass(frozen=True)
class AbstractScaling(abc.ABC):
    """How one operand gets its scale: which elements share one, and when their amax is measured.

    A scaling is a value: frozen, hashable, compared by its fields. Its `memory` defines what it remembers between
    steps; the numbers are in the state of the op that uses it.

    Example:
        Of one's own: the scale comes from the amax of the last step alone.

        >>> from haliax_fp8.recipes import (
        ...     FP8_UNITS, AbstractMemory, AbstractScaling, amaxes_of_rows, quantize_by_stored_scale, scale_of_amax
        ... )
        >>> class LastAmax(AbstractMemory):
        ...     numbers = 1
        ...     first_row = (1.0, 0.0)
        ...     def measure(self, x, quantized, ensemble):
        ...         return amaxes_of_rows(x, ensemble)
        ...     def head(self, rows, measured, limits):
        ...         return jnp.concatenate([scale_of_amax(measured, rows[..., :1], limits), measured], -1)
        >>> class LastAmaxScaling(AbstractScaling):
        ...     units = FP8_UNITS
        ...     per_axis = False
        ...     memory = LastAmax()
        ...     def quantize(self, x, use):
        ...         return quantize_by_stored_scale(x, use)
        >>> converted = fp8_linear_layers(model, recipe=LastAmaxScaling())
        >>> overwrites, grads = partition_for_grad_overwrite(filter_grad(loss_fn)(converted, x))
        >>> op = apply_updates(converted, grads, overwrites).layers[0].dot_general
        >>> bool(jnp.isclose(op.scale("input"), jnp.abs(x.array).max() / E4M3.max))
        True
    """

    quantizes: ClassVar[bool] = True
    """Whether the operand is rounded at all; False leaves it in high precision."""

    units: ClassVar[MatrixUnits]
    """The hardware that multiplies operands with such scales as they are, if the scaling quantizes.

    `FP8_UNITS` take scales of tensors or rows, which factor out of the sum, and `MX_UNITS` powers of two for whole
    blocks of 32. All other scales are for `NO_UNITS`: operands are dequantized first, and `supported` says so.
    """

    per_axis: ClassVar[bool]
    """Whether the scales depend on which axes are contracted. An operand of two products is then quantized twice."""

    rounds_scale: ClassVar[bool] = False
    """Whether `quantize` itself rounds its scale up to `OperandUse.scale_bits`, for products in bfloat16.

    Stored scales are rounded too, but where they are read from the state.
    """

    exact_scales: ClassVar[bool] = False
    """Of a kernel's scaling: whether products in bfloat16 too take stored scales as they are, and not rounded up."""

    gradient_format: ClassVar[Format] = E5M2
    """The format that output gradients take with this scaling, unless a recipe says otherwise."""

    cast_cost: ClassVar[CastCost] = CastCost(bytes=5.0, launches=3)
    """What quantizing costs: by default, bfloat16 is read for the amax and again for the cast, and FP8 is written.

    The launches are the amax of parts, the amax of those, and the cast. With a stored scale one pass is enough.
    """

    @functools.cached_property
    def memory(self) -> AbstractMemory | None:
        """What the scaling remembers from step to step; None, the default, if it keeps no state."""
        return None

    @functools.cached_property
    def stores_scale(self) -> bool:
        """Whether `quantize` divides by the state's scale, one for each member, so that nothing else need keep it."""
        return self.memory is not None

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


def of_all_elements(scale: Float32[Array, " *ensemble"], ndim: int) -> Float32[Array, "*blocks"]:
    """A scale for each member, as `QuantizedArray` takes it; a single one stays a scalar.

    Args:
        scale: The scales that the state holds.
        ndim: The rank of the operand, whose first axes number the members.
    """
    return lax.reshape(scale, (*scale.shape, *(1,) * (ndim - scale.ndim))) if scale.ndim else scale


def require_margin(value: int, of: str) -> None:
    """Raises a ValueError for a margin, positive or negative, that uses up a format's range.

    Args:
        value: Headroom as a power of two.
        of: The scaling that has the margin.
    """
    require_integer("margin", value, of)
    if not -_BINADES <= value <= _BINADES:
        raise ValueError(
            f"margin={value} of {of} must lie between {-_BINADES} and {_BINADES}: scales are multiplied by 2**margin, "
            "and E4M3 spans 18 binades, so a larger margin turns every value into zero, and a smaller one clips every "
            "value; 0 is usual, 1 leaves room for tensors that double from one step to the next"
        )


# E4M3 spans 17.8 binades, from its smallest subnormal, 2**-9, to its maximum, 448.
_BINADES = 17
