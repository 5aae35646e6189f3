"""NVIDIA GPUs: XLA's GPU compiler, in this process and without a driver."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ...devices.device import Device
from ...devices.xla_flags import TRITON_PRODUCTS, XlaFlags
from . import gpu_compiler
from .compilers import NVIDIA
from .target import Target


@dataclasses.dataclass(frozen=True)
class GpuTarget(Target):
    """An NVIDIA GPU, compiled for by XLA's GPU compiler, see `gpu_compiler.py`.

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
        """Triton's products as the user's flags set them; and less work where that does not change the program.

        Machine code need not be good, since nothing runs. And the autotuner for other kernels, which has nothing to
        measure on, would compile each of them again only to keep it unchanged. XLA's decisions stay the same, in less
        than half the time.
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
        """The compiler, if it is not installed."""
        if gpu_compiler.is_installed():
            return None
        return f"target {self.name!r} needs {NVIDIA.missing}"

    def devices(self, count: int) -> Sequence[Any]:
        """GPUs of one host, up to eight; beyond that hosts of eight."""
        if (missing := self.missing()) is not None:
            raise RuntimeError(missing)
        hosts, per_host = (1, count) if count <= 8 else (count // 8, 8)
        if hosts * per_host != count:
            raise ValueError(f"devices={count} is more than one host of 8 GPUs, but not a multiple of 8")
        return gpu_compiler.cuda_topology(target_config=self.config, topology=f"{hosts}x{per_host}x1").devices
