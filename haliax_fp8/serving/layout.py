"""ServedLayout: how layers multiply in a layout; and the layouts by the names that exported folders have."""

import dataclasses
import functools
from typing import Any

from .._arguments import nearest, require
from ..formats import E4M3, Format
from ..recipes.recipe import OperandName, Quantization, Recipe
from ..recipes.scaling import (
    AbstractScaling,
    BlockScaling,
    CurrentScaling,
    HighPrecision,
    MXFP8Scaling,
    RowwiseScaling,
    StaticScaling,
)


# Scalings whose scales stay outside of the sum.
_OUTSIDE = (StaticScaling, CurrentScaling, RowwiseScaling)
_INSIDE = (BlockScaling, MXFP8Scaling)


@dataclasses.dataclass(frozen=True)
class ServedLayout:
    """How the layers of a model multiply in inference.

    Args:
        kernel: How kernels get their scales, once. `StaticScaling()` takes the scales that the training state holds
            for the next step.
        input: How inputs get their scales, in each product, with `StaticScaling()` as for kernels. None leaves inputs
            in high precision.
        format: The format of both; with scales from training, the format of training.

    Raises:
        ValueError: If a scaling is not supported in inference, or no hardware multiplies the two.

    Example:
        >>> per_channel = ServedLayout(RowwiseScaling(), StaticScaling())
        >>> per_tensor = ServedLayout(CurrentScaling(), CurrentScaling())
        >>> per_channel.rows_are_independent, per_tensor.rows_are_independent
        (True, False)
    """

    kernel: AbstractScaling
    input: AbstractScaling | None = None
    format: Format = E4M3

    def __post_init__(self) -> None:
        require("format", self.format, Format, "E4M3", of="ServedLayout")
        for name, scaling in (("kernel", self.kernel), ("input", self.input)):
            if not isinstance(scaling, (*_OUTSIDE, *_INSIDE)) and not (name == "input" and scaling is None):
                raise ValueError(
                    f"{name}={scaling!r} of ServedLayout is not a scaling for inference; use StaticScaling() for the "
                    "scales that training stores, delayed ones too, CurrentScaling(), RowwiseScaling(), "
                    "BlockScaling() or MXFP8Scaling()"
                )
        for name in ("kernel", "input"):
            scaling = getattr(self, name)
            if isinstance(scaling, StaticScaling) and scaling != StaticScaling():
                raise ValueError(
                    f"{name}={scaling} of ServedLayout gives a scale or a margin, but scales come from the state of "
                    "training or calibration: use StaticScaling() here, and put yours into the recipe that is "
                    "calibrated"
                )
        if self.input is None and not isinstance(self.kernel, _OUTSIDE):
            raise ValueError(
                f"kernel={self.kernel} of ServedLayout without input scaling: block scales do not factor out of the "
                "sum, so XLA would write a dequantized copy of the kernel for each product. Use RowwiseScaling(), a "
                "scale for each output"
            )
        if self.input is not None and isinstance(self.kernel, _INSIDE) != isinstance(self.input, _INSIDE):
            raise ValueError(
                f"kernel={self.kernel} and input={self.input} of ServedLayout: no hardware multiplies blocks by "
                "operands whose scales are outside of the sum; use blocks for both or for neither"
            )

    @property
    def stored(self) -> tuple[OperandName, ...]:
        """The operands whose scale comes from the training state."""
        both: dict[OperandName, AbstractScaling | None] = {"input": self.input, "kernel": self.kernel}
        return tuple(name for name, scaling in both.items() if scaling is not None and scaling.stores_scale)

    @property
    def rows_are_independent(self) -> bool:
        """Whether the rest of the batch does not affect how a row of the input is quantized.

        It does if one scale for all rows is computed from the rows themselves.
        """
        return not isinstance(self.input, CurrentScaling) and not getattr(self.input, "square", False)

    @functools.cached_property
    def recipe(self) -> Recipe | None:
        """The recipe of fprop; None if inputs are in high precision."""
        if self.input is None:
            return None
        high = Quantization(self.format, HighPrecision())
        return Recipe(
            input=Quantization(self.format, self.input),
            kernel=Quantization(self.format, self.kernel),
            output_grad=high,
            input_for_wgrad=high,
            kernel_for_dgrad=high,
        )

    def __str__(self) -> str:
        if (name := next((name for name, layout in layouts.items() if layout == self), None)) is not None:
            return name
        of_input = "in high precision" if self.input is None else str(self.input)
        return f"kernel {self.kernel}, input {of_input}"


_STATIC = ServedLayout(StaticScaling(), StaticScaling())
_BLOCK = ServedLayout(BlockScaling(square=True), BlockScaling())

layouts: dict[str, ServedLayout] = {
    "FP8": _STATIC,
    "FP8_TENSOR": _STATIC,
    "modelopt": _STATIC,
    "FP8_DYNAMIC": ServedLayout(RowwiseScaling(), RowwiseScaling()),
    "FP8_BLOCK": _BLOCK,
    "HF_FP8": _BLOCK,
    "MXFP8": ServedLayout(MXFP8Scaling(), MXFP8Scaling()),
    "W8A16": ServedLayout(RowwiseScaling()),
}
"""By name, as in `huggingface.export_model`. Layouts that differ only in the tensors of their folders are the same here
and are shown by the first of their names."""

type LayoutLike = ServedLayout | str


def as_layout(layout: Any) -> ServedLayout:
    """Returns a layout for a user's argument.

    Args:
        layout: A `ServedLayout`, or the name of one.

    Raises:
        ValueError: If it is neither; the message lists the nearest names.
    """
    if isinstance(layout, ServedLayout):
        return layout
    if isinstance(layout, str) and layout in layouts:
        return layouts[layout]
    near = nearest(layout, list(layouts)) if isinstance(layout, str) else []
    hint = f"; the nearest are {', '.join(map(repr, near))}" if near else ""
    raise ValueError(
        f"layout={layout!r} is not a layout for inference{hint}; use one of "
        f"{', '.join(map(repr, layouts))}, or ServedLayout(kernel, input). To write a folder in another layout, give "
        "the model itself to huggingface.export_model"
    )
