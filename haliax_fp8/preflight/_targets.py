"""The targets by name."""

import re
from collections.abc import Mapping

from .._peaks import peaks
from ._gpu import GpuTarget
from ._local import LocalTarget
from ._target import Target
from ._tpu import TpuTarget


def _gpu(name: str, kind: str, compute_capability: str, **info: int | float) -> GpuTarget:
    description = " ".join(f"{key}: {value}" for key, value in info.items())
    return GpuTarget(name, kind, peaks[name], compute_capability, description)


def _hopper(name: str, kind: str, memory: int) -> GpuTarget:
    return _gpu(
        name,
        kind,
        "9.0",
        core_count=132,
        fpus_per_core=128,
        threads_per_core_limit=2048,
        shared_memory_per_core=233472,
        shared_memory_per_block_optin=232448,
        l2_cache_size=52428800,
        clock_rate_ghz=1.98,
        memory_bandwidth=int(peaks[name].bandwidth),
        device_memory_size=memory,
    )


def _ada(name: str, kind: str, cores: int, l2: int, memory: int) -> GpuTarget:
    return _gpu(
        name,
        kind,
        "8.9",
        core_count=cores,
        fpus_per_core=128,
        threads_per_core_limit=1536,
        shared_memory_per_core=102400,
        shared_memory_per_block_optin=101376,
        l2_cache_size=l2,
        clock_rate_ghz=2.52,
        memory_bandwidth=int(peaks[name].bandwidth),
        device_memory_size=memory,
    )


targets: Mapping[str, Target] = {
    target.name: target
    for target in (
        _hopper("h100", "NVIDIA H100 80GB HBM3", 84978434048),
        _hopper("h200", "NVIDIA H200", 151397597184),
        _gpu(
            "b200",
            "NVIDIA B200",
            "10.0",
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
            cores=142,
            l2=100663296,
            memory=48305799168,
        ),
        _ada(
            "rtx4090",
            "NVIDIA GeForce RTX 4090",
            cores=128,
            l2=75497472,
            memory=25757220864,
        ),
        TpuTarget("tpu7x", "TPU7x", peaks["tpu7x"], "tpu7x"),
        TpuTarget("tpu6e", "TPU v6e", peaks["tpu6e"], "v6e"),
        TpuTarget("tpu5e", "TPU v5e", peaks["tpu5e"], "v5e"),
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
