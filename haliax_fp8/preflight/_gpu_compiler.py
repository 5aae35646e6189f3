"""XLA's compiler for NVIDIA's GPUs: where it is, and how it is loaded without a driver.

It comes in the wheel `jax-cuda13-pjrt`, as a plugin that JAX starts in every program of an environment that has it.
Without the rest of JAX's CUDA packages, or without a driver, that fails with a traceback in the log, however little the
program has to do with GPUs. So `python -m haliax_fp8 install-compiler` unpacks the wheel beside the environment's
packages, where JAX does not look, and it is loaded here, when something is compiled. An environment with `jax[cuda13]`
has the compiler anyway, and that one is taken.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import pathlib
import sys
from collections.abc import Iterator
from types import ModuleType

import jax
from jax.experimental import topologies

from ._target import environment


PACKAGE = "jax-cuda13-pjrt"


def requirement() -> str:
    """The wheel that fits the JAX that is installed: JAX and its plugins have to be of one version."""
    return f"{PACKAGE}=={importlib.metadata.version('jaxlib')}"


def directory() -> pathlib.Path:
    """Where `install-compiler` puts the wheel: in the environment, but not on Python's path."""
    return pathlib.Path(sys.prefix) / "share" / "haliax_fp8" / requirement()


def is_installed() -> bool:
    """Whether there is a compiler."""
    return _in_environment() is not None or _unpacked().exists()


def _in_environment() -> str | None:
    """The module of JAX's plugin for NVIDIA GPUs among the environment's packages."""
    names = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    if importlib.util.find_spec("jax_plugins") is None:
        return None
    return next((name for name in names if importlib.util.find_spec(name) is not None), None)


def _unpacked() -> pathlib.Path:
    """The same module where `install-compiler` puts it."""
    return directory() / "jax_plugins" / "xla_cuda13" / "__init__.py"


def _plugin() -> ModuleType:
    name = _in_environment()
    if name is not None:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("jax_plugins.xla_cuda13", _unpacked())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cuda_topology(**options: str) -> topologies.TopologyDescription:
    """A description of GPUs, in this process: no GPU, no driver, and the process's own devices stay what they are.

    In this process, and not in a child: a child would have to be sent the program, which takes `jax.export`, another
    package (flatbuffers) and seconds. If the plugin is among the environment's packages, JAX starts it with its other
    backends; if it is elsewhere, or failed then, it is started here. JAX has chosen its default device by then, and
    does not again. The plugin refuses to start where it cannot ask for the versions of CUDA's libraries, unless it is
    told not to ask.
    """
    has_libraries = any(importlib.util.find_spec(name) for name in ("jax_cuda13_plugin", "jax_cuda12_plugin"))
    skip = contextlib.nullcontext()
    if not (has_libraries and os.path.exists("/proc/driver/nvidia/version")):
        skip = environment(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")
    with skip, _without_warnings(_in_environment() or "jax_plugins.xla_cuda13"):
        jax.devices("cpu")
        try:
            return topologies.get_topology_desc("", "cuda", **options)
        except NotImplementedError:
            _plugin().initialize()
            return topologies.get_topology_desc("", "cuda", **options)


@contextlib.contextmanager
def _without_warnings(logger: str) -> Iterator[None]:
    """The plugin warns that what talks to a driver is not installed; this is what is wanted."""
    is_error = lambda record: record.levelno >= logging.ERROR
    logging.getLogger(logger).addFilter(is_error)
    try:
        yield
    finally:
        logging.getLogger(logger).removeFilter(is_error)
