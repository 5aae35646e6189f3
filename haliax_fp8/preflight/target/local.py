"""The devices that are here."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ...devices.device import Device
from ...devices.xla_flags import XlaFlags
from .target import Target


@dataclasses.dataclass(frozen=True)
class LocalTarget(Target):
    """The local devices, as JAX lists them by default."""

    @property
    def device(self) -> Device:
        return Device.default()

    def compiler_options(self, flags: XlaFlags) -> Mapping[str, Any]:
        return {}  # The flags in the environment are XLA's own business.

    @property
    def caveats(self) -> tuple[str, ...]:
        return (
            ("times are estimates, nothing ran",) if self.peaks else ("no peaks are known, so no times are estimated",)
        )

    def missing(self) -> None:
        return None

    def devices(self, count: int) -> Sequence[Any]:
        """The first of `jax.devices()`."""
        found = jax.devices()
        if len(found) < count:
            raise ValueError(f"devices={count}, but this machine has {len(found)}; name a target to compile for more")
        return found[:count]
