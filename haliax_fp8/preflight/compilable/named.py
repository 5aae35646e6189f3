"""The devices to compile for, by name: those of the catalog that XLA can compile for, and the local ones."""

import dataclasses
from collections.abc import Mapping

from ...devices.catalog import NotCompiled, Row, XlaGpu, XlaTpu, canonical, catalog
from .device import CompilableDevice, LocalDevice
from .gpu import CompilableGpu
from .tpu import CompilableTpu


def _compilable(row: Row) -> CompilableDevice | None:
    match row.xla:
        case XlaGpu() as gpu:
            description = " ".join(f"{name}: {value}" for name, value in dataclasses.asdict(gpu).items())
            return CompilableGpu(row.name, row.kind, row.peaks, row.compute_capability, description)
        case XlaTpu() as tpu:
            return CompilableTpu(row.name, row.kind, row.peaks, tpu.generation)
        case NotCompiled():
            return None


compilable_devices: Mapping[str, CompilableDevice] = {
    **{name: device for name, row in catalog.items() if (device := _compilable(row)) is not None},
    "local": LocalDevice("local", "the local devices", None),
}
"""The devices to compile for, by name."""


def as_compilable(device: str | CompilableDevice) -> CompilableDevice:
    """The device with a name; a `CompilableDevice` is returned unchanged.

    Args:
        device: One of `compilable_devices`, in any case, or another name of it; or your own `CompilableDevice`.

    Raises:
        ValueError: If the name is unknown, or the preflight cannot compile for the device.

    Example:
        >>> as_compilable("H100").kind, as_compilable("v6e").name
        ('NVIDIA H100 80GB HBM3', 'tpu6e')
    """
    if isinstance(device, CompilableDevice):
        return device
    if (name := canonical(device)) not in compilable_devices:
        why = "is unknown"
        if name in catalog and isinstance(xla := catalog[name].xla, NotCompiled):
            why = f"cannot be compiled for: {xla.reason}"
        raise ValueError(f"device={device!r} {why}; choose one of {', '.join(compilable_devices)}")
    return compilable_devices[name]
