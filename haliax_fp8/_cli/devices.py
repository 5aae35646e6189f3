"""The device that a command compiles for, and what this process computes on."""

import importlib.util
import logging

import jax

from ..devices import Device
from ..preflight.devices import as_compilable
from .load import UsageError


def compile_only() -> None:
    """Leaves accelerators alone: this process computes on the CPU, and compiles for other devices.

    A step for another device does not need the local ones; its conversion would check them for FP8 units.
    """
    jax.config.update("jax_platforms", "cpu")
    # XLA's GPU compiler warns that what runs its programs is not installed: it need not be.
    logging.getLogger("jax_plugins.xla_cuda13").setLevel(logging.ERROR)


def use_local_devices() -> None:
    """Computes on the local devices; these include no NVIDIA GPU if only XLA's compiler for them is installed."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None and importlib.util.find_spec("jax_plugins") is not None:
        if importlib.util.find_spec("jax_plugins.xla_cuda13") is not None:
            compile_only()


def check_device(name: str) -> None:
    """Says early, and in one line, that a device is unknown.

    Raises:
        UsageError: Naming the nearest.
    """
    try:
        as_compilable(name)
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def require_compiler(name: str) -> None:
    """Says in one line that a device's compiler is missing.

    Raises:
        UsageError: Naming the remedy.
    """
    if (missing := as_compilable(name).missing()) is not None:
        raise UsageError(missing)


def has_fused_attention(device: Device) -> bool:
    """Whether a device has cuDNN's attention, whose scores are not in memory."""
    return device.is_cuda_from(8.0)
