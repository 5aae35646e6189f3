"""NVIDIA GPUs: runs XLA's GPU compiler in this process, without a driver."""

import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
from jax.experimental import topologies

from ..._jax.late_plugin import complete_plugin
from ...devices.device import Device
from ...devices.xla_flags import TRITON_PRODUCTS, XlaFlags
from .compilers import NVIDIA
from .device import CompilableDevice
from .process import changed_process


@dataclasses.dataclass(frozen=True)
class CompilableGpu(CompilableDevice):
    """An NVIDIA GPU, for XLA's GPU compiler.

    Args:
        compute_capability: Such as `9.0`.
        description: The fields of a `stream_executor.GpuDeviceInfoProto` in text form that differ between devices.
    """

    compute_capability: str
    description: str = dataclasses.field(repr=False)

    @property
    def hardware(self) -> Device:
        return Device("cuda", self.kind, self.compute_capability)

    def compiler_options(self, flags: XlaFlags) -> Mapping[str, Any]:
        """The user's setting of Triton products; and less work where that does not change the program.

        Machine code need not be good, because nothing runs. The autotuner for other fusions has no device to measure
        on, and would compile each of them again only to keep it unchanged. XLA's decisions stay the same, in less than
        half the time.
        """
        quick = {"xla_backend_optimization_level": 0, "xla_gpu_experimental_enable_fusion_autotuner": False}
        options = {name: value for name, value in quick.items() if name not in flags.values}
        return {TRITON_PRODUCTS: flags.triton_products, **options}

    @property
    def caveats(self) -> tuple[str, ...]:
        return (
            "no GPU, so no autotuner: a product shown in Triton may run in cuBLASLt on the device, with the same "
            "operands, if XLA finds that faster",
            "times are estimates, nothing ran",
        )

    @property
    def variables(self) -> Mapping[str, str]:
        """Where the compiler of Pallas kernels is.

        JAX looks for it where it imports Mosaic, which may have been before its package was found.
        """
        if NVIDIA.unpacked is None:
            return {}
        package = (NVIDIA.directory / NVIDIA.files["jax-cuda13-plugin"]).parent
        return {"MOSAIC_GPU_RUNTIME_LIB_PATH": str(package / "libmosaic_gpu_runtime.so")}

    def missing(self) -> str | None:
        if _plugin_among_packages() is not None or NVIDIA.unpacked is not None:
            return None
        return f"device {self.name!r} needs {NVIDIA.missing}"

    def devices(self, count: int) -> Sequence[Any]:
        """The GPUs of one host, up to eight; beyond that, hosts of eight."""
        if (missing := self.missing()) is not None:
            raise RuntimeError(missing)
        hosts, per_host = (1, count) if count <= 8 else (count // 8, 8)
        if hosts * per_host != count:
            raise ValueError(f"devices={count} is more than one host of 8 GPUs, but not a multiple of 8")
        return _topology(target_config=self._config, topology=f"{hosts}x{per_host}x1").devices

    @property
    def _config(self) -> str:
        """A `stream_executor.GpuTargetConfigProto` in text form."""
        major, minor = self.compute_capability.split(".")
        features = "feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_core_limit: 65536 registers_per_block_limit: 65536 dnn_version: "9.10.0"
              cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
              {self.description}
            }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 9 }}
            device_description_str: "{self.kind}"
        """


_LIBRARY = "jax_cuda13_plugin"
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_LIBRARIES = (_LIBRARY, "jax_cuda12_plugin")


def _plugin_among_packages() -> str | None:
    """The module of JAX's plugin for NVIDIA GPUs, if that is installed as a package."""
    if importlib.util.find_spec("jax_plugins") is None:
        return None
    return next((name for name in _PLUGINS if importlib.util.find_spec(name) is not None), None)


def _plugin() -> ModuleType:
    if (name := _plugin_among_packages()) is not None:
        return importlib.import_module(name)
    path = NVIDIA.unpacked
    assert path is not None
    spec = importlib.util.spec_from_file_location(_PLUGINS[0], path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _find_libraries() -> None:
    """Lets JAX find the compiler of Pallas kernels, if it was unpacked next to XLA's compiler.

    A package that is imported stays known. On Python's path, programs that do not compile for absent GPUs would find it
    as well.
    """
    if NVIDIA.unpacked is None or any(importlib.util.find_spec(name) is not None for name in _LIBRARIES):
        return
    spec = importlib.util.spec_from_file_location(_LIBRARY, NVIDIA.directory / NVIDIA.files["jax-cuda13-plugin"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_LIBRARY] = module
    spec.loader.exec_module(module)


def _topology(**options: str) -> topologies.TopologyDescription:
    """A description of GPUs, without a GPU or a driver, and without changing the process's own devices.

    It is made in this process, not in a child, because sending the program to a child takes `jax.export`, another
    package (flatbuffers) and seconds. If the plugin is installed as a package, JAX starts it with its other backends;
    if it is elsewhere, or failed then, it is started here. By then JAX has chosen its default device, and does not
    choose again. By default, the plugin refuses to start if it cannot query the versions of CUDA's libraries. Its
    warning about a missing driver is suppressed, because no driver is needed here.
    """
    _find_libraries()
    has_libraries = any(importlib.util.find_spec(name) is not None for name in _LIBRARIES)
    has_driver = os.path.exists("/proc/driver/nvidia/version")
    skip = {} if has_libraries and has_driver else {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    with changed_process(variables=skip, quiet=[_plugin_among_packages() or _PLUGINS[0]]):
        jax.devices("cpu")
        try:
            return topologies.get_topology_desc("", "cuda", **options)
        except NotImplementedError:
            _plugin().initialize()
            complete_plugin("cuda")
            return topologies.get_topology_desc("", "cuda", **options)
