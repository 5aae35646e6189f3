"""Devices and their matrix units: the hardware that multiplies quantized operands.

An FP8 unit multiplies and sums; a scale that is constant along the sum is applied to the result. Scales that change
along the sum have to be applied inside it, by units made for their blocks.
"""

import dataclasses
import re

import jax

from .._numerics.formats import E4M3FNUZ, E5M2FNUZ, Format
from .._numerics.require import nearest


@dataclasses.dataclass(frozen=True)
class Device:
    """The properties of a device that decide whether it has FP8.

    Args:
        platform: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.
        kind: The device's name as JAX has it, such as `NVIDIA H100 80GB HBM3` or `TPU7x`.
        compute_capability: Of NVIDIA's devices, such as `"9.0"`; of AMD's the architecture, such as `"gfx942"`.
    """

    platform: str
    kind: str
    compute_capability: str = ""

    @staticmethod
    def default() -> "Device":
        """The device that JAX computes on by default."""
        device = jax.devices()[0]
        platform = device.platform
        if platform == "gpu":
            platform = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
        return Device(platform, device.device_kind, str(getattr(device, "compute_capability", "")))

    @staticmethod
    def by_name(name: str) -> "Device":
        """A device by name; this machine need not have it.

        Args:
            name: A key of `devices` or another name of one, such as `"h100"`, in any case; or `"local"` for the local
                one.

        Raises:
            ValueError: If there is none; the nearest names are listed.

        Example:
            >>> Device.by_name("H100").compute_capability, Device.by_name("v6e").kind
            ('9.0', 'TPU v6 lite')
        """
        if (known := canonical(name)) == "local":
            return Device.default()
        device = devices.get(known)
        if device is None:
            near = nearest(name, devices)
            raise ValueError(
                f"device={name!r} is unknown; the nearest are {near or list(devices)}, all are {[*devices]}"
            )
        return device

    @property
    def emulates(self) -> bool:
        """Whether FP8 products are emulated by default: on a CPU, with the same rounding."""
        return self.platform == "cpu"

    @property
    def tpu_generation(self) -> int | None:
        """Of a TPU, such as 7 of TPU7x; None of anything else."""
        found = re.match(r"TPU ?v?(\d+)", self.kind) if self.platform == "tpu" else None
        return None if found is None else int(found[1])

    def lacks(self, format: Format) -> str | None:
        """Why the device cannot multiply a format; None if it can, or if it emulates all of them.

        AMD's MI300 has its own formats, which no other device has, and no others.

        Args:
            format: The format.

        Example:
            >>> Device.by_name("h100").lacks(E4M3FNUZ)
            "E4M3FNUZ is a format of AMD's MI300; use E4M3 or E5M2"
            >>> Device.by_name("mi300x").lacks(E4M3FNUZ)
        """
        if self.emulates:
            return None
        if (reason := FP8_UNITS.lacking(self)) is not None:
            return reason
        is_mi300 = self.platform == "rocm" and self.compute_capability.startswith("gfx94")
        is_fnuz = format in (E4M3FNUZ, E5M2FNUZ)
        if is_mi300 and not is_fnuz:
            return "MI300 multiplies the fnuz formats only; use Recipe.of(..., forward=E4M3FNUZ, backward=E5M2FNUZ)"
        if is_fnuz and not is_mi300:
            return f"{format} is a format of AMD's MI300; use E4M3 or E5M2"
        return None


_SINCE = {8.9: "Ada, Hopper, Blackwell", 10.0: "Blackwell"}


@dataclasses.dataclass(frozen=True)
class MatrixUnits:
    """A kind of matrix unit, by the devices that have it.

    Args:
        products: What it multiplies, for messages.
        cuda: The lowest compute capability of NVIDIA's devices that have it; None if none does.
        rocm: How the names of those architectures of AMD's begin that have it.
        tpu: The lowest generation of TPUs that has it; None if none does.
    """

    products: str
    cuda: float | None
    rocm: tuple[str, ...]
    tpu: int | None

    def lacking(self, device: Device) -> str | None:
        """Why a device cannot multiply with these units; None if it can.

        Args:
            device: The device.

        Example:
            >>> FP8_UNITS.lacking(Device.by_name("a100"))
            'FP8 products need compute capability 8.9 (Ada, Hopper, Blackwell), and it has 8.0'
            >>> FP8_UNITS.lacking(Device.by_name("h100"))
        """
        match device.platform:
            case "cuda" if self.cuda is not None:
                if float(device.compute_capability or 0) >= self.cuda:
                    return None
                return (
                    f"{self.products} need compute capability {self.cuda} ({_SINCE[self.cuda]}), and it has "
                    f"{device.compute_capability or 'an unknown one'}"
                )
            case "rocm" if self.rocm:
                if device.compute_capability.startswith(self.rocm):
                    return None
                architectures = " or ".join(self.rocm)
                return f"{self.products} need {architectures}, and it is {device.compute_capability or 'unknown'}"
            case "tpu" if self.tpu is not None:
                if (device.tpu_generation or 0) >= self.tpu:
                    return None
                return f"{self.products} need a TPU7x"
            case "cpu":
                return f"a CPU has no units for {self.products}"
        return f"no {device.platform} device has units for {self.products}"


FP8_UNITS = MatrixUnits("FP8 products", cuda=8.9, rocm=("gfx94", "gfx95", "gfx12"), tpu=7)
"""Scales stay outside the sum: a tensor's, or a row's."""

MX_UNITS = MatrixUnits("MXFP8 products (a scale for 32 elements)", cuda=10.0, rocm=("gfx95",), tpu=None)
"""An E8M0 scale for each 32 elements of the sum."""

NO_UNITS = MatrixUnits("blocks with such scales: operands are dequantized first", cuda=None, rocm=(), tpu=None)
"""Other scales along the sum: operands are dequantized, then multiplied in high precision."""


devices: dict[str, Device] = {
    "cpu": Device("cpu", "cpu"),
    "v100": Device("cuda", "Tesla V100-SXM2-16GB", "7.0"),
    "a100": Device("cuda", "NVIDIA A100-SXM4-80GB", "8.0"),
    "l4": Device("cuda", "NVIDIA L4", "8.9"),
    "l40s": Device("cuda", "NVIDIA L40S", "8.9"),
    "rtx4090": Device("cuda", "NVIDIA GeForce RTX 4090", "8.9"),
    "h100": Device("cuda", "NVIDIA H100 80GB HBM3", "9.0"),
    "h200": Device("cuda", "NVIDIA H200", "9.0"),
    "b200": Device("cuda", "NVIDIA B200", "10.0"),
    "gb200": Device("cuda", "NVIDIA GB200", "10.0"),
    "mi250x": Device("rocm", "AMD Instinct MI250X", "gfx90a"),
    "mi300x": Device("rocm", "AMD Instinct MI300X", "gfx942"),
    "mi325x": Device("rocm", "AMD Instinct MI325X", "gfx942"),
    "mi350x": Device("rocm", "AMD Instinct MI350X", "gfx950"),
    "mi355x": Device("rocm", "AMD Instinct MI355X", "gfx950"),
    "tpu4": Device("tpu", "TPU v4"),
    "tpu5e": Device("tpu", "TPU v5 lite"),
    "tpu5p": Device("tpu", "TPU v5"),
    "tpu6e": Device("tpu", "TPU v6 lite"),
    "tpu7x": Device("tpu", "TPU7x"),
}
"""Devices by the names that the whole package has for them: targets of the preflight and tables of peaks too."""

_ALIASES: dict[str, str] = {
    **dict.fromkeys(("v4", "tpuv4"), "tpu4"),
    **dict.fromkeys(("v5e", "tpuv5e", "v5litepod", "tpuv5lite"), "tpu5e"),
    **dict.fromkeys(("v5p", "tpuv5p", "tpuv5"), "tpu5p"),
    **dict.fromkeys(("v6e", "tpuv6e", "tpuv6lite", "trillium"), "tpu6e"),
    **dict.fromkeys(("v7x", "tpuv7x", "tpu7", "ironwood"), "tpu7x"),
}


def canonical(name: str) -> str:
    """The key in `devices` for a name, ignoring case, blanks and dashes; an unknown name is returned without them.

    Args:
        name: Such as `"H100"`, `"v6e"` or `"TPU v6 lite"`.

    Example:
        >>> canonical("TPU v6e"), canonical("RTX 4090")
        ('tpu6e', 'rtx4090')
    """
    plain = re.sub(r"[\s_-]", "", name.lower())
    return _ALIASES.get(plain, plain)
