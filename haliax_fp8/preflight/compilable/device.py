"""CompilableDevice: what XLA needs to know about a device to compile for it; and the local devices."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ...devices.device import Device
from ...devices.peaks import Peaks, is_narrow
from ...devices.units import MX_UNITS
from ...devices.xla_flags import XlaFlags
from ..hlo.vocabulary import FORMATS


@dataclasses.dataclass(frozen=True)
class CompilableDevice(abc.ABC):
    """A device to compile for.

    Args:
        name: Its name in `inspect_step(device=...)`.
        kind: The device's own name.
        peaks: Its peak rates; None if unknown.
    """

    name: str
    kind: str
    peaks: Peaks | None

    @property
    @abc.abstractmethod
    def hardware(self) -> Device:
        """The hardware, which decides which formats are multiplied."""

    @abc.abstractmethod
    def compiler_options(self, flags: XlaFlags) -> Mapping[str, Any]:
        """The compiler's options.

        Args:
            flags: The user's flags, which take precedence.
        """

    @property
    @abc.abstractmethod
    def variables(self) -> Mapping[str, str]:
        """Environment variables that the compiler reads, set while it compiles."""

    @property
    @abc.abstractmethod
    def caveats(self) -> tuple[str, ...]:
        """What a report for this device cannot know."""

    @abc.abstractmethod
    def missing(self) -> str | None:
        """Why this machine cannot compile for it, with the command that fixes this; None if it can."""

    @abc.abstractmethod
    def devices(self, count: int) -> Sequence[Any]:
        """As many devices as `count`, which this machine need not have.

        Args:
            count: The number of devices.

        Raises:
            RuntimeError: If a package is missing; the message has the command that installs it.
            ValueError: If the device cannot have that number of devices.
        """

    def lacks(self, dtype: str) -> str | None:
        """Why the device does not multiply an element type; None if it does.

        Args:
            dtype: XLA's name for it, such as `f8e4m3fn`.
        """
        if self.hardware.emulates and dtype.startswith("f8"):
            return "a CPU has no FP8 products: they are emulated, with the same rounding"
        if (format := FORMATS.get(dtype)) is not None:
            return self.hardware.lacks(format)
        # Scales are not multiplied so; and cuDNN has block-scaled products of FP4.
        is_known = dtype == "f8e8m0fnu" or (dtype.startswith("f4") and self.hardware.platform == "cuda")
        return f"{self.kind} has no products of {dtype}" if is_narrow(dtype) and not is_known else None

    def lacks_block_scaling(self) -> str | None:
        """Why the device does not multiply operands with a scale for each block; None if it does."""
        reason = self.hardware.lacks(dataclasses.replace(MX_UNITS, products="block-scaled products"))
        return None if reason is None else f"{reason}: the operands are widened where they are multiplied"


@dataclasses.dataclass(frozen=True)
class LocalDevice(CompilableDevice):
    """The local devices, as JAX lists them by default."""

    @property
    def hardware(self) -> Device:
        return Device.local()

    def compiler_options(self, flags: XlaFlags) -> Mapping[str, Any]:
        return {}  # XLA itself reads the flags in the environment.

    @property
    def variables(self) -> Mapping[str, str]:
        return {}

    @property
    def caveats(self) -> tuple[str, ...]:
        return ("times are estimates, nothing ran" if self.peaks else "no peaks are known, so no times are estimated",)

    def missing(self) -> None:
        return None

    def devices(self, count: int) -> Sequence[Any]:
        """The first of `jax.devices()`."""
        found = jax.devices()
        if len(found) < count:
            raise ValueError(f"devices={count}, but this machine has {len(found)}; name a device to compile for more")
        return found[:count]
