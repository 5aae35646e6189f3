"""explain_folder: what a checkpoint holds, and what its products are."""

import dataclasses
import os
import pathlib

from rich.console import RenderableType
from rich.text import Text

from .._printing import Printable, new_table
from .checked import is_quantized, layout_name
from .configuration import NotSupported, presented, read_layout
from .folder import TensorFolder
from .four_bits import E2M1
from .layout import CACHE_SCALES, FLOATS, SCALES, Layout
from .strict_json import BrokenCheckpoint


@dataclasses.dataclass(frozen=True)
class Held:
    """The number of tensors of a kind, and the bytes that they take."""

    count: int = 0
    bytes: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Printable):
    """What a folder holds.

    Args:
        directory: The folder.
        quantization: What its configuration says; None if nothing is quantized.
        held: The tensors by kind: weights in FP8 and in four bits, scales, those in high precision, in integers and of
            unknown types.
        unknown_types: The names of unknown types in the files.
        scale_types: The dtypes of the scales of weights.
        layout: The name of the layout.
        verdict: `"readable"`; `"broken"` if the configuration cannot be read; or `"not supported here"`.
        reason: Why it is not readable, and what to do; otherwise empty.
    """

    directory: pathlib.Path
    quantization: Layout | None
    held: dict[str, Held]
    unknown_types: tuple[str, ...] = ()
    scale_types: tuple[str, ...] = ()
    layout: str = ""
    verdict: str = "readable"
    reason: str = ""

    def __rich__(self) -> RenderableType:
        """A row for each kind of tensors, and one for all."""
        table = new_table(f"{self.directory.resolve().name}: {self.layout}", self._products)
        for column in ("tensors", "number", "bytes", "format"):
            table.add_column(column, overflow="fold", justify="right" if column in ("number", "bytes") else "left")
        formats = {_WEIGHTS: "E4M3", _IN_FOUR: "E2M1", _SCALES: self._scales, _UNKNOWN: ", ".join(self.unknown_types)}
        for kind, held in self.held.items():
            if held.count or kind not in (_IN_FOUR, _INTEGERS, _UNKNOWN):
                format = Text(formats.get(kind, "") if held.count else "")
                table.add_row(kind, str(held.count), f"{held.bytes:,}", format)
        count, bytes = (sum(getattr(held, name) for held in self.held.values()) for name in ("count", "bytes"))
        more = self.held[_WEIGHTS].bytes + 3 * self.held[_IN_FOUR].bytes
        in_bf16 = bytes + more - self.held[_SCALES].bytes
        ratio = "" if self.reason else f"{bytes / max(1, in_bf16):.3f} of bf16"
        table.add_row("all", str(count), f"{bytes:,}", ratio)
        return table

    @property
    def _scales(self) -> str:
        if (found := self.quantization) is None or found.groups:
            return ""
        one = {"tensor": "one for a weight", "channel": "one for an output"}.get(found.strategy)
        one = one or f"one for {found.size} elements"
        if found.has_units:
            return f"{one}, E4M3, and one for a weight"
        floats = [name for name in self.scale_types if name in map(str, FLOATS)]
        kinds = ["E8M0"] if len(floats) < max(1, len(self.scale_types)) else []
        kinds += [f"powers of two in {' and '.join(floats)}"] if floats else []
        return f"{one}, {', and '.join(kinds)}" if found.exponents else one

    @property
    def _products(self) -> str:
        if self.reason:
            return f"{self.verdict.capitalize()}: {self.reason}."
        if self.quantization is None:
            return "All products are in high precision."
        return " ".join(dict.fromkeys(map(_products_of, self.quantization.groups or (self.quantization,))))


def _products_of(layout: Layout) -> str:
    of = f"Products of {', '.join(layout.targets)}" if layout.targets not in (("Linear",), ()) else "Products"
    if layout.inputs is None:
        return f"{of}: weights are dequantized, inputs stay in high precision."
    return f"{of}: {layout.inputs.format} by {layout.format}; inputs have {layout.inputs}."


_WEIGHTS, _IN_FOUR, _SCALES, _OTHERS = "weights in FP8", "weights in four bits", "scales", "in high precision"
_INTEGERS, _UNKNOWN = "in integers", "of unknown types"


def explain_folder(directory: str | os.PathLike[str], *, follow_links: bool = False) -> Explanation:
    """Says what a folder holds: its layout, the formats of its products, and the bytes of each kind of tensors.

    Only headers and the configuration are read. `check_folder` says whether the tensors are as they should be. A layout
    that is not supported, or a configuration that is broken, is explained too, as far as the headers tell.

    Args:
        directory: The folder.
        follow_links: As in `check_folder`.

    Raises:
        BrokenCheckpoint: If the folder cannot be read; names the file, and the tensor if it is one.
    """
    folder = TensorFolder.open(directory, follow_links=follow_links)
    layout, name, verdict, reason = None, "not readable", "readable", ""
    try:
        layout = read_layout(folder)
        name = layout_name(layout)
    except NotSupported as other:
        name, verdict, reason = other.layout, "not supported here", other.remedy
    except BrokenCheckpoint as broken:
        verdict, reason = "broken", str(broken)
    held: dict[str, Held] = dict.fromkeys((_WEIGHTS, _IN_FOUR, _SCALES, _OTHERS, _INTEGERS, _UNKNOWN), Held())
    unknown, scale_types = set[str](), set[str]()
    for tensor, stored in presented(folder).tensors.items():
        last, kind = tensor.rpartition(".")[2], _OTHERS
        if not stored.is_known:
            kind = _UNKNOWN
            unknown.add(stored.type)
        elif last in SCALES + CACHE_SCALES or (reason and "scale" in last):
            kind = _SCALES
        elif is_quantized(stored):
            kind = _IN_FOUR if stored.dtype == E2M1 else _WEIGHTS
        elif stored.dtype.kind in "iu":
            kind = _INTEGERS
        if layout is not None and last in layout.scale_names:
            scale_types.add(stored.shown)
        held[kind] = Held(held[kind].count + len(stored.parts), held[kind].bytes + stored.bytes)
    types = tuple(sorted(unknown)), tuple(sorted(scale_types))
    return Explanation(pathlib.Path(directory), layout, held, *types, name, verdict, reason)
