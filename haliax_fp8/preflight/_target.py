"""Devices that a program can be compiled for: what XLA has to know of them, and how fast they are."""

import abc
import contextlib
import dataclasses
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from .._device import Device
from .._formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ


# XLA's names of the formats that products may run in.
_FORMATS = {"f8e4m3fn": E4M3, "f8e5m2": E5M2, "f8e4m3fnuz": E4M3FNUZ, "f8e5m2fnuz": E5M2FNUZ}


@dataclasses.dataclass(frozen=True)
class Peaks:
    """What one device does per second at best: dense products, and bytes between it and its memory.

    Args:
        fp8: FLOP/s of products of FP8 operands; that of `bf16` where the device has none.
        bf16: FLOP/s of products of bfloat16 or float16 operands.
        f32: FLOP/s of products of float32 operands: in TF32 on a GPU, in six bfloat16 products on a TPU.
        bandwidth: Bytes per second.
        source: Where the figures are from.
    """

    fp8: float
    bf16: float
    f32: float
    bandwidth: float
    source: str

    def flops(self, dtype: str) -> float:
        """The peak for operands of an element type.

        Args:
            dtype: XLA's name, such as `bf16`.
        """
        if dtype.startswith(("f8", "f4")):
            return self.fp8
        return self.bf16 if dtype in ("bf16", "f16") else self.f32


@dataclasses.dataclass(frozen=True)
class Target(abc.ABC):
    """A device to compile for.

    Args:
        name: What `preflight(target=...)` calls it.
        kind: The device's own name.
        peaks: How fast it is; None where nobody can say.
    """

    name: str
    kind: str
    peaks: Peaks | None

    @property
    @abc.abstractmethod
    def device(self) -> Device:
        """What decides which formats it multiplies."""

    @property
    @abc.abstractmethod
    def compiler_options(self) -> Mapping[str, Any]:
        """What the compiler is told beside the program."""

    @property
    @abc.abstractmethod
    def caveats(self) -> tuple[str, ...]:
        """What a report for this target cannot know."""

    @abc.abstractmethod
    def missing(self) -> str | None:
        """Why nothing can be compiled for it here, with the command that changes it; None if all is there."""

    @abc.abstractmethod
    def devices(self, count: int) -> Sequence[Any]:
        """As many devices, of which none has to be there.

        Args:
            count: How many.

        Raises:
            RuntimeError: If a package is missing; with the command that installs it.
            ValueError: If the target has no such number of devices.
        """

    def lacks(self, dtype: str) -> str | None:
        """Why the device does not multiply an element type; None if it does.

        Args:
            dtype: XLA's name, such as `f8e4m3fn`.
        """
        if self.device.emulates and dtype.startswith("f8"):
            return "a CPU has no FP8 products: they are emulated, with the same rounding"
        format = _FORMATS.get(dtype)
        return None if format is None else self.device.lacks(format)


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

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """Products go to cuBLAS: without a GPU no autotuner can choose between it and Triton."""
        return {"xla_gpu_enable_triton_gemm": False}

    @property
    def caveats(self) -> tuple[str, ...]:
        """No GPU, so nothing was measured."""
        return (
            "no GPU, so no autotuner: products are shown with cuBLAS; on the device XLA may choose Triton for some",
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
        if importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13"):
            return None
        return f"target {self.name!r} needs XLA's GPU compiler: pip install 'haliax-fp8[preflight]'"

    def devices(self, count: int) -> Sequence[Any]:
        """GPUs of one host, up to eight; beyond that hosts of eight."""
        if (missing := self.missing()) is not None:
            raise RuntimeError(missing)
        hosts, per_host = (1, count) if count <= 8 else (count // 8, 8)
        if hosts * per_host != count:
            raise ValueError(f"devices={count} is more than one host of 8 GPUs and no multiple of it")
        jax.devices("cpu")  # The process's own backends are made first, and stay as they are.
        description = topologies.get_topology_desc(
            "", "cuda", target_config=self.config, topology=f"{hosts}x{per_host}x1"
        )
        return description.devices


@dataclasses.dataclass(frozen=True)
class TpuTarget(Target):
    """A TPU, compiled for by the package `libtpu`.

    Args:
        topology: The generation in libtpu's names of topologies, such as `v6e`.
    """

    topology: str

    @property
    def device(self) -> Device:
        """By its name."""
        return Device("tpu", self.kind)

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """None."""
        return {}

    @property
    def caveats(self) -> tuple[str, ...]:
        """No TPU, so nothing was measured."""
        return ("times are estimates, nothing ran",)

    def missing(self) -> str | None:
        """The package, if it is not installed."""
        if importlib.util.find_spec("libtpu"):
            return None
        return f"target {self.name!r} needs XLA's TPU compiler: pip install 'haliax-fp8[preflight-tpu]'"

    def devices(self, count: int) -> Sequence[Any]:
        """The first of the smallest slice that has as many."""
        if (missing := self.missing()) is not None:
            raise RuntimeError(missing)
        for shape in ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"):
            found = self._slice(shape)
            if len(found) >= count:
                return found[:count]
        raise ValueError(f"devices={count} is more than a slice of 512 TPUs has")

    def _slice(self, shape: str) -> Sequence[Any]:
        # On a machine that is no TPU's, libtpu would wait for a server that tells it about the machine.
        with _environment("TPU_SKIP_MDS_QUERY", "1"):
            try:
                return topologies.get_topology_desc(f"{self.topology}:{shape}", "tpu").devices
            except jax.errors.JaxRuntimeError:
                return ()  # Not every generation has every shape.


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets a variable of the environment for a while, if it is not set."""
    before = os.environ.get(name)
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


@dataclasses.dataclass(frozen=True)
class LocalTarget(Target):
    """The devices that are here, by JAX's default."""

    @property
    def device(self) -> Device:
        """The default device."""
        return Device.default()

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """None."""
        return {}

    @property
    def caveats(self) -> tuple[str, ...]:
        """Compiled, not run."""
        return (
            ("times are estimates, nothing ran",) if self.peaks else ("no peaks are known, so no times are estimated",)
        )

    def missing(self) -> None:
        """Nothing."""
        return None

    def devices(self, count: int) -> Sequence[Any]:
        """The first of `jax.devices()`."""
        found = jax.devices()
        if len(found) < count:
            raise ValueError(f"devices={count} but only {len(found)} are here; name a target to compile for more")
        return found[:count]


def _gpu(name: str, kind: str, compute_capability: str, peaks: Peaks, **info: int | float) -> GpuTarget:
    description = " ".join(f"{key}: {value}" for key, value in info.items())
    return GpuTarget(name, kind, peaks, compute_capability, description)


def _hopper(name: str, kind: str, bandwidth: float, memory: int, source: str) -> GpuTarget:
    return _gpu(
        name,
        kind,
        "9.0",
        Peaks(fp8=1978.9e12, bf16=989.4e12, f32=494.7e12, bandwidth=bandwidth, source=source),
        core_count=132,
        fpus_per_core=128,
        threads_per_core_limit=2048,
        shared_memory_per_core=233472,
        shared_memory_per_block_optin=232448,
        l2_cache_size=52428800,
        clock_rate_ghz=1.98,
        memory_bandwidth=int(bandwidth),
        device_memory_size=memory,
    )


def _ada(name: str, kind: str, peaks: Peaks, cores: int, l2: int, memory: int) -> GpuTarget:
    return _gpu(
        name,
        kind,
        "8.9",
        peaks,
        core_count=cores,
        fpus_per_core=128,
        threads_per_core_limit=1536,
        shared_memory_per_core=102400,
        shared_memory_per_block_optin=101376,
        l2_cache_size=l2,
        clock_rate_ghz=2.52,
        memory_bandwidth=int(peaks.bandwidth),
        device_memory_size=memory,
    )


targets: Mapping[str, Target] = {
    target.name: target
    for target in (
        _hopper("h100", "NVIDIA H100 80GB HBM3", 3.35e12, 84978434048, "NVIDIA H100 data sheet, SXM, without sparsity"),
        _hopper("h200", "NVIDIA H200", 4.8e12, 151397597184, "NVIDIA H200 data sheet, SXM, without sparsity"),
        _gpu(
            "b200",
            "NVIDIA B200",
            "10.0",
            Peaks(4.5e15, 2.25e15, 1.1e15, 7.7e12, "NVIDIA HGX B200 data sheet, per GPU, without sparsity"),
            core_count=148,
            fpus_per_core=128,
            threads_per_core_limit=2048,
            shared_memory_per_core=233472,
            shared_memory_per_block_optin=232448,
            l2_cache_size=132644864,
            clock_rate_ghz=1.965,
            memory_bandwidth=7672320000000,
            device_memory_size=191514411008,
        ),
        _gpu(
            "a100",
            "NVIDIA A100-SXM4-80GB",
            "8.0",
            Peaks(312e12, 312e12, 156e12, 2.039e12, "NVIDIA A100 data sheet, 80GB SXM, without sparsity"),
            core_count=108,
            fpus_per_core=64,
            threads_per_core_limit=2048,
            shared_memory_per_core=167936,
            shared_memory_per_block_optin=166912,
            l2_cache_size=41943040,
            clock_rate_ghz=1.41,
            memory_bandwidth=2039040000000,
            device_memory_size=85100068864,
        ),
        _ada(
            "l40s",
            "NVIDIA L40S",
            Peaks(733e12, 362.05e12, 183e12, 864e9, "NVIDIA L40S data sheet, without sparsity"),
            cores=142,
            l2=100663296,
            memory=48305799168,
        ),
        _ada(
            "rtx4090",
            "NVIDIA GeForce RTX 4090",
            Peaks(330.3e12, 165.2e12, 82.6e12, 1.008e12, "NVIDIA Ada architecture white paper, float32 accumulation"),
            cores=128,
            l2=75497472,
            memory=25757220864,
        ),
        TpuTarget(
            "tpu7x",
            "TPU7x",
            # JAX sees the two cores of a chip as devices.
            Peaks(2307e12, 1153.5e12, 1153.5e12 / 6, 3.69e12, "Google Cloud TPU7x page, half a chip"),
            "tpu7x",
        ),
        TpuTarget(
            "tpu6e",
            "TPU v6e",
            Peaks(918e12, 918e12, 918e12 / 6, 1.638e12, "Google Cloud TPU v6e page, per chip"),
            "v6e",
        ),
        TpuTarget(
            "tpu5e",
            "TPU v5e",
            Peaks(197e12, 197e12, 197e12 / 6, 0.819e12, "Google Cloud TPU v5e page, per chip"),
            "v5e",
        ),
        LocalTarget("local", "the devices that are here", None),
    )
}
"""The targets by name."""


def target_of(target: str | Target) -> Target:
    """The target of a name; a `Target` is itself.

    Args:
        target: One of `targets`, in any case, or a target of your own.

    Raises:
        ValueError: If the name is unknown.

    Example:
        >>> target_of("h100").kind
        'NVIDIA H100 80GB HBM3'
    """
    if isinstance(target, Target):
        return target
    name = re.sub(r"[\s_\-]", "", target.lower())
    if name not in targets:
        raise ValueError(f"target={target!r} is unknown; choose one of {', '.join(targets)}")
    return targets[name]
