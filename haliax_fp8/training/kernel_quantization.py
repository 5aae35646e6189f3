"""When the kernels of a training step are quantized."""

import enum
from typing import Any


class KernelQuantization(enum.Enum):
    """How often a training step quantizes its kernels. The numbers are the same."""

    IN_EACH_MICROBATCH = "in_each_microbatch"
    """Every product quantizes its kernel, and nothing is kept from one microbatch to the next."""

    ONCE = "once"
    """The step quantizes them before the first microbatch, for all of them; see `quantize_kernels`.

    A kernel is read once per step. Its copies take two bytes per weight for as long as the step lasts.
    """

    GATHERED_ONCE = "gathered_once"
    """As `ONCE`, and each device receives the kernels that it multiplies with before the first microbatch, in FP8.

    Every weight travels once per step, as one byte. Every device then holds two bytes per weight of whole kernels.
    `quantize_kernels(gather=True)` says which kernels are whole.
    """


def as_kernel_quantization(value: Any) -> KernelQuantization:
    """Returns a member for a user's argument: the member itself, or its value.

    Args:
        value: The user's argument.

    Raises:
        ValueError: If it is neither.
    """
    try:
        return KernelQuantization(value)
    except ValueError as error:
        names = ", ".join(repr(member.value) for member in KernelQuantization)
        raise ValueError(f"quantize_kernels={value!r} must be one of {names}, or a KernelQuantization") from error
