"""Which platform the command's own process computes on."""

import importlib.util
import logging

import jax


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
