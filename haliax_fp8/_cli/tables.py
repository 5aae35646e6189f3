"""The commands `devices` and `formats`: what is supported, and the formats in numbers."""

import argparse
import dataclasses
import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from rich.table import Table
from rich.text import Text

from .. import formats
from .._printing import new_table
from ..devices import Device
from ..devices.catalog import catalog
from ..formats import Format
from ..preflight import compilable_devices
from ..recipes import named, supported
from .devices import use_local_devices
from .screen import screen


def add_parsers(commands: Any) -> None:
    """Adds both commands to the parser.

    Args:
        commands: What `add_subparsers` gave.
    """
    for name, text, rows, table in (
        (
            "devices",
            "list devices, what they run natively, and which of them this machine can compile for",
            device_rows,
            device_table,
        ),
        ("formats", "list the FP8 formats with range, precision and subnormals", format_rows, format_table),
    ):
        parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.set_defaults(run=partial(_run, rows, table))


def _run(rows: Callable[[], list[Any]], table: Callable[[list[Any]], Table], options: argparse.Namespace) -> int:
    use_local_devices()
    found = rows()
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in found], indent=2))
    else:
        screen().print(table(found))
    return 0


@dataclasses.dataclass(frozen=True)
class DeviceRow:
    """A device, as the command `devices` lists it.

    Args:
        name: Its name for `--device` and `describe(device=...)`.
        kind: The device's own name.
        capability: Compute capability or architecture; empty if it has none.
        native: The recipes that it multiplies natively.
        otherwise: What happens to the others: `"emulated"` or `"refused"`, with the reason of the first.
        preflight: `"ready"`, what makes it ready, or `"cannot compile for it"`.
    """

    name: str
    kind: str
    capability: str
    native: tuple[str, ...]
    otherwise: str
    preflight: str


def device_rows() -> list[DeviceRow]:
    """The local devices, and all devices known by name."""
    here = Device.default()
    kind = f"{len(jax.devices())} × {here.kind}"
    return [
        _device_row("local", here, kind),
        *(_device_row(n, Device.by_name(n), row.kind) for n, row in catalog.items() if n != "cpu"),
    ]


def _device_row(name: str, device: Device, kind: str) -> DeviceRow:
    found = {recipe: supported(recipe, device) for recipe in named}
    others = [support for support in found.values() if not support.is_native]
    known = compilable_devices.get(name)
    return DeviceRow(
        name=name,
        kind=kind,
        capability=device.compute_capability,
        native=tuple(recipe for recipe, support in found.items() if support.is_native),
        otherwise=f"{others[0].outcome.value}: {others[0].reason}" if others else "",
        preflight="cannot compile for it" if known is None else known.missing() or "ready",
    )


def device_table(rows: list[DeviceRow]) -> Table:
    """The devices as a table, with what is missing below it."""
    missing: dict[str, list[str]] = {}
    for row in rows:
        if row.preflight not in ("ready", "cannot compile for it"):
            missing.setdefault(row.preflight.partition(" needs ")[2], []).append(row.name)
    remedies = [f"{', '.join(names)} need {what}" for what, names in missing.items()]
    why: dict[str, list[str]] = {}
    for row in rows:
        if not row.native and row.otherwise:
            why.setdefault(row.otherwise, []).append(row.name)
    table = new_table("Devices", "\n".join([f"{', '.join(names)}: {text}" for text, names in why.items()] + remedies))
    table.add_column("name", no_wrap=True)
    table.add_column("device", overflow="fold")
    table.add_column("capability", no_wrap=True)
    table.add_column("recipes that run natively", overflow="fold")
    table.add_column("preflight", overflow="fold", max_width=13)
    for row in rows:
        natively = Text(_summary(row), "green" if row.native else "yellow")
        state = row.preflight if row.preflight in ("ready", "cannot compile for it") else "not installed"
        ready = Text(state, "green" if state == "ready" else "dim")
        table.add_row(*map(Text, (row.name, row.kind, row.capability)), natively, ready)
    return table


def _summary(row: DeviceRow) -> str:
    if not row.native:
        return f"none, {row.otherwise.partition(':')[0]}" if row.otherwise else "none"
    others = [recipe for recipe in named if recipe not in row.native]
    if len(others) < len(row.native):
        return f"all but {', '.join(others)}" if others else "all"
    return ", ".join(row.native)


@dataclasses.dataclass(frozen=True)
class FormatRow:
    """A format in numbers.

    Args:
        name: The format.
        bits: Of sign, exponent and significand.
        max: The largest finite value.
        smallest_normal: The smallest positive value with full precision.
        smallest_subnormal: The smallest positive value.
        subnormals: How many positive values lie below the smallest normal one.
        relative_error: The largest relative error of rounding a normal value.
        binades: `log2(max / smallest_subnormal)`.
        dtype: The NumPy element type.
    """

    name: str
    bits: str
    max: float
    smallest_normal: float
    smallest_subnormal: float
    subnormals: int
    relative_error: float
    binades: float
    dtype: str


def format_rows() -> list[FormatRow]:
    """Every format of the package."""
    return [_format_row(format) for format in vars(formats).values() if isinstance(format, Format)]


def _format_row(format: Format) -> FormatRow:
    return FormatRow(
        name=format.name,
        bits=f"1 + {format.exponent_bits} + {format.mantissa_bits}",
        max=format.max,
        smallest_normal=format.smallest_normal,
        smallest_subnormal=format.smallest_subnormal,
        subnormals=2**format.mantissa_bits - 1,
        relative_error=format.relative_error,
        binades=format.dynamic_range,
        dtype=str(format.dtype),
    )


def format_table(rows: list[FormatRow]) -> Table:
    """The formats as a table, at most 80 columns wide."""
    table = new_table("Formats")
    # Without lines, or nine columns are wider than 80.
    table.box, table.padding = None, (0, 1, 0, 0)
    # Broken by hand, so that numbers never are.
    heads = ("format", "bits", "max", "smallest\nnormal", "smallest\nsubnormal", "sub-\nnormals", "rel.\nerror")
    for index, column in enumerate((*heads, "range,\nbits", "dtype")):
        table.add_column(column, no_wrap=True, justify="left" if index in (0, 1, len(heads) + 1) else "right")
    for row in rows:
        numbers = (f"{row.max:g}", _power(row.smallest_normal), _power(row.smallest_subnormal), str(row.subnormals))
        cells = (row.name, row.bits.replace(" ", ""), *numbers, f"{row.relative_error:.2%}", f"{row.binades:.1f}")
        table.add_row(*map(Text, (*cells, row.dtype)))
    return table


def _power(value: float) -> str:
    """A power of two as such."""
    exponent = math.log2(value)
    return f"2^{exponent:.0f}" if exponent.is_integer() else f"{value:g}"
