"""The targets by name, with the figures of their data sheets."""

import re
from collections.abc import Mapping

from ._gpu import GpuTarget
from ._local import LocalTarget
from ._target import Peaks, Target
from ._tpu import TpuTarget


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
