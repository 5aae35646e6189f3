"""XLA's compiler for NVIDIA's GPUs, loaded without a driver."""

import contextlib
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from types import ModuleType

import jax
from jax.experimental import topologies

from .compilers import NVIDIA
from .target import environment


_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_LIBRARIES = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def is_installed() -> bool:
    """Whether there is a compiler: with JAX's CUDA packages, or by `install-compiler`."""
    return _in_environment() is not None or NVIDIA.unpacked is not None


def _in_environment() -> str | None:
    """The module of JAX's plugin for NVIDIA GPUs among the environment's packages."""
    if importlib.util.find_spec("jax_plugins") is None:
        return None
    return next((name for name in _PLUGINS if importlib.util.find_spec(name) is not None), None)


def _plugin() -> ModuleType:
    if (name := _in_environment()) is not None:
        return importlib.import_module(name)
    path = NVIDIA.unpacked
    assert path is not None
    spec = importlib.util.spec_from_file_location(_PLUGINS[0], path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cuda_topology(**options: str) -> topologies.TopologyDescription:
    """A description of GPUs, in this process: without a GPU or a driver, and without changing the process's own
    devices.

    It runs in this process, not in a child, because sending the program to a child takes `jax.export`, another package
    (flatbuffers) and seconds. If the plugin is among the environment's packages, JAX starts it with its other backends;
    if it is elsewhere, or failed then, it is started here. By then JAX has chosen its default device, and does not
    choose again. The plugin refuses to start if it cannot query the versions of CUDA's libraries, unless it is told not
    to.
    """
    has_libraries = any(importlib.util.find_spec(name) is not None for name in _LIBRARIES)
    skip = contextlib.nullcontext()
    if not (has_libraries and os.path.exists("/proc/driver/nvidia/version")):
        skip = environment(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")
    with skip, _without_warnings(_in_environment() or _PLUGINS[0]):
        jax.devices("cpu")
        try:
            return topologies.get_topology_desc("", "cuda", **options)
        except NotImplementedError:
            _plugin().initialize()
            return topologies.get_topology_desc("", "cuda", **options)


@contextlib.contextmanager
def _without_warnings(logger: str) -> Iterator[None]:
    """The plugin warns that the driver interface is not installed, which is intended here."""
    is_error = lambda record: record.levelno >= logging.ERROR
    logging.getLogger(logger).addFilter(is_error)
    try:
        yield
    finally:
        logging.getLogger(logger).removeFilter(is_error)
