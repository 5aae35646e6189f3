"""explain_folder: what a checkpoint holds, and what its products are."""

import dataclasses
import os
import pathlib

from rich.console import RenderableType
from rich.text import Text

from .._printing import Printable, new_table
from .check import is_fp8, layout_name
from .folder import TensorFolder
from .layout import CACHE_SCALES, FLOATS, SCALES, Layout, read_layout


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
        held: The tensors: weights in FP8, scales, those in high precision, and those of unknown types.
        unknown_types: The names of unknown types in the files.
        scale_types: The dtypes of the scales of weights.
    """

    directory: pathlib.Path
    quantization: Layout | None
    held: dict[str, Held]
    unknown_types: tuple[str, ...] = ()
    scale_types: tuple[str, ...] = ()

    @property
    def layout(self) -> str:
        """The name of the layout."""
        return layout_name(self.quantization)

    def __rich__(self) -> RenderableType:
        """A row for each kind of tensors, and one for all."""
        table = new_table(f"{self.directory.resolve().name}: {self.layout}", self._products)
        for column in ("tensors", "number", "bytes", "format"):
            table.add_column(column, overflow="fold", justify="right" if column in ("number", "bytes") else "left")
        formats = {_WEIGHTS: "E4M3", _SCALES: self._scales, _UNKNOWN: ", ".join(self.unknown_types)}
        for kind, held in self.held.items():
            if held.count or kind != _UNKNOWN:
                format = Text(formats.get(kind, "") if held.count else "")
                table.add_row(kind, str(held.count), f"{held.bytes:,}", format)
        count, bytes = (sum(getattr(held, name) for held in self.held.values()) for name in ("count", "bytes"))
        in_bf16 = bytes + self.held[_WEIGHTS].bytes - self.held[_SCALES].bytes
        table.add_row("all", str(count), f"{bytes:,}", f"{bytes / max(1, in_bf16):.3f} of bf16")
        return table

    @property
    def _scales(self) -> str:
        if (found := self.quantization) is None:
            return ""
        one = {"tensor": "one for a weight", "channel": "one for an output"}.get(found.strategy)
        one = one or f"one for {found.size} elements"
        floats = [name for name in self.scale_types if name in map(str, FLOATS)]
        kinds = ["E8M0"] if len(floats) < max(1, len(self.scale_types)) else []
        kinds += [f"powers of two in {' and '.join(floats)}"] if floats else []
        return f"{one}, {', and '.join(kinds)}" if found.exponents else one

    @property
    def _products(self) -> str:
        if self.quantization is None:
            return "All products are in high precision."
        if self.quantization.inputs is None:
            return "Products: weights are dequantized, inputs stay in high precision."
        return f"Products: E4M3 by E4M3; inputs have {self.quantization.inputs}."


_WEIGHTS, _SCALES, _OTHERS, _UNKNOWN = "weights in FP8", "scales", "in high precision", "of unknown types"


def explain_folder(directory: str | os.PathLike[str], *, follow_links: bool = False) -> Explanation:
    """Says what a folder holds: its layout, the formats of its products, and the bytes of each kind of tensors.

    Only headers and the configuration are read. `check_folder` says whether the tensors are as they should be.

    Args:
        directory: The folder.
        follow_links: As in `check_folder`.

    Raises:
        BrokenCheckpoint: If the folder cannot be read; names the file, and the tensor if it is one.
    """
    folder = TensorFolder.open(directory, follow_links=follow_links)
    layout = read_layout(folder)
    held: dict[str, Held] = dict.fromkeys((_WEIGHTS, _SCALES, _OTHERS, _UNKNOWN), Held())
    unknown, scale_types = set[str](), set[str]()
    for name, stored in folder.tensors.items():
        last, kind = name.rpartition(".")[2], _OTHERS
        if not stored.is_known:
            kind = _UNKNOWN
            unknown.add(stored.type)
        elif is_fp8(stored):
            kind = _WEIGHTS
        elif last in SCALES + CACHE_SCALES:
            kind = _SCALES
        if layout is not None and last in layout.scale_names:
            scale_types.add(stored.shown)
        held[kind] = Held(held[kind].count + 1, held[kind].bytes + stored.bytes)
    return Explanation(pathlib.Path(directory), layout, held, tuple(sorted(unknown)), tuple(sorted(scale_types)))
