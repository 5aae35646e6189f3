"""Which devices have kernels for grouped products, such as those of a mixture of experts."""

import enum
from collections.abc import Mapping

from .device import Device
from .units import FP8_UNITS


class GroupedKernels(enum.Enum):
    """An implementation of grouped products: each group of rows times its own kernel."""

    XLA = "XLA"
    """`lax.ragged_dot`, which XLA turns into a dense product if it has no kernel: every row times the kernels of all
    groups, keeping one result. A CPU, which emulates FP8 anyway, has nothing else."""

    HOPPER = "Hopper"
    """This package's kernel for compute capability 9.0. It also supports scales for blocks of 128 along the sum."""

    BLACKWELL = "Blackwell"
    """This package's kernel for compute capabilities 10.0 and 10.3."""

    TPU = "TPU"
    """This package's kernel for TPUs with FP8 units."""

    @staticmethod
    def of(device: Device) -> "GroupedKernels | None":
        """The implementation for a device; None if there is none.

        Example:
            >>> GroupedKernels.of(Device.by_name("h200")), GroupedKernels.of(Device.by_name("a100"))
            (<GroupedKernels.HOPPER: 'Hopper'>, None)
        """
        if device.emulates:
            return GroupedKernels.XLA
        if device.platform == "tpu" and device.lacks(FP8_UNITS) is None:
            return GroupedKernels.TPU
        return _BY_CAPABILITY.get(device.compute_capability) if device.platform == "cuda" else None


_BY_CAPABILITY: Mapping[str, GroupedKernels] = {
    "9.0": GroupedKernels.HOPPER,
    "10.0": GroupedKernels.BLACKWELL,
    "10.3": GroupedKernels.BLACKWELL,
}

BLOCK = 128
"""How many elements along the sum share a scale in the kernel that supports such scales."""
