"""Current scaling: the scale of a tensor, or of each of its rows, comes from the tensor itself."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from ..._arguments import require_bool
from ..._jax.meshes import largest_over_devices
from ..._numerics.quantized_array import QuantizedArray, divide_by, quantize_by
from ...devices.device import FP8_UNITS, MatrixUnits
from ...formats import E4M3, Format
from .base import AbstractScaling, OperandUse
from .multiplier import amax_over, multiplier_of, scale_of


@dataclasses.dataclass(frozen=True)
class CurrentScaling(AbstractScaling):
    """One scale per tensor, from its own amax: `scale = amax / max`.

    No state, and nothing is ever clipped; the price is that the tensor is read twice, once for its amax.

    Inside `jax.shard_map`, the amax is taken over all devices that hold parts of the tensor: along the mesh axes over
    which it varies, or along all with `check_vma=False`, where JAX does not know what varies. So it must not be used in
    a branch that only some devices take: they would wait for the others.

    Args:
        power_of_two: Round scales up to powers of two.
        per_device: Inside `jax.shard_map`, a scale for each device's part, from the part's own amax: devices do not
            communicate, and results depend on how the tensor is divided. Nothing changes elsewhere.

    Raises:
        ValueError: If `power_of_two` or `per_device` is neither True nor False.

    References:
        TransformerEngine's `Float8CurrentScaling`; torchao's tensorwise recipe; the Flax FP8 guide.

    Example:
        >>> CurrentScaling().quantize(jnp.array([3.5, -7.0]), OperandUse(E4M3, contracted=(0,))).scale
        Array([0.015625], dtype=float32)
    """

    power_of_two: bool = False
    per_device: bool = False

    units: ClassVar[MatrixUnits] = FP8_UNITS
    per_axis: ClassVar[bool] = False
    rounds_scale: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_bool("power_of_two", self.power_of_two, of="CurrentScaling")
        require_bool("per_device", self.per_device, of="CurrentScaling")

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """Quantizes with the amax of each member."""
        amax = amax_over(use.counted(x), tuple(range(use.ensemble, x.ndim)))
        amax = largest_over_devices(amax, () if self.per_device else use.devices)
        if self.power_of_two or use.scale_bits == 24:
            multiplier = multiplier_of(amax, use.format.max, power_of_two=self.power_of_two)
            return quantize_by(x, multiplier, use.cast, scale_bits=1 if self.power_of_two else 24)
        scale = scale_of(amax, use.format.max, use.scale_bits)
        return divide_by(x, scale, use.cast, scale_bits=use.scale_bits)


@dataclasses.dataclass(frozen=True)
class RowwiseScaling(AbstractScaling):
    """One scale per row: for everything that the product sums over at once.

    An outlier spoils only its own row. A row of fprop is a column of wgrad, so an operand of two products is quantized
    for each.

    Args:
        power_of_two: Round scales up to powers of two, as torchao does: data then differ from those of float32 scales
            by rounding only.

    Raises:
        ValueError: If `power_of_two` is neither True nor False.

    References:
        torchao's rowwise recipe (`Float8LinearConfig.from_recipe_name("rowwise")`).
    """

    power_of_two: bool = True

    units: ClassVar[MatrixUnits] = FP8_UNITS
    per_axis: ClassVar[bool] = True
    gradient_format: ClassVar[Format] = E4M3

    def __post_init__(self) -> None:
        require_bool("power_of_two", self.power_of_two, of="RowwiseScaling")

    def quantize(self, x: Float[Array, "*shape"], use: OperandUse) -> QuantizedArray:
        """Quantizes with the amaxes over the contracted axes."""
        amax = amax_over(use.counted(x), use.contracted)
        multiplier = multiplier_of(amax, use.format.max, power_of_two=self.power_of_two)
        return quantize_by(x, multiplier, use.cast, scale_bits=1 if self.power_of_two else 24)
