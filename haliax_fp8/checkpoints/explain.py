"""explain_folder: what a checkpoint holds, what its products are, and who loads it."""

import dataclasses
import os
import pathlib

from rich.console import Group, RenderableType
from rich.text import Text

from .._printing import Printable, new_table
from .check.folder import open_checkpoint
from .check.weights import CACHE_SCALES, FLOATS, SCALES, is_fp8
from .engines import Engine, engines_for
from .layouts.quantization import CheckpointQuantization


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Printable):
    """What a folder holds.

    Args:
        directory: The folder.
        quantization: What its configuration says; None if nothing is quantized.
        weights: The number of tensors in FP8.
        weight_bytes: The bytes of their data.
        scales: The number of tensors of scales, also of inputs and caches.
        scale_bytes: The bytes that they take.
        others: The number of all other tensors whose type is known.
        other_bytes: The bytes that they take.
        plain_bytes: The bytes that the tensors would take with these weights in bf16.
        engines: The engines that load it.
        unknown: The number of tensors whose type is unknown.
        unknown_bytes: The bytes that they take.
        unknown_types: The names of these types in the files.
        scale_types: The dtypes of the scales of weights.
    """

    directory: pathlib.Path
    quantization: CheckpointQuantization | None
    weights: int
    weight_bytes: int
    scales: int
    scale_bytes: int
    others: int
    other_bytes: int
    plain_bytes: int
    engines: tuple[Engine, ...]
    unknown: int = 0
    unknown_bytes: int = 0
    unknown_types: tuple[str, ...] = ()
    scale_types: tuple[str, ...] = ()

    @property
    def layout(self) -> str:
        """The name of the layout."""
        return "not quantized" if self.quantization is None else self.quantization.name

    def __rich__(self) -> RenderableType:
        """A table of what is there, and one of engines."""
        held = new_table(f"{self.directory.resolve().name}: {self.layout}", self._products())
        for column in ("tensors", "number", "bytes", "format"):
            held.add_column(column, overflow="fold", justify="right" if column in ("number", "bytes") else "left")
        held.add_row("weights in FP8", str(self.weights), f"{self.weight_bytes:,}", "E4M3" if self.weights else "")
        held.add_row("scales", str(self.scales), f"{self.scale_bytes:,}", self._scales())
        held.add_row("in high precision", str(self.others), f"{self.other_bytes:,}", "")
        if self.unknown:
            types = ", ".join(self.unknown_types)
            held.add_row("of unknown types", str(self.unknown), f"{self.unknown_bytes:,}", Text(types))
        number = self.weights + self.scales + self.others + self.unknown
        total = self.weight_bytes + self.scale_bytes + self.other_bytes + self.unknown_bytes
        held.add_row("all", str(number), f"{total:,}", f"{total / max(1, self.plain_bytes):.3f} of bf16")
        if self.quantization is None:
            return held  # Engines load it as they load any other.
        if not self.engines:
            return Group(held, Text("It is not known which engines read this layout."))
        table = new_table("Engines that load it", "Other versions of engines may differ.")
        for column in ("engine", "hardware", "what it does", "known from"):
            table.add_column(column, overflow="fold")
        for row in self.engines:
            what = f"{row.verdict.value}; {row.detail}" if row.detail else row.verdict.value
            table.add_row(*map(Text, (row.engine, row.hardware, what, row.evidence.value)))
        return Group(held, table)

    def _scales(self) -> str:
        found = self.quantization
        if found is None:
            return ""
        one = {"tensor": "one for a weight", "channel": "one for an output"}.get(found.strategy)
        one = one or f"one for {found.block} elements"
        if not found.exponents:
            return one
        floats = [name for name in self.scale_types if name in map(str, FLOATS)]
        kinds = ["E8M0"] if len(floats) < max(1, len(self.scale_types)) else []
        kinds += [f"powers of two in {' and '.join(floats)}"] if floats else []
        return f"{one}, {', and '.join(kinds)}"

    def _products(self) -> str:
        found = self.quantization
        if found is None:
            return "All products are in high precision."
        if found.inputs is None:
            return "Products: weights are dequantized, inputs stay in high precision."
        return f"Products: E4M3 by E4M3; inputs have {found.inputs}."


def explain_folder(directory: str | os.PathLike[str], *, follow_links: bool = False) -> Explanation:
    """Says what a folder holds: layout, formats of products, bytes; and which engine does what with it.

    Only headers and the configuration are read. `check_folder` says whether the tensors are as they should be.

    Args:
        directory: The folder.
        follow_links: As in `check_folder`.

    Raises:
        BrokenCheckpoint: If the folder cannot be read; names the file, and the tensor if it is one.
    """
    path = pathlib.Path(directory)
    folder, quantization = open_checkpoint(path, follow_links=follow_links)
    weights = weight_bytes = scales = scale_bytes = others = other_bytes = unknown = unknown_bytes = 0
    for name, stored in folder.tensors.items():
        if not stored.is_known:
            unknown, unknown_bytes = unknown + 1, unknown_bytes + stored.bytes
        elif is_fp8(stored):
            weights, weight_bytes = weights + 1, weight_bytes + stored.bytes
        elif name.rpartition(".")[2] in SCALES + CACHE_SCALES:
            scales, scale_bytes = scales + 1, scale_bytes + stored.bytes
        else:
            others, other_bytes = others + 1, other_bytes + stored.bytes
    rows = () if quantization is None else engines_for(quantization.name)
    types = tuple(sorted({stored.type for stored in folder.tensors.values() if not stored.is_known}))
    names = () if quantization is None else quantization.scale_names
    of_scales = {stored.shown for name, stored in folder.tensors.items() if name.rpartition(".")[2] in names}
    plain = 2 * weight_bytes + other_bytes + unknown_bytes
    numbers = weights, weight_bytes, scales, scale_bytes, others, other_bytes, plain
    return Explanation(path, quantization, *numbers, rows, unknown, unknown_bytes, types, tuple(sorted(of_scales)))
