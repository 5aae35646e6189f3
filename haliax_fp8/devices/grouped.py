"""Which devices have an implementation of grouped products in FP8, such as those of a mixture of experts."""

import enum
from collections.abc import Mapping

from .device import Device
from .units import FP8_UNITS


class GroupedImplementation(enum.Enum):
    """An implementation of grouped products: each group of rows times its own kernel."""

    XLA = "XLA"
    """`lax.ragged_dot`, which XLA turns into a dense product where it has nothing better: every row times the kernels
    of all groups, keeping one result. A CPU, which emulates FP8 anyway, has nothing else."""

    HOPPER = "Hopper"
    """This package's Pallas kernel for compute capability 9.0. It also supports blocks of 128 along the sum."""

    BLACKWELL = "Blackwell"
    """This package's Pallas kernel for compute capabilities 10.0 and 10.3."""

    TPU = "TPU"
    """This package's Pallas kernel for TPUs with FP8 units."""

    @staticmethod
    def of(device: Device) -> "GroupedImplementation | None":
        """The implementation for a device; None if there is none.

        Example:
            >>> GroupedImplementation.of(Device.by_name("h200")), GroupedImplementation.of(Device.by_name("a100"))
            (<GroupedImplementation.HOPPER: 'Hopper'>, None)
        """
        if device.emulates:
            return GroupedImplementation.XLA
        if device.platform == "tpu" and device.lacks(FP8_UNITS) is None:
            return GroupedImplementation.TPU
        return _BY_CAPABILITY.get(device.compute_capability) if device.platform == "cuda" else None


_BY_CAPABILITY: Mapping[str, GroupedImplementation] = {
    "9.0": GroupedImplementation.HOPPER,
    "10.0": GroupedImplementation.BLACKWELL,
    "10.3": GroupedImplementation.BLACKWELL,
}

BLOCK = 128
"""How many elements along the sum share a scale in the implementation that supports such scales."""
