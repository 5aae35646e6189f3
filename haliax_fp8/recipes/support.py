"""supported: whether a device's matrix units multiply what a recipe makes, and if not, why."""

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from rich.console import RenderableType
from rich.text import Text

from .._numerics.quantized_array import QuantizedArray, factors_out, in_mx_blocks, in_nv_blocks
from .._printing import Printable
from ..devices.device import Device
from ..devices.grouped import BLOCK, GroupedImplementation
from ..devices.units import FP4_UNITS, FP8_UNITS, MX_UNITS
from ..formats import E2M1, E4M3, E5M2
from .catalog import RecipeLike, as_recipe
from .recipe import Quantization, Recipe
from .scaling import BlockScaling, HadamardScaling, MeasuredScaling, OperandUse


class Outcome(enum.Enum):
    """What becomes of a recipe's FP8 products on a device."""

    NATIVE = "native"
    """The device's matrix units multiply all of them."""
    EMULATED = "emulated"
    """The device is a CPU, which computes them with the same rounding."""
    REFUSED = "refused"
    """The device is an accelerator that would have to emulate them, slower than high precision."""


_STYLES = {Outcome.NATIVE: "green", Outcome.EMULATED: "yellow", Outcome.REFUSED: "red"}


@dataclasses.dataclass(frozen=True, repr=False)
class Support(Printable):
    """What becomes of a recipe's products on a device.

    Args:
        device: The device.
        outcome: Whether the device multiplies the products, emulates them or refuses to. If it refuses, conversion
            raises, unless emulation is requested.
        reason: Why.
    """

    device: Device
    outcome: Outcome
    reason: str

    @property
    def is_native(self) -> bool:
        """Whether the device's matrix units multiply the products."""
        return self.outcome is Outcome.NATIVE

    def __rich__(self) -> RenderableType:
        """The outcome, the device and the reason."""
        return Text(f"{self.outcome.value} on {self.device.kind}: {self.reason}", _STYLES[self.outcome])


def supported(recipe: RecipeLike, device: Device | str | None = None) -> Support:
    """Whether a device multiplies the products of a recipe, or emulates them.

    Args:
        recipe: A recipe, its name, or a scaling to use for all operands.
        device: A device or its name, such as `"h100"`; by default the one that JAX computes on.

    Returns:
        The outcome with its reason. Products that the recipe leaves in high precision do not count.

    Raises:
        ValueError: If a name is unknown; the nearest ones are listed. If `recipe` is not a recipe.

    References:
        Compute capabilities: NVIDIA's cuBLAS documentation, `cublasLtMatmul` (FP8 from 8.9, blocks of 32 from 10.0).
        TransformerEngine's `check_fp8_support` and `check_mxfp8_support` use the same limits.

    Example:
        >>> print(supported("mxfp8", "b200").outcome.value, supported("delayed", "cpu").outcome.value)
        native emulated
        >>> print(supported("delayed", "a100").reason)
        FP8 products need compute capability 8.9 (Ada, Hopper, Blackwell), but this device has 8.0
    """
    recipe = as_recipe(recipe)
    device = Device.default() if device is None else Device.of(device, of="supported")
    if device.emulates:
        return Support(device, Outcome.EMULATED, "a CPU has no FP8 units; products are computed with the same rounding")
    products = {name: recipe.products[name] for name in recipe.quantized_products}
    lacking: dict[str, list[str]] = {}
    for name, operands in products.items():
        if (reason := _lacking(operands, device)) is not None:
            lacking.setdefault(reason, []).append(name)
    if not lacking:
        formats = " and ".join(format.name for format in recipe.formats)
        return Support(
            device, Outcome.NATIVE, f"its matrix units multiply {formats}" if formats else "no product is in FP8"
        )
    if list(lacking.values()) == [list(products)]:
        return Support(device, Outcome.REFUSED, next(iter(lacking)))
    reasons = (f"{', '.join(names)}: {reason}" for reason, names in lacking.items())
    return Support(device, Outcome.REFUSED, "; ".join(reasons))


def _lacking(operands: tuple[Quantization, Quantization], device: Device) -> str | None:
    """Why the device cannot multiply the operands of one product."""
    units = {operand.scaling.units for operand in operands}
    if len(units) > 1:
        return f"no unit multiplies {operands[0].scaling} by {operands[1].scaling}"
    for unit in units:
        if (reason := device.lacks(unit)) is not None:
            return reason
    reasons = (device.lacks(operand.format) or misfit(operand) for operand in operands)
    return next((reason for reason in reasons if reason is not None), None)


def supported_in_groups(recipe: Recipe, device: Device) -> Support:
    """Like `supported`, for grouped products, which have implementations of their own.

    Args:
        recipe: The recipe.
        device: The device.

    Example:
        >>> h100, mi350x = Device.by_name("h100"), Device.by_name("mi350x")
        >>> print(supported_in_groups(as_recipe("deepseek"), h100).reason)
        a Pallas kernel for Hopper multiplies E4M3 in groups
        >>> print(supported_in_groups(as_recipe("delayed"), mi350x).reason.partition(";")[0])
        no grouped products in FP8 for AMD Instinct MI350X
    """
    implementation = GroupedImplementation.of(device)
    if implementation is GroupedImplementation.XLA:
        return supported(recipe, device)
    if implementation is None:
        support = supported(recipe, device)
        reason = f"no grouped products in FP8 for {device.kind}; see Fp8Config(allow_dense_groups=True)"
        return Support(device, Outcome.REFUSED, reason) if support.is_native else support
    operands = [operand for pair in recipe.products.values() for operand in pair if operand.scaling.quantizes]
    others = dict.fromkeys(str(operand.scaling) for operand in operands if not _takes(operand, implementation))
    if not others:
        formats = " and ".join(format.name for format in recipe.formats)
        made = f"a Pallas kernel for {implementation.value} multiplies {formats} in groups"
        return Support(device, Outcome.NATIVE, made if formats else "no product is in FP8")
    in_blocks = implementation is GroupedImplementation.HOPPER
    scales = f"whole tensors, rows and blocks of {BLOCK}" if in_blocks else "whole tensors and rows"
    taken = f"the grouped Pallas kernel for {implementation.value} takes scales of {scales}"
    return Support(device, Outcome.REFUSED, f"{taken}, not those of {', '.join(others)}")


def _takes(operand: Quantization, implementation: GroupedImplementation) -> bool:
    """Whether an implementation takes an operand as it is quantized."""
    scaling = operand.scaling
    scaling = scaling.scaling if isinstance(scaling, MeasuredScaling) else scaling
    if operand.format not in (E4M3, E5M2) or isinstance(scaling, HadamardScaling):
        return False
    if isinstance(scaling, BlockScaling):
        return scaling.size == BLOCK and implementation is GroupedImplementation.HOPPER
    return scaling.units is FP8_UNITS and misfit(operand) is None


def require_support(recipe: Recipe, support: Support) -> None:
    """Raises where an accelerator would emulate what it was asked to multiply.

    Args:
        recipe: The recipe.
        support: What becomes of it on the device.

    Raises:
        ValueError: Naming the recipe, the device, the reason and the remedy.
    """
    if support.outcome is Outcome.REFUSED:
        raise ValueError(
            f"recipe {recipe} would be emulated on {support.device.kind}, slower than high precision: "
            f"{support.reason}. Leave the model unconverted, choose a recipe that supported(recipe, device) calls "
            "native, or request emulation with Fp8Config(emulate=True)"
        )


# More than any block has: one as large as an axis looks like a row.
_SIDE = 2**16


@functools.cache
def misfit(quantization: Quantization) -> str | None:
    """Why products dequantize an operand although its scaling names units; None if they do not, or it names none.

    Products look at the scales, not at `units`. So does this, on an abstract operand.

    Args:
        quantization: How the operand is quantized.
    """
    scaling = quantization.scaling
    if scaling.units not in (FP4_UNITS, FP8_UNITS, MX_UNITS):
        return None

    def quantized(x: Float[Array, "rows columns"]) -> QuantizedArray:
        key = jax.random.key(0) if quantization.rounding.needs_key else None
        stored = None if scaling.memory is None else jnp.float32(1.0)
        return scaling.quantize(
            x, OperandUse(quantization.format, (1,), stored_scale=stored, rounding=quantization.rounding, key=key)
        )

    made = jax.eval_shape(quantized, jax.ShapeDtypeStruct((_SIDE, _SIDE), jnp.float32))
    if scaling.units == FP8_UNITS and not factors_out(made, (1,)):
        cause = f"{scaling} makes scales that change along the sum, but FP8 units only take scales of tensors or rows"
    elif scaling.units == MX_UNITS and not in_mx_blocks(made, 1):
        cause = f"{scaling} makes scales that are not powers of two for whole blocks of 32, as MXFP8 units need"
    elif scaling.units == FP4_UNITS and not (in_nv_blocks(made, 1) and quantization.format == E2M1):
        cause = f"{scaling} in {quantization.format} is not E2M1 in blocks of 16 with scales in E4M3, as FP4 units need"
    else:
        return None
    return f"{cause}: operands are dequantized first"
