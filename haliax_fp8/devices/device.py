"""The properties of a device that decide whether it has FP8, and how fast it is."""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from .._arguments import nearest, require
from ..formats import E4M3FNUZ, E5M2FNUZ, Format
from .catalog import canonical, catalog, peaks
from .peaks import Peaks
from .units import FP4_UNITS as FP4_UNITS, FP8_UNITS, MX_UNITS as MX_UNITS, NO_UNITS as NO_UNITS, MatrixUnits


@dataclasses.dataclass(frozen=True)
class Device:
    """A device: the properties that decide whether it has FP8.

    Args:
        platform: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.
        kind: JAX's name for it (`device_kind`), such as `NVIDIA H100 80GB HBM3` or `TPU7x`.
        compute_capability: For NVIDIA, such as `"9.0"`; for AMD, the architecture, such as `"gfx942"`.
    """

    platform: str
    kind: str
    compute_capability: str = ""

    @staticmethod
    def local() -> "Device":
        """The first device of this process."""
        return Device.of_jax(jax.devices()[0])

    @staticmethod
    def of_jax(device: Any) -> "Device":
        """The hardware of one of JAX's devices, of this machine or of a description of another.

        Args:
            device: Such as one of `jax.devices()`.

        Example:
            >>> Device.of_jax(jax.devices("cpu")[0]).platform
            'cpu'
        """
        platform = device.platform
        if platform == "gpu":
            platform = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
        return Device(platform, device.device_kind, str(getattr(device, "compute_capability", "")))

    @staticmethod
    def default() -> "Device":
        """The device that JAX computes on by default: that of the mesh in use (`jax.set_mesh`), or else the local one.

        So a model that is converted for another machine's device, or a program compiled for it, takes that device's
        path.
        """
        return _default(getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None), jax.devices()[0])

    @staticmethod
    def by_name(name: str) -> "Device":
        """A device by name, whether or not this machine has it.

        Args:
            name: A name or alias from the catalog, such as `"h100"`, in any case; or `"local"` for the local device.

        Raises:
            ValueError: If the name is unknown; the message lists the nearest names.

        Example:
            >>> Device.by_name("H100").compute_capability, Device.by_name("v6e").kind
            ('9.0', 'TPU v6 lite')
        """
        if not isinstance(name, str):
            raise ValueError(f"name={name!r} is not the name of a device; use one such as 'h100', out of {[*devices]}")
        if (known := canonical(name)) == "local":
            return Device.local()
        device = devices.get(known)
        if device is None:
            near = nearest(name, devices)
            raise ValueError(
                f"device={name!r} is unknown; the nearest are {near or list(devices)}, out of {[*devices]}"
            )
        return device

    @staticmethod
    def of(device: "Device | str", of: str) -> "Device":
        """A device that was given as such or by its name.

        Args:
            device: The device, or its name.
            of: The function or class that takes it, for the error.

        Raises:
            ValueError: If it is neither, or the name is unknown.

        Example:
            >>> Device.of("h100", of="describe") == Device.of(Device.by_name("h100"), of="describe")
            True
        """
        if isinstance(device, str):
            return Device.by_name(device)
        require("device", device, Device, "a name such as 'h100', or 'local' for the local device", of=of)
        return device

    @contextlib.contextmanager
    def as_default(self) -> Iterator[None]:
        """In this context models and programs are made for the device, whether or not it is here.

        Some products are chosen when a program is traced: those of experts, of vectors and of small matrices, and any
        that a device does not have. So enter this context to export for a device that this machine lacks.

        Raises:
            ValueError: If JAX's name for the device does not say what it is, because the catalog lacks it.

        Example:
            >>> with Device.by_name("h100").as_default():
            ...     Device.default().kind
            'NVIDIA H100 80GB HBM3'
        """
        platform = "gpu" if self.platform in ("cuda", "rocm") else self.platform
        abstract = jax.sharding.AbstractDevice(device_kind=self.kind, num_cores=None, platform=platform)
        mesh = jax.sharding.get_abstract_mesh().update(abstract_device=abstract)
        with jax.sharding.use_abstract_mesh(mesh):
            if (default := Device.default()) != self:
                raise ValueError(
                    f"{self} cannot be the default device: JAX knows it by its kind alone, which the catalog takes for "
                    f"{default}. Device.by_name gives devices of the catalog: {[*catalog]}"
                )
            yield

    @property
    def emulates(self) -> bool:
        """Whether FP8 products are emulated by default: on a CPU, with the same rounding."""
        return self.platform == "cpu"

    @property
    def tpu_generation(self) -> int | None:
        """The generation of a TPU, such as 7 for TPU7x; None for other devices."""
        match = re.match(r"TPU ?v?(\d+)", self.kind) if self.platform == "tpu" else None
        return None if match is None else int(match[1])

    def is_cuda_from(self, lowest: float, below: float = math.inf) -> bool:
        """Whether it is an NVIDIA GPU whose compute capability lies in `[lowest, below)`.

        Args:
            lowest: The lowest compute capability, such as 9.0.
            below: The lowest that is too high.

        Example:
            >>> Device.by_name("h100").is_cuda_from(9.0), Device.by_name("tpu7x").is_cuda_from(9.0)
            (True, False)
        """
        return self.platform == "cuda" and lowest <= float(self.compute_capability or 0.0) < below

    @property
    def is_hopper(self) -> bool:
        """Whether it is an NVIDIA GPU of the Hopper generation, such as the H100 and the H200."""
        return self.is_cuda_from(9.0, below=10.0)

    @property
    def architecture(self) -> str:
        """The compute capability of an NVIDIA device, the architecture of an AMD device, the generation of a TPU."""
        return str(self.tpu_generation or "") if self.platform == "tpu" else self.compute_capability

    @property
    def peaks(self) -> Peaks | None:
        """Its peak rates; None if the catalog has none for this kind of device."""
        return next((rates for name, rates in peaks.items() if catalog[name].kind == self.kind), None)

    def lacks(self, needed: Format | MatrixUnits) -> str | None:
        """Why the device cannot multiply a format, or lacks a kind of units; None if it can.

        A CPU emulates all formats. AMD's MI300 has formats of its own, and no others.

        Args:
            needed: The format or the units.

        Example:
            >>> Device.by_name("h100").lacks(E4M3FNUZ)
            "E4M3FNUZ is a format of AMD's MI300; use E4M3 or E5M2"
            >>> Device.by_name("mi300x").lacks(E4M3FNUZ)
            >>> Device.by_name("a100").lacks(FP8_UNITS)
            'FP8 products need compute capability 8.9 (Ada, Hopper, Blackwell), but this device has 8.0'
        """
        if isinstance(needed, MatrixUnits):
            return needed.missing(self.platform, self.architecture)
        if self.emulates:
            return None
        if (reason := self.lacks(FP8_UNITS)) is not None:
            return reason
        is_mi300 = self.platform == "rocm" and self.compute_capability.startswith("gfx94")
        is_fnuz = needed in (E4M3FNUZ, E5M2FNUZ)
        if is_mi300 and not is_fnuz:
            return "MI300 multiplies the fnuz formats only; use Recipe.of(..., forward=E4M3FNUZ, backward=E5M2FNUZ)"
        if is_fnuz and not is_mi300:
            return f"{needed} is a format of AMD's MI300; use E4M3 or E5M2"
        return None


# Each product asks.
@functools.cache
def _default(meant: Any, here: Any) -> Device:
    """The device of the mesh in use, if it has one, or else the local one."""
    local = Device.of_jax(here)
    if meant is None:
        return local
    platforms = ("cuda", "rocm") if meant.platform == "gpu" else (meant.platform,)
    rows = (row for row in catalog.values() if row.platform in platforms and row.kind == meant.device_kind)
    row = next(rows, None)
    if row is not None:
        return Device(row.platform, row.kind, row.compute_capability)
    return local if local.kind == meant.device_kind else Device(platforms[0], meant.device_kind)


devices: Mapping[str, Device] = {
    row.name: Device(row.platform, row.kind, row.compute_capability) for row in catalog.values()
}
"""The devices of the catalog by name."""
