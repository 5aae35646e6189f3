"""Which formats a device multiplies, and which it only emulates."""

import dataclasses
from collections.abc import Iterable

import jax

from ._formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, Format


@dataclasses.dataclass(frozen=True)
class Device:
    """What decides about FP8 on a device.

    Args:
        platform: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.
        kind: The device's name, such as `NVIDIA H100 80GB HBM3` or `TPU7x`.
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

    @property
    def emulates(self) -> bool:
        """Whether FP8 products are emulated without being asked for: on a CPU, with the same rounding."""
        return self.platform == "cpu"

    def lacks(self, format: Format) -> str | None:
        """Why the device cannot multiply a format; None if it can, or if it emulates all of them.

        Args:
            format: The format.

        Example:
            >>> Device("cuda", "NVIDIA A100", "8.0").lacks(E4M3)
            'FP8 products need compute capability 8.9 (Ada, Hopper, Blackwell), and it has 8.0'
            >>> Device("cuda", "NVIDIA H100", "9.0").lacks(E4M3)
        """
        fnuz = format in (E4M3FNUZ, E5M2FNUZ)
        if self.platform == "cuda":
            if fnuz:
                return f"{format} is a format of AMD's MI300; use E4M3 or E5M2"
            if float(self.compute_capability or 0) < 8.9:
                return (
                    "FP8 products need compute capability 8.9 (Ada, Hopper, Blackwell), and it has "
                    f"{self.compute_capability or 'an unknown one'}"
                )
        elif self.platform == "rocm":
            is_mi300 = "gfx94" in self.compute_capability or "MI300" in self.kind
            if is_mi300 and format in (E4M3, E5M2):
                return f"MI300 multiplies the fnuz formats, not {format}; use Recipe.of(..., forward=E4M3FNUZ)"
            if fnuz and not is_mi300:
                return f"{format} is a format of MI300; use E4M3 or E5M2"
        elif self.platform == "tpu" and "7" not in self.kind:
            return f"{format} products need a TPU7x"
        return None


def require_formats(formats: Iterable[Format], device: Device) -> None:
    """Raises where an accelerator would emulate what it was asked to multiply.

    Args:
        formats: The formats that products will be in.
        device: The device.

    Raises:
        ValueError: Naming the device, the reason and the remedy.
    """
    for format in dict.fromkeys(formats):
        if (reason := device.lacks(format)) is not None:
            raise ValueError(
                f"FP8 was asked for on {device.kind}, which would emulate {format}, slower than high precision: "
                f"{reason}. Leave the model unconverted, or ask for emulation with Fp8Config(emulate=True)"
            )
