"""The names that a traced product carries: scopes, which the preflight finds it by, and names of what is kept."""

import re
from typing import Final


__all__ = [
    "DGRAD",
    "FP4",
    "FP8_DOT_GENERAL",
    "FP8_KERNEL",
    "FP8_OPERAND",
    "FP8_OUTPUT",
    "FP8_RAGGED_DOT",
    "FPROP",
    "QUANTIZING",
    "ROTATION",
    "SERVED_LINEAR",
    "TRAIN_STEP",
    "WGRAD",
    "name_of_tile",
    "tile_in_name",
]


TRAIN_STEP: Final = "fp8_train_step"
"""The name of the function that `TrainStep` jits."""

FP8_DOT_GENERAL: Final = "fp8_dot_general"
"""The scope of a product in FP8."""

FP8_RAGGED_DOT: Final = "fp8_ragged_dot"
"""The scope of a grouped product in FP8."""


def name_of_tile(rows: int, columns: int, depth: int) -> str:
    """The name of a grouped product's Pallas kernel, such as `fp8_grouped_64x128x128`.

    Its blocks compute multiples of so many rows and columns, and sum over multiples of the depth.
    """
    return f"fp8_grouped_{rows}x{columns}x{depth}"


def tile_in_name(text: str) -> tuple[int, int, int] | None:
    """The inverse of `name_of_tile`, of a name within a text; None if it has none."""
    match = re.search(r"fp8_grouped_(\d+)x(\d+)x(\d+)", text)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


QUANTIZING: Final = "fp8_quantizing_"
"""What the names of Pallas kernels begin with that quantize an operand."""

FPROP: Final = "fprop"
"""The scope of the product that gives the output, inside one of the scopes above."""

DGRAD: Final = "dgrad"
"""The scope of the product that gives the gradient of the input."""

WGRAD: Final = "wgrad"
"""The scope of the product that gives the gradient of the kernel."""

FP4: Final = "fp4"
"""The scope, inside one of the three above, of a product with an operand in FP4, which is stored in wider types."""

ROTATION: Final = "rotation"
"""The scope of the rotation of operands, which is a product too; the products of rotated operands are outside it."""

FP8_OPERAND: Final = "fp8_operand"
"""The name that checkpoint policies use for an FP8 product's input, which its backward pass needs."""

FP8_KERNEL: Final = "fp8_kernel"
"""The name that checkpoint policies use for the FP8 copy of a kernel that is meant to be kept."""

FP8_OUTPUT: Final = "fp8_output"
"""The name that checkpoint policies use for a product's result."""

SERVED_LINEAR: Final = "served_linear"
"""The scope of a linear layer of a model for inference."""
