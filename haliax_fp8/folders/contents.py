"""What a folder holds, by its headers: tensors by kind, their formats and bytes, and what is multiplied."""

import dataclasses
from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from .._printing import new_table
from ..layouts import Layout
from .checked import is_quantized
from .configuration import presented
from .folder import TensorFolder
from .four_bits import E2M1
from .layout import CACHE_SCALES, FLOATS, SCALES, scale_names


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The tensors of a kind.

    Args:
        count: The number of tensors.
        bytes: The bytes that they take.
        format: Their formats, in words; empty where the kind says it.
    """

    count: int = 0
    bytes: int = 0
    format: str = ""


_WEIGHTS, _IN_FOUR, _SCALES, _OTHERS = "weights in FP8", "weights in four bits", "scales", "in high precision"
_INTEGERS, _UNKNOWN = "in integers", "of unknown types"


def contents_of(folder: TensorFolder, layout: Layout | None, *, is_read: bool) -> dict[str, Tensors]:
    """The tensors of a folder by kind.

    Args:
        folder: The folder.
        layout: Its layout; None if nothing is quantized, or if it cannot be read.
        is_read: Whether the layout could be read; otherwise names alone tell what is a scale.
    """
    by_kind = dict.fromkeys((_WEIGHTS, _IN_FOUR, _SCALES, _OTHERS, _INTEGERS, _UNKNOWN), Tensors())
    unknown, of_scales = set[str](), set[str]()
    for tensor, stored in presented(folder).tensors.items():
        last, kind = tensor.rpartition(".")[2], _OTHERS
        if not stored.is_known:
            kind = _UNKNOWN
            unknown.add(stored.type)
        elif last in SCALES + CACHE_SCALES or (not is_read and "scale" in last):
            kind = _SCALES
        elif is_quantized(stored):
            kind = _IN_FOUR if stored.dtype == E2M1 else _WEIGHTS
        elif stored.dtype.kind in "iu":
            kind = _INTEGERS
        if layout is not None and last in scale_names(layout):
            of_scales.add(stored.shown)
        by_kind[kind] = Tensors(by_kind[kind].count + len(stored.parts), by_kind[kind].bytes + stored.bytes)
    formats = {_WEIGHTS: "E4M3", _IN_FOUR: "E2M1", _SCALES: _format_of_scales(layout, of_scales)}
    formats[_UNKNOWN] = ", ".join(sorted(unknown))
    return {
        kind: dataclasses.replace(tensors, format=formats.get(kind, "") if tensors.count else "")
        for kind, tensors in by_kind.items()
    }


def table_of(title: str, contents: Mapping[str, Tensors], caption: str, *, is_read: bool) -> Table:
    """A row for each kind of tensors, and one for all.

    Args:
        title: The line above it.
        contents: The tensors by kind.
        caption: The line below it.
        is_read: As in `contents_of`; otherwise nobody knows their bytes in bfloat16.
    """
    table = new_table(title, caption)
    for column in ("tensors", "number", "bytes", "format"):
        table.add_column(column, overflow="fold", justify="right" if column in ("number", "bytes") else "left")
    for kind, tensors in contents.items():
        if tensors.count or kind not in (_IN_FOUR, _INTEGERS, _UNKNOWN):
            table.add_row(kind, str(tensors.count), f"{tensors.bytes:,}", Text(tensors.format))
    count, bytes = (sum(getattr(tensors, name) for tensors in contents.values()) for name in ("count", "bytes"))
    in_bf16 = bytes + contents[_WEIGHTS].bytes + 3 * contents[_IN_FOUR].bytes - contents[_SCALES].bytes
    table.add_row("all", str(count), f"{bytes:,}", f"{bytes / max(1, in_bf16):.3f} of bf16" if is_read else "")
    return table


def products_of(layout: Layout | None) -> str:
    """What the products of a folder multiply, in words.

    Args:
        layout: Its layout; None if nothing is quantized.
    """
    if layout is None:
        return "All products are in high precision."
    return " ".join(dict.fromkeys(map(_products_of_group, layout.groups or (layout,))))


def _products_of_group(layout: Layout) -> str:
    of = f"Products of {', '.join(layout.targets)}" if layout.targets not in (("Linear",), ()) else "Products"
    if layout.inputs is None:
        return f"{of}: weights are dequantized, inputs stay in high precision."
    return f"{of}: {layout.inputs.format} by {layout.format}; inputs have {layout.inputs}."


def _format_of_scales(layout: Layout | None, dtypes: set[str]) -> str:
    if layout is None or layout.groups:
        return ""
    one = {"tensor": "one for a weight", "channel": "one for an output"}.get(layout.strategy)
    one = one or f"one for {layout.size} elements"
    if layout.has_units:
        return f"{one}, E4M3, and one for a weight"
    floats = sorted(name for name in dtypes if name in map(str, FLOATS))
    kinds = ["E8M0"] if len(floats) < max(1, len(dtypes)) else []
    kinds += [f"powers of two in {' and '.join(floats)}"] if floats else []
    return f"{one}, {', and '.join(kinds)}" if layout.exponents else one
