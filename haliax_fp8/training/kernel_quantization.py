"""When the kernels of a training step are quantized."""

import enum
from typing import Any


class KernelQuantization(enum.Enum):
    """How often a training step quantizes its kernels. Numbers are the same."""

    IN_EACH_MICROBATCH = "in_each_microbatch"
    """Every product quantizes its kernel: nothing is kept from one microbatch to the next."""

    ONCE = "once"
    """Before the first microbatch, for all of them, see `quantize_kernels`.

    A kernel is read once per step. Its copies take two bytes per weight for as long as the step lasts.
    """

    GATHERED_ONCE = "gathered_once"
    """Likewise, and each device gets all that it multiplies by before the first microbatch, in FP8.

    Every weight travels once per step, as one byte. The two bytes per weight are then those of whole kernels, on every
    device. See `quantize_kernels(gather=True)` for what is whole.
    """


def as_kernel_quantization(value: Any) -> KernelQuantization:
    """A member, given as itself or by its value.

    Args:
        value: What the user gave.

    Raises:
        ValueError: If it is neither.
    """
    try:
        return KernelQuantization(value)
    except ValueError as error:
        names = ", ".join(repr(member.value) for member in KernelQuantization)
        raise ValueError(f"quantize_kernels={value!r} must be one of {names}, or a KernelQuantization") from error
