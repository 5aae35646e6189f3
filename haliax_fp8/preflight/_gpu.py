"""NVIDIA GPUs: XLA's GPU compiler, in this process and without a driver."""

import contextlib
import dataclasses
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from .._device import Device
from .._xla_flags import TRITON_PRODUCTS, XlaFlags
from ._target import Target, environment


@dataclasses.dataclass(frozen=True)
class GpuTarget(Target):
    """An NVIDIA GPU, compiled for by XLA's GPU compiler in the package `jax-cuda13-pjrt`.

    Args:
        compute_capability: Such as `9.0`.
        description: The fields of a `stream_executor.GpuDeviceInfoProto` in text form that differ between devices.
    """

    compute_capability: str
    description: str

    @property
    def device(self) -> Device:
        """By its compute capability."""
        return Device("cuda", self.kind, self.compute_capability)

    def compiler_options(self, flags: XlaFlags) -> Mapping[str, Any]:
        """Triton's products as the user's flags have them; and less work where the program stays the same.

        Machine code need not be good, as nothing runs; and the autotuner of what is no product, which has nothing to
        measure with, would compile each of its kernels once more, only to keep it as it is. XLA's decisions stay the
        same, in less than half the time.
        """
        quick = {"xla_backend_optimization_level": 0, "xla_gpu_experimental_enable_fusion_autotuner": False}
        options = {name: value for name, value in quick.items() if name not in flags.values}
        return {TRITON_PRODUCTS: flags.triton_products, **options}

    @property
    def caveats(self) -> tuple[str, ...]:
        """No GPU, so nothing was measured."""
        return (
            "no GPU, so no autotuner: a product shown in Triton may run in cuBLASLt on the device, with the same "
            "operands, where XLA finds that faster",
            "times are estimates, nothing ran",
        )

    @property
    def config(self) -> str:
        """A `stream_executor.GpuTargetConfigProto` in text form."""
        major, minor = self.compute_capability.split(".")
        features = "feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
              {self.description}
            }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 9 }}
            device_description_str: "{self.kind}"
        """

    def missing(self) -> str | None:
        """The package, if it is not installed."""
        if _plugin() is not None:
            return None
        return f"target {self.name!r} needs XLA's GPU compiler: pip install 'haliax-fp8[preflight]'"

    def devices(self, count: int) -> Sequence[Any]:
        """GPUs of one host, up to eight; beyond that hosts of eight."""
        if (missing := self.missing()) is not None:
            raise RuntimeError(missing)
        hosts, per_host = (1, count) if count <= 8 else (count // 8, 8)
        if hosts * per_host != count:
            raise ValueError(f"devices={count} is more than one host of 8 GPUs and no multiple of it")
        return _cuda_topology(target_config=self.config, topology=f"{hosts}x{per_host}x1").devices


def _plugin() -> str | None:
    """The module of JAX's plugin for NVIDIA GPUs."""
    names = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    if importlib.util.find_spec("jax_plugins") is None:
        return None
    return next((name for name in names if importlib.util.find_spec(name) is not None), None)


def _cuda_topology(**options: str) -> topologies.TopologyDescription:
    """A description of GPUs, in this process: no GPU, no driver, and the process's own devices stay what they are.

    In this process, and not in a child with `JAX_PLATFORMS=cpu`: a child would have to be sent the program, which takes
    `jax.export`, another package (flatbuffers) and seconds; and there is no need for it. JAX's plugin refuses to start
    without a driver, with a traceback in the log, unless JAX is told to leave CUDA alone (`JAX_PLATFORMS=cpu`) or to
    skip the check of versions. The second is said here, where there is no driver. If JAX has started before, and has
    logged that traceback, the plugin is started here; JAX has chosen its default device by then, and does not again.
    """
    skip = contextlib.nullcontext()
    if not os.path.exists("/proc/driver/nvidia/version"):
        skip = environment(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")
    plugin = _plugin()
    assert plugin is not None
    with skip, _without_warnings(plugin):
        jax.devices("cpu")
        try:
            return topologies.get_topology_desc("", "cuda", **options)
        except NotImplementedError:
            importlib.import_module(plugin).initialize()
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
