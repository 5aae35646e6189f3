"""The command `devices`: what is supported where."""

import argparse
import dataclasses
import json
from typing import Any

import jax
from rich.table import Table
from rich.text import Text

from .._printing import new_table
from ..devices import Device
from ..devices.catalog import catalog
from ..preflight import compilable_devices
from ..recipes import named, supported
from .devices import use_local_devices
from .screen import screen


def add_parsers(commands: Any) -> None:
    """Adds the command to the parser.

    Args:
        commands: What `add_subparsers` gave.
    """
    text = "list devices, what they run natively, and which of them this machine can compile for"
    parser = commands.add_parser("devices", help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    use_local_devices()
    rows = device_rows()
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        screen().print(device_table(rows))
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
    by_recipe = {recipe: supported(recipe, device) for recipe in named}
    others = [support for support in by_recipe.values() if not support.is_native]
    known = compilable_devices.get(name)
    return DeviceRow(
        name=name,
        kind=kind,
        capability=device.compute_capability,
        native=tuple(recipe for recipe, support in by_recipe.items() if support.is_native),
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
