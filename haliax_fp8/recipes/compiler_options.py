"""What XLA's flags cost a recipe on NVIDIA's GPUs, and the options that keep FP8 and full accumulation."""

import logging
from collections.abc import Iterable

from ..devices.device import MX_UNITS, Device
from ..devices.xla_flags import TRITON_PRODUCTS, XlaFlags
from .recipe import Recipe


_logger = logging.getLogger("haliax_fp8")


def training_options(recipes: Iterable[Recipe], device: Device) -> dict[str, bool]:
    """Compiler options for a training step of a model: with them, dgrad and wgrad accumulate in full float32.

    Args:
        recipes: The recipes of the model's layers.
        device: Where the step runs.

    Returns:
        For `jax.jit(compiler_options=...)` or `eqx.filter_jit`; empty if none are needed: on devices other than
        NVIDIA's, without FP8, and for block-scaled recipes where they are emulated, which Triton does in registers.
    """
    recipes = list(recipes)
    emulates_blocks = device.lacks(MX_UNITS) is not None and any(map(_is_block_scaled, recipes))
    if device.platform != "cuda" or not any(map(_quantizes, recipes)) or emulates_blocks:
        return {}
    return {TRITON_PRODUCTS: False}


def cost_of_flags(flags: XlaFlags, device: Device, recipes: Iterable[Recipe]) -> str | None:
    """What XLA's flags cost the products of some recipes on a device, in one line with the remedy; None for nothing.

    Args:
        flags: The current flags, including compiler options.
        device: Where the products run.
        recipes: The recipes of a model's layers.

    References:
        OpenAI Triton, `max_num_imprecise_acc`: on Hopper the sums of FP8 products are promoted to float32 after so many
        terms; XLA's Triton kernels never ask for that, whatever the precision.
    """
    # Full accumulation is promised to gradients only; fprop never has it.
    if not (flags.triton_products and device.is_hopper and any(map(_quantizes_gradients, recipes))):
        return None
    return (
        "FP8 gradients (dgrad, wgrad) do not accumulate in full float32 where XLA chooses Triton kernels on "
        f"{device.kind}: compile your own training loop with XLA_FLAGS=--{TRITON_PRODUCTS}=false"
    )


def log_cost_of_flags(flags: XlaFlags, device: Device, recipes: Iterable[Recipe]) -> None:
    """Logs what flags cost in one line to the logger `haliax_fp8`, at level INFO.

    Args:
        flags: See `cost_of_flags`.
        device: See `cost_of_flags`.
        recipes: See `cost_of_flags`.
    """
    cost = cost_of_flags(flags, device, recipes)
    if cost is not None:
        _logger.info(cost)


def _quantizes(recipe: Recipe) -> bool:
    return bool(recipe.quantized_products)


def _quantizes_gradients(recipe: Recipe) -> bool:
    return any(name in recipe.quantized_products for name in ("dgrad", "wgrad"))


def _is_block_scaled(recipe: Recipe) -> bool:
    scalings = [operand.scaling for operands in recipe.products.values() for operand in operands]
    return any(scaling.quantizes and scaling.units is MX_UNITS for scaling in scalings)
