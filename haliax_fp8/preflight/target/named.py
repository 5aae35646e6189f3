"""The targets by name: the catalog's devices that can be compiled for, and the local devices."""

import dataclasses
from collections.abc import Mapping

from ...devices.catalog import NotCompiled, Row, XlaGpu, XlaTpu, canonical, catalog
from .gpu import GpuTarget
from .target import LocalTarget, Target
from .tpu import TpuTarget


def _target(row: Row) -> Target | None:
    match row.xla:
        case XlaGpu() as gpu:
            description = " ".join(f"{name}: {value}" for name, value in dataclasses.asdict(gpu).items())
            return GpuTarget(row.name, row.kind, row.peaks, row.compute_capability, description)
        case XlaTpu() as tpu:
            return TpuTarget(row.name, row.kind, row.peaks, tpu.generation)
        case NotCompiled():
            return None


targets: Mapping[str, Target] = {
    **{name: target for name, row in catalog.items() if (target := _target(row)) is not None},
    "local": LocalTarget("local", "the local devices", None),
}
"""The targets, by the names of their devices."""


def target_of(target: str | Target) -> Target:
    """The target with a name; a `Target` is returned unchanged.

    Args:
        target: One of `targets`, in any case, or another name of the same device; or your own target.

    Raises:
        ValueError: If the name is unknown, or the preflight cannot compile for the device.

    Example:
        >>> target_of("H100").kind, target_of("v6e").name
        ('NVIDIA H100 80GB HBM3', 'tpu6e')
    """
    if isinstance(target, Target):
        return target
    if (name := canonical(target)) not in targets:
        why = "is unknown"
        if name in catalog and isinstance(xla := catalog[name].xla, NotCompiled):
            why = f"cannot be compiled for: {xla.reason}"
        raise ValueError(f"target={target!r} {why}; choose one of {', '.join(targets)}")
    return targets[name]
