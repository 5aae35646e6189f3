"""How layers multiply in a layout: the scalings of kernel and input."""

from ..formats import E2M1, E4M3
from ..layouts import Layout, as_layout, named
from ..recipes.recipe import Quantization, Recipe
from ..recipes.scaling import (
    AbstractScaling,
    BlockScaling,
    CurrentScaling,
    HighPrecision,
    MXFP8Scaling,
    NVFP4Scaling,
    RowwiseScaling,
    StaticScaling,
)


__all__ = [
    "scaling_of_kernel",
    "why_not_served",
]


def why_not_served(layout: Layout) -> str:
    """Why no layer multiplies in a layout; empty if layers do.

    Args:
        layout: That of one layer.
    """
    inputs, in_blocks = layout.inputs, layout.strategy in ("block", "group")
    if layout != layout.of_one_layer:
        return "it says more than how one layer is quantized; take layout.of_one_layer, and exclude=... for the others"
    if layout.format is E2M1:
        is_native = not layout.exponents and layout.size in ((1, 16), (16, 16)) and inputs == _NV_INPUTS
        return "" if is_native else "no product for inference takes weights in four bits but those of NVFP4_DYNAMIC"
    if inputs is not None and (inputs.format is E2M1 or (inputs.size and inputs.strategy != "group")):
        return "no product multiplies inputs in four bits, or with two levels of scales, by weights in FP8"
    if inputs is not None and inputs.bound is not None:
        return f"no product clips inputs at activation_scale_ub={inputs.bound:g}; a folder in FP8_DYNAMIC does not"
    if inputs is None and in_blocks:
        return (
            "scales of blocks do not factor out of the sum, so with inputs in high precision XLA would write a "
            "dequantized copy of the kernel for each product; W8A16 has a scale for each output"
        )
    if inputs is not None and in_blocks != (inputs.strategy == "group"):
        return "no hardware multiplies blocks by operands whose scales are outside of the sum"
    is_micro = layout.exponents and (layout.size, inputs and inputs.size) == ((1, 32), 32)
    if in_blocks and not is_micro and (layout.size is None or len({*layout.size}) > 1):
        return f"no product takes scales for blocks of {layout.size}"
    return ""


_NV_INPUTS = named["NVFP4_DYNAMIC"].inputs

layouts: dict[str, Layout] = {name: layout for name, layout in named.items() if not why_not_served(layout)}
"""Those of `haliax_fp8.layouts.named` in which layers multiply."""


def require_served(layout: str | Layout) -> Layout:
    """Returns a layout for a user's argument.

    Args:
        layout: A layout, or the name of one.

    Raises:
        ValueError: If no layer multiplies in it; the message says why, or lists the nearest names.
    """
    resolved = as_layout(layout)
    why = "it quantizes nothing" if resolved is None else why_not_served(resolved)
    if why:
        name = layout if isinstance(layout, str) else layout.name
        raise ValueError(
            f"layout={name!r} is not served: {why}. Use one of {', '.join(map(repr, layouts))}; to write a folder in "
            "it, give the model itself to huggingface.export_model"
        )
    assert resolved is not None
    return resolved


def scaling_of_kernel(layout: Layout, *, is_whole: bool, power_of_two: bool) -> AbstractScaling:
    """How kernels get their scales, unless training has them.

    Args:
        layout: A layout in which layers multiply.
        is_whole: Whether one scale is for the whole kernel.
        power_of_two: Whether all scales are powers of two.
    """
    if is_whole:
        return StaticScaling() if layout.is_static else CurrentScaling()
    if layout.format is E2M1:
        return NVFP4Scaling(square=layout.strategy == "block")
    match layout.strategy, layout.size:
        case "group", _:
            return MXFP8Scaling()
        case "block", (size, _):
            return BlockScaling(size, square=True, power_of_two=power_of_two)
        case _:
            return RowwiseScaling(power_of_two=power_of_two)


def scaling_of_input(layout: Layout, *, power_of_two: bool) -> AbstractScaling | None:
    """How inputs get their scales; None if they stay in high precision.

    Args:
        layout: A layout in which layers multiply.
        power_of_two: Whether those of kernels are powers of two, as then are those of inputs.
    """
    inputs = layout.inputs
    if inputs is None:
        return None
    if inputs.format is E2M1:
        return NVFP4Scaling(per_row=True)
    match inputs.strategy:
        case "tensor":
            return CurrentScaling() if inputs.dynamic else StaticScaling()
        case "token":
            return RowwiseScaling(power_of_two=power_of_two)
        case _ if layout.strategy == "group":
            return MXFP8Scaling()
        case _:
            return BlockScaling(inputs.size, power_of_two=power_of_two)


def recipe_of_fprop(input: Quantization, kernel: Quantization) -> Recipe:
    """The recipe of a product that has no gradient."""
    high = Quantization(E4M3, HighPrecision())
    return Recipe(input, kernel, high, input_for_wgrad=high, kernel_for_dgrad=high)
