"""The layouts by name."""

from ..._numerics.nearest import nearest
from .base import AbstractLayout
from .compressed_tensors import CompressedTensors, Strategy
from .hugging_face import HuggingFaceFp8
from .modelopt import ModelOptFp8


_CHANNEL, _TENSOR = Strategy.CHANNEL, Strategy.TENSOR

named: dict[str, AbstractLayout] = {
    "FP8_DYNAMIC": CompressedTensors(_CHANNEL, Strategy.TOKEN),
    "HF_FP8": HuggingFaceFp8(),
    "FP8_BLOCK": CompressedTensors(Strategy.BLOCK, Strategy.GROUP),
    "MXFP8": CompressedTensors(Strategy.GROUP, Strategy.GROUP, size=32),
    "FP8": CompressedTensors(_CHANNEL, _TENSOR, dynamic=False),
    "FP8_TENSOR": CompressedTensors(_TENSOR, _TENSOR, dynamic=False),
    "W8A16": CompressedTensors(_CHANNEL, None),
    "modelopt": ModelOptFp8(),
}
"""By name, in the order in which messages list them."""

PLAIN = "BF16"


def as_layout(layout: str | AbstractLayout) -> AbstractLayout | None:
    """A layout by its name; None for `"BF16"`, which quantizes nothing.

    Args:
        layout: The name, or the layout.

    Raises:
        ValueError: If no layout has that name.
    """
    if isinstance(layout, AbstractLayout):
        return layout
    if layout == PLAIN:
        return None
    if not isinstance(layout, str) or layout not in named:
        near = ", ".join(repr(name) for name in nearest(str(layout), [*named, PLAIN], 3))
        raise ValueError(f"layout={layout!r} is unknown; the nearest are {near or 'none'}; all are {[*named, PLAIN]}")
    return named[layout]
