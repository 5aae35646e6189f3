"""The targets by name."""

from collections.abc import Mapping

from ...devices.device import canonical, devices
from ...devices.peaks import peaks
from .gpu import GpuTarget
from .local import LocalTarget
from .target import Target
from .tpu import TpuTarget


def _gpu(name: str, **info: int | float) -> GpuTarget:
    description = " ".join(f"{key}: {value}" for key, value in info.items())
    return GpuTarget(name, devices[name].kind, peaks[name], devices[name].compute_capability, description)


def _tpu(name: str, topology: str) -> TpuTarget:
    return TpuTarget(name, devices[name].kind, peaks[name], topology)


def _hopper(name: str, memory: int) -> GpuTarget:
    return _gpu(
        name,
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


def _ada(name: str, cores: int, l2: int, memory: int) -> GpuTarget:
    return _gpu(
        name,
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
        _hopper("h100", 84978434048),
        _hopper("h200", 151397597184),
        _gpu(
            "b200",
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
        _ada("l40s", cores=142, l2=100663296, memory=48305799168),
        _ada("rtx4090", cores=128, l2=75497472, memory=25757220864),
        _tpu("tpu7x", "tpu7x"),
        _tpu("tpu6e", "v6e"),
        _tpu("tpu5e", "v5e"),
        LocalTarget("local", "the devices that are here", None),
    )
}
"""The targets, by the names of their devices."""


def target_of(target: str | Target) -> Target:
    """The target with a name; a `Target` is returned unchanged.

    Args:
        target: One of `targets`, in any case, or another name of its device; or your own target.

    Raises:
        ValueError: If the name is unknown.

    Example:
        >>> target_of("H100").kind, target_of("v6e").name
        ('NVIDIA H100 80GB HBM3', 'tpu6e')
    """
    if isinstance(target, Target):
        return target
    if (name := canonical(target)) not in targets:
        raise ValueError(f"target={target!r} is unknown; choose one of {', '.join(targets)}")
    return targets[name]
